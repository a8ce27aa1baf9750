"""How much the queue relies on predicted run times.

Jobs are ranked by GPUs x run time^exponent. An exponent of 1 is the predicted GPU-time (helios-qssf-ces, 4.2.2), 0 the
GPU count alone. A wrong prediction can put a large job at the head of the queue, where it holds up small ones, so
uncertain predictions count less. The exponent with the best rank correlation is not the one with the shortest queue:
training asks a queue simulation of the site's newest jobs (simulator.rank_choice).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from advisor.duration.blend import clip_to_limit
from advisor.evaluation.replay import DurationReplay
from advisor.evaluation.scores import Floats

DEFAULT_EXPONENT, DEFAULT_MIDDLE_S = 0.5, 3600.0
"""Where nothing was learned."""


class QueuedJobs(NamedTuple):
    """Jobs that ended, with the run times that were predicted before they ran. Arrays of equal length; seconds."""

    submit_s: Floats
    gpu_count: Floats
    run_s: Floats
    predicted_s: Floats


ChooseExponent = Callable[[QueuedJobs], float]


def default_exponent(jobs: QueuedJobs) -> float:
    return DEFAULT_EXPONENT


@dataclass(frozen=True)
class RankScale:
    """middle_gpus, middle_s: the GPU count and run time of a middle job, whose GPU-time the scale leaves as it is.

    stretch: exponent of the whole, so that ranked GPU-times spread as widely as predicted ones. The age of jobs then
    counts for as much beside them.
    """

    exponent: float = DEFAULT_EXPONENT
    middle_s: float = DEFAULT_MIDDLE_S
    stretch: float = 1.0
    middle_gpus: float = 1.0

    def ranked(self, gpu_count: Floats | float, run_s: Floats | float) -> Floats:
        """The GPU-times by which jobs are ranked, GPU-seconds. gpu_count: above 0."""
        middle = self.middle_gpus * self.middle_s
        gpu_time_s = np.asarray(gpu_count) * self.middle_s * (np.asarray(run_s) / self.middle_s) ** self.exponent
        scaled: Floats = middle * (gpu_time_s / middle) ** self.stretch
        return scaled


PREDICTED_AS_IT_IS = RankScale(1.0)


def choose_scale(newest: DurationReplay, predicted_s: Floats, choose: ChooseExponent) -> RankScale:
    """From jobs that the model had not seen when it predicted them."""
    gpu_count = newest.features.number("gpu_count")
    predicted_s = clip_to_limit(predicted_s, newest.features)
    is_in = (gpu_count > 0) & np.isfinite(predicted_s) & np.isfinite(newest.duration_s)
    if not is_in.any():
        return RankScale()
    columns = (newest.submit_s, gpu_count, newest.duration_s, predicted_s)
    jobs = QueuedJobs(*(np.asarray(each, dtype="float64")[is_in] for each in columns))
    exponent = choose(jobs)
    log_gpus, log_s = np.log(jobs.gpu_count), np.log(jobs.predicted_s)
    spread, held = float(np.std(log_gpus + log_s)), float(np.std(log_gpus + exponent * log_s))
    stretch = min(max(spread / held, 1.0), 1.0 / exponent) if held > 0 else 1.0
    return RankScale(exponent, float(np.exp(np.mean(log_s))), stretch, float(np.exp(np.mean(log_gpus))))
