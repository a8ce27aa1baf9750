"""Whole and damaged files of the store, and errors that name a damaged one.

A file is compared with its seal first (telemetry.store.seals). One without a seal is from an older almanac, or somebody
put it there: native readers try it in a process of its own. Every file is also written with a CRC-32 of each page.
DuckDB does not compare them; what reads through pyarrow here does.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from almanac.errors import BusyError, StoreError
from almanac.plain_file import open_plain
from telemetry.store.database import connect
from telemetry.store.probe import FILE_S, MEMORY_BYTES, Kind, probe
from telemetry.store.schema import TABLES, Table
from telemetry.store.seals import WHOLE_BYTES, Look, look_at

AT_MOST_BYTES = 2**28
"""Of files without a seal whose pages are verified without being asked to read all: a core reads some 36 MB/s."""
_THREADS = 8
"""Opening a file on a network file system is waiting."""
_UNREADABLE = (pa.ArrowException, OSError, ValueError, MemoryError)
"""What pyarrow raises for damaged files: a flipped bit can make a size or a text as well as a page."""
_WHOLE_IMPORT = 2**26
FORBIDDEN = "you may not read it"
_TICK_NS = 20_000_000
"""By so much the kernel's clock for files can be late."""
_TODO = "move it away and ingest its span again; if you may not read it, ask the store's owner"


def faults(paths: Sequence[Path], whole: Collection[Path] = ()) -> dict[Path, str]:
    """Return why files of the store cannot be read or believed, by path; whole ones are left out.

    Runs no native reader in this process. whole: of these every byte is compared.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        seen = pool.map(lambda path: look(path, None if path in whole else WHOLE_BYTES), paths)
        looks = dict(zip(paths, seen, strict=True))
    found = {path: seen.fault for path, seen in looks.items() if seen.fault}
    unsealed = [path for path, seen in looks.items() if seen.unsealed]
    return found | tried([path for path in unsealed if path in whole], [path for path in unsealed if path not in whole])


def tried(whole: Sequence[Path], others: Sequence[Path] = ()) -> dict[Path, str]:
    """Try files in a process of its own, the pages of whole, and the footers of others. Returns the faults by path."""
    found = {**(probe(whole, "pages") if whole else {}), **(probe(others, "footer") if others else {})}
    return {path: fault for path, fault in found.items() if fault}


def look(path: Path, whole_bytes: int | None = WHOLE_BYTES) -> Look:
    """`look_at`, with a fault in place of an OSError."""
    try:
        return look_at(path, whole_bytes)
    except PermissionError:
        return Look(FORBIDDEN)
    except FileNotFoundError:
        return Look()  # replaced or removed while we looked: no damage
    except OSError as error:
        return Look(f"it cannot be read: {error.strerror}")


def try_files(kind: Kind, names: Sequence[str]) -> None:
    """Print a line for each file: why it cannot be read, as JSON. Called in the process of its own."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES if most < 0 else min(MEMORY_BYTES, most), most))
    for name in names:
        signal.alarm(FILE_S)
        print(json.dumps(fault_in_process(Path(name), kind)), flush=True)


def fault_in_process(path: Path, kind: Kind) -> str:
    """Return why a file cannot be read or believed; "" if it can be. Native readers run in the calling process."""
    try:
        if kind == "import":
            with contextlib.suppress(Exception):  # the reader says it itself, and keeps the rows before it
                _read_through(path)
            return ""
        with open_checked(path) as file:
            fault = _column_fault(file, TABLES[path.parents[2].name])
            if not fault and kind == "pages":
                fault = _page_fault(file, TABLES[path.parents[2].name])
        return fault or _query_fault(path)
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
    for path, reason in faults(suspects, set(within_size(suspects, AT_MOST_BYTES))).items():
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


def _query_fault(path: Path) -> str:
    """Return what DuckDB has against the footer, which it parses in part where pyarrow does not; else ""."""
    with connect([], threads=1) as db:
        try:
            db.execute("FROM read_parquet($file, hive_partitioning=false) LIMIT 0", {"file": str(path)}).fetchall()
        except duckdb.Error as error:
            return _short(error) if path.exists() else ""
    return ""


def _read_through(path: Path) -> None:
    """Read a file that is not the store's with each reader: all of it, or beyond _WHOLE_IMPORT bytes its footer."""
    is_whole = path.stat().st_size <= _WHOLE_IMPORT
    with contextlib.suppress(duckdb.Error), open_plain(path) as own, connect([], threads=1) as db:
        rows = db.sql("FROM read_parquet($file)", params={"file": f"/proc/self/fd/{own.fileno()}"})
        for _ in rows.to_arrow_reader(50_000) if is_whole else ():
            pass
    with open_checked(path, pre_buffer=False) as file:
        for group in range(file.num_row_groups):
            about = file.metadata.row_group(group)
            [about.column(number).statistics for number in range(about.num_columns)]
        for _ in file.iter_batches(batch_size=50_000, use_threads=False) if is_whole else ():
            pass


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
