"""A proposal of another GPU type at a terminal: from the user's run times and the waits now. types.lua does the same.

A request for nodes of `a100|h100` gets a warning: Slurm may give one job nodes of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from advisor.decisions.gpu_type import GpuTypeRules, RunTime, TypeAdvice, decide_type
from almanac.gpu_types import asked_types, mixed_types, names_other_type, rewrite_type, unmixed
from almanac.records import Request
from almanac.submit_config import GpuType, Tier
from almanac.tiers import Rewrite
from slurm_hooks.advice.file import FAMILY, Row
from slurm_hooks.advice.waits_file import WaitsFile
from slurm_hooks.submit.proposal import Proposal


@dataclass(frozen=True)
class TypeFinding:
    """What is said of a submission's GPU type. check: the plain change whose nodes are looked for."""

    text: str
    change: Rewrite
    check: Rewrite
    target: Tier


def find_type(request: Request, times: Sequence[RunTime], waits: WaitsFile, now_s: int) -> TypeFinding | None:
    """None where there is nothing to say."""
    mixed = mixed_types(request, waits.types)
    if mixed:
        return _warning(request, waits.types, mixed)
    advice = advise_type(request, times, waits, now_s)
    if advice is None:
        return None
    target = next(kind for kind in waits.types if kind.name == advice.best.gpu_type).as_tier()
    check = rewrite_type(request, waits.types, advice.types[:1])
    return TypeFinding(advice.text, rewrite_type(request, waits.types, advice.types), check, target)


def advise_type(request: Request, times: Sequence[RunTime], waits: WaitsFile, now_s: int) -> TypeAdvice | None:
    """decide_type for a request, by a waits file's limits. None for a MIG slice, and for another type without waits."""
    if request.gpu_count <= 0 or names_other_type(request, waits.types):
        return None
    rules = GpuTypeRules(now_s, waits.min_gain, waits.max_age_s)
    own = waits.of_size(request.gpu_count, now_s)
    return decide_type(times, own, sorted(asked_types(request, waits.types)), rules, request.time_limit_s)


def _warning(request: Request, types: Sequence[GpuType], mixed: Sequence[str]) -> TypeFinding:
    target = next(kind for kind in types if kind.name == mixed[0]).as_tier()
    text = (
        f'-C "{request.constraints}" with {request.node_count} nodes can give one job nodes of both '
        f"{' and '.join(mixed[:2])}; in brackets, all nodes are of one type."
    )
    return TypeFinding(text, unmixed(request), Rewrite("--constraint", target.constraint), target)


def propose_type(
    request: Request, times: Sequence[RunTime], waits: WaitsFile, now_s: int, is_placed: bool = False
) -> Proposal | None:
    """find_type as a Proposal; its choices are kept apart from those on memory tiers. is_placed: as of propose()."""
    found = find_type(request, times, waits, now_s)
    if found is None:
        return None
    key = request.name_key
    change = Rewrite(why_not="the request says which nodes it wants") if is_placed else found.change
    row = Row(FAMILY, 1, 0, key, request.gpu_count, text=found.text)
    return Proposal(key, request.gpu_count, row, found.target, change, said=found.text, check=found.check)
