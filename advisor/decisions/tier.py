"""Which memory tier to ask for: the smallest whose usable memory holds the bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from almanac.config import Tier
from almanac.records import MemoryBound, Request, TierAdvice, TierReason
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


def decide_tier(
    request: Request,
    bound: MemoryBound | None,
    tiers: Sequence[Tier],
    headroom_mib: float,
    ran_out_mib: float | None = None,
) -> TierAdvice:
    """The tier to ask for, or why there is no advice; `reason` is one of this module's constants.

    Among tiers of the same capacity, the requested one wins, then the first by name. ran_out_mib: the capacity at
    which past runs seem to have run out of memory. Without a bound, the next larger tier is advised.
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
    target = min(holding, key=lambda tier: (tier.capacity_mib, tier != asked, tier.name))
    if bound is None and asked in holding:
        return TierAdvice(None, NO_EVIDENCE, requested_tier=asked_name)
    if target == asked:
        return TierAdvice(target.name, FITS, requested_tier=asked_name)
    return _change(request, tiers, asked, target, bound is None)


def _why_silent(
    request: Request, bound: MemoryBound | None, tiers: Sequence[Tier], ran_out_mib: float | None
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


def _change(request: Request, tiers: Sequence[Tier], asked: Tier | None, target: Tier, has_run_out: bool) -> TierAdvice:
    """Advice to ask for `target`; where the request cannot be rewritten safely, the note says why."""
    reason: TierReason
    if has_run_out:
        reason = RAN_OUT
    elif asked is None:
        reason = NAME_IT
    else:
        reason = SMALLER if target.capacity_mib < asked.capacity_mib else LARGER
    asked_name = asked.name if asked else None
    how = rewrite(request, tiers, target)
    why_not = how.why_not
    if asked is not None and asked.kind != target.kind:
        why_not = f"{asked.name} is selected by {asked.kind_text} and {target.name} by {target.kind_text}"
    if why_not:
        return TierAdvice(target.name, NOT_REWRITABLE, asked_name, is_change=True, note=why_not)
    return TierAdvice(target.name, reason, asked_name, is_change=True, rewrite=f"{how.option}={how.value}")
