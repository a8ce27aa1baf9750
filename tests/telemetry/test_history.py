"""Past jobs as a table: the jobs of `load_history`, with any metric, and what stands where one is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from telemetry.history import HISTORY, load_history, load_history_table
from telemetry.schema import JOBS, TABLES
from telemetry.store import Store

METRICS = TABLES["job_metrics"].schema


def rows(schema: pa.Schema, given: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(given, schema=schema)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Jobs 1 to 5: measured, preallocated, known to jobstats only, not summarised, requeued."""
    made = Store.create(tmp_path / "s")
    job = {"submit_s": 1_750_000_000, "start_s": 1_750_000_000, "end_s": 1_750_003_600, "gpu_count": 4, "user": "ann"}
    jobstats = {"jobstats_hbm_peak_mib": 1000.0, "jobstats_hbm_total_mib": 4000.0}
    more: list[dict[str, Any]] = [{}, {}, jobstats, {}, {"state": "REQUEUED"}]
    made.write("jobs", "c", rows(JOBS, [{"job_id": n, **job, **extra} for n, extra in enumerate(more, 1)]))
    key = {"submit_s": 1_750_000_000}
    measured = {"verdict": "ok", "hbm_peak_mib": 20480.0, "hbm_peak_frac": 0.5, "hbm_capacity_mib": 40960.0}
    idle = {"temporal_imbalance": 0.4, "idle_gpus": ["n1:0", "n1:1"], "mean_sm_active_frac": 0.25, "samples": 7}
    metrics = [
        {"job_id": 1, **key, **measured, "is_preallocated": False, **idle},
        {"job_id": 2, **key, **measured, "is_preallocated": True, "idle_gpus": []},
        {"job_id": 3, **key, "verdict": "no telemetry", "idle_gpus": []},
    ]
    made.write("job_metrics", "c", rows(METRICS, metrics))
    return made


def test_the_same_jobs_in_the_same_order(store: Store) -> None:
    frame = load_history(store, "c")
    table = load_history_table(store, "c", HISTORY.names)
    assert table.schema.names == HISTORY.names
    assert table["job_id"].to_pylist() == frame["job_id"].tolist() == [1, 2, 3, 4]
    for name in frame.columns:
        known = frame[name].astype(object).where(frame[name].notna(), None)
        assert table[name].to_pylist() == known.tolist(), name


def test_metrics_and_what_stands_where_they_are_not_known(store: Store) -> None:
    columns = ["hbm_peak_frac", "idle_gpu_count", "idle_gpus", "mean_sm_active_frac", "samples"]
    table = load_history_table(store, "c", columns).to_pydict()
    assert table == {
        "hbm_peak_frac": [0.5, None, 0.25, None],
        "idle_gpu_count": [2, None, None, None],
        "idle_gpus": [["n1:0", "n1:1"], [], [], None],
        "mean_sm_active_frac": [0.25, None, None, None],
        "samples": [7, None, None, None],
    }


def test_of_a_user_who_is_named_nobody_elses_rows_are_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    when = {"submit_s": 1_750_000_000, "start_s": 1_750_000_000, "end_s": 1_750_003_600, "gpu_count": 4, "user": "bob"}
    store.write("jobs", "c", rows(JOBS, [{"job_id": 9, **when}]))
    bobs = {"job_id": 9, "submit_s": 1_750_000_000, "verdict": "ok", "hbm_peak_mib": 1.0}
    store.write("job_metrics", "c", rows(METRICS, [bobs]))
    read, seen = store.read, list[list[int]]()

    def watched(*given: Any, **more: Any) -> pa.Table:
        seen.append((found := read(*given, **more))["job_id"].to_pylist())
        return found

    monkeypatch.setattr(store, "read", watched)
    assert load_history(store, "c", user="bob")["hbm_peak_mib"].tolist() == [1.0]
    assert load_history(store, "c", user="eve").empty
    assert seen == [[9], [9], [], []]


def test_only_one_users_jobs_where_one_is_named(store: Store) -> None:
    assert load_history_table(store, "c", ["job_id"], user="bob").num_rows == 0
    assert load_history_table(store, "c", ["job_id", "user"], user="ann").num_rows == 4
