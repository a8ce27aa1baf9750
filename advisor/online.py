"""A predictor for a simulated cluster: it observes events as they happen, and trains itself again.

It knows as much as a live one: the events so far, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from advisor.duration.features import EndedJob, Event, Submission, features_of
from advisor.duration.model import DurationModel, fit, learned_rows
from advisor.duration.prediction import Prediction, predict
from advisor.duration.rank_scale import ChooseExponent, default_exponent
from advisor.evaluation.replay import DurationReplay, KnownAtSubmit, SiteHistory
from almanac.config import Config


@dataclass
class _Job:
    submission: Submission
    known: KnownAtSubmit
    start_s: float = math.nan
    ended: EndedJob | None = None


class OnlinePredictor:
    """Tell it of submissions, starts and ends in order of time. Trains every training.retrain_hours."""

    def __init__(self, config: Config, choose_exponent: ChooseExponent = default_exponent) -> None:
        self._config, self._choose_exponent = config, choose_exponent
        self._observed = SiteHistory()
        self._jobs: dict[Hashable, _Job] = {}
        self._model: DurationModel | None = None
        self._next_training_s = -math.inf

    def submit(self, submitted: Sequence[tuple[Hashable, Submission]]) -> list[Prediction | None]:
        """Predictions for jobs that are submitted now; the key names a job when it starts and ends."""
        if submitted and submitted[0][1].submit_s >= self._next_training_s:
            self._train(submitted[0][1].submit_s)
        known = [self._observed.known_at_submit(job) for _, job in submitted]
        for (key, job), each in zip(submitted, known, strict=True):
            self._jobs[key] = _Job(job, each)
        return predict([job for _, job in submitted], known, self._model)

    def start(self, key: Hashable, start_s: int) -> None:
        job = self._jobs[key]
        job.start_s = float(start_s)
        self._observed.observe(Event.START, job.submission, job.start_s, None)

    def end(self, key: Hashable, end_s: int, is_failed: bool) -> None:
        """Of a job that has started."""
        job = self._jobs[key]
        job.ended = EndedJob(job.submission, end_s, max(end_s - job.start_s, 1.0), is_failed)
        self._observed.observe(Event.END, job.submission, job.start_s, job.ended)

    def _train(self, now_s: int) -> None:
        self._next_training_s = now_s + self._config.training.retrain_hours * 3600
        known = enumerate(self._jobs.values())
        numbered = [(number, job) for number, job in known if job.ended is not None and job.ended.end_s < now_s]
        jobs = [job for _, job in numbered]
        ended = [job.ended for job in jobs if job.ended is not None]
        rolling = [job.known.rolling for job in jobs]
        past = DurationReplay(
            features=features_of([job.submission for job in jobs], [job.known.features for job in jobs]),
            rolling_s=np.array([each.duration_s if each else math.nan for each in rolling], dtype="float64"),
            duration_s=np.array([each.duration_s for each in ended], dtype="float64"),
            submit_s=np.array([job.submission.submit_s for job in jobs], dtype="int64"),
            end_s=np.array([each.end_s for each in ended], dtype="float64"),
            job_id=np.array([number for number, _ in numbered], dtype="int64"),
        )
        past = past.select(learned_rows(past.job_id, past.submit_s, past.end_s, self._model))
        fitted = fit(past, self._config.training, now_s, self._model, self._choose_exponent)
        self._model = fitted.model if fitted else None
