"""The section of the configuration for two jobs on one GPU: [packing]."""

from __future__ import annotations

from dataclasses import dataclass

from almanac.submit_config import key


@dataclass(frozen=True)
class Packing:
    """Advice on jobs of one user that can share a GPU. The risk to run out of memory is [advice] risk."""

    advise: bool = key(True, "say which of a user's jobs can share a GPU")
    min_gain: float = key(
        1.15, "least work per GPU-hour, as a multiple of one job alone, that sharing must surely bring", low=1, high=4
    )
    context_mib: int = key(500, "memory of each job's CUDA context beside its own peak, MiB", low=0, high=16384)
    min_runs: int = key(5, "runs with SM_ACTIVE and DRAM_ACTIVE that a job family needs", low=1, high=20)
    min_coverage: float = key(0.7, "share of the samples of both that must be known", low=0, high=1)
