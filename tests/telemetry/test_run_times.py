"""Predicted run times: of past runs only, by family, user, and everybody."""

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

from telemetry.run_times import ASKED, ENDED, HISTORY_S, NEWEST, expected_run_s, pending_run_s
from telemetry.slurm.backend import PendingJob
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

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


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def pending(job_id: int, **more: Any) -> PendingJob:
    return PendingJob(**{"job_id": job_id, "address": str(job_id), "submit_s": NOW - 60, "user": "u", "name": "train-7",
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
