"""A user's packing advice for arrays: what `almanac publish` writes beside the advice file, for showing only.

    almanac-packing  1
    expires          1795428900          from then on the file is not used
    P  key  1  21504  Pack two on one GPU: ...   name key, GPU count, memory that a GPU must have, MiB, and the note
    end              1                   the number of rows

It lies in user/<uid>/packing, and only that user can read it. Tabs separate the fields. Every other byte is 0x20..0x7e.
Readers ignore a file that breaks a rule. Hooks of older releases do not read it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from almanac.errors import FileFormatError

NAME = "packing"
MAX_BYTES = 65_536
_INT = r"[0-9]{1,12}"
_HEAD = re.compile(rf"almanac-packing\t1\nexpires\t({_INT})\n")
_ROW = re.compile(rf"P\t([\x21-\x7e]{{1,64}})\t([1-9][0-9]{{0,5}})\t({_INT})\t([\x20-\x7e]{{1,400}})")
_END = re.compile(rf"end\t({_INT})")

Family = tuple[str, int]
"""Name key and GPU count."""


@dataclass(frozen=True)
class PackingRow:
    """A family whose runs can share a GPU with at least need_mib of memory. text: what to tell the user."""

    key: str
    gpus: int
    need_mib: int
    text: str


@dataclass(frozen=True)
class PackingFile:
    expires_s: int
    rows: Mapping[Family, PackingRow]


def render_packing(expires_s: int, rows: Iterable[PackingRow]) -> bytes:
    """The file's bytes; rows that do not fit into MAX_BYTES are left out, the last ones first.

    Rows with values that the format cannot hold are left out, too.
    """
    head, kept, room = f"almanac-packing\t1\nexpires\t{expires_s}\n", list[str](), MAX_BYTES - 200
    for row in rows:
        line = f"P\t{row.key}\t{row.gpus}\t{row.need_mib}\t{row.text}"
        if not _ROW.fullmatch(line):
            continue
        room -= len(line) + 1
        if room < 0:
            break
        kept.append(line)
    return (head + "".join(f"{line}\n" for line in kept) + f"end\t{len(kept)}\n").encode("ascii")


def parse_packing(content: bytes, now_s: int) -> PackingFile:
    """Raises FileFormatError where the file is not to be used. Of equal families the first counts."""
    text = content.decode("latin-1")
    head = _HEAD.match(text)
    if len(content) > MAX_BYTES or head is None or not text.endswith("\n"):
        raise FileFormatError("not a file of packing advice of format 1")
    if int(head[1]) <= now_s:
        raise FileFormatError("expired")
    *lines, last = text[head.end() : -1].split("\n")
    end = _END.fullmatch(last)
    if end is None or int(end[1]) != len(lines):
        raise FileFormatError("cut off: rows are missing")
    found: dict[Family, PackingRow] = {}
    for line in lines:
        match = _ROW.fullmatch(line)
        if match is None:
            raise FileFormatError(f"not a row of packing advice: {line[:60]!r}")
        key, gpus, need_mib, said = match.groups()
        found.setdefault((key, int(gpus)), PackingRow(key, int(gpus), int(need_mib), said))
    return PackingFile(int(head[1]), found)


def usable_packing(path: str, now_s: int) -> PackingFile | None:
    """The file, or None where it is absent, unreadable, malformed, or expired. Never waits: a FIFO is refused."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
            content = file.read(MAX_BYTES + 1) if stat.S_ISREG(os.fstat(handle).st_mode) else b""
        return parse_packing(content, now_s)
    except (FileFormatError, OSError):
        return None
