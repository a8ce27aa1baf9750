"""Memory tiers and GPU types: the one that a request names, the request rewritten for another, and MIG slices as tiers.

A constraint is rewritten only where the result can mean nothing else: the tier's feature stands alone as a
conjunct of a plain `a&b&c` expression. Alternatives (`a|b`), counts (`a*2`), brackets and negations are left alone,
and so is a request that already names a tier in another way than the target is asked for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from almanac.hardware import NEAR, MigProfile, mig_models
from almanac.records import JobRequest
from almanac.submit_config import GpuType, Tier

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


def requested_tier(request: JobRequest, tiers: Sequence[Tier]) -> Tier | None:
    """Return the one tier that a request asks for; None if it names no tier or leaves a choice."""
    named = [tier for tier in tiers if _names(request, tier)]
    if len(named) != 1:
        return None
    is_choice = named[0].constraint and named[0].constraint not in required_features(request.constraints)
    return None if is_choice else named[0]


def names_any_tier(request: JobRequest, tiers: Sequence[Tier]) -> bool:
    """Return True if the request names a tier, or a choice between several."""
    return any(_names(request, tier) for tier in tiers)


def _names(request: JobRequest, tier: Tier) -> bool:
    if tier.constraint:
        return tier.constraint in features(request.constraints)
    if tier.gres:
        return tier.gres == request.gpu_type
    return tier.partition in request.partition.split(",")


def rewrite(request: JobRequest, tiers: Sequence[Tier], target: Tier) -> Rewrite:
    """Return the option that asks for `target` instead, every other term kept."""
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
    """Return True if a feature looks like a misspelled tier: other digits or case, or one letter more, fewer or other.

    With it, no node has a tier's own feature: "hbm80&hbm40g".
    """
    one, other = term.lower(), name.lower()
    if re.sub("[0-9]+", "#", one) == re.sub("[0-9]+", "#", other):
        return True
    while one and other and one[0] == other[0]:
        one, other = one[1:], other[1:]
    while one and other and one[-1] == other[-1]:
        one, other = one[:-1], other[:-1]
    return len(one) <= 1 and len(other) <= 1


def _rewrite_gres(request: JobRequest, tiers: Sequence[Tier], target: Tier) -> Rewrite:
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
    """Return the option's text with this type; "" if it is not one term of GPUs."""
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


GIB_MIB = 1024
_MEMORY_SLICES = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}
"""Memory slices by compute slices, where the name says no more (almanac/mig.toml, geometry.seven)."""


@dataclass(frozen=True)
class SliceShare:
    """The shares of a whole GPU that a slice has: of its multiprocessors, and of its memory bandwidth."""

    sms: float
    bandwidth: float


def slice_models(tier: Tier) -> dict[str, MigProfile]:
    """The GPU models that a slice can be of, with its profile there: gpu_model, or all that have the profile.

    Empty where gpu_model lacks the profile, or the GRES type ends in no profile.
    """
    models = mig_models()
    named = [models[tier.gpu_model]] if tier.gpu_model in models else [] if tier.gpu_model else list(models.values())
    found = {model.name: model.profile(tier.gres) for model in named if tier.gres}
    return {name: profile for name, profile in found.items() if profile is not None}


def slice_share(tier: Tier, model_name: str) -> SliceShare | None:
    """The slice's shares of a whole GPU of this model; None where that has no MIG slices.

    Where the model's multiprocessors are not published, and for a slice whose name is no profile, the compute slices
    stand for them.
    """
    model = mig_models().get(model_name)
    if model is None or not tier.is_slice:
        return None
    profile = slice_models(tier).get(model_name)
    compute = tier.compute_slices / model.compute_slices
    if profile is None:
        blocks = _MEMORY_SLICES.get(tier.compute_slices, tier.compute_slices)
        return SliceShare(min(compute, 1.0), min(blocks / model.memory_slices, 1.0))
    sms = profile.sms / model.sms if profile.sms and model.sms else compute
    return SliceShare(sms, profile.memory / model.memory_slices)


