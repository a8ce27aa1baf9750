"""The predictor that a simulated cluster drives says what the batch trainer says, and knows nothing of the future."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

from advisor.duration.features import Event, events, submissions
from advisor.duration.model import fit
from advisor.evaluation.replay import replay_durations
from advisor.online import OnlinePredictor
from almanac.config import Config


def weekly(config: Config) -> Config:
    return dataclasses.replace(config, training=dataclasses.replace(config.training, retrain_hours=336))


def whole_seconds(history: pd.DataFrame) -> pd.DataFrame:
    """In order of submission, durations as starts and ends tell them."""
    ordered = history.sort_values(["submit_s", "job_id"], ignore_index=True)
    return ordered.assign(elapsed_s=np.maximum(ordered["end_s"] - ordered["start_s"], 1).astype(float))


def drive(history: pd.DataFrame, config: Config, until_s: float = np.inf) -> dict[int, float]:
    """Ranking GPU-time of each job submitted before until_s, by row."""
    online, jobs, said = OnlinePredictor(config), submissions(history), {}
    for row, event in events(history):
        if event is Event.SUBMIT:
            (predicted,) = online.submit([(row, jobs[row])])
            if predicted is not None and jobs[row].submit_s < until_s:
                said[row] = predicted.ranked(predicted.queue_gpu_time_s)
        elif event is Event.START:
            online.start(row, int(history["start_s"][row]))
        else:
            online.end(row, int(history["end_s"][row]), history["state"][row] != "COMPLETED")
    return said


def test_it_says_what_the_batch_trainer_says(site_history: pd.DataFrame, config: Config) -> None:
    config, history = weekly(config), whole_seconds(site_history)
    said = drive(history, config)
    past = replay_durations(history)
    since_s = int(past.submit_s[0])
    compared, fitted = 0, None
    while True:
        fitted = fit(past.select(past.end_s < since_s), config.training, since_s, fitted.model if fitted else None)
        until_s = since_s + config.training.retrain_hours * 3600
        is_in = (past.submit_s >= since_s) & (past.submit_s < until_s)
        if fitted is not None:
            tested = past.select(is_in)
            predicted = fitted.model.predict_all(tested.features, tested.rolling_s)
            expected = fitted.model.rank_scale.ranked(tested.features.number("gpu_count"), predicted.rank_s)
            assert [said[row] for row in np.flatnonzero(is_in)] == pytest.approx(expected.tolist(), rel=1e-12)
            compared += len(tested)
        later = past.submit_s[past.submit_s >= until_s]
        if not len(later):
            break
        since_s = int(later[0])
    assert compared > 400


def test_the_future_changes_nothing(site_history: pd.DataFrame, config: Config) -> None:
    config, history = weekly(config), whole_seconds(site_history)
    moment_s = int(history["submit_s"].quantile(0.7))
    changed = history.copy()
    late = changed["submit_s"] >= moment_s
    changed.loc[late, "user"] = changed.loc[late, "user"].sample(frac=1, random_state=1).to_numpy()
    changed.loc[changed["end_s"] >= moment_s, "end_s"] += 4000
    assert drive(history, config, moment_s) == drive(changed, config, moment_s)
