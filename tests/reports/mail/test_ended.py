"""What the store says of ended runs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from mails import NOW_S, run

from almanac.errors import DamageWarning
from reports.mail.ended import ReportCandidate, ended_since, known_ends, look_up
from telemetry.store.schema import TABLES
from telemetry.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def row(job_id: int, **more: Any) -> dict[str, Any]:
    given = {"submit_s": NOW_S - 900, "start_s": NOW_S - 860, "end_s": NOW_S - 60, "elapsed_s": 800, "user": "ann"}
    return {
        "job_id": job_id,
        **given,
        "gpu_count": 1,
        "state": "COMPLETED",
        "refuses_mail": False,
        "name_key": "a-#",
        **more,
    }


def known(*facts: Any, **more: Any) -> ReportCandidate:
    return ReportCandidate(*facts, name_key="a-#", state="COMPLETED", **more)


def write(store: Store, *rows: dict[str, Any], table: str = "jobs") -> None:
    schema = TABLES[table].schema
    whole = [{name: each.get(name) for name in schema.names} for each in rows]
    store.of("test").write(table, pa.Table.from_pylist(whole, schema=schema))


def test_gpu_runs_that_ended_since_then(store: Store) -> None:
    write(
        store,
        row(1), row(2, end_s=NOW_S - 30, state="FAILED"), row(3, end_s=NOW_S - 61), row(4, gpu_count=0),
        row(5, end_s=None, state="RUNNING"), row(6, state="REQUEUED"), row(7, state="RESIZING"),
        row(8, start_s=None, gpu_count=None, state="CANCELLED"), row(9, user=None),
    )  # fmt: skip
    assert ended_since(store.of("test"), NOW_S - 60) == [run(1), run(2, end_s=NOW_S - 30)]
    assert ended_since(store.of("other"), 0) == []


def test_a_requeued_job_is_over_with_its_last_run(store: Store) -> None:
    first, last = row(1, state="NODE_FAIL"), row(1, submit_s=NOW_S - 50, start_s=NOW_S - 40, end_s=NOW_S - 20)
    write(store, first)
    assert [each.is_last for each in look_up(store.of("test"), [run(1)])] == [True]
    write(store, {**last, "end_s": None, "elapsed_s": None})
    assert [each.is_last for each in look_up(store.of("test"), [run(1)])] == [False]
    write(store, last)
    again = run(1, submit_s=NOW_S - 50, end_s=NOW_S - 20)
    assert [each.is_last for each in look_up(store.of("test"), [run(1), again])] == [False, True]


def test_a_job_of_another_user_with_the_same_number_is_no_later_run(store: Store) -> None:
    write(store, row(1), row(1, submit_s=NOW_S - 50, start_s=NOW_S - 40, end_s=NOW_S - 20, user="bob"))
    assert [each.is_last for each in look_up(store.of("test"), [run(1)])] == [True]


def test_an_array_is_open_while_a_task_of_it_runs_or_pends(store: Store) -> None:
    task = row(11, array_job_id=10, array_task_id=0)
    ours = run(11, array_job_id=10)
    write(store, task, row(20, array_job_id=21, end_s=None))
    assert [each.is_array_open for each in look_up(store.of("test"), [ours])] == [False]
    write(store, row(10, array_job_id=10, start_s=None, end_s=None, state="PENDING"))
    assert [each.is_array_open for each in look_up(store.of("test"), [ours])] == [True]


def test_what_the_store_does_not_have_is_no_last_run(store: Store) -> None:
    write(store, row(1))
    write(store, {"job_id": 1, "submit_s": NOW_S - 900, "verdict": "ok"}, table="job_metrics")
    found = look_up(store.of("test"), [run(2), run(1)])
    assert found == [ReportCandidate(run(2), 0, is_last=False), known(run(1), 800, has_metrics=True)]
    assert look_up(store.of("test"), []) == []


def test_a_comment_that_is_not_known_is_not_taken_for_another(store: Store) -> None:
    write(store, row(1, refuses_mail=None), row(2, refuses_mail=None))
    found = look_up(store.of("test"), [run(1)])
    assert found == [known(run(1), 800, refuses_mail=None, has_comments=False)]
    write(store, row(2, refuses_mail=True))
    assert look_up(store.of("test"), [run(1), run(2)]) == [
        known(run(1), 800, refuses_mail=None), known(run(2), 800, refuses_mail=True)
    ]  # fmt: skip


def test_only_comments_of_jobs_that_ended_lately_show_that_accounting_tells_them(store: Store) -> None:
    write(store, row(1, refuses_mail=None), row(2, refuses_mail=True, end_s=NOW_S - 3600))
    assert look_up(store.of("test"), [run(1)], NOW_S - 3600)[0].has_comments
    assert not look_up(store.of("test"), [run(1)], NOW_S - 3599)[0].has_comments


@pytest.mark.parametrize("submit_s", [NOW_S - 900, NOW_S - 10**8])
def test_a_damaged_file_of_metrics_keeps_no_job_from_being_looked_at(store: Store, submit_s: int) -> None:
    write(store, row(1))
    write(store, {"job_id": 9, "submit_s": submit_s, "verdict": "ok"}, table="job_metrics")
    for path in (store.root / "job_metrics").rglob("*.parquet"):
        path.write_bytes(b"damaged")
    assert ended_since(store.of("test"), 0) == [run(1)]
    with pytest.warns(DamageWarning) if submit_s > NOW_S - 10**6 else contextlib.nullcontext():
        assert look_up(store.of("test"), [run(1)]) == [known(run(1), 800)]


def test_when_jobs_ended_last(store: Store) -> None:
    write(store, row(1), row(1, submit_s=NOW_S - 50, end_s=NOW_S - 20), row(2, end_s=None), row(3, gpu_count=0))
    assert known_ends(store.of("test"), {1, 2, 3, 4}) == {1: NOW_S - 20, 3: NOW_S - 60}
