"""A user's whole past, read at once: the same to the last bit as a replay of one event after the other."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from advisor.duration import rolling
from advisor.duration.features import Event, SubmittedJob, ended_jobs, events, submissions
from advisor.duration.past import DECAY, NEWEST, _weights
from advisor.duration.replay import SiteHistory, observed_history, replay_durations
from advisor.duration.rolling import SiteMeans
from advisor.memory import peak_store
from advisor.memory.peak_store import remember_peaks, replay_peaks
from almanac.config import Config

NOW_S = 1_750_000_000 // 1800 * 1800
SHAPES = ((1, 1, 8), (4, 1, 32), (4, 2, 32))


def told(history: pd.DataFrame, until_s: int, site: SiteMeans | None = None) -> SiteHistory:
    """A Memory that receives each start and end before until_s, in order."""
    memory, jobs = SiteHistory(site), submissions(history)
    ended, starts = ended_jobs(history, jobs), started(history)
    for row, event in events(history):
        at_s = history["start_s" if event is Event.START else "end_s"].iloc[row]
        if event is not Event.SUBMIT and at_s < until_s and jobs[row].submit_s < until_s:
            start_s = starts[row] if starts[row] < until_s else float("nan")
            memory.observe(event, jobs[row], start_s, ended[row])
    return memory


def started(history: pd.DataFrame) -> list[float]:
    """Row by row, NaN for a job that ended before it started."""
    return [float(value) for value in history["start_s"].where(~(history["start_s"] > history["end_s"]))]


def replayed(history: pd.DataFrame) -> list[tuple[str, float]]:
    """Return the knowledge at each submission of a history that receives every event in order."""
    memory, jobs = SiteHistory(), submissions(history)
    ended, starts, known = ended_jobs(history, jobs), started(history), [("", 0.0)] * len(jobs)
    for row, event in events(history):
        if event is Event.SUBMIT:
            each = memory.known(jobs[row])
            known[row] = repr(each.features), each.rolling.duration_s if each.rolling else -1.0
        else:
            memory.observe(event, jobs[row], starts[row], ended[row])
    return known


def alike(one: SiteHistory, other: SiteHistory, jobs: list[SubmittedJob]) -> None:
    for job in jobs:
        first, second = one.known(job), other.known(job)
        assert repr(first.features) == repr(second.features)
        assert repr(first.rolling) == repr(second.rolling)


def frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    whole = [{"account": "a", "partition": "p", "qos": "q", "tier": None, "is_array": False, **row} for row in rows]
    return pd.DataFrame([{**row, "job_id": number} for number, row in enumerate(whole)])


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    """Times from few seconds, so that many fall together; ends, starts and durations can be missing or absurd."""
    submit_s = NOW_S - draw(st.sampled_from([0, 20, 40, 60, 80, 1800, 3600]))
    start_s = draw(st.sampled_from([float("nan"), submit_s, submit_s + 20.0, submit_s + 40.0]))
    end_s = draw(st.sampled_from([float("nan"), submit_s - 20.0, submit_s, submit_s + 20.0, submit_s + 60.0]))
    gpus, nodes, cpus = draw(st.sampled_from(SHAPES))
    return {
        "user": draw(st.sampled_from(["ann", "bob"])),
        "name_key": draw(st.sampled_from(["train", "trane", "eval-#", "", "a\nb", "$(x)"])),
        "state": draw(st.sampled_from(["COMPLETED", "FAILED", "CANCELLED by 0", "REQUEUED", "RESIZING", None])),
        "elapsed_s": draw(st.sampled_from([0.0, 0.3, 1.0, 59.7, 60.0, 3600.1, 1e7, float("nan")])),
        "time_limit_s": draw(st.sampled_from([60.0, 7200.0, 0.0, -1.0, float("nan")])), "gpu_count": gpus,
        "node_count": nodes, "cpu_count": cpus, "submit_s": submit_s, "start_s": start_s, "end_s": end_s,
    }  # fmt: skip


@pytest.mark.parametrize("has_site", [True, False])
def test_any_past_read_at_once_is_known_as_if_told(has_site: bool) -> None:

    @examples(0.6)
    @given(st.lists(rows(), max_size=40), st.integers(-30, 90))
    def check(made: list[dict[str, Any]], after_s: int) -> None:
        if not made:
            return
        history, until_s = frame(made), NOW_S + after_s
        site = SiteMeans() if has_site else None
        probes = [dataclasses.replace(job, submit_s=until_s) for job in submissions(history)]
        users = ["ann", "bob"]
        alike(observed_history(users, history, until_s, site), told(history, until_s, site), probes)

    check()


def test_a_job_runs_for_a_submission_of_the_second_of_its_end_and_not_of_its_start() -> None:
    job = {"user": "ann", "name_key": "x", "state": "COMPLETED", "elapsed_s": 60.0, "time_limit_s": 60.0,
           "gpu_count": 1, "node_count": 1, "cpu_count": 1}  # fmt: skip
    runs = {**job, "submit_s": NOW_S, "start_s": NOW_S + 60.0, "end_s": NOW_S + 120.0}
    asks = [
        {**job, "submit_s": NOW_S + at_s, "start_s": float("nan"), "end_s": float("nan")} for at_s in (60, 120, 121)
    ]
    for row, running in enumerate((0, 1, 0), 1):
        history = frame([runs, *asks])
        replay = replay_durations(history, np.array([row]))
        assert replay.features.number("user_running").tolist() == [math.log1p(running)]


def test_a_replay_that_leaves_out_what_nobody_asks_for_knows_the_same() -> None:

    @examples(0.6)
    @given(st.lists(rows(), min_size=1, max_size=40), st.integers(1, 5))
    def check(made: list[dict[str, Any]], step: int) -> None:
        history = frame(made)
        wanted = np.arange(0, len(history), step)
        replay, expected = replay_durations(history, wanted), replayed(history)
        numbers = [repr(tuple(row)) for row in replay.features.numbers.tolist()]
        assert numbers == [expected[row][0] for row in wanted]
        assert np.nan_to_num(replay.rolling_s, nan=-1.0).tolist() == [expected[row][1] for row in wanted]

    check()


def heavy(number: int, names: int, seed: int) -> pd.DataFrame:
    """One user's runs: many names, often ending in the same second, some still running; and one large array."""
    rng = np.random.default_rng(seed)
    end_s = NOW_S - 200_000 + np.sort(rng.integers(0, 100_000, number)) // 60 * 60
    durations = rng.lognormal(6, 2, number)
    shapes = rng.integers(0, 3, number)
    made = [
        {
            "user": "ann", "name_key": f"name-{rng.integers(names)}",
            "state": "COMPLETED" if rng.random() < 0.8 else "FAILED", "elapsed_s": float(durations[row]),
            "time_limit_s": float(rng.choice([600.0, 86400.0])), "gpu_count": SHAPES[shapes[row]][0],
            "node_count": SHAPES[shapes[row]][1], "cpu_count": SHAPES[shapes[row]][2],
            "submit_s": int(end_s[row] - durations[row]), "start_s": float(int(end_s[row] - durations[row])),
            "end_s": float(end_s[row]) if rng.random() < 0.97 else float("nan"),
        }
        for row in range(number)
    ]  # fmt: skip
    array = {**made[0], "name_key": "sweep", "is_array": True, "submit_s": NOW_S - 50_000, "start_s": NOW_S - 40_000.0}
    tasks = [
        {**array, "elapsed_s": float(durations[task]), "end_s": NOW_S - 30_000.0 + task // 50} for task in range(1000)
    ]
    return frame([*made, *tasks])


@pytest.mark.parametrize("names", [3, 900])
def test_a_heavy_users_past_read_at_once_is_known_as_if_told(names: int) -> None:
    """With more names than are remembered, too: forgotten names start again when they come back."""
    history = heavy(3000, names, seed=names)
    for until_s in (NOW_S - 150_000, NOW_S - 30_000 + 7, NOW_S):
        probes = [dataclasses.replace(job, submit_s=until_s) for job in submissions(history.iloc[::61])]
        alike(observed_history(["ann"], history, until_s, None), told(history, until_s), probes)
    assert history["name_key"].nunique() == names + 1 or names > rolling.MAX_FAMILIES


def test_the_sum_of_weights_is_that_of_so_many_steps() -> None:
    weight, sums = 0.0, _weights()
    for runs in range(1, 400):
        weight = DECAY * weight + 1.0
        assert sums[min(runs, len(sums) - 1)] == weight
    assert len(sums) > NEWEST


@st.composite
def measured(draw: st.DrawFn) -> dict[str, Any]:
    """Runs of two days, often ending in the same hour: with alike names, flat, unmeasured, failed or still open."""
    submit_s = NOW_S - 3600 * draw(st.integers(0, 48))
    peak_mib = draw(st.sampled_from([1000.0, 20_000.0, 32_000.0, 80_000.0, math.nan]))
    return {
        "user": "ann", "name_key": draw(st.sampled_from(["train", "trains", "train-x", "eval", "evil", "sweep", ""])),
        "state": draw(st.sampled_from(["COMPLETED", "FAILED"])), "gpu_count": draw(st.sampled_from([1, 2])),
        "submit_s": submit_s, "start_s": submit_s,
        "end_s": draw(st.sampled_from([submit_s + 3600.0, submit_s + 7200.0, submit_s + 86_400.0, math.nan])),
        "hbm_peak_mib": peak_mib, "hbm_max_mib": peak_mib, "hbm_capacity_mib": 81_920.0,
        "hbm_evidence": "none" if math.isnan(peak_mib) else draw(st.sampled_from(["telemetry", "preallocated"])),
        "verdict": "ok", "elapsed_s": 3600.0, "time_limit_s": 7200.0, "node_count": 1, "cpu_count": 8,
    }  # fmt: skip


@pytest.mark.parametrize("remembered", [3, 256])
def test_evidence_that_is_read_once_for_a_burst_is_that_of_each_job(
    remembered: int, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that grow too old between two submissions, and families that are forgotten and come back, among them."""
    for module in (peak_store, peak_store):
        monkeypatch.setattr(module, "MAX_FAMILIES", remembered)
    advice = dataclasses.replace(config.advice, history_days=1, min_runs=2)

    @examples(0.4)
    @given(st.lists(measured(), min_size=5, max_size=20))
    def check(made: list[dict[str, Any]]) -> None:
        # Each in a second of its own: a replay alone counts others of the same second as open.
        history = frame([{**row, "submit_s": row["submit_s"] + number} for number, row in enumerate(made)])
        for case in replay_peaks(history, advice, config.tiers):
            job = case.submission
            store = remember_peaks([job.user], history, job.submit_s, advice, config.tiers)
            live = store.evidence(job, job.submit_s)
            assert repr(live) == repr(case.evidence)

    check()
