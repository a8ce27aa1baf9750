"""What the rows of a store say of speed, the table learned from them, and the versions that keep it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from speed_site import NOW_S, job_frame

from advisor.artefacts import current_version, load, save
from advisor.service import train
from advisor.speed.gpu_types import GpuTypes
from advisor.speed.learning import SpeedTable
from advisor.speed.runs import FamilyKey, SpeedRun, runs_of
from advisor.speed.site import learn_site_speeds, request_times, user_families
from advisor.versions import prune, versions
from almanac.config import Config
from almanac.records import MemoryBound, Request
from telemetry.history import HISTORY

GOOD: dict[str, Any] = {
    "gpu_type": "h100", "verdict": "ok", "main_pipe": "tensor", "job_class": "compute", "flops_tensor": 1e15,
    "hbm_bytes_s": 4e12, "compute_frac_tensor": 0.7, "mean_gr_engine_active_frac": 0.9,
}  # fmt: skip


def only(row: dict[str, Any]) -> SpeedRun | None:
    (found,) = runs_of(job_frame([row]), GpuTypes())
    return found


def test_a_completed_run_has_a_time_and_rates() -> None:
    run = only(GOOD)
    assert run is not None
    assert run.family == FamilyKey("ann", "bert-#", 4)
    assert (run.log_s, run.log_flops, run.log_bytes) == pytest.approx((math.log(3600), math.log(1e15), math.log(4e12)))
    assert (run.profile.busy, run.profile.compute, run.profile.roofline) == (0.9, 0.7, "compute")


@pytest.mark.parametrize("state", ["TIMEOUT", "PREEMPTED", "CANCELLED"])
def test_a_run_that_was_ended_has_rates_and_no_time(state: str) -> None:
    run = only({**GOOD, "state": state})
    assert run is not None
    assert math.isnan(run.log_s)
    assert run.log_flops == pytest.approx(math.log(1e15))


@pytest.mark.parametrize(
    "row",
    [
        {**GOOD, "state": "FAILED"}, {**GOOD, "state": "OUT_OF_MEMORY"}, {"gpu_type": "h100", "state": "TIMEOUT"},
        {"state": "COMPLETED"}, {**GOOD, "gpu_type": "a100_1g.5gb"}, {**GOOD, "gpu_count": None},
        {**GOOD, "end_s": math.nan, "start_s": NOW_S}, {**GOOD, "state": "CANCELLED", "has_profiling_fault": True},
        {**GOOD, "is_packed": True},
    ],
)  # fmt: skip
def test_a_run_that_says_nothing_of_a_known_type_is_left_out(row: dict[str, Any]) -> None:
    assert only(row) is None


def test_missing_is_not_zero() -> None:
    run = only({**GOOD, "flops_tensor": 0.0, "hbm_bytes_s": None, "mean_gr_engine_active_frac": None, "elapsed_s": 0.0})
    assert run is not None
    assert all(map(math.isnan, (run.log_s, run.log_flops, run.log_bytes, run.profile.busy)))


def test_an_unknown_pipe_is_no_attribute() -> None:
    run = only({**GOOD, "main_pipe": "__class__", "job_class": "else"})
    assert run is not None
    assert run.profile.pipe == ""


def two_types() -> list[dict[str, Any]]:
    return [
        {"gpu_type": name, "user": f"u{user}", "elapsed_s": run_s, "gpu_model": model, "hbm_capacity_mib": capacity}
        for user in range(10)
        for name, model, capacity, run_s in (("a100", "A100-40", 40960.0, 3600.0), ("h100", "H100-80", 81920.0, 2400.0))
    ]  # fmt: skip


def test_a_request_learns_the_times_on_the_types_that_hold_it() -> None:
    config = Config()
    jobs = job_frame([*two_types(), {"gpu_type": "a100", "elapsed_s": 1000.0}, {"user": "bob", "gpu_type": "h100"}])
    table = learn_site_speeds(jobs, config, NOW_S)
    assert table.families == {"a100": 10, "h100": 10}
    families = user_families(jobs[jobs["user"] == "ann"], table, config, NOW_S)
    request = Request(user="ann", job_name="bert-7", gpu_count=4, submit_s=NOW_S)
    told = {each.gpu_type: each for each in request_times(request, families, table, None, config)}
    assert told["h100"].source == "other families"
    assert told["h100"].run_s == pytest.approx(667, rel=0.1)
    bound = MemoryBound(50_000.0, 50_000.0, 0.01, 40_000.0, 9, "family", "")
    assert [each.gpu_type for each in request_times(request, families, table, bound, config)] == ["h100"]
    tier_only = dataclasses.replace(bound, bound_mib=None)
    assert [each.gpu_type for each in request_times(request, families, table, tier_only, config)] == ["h100"]
    assert request_times(dataclasses.replace(request, gpu_count=2), families, table, None, config) == ()


def test_what_ended_later_or_long_ago_does_not_count() -> None:
    config = Config()
    jobs = job_frame(two_types())
    assert learn_site_speeds(jobs, config, int(jobs["end_s"].min())).names == ()
    assert learn_site_speeds(jobs, config, NOW_S + 200 * 86_400).names == ()


def test_the_table_is_kept_with_each_version_and_pruned_with_it(tmp_path: Path) -> None:
    history = HISTORY.empty_table().to_pandas()
    runs = job_frame(two_types())
    for each_s in (NOW_S, NOW_S + 60):
        save(train(history, Config(), each_s, speed_runs=runs), tmp_path)
    trained = load(tmp_path)
    assert trained is not None
    assert trained.speeds.to_json() == learn_site_speeds(runs, Config(), NOW_S + 60).to_json()
    assert all(not version.fault for version in versions(tmp_path))
    prune(tmp_path, 1)
    assert [path.name for path in (tmp_path / "speed").iterdir()] == [current_version(tmp_path)]


def test_a_version_of_an_older_almanac_has_no_speeds(tmp_path: Path) -> None:
    save(train(HISTORY.empty_table().to_pandas(), Config(), NOW_S), tmp_path)
    assert not (tmp_path / "speed").exists()
    trained = load(tmp_path)
    assert trained is not None
    assert trained.speeds.to_json() == SpeedTable().to_json()
