"""How fast jobs run that share a GPU under MPS: ranges from their use of it alone. Pure.

Utilization hardly predicts a slow-down, so there is no point estimate. Where SM and DRAM activity explain it, few pairs
have a job below the low end (benchmarks/packing_advice.py); docs/packing.md says where they do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Number = TypeVar("Number", float, "npt.NDArray[np.float64]")

LOW_ALONE: Final = 0.77
"""Low end of the speed beside jobs that hardly use the GPU: caches, clocks, and the CPU's part are shared too."""
LOW_PER_DEMAND: Final = 0.6
"""How much longer a job takes at the low end for each GPU's worth of demand of the others."""
LEAST_SPEED: Final = 0.05


class Demand(NamedTuple):
    """What a job needs of a GPU while it runs alone: shares of the multiprocessors and of the memory bandwidth."""

    sm: float
    dram: float


class Range(NamedTuple):
    """Low and high end."""

    low: float
    high: float


def summed(demands: Sequence[Demand]) -> Demand:
    """What the jobs need together; above 1 they surely slow each other."""
    return Demand(math.fsum(each.sm for each in demands), math.fsum(each.dram for each in demands))


def speed_ranges(demands: Sequence[Demand]) -> tuple[Range, ...]:
    """The likely speed of each job, relative to alone, when all of them share one GPU. Two jobs or more.

    High end: the GPU does no more than all of its work, 1 / x, where x is the demand together for the scarcer resource.
    Low end: 0.77 / (1 + 0.6 y) / sqrt(x), where y is the demand of the others and x is at least 1. docs/packing.md says
    how these constants came about, and on which pairs they hold.
    """
    scarce = max(1.0, *summed(demands))
    found = []
    for place in range(len(demands)):
        others = max(summed([*demands[:place], *demands[place + 1 :]]))
        high = 1 / scarce
        found.append(Range(min(max(low_end(others, scarce), LEAST_SPEED), high), high))
    return tuple(found)


def low_end(others: Number, scarce: Number) -> Number:
    """0.77 / (1 + 0.6 y) / sqrt(x): y of the others, x of all, at least 1; numbers, or arrays of one shape."""
    found: Number = LOW_ALONE / ((1 + LOW_PER_DEMAND * others) * scarce**0.5)
    return found
