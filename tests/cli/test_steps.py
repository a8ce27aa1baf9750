"""`almanac jobs --steps` on a small store of one job with steps."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from almanac.config import Config, Filters
from telemetry.metrics.summary import summarize
from telemetry.store.schema import JOBS, STEPS, TELEMETRY
from telemetry.store.store import Store

START_S = 1_741_046_400
CALLER = pwd.getpwuid(os.geteuid()).pw_name

Almanac = Callable[..., str]


@pytest.fixture
def almanac(tmp_path: Path, site: Any) -> Almanac:
    """Runs `almanac jobs` on a store with job 7 of the caller (steps 0, 1, 10) and job 8 of eve (step 0)."""
    store = Store.create(tmp_path / "store")

    def write(table: str, schema: pa.Schema, rows: list[dict[str, Any]]) -> None:
        store.of("c").write(table, pa.Table.from_pylist(rows, schema=schema))

    run = {"submit_s": START_S, "start_s": START_S, "end_s": START_S + 120, "gpu_count": 1, "state": "COMPLETED"}
    write("jobs", JOBS, [
        {**run, "job_id": 7, "user": CALLER, "node_list": "n1"}, {**run, "job_id": 8, "user": "eve", "node_list": "n2"},
    ])  # fmt: skip
    step = {"submit_s": START_S, "gpu_count": 1, "node_list": "n1", "state": "COMPLETED"}
    spans = {"10": (100, 120), "0": (0, 50), "1": (50, 100)}
    write("steps", STEPS, [
        *({**step, "job_id": 7, "step": name, "start_s": START_S + a, "end_s": START_S + b}
          for name, (a, b) in spans.items()),
        {**step, "job_id": 8, "step": "0", "start_s": START_S, "end_s": START_S + 120, "state": "FAI\x1b[31mLED"},
    ])  # fmt: skip
    write("telemetry", TELEMETRY, [
        {"host": host, "gpu": 0, "mig": "", "time_ms": (START_S + 10 * n) * 1000, "gpu_util_pct": 10.0 * n,
         "hbm_used_mib": 1024.0 * n, "model": "NVIDIA A100-SXM4-40GB"}
        for host in ("n1", "n2") for n in range(12)
    ])  # fmt: skip
    summarize(store.of("c"), Config(filters=Filters(min_elapsed_s=0)), START_S, START_S + 86_400)

    def run_jobs(*argv: str) -> str:
        done = site.raw("--store", str(tmp_path / "store"), "-M", "c", "jobs", "-S", "2025-03-01", *argv)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    return run_jobs


def test_the_steps_of_a_job_are_listed_in_their_order_with_what_they_used(almanac: Almanac) -> None:
    rows = json.loads(almanac("-j", "7", "--steps", "--json"))
    assert [(row["step"], row["mean_gpu_util_pct"], row["hbm_peak_mib"]) for row in rows] == [
        ("0", 20.0, 4096.0), ("1", 70.0, 9216.0), ("10", 105.0, 11264.0),
    ]  # fmt: skip
    table = almanac("-j", "7", "--steps")
    assert [line.split()[0] for line in table.splitlines()] == ["step", "7.0", "7.1", "7.10"]
    assert "9.0 GiB" in table and "70 %" in table
    lines = almanac("-j", "7", "--steps", "-P").splitlines()
    assert lines[0].startswith("job_id|submit_s|step|") and len(lines) == 4


def test_a_step_alone_is_shown_as_not_measured_and_inert(almanac: Almanac) -> None:
    shown = almanac("-a", "-j", "8", "--steps")
    assert "8.0" in shown and "not measured" in shown and "\x1b" not in shown
    [row] = json.loads(almanac("-a", "-j", "8", "--steps", "--json"))
    assert row["verdict"] is None and row["hbm_peak_mib"] is None


def test_the_steps_of_others_are_shown_only_to_an_operator_who_asks(almanac: Almanac) -> None:
    assert json.loads(almanac("--steps", "--json")) == json.loads(almanac("-j", "7", "--steps", "--json"))
    assert {row["job_id"] for row in json.loads(almanac("-j", "8", "--steps", "--json"))} == {8}


def test_jobs_without_steps_are_said(almanac: Almanac, site: Any) -> None:
    assert "no steps of these jobs are stored" in site("jobs", "-a", "-n", "1", "--steps")


def test_where_no_job_is_found_programs_get_the_columns_of_steps_all_the_same(almanac: Almanac) -> None:
    assert almanac("-j", "9", "--steps", "--csv") == almanac("-j", "7", "--steps", "--csv").splitlines()[0] + "\n"
    assert "do not match -S" in almanac("-j", "7", "-E", "2025-03-02", "--steps")


def test_columns_of_jobs_are_refused_for_steps(almanac: Almanac, site: Any) -> None:
    assert "columns of its own" in site.raw("jobs", "--steps", "-o", "user").stderr
