"""GPU type, run time, and rates of recorded runs: sites with typed GRES, features, both, or no telemetry."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from speed_site import NOW_S, job_frame

from advisor.artefacts import current_version, load_speeds, prune, save, versions
from advisor.service import train
from advisor.types.learning import SpeedTable
from advisor.types.runs import FamilyKey, GpuTypes, SpeedRun, find_hardware, learn_types, runs_of
from advisor.types.times import learn_site_speeds, request_times, user_families
from almanac.config import Config
from almanac.hardware import gpu_models
from almanac.records import JobRequest, MemoryBound
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
    assert run.family == FamilyKey("ann", "bert-#", 4)
    assert (run.log_s, run.log_flops, run.log_bytes) == pytest.approx((math.log(3600), math.log(1e15), math.log(4e12)))
    assert (run.profile.busy, run.profile.compute, run.profile.roofline) == (0.9, 0.7, "compute")


@pytest.mark.parametrize("state", ["TIMEOUT", "PREEMPTED", "CANCELLED"])
def test_a_run_that_was_ended_has_rates_and_no_time(state: str) -> None:
    run = only({**GOOD, "state": state})
    assert math.isnan(run.log_s)
    assert run.log_flops == pytest.approx(math.log(1e15))


def test_a_run_that_says_nothing_of_a_known_type_is_left_out() -> None:
    for row in [
        {**GOOD, "state": "FAILED"}, {**GOOD, "state": "OUT_OF_MEMORY"}, {"gpu_type": "h100", "state": "TIMEOUT"},
        {"state": "COMPLETED"}, {**GOOD, "gpu_type": "a100_1g.5gb"}, {**GOOD, "gpu_count": None},
        {**GOOD, "end_s": math.nan, "start_s": NOW_S}, {**GOOD, "state": "CANCELLED", "has_profiling_fault": True},
        {**GOOD, "is_packed": True},
    ]:  # fmt: skip
        assert only(row) is None


def test_missing_is_not_zero_and_an_unknown_pipe_no_attribute() -> None:
    run = only({**GOOD, "flops_tensor": 0.0, "hbm_bytes_s": None, "mean_gr_engine_active_frac": None, "elapsed_s": 0.0})
    assert all(map(math.isnan, (run.log_s, run.log_flops, run.log_bytes, run.profile.busy)))

    run = only({**GOOD, "main_pipe": "__class__", "job_class": "else"})
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
    request = JobRequest(user="ann", job_name="bert-7", gpu_count=4, submit_s=NOW_S)
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
    table = learn_site_speeds(job_frame(two_types()), Config(), NOW_S)
    for each_s in (NOW_S, NOW_S + 60):
        save(train(HISTORY.empty_table().to_pandas(), Config(), each_s), tmp_path, speeds=table)
    assert load_speeds(tmp_path).to_json() == table.to_json()
    assert all(not version.fault for version in versions(tmp_path))
    prune(tmp_path, 1)
    assert [path.name for path in (tmp_path / "speed").iterdir()] == [current_version(tmp_path)]


def test_a_version_of_an_older_almanac_has_no_speeds(tmp_path: Path) -> None:
    save(train(HISTORY.empty_table().to_pandas(), Config(), NOW_S), tmp_path)
    assert not (tmp_path / "speed").exists()
    assert load_speeds(tmp_path).to_json() == SpeedTable().to_json()


def test_the_name_of_a_type_means_a_row_of_the_hardware_table() -> None:
    for name, model in [
        ("h100", "H100-80"), ("a100", "A100-40"), ("a100_80g", "A100-80"), ("nvidia_a100-sxm4-80gb", "A100-80"),
        ("gpu-v100", "V100-16"), ("V100-32", "V100-32"), ("l40s", "L40S"), ("k80", "K80-12"), ("p100", "P100-12-PCIE"),
        ("l40", "L40"), ("v100s", "V100S-32"), ("rtx3090", "RTX3090"), ("rtx_6000_ada", "6000ADA"),
        ("mi250x", "MI250X"),
        ("nvidia_gh200_480gb", "GH200-96"), ("gpu:h200", "H200-141"), ("gb200", "GB200-186"),
    ]:  # fmt: skip
        found = find_hardware(name)
        assert found.name.startswith(model.split("-")[0])
        assert found.hbm_mib == gpu_models()[model].hbm_mib


def test_a_name_that_means_no_single_model_means_none() -> None:
    for name in ["", "gpu", "hbm80g", "a7000", "gfx942", "a100|h100", "xa100", "rtx6000", "h1000", "ä\x00[a"]:
        assert find_hardware(name) is None


def test_a_site_with_typed_gres_calls_its_types_by_them() -> None:
    rows = [{"gpu_type": "a100", "gpu_model": "A100-80", "hbm_capacity_mib": 81920.0}] * 4 + [{"gpu_type": "h100"}]
    types = learn_types(job_frame(rows))
    assert types.name("a100", "ib", "A100-80") == "a100"
    assert types.name("h100", "", "") == "h100"
    assert types.capacity_mib("a100") == 81920
    hardware = types.hardware("h100")
    assert hardware.name == "H100-80", "by its name, as no telemetry has seen it"


def test_a_site_with_features_calls_its_types_by_the_feature_that_telemetry_confirms() -> None:
    pairs = (("ib&new", "H100-80"), ("ib&old", "V100-32"))
    rows = [{"constraints": asked, "gpu_model": model} for asked, model in pairs for _ in range(5)]
    types = learn_types(job_frame(rows))
    assert types.name("", "", "H100-80") == "new", "it asked for nothing, but telemetry saw the GPU"
    assert types.name("", "ib&old", "") == "old", "no telemetry, but the feature is known"
    assert types.name("", "old|new", "") == ""
    assert types.name("", "old|new", "V100-32") == "old"
    assert types.name("", "ib", "") == "", "every type has it"


def test_without_telemetry_features_that_read_like_models_are_types() -> None:
    types = learn_types(job_frame([{"constraints": "a100&ib"}, {"constraints": "h100"}, {"constraints": "a100|h100"}]))
    assert types.name("", "ib&a100", "") == "a100"
    assert types.name("", "[a100|h100]", "") == ""


def test_a_gres_type_of_two_models_is_told_apart_by_their_features() -> None:
    rows = [{"gpu_type": "a100", "constraints": f"gpu&hbm{size}g", "gpu_model": f"A100-{size}"}
            for size in (40, 80) for _ in range(5)]  # fmt: skip
    types = learn_types(job_frame(rows))
    assert types.name("a100", "gpu&hbm40g", "A100-40") == "hbm40g"
    assert types.name("a100", "gpu&hbm80g", "") == "hbm80g"
    assert types.name("a100", "", "") == ""
    assert types.capacity_mib("hbm40g") == 40960


def test_a_mig_slice_is_no_gpu_type() -> None:
    types = learn_types(job_frame([{"gpu_type": "a100_1g.10gb", "gpu_model": "A100-80"}] * 5))
    assert types.name("a100_1g.10gb", "", "A100-80") == ""
    assert types.name("1g.5gb", "", "") == ""
    assert not types.models


def test_the_names_survive_json() -> None:
    types = GpuTypes({"a": "A100-40"}, {"A100-40": "a"}, frozenset({"b"}), {"a": 40960.0})
    assert GpuTypes.from_json(types.to_json()) == types
