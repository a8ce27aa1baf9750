"""Estimate the slow-down of a job on a MIG slice against a whole GPU, from the activity of past runs. Pure.

A slice has a share c of the GPU's multiprocessors and b of its memory bandwidth. While a run needs the share s of the
multiprocessors (SM_ACTIVE) and d of the bandwidth (DRAM_ACTIVE), it takes max(1, s/c, d/b) times as long there. What
counts is the mean of that over time: a run that is idle half of the time and full the other half needs the compute in
its busy half.

The history has means only: of s, of d, and the share u of the time in which the GPU was busy at all. Beyond that the
run is idle. Of the level of a resource within the busy time only the mean is known, so it is taken to be distributed
with the most entropy on [0, 1] that this mean allows (Jaynes, 1957, Information Theory and Statistical Mechanics): a
truncated exponential. A constant level would state less than the truth for every run that has phases.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from almanac.hardware import gpu_models, mig_models
from almanac.submit_config import Tier
from almanac.tiers import SliceShare, slice_models, slice_share

NEWEST_RUNS = 20
QUANTILE = 0.9
"""Share of the newest runs that are at most as slow as stated (almanac's own choice)."""
SATURATED = 0.9
"""A run on a slice that was busier than this may have needed more: what it needs is not known."""
_BISECTIONS = 60
_DIGITS = 4
"""Of a mean: finer differences are noise, and a site's jobs then share their results."""
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True, slots=True)
class Activity:
    """Means of one run's GPU, as shares of a whole GPU of this model. busy: share of the time with any work."""

    sm: float
    dram: float
    busy: float
    model: str


def activity_of(
    sm: float, dram: float, busy: float, model: str, tier: Tier | None = None, has_fault: bool = False
) -> Activity | None:
    """The activity of a run; None if unknown, which is not zero.

    sm, dram: means, NaN where unknown. busy: the same, of GR_ENGINE_ACTIVE or GPU_UTIL; if it is unknown, the run is
    taken to have been full while it was active. tier: the slice that it ran on, which its means are shares of; None
    for a whole GPU. has_fault: profiling counters that read 0 on a busy GPU.
    """
    if has_fault or not (0 <= sm <= 1 and 0 <= dram <= 1) or (sm == 0 and busy > 0.01):
        return None
    least_busy = max(sm, dram)
    busy = min(max(busy, least_busy), 1.0) if busy == busy else least_busy
    if tier is None:
        return Activity(sm, dram, busy, model)
    share = slice_share(tier, model)
    if share is None or least_busy >= SATURATED * busy > 0:
        return None
    return Activity(sm * share.sms, dram * share.bandwidth, busy, model)


def slow_down(activity: Activity, share: SliceShare) -> float:
    """The expected run time on a slice, as a multiple of that on the whole GPU; at least 1."""
    if activity.busy <= 0:
        return 1.0
    sm, dram = (round(level / activity.busy, _DIGITS) for level in (activity.sm, activity.dram))
    busiest = max(_expected(sm, share.sms), _expected(dram, share.bandwidth))
    return 1 - activity.busy + activity.busy * busiest


@lru_cache(maxsize=100_000)
def _expected(mean: float, share: float) -> float:
    """The mean of max(1, x / share) over a truncated exponential on [0, 1] with this mean."""
    if share >= 1 or mean <= _NEGLIGIBLE:
        return 1.0
    if mean >= 1 - _NEGLIGIBLE:
        return 1 / share
    rate = _rate(mean)
    if abs(rate) < 1e-6:
        excess = (1 - share) ** 2 / 2
    elif rate > 0:
        excess = (math.exp(-rate * share) - math.exp(-rate) * (1 + rate * (1 - share))) / (rate * -math.expm1(-rate))
    else:  # the same, with numerator and denominator times exp(rate): no overflow
        above = math.exp(rate * (1 - share)) - 1 - rate * (1 - share)
        excess = above / (rate * math.expm1(rate))
    return 1 + max(excess, mean - share, 0.0) / share


def _rate(mean: float) -> float:
    """The rate of the exponential on [0, 1] with this mean: 0 is uniform, negative rises."""
    low, high = -1 / (1 - mean) - 2, 1 / mean + 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean(middle) > mean else (low, middle)
    return (low + high) / 2


def _mean(rate: float) -> float:
    if abs(rate) < 1e-4:
        return 0.5 - rate / 12
    return 1 / rate - 1 / math.expm1(rate) if rate < 500 else 1 / rate


def slow_downs(activities: Sequence[Activity], tiers: Collection[Tier], min_runs: int) -> Mapping[str, float]:
    """Map slice tiers to the slow-down that at most 1 in 10 of the newest runs exceeds, by the tier's name.

    activities: of known runs, oldest first. A tier is left out if fewer than min_runs of them were on GPUs that the
    slice can be compared with: of the same model, or of one with the same multiprocessors.
    """
    found = {}
    newest = activities[-NEWEST_RUNS:]
    for tier in tiers:
        if tier.is_slice:
            known = sorted(each for run in newest if (each := _on_tier(run, tier)) is not None)
            if len(known) >= max(min_runs, 1):
                found[tier.name] = known[math.ceil(QUANTILE * len(known)) - 1]
    return found


def _on_tier(activity: Activity, tier: Tier) -> float | None:
    """The slow-down of a run on a slice of another model, too, if that has the same multiprocessors; else None.

    Multiprocessors of different generations are not compared: a share of one says nothing of a share of another.
    """
    own = activity.model if not tier.gpu_model else tier.gpu_model
    share = slice_share(tier, own)
    if share is None or (not tier.gpu_model and tier.gres and own not in slice_models(tier)):
        return None
    if own == activity.model:
        return slow_down(activity, share)
    if _multiprocessors(own) is None or _multiprocessors(own) != _multiprocessors(activity.model):
        return None
    bandwidths = [
        model.hbm_bytes_per_s if (model := gpu_models().get(name)) else None for name in (activity.model, own)
    ]
    before, after = bandwidths
    if before is None or after is None:
        return None
    dram = min(activity.dram * max(before / after, 1.0), 1.0)
    return slow_down(Activity(activity.sm, dram, max(activity.busy, dram), activity.model), share)


def _multiprocessors(model_name: str) -> tuple[int | None, ...] | None:
    """Of the whole GPU and of each profile; None where one is not published."""
    model = mig_models().get(model_name)
    counts = (model.sms, *(profile.sms for profile in model.profiles)) if model else (None,)
    return None if None in counts else counts
