"""Memory tiers: which one a request names, and how to rewrite the request for another.

A constraint is rewritten only where the result can mean nothing else: the tier's feature stands alone as a
conjunct of a plain `a&b&c` expression. Alternatives (`a|b`), counts (`a*2`), brackets and negations are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from almanac.config import Tier
from almanac.records import Request

_FEATURE = re.compile(r"[^\s&|,*\[\]()!]+")
_PLAIN = re.compile(r"[\w.:+-]+(?:[&,][\w.:+-]+)*")


@dataclass(frozen=True)
class Rewrite:
    """`option` and `value` as sbatch takes them ("--constraint", "gpu&hbm40g"), or why there is none."""

    option: str = ""
    value: str = ""
    why_not: str = ""


def features(constraint: str) -> tuple[str, ...]:
    """Every feature that an expression names, in order, without counts and operators."""
    bare = re.sub(r"\*\d+", "", constraint)
    return tuple(_FEATURE.findall(bare))


def requested_tier(request: Request, tiers: Sequence[Tier]) -> Tier | None:
    """The one tier that a request asks for; None where it names none, or leaves a choice between several."""
    named = [tier for tier in tiers if _names(request, tier)]
    return named[0] if len(named) == 1 else None


def names_any_tier(request: Request, tiers: Sequence[Tier]) -> bool:
    """Whether the request names a tier at all, a choice between several included."""
    return any(_names(request, tier) for tier in tiers)


def _names(request: Request, tier: Tier) -> bool:
    if tier.constraint:
        return tier.constraint in features(request.constraints)
    if tier.gres:
        return tier.gres == request.gpu_type
    return tier.partition in request.partition.split(",")


def rewrite(request: Request, tiers: Sequence[Tier], target: Tier) -> Rewrite:
    """How to ask for `target` instead, every other term kept."""
    if target.constraint:
        return _rewrite_constraint(request.constraints, tiers, target)
    if target.gres:
        return _rewrite_gres(request, tiers, target)
    if "," in request.partition:
        return Rewrite(why_not=f"the request names several partitions ({request.partition})")
    return Rewrite("--partition", target.partition)


def _rewrite_constraint(constraint: str, tiers: Sequence[Tier], target: Tier) -> Rewrite:
    if not constraint:
        return Rewrite("--constraint", target.constraint)
    if not _PLAIN.fullmatch(constraint):
        return Rewrite(why_not=f'the constraint "{constraint}" is more than a list joined by "&"')
    known = {tier.constraint for tier in tiers if tier.constraint}
    terms = re.split(r"[&,]", constraint)
    if sum(term in known for term in terms) > 1:
        return Rewrite(why_not=f'the constraint "{constraint}" names several tiers')
    if any(term in known for term in terms):
        changed = [target.constraint if term in known else term for term in terms]
    else:
        changed = [*terms, target.constraint]
    return Rewrite("--constraint", "&".join(changed))


def _rewrite_gres(request: Request, tiers: Sequence[Tier], target: Tier) -> Rewrite:
    known = {tier.gres for tier in tiers if tier.gres}
    terms = request.gres.split(",") if request.gres else []
    gpu_terms = [n for n, term in enumerate(terms) if re.fullmatch(r"gpu(:[^,]*)?", term)]
    if len(gpu_terms) != 1 or (request.gpu_type and request.gpu_type not in known):
        return Rewrite(why_not="the GPUs are not asked for by one --gres=gpu term of a known type")
    count = terms[gpu_terms[0]].split(":")[-1]
    terms[gpu_terms[0]] = f"gpu:{target.gres}:{count if count.isdigit() else 1}"
    return Rewrite("--gres", ",".join(terms))
