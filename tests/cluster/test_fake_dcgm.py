"""The fake exporter's GPUs, without servers: what a job's profile makes of them, replayed or generated."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_dcgm import METRICS, Exporter, Gpu, Trace, generated_trace, recorded_trace
from fake_mig_gpus import new_state
from testbed import TRACE

from telemetry.counters import COUNTERS
from telemetry.sources.exporters import presets


@pytest.fixture(params=["generated", pytest.param("recorded", marks=pytest.mark.data)])
def replayed(request: pytest.FixtureRequest, trace: Callable[[str], Path]) -> Trace:
    return generated_trace() if request.param == "generated" else recorded_trace(trace(TRACE))


def busy_gpu(trace: Trace, node: str, peak_mib: float, seconds: int) -> list[dict[str, float]]:
    """The values of one GPU, a second apart, from a job's start."""
    gpu = Gpu(node, 0)
    values = []
    for second in range(seconds):
        gpu.advance(("7",), peak_mib, trace, float(second), 1.0)
        values.append(dict(gpu.values))
    return values


def test_a_busy_gpu_stays_within_what_almanac_takes_for_possible(replayed: Trace) -> None:
    names, dcgm = {metric: name for name, metric, _ in METRICS}, presets()["dcgm"]
    for values in busy_gpu(replayed, "n1", 20480, 60):
        for counter in COUNTERS:
            if counter.column != "hbm_total_mib":
                value = values[names[dcgm.main(counter.column).name]]
                assert counter.low <= value <= counter.high, counter.column


def test_a_job_shows_no_default_memory_before_it_writes_its_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first seconds once showed 20 GiB, and so did the peak of a job of 18 GiB."""
    now_s = 1e9
    monkeypatch.setattr("fake_dcgm.time.time", lambda: now_s)
    (tmp_path / "jobs/n2").mkdir(parents=True)
    (tmp_path / "profiles").mkdir()
    exporter = Exporter(tmp_path / "jobs", tmp_path / "profiles", generated_trace())
    (tmp_path / "jobs/n2/0").write_text("11\n")
    (tmp_path / "jobs/n2/1").write_text("12\n")
    used: dict[int, list[float]] = {0: [], 1: []}
    for tick in range(60):
        now_s += 0.2
        if tick == 10:
            (tmp_path / "profiles/11").write_text("18\n")
        exporter.tick()
        for gpu, values in used.items():
            values.append(exporter.gpus[4 + gpu].values["fb_used"])
    assert max(used[0]) == 18 * 1024 and max(used[0][:10]) < 1024
    assert max(used[1][:20]) < 1024 and max(used[1]) == 20 * 1024


def mig_exporter(tmp_path: Path, *instances: tuple[int, str]) -> Exporter:
    """One node n1 with two A100-40: GPU 0 cut into these instances, GPU 1 whole."""
    state = new_state("a100-40", 2, "n1")
    state["gpus"][0] |= {"mig": True, "instances": [{"gi": gi, "profile": name} for gi, name in instances]}
    (tmp_path / "mig/n1").mkdir(parents=True, exist_ok=True)
    (tmp_path / "mig/n1/state.json").write_text(json.dumps(state))
    (tmp_path / "jobs/n1").mkdir(parents=True, exist_ok=True)
    (tmp_path / "profiles").mkdir(exist_ok=True)
    return Exporter(tmp_path / "jobs", tmp_path / "profiles", generated_trace(), ("n1", "n2"), tmp_path / "mig")


def shown(exporter: Exporter, metric: str) -> list[tuple[dict[str, str], float]]:
    lines = [line for line in exporter.render().splitlines() if line.startswith(f"{metric}{{")]
    return [(dict(re.findall(r'(\w+)="([^"]*)"', line)), float(line.rpartition(" ")[2])) for line in lines]


def test_a_mig_gpu_has_a_series_of_each_instance_with_its_own_memory(tmp_path: Path) -> None:
    exporter = mig_exporter(tmp_path, (1, "3g.20gb"), (5, "2g.10gb"))
    (tmp_path / "jobs/n1/0.5").write_text("11\n")
    (tmp_path / "profiles/11").write_text("4\n")
    for _ in range(3):
        exporter.tick()
    used, free = shown(exporter, "DCGM_FI_DEV_FB_USED"), shown(exporter, "DCGM_FI_DEV_FB_FREE")
    names = [(one["Hostname"], one["gpu"], one.get("GPU_I_ID"), one.get("GPU_I_PROFILE")) for one, _ in used]
    assert names[:3] == [("n1", "0", "1", "3g.20gb"), ("n1", "0", "5", "2g.10gb"), ("n1", "1", None, None)]
    assert [labels.get("hpc_job") for labels, _ in used[:3]] == [None, "11", None]
    assert [round(a + b) for (_, a), (_, b) in zip(used, free, strict=True)][:3] == [19968, 9856, 40339]
    assert [one.get("GPU_I_ID") for one, _ in shown(exporter, "DCGM_FI_PROF_SM_ACTIVE")][:3] == ["1", "5", None]
    assert [one["gpu"] for one, _ in shown(exporter, "DCGM_FI_DEV_GPU_UTIL") if one["Hostname"] == "n1"] == ["1"]
    assert len({one["UUID"] for one, _ in used[:2]}) == 1
