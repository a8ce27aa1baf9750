"""The tier to ask for, given a memory bound. slurm-almanac-client has no library that this would need."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from almanac.config import Tier
from almanac.records import JobRequest, MemoryBound, TierAdvice, TierReason
from almanac.tiers import names_any_tier, requested_tier, rewrite

NO_GPU: Final = "no GPU"
NO_TIERS: Final = "no tiers"
NO_EVIDENCE: Final = "no evidence"
PAUSED: Final = "paused"
RAN_OUT: Final = "ran out"
NONE_LARGE_ENOUGH: Final = "none large enough"
CHOICE: Final = "choice"
FITS: Final = "fits"
SMALLER: Final = "smaller"
LARGER: Final = "larger"
NAME_IT: Final = "name it"
NOT_REWRITABLE: Final = "not rewritable"

NO_SLOW_DOWNS: Final[Mapping[str, float]] = MappingProxyType({})
MAX_SLOWDOWN: Final = 1.5
"""Longest run time on a MIG slice to advise, as a multiple of that on a whole GPU (almanac's own choice)."""
PILOT_JOBS: Final = 10
"""Most jobs of a family that follow an advice before one of them has shown its memory: as many as it can cost."""
ROOMY: Final = 4.0
"""A tier that holds this many times the highest need is advised to any number of jobs."""
ONE_GPU: Final = "MIG slices are for jobs of one GPU on one node"


def decide_tier(
    request: JobRequest,
    bound: MemoryBound | None,
    tiers: Sequence[Tier],
    headroom_mib: float,
    ran_out_mib: float | None = None,
    slow_downs: Mapping[str, float] = NO_SLOW_DOWNS,
) -> TierAdvice:
    """The tier to ask for, or why there is no advice; `reason` is one of this module's constants.

    Of the tiers that hold the bound, the one with the least memory is advised, then the one with the least compute;
    of equal ones the requested one, then the first by name. A MIG slice is advised only to a job of one GPU, and only
    if its slow-down is known and at most MAX_SLOWDOWN, or if it is no smaller than the slice requested.
    ran_out_mib: the capacity at which past runs seem to have run out of memory. Without a bound, the next larger tier
    is advised. slow_downs: by name of a slice tier, the run time there as a multiple of that on a whole GPU.
    """
    silent = _why_silent(request, bound, tiers, ran_out_mib)
    asked = requested_tier(request, tiers)
    asked_name = asked.name if asked else None
    if silent:
        return TierAdvice(None, silent, requested_tier=asked_name)
    if bound is not None:
        holding = [tier for tier in tiers if tier.capacity_mib - headroom_mib >= bound.tier_mib]
    else:
        holding = [tier for tier in tiers if ran_out_mib is not None and tier.capacity_mib > ran_out_mib]
    if not holding:
        return TierAdvice(None, NONE_LARGE_ENOUGH, requested_tier=asked_name)
    allowed = [tier for tier in holding if _is_allowed(tier, request, asked, slow_downs.get(tier.name))]
    if not allowed:
        why = why_no_slice(request, holding, slow_downs) or ONE_GPU
        return TierAdvice(None, NO_EVIDENCE, requested_tier=asked_name, note=why)
    target = min(allowed, key=lambda tier: (tier.size, tier != asked, tier.name))
    if bound is None and asked in allowed:
        return TierAdvice(None, NO_EVIDENCE, requested_tier=asked_name)
    smaller = [tier for tier in holding if tier.size < target.size and tier not in allowed]
    return dataclasses.replace(
        TierAdvice(target.name, FITS, requested_tier=asked_name)
        if target == asked
        else _change(request, tiers, asked, target, bound is None),
        slow_down=slow_downs.get(target.name),
        no_slice=why_no_slice(request, smaller, slow_downs),
    )


def _is_allowed(tier: Tier, request: JobRequest, asked: Tier | None, slow_down: float | None) -> bool:
    """Return True if the tier's compute allows advising it. To stay where one is needs no evidence."""
    if not tier.is_slice:
        return True
    if slow_down is not None and request.is_one_gpu:
        return slow_down <= MAX_SLOWDOWN
    if asked is None or not asked.is_slice:
        return False
    is_no_smaller = tier.compute_slices >= asked.compute_slices and tier.capacity_mib >= asked.capacity_mib
    return tier == asked or (request.is_one_gpu and is_no_smaller)


def why_no_slice(request: JobRequest, slices: Sequence[Tier], slow_downs: Mapping[str, float]) -> str:
    """Say why none of these slices is advised; "" if none is given, and for a job of several GPUs."""
    if not slices or not request.is_one_gpu:
        return ""
    known = [(slow_downs[tier.name], tier.name) for tier in slices if tier.name in slow_downs]
    if not known:
        return "too few past runs on such GPUs have SM_ACTIVE and DRAM_ACTIVE"
    least, name = min(known)
    return f"on {name} such jobs would run about {least:.1f} times as long"


def _why_silent(
    request: JobRequest, bound: MemoryBound | None, tiers: Sequence[Tier], ran_out_mib: float | None
) -> TierReason | None:
    """The reason to advise nothing, independent of the bound; None without such a reason."""
    if request.gpu_count <= 0:
        return NO_GPU
    if not tiers:
        return NO_TIERS
    if bound is None and ran_out_mib is None:
        return NO_EVIDENCE
    if names_any_tier(request, tiers) and requested_tier(request, tiers) is None:
        return CHOICE
    return None


def _change(
    request: JobRequest, tiers: Sequence[Tier], asked: Tier | None, target: Tier, has_run_out: bool
) -> TierAdvice:
    """Advice to ask for `target`; where the request cannot be rewritten safely, the note says why."""
    reason: TierReason
    if has_run_out:
        reason = RAN_OUT
    elif asked is None:
        reason = NAME_IT
    else:
        reason = SMALLER if target.size < asked.size else LARGER
    asked_name = asked.name if asked else None
    how = rewrite(request, tiers, target)
    why_not = how.why_not
    if asked is not None and asked.kind != target.kind:
        why_not = f"{asked.name} is selected by {asked.kind_text} and {target.name} by {target.kind_text}"
    if why_not:
        return TierAdvice(target.name, NOT_REWRITABLE, asked_name, is_change=True, note=why_not)
    return TierAdvice(target.name, reason, asked_name, is_change=True, rewrite=f"{how.option}={how.value}")
