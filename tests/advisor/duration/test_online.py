"""The predictor that a simulated cluster drives says what the batch trainer says, and knows nothing of the future."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

from advisor.duration.features import Event, events, submissions
from advisor.duration.model import fit
from advisor.duration.rank import DEFAULT_RANK, queue_s
from advisor.duration.replay import replay_durations
from advisor.duration.rolling import SiteMeans
from advisor.duration.service import LearnedDurations, OnlinePredictor, priorities_of, priority_of
from almanac.config import Config
from almanac.records import JobRequest


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
            queued_s = queue_s("mean", tested.features, predicted.rank_s, predicted.high_s)
            expected = DEFAULT_RANK.ranked(tested.features.number("gpu_count"), queued_s)
            assert [said[row] for row in np.flatnonzero(is_in)] == pytest.approx(expected.tolist(), rel=1e-12)
            compared += len(tested)
        later = past.submit_s[past.submit_s >= until_s]
        if not len(later):
            break
        since_s = int(later[0])
    assert compared > 400


def test_waiting_jobs_rank_again_as_the_live_hook_ranks_them(site_history: pd.DataFrame, config: Config) -> None:
    """`almanac reprioritize` asks priorities_of about pending jobs, with the newest model."""
    config, history = weekly(config), whole_seconds(site_history)
    online, jobs = OnlinePredictor(config), submissions(history)
    waiting, last = [600 + place for place in range(40)], 700
    first = {}
    for row, event in events(history):
        if event is Event.SUBMIT and row <= last:
            (first[row],) = online.submit([(row, jobs[row])])
        elif row <= last and row not in waiting and event is Event.START:
            online.start(row, int(history["start_s"][row]))
        elif row <= last and row not in waiting and event is Event.END:
            online.end(row, int(history["end_s"][row]), history["state"][row] != "COMPLETED")
    trained = online.trainings
    again_s = int(history["submit_s"][last]) + 10**7
    online.submit([("next", dataclasses.replace(jobs[last], submit_s=again_s))])
    assert online.trainings == trained + 1
    learned = LearnedDurations(0, None, None, SiteMeans(), online._model, (), {})
    requests = [
        JobRequest(
            **{name: getattr(jobs[row], name) for name in ("user", "account", "partition", "qos", "submit_s")},
            job_name=str(history["name"][row]),
            constraints=str(history["constraints"][row]),
            gpu_count=jobs[row].gpu_count,
            node_count=jobs[row].node_count,
            cpu_count=jobs[row].cpu_count,
            time_limit_s=int(jobs[row].time_limit_s),
        )
        for row in waiting
    ]
    live = priorities_of(requests, history.loc[:last].drop(index=waiting), learned, config, again_s)
    again = online.predict_again(waiting, again_s)
    assert [priority_of(jobs[row], each, (), config.priority) for row, each in zip(waiting, again, strict=True)] == live
    assert sum(each != first[row] for row, each in zip(waiting, again, strict=True)) > 30


def test_the_future_changes_nothing(site_history: pd.DataFrame, config: Config) -> None:
    config, history = weekly(config), whole_seconds(site_history)
    moment_s = int(history["submit_s"].quantile(0.7))
    changed = history.copy()
    late = changed["submit_s"] >= moment_s
    changed.loc[late, "user"] = changed.loc[late, "user"].sample(frac=1, random_state=1).to_numpy()
    changed.loc[changed["end_s"] >= moment_s, "end_s"] += 4000
    assert drive(history, config, moment_s) == drive(changed, config, moment_s)
