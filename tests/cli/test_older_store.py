"""A store whose files an older program wrote: they lack the columns that came since."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import CommandLine

from telemetry.store.partitions import write_sealed
from telemetry.store.store import Store

NEWER = {
    "telemetry": ["sm_clock_mhz"],
    "jobs": [
        "framework", "sacct_hbm_peak_mib", "sacct_hbm_least_mib", "sacct_gpu_util_pct", "gpu_memory_mib",
    ],
    "job_metrics": ["mean_sm_clock_mhz", "coverage_sm_clock_mhz", "mfu_frac"],
    "gpu_metrics": ["mean_sm_clock_mhz"],
}  # fmt: skip
"""Columns that commit f50aaa2f lacked."""


@pytest.fixture
def older(site: CommandLine, tmp_path: Path) -> CommandLine:
    shutil.copytree(site.folder, tmp_path / "older")
    for table, newer in NEWER.items():
        paths = sorted((tmp_path / "older/store" / table).rglob("*.parquet"))
        assert paths
        for path in paths:
            rows = pq.read_table(path, partitioning=None)
            with path.open("w+b") as out:
                write_sealed(rows.drop_columns(newer), out)
    return CommandLine(tmp_path / "older")


def test_a_store_without_the_new_columns(site: CommandLine, older: CommandLine, tmp_path: Path) -> None:
    """Every command reads it, and new samples of an old hour bring the new figures."""
    listed: list[dict[str, Any]] = older.json("jobs", "-a", "-n", "0", "--json")
    newest = [{**row, "mfu_frac": None} for row in site.json("jobs", "-a", "-n", "0", "--json")]
    assert listed == newest
    job = next(row for row in listed if row["verdict"] == "ok" and row["job_class"])
    assert older.json("report", str(job["job_id"]), "--json")[0]["metrics"].get("mfu_frac") is None
    for argv in (("train",), ("site-report",), ("advise", "--user", job["user"], "-J", job["name"], "--gpus=4")):
        assert older(*argv)
    assert "Traceback" not in older("doctor", ok=(0, 1, 2, 3))

    store = Store.open(older.folder / "store")
    [cluster] = {path.name.partition("=")[2] for path in (older.folder / "store/jobs").glob("cluster=*")}
    rows = store.of(cluster).read("telemetry", None, job["start_s"], job["end_s"])
    clock = pa.array([1200.0] * len(rows), pa.float32())
    rows = rows.set_column(rows.schema.get_field_index("sm_clock_mhz"), "sm_clock_mhz", clock)
    pq.write_table(rows, tmp_path / "newer.parquet")
    older("ingest", "--telemetry", str(tmp_path / "newer.parquet"))
    [again] = [row for row in older.json("jobs", "-a", "-n", "0", "--json") if row["job_id"] == job["job_id"]]
    assert 0 < again["mfu_frac"] < 1 and {**again, "mfu_frac": None} == job
