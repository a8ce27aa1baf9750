"""Partition files of the store: their names, the strays among them, reading, writing, and checksums.

pyarrow and DuckDB end the process on some damaged footers. So the last pair of the footer's metadata, `almanac.seal`,
holds two checksums: of all bytes before the footer, and of the footer itself without these last digits. Every file is
also written with a CRC-32 of each page. DuckDB does not compare them; `open_checked` does.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import hashlib
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from almanac.atomic import FileState, is_safe_name, make_inner_folder, replacing, state_of, writing
from almanac.errors import StoreError
from telemetry.store.schema import SCHEMA_VERSION, Table

CLUSTER = "cluster="
MOST_IDS = 100
"""Most ids for which a look into each footer pays: with more, most files can hold one of them."""
_IDS = ("job_id", "array_job_id")
_DATE = re.compile(r"date=([0-9]{4}-[0-9]{2}-[0-9]{2})")
_TIME = re.compile(r"([0-9]{2})([0-9]{2})\.parquet")


@dataclass(frozen=True)
class Stray:
    """Something among a store's files that is left out, and what is wrong with it.

    is_damaged: it is in the place of a file of the store; else the store did not put it there.
    """

    path: Path
    reason: str
    is_damaged: bool = False


def partition_start(path: Path) -> int:
    """Start of a partition file, s since 1970. Raises ValueError where its name is not that of one."""
    date, time = _DATE.fullmatch(path.parent.name), _TIME.fullmatch(path.name)
    if not date or not time:
        raise ValueError(f"{path} is no date=YYYY-MM-DD/HHMM.parquet")
    return int(dt.datetime.fromisoformat(f"{date[1]}T{time[1]}:{time[2]}:00+00:00").timestamp())


def cluster_folders(table: Path) -> tuple[list[Path], list[Stray]]:
    """The folders of a table's clusters, in order, and the strays among them."""
    return _sorted_out(table, _cluster_fault, of_folders=True)


def partition_files(cluster: Path) -> tuple[list[Path], list[Stray]]:
    """The partition files of one cluster's folder in time order, and the strays among them."""
    files: list[Path] = []
    days, strays = _sorted_out(cluster, _day_fault, of_folders=True)
    for day in days:
        found, more = _sorted_out(day, _time_fault, of_folders=False)
        files += found
        strays += more
    return files, strays


def _cluster_fault(path: Path) -> str:
    is_named = path.name.startswith(CLUSTER) and is_safe_name(path.name.removeprefix(CLUSTER))
    return "" if is_named else "its name is not cluster=NAME"


def _day_fault(path: Path) -> str:
    return "" if _is_start(path / "0000.parquet") else "its name is not date=YYYY-MM-DD"


def _time_fault(path: Path) -> str:
    return "" if _is_start(path) else "its name is not HHMM.parquet"


def _is_start(path: Path) -> bool:
    try:
        partition_start(path)
    except ValueError:
        return False
    return True


def _sorted_out(folder: Path, name_fault: Callable[[Path], str], *, of_folders: bool) -> tuple[list[Path], list[Stray]]:
    """List a folder in order, and its strays. Hidden names are neither: half-written files, NFS's, editors'."""
    try:
        with os.scandir(folder) as entries:
            shown = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda one: one.name)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [Stray(folder, f"it cannot be listed: {error.strerror}")]
    faults = [(Path(one.path), name_fault(Path(one.path)) or _kind_fault(one, of_folders)) for one in shown]
    return [path for path, fault in faults if not fault], [Stray(path, fault) for path, fault in faults if fault]


def _kind_fault(entry: os.DirEntry[str], is_folder: bool) -> str:
    """Empty for a folder, or a regular file, as it should be; no stat but for links."""
    try:
        if entry.is_dir() if is_folder else entry.is_file():
            return ""
    except OSError as error:
        return f"a link that leads nowhere: {error.strerror}"
    return "not a folder" if is_folder else "not a regular file"


