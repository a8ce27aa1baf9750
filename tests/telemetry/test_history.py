"""Past jobs as a table: the jobs of `load_history`, with any metric, and what stands where one is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from almanac.errors import DamageWarning
from reports.job.evidence import unasked_gpus
from telemetry.history import HISTORY, UNASKED_SQL, load_history, load_history_table
from telemetry.store.partitions import write_sealed
from telemetry.store.schema import JOBS, TABLES
from telemetry.store.store import Store

METRICS = TABLES["job_metrics"].schema
RAN = {"submit_s": 1_750_000_000, "start_s": 1_750_000_000, "end_s": 1_750_003_600}
KEY = {"submit_s": 1_750_000_000}
LATER_S = 1_750_000_000 + 86_400
BOBS = {"job_id": 9, "submit_s": LATER_S, "start_s": LATER_S, "end_s": LATER_S + 9, "gpu_count": 4, "user": "bob"}


def rows(schema: pa.Schema, given: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(given, schema=schema)


def write_jobs(store: Store, *given: dict[str, Any]) -> None:
    store.of("c").write("jobs", rows(JOBS, list(given)))


def write_metrics(store: Store, *given: dict[str, Any]) -> None:
    store.of("c").write("job_metrics", rows(METRICS, list(given)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Jobs 1 to 5: measured, preallocated, known to jobstats only, not summarised, requeued."""
    made = Store.create(tmp_path / "s")
    job = {**RAN, "gpu_count": 4, "user": "ann"}
    jobstats = {"jobstats_hbm_peak_mib": 1000.0, "jobstats_hbm_total_mib": 4000.0}
    more: list[dict[str, Any]] = [{}, {}, jobstats, {}, {"state": "REQUEUED"}]
    write_jobs(made, *({"job_id": n, **job, **extra} for n, extra in enumerate(more, 1)))
    measured = {"verdict": "ok", "hbm_peak_mib": 20480.0, "hbm_peak_frac": 0.5, "hbm_capacity_mib": 40960.0}
    idle = {"temporal_imbalance": 0.4, "idle_gpus": ["n1:0", "n1:1"], "mean_sm_active_frac": 0.25, "samples": 7}
    write_metrics(
        made,
        {"job_id": 1, **KEY, **measured, "is_preallocated": False, **idle},
        {"job_id": 2, **KEY, **measured, "is_preallocated": True, "idle_gpus": []},
        {"job_id": 3, **KEY, "verdict": "no telemetry", "idle_gpus": []},
    )
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
    tmp_path: Path, given: Any, asked: Any, nodes: Any, nodes_asked: Any, unasked: Any
) -> None:
    """With more nodes than the fewest asked for come the GPUs asked for on each of them."""
    assert unasked_gpus(given, asked, nodes, nodes_asked) == unasked
    row = {"gpu_count": given, "gpu_count_req": asked, "node_count": nodes, "node_count_req": nodes_asked}
    with Store.create(tmp_path / "s").of("c").connect() as db:
        db.register("jobs", rows(JOBS, [{"job_id": 1, "submit_s": 1, **row}]))
        assert db.sql(f"SELECT {UNASKED_SQL} FROM jobs").fetchall() == [(unasked,)]


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
    write_jobs(store, *({"job_id": n, **KEY, "jobstats_gpu_util_pct": given_pct} for n in (1, 3)))
    measured = {"job_id": 1, **KEY, "verdict": "ok", "hbm_peak_mib": 20480.0, "mean_gpu_util_pct": 80.0}
    write_metrics(store, measured)
    names = ["job_id", "mean_gpu_util_pct", "hbm_peak_mib", "hbm_evidence", "hbm_peak_frac"]
    first, _, third, _ = load_history_table(store.of("c"), names).to_pylist()
    assert (first["mean_gpu_util_pct"], first["hbm_evidence"]) == (80.0, "telemetry")
    frac = None if peak_mib is None else 0.25
    assert list(third.values()) == [3, util_pct, peak_mib, evidence, frac]


