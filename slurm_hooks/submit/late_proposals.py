"""Messages that few submissions need: another GPU type, and a note on arrays whose tasks can share a GPU. Pure.

A request for nodes of `a100|h100` gets a warning: Slurm may give one job nodes of both. A user sees the note on packing
once a day for each job family; nothing is changed or asked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.types.decide import GpuTypeRules, TypeAdvice, TypeRunTime, decide_type
from almanac.records import JobRequest
from almanac.submit_config import GpuType, Tier
from almanac.tiers import Rewrite, asked_types, mixed_types, names_other_type, requested_tier, rewrite_type, unmixed
from almanac.units import DAY_S
from slurm_hooks.advice.file import FAMILY, AdviceRow
from slurm_hooks.advice.kinds import PackingFile, PackingRow, WaitsFile
from slurm_hooks.submit.choices import Choice
from slurm_hooks.submit.proposal import COLUMNS, HEAD, INDENT, Proposal, wrapped

PROGRAM = "almanac-pack"
AGAIN_S = DAY_S
USE = " Use: "
"""Text between the sentence and the command."""
NOTED = "packing"
"""Stands in place of a tier in the file of notes, which has the format of the answers."""
_SLICE = re.compile("[1-7]g[.][0-9]+gb", re.IGNORECASE)
"""In the GPU type of a MIG slice: "1g.10gb", "nvidia_a100_1g.10gb"."""
_SWEEP = re.compile("([0-9]{1,9})-([0-9]{1,9})(?::1)?(?:%([0-9]{1,9}))?")


def is_sweep(array: str) -> bool:
    """True if the value of --array is one range without a step, of several tasks that may run together.

    almanac-pack needs a step instead, which a list such as "1,5" cannot have. "1-9%1" is a chain.
    """
    found = _SWEEP.fullmatch(array)
    return found is not None and int(found[1]) < int(found[2]) and (found[3] is None or int(found[3]) > 1)


def find_note(
    request: JobRequest, array: str, command: str, tiers: tuple[Tier, ...], packing: PackingFile
) -> PackingRow | None:
    """Find the note for this submission, or None. array: "" without --array. command: text of the job's script,
    or of what is wrapped: a job that packs already is told nothing.
    """
    key = request.name_key
    if not (is_sweep(array) and request.is_one_gpu) or PROGRAM in command or key.startswith(PROGRAM):
        return None
    row = packing.of_family(key, 1)
    return row if row is not None and _fits(request, tiers, row) else None


def _fits(request: JobRequest, tiers: tuple[Tier, ...], row: PackingRow) -> bool:
    """True if the job gets a whole GPU with memory for two, whichever one Slurm gives it.

    A job that names no tier, or a choice, may get the smallest. A GPU type that is no tier may be any model.
    """
    asked = requested_tier(request, tiers)
    if _SLICE.search(request.gpu_type) or (request.gpu_type and asked is None):
        return False
    if asked is not None:
        return not asked.is_slice and asked.capacity_mib >= row.need_mib
    return all(tier.capacity_mib >= row.need_mib for tier in tiers if not tier.is_slice)


def was_noted(earlier: Choice | None, now_s: int) -> bool:
    """True if the user saw the note within a day."""
    return earlier is not None and earlier.is_recent(now_s, AGAIN_S)


def noted(row: PackingRow, now_s: int) -> Choice:
    """Choice to keep after the note was shown."""
    return Choice(row.key, row.gpus, "asked", NOTED, now_s)


def note(row: PackingRow, columns: int = COLUMNS) -> str:
    """The note in lines of at most `columns`, each ended; what to use on a line of its own."""
    said, *command = row.text.split(USE, 1)
    return wrapped(said, HEAD, columns) + "".join(wrapped(f"{USE}{each}", INDENT, columns) for each in command)


@dataclass(frozen=True)
class TypeFinding:
    """Message on a submission's GPU type. check: the plain change whose nodes are looked for."""

    text: str
    change: Rewrite
    check: Rewrite
    target: Tier


def find_type(request: JobRequest, times: Sequence[TypeRunTime], waits: WaitsFile, now_s: int) -> TypeFinding | None:
    """Find the message on the GPU type, or None."""
    mixed = mixed_types(request, waits.types)
    if mixed:
        return _warning(request, waits.types, mixed)
    advice = advise_type(request, times, waits, now_s)
    if advice is None:
        return None
    target = next(kind for kind in waits.types if kind.name == advice.best.gpu_type).as_tier()
    check = rewrite_type(request, waits.types, advice.types[:1])
    text = advice.text(waits.told_of(request.gpu_count, now_s))
    return TypeFinding(text, rewrite_type(request, waits.types, advice.types), check, target)


def advise_type(request: JobRequest, times: Sequence[TypeRunTime], waits: WaitsFile, now_s: int) -> TypeAdvice | None:
    """Return decide_type's advice for a request, by a waits file's limits.

    None for a MIG slice, and for another type without waits.
    """
    if request.gpu_count <= 0 or names_other_type(request, waits.types):
        return None
    rules = GpuTypeRules(now_s, waits.min_gain, waits.max_age_s)
    own = waits.of_size(request.gpu_count, now_s)
    return decide_type(times, own, sorted(asked_types(request, waits.types)), rules, request.time_limit_s)


def _warning(request: JobRequest, types: Sequence[GpuType], mixed: Sequence[str]) -> TypeFinding:
    target = next(kind for kind in types if kind.name == mixed[0]).as_tier()
    text = (
        f'-C "{request.constraints}" with {request.node_count} nodes can give one job nodes of both '
        f"{' and '.join(mixed[:2])}; in brackets, all nodes are of one type."
    )
    return TypeFinding(text, unmixed(request), Rewrite("--constraint", target.constraint), target)


def propose_type(
    request: JobRequest, times: Sequence[TypeRunTime], waits: WaitsFile, now_s: int, is_placed: bool = False
) -> Proposal | None:
    """find_type as a Proposal; its choices are kept apart from those on memory tiers. is_placed: as of propose()."""
    found = find_type(request, times, waits, now_s)
    if found is None:
        return None
    key = request.name_key
    change = Rewrite(why_not="the request says which nodes it wants") if is_placed else found.change
    row = AdviceRow(FAMILY, 1, 0, key, request.gpu_count, text=found.text)
    return Proposal(key, request.gpu_count, row, found.target, change, said=found.text, check=found.check)
