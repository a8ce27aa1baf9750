"""How fast packed jobs run: stragglers, sample stealing, and squeezing, as pure functions.

Pairs in free competition come from measurements. What happens in between is a model; each function names its source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

SHARES = tuple(step / 10 for step in range(10, 0, -1))
"""MPS shares in steps of 10% (Gimbal, section 7.4: coarser steps miss the best)."""


def straggling_speed(workers: Sequence[float]) -> float:
    """Speed of a synchronous job whose workers have equal batches: each step waits for the slowest (Gimbal, 2.2).

    workers: speed of each relative to alone.
    """
    return min(workers)


def stealing_speed(workers: Sequence[float]) -> float:
    """Speed of a synchronous job that splits its global batch by its workers' speeds (LB-BSP; Gimbal, 4.1).

    Worker i gets b_i = B f_i / sum(f), and all end a step together after B / sum(f): the job has the mean speed.
    Batches of whole samples (examples/unequal_gpus/batch_shares.py) come a little lower.
    """
    return math.fsum(workers) / len(workers)


def squeezed_speed(free: float, share: float, utilization: float) -> float:
    """Speed of a worker that is limited to a share of the SMs.

    free: its speed in free competition, at a share of 1. Amdahl's law: only the part of a step in which the GPU is
    busy (utilization) takes 1 / share as long. Our assumption: Gimbal states no formula, and prints concave curves.
    """
    return free / ((1 - utilization) + utilization / share)


def relieved_speed(free: float, share: float) -> float:
    """Speed of a worker whose partner is limited to a share of the SMs: from `free` at 1 up to 1 at 0.

    The slowdown shrinks with the share: 1 / (1 + (1 / free - 1) share). Our assumption, as in squeezed_speed.
    """
    return 1 / (1 + (1 / free - 1) * share)


@lru_cache(maxsize=100_000)
def squeeze_pair(free: tuple[float, float], utilization: tuple[float, float]) -> tuple[float, float]:
    """Both speeds at the shares of the largest sum. One of the two keeps a share of 1 (Gimbal, algorithm 1)."""
    found = []
    for share in SHARES:
        low = squeezed_speed(free[1], share, utilization[1])
        found.append((relieved_speed(free[0], share), low))
        low = squeezed_speed(free[0], share, utilization[0])
        found.append((low, relieved_speed(free[1], share)))
    return max(found, key=lambda speeds: (round(math.fsum(speeds), 9), min(speeds)))
