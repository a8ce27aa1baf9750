"""Intervals around predicted durations: split-conformal, by how much is known of a job.

(Vovk, Gammerman and Shafer 2005, by class.) Their proof asks for exchangeable jobs. Those of one burst share their
fate: each weighs 1 / √(jobs of its burst), so that no burst of hundreds is the whole evidence. And users change what
they do: a job's weight halves for each HALF_LIFE_S that it ended before the newest one, down to LEAST_WEIGHT of it
(Barber, Candes, Ramdas and Tibshirani 2023, Conformal prediction beyond exchangeability).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from advisor.duration.features import Features
from advisor.evaluation.replay import DurationReplay
from advisor.evaluation.scores import Floats

CLASSES = ("same kind", "same user", "new user")
COVERAGE = 0.8
"""Share of jobs that end inside the interval of their predicted duration: what the advice calls usual."""
KNOWN_RUNS = 5
MIN_RESIDUALS = 30
"""With fewer residuals a class has the interval of all jobs together."""
HALF_LIFE_S, LEAST_WEIGHT = 36 * 3600, 0.05
"""Compared on both parts of the Helios and Mason traces; no unseen trace confirms it (docs/predictor-trials.md)."""


def evidence_classes(features: Features) -> npt.NDArray[np.str_]:
    """CLASSES, one per job, by whether KNOWN_RUNS runs of the same kind, or of the same user, had ended."""
    least = math.log1p(KNOWN_RUNS) - 1e-9
    is_kind, is_user = (features.number(f"{scope}_log_runs") >= least for scope in ("twin", "user"))
    return np.where(is_kind, CLASSES[0], np.where(is_user, CLASSES[1], CLASSES[2]))


def conformal_margins(point_s: Floats, newest: DurationReplay, coverage: float) -> dict[str, tuple[float, float]]:
    """By class, and of all jobs under "": the log residuals that bound the share `coverage` of the next ones.

    Where n jobs ended at once, each a burst of its own, a side is the ceil((n + 1)(1 + coverage) / 2)-th residual from
    the other end, or the outermost.
    """
    residuals = np.log(np.maximum(newest.duration_s, 1.0)) - np.log(point_s)
    bursts = newest.bursts()
    age_s = newest.end_s.max() - newest.end_s
    weights = np.maximum(np.exp2(-age_s / HALF_LIFE_S), LEAST_WEIGHT) / np.sqrt(np.bincount(bursts)[bursts])
    classes = evidence_classes(newest.features)
    groups = {"": np.full(len(newest), True), **{name: classes == name for name in CLASSES}}
    known = {name: rows for name, rows in groups.items() if not name or rows.sum() >= MIN_RESIDUALS}
    ends = {
        name: [_upper(side * residuals[rows], weights[rows], coverage) for side in (-1, 1)]
        for name, rows in known.items()
    }
    return {name: (min(-lower, 0.0), max(upper, 0.0)) for name, (lower, upper) in ends.items()}


def _upper(residuals: Floats, weights: Floats, coverage: float) -> float:
    """The weighted quantile (1 + coverage) / 2, where the next job weighs as much as the heaviest."""
    order = np.argsort(residuals, kind="stable")
    reached = np.cumsum(weights[order]) / (weights.sum() + weights.max())
    place = int(np.searchsorted(reached, (1 + coverage) / 2 - 1e-12))
    return float(residuals[order[min(place, len(order) - 1)]])
