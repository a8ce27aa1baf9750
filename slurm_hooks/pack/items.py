"""The items of a run: scripts by their place in the list, or the indices of a sweep or of a job array.

Slurm tells an array task its own index, the step, and the smallest and largest index that it scheduled. Of
--array=0-99:2 the largest is 98 (seen on 22.05, 24.11, and 26.05), so the last array task runs 98 and 99; with
--items 0-98 it runs 98 alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_hooks.pack.allocation import number_of
from slurm_hooks.pack.options import Options

MOST_ITEMS = 100_000
PLACE = "{}"


@dataclass(frozen=True)
class Item:
    """One task of the list. index: of the script, or of the sweep."""

    index: int
    argv: tuple[str, ...]
    is_of_sweep: bool


def items_of(options: Options, environ: Mapping[str, str]) -> list[Item]:
    """Raises ValueError, saying what is wrong with the array or with --items."""
    if options.scripts:
        return [Item(number, (script,), False) for number, script in enumerate(options.scripts)]
    return [
        Item(index, tuple(word.replace(PLACE, str(index)) for word in options.command), True)
        for index in indices_of(options.items, environ)
    ]


def indices_of(text: str, environ: Mapping[str, str]) -> list[int]:
    wanted = parse_indices(text) if text else None
    task = number_of(environ, "SLURM_ARRAY_TASK_ID")
    if task is None:
        if wanted is None:
            raise ValueError("no items: give --items, such as --items 0-9, or submit a job array")
        return wanted
    step, end = _step_and_end(environ)
    if wanted is not None and end is not None and max(wanted) >= end:
        raise ValueError(f"--items goes to {max(wanted)}, but the array's tasks run the items up to {end - 1}")
    own = range(task, task + step)
    return list(own) if wanted is None else [index for index in wanted if index in own]


def _step_and_end(environ: Mapping[str, str]) -> tuple[int, int | None]:
    """Items of each array task, and the first index after the last item of all; None where Slurm does not say."""
    first, last, step, count = (
        number_of(environ, f"SLURM_ARRAY_TASK_{name}") for name in ("MIN", "MAX", "STEP", "COUNT")
    )
    if step is None or step <= 1:
        return 1, None if last is None else last + 1
    if first is None or last is None or count is None or first + (count - 1) * step != last:
        raise ValueError("the array has several ranges and a step; expected one range, such as --array=0-99:2")
    return step, last + step


def parse_indices(text: str) -> list[int]:
    """The numbers of "0-9", "0-99:5", or "1,4,7-9", each once, in this order. Raises ValueError."""
    found: dict[int, None] = {}
    for term in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?", term)
        if not match or (match[3] and not int(match[3])):
            raise ValueError(f"--items is {text!r}, expected numbers such as 0-99, 0-99:5, or 1,4,7")
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))
        if not numbers or len(numbers) + len(found) > MOST_ITEMS:
            raise ValueError(f"--items is {text!r}, expected 1 to {MOST_ITEMS:,} numbers in rising ranges")
        found |= dict.fromkeys(numbers)
    return list(found)
