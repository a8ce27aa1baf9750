"""docs/h100.md says what the code gives for the real H100 runs, and its energies agree with the power samples."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]
RUNS = ["t2", "b1", "e2", "t13"]

pytestmark = pytest.mark.data


@pytest.fixture(scope="module")
def data(trace: Callable[[str], Path]) -> Path:
    return trace("h100_dcgm_10hz.parquet")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_h100", ROOT / "docs" / "h100.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_h100"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def jobs(generator: ModuleType, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Job metrics by the name of the run."""
    runs = generator.read_runs(data)
    assert [run.name for run in runs] == RUNS
    store = generator.ingest(data, runs, tmp_path_factory.mktemp("h100"))
    rows = {row["job_id"]: row for row in store.of(generator.CLUSTER).read("job_metrics").to_pylist()}
    return {run.name: rows[run.job_id] | {"elapsed_s": run.end_s - run.start_s} for run in runs}


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The independent implementation of the formulas."""
    path = ROOT / "tests" / "telemetry" / "metrics" / "numpy_reference.py"
    spec = importlib.util.spec_from_file_location("reference_of_h100", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def means(reference: ModuleType, mine: pd.DataFrame, counter: str, interval_ms: float) -> pd.Series[float]:
    """Mean of a counter over time on each GPU."""
    return mine.groupby(["node", "gpu"]).apply(
        lambda gpu: reference.weighted_mean(
            gpu[counter].astype(float),
            reference.weights((gpu.timestamp * 1000).round().astype(int).tolist(), interval_ms),
        )
    )


def interval_of(job: dict[str, Any]) -> float:
    """The scrape interval (ms) that almanac found, as a mean over the GPUs."""
    return float(1000 * job["elapsed_s"] * job["gpus_seen"] / job["expected_samples"])


@pytest.fixture(scope="module")
def recording(data: Path) -> pd.DataFrame:
    """The file as it is, not as almanac imports it."""
    return pd.read_parquet(data).sort_values(["node", "gpu", "timestamp"])


def test_the_page_is_what_the_code_gives(generator: ModuleType, data: Path) -> None:
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(data), "run `python docs/h100.py`"


@pytest.mark.parametrize("name", RUNS)
def test_energy_agrees_with_the_power_samples(
    jobs: dict[str, dict[str, Any]], recording: pd.DataFrame, name: str
) -> None:
    """Within 1% of the integral over time of every GPU's power, taken from the file by itself."""
    integral_j = 0.0
    for _, mine in recording[recording.run == name].groupby(["node", "gpu"]):
        watts, gap_s = mine.power_w.to_numpy(), np.diff(mine.timestamp.to_numpy())
        integral_j += float(np.sum((watts[1:] + watts[:-1]) / 2 * gap_s))
    assert jobs[name]["energy_j"] == pytest.approx(integral_j, rel=0.01)
    assert jobs[name]["energy_resets"] == 0


@pytest.mark.parametrize("name", RUNS)
def test_a_scrape_every_tenth_of_a_second_is_covered_and_windowed(
    jobs: dict[str, dict[str, Any]], recording: pd.DataFrame, name: str
) -> None:
    mine, job = recording[recording.run == name], jobs[name]
    assert job["samples"] == len(mine)
    assert 0.98 < job["coverage_frac"] <= 1  # some scrapes came late
    assert job["spatial_windows"] == len(np.unique(mine.timestamp // 60))
    assert job["gpus_seen"] == len(mine[["node", "gpu"]].drop_duplicates())
    assert job["attributed_by"] == "whole node"


@pytest.mark.parametrize("name", RUNS)
def test_imbalance_and_memory_follow_from_the_file(
    jobs: dict[str, dict[str, Any]], recording: pd.DataFrame, reference: ModuleType, name: str
) -> None:
    mine, job = recording[recording.run == name], jobs[name]
    interval_ms = interval_of(job)
    util = mine.groupby(["node", "gpu"]).gpu_util_pct
    assert job["temporal_imbalance"] == pytest.approx(
        (1 - means(reference, mine, "gpu_util_pct", interval_ms) / util.max()).max(), rel=1e-6
    )
    totals = mine.groupby([mine.timestamp // 60, "node", "gpu"]).gpu_util_pct.mean().unstack(["node", "gpu"])
    uneven = (1 - totals.sum(axis=1) / (totals.shape[1] * totals.max(axis=1))).fillna(0)
    assert job["spatial_imbalance"] == pytest.approx(uneven.mean(), rel=1e-12)
    assert job["hbm_max_mib"] == mine.mem_used_mib.max()
    assert job["mean_power_w"] == pytest.approx(means(reference, mine, "power_w", interval_ms).mean(), rel=1e-6)


def test_classes_of_a_recording_without_fp64(jobs: dict[str, dict[str, Any]]) -> None:
    for name in RUNS:
        assert jobs[name]["class_fp64"] is None
        assert "class_fp64: no FP64 counter" in jobs[name]["reasons"]
    assert {name: jobs[name]["class_tensor"] for name in RUNS} == {
        "t2": "memory", "b1": None, "e2": "memory", "t13": "memory",
    }  # fmt: skip
    assert {name: jobs[name]["verdict"] for name in RUNS} == {"t2": "ok", "b1": "idle", "e2": "ok", "t13": "ok"}
    assert jobs["b1"]["hbm_peak_mib"] is None
    assert "hbm_peak_mib: the job is set aside" in jobs["b1"]["reasons"]


@pytest.mark.parametrize("name", ["t2", "e2", "t13"])
def test_tensor_intensity_follows_from_the_file(
    jobs: dict[str, dict[str, Any]], recording: pd.DataFrame, reference: ModuleType, name: str
) -> None:
    """Peaks of an H100 SXM: 989.4 Tflop/s of the dense tensor pipe, 3.35 TB/s."""
    mine, interval_ms = recording[recording.run == name], interval_of(jobs[name])
    tensor, dram = (means(reference, mine, f"{each}_active", interval_ms).sum() for each in ("tensor", "dram"))
    flops, bytes_s = tensor * 989.4e12, dram * 3.35e12
    assert jobs[name]["flops_tensor"] == pytest.approx(flops, rel=1e-6)
    assert jobs[name]["intensity_tensor"] == pytest.approx(flops / bytes_s, rel=1e-6)
