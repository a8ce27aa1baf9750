"""The past, replayed: for each submission what was known then, by the same code that serves a live request."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from advisor.features import Ended, Past, Submission, ended_jobs, feature_frame, submissions, sweep
from advisor.models.rolling import Estimate, RollingEstimator, SiteMeans
from advisor.scores import Floats
from almanac.config import Rolling


@dataclass(frozen=True)
class Replay:
    """Row by row of the history frame. NaN where there is no estimate; a running job's duration and end are NaN."""

    features: pd.DataFrame
    rolling_s: Floats
    duration_s: Floats
    submit_s: npt.NDArray[np.int64]
    end_s: Floats

    def select(self, rows: npt.NDArray[np.bool_]) -> Replay:
        features = self.features[rows].reset_index(drop=True)
        return Replay(features, self.rolling_s[rows], self.duration_s[rows], self.submit_s[rows], self.end_s[rows])


def replay_durations(history: pd.DataFrame, config: Rolling) -> Replay:
    """Features and rolling estimate of every submission, each from the jobs that had ended before it."""
    jobs, ended = submissions(history), ended_jobs(history)
    past, rolling = Past(), RollingEstimator(config)
    numbers: list[tuple[float, ...]] = [()] * len(jobs)
    estimates: list[Estimate | None] = [None] * len(jobs)
    for row, is_end in sweep(history):
        job = ended[row]
        if not is_end:
            numbers[row] = past.features(jobs[row])
            estimates[row] = rolling.estimate(jobs[row])
        elif job is not None:
            past.absorb(job)
            rolling.absorb(job)
    return Replay(
        features=feature_frame(jobs, numbers),
        rolling_s=np.array([estimate.duration_s if estimate else math.nan for estimate in estimates]),
        duration_s=np.array([job.duration_s if job else math.nan for job in ended], dtype="float64"),
        submit_s=np.array([job.submit_s for job in jobs], dtype="int64"),
        end_s=np.array([job.end_s if job else math.nan for job in ended], dtype="float64"),
    )


@dataclass(frozen=True)
class Known:
    """What is known of one live submission."""

    features: pd.DataFrame
    rolling: Estimate | None


def know_now(job: Submission, history: pd.DataFrame, config: Rolling, site: SiteMeans | None) -> Known:
    """Features and rolling estimate of a submission, from its user's jobs that ended before it."""
    past, rolling = Past(), RollingEstimator(config, site)
    for ended in _ended_before(history, job):
        past.absorb(ended)
        rolling.absorb(ended)
    return Known(feature_frame([job], [past.features(job)]), rolling.estimate(job))


def _ended_before(history: pd.DataFrame, job: Submission) -> list[Ended]:
    """The user's jobs that ended before this submission, in the order of their ends."""
    own = history[history["user"] == job.user]
    ended = ended_jobs(own)
    candidates = (ended[row] for row, is_end in sweep(own) if is_end)
    return [each for each in candidates if each is not None and each.end_s < job.submit_s]
