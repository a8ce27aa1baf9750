"""The waits file: how long a job would wait now, by GPU type and number of GPUs. `almanac waits` writes it.

    almanac-waits  1
    as_of          1795256100            s since 1970: time of the snapshot of the queue
    limits         0.15  600             least gain, greatest age in s
    T  a100  gres  a100                  a type: name, kind and text of its selector
    W  a100  4  300  0  4200             a wait: type, GPUs, seconds, low, high
    end            2                     the number of rows T and W

It lies in user/_site/waits below the advice folder, is root's, and anyone can read it. It holds totals by type and
size, in steps of 5 minutes: nothing in it names a user or a job, or says when somebody's job ends. Tabs separate the
fields. Readers ignore a file that breaks a rule.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor
from pathlib import Path
from typing import cast, get_args

from advisor.waits.view import TypeWait
from almanac.errors import FileFormatError
from almanac.submit_config import MAX_WAIT_AGE_S, MIN_TYPE_GAIN, SITE, GpuType, TierKind

NAME = "waits"
MAX_BYTES = 65_536
MOST_S = 10**9
STEP_S = 300
_NAME, _INT = r"[A-Za-z0-9._+-]{1,64}", r"[0-9]{1,12}"
_HEAD = re.compile(rf"almanac-waits\t1\nas_of\t({_INT})\nlimits\t([01]\.[0-9]{{1,6}})\t([0-9]{{1,6}})\n")
_TYPE = re.compile(rf"T\t({_NAME})\t({'|'.join(get_args(TierKind))})\t({_NAME})")
_WAIT = re.compile(rf"W\t({_NAME})\t([1-9][0-9]{{0,5}})\t({_INT})\t({_INT})\t({_INT})")
_END = re.compile(rf"end\t({_INT})")


@dataclass(frozen=True)
class WaitsFile:
    """waits: number of GPUs and the wait, by type and then number."""

    as_of_s: int
    types: tuple[GpuType, ...]
    waits: tuple[tuple[int, TypeWait], ...]
    min_gain: float = MIN_TYPE_GAIN
    max_age_s: int = MAX_WAIT_AGE_S

    def is_fresh(self, now_s: int) -> bool:
        """Whether the waits may be used. False for a file from the future: a clock was ahead."""
        return 0 <= now_s - self.as_of_s <= self.max_age_s

    def of_size(self, gpus: int, now_s: int) -> tuple[TypeWait, ...]:
        """The wait of each type for a number of GPUs, of the next larger size in the file; () where it is too old."""
        if not self.is_fresh(now_s) or gpus <= 0:
            return ()
        nearest: dict[str, tuple[int, TypeWait]] = {}
        for size, wait in self.waits:
            if size >= gpus and (wait.gpu_type not in nearest or size < nearest[wait.gpu_type][0]):
                nearest[wait.gpu_type] = (size, wait)
        return tuple(wait for _, wait in nearest.values())


def waits_path(root: Path | str) -> Path:
    """root: hooks.advice_dir."""
    return Path(root) / "user" / SITE / NAME


def render_waits(file: WaitsFile) -> bytes:
    """The file's bytes. Raises ValueError where they would break the format."""
    rows = [f"T\t{kind.name}\t{kind.kind}\t{kind.selector}" for kind in file.types]
    for size, wait in file.waits:
        steps = _steps(wait.wait_s, round), _steps(wait.low_s, floor), _steps(wait.high_s, ceil)
        rows.append(f"W\t{wait.gpu_type}\t{size}\t{steps[0]}\t{steps[1]}\t{steps[2]}")
    head = f"almanac-waits\t1\nas_of\t{file.as_of_s}\nlimits\t{file.min_gain:.6f}\t{file.max_age_s}"
    content = "\n".join([head, *rows, f"end\t{len(rows)}", ""]).encode("ascii")
    parse_waits(content)
    return content


def _steps(seconds: float, rounded: Callable[[float], int]) -> int:
    return rounded(min(max(seconds, 0.0), MOST_S) / STEP_S) * STEP_S


def parse_waits(content: bytes) -> WaitsFile:
    """Raises FileFormatError (a ValueError too) where the file is not to be used."""
    text = content.decode("latin-1")
    head = _HEAD.match(text)
    if len(content) > MAX_BYTES or head is None or not text.endswith("\n"):
        raise FileFormatError("not a waits file of format 1")
    *rows, last = text[head.end() : -1].split("\n")
    end = _END.fullmatch(last)
    if end is None or int(end[1]) != len(rows):
        raise FileFormatError("cut off: rows are missing")
    types, waits, as_of_s = list[GpuType](), list[tuple[int, TypeWait]](), int(head[1])
    for row in rows:
        if (kind := _TYPE.fullmatch(row)) and not waits:
            chosen = {"constraint": "", "gres": "", "partition": "", cast(TierKind, kind[2]): kind[3]}
            types.append(GpuType(name=kind[1], **chosen))
        elif wait := _WAIT.fullmatch(row):
            likely, low, high = (float(number) for number in wait.groups()[2:])
            waits.append((int(wait[2]), TypeWait(wait[1], likely, low, high, as_of_s)))
        else:
            raise FileFormatError(f"not a row of a waits file: {row[:60]!r}")
    _check(types, waits)
    return WaitsFile(as_of_s, tuple(types), tuple(waits), float(head[2]), int(head[3]))


def _check(types: Sequence[GpuType], waits: Sequence[tuple[int, TypeWait]]) -> None:
    names = {kind.name for kind in types}
    if len(names) != len(types) or any(wait.gpu_type not in names for _, wait in waits):
        raise FileFormatError("a wait of an unknown type, or a type twice")
    if any(not wait.low_s <= wait.wait_s <= wait.high_s for _, wait in waits):
        raise FileFormatError("a wait is not inside its interval")


def usable_waits(root: Path | str, now_s: int) -> WaitsFile | None:
    """The waits file below hooks.advice_dir; None where it is absent, malformed, or too old. Never waits (a FIFO)."""
    try:
        handle = os.open(waits_path(root), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
            content = file.read(MAX_BYTES + 1) if stat.S_ISREG(os.fstat(handle).st_mode) else b""
        found = parse_waits(content)
    except (FileFormatError, OSError):
        return None
    return found if found.is_fresh(now_s) else None
