"""Weights of a predicted duration, its interval, and its scale in the queue."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.backtest import Floats
from advisor.duration.backtest import baselines, evaluate
from advisor.duration.blend import (
    MAX_HABIT,
    MAX_PERCENTILE,
    PEOPLE,
    Margin,
    Parts,
    around,
    at_limit,
    choose_weights,
    conformal_margins,
    point,
    ranking,
)
from advisor.duration.features import CATEGORIES, NUMBERS, Features
from advisor.duration.replay import DurationReplay, replay_durations
from advisor.explain import explain
from advisor.service import advise
from almanac.config import Config, Training
from almanac.records import Duration, JobRequest

JOBS = 400
NOW_S = 1_750_000_000
SUBMITTED = (("ann", 0), ("bob", 10), ("ann", 1800), ("ann", 3600), ("ann", 5401), ("bob", 1000))
History = Callable[[list[dict[str, Any]]], pd.DataFrame]


def made(seed: int, submitted: int = 7200, **log_noise: float) -> tuple[Parts, DurationReplay]:
    """Estimates of known error: actual durations times a factor with this standard deviation of its logarithm.

    submitted: seconds between two jobs.
    """
    generator = np.random.default_rng(seed)
    actual_s = np.exp(generator.normal(6.0, 2.0, JOBS))

    def estimate(name: str) -> Floats:
        estimated: Floats = actual_s * np.exp(generator.normal(0.0, log_noise.get(name, 2.0), JOBS))
        return estimated

    names = ("mean", "middle", "habit", "last_runs", "rolling", "percentile")
    parts = Parts(**{f"{name}_s": estimate(name) for name in names}, log_error=np.zeros(JOBS))
    features = Features(np.full((JOBS, len(NUMBERS)), np.nan), np.full((JOBS, len(CATEGORIES)), "u", dtype=object))
    submit_s = submitted * np.arange(JOBS)
    return parts, DurationReplay(
        features, features, np.full(JOBS, np.nan), actual_s, submit_s, submit_s + actual_s, np.arange(JOBS)
    )


def test_the_queue_never_leans_on_habit_alone() -> None:
    """Even where habit is all that is right: just after users change, the model is what is left."""
    _, queue = choose_weights(*made(1, habit=0.01, mean=3.0), Training())
    assert queue.habit == MAX_HABIT
    _, queue = choose_weights(*made(2, habit=0.5, mean=0.5), Training())
    assert 0.2 <= queue.habit < MAX_HABIT, "the middle of what is nearly as good"
    _, none = choose_weights(*made(2, habit=3.0, mean=0.1), Training())
    assert none.habit == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_people_are_told_the_last_runs_unless_the_model_is_clearly_better(seed: int) -> None:
    def last_runs(**log_noise: float) -> float:
        return choose_weights(*made(seed, **log_noise), Training())[0].last_runs

    assert last_runs(last_runs=0.5, middle=2.0) == 1.0
    assert last_runs(last_runs=1.0, middle=1.0) in (0.5, 1.0), "the mean of two independent errors is a smaller one"
    assert last_runs(last_runs=2.0, middle=0.3) == 0.0


def test_the_queue_relies_on_the_percentile_where_it_ranks_better() -> None:
    _, queue = choose_weights(*made(1, percentile=0.1, mean=3.0), Training())
    assert 0.3 < queue.percentile <= MAX_PERCENTILE
    _, queue = choose_weights(*made(1, percentile=3.0, mean=0.1), Training())
    assert queue.percentile < 0.2 and queue.model > 0.6


def test_one_burst_is_no_proof(config: Config) -> None:
    """Jobs of 400 hours prove something, the same jobs within minutes do not: they share one fate."""
    noise = {"last_runs": 2.0, "middle": 0.3}
    assert choose_weights(*made(1, **noise), config.training)[0].last_runs == 0.0
    assert choose_weights(*made(1, 60, **noise), config.training)[0].last_runs == 1.0


def test_a_burst_is_of_one_user_and_ends_with_a_pause(history_of: History) -> None:
    rows = [{"user": user, "submit_s": NOW_S + at_s, "end_s": NOW_S + 9000} for user, at_s in SUBMITTED]
    past = replay_durations(history_of(rows).sort_values("job_id", ignore_index=True))
    assert [list(past.bursts()).index(number) for number in past.bursts()] == [0, 1, 0, 0, 4, 1]
    assert len(past.select(past.submit_s < 0).bursts()) == 0


def test_a_job_without_earlier_runs_is_the_models(config: Config) -> None:
    parts, _ = made(4)
    alone = dataclasses.replace(parts, last_runs_s=np.full(JOBS, np.nan))
    assert point(config.training.predictor, PEOPLE[0], alone) == pytest.approx(np.maximum(parts.middle_s, 1.0))


def test_weights_of_both_predictors_give_seconds() -> None:
    parts, newest = made(5)
    for predictor in ("almanac", "helios"):
        people, queue = choose_weights(parts, newest, Training(predictor=predictor))
        assert np.isfinite(point(predictor, people, parts)).all()
        assert np.isfinite(ranking(predictor, queue, parts)).all()


def test_the_last_five_runs_of_the_same_job_are_a_baseline(history_of: History) -> None:
    """Name, shape and limit make the same job; a job without such runs goes by the family, and then by the user."""
    rows: list[dict[str, Any]] = [{"name": f"train-{n}", "elapsed_s": 100.0 + n} for n in range(7)]
    rows += [{"name": "train-9", "elapsed_s": 9000.0, "time_limit_s": 36000.0} for _ in range(3)]
    history = history_of([*rows, {"name": "train-10"}])
    past = replay_durations(history)
    is_last = past.submit_s == past.submit_s.max()
    told = baselines(past.select(is_last), past.select(~is_last))
    assert told["same job last 5 median"] == pytest.approx([104.0])
    assert told["user last 5 median"] == pytest.approx([9000.0])


DAY_S = 86_400


def ended(duration_s: Floats, submit_s: list[int], end_s: float = 1000.0 * DAY_S) -> DurationReplay:
    """Jobs of one user of whom nothing else is known; all end at once, unless end_s is NaN."""
    features = Features(
        np.full((len(submit_s), len(NUMBERS)), np.nan), np.full((len(submit_s), len(CATEGORIES)), "u", dtype=object)
    )
    times_s = np.array(submit_s, dtype="int64")
    ends_s = times_s + duration_s if math.isnan(end_s) else np.full(len(times_s), end_s)
    nothing = np.full(len(times_s), np.nan)
    return DurationReplay(features, features, nothing, duration_s, times_s, ends_s, np.arange(len(times_s)))


def margin(past: DurationReplay, coverage: float = 0.8) -> Margin:
    """Of jobs that are all expected to be as far off."""
    (found,) = conformal_margins(np.full(len(past), 1000.0), np.ones(len(past)), past, coverage)
    return found


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=60), st.sampled_from([0.5, 0.8, 0.9]))
def test_of_jobs_that_end_at_once_an_interval_ends_at_the_conformal_rank(
    residuals: list[float], coverage: float
) -> None:
    past = ended(1000 * np.exp(residuals), [DAY_S * place for place in range(len(residuals))])
    _, low, high = margin(past, coverage)
    place = min(math.ceil((len(residuals) + 1) * (1 + coverage) / 2 - 1e-9), len(residuals))
    ordered = sorted(residuals)
    assert (low, high) == (pytest.approx(min(ordered[-place], 0)), pytest.approx(max(ordered[place - 1], 0)))


def test_one_burst_of_odd_jobs_does_not_widen_the_intervals_of_all() -> None:
    """A third of the jobs took a hundred times as long, but they are one submission of a hundred others."""
    usual = np.random.default_rng(1).normal(0, 0.3, 100)
    residuals = np.concatenate([usual, np.full(50, math.log(100))])
    submit_s = [DAY_S * place for place in range(100)] + [DAY_S * 200 + place for place in range(50)]
    high = margin(ended(1000 * np.exp(residuals), submit_s)).high
    assert 0.2 < high < 1.0
    apart = [DAY_S * place for place in range(150)]
    high = margin(ended(1000 * np.exp(residuals), apart)).high
    assert high == pytest.approx(math.log(100))


def test_the_newest_days_count_more_and_the_older_ones_are_not_forgotten() -> None:
    """For 90 days jobs took half to twice as long as said; in the last 3 days, up to ten times as long."""
    old, new = np.linspace(-math.log(2), math.log(2), 900), np.linspace(0, math.log(10), 30)
    submit_s = [place * DAY_S // 10 for place in range(930)]
    past = ended(1000 * np.exp(np.concatenate([old, new])), submit_s, math.nan)
    high = margin(past).high
    assert math.log(3) < high < math.log(10), "of 930 alike, the tenth from above is below twice"
    calm = ended(1000 * np.exp(np.concatenate([old, np.zeros(30)])), submit_s, math.nan)
    high = margin(calm).high
    assert 0.3 < high < math.log(2), "three calm days do not close the interval"


def test_jobs_that_are_expected_to_be_far_off_get_the_wide_interval() -> None:
    """Half of the jobs end within 20% of what was said, the others up to ten times sooner or later."""
    log_error = np.repeat([0.1, 2.0], 200)
    residuals = np.random.default_rng(1).uniform(-1, 1, 400) * np.where(log_error < 1, 0.2, math.log(10))
    past = ended(1000 * np.exp(residuals), [DAY_S * place for place in range(400)])
    margins = conformal_margins(np.full(400, 1000.0), log_error, past, 0.8)
    low_s, high_s = around(np.full(4, 1000.0), np.array([0.0, 0.1, 2.0, 9.0]), margins)
    assert (high_s[:2] < 1300).all() and (low_s[:2] > 750).all()
    assert (high_s[2:] > 4000).all() and (low_s[2:] < 250).all()
    few = conformal_margins(np.full(199, 1000.0), log_error[101:300], past.select(np.arange(101, 300)), 0.8)
    assert len(few) == 1, "too few for two classes"


@pytest.mark.parametrize(("over_s", "counted_s"), [(-1, 3599), (0, 3600), (1, 3600), (59, 3600), (61, 3661)])
def test_a_job_killed_within_a_minute_after_its_limit_counts_as_the_limit(over_s: int, counted_s: int) -> None:
    past = ended(np.array([3600.0 + over_s]), [NOW_S])
    past.features.number("log_time_limit")[:] = math.log(3600)
    assert at_limit(past.duration_s, past.features) == pytest.approx([counted_s])


@pytest.mark.parametrize(
    ("low_s", "high_s", "told"),
    [(600.0, 7200.0, ", usually 10 min to 2 h ("), (60.0, 1800.0, ", usually 1 min to 30 min ("),
     (60.0, 1860.0, ", too irregular for a range ("), (None, None, "predicted time: 10 min (")],
)  # fmt: skip
def test_an_interval_wider_than_30_times_is_not_told(
    low_s: float | None, high_s: float | None, told: str, history_of: History, config: Config
) -> None:
    request = JobRequest(user="ann", job_name="train-1", gpu_count=1)
    duration = Duration(600.0, 600.0, 600.0, 600.0, "name", 5, low_s, high_s)
    advice = dataclasses.replace(advise(request, history_of([{}]), None, config, NOW_S), duration=duration)
    assert told in " ".join(explain(advice).split())


def test_an_evaluation_says_what_held_at_each_time(site_history: pd.DataFrame, config: Config) -> None:
    weekly = dataclasses.replace(config, training=dataclasses.replace(config.training, retrain_hours=168))
    result = evaluate(site_history, weekly)
    assert result.coverage is not None and result.told is not None
    assert len(result.coverage_by_quarter) == 4
    assert np.mean(result.coverage_by_quarter) == pytest.approx(result.coverage, abs=0.01)
    assert 0.5 < result.told <= 1.0, "its families are regular"
