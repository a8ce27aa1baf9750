"""A note at a terminal for an array whose tasks can share a GPU: information, nothing is changed or asked. Pure.

packing.lua says the same. A user sees it once a day for each job family.
"""

from __future__ import annotations

import re

from almanac.records import Request
from almanac.submit_config import Tier
from almanac.tiers import requested_tier
from almanac.units import DAY_S
from slurm_hooks.advice.packing_file import PackingFile, PackingRow
from slurm_hooks.submit.choices import Choice
from slurm_hooks.submit.proposal import HEAD, INDENT, wrapped

PROGRAM = "almanac-pack"
AGAIN_S = DAY_S
USE = " Use: "
"""Before the command, which is after the sentence."""
NOTED = "packing"
"""Stands in place of a tier in the file of notes, which has the format of the answers."""
_SLICE = re.compile("[1-7]g[.][0-9]+gb", re.IGNORECASE)
"""In the GPU type of a MIG slice: "1g.10gb", "nvidia_a100_1g.10gb"."""
_SWEEP = re.compile("([0-9]{1,9})-([0-9]{1,9})(?::1)?(?:%([0-9]{1,9}))?")


def is_sweep(array: str) -> bool:
    """Whether the value of --array is one range without a step, with several tasks that may run together.

    almanac-pack needs a step instead, which a list such as "1,5" cannot have. "1-9%1" is a chain.
    """
    found = _SWEEP.fullmatch(array)
    return found is not None and int(found[1]) < int(found[2]) and (found[3] is None or int(found[3]) > 1)


def find_note(
    request: Request, array: str, command: str, tiers: tuple[Tier, ...], packing: PackingFile
) -> PackingRow | None:
    """What to tell of this submission; None: nothing. array: "" without --array. command: text of the job's script,
    or of what is wrapped: a job that packs already is told nothing.
    """
    key = request.name_key
    if not (is_sweep(array) and request.is_one_gpu) or PROGRAM in command or key.startswith(PROGRAM):
        return None
    row = packing.rows.get((key, 1))
    return row if row is not None and _fits(request, tiers, row) else None


def _fits(request: Request, tiers: tuple[Tier, ...], row: PackingRow) -> bool:
    """Whether the job gets a whole GPU with memory for two, whichever one Slurm gives it.

    A job that names no tier, or a choice, may get the smallest. A GPU type that is no tier may be any model.
    """
    asked = requested_tier(request, tiers)
    if _SLICE.search(request.gpu_type) or (request.gpu_type and asked is None):
        return False
    if asked is not None:
        return not asked.is_slice and asked.capacity_mib >= row.need_mib
    return all(tier.capacity_mib >= row.need_mib for tier in tiers if not tier.is_slice)


def was_noted(earlier: Choice | None, now_s: int) -> bool:
    """Whether the user saw the note within a day."""
    return earlier is not None and earlier.is_recent(now_s, AGAIN_S)


def noted(row: PackingRow, now_s: int) -> Choice:
    """What to keep after the note was shown."""
    return Choice(row.key, row.gpus, "asked", NOTED, now_s)


def note(row: PackingRow) -> str:
    """The note in lines of at most 80 columns, each ended; what to use on a line of its own."""
    said, *command = row.text.split(USE, 1)
    return wrapped(said, HEAD) + "".join(wrapped(f"{USE}{each}", INDENT) for each in command)
