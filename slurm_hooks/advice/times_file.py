"""A user's run times by GPU type: what `almanac publish` writes beside the advice file, for showing only.

    almanac-times  1
    expires        1795428900            from then on the file is not used
    R  key  gpus  a100  11160  9800  12700  15900  9  own runs     name key, GPU count, type, seconds, low, high,
                                                                   longest, runs, source
    end            1                     the number of rows

It lies in user/<uid>/times, and only that user can read it. Tabs separate the fields. Readers ignore a file that breaks
a rule.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from advisor.decisions.gpu_type import RunTime
from almanac.errors import FileFormatError

NAME = "times"
MAX_BYTES = 65_536
SOURCES = ("own runs", "own rates", "other families", "specifications")
_INT = r"[0-9]{1,12}"
_HEAD = re.compile(rf"almanac-times\t1\nexpires\t({_INT})\n")
_ROW = re.compile(
    rf"R\t([\x21-\x7e]{{1,64}})\t([1-9][0-9]{{0,5}})\t([A-Za-z0-9._+-]{{1,64}})\t({_INT})\t({_INT})\t({_INT})\t({_INT})"
    rf"\t([0-9]{{1,9}})\t({'|'.join(SOURCES)})"
)
_END = re.compile(rf"end\t({_INT})")

Family = tuple[str, int]
"""Name key and GPU count."""


@dataclass(frozen=True)
class PublishedTime:
    """A RunTime of a file."""

    gpu_type: str
    run_s: float
    low_s: float
    high_s: float
    longest_s: float
    runs: int
    source: str


@dataclass(frozen=True)
class TimesFile:
    expires_s: int
    times: Mapping[Family, tuple[PublishedTime, ...]]


def render_times(expires_s: int, families: Mapping[Family, Sequence[RunTime]]) -> bytes:
    """The file's bytes; families that do not fit into MAX_BYTES are left out, the last ones first.

    Times of unknown sources, and with values that the format cannot hold, are left out, too.
    """
    head, rows, room = f"almanac-times\t1\nexpires\t{expires_s}\n", list[str](), MAX_BYTES - 200
    for (key, gpus), times in families.items():
        own = [row for each in times if _ROW.fullmatch(row := _row(key, gpus, each))]
        room -= sum(len(row) + 1 for row in own)
        if room < 0:
            break
        rows += own
    return (head + "".join(f"{row}\n" for row in rows) + f"end\t{len(rows)}\n").encode("ascii")


def _row(key: str, gpus: int, time: RunTime) -> str:
    seconds = "\t".join(str(max(round(each), 1)) for each in (time.run_s, time.low_s, time.high_s, time.longest_s))
    return f"R\t{key}\t{gpus}\t{time.gpu_type}\t{seconds}\t{time.runs}\t{time.source}"


def parse_times(content: bytes, now_s: int) -> TimesFile:
    """Raises FileFormatError where the file is not to be used."""
    text = content.decode("latin-1")
    head = _HEAD.match(text)
    if len(content) > MAX_BYTES or head is None or not text.endswith("\n"):
        raise FileFormatError("not a file of run times of format 1")
    if int(head[1]) <= now_s:
        raise FileFormatError("expired")
    *rows, last = text[head.end() : -1].split("\n")
    end = _END.fullmatch(last)
    if end is None or int(end[1]) != len(rows):
        raise FileFormatError("cut off: rows are missing")
    found: dict[Family, list[PublishedTime]] = {}
    for row in rows:
        match = _ROW.fullmatch(row)
        if match is None:
            raise FileFormatError(f"not a run time: {row[:60]!r}")
        key, gpus, gpu_type, *seconds, runs, source = match.groups()
        run_s, low_s, high_s, longest_s = map(float, seconds)
        time = PublishedTime(gpu_type, run_s, low_s, high_s, longest_s, int(runs), source)
        found.setdefault((key, int(gpus)), []).append(time)
    return TimesFile(int(head[1]), {family: tuple(times) for family, times in found.items()})


def usable_times(path: Path | str, now_s: int) -> TimesFile | None:
    """The file, or None where it is absent, unreadable, malformed, or expired. Never waits: a FIFO is refused."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
            content = file.read(MAX_BYTES + 1) if stat.S_ISREG(os.fstat(handle).st_mode) else b""
        return parse_times(content, now_s)
    except (FileFormatError, OSError):
        return None
