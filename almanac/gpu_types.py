"""GPU types: which ones a request accepts, and how to rewrite the request for others."""

from __future__ import annotations

import re
from collections.abc import Sequence

from almanac.records import Request
from almanac.submit_config import GpuType
from almanac.tiers import Rewrite, features, rewrite

_ALTERNATIVES = re.compile(r"[\w.:+-]+(?:\|[\w.:+-]+)+", re.ASCII)


def asked_types(request: Request, types: Sequence[GpuType]) -> frozenset[str]:
    """Names of the types that a request accepts; empty: any, or not understood."""
    named = frozenset() if "!" in request.constraints else frozenset(features(request.constraints))
    partitions = frozenset(request.partition.split(","))
    found = {kind.name for kind in types if kind.gres and kind.gres == request.gpu_type}
    found |= {kind.name for kind in types if kind.constraint in named and kind.constraint}
    return frozenset(found or {kind.name for kind in types if kind.partition and kind.partition in partitions})


def names_other_type(request: Request, types: Sequence[GpuType]) -> bool:
    """Whether the request names a GRES type that is none of these: a MIG slice, or one without waits."""
    return bool(request.gpu_type) and request.gpu_type not in {kind.gres for kind in types}


def mixed_types(request: Request, types: Sequence[GpuType]) -> tuple[str, ...]:
    """The types of a plain "a|b" of a job of several nodes: Slurm may give it nodes of both. () for other requests."""
    if request.node_count < 2 or not _ALTERNATIVES.fullmatch(request.constraints):
        return ()
    terms = request.constraints.split("|")
    names = {kind.constraint: kind.name for kind in types if kind.constraint}
    return tuple(names[term] for term in terms if term in names) if sum(term in names for term in terms) > 1 else ()


def rewrite_type(request: Request, types: Sequence[GpuType], names: Sequence[str]) -> Rewrite:
    """How to ask for these types instead, the best first, every other term kept.

    Several types become `[a|b]`, or a list of partitions, where the request's own type stands alone; otherwise, and for
    GRES types, only the best one is asked for.
    """
    by_name = {kind.name: kind for kind in types}
    chosen = [by_name[name] for name in names if name in by_name]
    if not chosen:
        return Rewrite(why_not="the type is not known here")
    best = _rewrite_one(request, by_name, chosen[0])
    same = [kind for kind in chosen if kind.kind == chosen[0].kind]
    if not best.value or len(same) < 2 or best.value != chosen[0].selector:
        return best
    if best.option == "--constraint":
        return Rewrite(best.option, f"[{'|'.join(kind.selector for kind in same)}]")
    return Rewrite(best.option, ",".join(kind.selector for kind in same)) if best.option == "--partition" else best


def _rewrite_one(request: Request, by_name: dict[str, GpuType], target: GpuType) -> Rewrite:
    names = asked_types(request, tuple(by_name.values()))
    if len(names) > 1 and target.constraint and _is_choice(request, by_name, names):
        return Rewrite("--constraint", target.constraint)
    return rewrite(request, tuple(kind.as_tier() for kind in by_name.values()), target.as_tier())


def _is_choice(request: Request, by_name: dict[str, GpuType], names: frozenset[str]) -> bool:
    """Whether the constraint is "a|b" or "[a|b]" of types alone."""
    bare = request.constraints.removeprefix("[").removesuffix("]")
    terms = bare.split("|")
    return bool(_ALTERNATIVES.fullmatch(bare)) and set(terms) == {by_name[name].constraint for name in names}


def unmixed(request: Request) -> Rewrite:
    """The plain alternatives of mixed_types() in brackets: all nodes of a job are then of one type."""
    return Rewrite("--constraint", f"[{request.constraints}]")
