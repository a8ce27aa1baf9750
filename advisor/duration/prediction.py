"""Predicted durations of submissions, many at once or one: 10,000 in less than a second, one in less than 2 ms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from advisor.duration.features import Submission, features_of
from advisor.duration.model import DurationModel, Predicted, untrained
from advisor.duration.rank_scale import PREDICTED_AS_IT_IS, RankScale
from advisor.evaluation.replay import KnownAtSubmit
from almanac.records import Duration


@dataclass(frozen=True)
class Prediction:
    """queue_gpu_time_s: the GPU-time predicted for the queue.

    scale: turns it into the GPU-time that ranks the job.
    """

    duration: Duration
    queue_gpu_time_s: float
    gpu_count: int
    scale: RankScale

    def ranked(self, gpu_time_s: float) -> float:
        """The GPU-time that ranks the job, GPU-seconds, if gpu_time_s is predicted for it."""
        if not self.gpu_count:
            return 0.0
        return float(self.scale.ranked(self.gpu_count, gpu_time_s / self.gpu_count))


def predict(
    jobs: Sequence[Submission], known: Sequence[KnownAtSubmit], model: DurationModel | None
) -> list[Prediction | None]:
    """known: what SiteHistory.known_at_submit said of each job. None without a model and a rolling estimate."""
    features = features_of(jobs, [each.features for each in known])
    rolling_s = np.array([each.rolling.duration_s if each.rolling else math.nan for each in known], dtype="float64")
    predicted = model.predict_all(features, rolling_s) if model else untrained(features, rolling_s)
    scale = model.rank_scale if model else PREDICTED_AS_IT_IS
    return [
        None
        if model is None and math.isnan(rolling_s[place])
        else _prediction(job, known[place], predicted, place, scale)
        for place, job in enumerate(jobs)
    ]


def _prediction(
    job: Submission, known: KnownAtSubmit, predicted: Predicted, place: int, scale: RankScale
) -> Prediction:
    duration_s = float(predicted.duration_s[place])
    model_s, low_s, high_s = (
        None if math.isnan(each[place]) else float(each[place])
        for each in (predicted.model_s, predicted.low_s, predicted.high_s)
    )
    duration = Duration(
        duration_s=duration_s,
        gpu_time_s=duration_s * job.gpu_count,
        rolling_s=known.rolling.duration_s if known.rolling else duration_s,
        model_s=model_s,
        case=known.rolling.case if known.rolling else "site",
        runs=known.rolling.runs if known.rolling else 0,
        low_s=low_s,
        high_s=high_s,
    )
    queue_gpu_time_s = float(predicted.rank_s[place]) * job.gpu_count
    return Prediction(duration, queue_gpu_time_s, job.gpu_count, scale)
