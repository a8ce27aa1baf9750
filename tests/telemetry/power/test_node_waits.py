"""Waits of pending jobs, as known at each time, and predicted run times: a record cut at any time gives the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from almanac.actions_config import NodeSet
from slurm.queued_job import QueuedJob
from telemetry.power.demand import Accounted, accounted_demand
from telemetry.power.waits import ASKED, ENDED, HISTORY_S, NEWEST, expected_run_s, pending_run_s
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

T0 = 1_790_000_040
"""A full minute."""
SET = NodeSet("gpu", nodes="n[1-3]")
NAMES = ("n1", "n2", "n3")
MINUTES = 30
SHOWN = ("active", "wanted", "queued")


def as_of(rows: list[dict[str, Any]], now_s: int) -> list[dict[str, Any]]:
    """The same record when sacct was read at now_s: what had not begun or ended by then is not known."""
    known = []
    for row in rows:
        if row["submit_s"] >= now_s:
            continue
        is_started = row["start_s"] is not None and row["start_s"] < now_s
        is_ended = row["end_s"] is not None and row["end_s"] <= now_s
        unknown = {} if is_started or is_ended else {"start_s": None, "node_list": None, "gpu_count": None}
        known.append({**row, **unknown, "end_s": row["end_s"] if is_ended else None})
    return known


def demand(store: Store, rows: list[dict[str, Any]], now_s: int, start_s: int, end_s: int) -> Accounted:
    store.of("lab").write("jobs", pa.Table.from_pylist(rows, schema=JOBS))
    store.of("lab").set_watermark("sacct", now_s)
    return accounted_demand(store.of("lab"), SET, NAMES, start_s, end_s)


def compare(early: Accounted, late: Accounted, minutes: int) -> None:
    for name in SHOWN:
        np.testing.assert_array_equal(getattr(early, name)[:minutes], getattr(late, name)[:minutes], name)


def record(number: int, submit: int, wait: int | None, length: int, nodes: str, more: dict[str, Any]) -> dict[str, Any]:
    start = None if wait is None else T0 + submit + wait
    return {
        "job_id": number, "submit_s": T0 + submit, "start_s": start,
        "end_s": T0 + submit + length if start is None else start + length,
        "node_list": None if start is None else nodes, "node_count": nodes.count("-") + 1, "cpu_count": 8,
        "gpu_count": 8, "gpu_count_req": 8, **more,
    }  # fmt: skip


_RECORDS = st.lists(
    st.tuples(
        st.integers(-900, 1500), st.none() | st.integers(0, 900), st.integers(1, 900),
        st.sampled_from(["n1", "n2", "n[1-2]", "n8", "n[2-4]"]),
        st.fixed_dictionaries({
            "user": st.sampled_from(["u", "v"]), "name_key": st.sampled_from(["a", "b", None]),
            "partition": st.sampled_from(["gpu", "cpu", "cpu,gpu", None]),
            "constraints": st.sampled_from([None, "big", "big&fast"]),
            "time_limit_s": st.sampled_from([None, 300, 7200]),
        }),
    ), max_size=12,
)  # fmt: skip


@examples(0.4)
@given(records=_RECORDS, cut=st.integers(1, MINUTES - 1))
def test_what_happens_later_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[Any, ...]], cut: int
) -> None:
    rows = [record(number, *one) for number, one in enumerate(records)]
    rows.append(record(900, -2000, 0, 1000, "n1", {}))
    folder, now_s, end_s = tmp_path_factory.mktemp("cut"), T0 + cut * 60, T0 + MINUTES * 60
    early = demand(Store.create(folder / "early"), as_of(rows, now_s), now_s, T0, end_s)
    late = demand(Store.create(folder / "late"), rows, end_s, T0, end_s)
    compare(early, late, cut)


def test_the_queue_is_nodes_times_predicted_minutes(tmp_path: Path) -> None:
    """Two families: "a" ran for 10 minutes before, "b" for 40. Of the user "w", only the time limit is known."""
    known = {"user": "u", "name_key": "a"}
    rows = [
        record(1, -4000, 0, 600, "n1", known),
        record(2, -3000, 0, 2400, "n1", {**known, "name_key": "b"}),
        record(3, 0, 120, 60, "n[1-2]", known),
        record(4, 60, 180, 60, "n3", {**known, "name_key": "b"}),
        record(5, 60, None, 120, "n3", {**known, "time_limit_s": 120}),
        record(6, 240, 60, 60, "n[1-8]", {**known, "node_count": 8}),
    ]
    found = demand(Store.create(tmp_path / "store"), rows, T0 + 3600, T0, T0 + 360)
    assert found.wanted.tolist() == [2, 3, 2, 1, 3, 0]
    most = 3 * (10 + 1) / 2  # all nodes of the set, for the median of 10 minutes and 1
    assert found.queued.tolist() == [20, 20 + 40 + 2, 40 + 2, 40, most, 0]


def test_jobs_fill_nodes_by_their_parts_of_gpus(tmp_path: Path) -> None:
    """As for pending jobs now: a node has as many as one run had of them."""
    half, whole = ({"gpu_count": 0, "gpu_count_req": 0, "cpu_count": 1, "gpu_share_count": n} for n in (4, 8))
    ran = [
        record(9, -5000, 0, 100, "n1", {}),
        record(1, -4000, 0, 4001, "n1", whole),
        record(2, -3000, 0, 3001, "n2", {"gpu_count": 0, "gpu_count_req": 0}),
    ]
    for number, (more, wanted) in enumerate(((half, 1), (whole, 2))):
        rows = [*ran, *(record(n, 0, 120, 60, "n3", more) for n in (3, 4))]
        assert (
            demand(Store.create(tmp_path / str(number)), rows, T0 + 3600, T0, T0 + 120).wanted.tolist() == [wanted] * 2
        )


def test_of_a_queue_with_a_job_of_unknown_length_nothing_is_said(tmp_path: Path) -> None:
    rows = [record(1, 0, 120, 60, "n1", {}), record(2, 60, 180, 60, "n2", {})]
    rows.append(record(3, -1000, 0, 3000, "n3", {}))
    found = demand(Store.create(tmp_path / "store"), rows, T0 + 3600, T0 - 60, T0 + 300)
    store = Store.open(tmp_path / "store")
    assert np.isnan(found.queued[:5]).all() and found.wanted[4:].tolist() == [1, 0], "unknown is not zero"
    assert found.queued[5] == 0
    store.of("lab").write("jobs", pa.Table.from_pylist([record(4, -9000, 0, 60, "n8", {})], schema=JOBS))
    again = accounted_demand(store.of("lab"), SET, NAMES, T0 - 60, T0 + 300)
    assert again.queued.tolist() == [0, 1, 2, 1, 1, 0], "a run on other nodes says something, too"


NOW = 1_790_000_000


def ended(*rows: tuple[str, str, int, int, int]) -> pa.Table:
    """(user, name key, GPUs, end before NOW, run time)"""
    values = [(user, key, gpus, NOW - ago, run) for user, key, gpus, ago, run in rows]
    return pa.Table.from_pylist([dict(zip(ENDED.names, row, strict=True)) for row in values], schema=ENDED)


def asked(user: str = "u", key: str = "a", gpus: int = 4, submit_s: int = NOW, limit_s: int = -1) -> pa.Table:
    return pa.Table.from_arrays(
        [
            pa.array([value], field.type)
            for value, field in zip((user, key, gpus, submit_s, limit_s), ASKED, strict=True)
        ],
        schema=ASKED,
    )


def one(wanted: pa.Table, past: pa.Table) -> float:
    [found] = expected_run_s(wanted, past).tolist()
    return float(found)


def test_the_family_comes_first_then_the_user_then_everybody() -> None:
    past = ended(("u", "a", 4, 10, 100), ("u", "a", 8, 10, 500), ("v", "a", 4, 10, 9000), ("u", "a", 4, 20, 300))
    assert one(asked(), past) == 200
    assert one(asked(gpus=1), past) == 300, "of the user's three runs"
    assert one(asked(user="w"), past) == 400, "of all four runs"


def test_the_newest_runs_count_and_old_ones_do_not() -> None:
    runs = [("u", "a", 4, 10 + n, 60) for n in range(NEWEST)] + [("u", "a", 4, 5000, 7000)] * NEWEST
    assert one(asked(), ended(*runs)) == 60
    assert one(asked(limit_s=30), ended(*runs)) == 30, "never above the time limit"
    assert one(asked(limit_s=600), ended(("u", "a", 4, HISTORY_S + 1, 60))) == 600
    assert math.isnan(one(asked(), ended())), "unknown is not zero"


def test_what_ends_with_the_submission_or_later_is_not_seen() -> None:
    assert one(asked(limit_s=600), ended(("u", "a", 4, 0, 60), ("u", "a", 4, -5, 60))) == 600
    assert one(asked(limit_s=600), ended(("u", "a", 4, 1, 60))) == 60


_RUN = st.tuples(
    st.sampled_from(["u", "v"]), st.sampled_from(["a", "b", ""]), st.integers(0, 2), st.integers(-50, 50),
    st.integers(1, 99),
)  # fmt: skip


@examples(0.8)
@given(st.lists(_RUN, max_size=30), st.sampled_from(["u", "v", "w"]), st.sampled_from(["a", "c"]))
def test_against_a_search_by_hand(rows: list[tuple[str, str, int, int, int]], user: str, key: str) -> None:
    past = sorted((row for row in rows if row[3] > 0), key=lambda row: -row[3])
    family = [row[4] for row in past if row[:3] == (user, key, 1)]
    own = [row[4] for row in past if row[0] == user]
    found = one(asked(user, key, 1), ended(*rows))
    expected = family or own or [row[4] for row in past]
    if not expected:
        assert math.isnan(found)
    elif len({row[3] for row in past}) == len(past):  # of runs that end at once any may be the newest
        assert found == np.median(expected[-(NEWEST if family or own else 64) :])


def test_odd_times_and_names_give_a_number_or_nothing() -> None:
    odd = ended(("u\n\x1b[31m", "'; DROP TABLE jobs", 4, NOW - 2**40, 60), ("", "", 0, NOW + 5, 9))
    found = expected_run_s(pa.concat_tables([asked("u\n\x1b[31m", submit_s=2**50), asked("", submit_s=-7)]), odd)
    assert len(found) == 2


def pending(job_id: int, **more: Any) -> QueuedJob:
    return QueuedJob(**{"job_id": job_id, "address": str(job_id), "submit_s": NOW - 60, "user": "u", "name": "train-7",
                         "gpu_count": 4, **more})  # fmt: skip


def test_pending_jobs_are_predicted_from_the_store(store: Store) -> None:
    ran = {"user": "u", "name_key": "train-#", "gpu_count": 4, "node_list": "n1", "job_id": 1}
    rows = [
        {**ran, "submit_s": NOW - 900, "start_s": NOW - 900, "end_s": NOW - 500},
        {**ran, "submit_s": NOW - 899, "start_s": NOW - 899, "end_s": NOW - 10, "job_id": 2},
        {**ran, "submit_s": NOW - 899, "start_s": NOW - 70, "end_s": NOW - 65, "job_id": 3, "node_list": None},
    ]
    assert pending_run_s(store.of("lab"), [pending(7)], NOW) == {}
    store.of("lab").write("jobs", pa.Table.from_pylist(rows, schema=JOBS))
    jobs = [
        pending(7),
        pending(8, submit_s=NOW - 600, time_limit_s=1200),
        pending(9, time_limit_s=60),
        pending(10, user="x"),
    ]
    assert pending_run_s(store.of("lab"), jobs, NOW) == {7: 400, 8: 1200, 9: 60, 10: 400}
    assert pending_run_s(store.of("lab"), [], NOW) == {}
    assert pending_run_s(store.of("lab"), [pending(7, user="\udcff", name="\udcff\n$(x)")], NOW) == {7: 400}
