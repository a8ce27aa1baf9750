"""A note at a terminal for an array whose tasks can share a GPU: information, nothing is changed or asked. Pure.

packing.lua says the same. A user sees it once a day for each job family.
"""

from __future__ import annotations

import re

from almanac.names import name_key
from almanac.records import Request
from almanac.submit_config import Tier
from almanac.tiers import requested_tier
from almanac.units import DAY_S
from slurm_hooks.advice.packing_file import PackingFile, PackingRow
from slurm_hooks.submit.choices import Choice
from slurm_hooks.submit.proposal import HEAD, wrapped

PROGRAM = "almanac-pack"
AGAIN_S = DAY_S
NOTED = "packing"
"""Stands in place of a tier in the file of notes, which has the format of the answers."""
_SLICE = re.compile(r"[0-9]+g\.")


def is_sweep(array: str) -> bool:
    """Whether the value of --array names several tasks that may run together; "1-9%1" is a chain."""
    return bool(re.search("[-,]", array)) and not array.endswith("%1")


def find_note(
    request: Request, array: str, command: str, tiers: tuple[Tier, ...], packing: PackingFile
) -> PackingRow | None:
    """What to tell of this submission; None: nothing. array: "" without --array. command: text of the job's script,
    or of what is wrapped: a job that packs already is told nothing.
    """
    key = name_key(request.job_name)
    if not (is_sweep(array) and request.is_one_gpu) or PROGRAM in command or key.startswith(PROGRAM):
        return None
    row, asked = packing.rows.get((key, 1)), requested_tier(request, tiers)
    if row is None or _SLICE.match(request.gpu_type):
        return None
    if asked is not None and (asked.is_slice or asked.capacity_mib < row.need_mib):
        return None
    return row


def was_noted(earlier: Choice | None, now_s: int) -> bool:
    """Whether the user saw the note within a day."""
    return earlier is not None and earlier.is_recent(now_s, AGAIN_S)


def noted(row: PackingRow, now_s: int) -> Choice:
    """What to keep after the note was shown."""
    return Choice(row.key, row.gpus, "asked", NOTED, now_s)


def note(row: PackingRow) -> str:
    """The note in lines of at most 80 columns, each ended."""
    return wrapped(row.text, HEAD)
