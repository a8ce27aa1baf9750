"""Whether a GPU's HBM peak is what its framework reserved, not what the job needs.

TensorFlow, JAX and some servers take a fixed share of a GPU at start and keep it. Such a peak says nothing of the need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

EARLY_SHARE = 0.1
"""The reservation must stand after this share of the job, at the latest EARLY_LIMIT_S after its start."""
EARLY_LIMIT_S = 600
LATE_SHARE = 0.05
"""The last share of the job is not looked at: memory is given back there."""
FLAT_SHARE = 0.01
"""Between them use may vary by this share of the capacity."""
MIN_SAMPLES = 3


@dataclass(frozen=True)
class ReservedShare:
    """A share low..high of the capacity that a framework reserves, context and libraries included.

    pool: what it reserves without these, where they come on top; they take the more of a capacity the smaller it is.
    """

    framework: str
    low: float
    high: float
    source: str
    pool: float | None = None

    def highest_sql(self, capacity_mib: str) -> str:
        """SQL: the highest share of this capacity."""
        if self.pool is None:
            return str(self.high)
        return f"greatest({self.high}, {self.pool} + {CONTEXT_MIB}.0 / {capacity_mib})"

    def highest(self, capacity_mib: float) -> float:
        return self.high if self.pool is None else max(self.high, self.pool + CONTEXT_MIB / capacity_mib)


CONTEXT_MIB = 600
"""CUDA's context and libraries on an A100 or H100, at most; on a GPU of 16 GiB or more `high` already holds them."""
RESERVED_SHARES = (
    ReservedShare(
        "JAX", 0.73, 0.79, "JAX documentation, GPU memory allocation: 75% of the GPU's memory by default", 0.75
    ),
    ReservedShare("vLLM", 0.88, 0.93, "vLLM engine arguments: gpu_memory_utilization 0.9 by default"),
    ReservedShare("TensorFlow", 0.93, 1.02, "TensorFlow guide, Use a GPU: maps nearly all of the GPU memory"),
)


def steady_span_ms(start_s: int, end_s: int) -> tuple[int, int]:
    """The part [from, to) of a job, ms, in which a reservation must be flat."""
    elapsed_s = end_s - start_s
    early_s = min(EARLY_LIMIT_S, EARLY_SHARE * elapsed_s)
    return round((start_s + early_s) * 1000), round((end_s - LATE_SHARE * elapsed_s) * 1000)


def preallocated_sql(steady_samples: str, steady_low_mib: str, peak_mib: str, capacity_mib: str) -> str:
    """SQL: whether use stayed within FLAT_SHARE of a peak that is a share which frameworks reserve.

    steady_low_mib: least use in the steady span; peak_mib: highest use at any time. Null where the capacity is
    unknown, and where a peak at such a share has too few samples to tell.
    """
    is_flat = f"{peak_mib} - {steady_low_mib} <= {FLAT_SHARE} * {capacity_mib}"
    is_share = reserved_share_sql(peak_mib, capacity_mib)
    return f"CASE WHEN {steady_samples} >= {MIN_SAMPLES} THEN {is_flat} END AND ({is_share})"


def reserved_share_sql(peak_mib: str, capacity_mib: str) -> str:
    """SQL: whether a peak is a share of the capacity that frameworks reserve; null where either is unknown."""
    share = f"{peak_mib} / nullif({capacity_mib}, 0)"
    return " OR ".join(f"{share} BETWEEN {kind.low} AND {kind.highest_sql(capacity_mib)}" for kind in RESERVED_SHARES)


def is_reserved_share(peak_frac: float, capacity_mib: float = math.inf) -> bool:
    """Whether a peak, as a share of the capacity, is one that frameworks reserve; False for NaN."""
    return any(kind.low <= peak_frac <= kind.highest(capacity_mib) for kind in RESERVED_SHARES)
