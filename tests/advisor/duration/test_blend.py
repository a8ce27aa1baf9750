"""What each part of a predicted duration weighs: for the queue, and for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from advisor.duration.baselines import baselines
from advisor.duration.blend import MAX_HABIT, PEOPLE, Parts, choose_weights, point, ranking
from advisor.duration.features import CATEGORIES, NUMBERS, Features
from advisor.evaluation.replay import DurationReplay, replay_durations
from advisor.evaluation.scores import Floats
from almanac.config import Config, Training

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

    parts = Parts(*(estimate(name) for name in ("mean", "middle", "habit", "last_runs", "rolling")))
    features = Features(np.full((JOBS, len(NUMBERS)), np.nan), np.full((JOBS, len(CATEGORIES)), "u", dtype=object))
    submit_s = submitted * np.arange(JOBS)
    return parts, DurationReplay(
        features, np.full(JOBS, np.nan), actual_s, submit_s, submit_s + actual_s, np.arange(JOBS)
    )


def test_the_queue_never_leans_on_habit_alone() -> None:
    """Even where habit is all that is right: just after users change, the model is what is left."""
    _, queue = choose_weights(*made(1, habit=0.01, mean=3.0), Training())
    assert queue.habit == MAX_HABIT


def test_the_queue_takes_the_middle_of_what_is_nearly_as_good() -> None:
    _, queue = choose_weights(*made(2, habit=0.5, mean=0.5), Training())
    assert 0.2 <= queue.habit < MAX_HABIT
    _, none = choose_weights(*made(2, habit=3.0, mean=0.1), Training())
    assert none.habit == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_people_are_told_the_last_runs_unless_the_model_is_clearly_better(seed: int) -> None:
    def last_runs(**log_noise: float) -> float:
        return choose_weights(*made(seed, **log_noise), Training())[0].last_runs

    assert last_runs(last_runs=0.5, middle=2.0) == 1.0
    assert last_runs(last_runs=1.0, middle=1.0) in (0.5, 1.0), "the mean of two independent errors is a smaller one"
    assert last_runs(last_runs=2.0, middle=0.3) == 0.0


def test_one_burst_is_no_proof(config: Config) -> None:
    """What is clear from jobs of 400 hours is not from the same jobs within minutes: they share one fate."""
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
    alone = Parts(parts.mean_s, parts.middle_s, parts.habit_s, np.full(JOBS, np.nan), parts.rolling_s)
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
