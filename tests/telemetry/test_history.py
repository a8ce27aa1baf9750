"""Past jobs as a table: the jobs of `load_history`, with any metric, and what stands where one is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from almanac.errors import DamageWarning
from telemetry.history import HISTORY, load_history, load_history_table
from telemetry.store.schema import JOBS, TABLES
from telemetry.store.store import Store
from telemetry.unasked_gpus import SQL, unasked_gpus

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
    made.of("c").write("jobs", rows(JOBS, [{"job_id": n, **job, **extra} for n, extra in enumerate(more, 1)]))
    key = {"submit_s": 1_750_000_000}
    measured = {"verdict": "ok", "hbm_peak_mib": 20480.0, "hbm_peak_frac": 0.5, "hbm_capacity_mib": 40960.0}
    idle = {"temporal_imbalance": 0.4, "idle_gpus": ["n1:0", "n1:1"], "mean_sm_active_frac": 0.25, "samples": 7}
    metrics = [
        {"job_id": 1, **key, **measured, "is_preallocated": False, **idle},
        {"job_id": 2, **key, **measured, "is_preallocated": True, "idle_gpus": []},
        {"job_id": 3, **key, "verdict": "no telemetry", "idle_gpus": []},
    ]
    made.of("c").write("job_metrics", rows(METRICS, metrics))
    return made


@pytest.mark.parametrize(
    ("given", "asked", "nodes", "nodes_asked", "unasked"),
    [
        (4, 0, 1, 1, 4), (4, 1, 1, 1, 3), (4, 4, 1, 1, 0), (16, 0, 4, 4, 16), (4, None, 1, 1, None), (0, 0, 1, 1, None),
        (None, 0, 1, 1, None), (16, 4, 4, 1, 0), (3, 3, 2, 1, 0), (16, 2, 4, 2, 12), (2, 4, 1, 1, 0),
        (4, 1, None, None, 3),
    ],
)  # fmt: skip
def test_gpus_that_a_job_did_not_ask_for(
    tmp_path: Path,
    given: int | None,
    asked: int | None,
    nodes: int | None,
    nodes_asked: int | None,
    unasked: int | None,
) -> None:
    """With more nodes than the fewest asked for come the GPUs asked for on each of them."""
    assert unasked_gpus(given, asked, nodes, nodes_asked) == unasked
    row = {"gpu_count": given, "gpu_count_req": asked, "node_count": nodes, "node_count_req": nodes_asked}
    with Store.create(tmp_path / "s").of("c").connect() as db:
        db.register("jobs", rows(JOBS, [{"job_id": 1, "submit_s": 1, **row}]))
        assert db.sql(f"SELECT {SQL} FROM jobs").fetchall() == [(unasked,)]


def test_the_same_jobs_in_the_same_order(store: Store) -> None:
    frame = load_history(store.of("c"))
    table = load_history_table(store.of("c"), HISTORY.names)
    assert table.schema.names == HISTORY.names
    assert table["job_id"].to_pylist() == frame["job_id"].tolist() == [1, 2, 3, 4]
    for name in frame.columns:
        known = frame[name].astype(object).where(frame[name].notna(), None)
        assert table[name].to_pylist() == known.tolist(), name


@pytest.mark.parametrize(
    ("given_pct", "util_pct", "peak_mib", "evidence"),
    [(62.5, 62.5, 1000.0, "jobstats"), (None, None, 1000.0, "jobstats"), (0.0, 0.0, None, "none")],
)
def test_jobstats_utilization_stands_in_for_telemetry_and_unused_gpus_show_no_need(
    store: Store, given_pct: float | None, util_pct: float | None, peak_mib: float | None, evidence: str
) -> None:
    key = {"submit_s": 1_750_000_000}
    store.of("c").write("jobs", rows(JOBS, [{"job_id": n, **key, "jobstats_gpu_util_pct": given_pct} for n in (1, 3)]))
    measured = {"job_id": 1, **key, "verdict": "ok", "hbm_peak_mib": 20480.0, "mean_gpu_util_pct": 80.0}
    store.of("c").write("job_metrics", rows(METRICS, [measured]))
    names = ["job_id", "mean_gpu_util_pct", "hbm_peak_mib", "hbm_evidence", "hbm_peak_frac"]
    first, _, third, _ = load_history_table(store.of("c"), names).to_pylist()
    assert (first["mean_gpu_util_pct"], first["hbm_evidence"]) == (80.0, "telemetry")
    frac = None if peak_mib is None else 0.25
    assert list(third.values()) == [3, util_pct, peak_mib, evidence, frac]


def test_a_missing_tier_is_none_beside_known_ones(tmp_path: Path) -> None:
    job = {"submit_s": 1_750_000_000, "start_s": 1_750_000_000, "gpu_count": 4, "user": "ann"}
    made = Store.create(tmp_path / "s")
    made.of("c").write(
        "jobs", rows(JOBS, [{"job_id": 1, **job, "tier": "hbm40g"}, {"job_id": 2, **job, "end_s": None}])
    )
    for user in (None, "ann"):
        frame = load_history(made.of("c"), user=user, running=True)
        assert frame["tier"].tolist() == ["hbm40g", None]
        assert frame["end_s"].dtype == frame["start_s"].dtype == "float64"
    assert load_history(made.of("c")).empty and load_history(made.of("c")).columns.tolist() == frame.columns.tolist()


def test_metrics_and_what_stands_where_they_are_not_known(store: Store) -> None:
    columns = ["hbm_peak_frac", "idle_gpu_count", "idle_gpus", "mean_sm_active_frac", "samples"]
    table = load_history_table(store.of("c"), columns).to_pydict()
    assert table == {
        "hbm_peak_frac": [0.5, None, 0.25, None],
        "idle_gpu_count": [2, None, None, None],
        "idle_gpus": [["n1:0", "n1:1"], [], [], None],
        "mean_sm_active_frac": [0.25, None, None, None],
        "samples": [7, None, None, None],
    }


def test_of_a_user_who_is_named_nobody_elses_rows_are_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    when = {"submit_s": 1_750_000_000, "start_s": 1_750_000_000, "end_s": 1_750_003_600, "gpu_count": 4, "user": "bob"}
    store.of("c").write("jobs", rows(JOBS, [{"job_id": 9, **when}]))
    bobs = {"job_id": 9, "submit_s": 1_750_000_000, "verdict": "ok", "hbm_peak_mib": 1.0}
    store.of("c").write("job_metrics", rows(METRICS, [bobs]))
    bound = store.of("c")
    read, seen = bound.read, list[list[int]]()

    def watched(*given: Any, **more: Any) -> pa.Table:
        seen.append((found := read(*given, **more))["job_id"].to_pylist())
        return found

    monkeypatch.setattr(bound, "read", watched)
    assert load_history(bound, user="bob")["hbm_peak_mib"].tolist() == [1.0]
    assert load_history(bound, user="eve").empty
    assert seen == [[9], [9], [], []]


def test_of_a_named_user_only_the_days_of_their_jobs_are_opened(store: Store) -> None:
    """What cannot be read shows what is opened: a file of measurements of a day on which the user submitted nothing."""
    day, later = 1_750_000_000, 1_750_000_000 + 86_400
    bobs = {"job_id": 9, "submit_s": later, "start_s": later, "end_s": later + 9, "gpu_count": 4, "user": "bob"}
    store.of("c").write("jobs", rows(JOBS, [bobs]))
    store.of("c").write(
        "job_metrics", rows(METRICS, [{"job_id": 9, "submit_s": later, "verdict": "ok", "hbm_peak_mib": 1.0}])
    )
    anns, other = store.of("c").files("job_metrics")
    kept = anns.read_bytes()
    anns.write_bytes(b"no Parquet")
    assert load_history(store.of("c"), user="bob")["hbm_peak_mib"].tolist() == [1.0]
    with pytest.warns(DamageWarning, match=str(anns)):
        load_history(store.of("c"), user="ann")
    anns.write_bytes(kept)
    other.write_bytes(b"no Parquet")
    found = load_history(store.of("c"), user="ann")
    assert found["hbm_evidence"].tolist() == ["telemetry", "preallocated", "jobstats", "none"]
    assert found["submit_s"].tolist() == [day] * 4


def test_of_jobs_that_are_named_no_other_day_is_opened(store: Store) -> None:
    later = 1_750_000_000 + 86_400
    job = {"job_id": 9, "submit_s": later, "start_s": later, "end_s": later + 9, "gpu_count": 4, "user": "bob"}
    store.of("c").write("jobs", rows(JOBS, [job]))
    store.of("c").files("jobs")[0].write_bytes(b"no Parquet")
    among = {"job_id": pa.array([9]), "submit_s": pa.array([later])}
    assert load_history_table(store.of("c"), ["job_id", "user"], among=among).to_pylist() == [
        {"job_id": 9, "user": "bob"}
    ]
    with pytest.warns(DamageWarning):
        load_history_table(store.of("c"), ["job_id"])


@pytest.mark.parametrize("user", [None, "ann"])
def test_columns_of_jobs_need_no_metrics_file(store: Store, user: str | None) -> None:
    whole = load_history_table(store.of("c"), HISTORY.names, user=user)
    for path in store.of("c").files("job_metrics"):
        path.write_bytes(b"damaged")
    needs_metrics = {name for name in HISTORY.names if not _is_read(store, name, user, whole)}
    of_jobs_too = {"hbm_peak_mib", "hbm_capacity_mib", "hbm_evidence", "mean_gpu_util_pct", "idle_gpu_count"}
    assert needs_metrics == of_jobs_too | (set(METRICS.names) & set(HISTORY.names) - {"job_id", "submit_s"})


def _is_read(store: Store, name: str, user: str | None, whole: pa.Table) -> bool:
    try:
        again = Store.open(store.root).of("c")  # which names damage again
        assert load_history_table(again, [name], user=user)[name].equals(whole[name])
    except DamageWarning:  # which pytest raises
        return False
    return True


def test_only_one_users_jobs_where_one_is_named(store: Store) -> None:
    assert load_history_table(store.of("c"), ["job_id"], user="bob").num_rows == 0
    assert load_history_table(store.of("c"), ["job_id", "user"], user="ann").num_rows == 4


def test_counts_are_what_was_asked_for_and_else_what_was_allocated(tmp_path: Path) -> None:
    """--exclusive allocates whole nodes, and --gpus as many nodes as it takes: a request knows of neither."""
    times = {"submit_s": 1_750_000_000, "start_s": 1_750_000_000, "end_s": 1_750_003_600}
    allocated = {"node_count": 2, "cpu_count": 128, "gpu_count": 8}
    asked = {"node_count_req": 1, "cpu_count_req": 4, "gpu_count_req": 3}
    more: list[dict[str, Any]] = [asked, {}, {"gpu_count_req": 0}]
    made = Store.create(tmp_path / "s")
    made.of("c").write("jobs", rows(JOBS, [{"job_id": n, **times, **allocated, **each} for n, each in enumerate(more)]))
    found = load_history(made.of("c"))[["node_count", "cpu_count", "gpu_count"]].to_numpy().tolist()
    assert found == [[1, 4, 3], [2, 128, 8], [2, 128, 8]]


def test_of_several_partitions_all_that_were_asked_for_count(tmp_path: Path) -> None:
    times = {"submit_s": 1_750_000_000, "start_s": 1_750_000_000, "end_s": 1_750_003_600, "gpu_count": 1}
    more: list[dict[str, Any]] = [{"partition_req": "a40,a100"}, {}]
    made = Store.create(tmp_path / "s")
    made.of("c").write(
        "jobs", rows(JOBS, [{"job_id": n, "partition": "a40", **times, **m} for n, m in enumerate(more)])
    )
    assert load_history(made.of("c"))["partition"].tolist() == ["a40,a100", "a40"]


def test_a_store_of_before_the_requested_counts_is_read_and_written(store: Store) -> None:
    (path,) = store.root.glob("jobs/**/*.parquet")
    newer = ["cpu_count_req", "node_count_req", "partition_req", "gpu_type_req", "script_key", "is_packed"]
    pq.write_table(pq.read_table(path, partitioning=None).drop_columns(newer), path)
    assert load_history(store.of("c"))["gpu_count"].tolist() == [4, 4, 4, 4]
    assert load_history(store.of("c"))[["script_key", "is_packed"]].isna().all().all()
    key = {"job_id": 1, "submit_s": 1_750_000_000}
    store.of("c").write("jobs", rows(JOBS, [{**key, "cpu_count_req": 7, "node_count_req": 2, "is_packed": True}]))
    first = load_history(store.of("c")).iloc[0]
    assert (first["user"], first["cpu_count"], first["node_count"], first["is_packed"]) == ("ann", 7, 2, True)
    assert load_history(store.of("c"))["is_packed"].isna().tolist() == [False, True, True, True]


def test_what_runs_and_what_waits_comes_where_it_is_asked_for(store: Store) -> None:
    job = {"submit_s": 1_750_000_100, "gpu_count_req": 4, "user": "ann"}
    running = {"start_s": 1_750_000_200, "state": "RUNNING"}
    canceled = {"end_s": 1_750_000_300, "state": "CANCELLED"}
    more: list[dict[str, Any]] = [{"state": "PENDING"}, running, canceled]
    store.of("c").write("jobs", rows(JOBS, [{"job_id": n, **job, **extra} for n, extra in enumerate(more, 6)]))
    frame = load_history(store.of("c"), running=True)
    assert sorted(frame["job_id"]) == [1, 2, 3, 4, 5, 6, 7], "what was canceled while it waited is gone"
    assert frame.set_index("job_id")["start_s"].isna().to_dict()[6]
    assert load_history(store.of("c"))["job_id"].tolist() == [1, 2, 3, 4]


def test_the_highest_sample_of_a_reservation_is_kept(store: Store) -> None:
    key = {"job_id": 2, "submit_s": 1_750_000_000, "verdict": "ok", "hbm_peak_mib": 30000.0, "hbm_max_mib": 30000.0}
    store.of("c").write("job_metrics", rows(METRICS, [{**key, "is_preallocated": True, "idle_gpus": []}]))
    reserved = load_history(store.of("c")).set_index("job_id").loc[2]
    assert (reserved["hbm_max_mib"], reserved["hbm_evidence"]) == (30000.0, "preallocated")
    assert reserved["hbm_peak_mib"] != reserved["hbm_peak_mib"]
