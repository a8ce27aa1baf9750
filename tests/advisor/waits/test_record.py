"""Recent waits by tier and size: which cells speak, and which gains are said."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from advisor.waits.backtest import replay_waits
from advisor.waits.record import (
    HISTORY_DAYS,
    MIN_PAIRS,
    MIN_SCORED,
    NEWEST,
    PAIR_S,
    RECENT_DAYS,
    WaitCell,
    cells_of,
    coverage,
    learn_gains,
    pinball_s,
    recent_cells,
    weekly_gain,
)
from almanac.units import size_class

NOW_S = 1_750_000_000
ENOUGH = NEWEST + MIN_SCORED
WEEK_S = 7 * 86_400.0


def cell(waits_s: list[float], every_s: float = 600.0, first_s: float = 0.0) -> WaitCell:
    """Jobs submitted one after the other, in the order of their starts."""
    submit_s = first_s + every_s * np.arange(len(waits_s))
    start_s = submit_s + waits_s
    order = np.argsort(start_s, kind="stable")
    return WaitCell(submit_s[order], start_s[order])


def draws(number: int, scale_s: float = 300.0, seed: int = 1) -> list[float]:
    found: list[float] = np.random.default_rng(seed).exponential(scale_s, number).tolist()
    return found


def history(**columns: object) -> pd.DataFrame:
    """One job every 10 minutes up to an hour ago, that waited 60 s."""
    number = len(columns.get("tier", [None] * ENOUGH))  # type: ignore[arg-type]
    start_s = NOW_S - 3600.0 - 600.0 * np.arange(number)[::-1]
    base = {"user": "a", "name_key": "k", "gpu_count": 1, "is_array": False, "state": "COMPLETED", "tier": "hbm80g"}
    rows = {"job_id": range(number), "submit_s": start_s - 60, "start_s": start_s, "end_s": start_s + 60, **base}
    return pd.DataFrame({**rows, **columns})


def test_predictions_know_only_what_had_started() -> None:
    """Waits of 0, 1, 2, ... s; a job's quartiles are those of the NEWEST jobs before it."""
    found = cell([float(n) for n in range(NEWEST + 3)])
    quartiles_s = found.quartiles_at(found.submit_s)
    assert np.isnan(quartiles_s[:NEWEST]).all() and not np.isnan(quartiles_s[NEWEST:]).any()
    assert quartiles_s[NEWEST].tolist() == np.quantile(range(NEWEST), (0.25, 0.5, 0.75)).tolist()
    late = WaitCell(found.submit_s, found.start_s + 1e6)
    assert np.isnan(late.quartiles_at(late.submit_s)).all(), "none had started when these were submitted"


def test_coverage_and_pinball_by_hand() -> None:
    quartiles_s = np.array([[10.0, 20.0, 40.0]] * 4)
    waits_s = np.array([0.0, 10.0, 41.0, 100.0])
    assert coverage(waits_s, quartiles_s) == 0.5
    assert pinball_s(waits_s, quartiles_s)[3] == pytest.approx((0.25 * 90 + 0.5 * 80 + 0.75 * 60) / 3)
    assert pinball_s(waits_s, quartiles_s)[0] == pytest.approx((0.75 * 10 + 0.5 * 20 + 0.25 * 40) / 3)


def test_a_wait_is_predicted_after_enough_predictions_that_held() -> None:
    now_s = 1e7
    assert cell(draws(ENOUGH - 1, 30)).predicted_now(now_s, False) is None
    assert cell(draws(ENOUGH + 100, 30)).predicted_now(now_s, False) is None, "older than what is judged"
    known = cell(draws(ENOUGH + 100, 30), first_s=now_s - 600 * 200)
    low_s, median_s, high_s = known.predicted_now(now_s, False) or (0, 0, 0)
    assert 5 < low_s < median_s < high_s < 60
    assert known.predicted_now(now_s, True) is None, "no job was submitted while another one waited"
    assert cell([0.0] * ENOUGH, first_s=now_s - 600 * 200).predicted_now(now_s, False) == (0, 0, 0)
    growing = cell([1.05**n for n in range(ENOUGH + 30)], first_s=now_s - 600 * 200)
    assert growing.predicted_now(now_s, False) is None, "each job waits longer than those before it"


def test_jobs_count_that_were_submitted_in_the_same_state() -> None:
    """Pairs: the first starts after 300 s; the second, submitted while the first waits, after an hour."""
    first_s = 10_800.0 * np.arange(200)
    found = WaitCell(
        np.stack([first_s, first_s + 60], axis=1).ravel(), np.stack([first_s + 300, first_s + 3660], axis=1).ravel()
    )
    assert found.some_wait_at(found.submit_s).tolist() == [False, True] * 200
    end_s = 10_800.0 * 200
    assert found.predicted_now(end_s, False) == (300, 300, 300)
    assert found.predicted_now(end_s, True) == (3600, 3600, 3600)
    past = found.predicted(end_s - 10_800.0 + np.array([0.0, 60.0, 299.0, 300.0, 3659.0, 3660.0]))
    assert past[:, 1].tolist() == [300, 3600, 3600, 3600, 3600, 300]
    assert not WaitCell(np.empty(0), np.empty(0)).some_wait_at(np.array([1.0])).any()


def gained(asked: WaitCell, advised: WaitCell) -> tuple[int, float] | None:
    return weekly_gain(asked, advised, WEEK_S * 2)


def over_weeks(waits_s: list[float]) -> WaitCell:
    """Spread over two weeks."""
    return cell(waits_s, every_s=2 * WEEK_S / len(waits_s) - 1)