def by_partition(spec: Table, rows: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    """Start (s) of each partition that rows belong to, in time order, and its rows in the order given."""
    part = rows[spec.time_column].to_numpy() // (spec.part_s * spec.ticks_per_s)
    if (part[1:] < part[:-1]).any():
        order = np.argsort(_narrow(part), kind="stable")
        rows, part = rows.combine_chunks().take(order), part[order]
    borders = [*np.flatnonzero(np.diff(part, prepend=part[:1] - 1)).tolist(), len(part)]
    for first, end in itertools.pairwise(borders):
        yield int(part[first]) * spec.part_s, rows.slice(first, end - first)


def _narrow(part: npt.NDArray[np.int64]) -> npt.NDArray[np.integer]:
    """Numbers in the same order, of a type that NumPy sorts by radix where they are close."""
    first = part.min()
    return (part - first).astype(np.uint16) if part.max() - first < 2**16 else part


def of_times(spec: Table, files: Sequence[Path], times: pa.Array[Any]) -> list[Path]:
    """Return the partition files that can hold rows of these times, in the unit of the table's time column."""
    starts = set((np.unique(times.to_numpy() // (spec.part_s * spec.ticks_per_s)) * spec.part_s).tolist())
    return [path for path in files if partition_start(path) in starts]


def span_ticks(spec: Table, since_s: int | None, until_s: int | None) -> tuple[int, int]:
    """A span in the unit of the table's time column; without an end, beyond every time."""
    low = -(2**62) if since_s is None else since_s * spec.ticks_per_s
    return low, 2**62 if until_s is None else until_s * spec.ticks_per_s


def of_ids(files: Sequence[Path], among: Mapping[str, pa.Array[Any]]) -> list[Path]:
    """Return the files whose footers allow the wanted job ids. A file without a readable footer stays."""
    few = {name: among[name].drop_null().to_pylist() for name in _IDS if name in among and len(among[name]) <= MOST_IDS}
    return [path for path in files if _can_hold(path, few)] if few else list(files)


def _can_hold(path: Path, wanted: Mapping[str, Sequence[Any]]) -> bool:
    try:
        ranges = _id_ranges(path, state_of(path))
    except (OSError, pa.ArrowException):
        return True
    return all(
        name not in ranges or any(one in part for part in ranges[name] for one in ids) for name, ids in wanted.items()
    )


@functools.lru_cache(maxsize=4096)
def _id_ranges(path: Path, state: FileState) -> dict[str, list[range]]:
    """By column, the ids that each row group can hold. A column without statistics is left out.

    state: of the file, so that a replaced file is looked at again.
    """
    footer = pq.read_metadata(path)
    found: dict[str, list[range]] = {}
    for place, name in enumerate(footer.schema.names):
        if name in _IDS:
            groups = [footer.row_group(number).column(place) for number in range(footer.num_row_groups)]
            stated: list[Any] = [group.statistics for group in groups]
            if all(one and (one.has_min_max or not one.num_values) for one in stated):
                found[name] = [range(one.min, one.max + 1) if one.has_min_max else range(0) for one in stated]
    return found


SEAL = "almanac.seal"
WHOLE_BYTES = 2**20
"""Size up to which every reading compares all bytes, within 1 ms. Of larger files, it compares the footer."""
FORBIDDEN = "you may not read it"
_UNREADABLE = (pa.ArrowException, OSError, ValueError, MemoryError)
"""Errors that pyarrow raises for damaged files: a flipped bit can make a size or a text as well as a page."""
_DIGITS = 32
_ROOM = "0" * (2 * _DIGITS)
_MARK = SEAL.encode() + b"\x18\x40"
"""Thrift writes the key, then 0x18 for a text, and its length of 64."""
_TAIL, _MOST_FOOTER = 2**14, 2**26
_PIECE = 2**20
_ROW_GROUP = 122_880


def with_columns(rows: pa.Table, spec: Table) -> pa.Table:
    """Rows with exactly the columns of the table, null where they are missing."""
    arrays = [
        rows[field.name] if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type)
        for field in spec.schema
    ]
    return pa.table(arrays, names=spec.schema.names)


def read_partition(spec: Table, path: Path) -> pa.Table:
    """The rows of a file. Raises StoreError if it is damaged.

    Through pyarrow: DuckDB compares no checksums, and what is written again would be damage with a good one.
    """
    with naming(path), open_checked(path) as file:
        rows = file.read([name for name in spec.schema.names if name in file.schema_arrow.names])
        return with_columns(rows, spec).cast(spec.schema)


def open_checked(path: Path, **options: Any) -> pq.ParquetFile:
    """A Parquet file whose pages are compared with their checksums."""
    return pq.ParquetFile(path, page_checksum_verification=True, **options)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn pyarrow's errors inside into StoreError, with the name of the file that cannot be read."""
    try:
        yield
    except _UNREADABLE as error:
        raise unreadable(path, first_line(error)) from error


def unreadable(path: Path, reason: str) -> StoreError:
    return StoreError(
        f"{path}: cannot be read: {reason}",
        "move it away and ingest its span again; if you may not read it, ask the store's owner",
    )


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().partition("\n")[0]


def write_partition(path: Path, rows: pa.Table, spec: Table) -> None:
    """Replace a partition file, made with its folders if it is missing. Raises StoreError."""
    table = rows.cast(spec.schema).replace_schema_metadata({"almanac.schema_version": str(SCHEMA_VERSION)})
    with writing(path):
        for folder in reversed([path.parent, *path.parents[1:3]]):
            make_inner_folder(folder)
        with replacing(path, is_handed_over=True) as out:
            write_sealed(table, out)


def write_sealed(table: pa.Table, out: IO[Any]) -> None:
    """Write a table as a Parquet file with a seal to an empty file that can be read, too.

    Byte stream split: measured values rarely repeat, so a dictionary would take more time and space.
    """
    measured = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    with pq.ParquetWriter(
        out,
        table.schema,
        write_page_checksum=True,
        compression="zstd",
        use_dictionary=[name for name in table.schema.names if name not in measured],  # type: ignore[arg-type]
        column_encoding=dict.fromkeys(measured, "BYTE_STREAM_SPLIT"),
    ) as writer:
        writer.write_table(table, row_group_size=_ROW_GROUP)
        writer.add_key_value_metadata({SEAL: _ROOM})
    out.flush()
    handle = out.fileno()
    size = os.fstat(handle).st_size
    footer = _footer(handle, size)
    before, _, after = footer.rpartition(_ROOM.encode())
    head = before + _digest_of(handle, size - len(footer))
    os.pwrite(handle, head[len(before) :] + _digest(head, after), size - len(footer) + len(before))


def fault_of(path: Path, whole_bytes: int | None = WHOLE_BYTES) -> str:
    """Compare a file with its seal, without a native reader. Return why it cannot be believed; "" if it can be.

    whole_bytes: of larger files only the footer is compared; None: all bytes. Never waits for a FIFO.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            return _seal_fault(handle, whole_bytes)
        finally:
            os.close(handle)
    except PermissionError:
        return FORBIDDEN
    except FileNotFoundError:
        return ""  # replaced or removed while we looked: no damage
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


def _seal_fault(handle: int, whole_bytes: int | None) -> str:
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode):
        return "not a regular file"
    footer = _footer(handle, about.st_size)
    if not footer or os.pread(handle, 4, 0) != b"PAR1":
        return "no whole Parquet file"
    seal = footer.rfind(_MARK) + len(_MARK)
    if seal < len(_MARK):
        return "it has no checksum of almanac's, so another program wrote it"
    own = seal + _DIGITS
    if footer[own : own + _DIGITS] != _digest(footer[:own], footer[own + _DIGITS :]):
        return "damaged: the checksum of its footer differs"
    is_whole = whole_bytes is None or about.st_size <= whole_bytes
    if is_whole and footer[seal:own] != _digest_of(handle, about.st_size - len(footer)):
        return "damaged: its checksum differs"
    return ""


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
    return hashlib.blake2b(b"".join(parts), digest_size=_DIGITS // 2).hexdigest().encode()
