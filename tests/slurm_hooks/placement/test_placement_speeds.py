"""Run times of the queue's jobs from a stand-in for the speed table."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from almanac.config import Config
from almanac.errors import NoModelError
from slurm_hooks.placement.speeds import no_speeds, stored_speeds
from slurm_hooks.placement.state import RunTime, usable_times
from telemetry.slurm.placement_queue import QueueJob, queue_jobs

from .placement_slurm import Job


@dataclass(frozen=True)
class TypeTime:
    gpu_type: str
    run_s: float
    low_s: float
    high_s: float

    def next_run(self, coverage: float) -> tuple[float, float]:
        return self.low_s / 2, self.high_s * 2


def queued(limit_min: int = 1440) -> QueueJob:
    [job], _ = queue_jobs(json.dumps({"jobs": [Job(11, limit_min=limit_min).record(True)]}).encode(), "lab")
    return job


def table(monkeypatch: pytest.MonkeyPatch, *names: str) -> Any:
    times = tuple(TypeTime(name, 3600, 3000, 4000) for name in names)
    site = SimpleNamespace(
        learn_site_speeds=lambda runs, config, now_s: SimpleNamespace(names=names),
        user_families=lambda runs, table, config, now_s: {},
        request_times=lambda request, families, table, bound, config: times if request.user == "ann" else (),
    )
    monkeypatch.setitem(sys.modules, "advisor.speed.site", site)
    monkeypatch.setitem(sys.modules, "advisor.speed.runs", SimpleNamespace(load_speed_runs=lambda store: None))
    return stored_speeds(None, Config(), 0)  # type: ignore[arg-type]


def test_the_time_limit_must_hold_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = table(monkeypatch, "a100", "h100")([queued()], ("a100", "h100"))
    assert found[11][0] == RunTime("a100", 3600, 1500, 8000, 8000), "the interval of a run, not of the usual time"
    assert set(usable_times(queued(), found[11], ["h100"])) == {"h100"}
    assert usable_times(queued(limit_min=133), found[11], ["h100"]) == {}


def test_a_table_must_know_two_of_the_types(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoModelError, match="1 of 2 GPU types"):
        table(monkeypatch, "a100", "v100")([queued()], ("a100", "h100"))
    assert no_speeds([queued()], ("a100",)) == {}


def test_no_speed_table_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "advisor.speed.site", None)
    with pytest.raises(NoModelError, match="no speed table"):
        stored_speeds(None, Config(), 0)  # type: ignore[arg-type]