def test_a_gain_is_said_if_half_of_the_jobs_had_it_in_each_week() -> None:
    slow, fast = over_weeks([7200.0 + each for each in draws(100)]), over_weeks(draws(100, seed=2))
    found = gained(slow, fast)
    assert found is not None
    assert found[0] == 99, "the first one is of the week before"
    assert 6900 < found[1] < 7400
    assert gained(fast, slow) is None, "it starts later"
    assert gained(over_weeks(draws(100, seed=3)), fast) is None, "no difference"
    assert gained(slow, cell(draws(100), first_s=2 * WEEK_S + 2 * PAIR_S)) is None, "not at the same time"
    assert gained(over_weeks([7200.0] * (2 * MIN_PAIRS - 2)), fast) is None, "too few"
    assert gained(slow, WaitCell(np.empty(0), np.empty(0))) is None
    changing = over_weeks([7200.0] * 50 + [10.0] * 50)
    assert gained(changing, fast) is None, "not in the newest week"
    assert weekly_gain(slow, fast, WEEK_S * 4) is None, "no pairs of the newest week"


def test_noise_seldom_makes_a_gain() -> None:
    """Two cells alike, 200 times."""
    said = [gained(over_weeks(draws(80, seed=seed)), over_weeks(draws(80, seed=seed + 10_000))) for seed in range(200)]
    assert sum(each is not None for each in said) <= 10


def test_a_replay_scores_predictions_and_gains_beside_controls() -> None:
    """Six weeks; hbm80g waits 2 h longer than hbm40g, in both sizes."""
    number = 2000
    rng = np.random.default_rng(5)
    jobs = history(tier=["hbm80g", "hbm40g"] * (number // 2), gpu_count=[1, 1, 4, 4] * (number // 4))
    jobs["start_s"] = NOW_S - 1800.0 * np.arange(number)[::-1]
    jobs["submit_s"] = jobs["start_s"] - rng.exponential(300, number) - 7200 * (jobs["tier"] == "hbm80g")
    found = replay_waits(jobs, jobs["tier"], 0.4)
    every, *groups = found.groups
    assert {each.group for each in groups} == {
        f"{tier}, {size}" for tier in ("hbm40g", "hbm80g") for size in ("1 GPU", "4 GPUs")
    }
    assert every.jobs == sum(each.jobs for each in groups) == 0.6 * number
    assert every.spoken > 0.9 * every.jobs
    assert 0.4 < every.coverage < 0.6
    assert found.gains.said > 0
    assert 0.4 < found.gains.did < 0.8
    gains = {each.method: each.gain for each in found.comparison.methods if each.gain}
    assert gains.keys() == {"newest 50 waits", "newest 50 of any size", "no wait", "shuffled"}
    assert gains["no wait"].low > 0


def test_a_replay_of_nothing_has_nothing_to_score() -> None:
    found = replay_waits(history().head(0), history()["tier"].head(0))
    assert found.groups[0].jobs == found.gains.said == found.comparison.units == 0


def test_sizes_are_powers_of_two_and_any() -> None:
    cells = cells_of(history(gpu_count=[1, 3] * (ENOUGH // 2)), history()["tier"])
    assert set(cells) == {("hbm80g", size) for size in ("1", "4", "any")}
    assert [size_class(gpus) for gpus in (0, 1, 2, 3, 4, 5, 8, 9)] == [1, 1, 2, 4, 4, 8, 8, 16]


def test_the_gain_is_that_of_the_size() -> None:
    number = 1000
    both = history(tier=["hbm80g", "hbm40g"] * (number // 2), gpu_count=4)
    both["start_s"] = NOW_S - 1800.0 * np.arange(1, number + 1)[::-1]
    both["submit_s"] = both["start_s"] - np.where(both["tier"] == "hbm80g", 7260.0, 60.0)
    waits = learn_gains(both, NOW_S)
    assert {name: gain_s for name, (_, gain_s) in waits.gains.items()} == {
        f"hbm80g>hbm40g/{size}": 7200.0 for size in ("4", "any")
    }
    [gain] = waits.of(["hbm80g", "hbm40g"], "hbm40g", 4)
    assert (gain.asked, gain.gain_s) == ("hbm80g", 7200.0)
    assert waits.of(["hbm80g"], None, 4) == waits.of(["hbm40g"], "hbm80g", 4) == ()


@pytest.mark.parametrize(
    ("changes", "speaks"),
    [({}, True), ({"tier": [None] * ENOUGH}, False), ({"state": "REQUEUED"}, False),
     ({"is_array": True, "submit_s": NOW_S - 10_000_000.0}, False), ({"end_s": np.nan, "state": "RUNNING"}, True)],
    ids=["jobs", "no tier", "parts", "one array", "still running"],
)  # fmt: skip
def test_which_jobs_count(changes: dict[str, object], speaks: bool) -> None:
    jobs = history(**changes)
    cells = recent_cells(jobs, NOW_S, jobs["tier"])
    assert bool(cells) <= bool(changes.get("state") != "REQUEUED")
    assert any(each.speaks(NOW_S) for each in cells.values()) == speaks


def test_old_jobs_and_later_ones_do_not_count() -> None:
    jobs = history()
    for now_s in (NOW_S + HISTORY_DAYS * 86_400, NOW_S - 20 * 86_400):
        assert not recent_cells(jobs, now_s, jobs["tier"])
    later_s = NOW_S + RECENT_DAYS * 86_400
    assert not recent_cells(jobs, later_s, jobs["tier"])["hbm80g", "1"].speaks(later_s), "nothing to judge"
