"""Energy is right when the counter is not: dips, spikes, resets, replaced cards, MIG, and the ends of a job."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from small_sites import side_by_side

import telemetry.metrics.partials
from telemetry.attribution.allocations import JobRun

START_S = 1_741_046_400 - 1200  # twenty minutes before midnight UTC
SHARE_J = 300.0 * 60
"""The energy of one sample: 300 W, a sample every 60 s."""


def card(readings: list[float] | np.ndarray, step_s: int = 60, **more: Any) -> pd.DataFrame:
    times = (START_S + step_s * np.arange(len(readings))) * 1000
    return pd.DataFrame({"host": "n1", "gpu": 0, "mig": "", "time_ms": times, "energy_mj": readings, **more})


def steady(samples: int = 60, start_mj: float = 2.02e11, step_s: int = 60) -> np.ndarray:
    """The counter of a card at 300 W."""
    return start_mj + 300_000.0 * step_s * np.arange(samples)


def job(length_s: int = 3600, gpu_count: int = 1) -> JobRun:
    return JobRun(1, START_S, START_S, START_S + length_s, gpu_count, ("n1",))


def energy(run: Any, frame: pd.DataFrame, length_s: int = 3600, **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = run(frame, [job(length_s)], **more)[0][1]
    return row


def energies(run: Any, frames: list[pd.DataFrame]) -> list[dict[str, Any]]:
    """Of an hour each."""
    return [row for row, _ in side_by_side(run, [(frame, job()) for frame in frames])]


def test_energy_and_power_of_a_whole_job(run: Any) -> None:
    """300 W for an hour. The first and the last reading are 59 minutes apart."""
    row = energy(run, card(steady()))
    assert row["energy_j"] == pytest.approx(300 * 3600, rel=1e-12)
    assert row["energy_power_w"] == pytest.approx(300, rel=1e-12)
    assert row["energy_measured_frac"] == pytest.approx(59 / 60, rel=1e-12)
    assert (row["energy_resets"], row["energy_rejected"]) == (0, 0)


def test_a_reset_counts_the_reading_after_it(run: Any) -> None:
    """1000 to 4000 mJ: 3 J; the driver loads again and shows 500: 0.5 J; to 2500: 2 J. 5.5 J in 30 of 40 s."""
    row = energy(run, card([1000, 4000, 500, 2500], step_s=10), 40)
    assert row["energy_j"] == pytest.approx(5.5 / 30 * 40, rel=1e-12)
    assert (row["energy_resets"], row["energy_rejected"]) == (1, 0)


def changed(*changes: tuple[Any, Any]) -> np.ndarray:
    """The counter of a steady card with these readings at these places."""
    readings = steady()
    for place, values in changes:
        readings[place] = values
    return readings


WRONG = product((0, 1, 20, 58, 59), (0.0, 9e15, 1e11, 2.02e11 - 5e8, 2.02e11 + 3e9))
COUNTERS = [
    *((changed((place, value)), 0, 1, SHARE_J) for place, value in WRONG),  # costs at most its own share
    (changed(([10, 30, 31, 32], [0.0, 9e15, 0.0, 1.0])), 0, 4, 0),
    *((changed((slice(place, place + 15), 0.0)), 0, 15, 0) for place in (0, 20, 45)),  # a sensor shows 0 for long
    # A dip that rises, and returns to the old line.
    *(
        (changed((slice(20, 20 + n), line_mj + steady(n, 0.0))), 0, n, 0)
        for n in (2, 4, 8)
        for line_mj in (0, 1e9, 5e10)
    ),
    (changed((slice(25, None), steady(35, 6e6))), 1, 0, SHARE_J),  # the driver loads again
    (changed((slice(20, 28), steady(8, 3e6)), (slice(28, None), steady(32, 6e6))), 2, 0, 2 * SHARE_J),  # and again
]
"""Readings, then the resets, the rejected readings, and the most that is lost in J."""


def test_faults_of_a_counter_cost_no_more_than_the_steps_beside_them(run: Any) -> None:
    found = energies(run, [card(readings) for readings, *_ in COUNTERS])
    for number, ((_, resets, rejected, most_j), row) in enumerate(zip(COUNTERS, found, strict=True)):
        assert row["energy_j"] == pytest.approx(300 * 3600, rel=1e-12, abs=most_j), number
        assert (row["energy_resets"], row["energy_rejected"]) == (resets, rejected), number


def test_a_counter_that_never_moves_has_no_energy(run: Any) -> None:
    for row in energies(run, [card(np.full(60, value), power_w=300.0) for value in (0.0, 2.02e11)]):
        assert (row["energy_j"], row["energy_measured_frac"], row["energy_rejected"]) == (None, None, 60)
        assert "energy_j: no possible reading" in row["reasons"]


def test_a_small_step_back_is_no_reset(run: Any) -> None:
    readings = steady()
    readings[20] += 500_000  # as 8 W more for a minute
    readings[30] += 19_000_000  # above the reading after it
    row = energy(run, card(readings))
    assert row["energy_j"] == pytest.approx(300 * 3600, rel=1e-12)
    assert row["energy_resets"] == 0


def test_a_replaced_card_adds_no_energy(run: Any) -> None:
    """An older or a newer one, with and without uuids."""
    frames = []
    for other_mj, names in product((3.2e12, 4e8), ({}, {"uuid": ["GPU-a"] * 30 + ["GPU-b"] * 30})):
        readings = steady()
        readings[30:] = steady(30, other_mj)
        frames.append(card(readings, **names))
    for row in energies(run, frames):
        assert row["energy_j"] == pytest.approx(300 * 3600, abs=SHARE_J)
        assert row["energy_resets"] == 0
        assert row["energy_measured_frac"] == pytest.approx(58 / 60, rel=1e-12)


def test_a_replaced_card_with_a_similar_counter_is_told_by_its_uuid(run: Any) -> None:
    readings = steady()
    readings[30:] += 9e6
    row = energy(run, card(readings, uuid=["GPU-a"] * 30 + ["GPU-b"] * 30))
    assert row["energy_j"] == pytest.approx(300 * 3600, rel=1e-12)


def test_an_exporter_that_reads_the_counters_every_30_s_shows_no_fault(run: Any) -> None:
    """A scrape every 10 s sees the same reading three times, then a step of 30 s at 390 W, near the card's limit."""
    readings = 2e11 + 390_000.0 * 30 * (np.arange(360) // 3)
    row = energy(run, card(readings, step_s=10))
    assert row["energy_j"] == pytest.approx(390 * 3600, rel=0.01)
    assert row["energy_rejected"] == 0


def test_the_ends_of_a_short_job_count_with_the_power_there(run: Any) -> None:
    """Five minutes, scraped every 60 s from second 50 on: 75 W up to second 70, then 300 W."""
    seconds = np.arange(50, 300, 60)
    readings = 2e11 + 1000.0 * (75 * np.minimum(seconds, 70) + 300 * np.maximum(seconds - 70, 0))
    frame = card(readings).assign(time_ms=(START_S + seconds) * 1000, power_w=np.where(seconds < 70, 75.0, 300.0))
    row = energy(run, frame, 300)
    assert row["energy_j"] == pytest.approx(75 * 70 + 300 * 230, rel=1e-12)
    assert row["energy_measured_frac"] == pytest.approx(240 / 300, rel=1e-12)


def test_one_power_sample_does_not_stand_for_a_long_gap(run: Any) -> None:
    """The exporter dies after 40 of 60 minutes, just as the GPU pauses: one minute at 50 W, then the mean power."""
    readings = steady()[:41]
    row = energy(run, card(readings, power_w=[300.0] * 40 + [50.0]))
    assert row["energy_j"] == pytest.approx(300 * 2400 + 50 * 60 + 300 * 1140, rel=1e-12)
    assert row["energy_measured_frac"] == pytest.approx(40 / 60, rel=1e-12)


def test_a_silent_gpu_counts_with_the_mean_power_of_the_others(run: Any) -> None:
    """Of three nodes, one has no telemetry, and one has no energy counter."""
    frame = pd.concat([card(steady()), card(np.full(60, np.nan)).assign(host="n2")])
    row = run(frame, [replace(job(gpu_count=3), hosts=("n1", "n2", "n3"))])[0][1]
    assert row["energy_j"] == pytest.approx(3 * 300 * 3600, rel=1e-12)
    assert row["energy_power_w"] == pytest.approx(300, rel=1e-12)
    assert row["energy_measured_frac"] == pytest.approx(59 / 60 / 3, rel=1e-12)


def mig(cards: int = 2, instances: int = 7, samples: int = 31) -> pd.DataFrame:
    """Cards at 300 W whose counter each of their instances repeats."""
    frames = [
        card(steady(samples, 1e11 * (gpu + 1))).assign(gpu=gpu, mig=str(1 + number), gr_engine_active_frac=0.5)
        for gpu in range(cards)
        for number in range(instances)
    ]
    return pd.concat(frames, ignore_index=True)


def test_mig_instances_of_a_job_count_their_card_once(run: Any) -> None:
    """Two cards at 300 W for 30 minutes: 0.3 kWh, not 2.1."""
    jobs, gpus = run(mig(), [job(1800, 14)])
    assert jobs[1]["energy_j"] / 3.6e6 == pytest.approx(0.3, rel=1e-12)
    assert jobs[1]["energy_power_w"] == pytest.approx(300, rel=1e-12)
    assert jobs[1]["energy_measured_frac"] == pytest.approx(29 / 30, rel=1e-12)
    assert {row["energy_j"] for row in gpus} == {None}


def test_some_instances_of_a_card_have_no_energy_and_that_is_said(run: Any) -> None:
    frame = mig(cards=1)
    frame["job_label"] = np.where(frame.mig == "3", 1, 2)
    jobs, gpus = run(frame, [job(1800, 1), JobRun(2, START_S, START_S, START_S + 1800, 6, ("n1",))])
    assert len(gpus) == 7
    for row in jobs.values():
        assert (row["energy_j"], row["energy_power_w"], row["energy_measured_frac"]) == (None, None, None)
        assert "energy_j: MIG instances share the counter of their GPU" in row["reasons"]


def test_readings_without_any_possible_step_have_no_energy(run: Any) -> None:
    row = energy(run, card([5e11, 2e11, 9e15, 7e11]), 240)
    assert (row["energy_j"], row["energy_rejected"]) == (None, 4)
    assert "energy_j: no possible reading" in row["reasons"]


SECONDS = np.arange(3601)
USED_MJ = 1000 * np.concatenate([[0.0], np.cumsum(np.where(SECONDS[:3600] < 1800, 80.0, 350.0))])
"""The true energy since the start of the job, each second: 80 W for 30 minutes, then 350 W."""


def scraped(step_s: int, has_power: bool = True) -> tuple[np.ndarray, pd.DataFrame]:
    """Seconds, and samples of that card, from a third of the step on."""
    seconds = np.arange(step_s / 3, 3600, step_s)
    frame = card(2e10 + np.interp(seconds, SECONDS, USED_MJ)).assign(time_ms=(1000 * (START_S + seconds)).astype(int))
    return seconds, frame.assign(power_w=np.where(seconds < 1800, 80.0, 350.0) if has_power else np.nan)


@pytest.mark.parametrize("step_s", [10, 60])
def test_a_frozen_counter_is_no_use_of_0_w(run: Any, step_s: int) -> None:
    """The counter stands at one value. Then it goes on from there, or shows the energy of this time as well."""
    cases = list(product(((0, 1200), (1000, 2500), (1800, 3600)), (True, False)))
    frames, still_samples = [], []
    for (from_s, until_s), catches_up in cases:
        seconds, frame = scraped(step_s)
        still = (seconds >= from_s) & (seconds < until_s)
        readings = frame.energy_mj.to_numpy(copy=True)
        if not catches_up:
            readings[seconds >= until_s] -= np.ptp(readings[still])
        readings[still] = readings[still][0]
        frames.append(frame.assign(energy_mj=readings))
        still_samples.append(np.sum(still))
    for ((from_s, until_s), catches_up), row, still in zip(cases, energies(run, frames), still_samples, strict=True):
        assert row["energy_j"] == pytest.approx(USED_MJ[-1] / 1000, rel=0.02)
        is_known = catches_up and from_s > 0 and until_s < 3600
        measured_s = 3600 if is_known else 3600 - (until_s - from_s)
        assert row["energy_measured_frac"] == pytest.approx(measured_s / 3600, abs=2 * step_s / 3600)
        assert row["energy_rejected"] == pytest.approx(still - 1, abs=1)


def test_a_frozen_counter_without_power_samples_counts_with_the_mean_power(run: Any) -> None:
    readings = steady()
    readings[30:] = readings[30]
    row = energy(run, card(readings))
    assert row["energy_j"] == pytest.approx(300 * 3600, rel=1e-12)
    assert row["energy_measured_frac"] == pytest.approx(30 / 60, rel=1e-12)


@pytest.mark.parametrize("step_s", [10, 60])
def test_an_exporter_that_reads_the_counter_rarely_is_measured(run: Any, step_s: int) -> None:
    """Its last reading may be as old as its interval."""
    cases = list(product((60, 120, 600), (True, False)))
    frames = []
    for collects_s, has_power in cases:
        seconds, frame = scraped(step_s, has_power)
        readings = np.interp(seconds // collects_s * collects_s, seconds, frame.energy_mj)
        frames.append(frame.assign(energy_mj=readings))
    for (collects_s, _), row in zip(cases, energies(run, frames), strict=True):
        assert row["energy_j"] == pytest.approx(USED_MJ[-1] / 1000, rel=0.03 + collects_s / 3600)
        assert row["energy_measured_frac"] >= 0.98 - 2 * collects_s / 3600


@pytest.mark.parametrize("step_s", [10, 60])
def test_another_unit_of_the_counter_is_unmeasured_time(run: Any, step_s: int) -> None:
    """The exporter shows mJ, and after an upgrade J; or uJ."""
    cases = [(1800, 1 / 1000), (1800, 1000), (3000, 1 / 1000)]
    frames = []
    for from_s, factor in cases:
        seconds, frame = scraped(step_s)
        frame.loc[seconds >= from_s, "energy_mj"] *= factor
        frames.append(frame)
    for (from_s, _), row in zip(cases, energies(run, frames), strict=True):
        assert row["energy_j"] == pytest.approx(USED_MJ[-1] / 1000, rel=0.01)
        assert row["energy_measured_frac"] == pytest.approx(from_s / 3600, abs=2 * step_s / 3600)
        assert row["energy_resets"] == 0


def test_a_counter_that_shows_j_for_some_time_loses_nothing(run: Any) -> None:
    seconds, frame = scraped(10)
    frame.loc[(seconds >= 900) & (seconds < 2400), "energy_mj"] /= 1000
    row = energy(run, frame)
    assert row["energy_j"] == pytest.approx(USED_MJ[-1] / 1000, rel=0.01)
    assert row["energy_measured_frac"] > 0.99


def test_a_counter_in_j_has_no_energy(run: Any) -> None:
    row = energy(run, card(steady() / 1000, power_w=300.0))
    assert (row["energy_j"], row["energy_rejected"]) == (None, 60)


FAULTS = st.lists(
    st.tuples(st.sampled_from(["dip", "spike", "reset", "card", "lost", "frozen"]), st.integers(0, 119)), max_size=6
)


@given(faults=FAULTS, seed=st.integers(0, 10**6), phase_s=st.integers(0, 29))
@examples(0.08)
def test_faults_on_a_known_power_curve(run: Any, faults: list[tuple[str, int]], seed: int, phase_s: int) -> None:
    """Each fault costs at most the energy of the steps next to it; how the hours are cut changes nothing."""
    rng = np.random.default_rng(seed)
    watts = np.repeat(rng.uniform(50, 400, 60), 60)  # each second of an hour, across midnight
    used_mj = 1000 * np.concatenate([[0.0], np.cumsum(watts)])
    seconds = phase_s + 30 * np.arange(119)
    frame = card(2e11 + used_mj[seconds]).assign(
        time_ms=(START_S + seconds) * 1000, power_w=watts[seconds], uuid="GPU-a"
    )
    # Restarts come first and in order of time: a counter does not restart from a faulty reading, or below 0.
    wanted = {(kind not in ("reset", "card", "frozen"), place % len(frame), kind) for kind, place in faults}
    for _, row, kind in sorted(wanted):
        if kind == "dip":
            frame.loc[row, "energy_mj"] *= rng.choice([0.0, 0.5])
        elif kind == "spike":
            frame.loc[row, "energy_mj"] = rng.choice([9e15, 5e11])
        elif kind == "reset" and row:
            frame.loc[row:, "energy_mj"] -= frame.loc[row - 1, "energy_mj"]
        elif kind == "card":
            frame.loc[row:, "energy_mj"] += 1e10
            frame.loc[row:, "uuid"] = f"GPU-{row}"
        elif kind == "frozen":
            last = min(row + 30, len(frame) - 1)
            frame.loc[last:, "energy_mj"] -= frame.loc[last, "energy_mj"] - frame.loc[row, "energy_mj"]
            frame.loc[row:last, "energy_mj"] = frame.loc[row, "energy_mj"]
        elif kind == "lost":
            frame.loc[row, "energy_mj"] = np.nan
    found = energy(run, frame)
    assert found["energy_j"] == pytest.approx(used_mj[-1] / 1000, abs=(2 + 3 * len(faults)) * 400 * 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(telemetry.metrics.partials, "ROWS_PER_CHUNK", 1)
        by_hour = energy(run, frame)
    for other in (by_hour, energy(run, frame, stored=False)):
        for name in ("energy_j", "energy_measured_frac", "energy_resets", "energy_rejected"):
            assert other[name] == pytest.approx(found[name], rel=1e-12), name
