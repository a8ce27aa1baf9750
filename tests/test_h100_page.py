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
