"""The priority term: jobs predicted to need little GPU-time start earlier (helios-qssf-ces, 4.2.2)."""

from __future__ import annotations

from collections.abc import Sequence

from almanac.records import PriorityAdvice


def decide_priority(gpu_time_s: float, quantiles_s: Sequence[float], span: int) -> PriorityAdvice | None:
    """span x the share of the site's recent jobs predicted longer: a longer job never gets the greater term.

    quantiles_s: ascending GPU-times (GPU-seconds) at evenly spaced quantiles from the least to the greatest; None
    where there are fewer than two. Between two quantiles the share is interpolated.
    """
    if len(quantiles_s) < 2:
        return None
    share = share_longer(gpu_time_s, quantiles_s)
    return PriorityAdvice(term=round(span * share), share_longer=share)


def share_longer(gpu_time_s: float, quantiles_s: Sequence[float]) -> float:
    """Share of jobs whose GPU-time is greater, in [0, 1]; equal ones count as longer for half their share."""
    last = len(quantiles_s) - 1
    below = sum(value < gpu_time_s for value in quantiles_s)
    equal = sum(value == gpu_time_s for value in quantiles_s)
    if equal:
        rank = below + (equal - 1) / 2
    elif below in (0, last + 1):
        rank = 0.0 if below == 0 else float(last)
    else:
        low, high = quantiles_s[below - 1], quantiles_s[below]
        rank = below - 1 + (gpu_time_s - low) / (high - low)
    return 1.0 - rank / last