@pytest.mark.parametrize(
    ("least_mib", "peak_mib", "util_pct", "capacity_mib", "evidence"),
    [
        (2000.0, 2000.0, 90.0, 40_960.0, "sacct"), (500.0, 2000.0, 90.0, 40_960.0, "sacct"),
        (40_000.0, 40_000.0, 90.0, 40_960.0, "unclear"),  # of one GPU, and a share that TensorFlow reserves
        (10_000.0, 40_000.0, 90.0, 40_960.0, "none"),  # no GPU may have had so much
        (50_000.0, 50_000.0, 90.0, 40_960.0, "none"),  # more than a GPU holds
        (2000.0, 2000.0, 0.0, 40_960.0, "none"), (2000.0, 2000.0, None, 40_960.0, "none"),  # perhaps never used
        (2000.0, 2000.0, 90.0, None, "none"), (None, None, None, 40_960.0, "none"),
    ],
)  # fmt: skip
def test_slurms_own_bound_stands_in_for_telemetry(
    store: Store, least_mib: Any, peak_mib: Any, util_pct: Any, capacity_mib: Any, evidence: str
) -> None:
    figures = {"sacct_hbm_least_mib": least_mib, "sacct_hbm_peak_mib": peak_mib, "sacct_gpu_util_pct": util_pct}
    known = {**RAN, **figures, "gpu_memory_mib": capacity_mib, "gpu_count": 4}
    write_jobs(store, {"job_id": 1, **known}, {"job_id": 4, **known})
    write_metrics(store, {"job_id": 4, **KEY, "verdict": "no telemetry", "idle_gpus": []})
    names = ["job_id", "hbm_peak_mib", "hbm_evidence", "mean_gpu_util_pct"]
    first, *_, fourth = load_history_table(store.of("c"), names).to_pylist()
    assert first["hbm_evidence"] == "telemetry" and first["hbm_peak_mib"] == 20480
    peak = None if evidence == "none" else peak_mib
    assert list(fourth.values()) == [4, peak, evidence, None], "Slurm has no mean of the utilization"


def test_jobs_with_parts_of_a_gpu_are_listed_and_are_no_evidence(store: Store) -> None:
    write_jobs(store, {"job_id": 8, **RAN, "gpu_count": 0, "gpu_share_count": 2, "user": "ann"})
    names = ["job_id", "gpu_count", "gpu_share_count"]
    assert 8 not in load_history(store.of("c"))["job_id"].tolist()
    assert 8 not in load_history_table(store.of("c"), names)["job_id"].to_pylist()
    for user in (None, "ann"):
        found = load_history_table(store.of("c"), names, user=user, has_parts=True).to_pylist()
        assert {"job_id": 8, "gpu_count": 0, "gpu_share_count": 2} in found and len(found) == 5


def test_a_missing_tier_is_none_beside_known_ones(tmp_path: Path) -> None:
    job = {"submit_s": 1_750_000_000, "start_s": 1_750_000_000, "gpu_count": 4, "user": "ann"}
    made = Store.create(tmp_path / "s")
    write_jobs(made, {"job_id": 1, **job, "tier": "hbm40g"}, {"job_id": 2, **job, "end_s": None})
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
    write_jobs(store, {"job_id": 9, **RAN, "gpu_count": 4, "user": "bob"})
    write_metrics(store, {"job_id": 9, **KEY, "verdict": "ok", "hbm_peak_mib": 1.0})
    bound = store.of("c")
    read, seen = bound.read, list[list[int]]()

    def watched(*given: Any, **more: Any) -> pa.Table:
        seen.append((found := read(*given, **more))["job_id"].to_pylist())
        return found

    monkeypatch.setattr(bound, "read", watched)
    assert load_history(bound, user="bob")["hbm_peak_mib"].tolist() == [1.0]
    assert load_history(bound, user="eve").empty
    assert seen == [[9], [9], [], []]


def test_some_users_jobs_come_with_the_recent_ones_of_all(store: Store) -> None:
    late = {"submit_s": RAN["submit_s"] + 500, "start_s": RAN["start_s"] + 500, "end_s": RAN["end_s"] + 500}
    write_jobs(store, *({"job_id": n, **RAN, **more, "gpu_count": 4, "user": user}
                        for n, user, more in ((7, "bob", {}), (8, "bob", late), (9, "eve", {}))))  # fmt: skip
    recent = load_history(store.of("c"), RAN["submit_s"] + 500, also={"ann", "eve"})
    assert recent["job_id"].tolist() == [1, 2, 3, 4, 9, 8]
    assert load_history(store.of("c"), RAN["submit_s"] + 500)["job_id"].tolist() == [8]


def test_of_a_named_user_only_the_days_of_their_jobs_are_opened(store: Store) -> None:
    """A file that cannot be read shows that it is not opened: one of a day on which the user submitted nothing."""
    write_jobs(store, BOBS)
    write_metrics(store, {"job_id": 9, "submit_s": LATER_S, "verdict": "ok", "hbm_peak_mib": 1.0})
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
    assert found["submit_s"].tolist() == [1_750_000_000] * 4


def test_of_jobs_that_are_named_no_other_day_is_opened(store: Store) -> None:
    write_jobs(store, BOBS)
    store.of("c").files("jobs")[0].write_bytes(b"no Parquet")
    among = {"job_id": pa.array([9]), "submit_s": pa.array([LATER_S])}
    assert load_history_table(store.of("c"), ["job_id"], among=among).to_pylist() == [{"job_id": 9}]
    with pytest.warns(DamageWarning):
        load_history_table(store.of("c"), ["job_id"])


