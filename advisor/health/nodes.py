"""Failure rates of nodes, and lemons: nodes that probably fail jobs at over five times the rate of the others.

Failures of a node are counted as a Poisson process. Rates relative to the site's have a Gamma prior with mean 1, whose
shape is fitted to the site's own counts (empirical Bayes): on an even site it pulls each node to the site's rate, on
a site where some nodes are bad it lets the counts speak. The rate of a node is compared with that of the other nodes
without the lemons, so that a few bad nodes do not hide in the rate that they cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import gammaincc, gammaln

INCIDENT_GAP_S = 3600
"""Failures of one node within so many seconds of the first are one incident: a node fails every job it gets."""
LEAST_FAILURES = 3
"""A lemon has at least so many incidents, whatever the prior says."""
Floats = npt.NDArray[np.float64]
_SHAPES = np.geomspace(0.1, 10, 41)


@dataclass(frozen=True)
class LemonLimits:
    """A lemon's rate is more than `times` the rate of the other nodes, with a probability over `chance`."""

    times: float = 5.0
    chance: float = 0.95


@dataclass(frozen=True)
class NodeRecord:
    """A node's record: days on which it ran jobs, and its incidents on these days."""

    node: str
    days: float
    failures: int


@dataclass(frozen=True)
class NodeRate:
    """A node's failures per 30 days: the posterior mean, and the rate of the other nodes.

    chance: the probability that its rate is more than LemonLimits.times the rate of the others.
    """

    node: str
    days: float
    failures: int
    rate_30d: float
    others_30d: float
    chance: float
    is_lemon: bool


def incidents(times_s: Iterable[int], gap_s: int = INCIDENT_GAP_S) -> list[int]:
    """Return the first time of each incident, in order: failures at most gap_s after this time belong to it."""
    found = list[int]()
    for time_s in sorted(times_s):
        if not found or time_s - found[-1] > gap_s:
            found.append(time_s)
    return found


def node_rates(records: Sequence[NodeRecord], limits: LemonLimits | None = None) -> list[NodeRate]:
    """Rate every node with days on record, those with the highest chance to be a lemon first.

    Lemons are found in rounds: each round leaves those already found out of the rate of the other nodes.
    """
    limits = limits or LemonLimits()
    records = [record for record in records if 0 < record.days < math.inf]
    days = np.array([record.days for record in records], float)
    counts = np.array([max(record.failures, 0) for record in records], float)
    is_lemon = np.zeros(len(records), bool)
    if not records:
        return []
    while True:
        others, shape = _others(days, counts, is_lemon), _prior_shape(days, counts, is_lemon)
        chance = gammaincc(shape + counts, limits.times * (shape + others * days))
        found = is_lemon | ((chance > limits.chance) & (counts >= LEAST_FAILURES))
        if (found == is_lemon).all() or found.all():
            break
        is_lemon = found
    rate = others * (shape + counts) / (shape + others * days)
    columns = zip(records, rate.tolist(), others.tolist(), chance.tolist(), is_lemon.tolist(), strict=True)
    rates = [
        NodeRate(each.node, each.days, each.failures, 30 * own, 30 * rest, known, lemon)
        for each, own, rest, known, lemon in columns
    ]
    return sorted(rates, key=lambda each: (-each.chance, -each.rate_30d, each.node))


def _others(
    days: Floats,
    counts: Floats,
    is_lemon: npt.NDArray[np.bool_],
) -> Floats:
    """Failures per day of the other nodes, without lemons; half a failure more, because none seen is no rate of 0."""
    healthy = ~is_lemon
    other_days = days[healthy].sum() - days * healthy
    other_days = np.where(other_days > 0, other_days, days)
    rates: Floats = (counts[healthy].sum() - counts * healthy + 0.5) / other_days
    return rates


def _prior_shape(
    days: Floats,
    counts: Floats,
    is_lemon: npt.NDArray[np.bool_],
) -> float:
    """Shape of the Gamma prior that makes all nodes' counts most likely: their margin is negative binomial."""
    mean = days * (counts[~is_lemon].sum() + 0.5) / days[~is_lemon].sum()
    shapes = _SHAPES[:, None]
    likelihood = gammaln(shapes + counts) - gammaln(shapes) + shapes * np.log(shapes / (shapes + mean))
    likelihood += counts * np.log(mean / (shapes + mean))
    return float(_SHAPES[int(likelihood.sum(axis=1).argmax())])
