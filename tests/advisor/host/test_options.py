"""Options on host memory and CPUs: the same engine as for GPU memory, silent without evidence."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.duration.features import submissions
from advisor.host.options import MARGIN, RESOURCES, advise_host, learn_host
from advisor.memory.decide import BoundReplay, bound_of
from advisor.memory.peak_store import replay_peaks
from almanac.config import AdviceSection
from almanac.records import HostOption
from telemetry.history import load_history, load_host_history
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

History = Callable[[list[dict[str, Any]]], pd.DataFrame]
MEMORY, CPUS = RESOURCES
CONFIG = AdviceSection()
DAY_S, START_S = 86_400, 1_750_000_000
JOB = {"gpu_count": 0, "cpu_count": 16, "node_count": 1, "host_mem_alloc_mib": 65_536.0, "cpu_time_s": 3600.0}


def site(families: int = 25, runs: int = 12, seed: int = 3) -> list[dict[str, Any]]:
    """CPU-only jobs of an hour; each family peaks within a tenth of its own share of 64 GiB, and keeps one CPU busy."""
    rng = np.random.default_rng(seed)
    rows = []
    for family in range(families):
        typical = rng.uniform(2000, 12_000)
        for run in range(runs):
            start_s = START_S + run * DAY_S + family * 60
            peak = float(typical * rng.uniform(0.95, 1.05))
            rows.append(
                {**JOB, "user": f"u{family}", "submit_s": start_s, "start_s": start_s, "end_s": start_s + 3600,
                 "elapsed_s": 3600.0, "state": "COMPLETED", "host_mem_peak_mib": peak, "host_mem_task_peak_mib": peak}
            )  # fmt: skip
    return rows


@pytest.fixture(name="advised")
def _advised(history_of: History) -> Callable[..., tuple[HostOption, ...]]:
    def advised(changed: Callable[[pd.DataFrame], pd.DataFrame] = lambda frame: frame) -> tuple[HostOption, ...]:
        """Options for the newest run of the first user, on a site of which `changed` alters the record."""
        history = changed(history_of(site()))
        now_s = int(history["end_s"].max()) + DAY_S
        calibrations = learn_host(history, CONFIG, now_s)
        newest = history[history["user"] == "u0"].sort_values("submit_s").iloc[-1]
        run = int(newest["job_id"]), int(newest["submit_s"])
        return advise_host(history[history["user"] == "u0"], {run}, calibrations, CONFIG, now_s)[run]

    return advised


def test_a_steady_family_is_told_what_to_ask_for(advised: Callable[..., tuple[HostOption, ...]]) -> None:
    memory, cpus = advised()
    assert memory.size >= MARGIN * memory.highest and memory.size <= 0.75 * memory.given == 0.75 * 65_536
    assert memory.option == f"--mem={int(memory.size) // 1024}G" and (memory.runs, memory.risk) == (12, 0.01)
    assert (cpus.option, cpus.given, cpus.highest) == ("--cpus-per-task=2", 16.0, 1.0)


@pytest.mark.parametrize(
    "change",
    [
        {"host_mem_peak_mib": math.nan, "cpu_time_s": math.nan},
        {"node_count": 2},
        {"elapsed_s": 90.0},
        {"host_mem_alloc_mib": 1024.0, "host_mem_peak_mib": 900.0, "host_mem_task_peak_mib": 300.0},
        {"host_mem_alloc_mib": math.nan, "cpu_count": 2},
    ],
)  # fmt: skip
def test_without_evidence_nothing_is_said(
    advised: Callable[..., tuple[HostOption, ...]], change: dict[str, Any]
) -> None:
    assert advised(lambda frame: frame.assign(**change)) == ()


def test_a_run_out_of_memory_stops_advice_until_one_with_more_needed_more(
    advised: Callable[..., tuple[HostOption, ...]],
) -> None:
    def out_of_memory(frame: pd.DataFrame, later_mib: float = math.nan) -> pd.DataFrame:
        own = frame.index[frame["user"] == "u0"]
        frame.loc[own[-3], ["state", "host_mem_alloc_mib"]] = ["OUT_OF_MEMORY", 16_384.0]
        if later_mib == later_mib:
            frame.loc[own[-2], ["host_mem_peak_mib", "host_mem_task_peak_mib"]] = later_mib
        return frame

    assert "memory" not in {each.resource for each in advised(out_of_memory)}
    found = {each.resource: each for each in advised(lambda frame: out_of_memory(frame, 20_000.0))}
    assert "memory" not in found or found["memory"].size >= MARGIN * 20_000


def test_a_run_cut_off_before_its_first_sample_counts_and_more_is_advised_if_the_job_has_less_than_it_needed(
    advised: Callable[..., tuple[HostOption, ...]],
) -> None:
    def cut(frame: pd.DataFrame) -> pd.DataFrame:
        run = frame.index[frame["user"] == "u0"][-3]
        frame.loc[run, ["state", "host_mem_alloc_mib", "elapsed_s"]] = ["OUT_OF_MEMORY", 16_384.0, 30.0]
        frame.loc[run, ["host_mem_peak_mib", "host_mem_task_peak_mib"]] = math.nan
        return frame

    def small(frame: pd.DataFrame) -> pd.DataFrame:
        own = frame.index[frame["user"] == "u0"]
        frame.loc[own[-1], "host_mem_alloc_mib"] = frame.loc[own, "host_mem_peak_mib"].max() * 0.9
        return frame

    assert "memory" not in {each.resource for each in advised(cut)}
    [memory] = [each for each in advised(small) if each.resource == "memory"]
    assert memory.size > memory.highest > memory.given


def test_jobs_exceed_what_is_advised_no_more_often_than_stated(history_of: History) -> None:
    """Over a site of noisy families, replayed with what was known at each submission."""
    rows = site(40, 30, seed=5)
    rng = np.random.default_rng(6)
    for row in rows:
        row["host_mem_peak_mib"] *= float(np.exp(rng.normal(0, 0.15)))
    history = history_of(rows)
    replay = BoundReplay(replay_peaks(MEMORY.frame(history), CONFIG), CONFIG, MEMORY.tiers)
    judged = []
    for case in replay:
        bound = bound_of(case.evidence, replay.calibration, CONFIG).bound
        size = MEMORY.size_for(bound) if bound else None
        if size and case.run:
            judged.append(case.run.peak_mib > size)
    assert len(judged) > 300 and np.mean(judged) <= CONFIG.risk


@given(st.lists(st.floats(1.0, 4e6), min_size=5, max_size=30))
def test_no_size_is_below_a_need_that_was_seen(peaks: list[float]) -> None:
    frame = pd.DataFrame({"host_mem_peak_mib": peaks, "host_mem_alloc_mib": 65_536.0, "node_count": 1,
                          "elapsed_s": 600.0, "state": "COMPLETED"})  # fmt: skip
    read = MEMORY.frame(frame)
    assert (read["hbm_capacity_mib"] >= read["hbm_peak_mib"]).all() and len(submissions(history(frame))) == len(peaks)


def history(frame: pd.DataFrame) -> pd.DataFrame:
    texts = dict.fromkeys(("user", "account", "partition", "qos", "name_key", "tier"), "x")
    return frame.assign(**texts, gpu_count=0, cpu_count=1, time_limit_s=60.0, is_array=False, submit_s=0)


def test_the_history_of_hosts_has_jobs_without_gpus(tmp_path: Path) -> None:
    store = Store.create(tmp_path).of("lab")
    rows = [
        {"job_id": number, "submit_s": 100, "start_s": 100, "end_s": 700, "elapsed_s": 600, "user": user,
         "gpu_count": number % 2, "state": "COMPLETED", "host_mem_peak_mib": 10.0 * number}
        for number, user in ((1, "alice"), (2, "alice"), (4, "bob"))
    ]  # fmt: skip
    store.write("jobs", pa.Table.from_pylist(rows, JOBS))
    assert load_history(store, running=True)["job_id"].tolist() == [1]
    assert load_host_history(store)["host_mem_peak_mib"].tolist() == [10.0, 20.0, 40.0]
    assert load_host_history(store, ["alice"])["job_id"].tolist() == [1, 2]