@pytest.mark.parametrize("user", [None, "ann"])
def test_columns_of_jobs_need_no_metrics_file(store: Store, user: str | None) -> None:
    whole = load_history_table(store.of("c"), HISTORY.names, user=user)
    for path in store.of("c").files("job_metrics"):
        path.write_bytes(b"damaged")
    of_jobs_too = {"hbm_peak_mib", "hbm_capacity_mib", "hbm_evidence", "mean_gpu_util_pct", "idle_gpu_count"}
    needs_metrics = of_jobs_too | (set(METRICS.names) & set(HISTORY.names) - {"job_id", "submit_s"})
    others = [name for name in HISTORY.names if name not in needs_metrics]
    again = Store.open(store.root).of("c")  # which names damage again
    assert load_history_table(again, others, user=user).select(others).equals(whole.select(others))
    for name in of_jobs_too:
        with pytest.raises(DamageWarning):  # which pytest raises
            load_history_table(Store.open(store.root).of("c"), [name], user=user)


def test_counts_are_what_was_asked_for_and_else_what_was_allocated(tmp_path: Path) -> None:
    """--exclusive allocates whole nodes, and --gpus as many nodes as it takes: a request knows of neither."""
    allocated = {"node_count": 2, "cpu_count": 128, "gpu_count": 8}
    asked = {"node_count_req": 1, "cpu_count_req": 4, "gpu_count_req": 3}
    more: list[dict[str, Any]] = [asked, {}, {"gpu_count_req": 0}]
    made = Store.create(tmp_path / "s")
    write_jobs(made, *({"job_id": n, **RAN, **allocated, **each} for n, each in enumerate(more)))
    found = load_history(made.of("c"))[["node_count", "cpu_count", "gpu_count"]].to_numpy().tolist()
    assert found == [[1, 4, 3], [2, 128, 8], [2, 128, 8]]


def test_of_several_partitions_all_that_were_asked_for_count(tmp_path: Path) -> None:
    more: list[dict[str, Any]] = [{"partition_req": "a40,a100"}, {}]
    made = Store.create(tmp_path / "s")
    write_jobs(made, *({"job_id": n, "partition": "a40", "gpu_count": 1, **RAN, **each} for n, each in enumerate(more)))
    assert load_history(made.of("c"))["partition"].tolist() == ["a40,a100", "a40"]


def test_a_store_of_before_the_requested_counts_is_read_and_written(store: Store) -> None:
    (path,) = store.root.glob("jobs/**/*.parquet")
    newer = ["cpu_count_req", "node_count_req", "partition_req", "gpu_type_req", "script_key", "is_packed"]
    rows_before = pq.read_table(path, partitioning=None).drop_columns(newer).replace_schema_metadata()
    with path.open("w+b") as out:
        write_sealed(rows_before, out)
    assert load_history(store.of("c"))["gpu_count"].tolist() == [4, 4, 4, 4]
    assert load_history(store.of("c"))[["script_key", "is_packed"]].isna().all().all()
    write_jobs(store, {"job_id": 1, **KEY, "cpu_count_req": 7, "node_count_req": 2, "is_packed": True})
    first = load_history(store.of("c")).iloc[0]
    assert (first["user"], first["cpu_count"], first["node_count"], first["is_packed"]) == ("ann", 7, 2, True)
    assert load_history(store.of("c"))["is_packed"].isna().tolist() == [False, True, True, True]


def test_what_runs_and_what_waits_comes_where_it_is_asked_for(store: Store) -> None:
    job = {"submit_s": 1_750_000_100, "gpu_count_req": 4, "user": "ann"}
    write_jobs(
        store,
        {"job_id": 6, **job, "state": "PENDING"},
        {"job_id": 7, **job, "start_s": 1_750_000_200, "state": "RUNNING"},
        {"job_id": 8, **job, "end_s": 1_750_000_300, "state": "CANCELLED"},
    )
    frame = load_history(store.of("c"), running=True)
    assert sorted(frame["job_id"]) == [1, 2, 3, 4, 5, 6, 7], "what was canceled while it waited is gone"
    assert frame.set_index("job_id")["start_s"].isna().to_dict()[6]
    assert load_history(store.of("c"))["job_id"].tolist() == [1, 2, 3, 4]


def test_the_highest_sample_of_a_reservation_is_kept(store: Store) -> None:
    high = {"hbm_peak_mib": 30000.0, "hbm_max_mib": 30000.0}
    write_metrics(store, {"job_id": 2, **KEY, "verdict": "ok", **high, "is_preallocated": True, "idle_gpus": []})
    reserved = load_history(store.of("c")).set_index("job_id").loc[2]
    assert (reserved["hbm_max_mib"], reserved["hbm_evidence"]) == (30000.0, "preallocated")
    assert reserved["hbm_peak_mib"] != reserved["hbm_peak_mib"]
