"""Memory tiers: which one a request names, and how to rewrite the request for another.

A constraint is rewritten only where the result can mean nothing else: the tier's feature stands alone as a
conjunct of a plain `a&b&c` expression. Alternatives (`a|b`), counts (`a*2`), brackets and negations are left alone,
and so is a request that already names a tier in another way than the target is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from almanac.records import Request
from almanac.submit_config import Tier

_FEATURE = re.compile(r"[^\s&|,*\[\]()!]+")
_TOKEN = re.compile(r"[^\s&|,*\[\]()!]+|[&|,\[\]()]")
MAX_TOKENS = 1000
_GPU_TERM = re.compile(r"gpu(:[^,]*)?")
_NUMBER = re.compile(r"(gpu:)?(?:[\w.+-]+:)?([0-9]+)", re.ASCII)
_DIGITS = re.compile(r"[0-9]+")
_REWRITABLE = ("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task")
_PLAIN = re.compile(r"[\w.:+-]+(?:[&,][\w.:+-]+)*")


@dataclass(frozen=True)
class Rewrite:
    """`option` and `value` as sbatch takes them ("--constraint", "gpu&hbm40g"), or why there is none."""

    option: str = ""
    value: str = ""
    why_not: str = ""


@lru_cache(maxsize=4096)
def features(constraint: str) -> tuple[str, ...]:
    """Every feature that an expression names, in order, without counts and operators."""
    bare = re.sub(r"\*\d+", "", constraint)
    return tuple(_FEATURE.findall(bare))


@lru_cache(maxsize=4096)
def required_features(constraint: str) -> frozenset[str]:
    """The features that every way to meet an expression has: "gpu&hbm80g" needs both, "a|b" neither.

    Empty where the expression is not understood (unbalanced, negated): nothing is then known to be required.
    """
    tokens = _TOKEN.findall(re.sub(r"\*[0-9]+", "", constraint))
    if len(tokens) > MAX_TOKENS or "".join(tokens) != re.sub(r"\*[0-9]+|\s", "", constraint):
        return frozenset()
    stack: list[list[set[str]]] = [[set()]]
    for token in tokens:
        if token in "([":
            stack.append([set()])
        elif token in ")]":
            if len(stack) == 1:
                return frozenset()
            inner = stack.pop()
            stack[-1][-1] |= set.intersection(*inner)
        elif token == "|":
            stack[-1].append(set())
        elif token not in "&,":
            stack[-1][-1].add(token)
    return frozenset(set.intersection(*stack[0])) if len(stack) == 1 else frozenset()


def requested_tier(request: Request, tiers: Sequence[Tier]) -> Tier | None:
    """The one tier that a request asks for; None where it names none, or leaves a choice."""
    named = [tier for tier in tiers if _names(request, tier)]
    if len(named) != 1:
        return None
    is_choice = named[0].constraint and named[0].constraint not in required_features(request.constraints)
    return None if is_choice else named[0]


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
    crossing = [tier for tier in tiers if tier.kind != target.kind and _names(request, tier)]
    if crossing:
        return Rewrite(why_not=f"the request names {crossing[0].name} by its {crossing[0].kind_text}")
    if target.partition and request.partition and request.partition not in {tier.partition for tier in tiers}:
        return Rewrite(why_not=f"the request names the partition {request.partition}")
    if not target.gres and request.gpu_type and requested_tier(request, tiers) is None:
        return Rewrite(why_not=f"the request names the GPU type {request.gpu_type}")
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
        return Rewrite("--constraint", "&".join(changed))
    misspelled = [(term, name) for term in terms for name in sorted(known) if _is_like(term, name)]
    if misspelled:
        return Rewrite(why_not='the constraint names "{}", perhaps a misspelled {}'.format(*misspelled[0]))
    return Rewrite("--constraint", "&".join([*terms, target.constraint]))


def _is_like(term: str, name: str) -> bool:
    """Whether a feature looks like a misspelled tier: other digits or case, or one letter more, fewer or other.

    Beside it no tier's own feature is ever met: "hbm80&hbm40g".
    """
    one, other = term.lower(), name.lower()
    if re.sub("[0-9]+", "#", one) == re.sub("[0-9]+", "#", other):
        return True
    while one and other and one[0] == other[0]:
        one, other = one[1:], other[1:]
    while one and other and one[-1] == other[-1]:
        one, other = one[:-1], other[:-1]
    return len(one) <= 1 and len(other) <= 1


def _rewrite_gres(request: Request, tiers: Sequence[Tier], target: Tier) -> Rewrite:
    """The option that names the GPUs is the one that is rewritten. Slurm has no rule for two that disagree."""
    if target.is_slice and not request.is_one_gpu:
        return Rewrite(why_not="a MIG slice is for jobs of one GPU on one node")
    gpu_terms = [term for term in request.gres.split(",") if _GPU_TERM.fullmatch(term)]
    asks = [("--gres", request.gres)] if gpu_terms else []
    asks += request.gpu_options
    if len(asks) > 1:
        return Rewrite(why_not=f"the request names its GPUs by {' and '.join(option for option, _ in asks)}")
    option, text = asks[0] if asks else ("--gres", "")
    if option not in _REWRITABLE:
        return Rewrite(why_not=f"almanac does not change {option}")
    known = {tier.gres for tier in tiers if tier.gres}
    changed = _retyped(option, text, target.gres)
    if not changed or (request.gpu_type and request.gpu_type not in known):
        return Rewrite(why_not="the request does not name its GPUs by one term of a known type")
    return Rewrite(option, changed)


def _retyped(option: str, text: str, gres_type: str) -> str:
    """The option's text with this type; "" where it is not one term of GPUs."""
    if option != "--gres":
        found = _NUMBER.fullmatch(text)
        return f"{found[1] or ''}{gres_type}:{found[2]}" if found else ""
    terms = text.split(",")
    places = [place for place, term in enumerate(terms) if _GPU_TERM.fullmatch(term)]
    if len(places) != 1 or "(" in text:
        return ""
    count = terms[places[0]].split(":")[-1]
    terms[places[0]] = f"gpu:{gres_type}:{count if _DIGITS.fullmatch(count) else 1}"
    return ",".join(terms)