def real_capacities(tiers: Sequence[Tier], measured_mib: Mapping[str, float] | None = None) -> tuple[Tier, ...]:
    """The tiers, by size, at most as large as their GPUs really are. measured_mib: by GRES type of a slice, and by name
    of another tier.

    A nominal name is no capacity: "1g.10gb" holds 9.5 GiB, and "1g.18gb" 16. Without a measured capacity the least
    published one counts; if none was published, the configured one stays.
    """
    known = measured_mib or {}
    changed = [
        _with_capacity(tier, known.get(tier.gres)) if tier.is_slice else _as_measured(tier, known.get(tier.name))
        for tier in tiers
    ]
    return tuple(sorted(changed, key=lambda tier: (tier.capacity_mib, tier.name)))


def _as_measured(tier: Tier, measured_mib: float | None) -> Tier:
    """A tier of whole GPUs. Its job can have got another GPU, whose memory is not the tier's."""
    is_own = measured_mib is not None and (1 - NEAR) * tier.capacity_mib <= measured_mib < tier.capacity_mib
    return dataclasses.replace(tier, capacity_mib=int(measured_mib)) if measured_mib and is_own else tier


def _with_capacity(tier: Tier, measured_mib: float | None) -> Tier:
    published = [profile.memory_gib[0] for profile in slice_models(tier).values() if profile.memory_gib]
    known_mib = measured_mib or (min(published) * GIB_MIB if published else None)
    if known_mib is None or known_mib >= tier.capacity_mib:
        return tier
    return dataclasses.replace(tier, capacity_mib=int(known_mib))


def is_known_slice(tier: Tier) -> bool:
    """Return True if the GRES type's profile exists on the tier's GPU model.

    True also if the tier is not a slice, or names no GPU model or GRES type.
    """
    return not tier.is_slice or not tier.gpu_model or not tier.gres or bool(slice_models(tier))


_ALTERNATIVES = re.compile(r"[\w.:+-]+(?:\|[\w.:+-]+)+", re.ASCII)


def asked_types(request: JobRequest, types: Sequence[GpuType]) -> frozenset[str]:
    """Return the names of the types that a request accepts; empty: any, or not understood."""
    named = frozenset() if "!" in request.constraints else frozenset(features(request.constraints))
    partitions = frozenset(request.partition.split(","))
    found = {kind.name for kind in types if kind.gres and kind.gres == request.gpu_type}
    found |= {kind.name for kind in types if kind.constraint in named and kind.constraint}
    return frozenset(found or {kind.name for kind in types if kind.partition and kind.partition in partitions})


def names_other_type(request: JobRequest, types: Sequence[GpuType]) -> bool:
    """Return True if the request names a GRES type that is none of these: a MIG slice, or one without waits."""
    return bool(request.gpu_type) and request.gpu_type not in {kind.gres for kind in types}


def mixed_types(request: JobRequest, types: Sequence[GpuType]) -> tuple[str, ...]:
    """The types of a plain "a|b" of a job of several nodes: Slurm may give it nodes of both. () for other requests."""
    if request.node_count < 2 or not _ALTERNATIVES.fullmatch(request.constraints):
        return ()
    terms = request.constraints.split("|")
    names = {kind.constraint: kind.name for kind in types if kind.constraint}
    return tuple(names[term] for term in terms if term in names) if sum(term in names for term in terms) > 1 else ()


def rewrite_type(request: JobRequest, types: Sequence[GpuType], names: Sequence[str]) -> Rewrite:
    """Return the option that asks for these types instead, the best first, every other term kept.

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


def _rewrite_one(request: JobRequest, by_name: dict[str, GpuType], target: GpuType) -> Rewrite:
    names = asked_types(request, tuple(by_name.values()))
    if len(names) > 1 and target.constraint and _is_choice(request, by_name, names):
        return Rewrite("--constraint", target.constraint)
    return rewrite(request, tuple(kind.as_tier() for kind in by_name.values()), target.as_tier())


def _is_choice(request: JobRequest, by_name: dict[str, GpuType], names: frozenset[str]) -> bool:
    """Return True if the constraint is "a|b" or "[a|b]" of types alone."""
    bare = request.constraints.removeprefix("[").removesuffix("]")
    terms = bare.split("|")
    return bool(_ALTERNATIVES.fullmatch(bare)) and set(terms) == {by_name[name].constraint for name in names}


def unmixed(request: JobRequest) -> Rewrite:
    """The plain alternatives of mixed_types() in brackets: all nodes of a job are then of one type."""
    return Rewrite("--constraint", f"[{request.constraints}]")
