"""Waiting jobs, predicted by what was known at their submission, and by what was known at their start.

Run: make bench-predictors. `almanac reprioritize` ranks by what is known now, so a job's last site factor is that of
its start. Rolling origin on the last 40% of each trace, with the model in use at that time. 95% intervals by bootstrap
over users. A trace that is not here, or that has no waits, is named.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from figures import Figure, at_least, at_most, main
from traces import DATA, TRACES, load_trace

from advisor.backtest import Floats, spearman, training_times
from advisor.duration.backtest import predictions_of
from advisor.duration.model import DurationModel, fit, learned_rows
from advisor.duration.replay import replay_durations
from almanac.config import Config

SHARE, RESAMPLES = 0.4, 500
SUBMIT, START = "submission", "start"
TWIN = "same job last 5 median"
LONG_S = 600
Statistic = Callable[[pd.DataFrame], float]


def predicted(history: pd.DataFrame, config: Config) -> pd.DataFrame:
    """A row per tested job: user, wait_s, actual_s, and by time of asking the seconds of each predictor."""
    past = replay_durations(history)
    rows = np.isfinite(past.duration_s)
    past, starts_s = past.select(rows), np.fmax(past.submit_s, history["start_s"].to_numpy("float64")[rows])
    at_start = dataclasses.replace(past, features=past.at_start)
    known = {SUBMIT: (past, past.submit_s.astype("float64")), START: (at_start, starts_s)}
    is_tested = past.submit_s >= np.quantile(past.submit_s, 1 - SHARE)
    found: dict[str, Floats] = {}
    previous: DurationModel | None = None
    first_s, last_s = float(past.submit_s[is_tested].min()), float(starts_s.max())
    edges_s = [*training_times(first_s, last_s + 1, config.training.retrain_hours * 3600), math.inf]
    for since_s, until_s in itertools.pairwise(edges_s):
        before = past.select(past.end_s < since_s)
        learned = before.select(learned_rows(before.job_id, before.submit_s, before.end_s, previous))
        fitted = fit(learned, config.training, math.ceil(since_s), previous)
        previous = fitted.model if fitted else None
        for when, (replay, at_s) in known.items():
            asked = np.flatnonzero(is_tested & (at_s >= since_s) & (at_s < until_s))
            jobs = replay.select(asked)
            told = previous.predict_all(jobs.features, jobs.rolling_s) if previous else None
            for name, seconds in predictions_of(told, jobs, before).items():
                found.setdefault(f"{name}, {when}", np.full(len(past), math.nan))[asked] = seconds
    whole = {"user": past.features.category("user"), "wait_s": starts_s - past.submit_s, "actual_s": past.duration_s}
    return pd.DataFrame(whole | found)[is_tested]


def rank(when: str) -> Statistic:
    return lambda jobs: spearman(jobs[f"ranking, {when}"].to_numpy(), jobs["actual_s"].to_numpy())


def error(predictor: str, when: str) -> Statistic:
    return lambda jobs: float(np.median(np.abs(np.log(jobs[f"{predictor}, {when}"] / jobs["actual_s"]))))


def interval(statistic: Statistic, jobs: pd.DataFrame) -> tuple[float, float]:
    """Return the 95% interval, by bootstrap over users."""
    own = list(jobs.groupby("user").indices.values())
    rng = np.random.default_rng(1)
    draws = (rng.integers(0, len(own), len(own)) for _ in range(RESAMPLES))
    values = [statistic(jobs.iloc[np.concatenate([own[user] for user in draw])]) for draw in draws]
    low, high = np.percentile(values, (2.5, 97.5)).tolist()
    return low, high


def scores(about: str, jobs: pd.DataFrame) -> list[Figure]:
    figures = [Figure(f"{about}: jobs", len(jobs)), Figure(f"{about}: users", jobs["user"].nunique())]
    measures = {
        "Spearman of duration, ranking value": rank,
        "median |log error|": lambda when: error("almanac", when),
        f"median |log error| of the {TWIN}": lambda when: error(TWIN, when),
    }
    for (measure, of), when in itertools.product(measures.items(), (SUBMIT, START)):
        low, high = interval(of(when), jobs)
        text = f"{of(when)(jobs):.3f} [{low:.3f}, {high:.3f}]"
        figures.append(Figure(f"{about}: {measure}, known at {when}", text))

    def gain(jobs: pd.DataFrame) -> float:
        return rank(START)(jobs) - rank(SUBMIT)(jobs)

    def ratio(jobs: pd.DataFrame) -> float:
        return error("almanac", START)(jobs) / error(TWIN, SUBMIT)(jobs)

    text = f"{about}: error known at start / that of the {TWIN} known at submission"
    return [
        *figures,
        at_least(f"{about}: Spearman gained by the start, lower 95% end", interval(gain, jobs)[0], 0.0),
        at_most(text, ratio(jobs), 0.95),
        at_most(f"{text}, upper 95% end", interval(ratio, jobs)[1], 1.0),
    ]


def measure() -> list[Figure]:
    figures = []
    for name, (file, goal) in TRACES.items():
        path = DATA / file
        if goal is None or not path.exists():
            figures.append(Figure(f"{name}: " + ("too few jobs for a model" if path.exists() else "not here"), file))
            continue
        with tempfile.TemporaryDirectory() as folder:
            jobs = predicted(load_trace(path, Path(folder)), Config())
        for about, least_s in (("waited", 0), (f"waited over {LONG_S // 60} min", LONG_S)):
            waited = jobs[jobs["wait_s"] > least_s]
            about = f"{name}, jobs that {about}"
            figures += scores(about, waited) if len(waited) else [Figure(f"{about}: jobs", 0)]
    return figures


if __name__ == "__main__":
    main(measure)
