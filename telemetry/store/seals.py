"""Checksums of a partition file within its own footer, compared before a native reader sees the file.

pyarrow and DuckDB end the process on some damaged footers. The last pair of the footer's metadata, `almanac.seal`,
holds two checksums: of all bytes before the footer, and of the footer itself without these last digits.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

SEAL = "almanac.seal"
WHOLE_BYTES = 2**20
"""Of files up to this size, every reading compares all bytes, within 1 ms. Of larger ones, it compares the footer."""
_DIGITS = 32
_ROOM = "0" * (2 * _DIGITS)
_MARK = SEAL.encode() + b"\x18\x40"
"""Thrift writes the key, then 0x18 for a text, and its length of 64."""
_TAIL, _MOST_FOOTER = 2**14, 2**26
_PIECE = 2**20
_FRAGMENT = "no whole Parquet file"


class Look(NamedTuple):
    """fault: what is wrong, else "". unsealed: if the file has no seal, a checksum of what was read; else ""."""

    fault: str = ""
    unsealed: str = ""


def write_sealed(table: pa.Table, out: IO[Any], **options: Any) -> None:
    """Write a table as a Parquet file with a seal to an empty file that can be read, too. options: of the writer."""
    row_group_size = options.pop("row_group_size", None)
    with pq.ParquetWriter(out, table.schema, write_page_checksum=True, **options) as writer:
        writer.write_table(table, row_group_size=row_group_size)
        writer.add_key_value_metadata({SEAL: _ROOM})
    out.flush()
    handle = out.fileno()
    size = os.fstat(handle).st_size
    footer = _footer(handle, size)
    before, _, after = footer.rpartition(_ROOM.encode())
    head = before + _digest_of(handle, size - len(footer))
    os.pwrite(handle, head[len(before) :] + _digest(head, after), size - len(footer) + len(before))


def look_at(path: Path, whole_bytes: int | None = WHOLE_BYTES) -> Look:
    """Compare a file with its seal, without a native reader. whole_bytes: of larger files only the footer; None: all.

    Raises OSError. Never waits for a FIFO.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        return _look(handle, whole_bytes)
    finally:
        os.close(handle)


def _look(handle: int, whole_bytes: int | None) -> Look:
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode):
        return Look("not a regular file")
    footer = _footer(handle, about.st_size)
    start = about.st_size - len(footer)
    if not footer or os.pread(handle, 4, 0) != b"PAR1":
        return Look(_FRAGMENT)
    is_whole = whole_bytes is None or about.st_size <= whole_bytes
    seal = footer.rfind(_MARK) + len(_MARK)
    if seal < len(_MARK):
        return Look(unsealed=(_digest(footer) + (_digest_of(handle, start) if is_whole else b"")).decode())
    own = seal + _DIGITS
    if footer[own : own + _DIGITS] != _digest(footer[:own], footer[own + _DIGITS :]):
        return Look("damaged: the checksum of its footer differs")
    if is_whole and footer[seal:own] != _digest_of(handle, start):
        return Look("damaged: its checksum differs")
    return Look()


def _footer(handle: int, size: int) -> bytes:
    """The footer with its length and the last mark; empty where they are not there."""
    tail = os.pread(handle, _TAIL, max(size - _TAIL, 0))
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if tail[-4:] != b"PAR1" or not 8 < length <= min(size - 4, _MOST_FOOTER):
        return b""
    return tail[-length:] if length <= len(tail) else os.pread(handle, length, size - length)


def _digest_of(handle: int, end: int) -> bytes:
    found = hashlib.blake2b(digest_size=_DIGITS // 2)
    for place in range(0, end, _PIECE):
        found.update(os.pread(handle, min(_PIECE, end - place), place))
    return found.hexdigest().encode()


def _digest(*parts: bytes) -> bytes:
    found = hashlib.blake2b(digest_size=_DIGITS // 2)
    for part in parts:
        found.update(part)
    return found.hexdigest().encode()
