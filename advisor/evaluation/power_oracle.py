"""The most nodes that could have slept with so many wake-ups, for somebody who knew the future."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from advisor.demand.features import STEP_MIN

Floats = NDArray[np.float64]
MOST_CELLS = 4500


def oracle_powered(demand: Floats, weight: Floats, wakes: int) -> tuple[Floats, float]:
    """Fewest powered node-steps without shortage and with at most `wakes` wake-ups; by dynamic programming, exact.

    demand: (n_steps,) highest of each step. weight: (n_steps,) what a powered node costs there, 0 where not scored.
    Between two wake-ups the best is to keep on, at each step, the highest demand up to the next wake-up. So the record
    is cut into wakes + 1 segments; costs of all segments that end at a step follow from one pass of running maxima.
    Returns the powered nodes of each possible number of wake-ups (wakes + 1,), and that of the last.
    """
    size = len(demand)
    best = np.full((wakes + 1, size + 1), np.inf)
    best[:, 0] = 0.0
    peaks = np.zeros(size)
    for end in range(1, size + 1):
        np.maximum(peaks[:end], demand[end - 1], out=peaks[:end])
        cost = np.cumsum((peaks[:end] * weight[:end])[::-1])[::-1]
        best[0, end] = cost[0]
        if wakes:
            best[1:, end] = (best[:-1, :end] + cost).min(axis=1)
            best[:, end] = np.minimum.accumulate(best[:, end])
    return best[:, size], float(best[-1, size])


def oracle_asleep(demand: Floats, total: Floats, is_usable: NDArray[np.bool_], wakes: int) -> float:
    """Nodes asleep on average over the usable minutes, for one who knows the demand and wakes at most so often.

    demand, total: (n_minutes,) nodes. It never lets demand wait, and changes its mind every 5 minutes, or more rarely
    on a span of more than two weeks (so that there are at most 4,500 steps). With free choice of the minute, and with
    the shortage that others are allowed, slightly more could sleep. Nodes boot before they are needed, at no cost.
    """
    if not is_usable.any():
        return float("nan")
    width = 5 if len(demand) <= 5 * MOST_CELLS else STEP_MIN * max(1, -(-len(demand) // (STEP_MIN * MOST_CELLS)))
    size = -(-len(demand) // width)
    padded = np.zeros(size * width)
    padded[: len(demand)] = np.where(is_usable, np.minimum(np.ceil(demand), total), 0.0)
    weight = np.zeros(size * width)
    weight[: len(demand)] = is_usable
    _, powered = oracle_powered(padded.reshape(size, width).max(axis=1), weight.reshape(size, width).sum(axis=1), wakes)
    return float((total[is_usable].sum() - powered) / is_usable.sum())
