"""Whether a file of the store is whole, and errors that name the one that is not.

Every file is written with a CRC-32 of each page. DuckDB does not compare them; what reads through pyarrow here does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from almanac.errors import BusyError, StoreError
from telemetry.store.database import connect
from telemetry.store.schema import TABLES, Table

AT_MOST_BYTES = 2**28
"""Of files whose pages are verified without being asked to read all: a core reads some 36 MB/s."""
_UNREADABLE = (pa.ArrowException, OSError, ValueError, MemoryError)
"""What pyarrow raises for damaged files: a flipped bit can make a size or a text as well as a page."""
_TICK_NS = 20_000_000
"""By so much the kernel's clock for files can be late."""
_TODO = "move it away and ingest its span again; if you may not read it, ask the store's owner"


def fault_of(path: Path, *, are_pages_read: bool) -> str:
    """Why a file of the store cannot be read or believed; empty where it can. Looks at the footer, or at all of it."""
    table = TABLES[path.parents[2].name]
    try:
        with open_checked(path) as file:
            if fault := _column_fault(file, table):
                return fault
            return _page_fault(file, table) if are_pages_read else ""
    except PermissionError:
        return "you may not read it"
    except FileNotFoundError:
        return ""  # replaced or removed while we looked: no damage
    except pa.ArrowInvalid:
        return "no whole Parquet file"
    except _UNREADABLE as error:
        return _short(error)


def open_checked(path: Path, **options: Any) -> pq.ParquetFile:
    """A Parquet file whose pages are compared with their checksums; files from before there were any have none."""
    return pq.ParquetFile(path, page_checksum_verification=True, **options)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raises StoreError, with the file's name, for what pyarrow raises where the file cannot be read."""
    try:
        yield
    except _UNREADABLE as error:
        raise _unreadable(path, _short(error)) from error


@contextlib.contextmanager
def reading(root: Path, memory_limit_mib: int, suspects: Callable[[], Iterable[Path]]) -> Iterator[None]:
    """Raises StoreError for what DuckDB and pyarrow raise: names the limit to raise, or which file is damaged.

    suspects: the files that may have been read. They are looked through only after an error. Raises BusyError where one
    was replaced or removed meanwhile.
    """
    since_ns = time.time_ns() - _TICK_NS
    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise StoreError(
            f"{root}: out of memory: {_short(error)}",
            f"raise store.memory_limit_mib in the configuration (now {memory_limit_mib}),"
            " or free space in the store's folder and in $TMPDIR, where DuckDB spills",
        ) from error
    except duckdb.InterruptException:
        raise
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        raise _culprit(root, error, list(suspects()), since_ns) from error


def _culprit(root: Path, error: Exception, suspects: list[Path], since_ns: int) -> StoreError:
    """Of the suspects the first that is damaged; those that the error names come first. since_ns: start of the reading.

    DuckDB opens a file for its columns, and again for its rows: a file that is replaced in between ends the query.
    """
    if gone := next((path for path in suspects if not path.exists()), None):
        return BusyError(f"{gone}: was removed while it was read: it is older than [retention] keeps", "run this again")
    suspects.sort(key=lambda path: str(path) not in str(error))
    for path in suspects:
        if reason := fault_of(path, are_pages_read=False):
            return _unreadable(path, reason)
    for path in within_size(suspects, AT_MOST_BYTES):
        if reason := fault_of(path, are_pages_read=True):
            return _unreadable(path, reason)
    for path, reason in query_faults(suspects):
        return _unreadable(path, reason)
    if replaced := next((path for path in suspects if path.stat().st_ctime_ns >= since_ns), None):
        return BusyError(f"{replaced}: was replaced while it was read", "run this again")
    return StoreError(f"{root}: cannot be read: {_short(error)}", "run `almanac doctor --verify`: it reads every file")


def within_size(paths: Iterable[Path], at_most_bytes: int) -> Iterator[Path]:
    """Paths, as long as their files' sizes add up to no more."""
    for path in paths:
        with contextlib.suppress(OSError):
            at_most_bytes -= path.stat().st_size
        if at_most_bytes < 0:
            return
        yield path


def _unreadable(path: Path, reason: str) -> StoreError:
    return StoreError(f"{path}: cannot be read: {reason}", _TODO)


def _short(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().partition("\n")[0]


def _column_fault(file: pq.ParquetFile, table: Table) -> str:
    """A column of another name is damage where one of the table's is missing; else a later almanac added it."""
    arrow = set(file.schema_arrow.names)
    stored = {file.schema.column(number).path.partition(".")[0] for number in range(len(file.schema))}
    missing = [name for name in table.schema.names if name not in arrow & stored]
    if keys := [name for name in missing if name in table.key]:
        return f"it lacks the columns {', '.join(keys)}"
    unknown = sorted((arrow | stored) - set(table.schema.names))
    return f"it has unknown columns in place of the table's: {', '.join(unknown)}" if unknown and missing else ""


def _page_fault(file: pq.ParquetFile, table: Table) -> str:
    """Read all pages of a file, and compare the footer, which no checksum covers, with what they hold."""
    for group in range(file.num_row_groups):
        rows = file.read_row_group(group, use_threads=False)
        rows.validate(full=True)
        for name in rows.column_names:
            if name in table.schema.names and rows.schema.field(name).type != table.schema.field(name).type:
                return f"column {name} is of type {rows.schema.field(name).type}"
        if name := _misstated(rows, file.metadata.row_group(group)):
            return f"its footer misstates the values of {name}"
    return ""


def query_faults(paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """What DuckDB has against the footers of files, of each that it has; it parses parts that pyarrow leaves out."""
    with connect([], threads=1) as db:
        for path in paths:
            try:
                db.execute("FROM read_parquet($file, hive_partitioning=false) LIMIT 0", {"file": str(path)}).fetchall()
            except duckdb.Error as error:
                if path.exists():
                    yield path, _short(error)


def _misstated(rows: pa.Table, group: pq.RowGroupMetaData) -> str:
    """A column whose number of values, least or greatest value is not as stated: filtered reads would miss rows."""
    for number in range(group.num_columns):
        chunk = group.column(number)
        name, stated = chunk.path_in_schema, chunk.statistics
        if name in rows.column_names and chunk.num_values != rows.num_rows:
            return name
        if name not in rows.column_names or stated is None or not stated.has_min_max:
            continue
        seen: Any = pc.min_max(rows[name]).as_py()
        if (seen["min"], seen["max"]) != (stated.min, stated.max):
            return name
    return ""
