"""DuckDB connections, with limits and a private spill folder, and the damaged files that native readers must not meet.

This is the only place that connects to DuckDB. Its own choice is to spill to `.tmp` in the current folder, mode 0755,
with files that all can read and names that all can foresee.
Files of the store are compared with their seals (telemetry.store.partitions). A Parquet file that a user imports has
none, so native readers try it in a process of its own: a damaged file ends that process, not the command.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from almanac.errors import BusyError, FileFormatError, StoreError
from almanac.files import open_plain
from telemetry.store.partitions import (
    WHOLE_BYTES,
    Stray,
    cluster_folders,
    fault_of,
    first_line,
    open_checked,
    partition_files,
    partition_start,
    unreadable,
)
from telemetry.store.schema import TABLES

LEAST_MIB = 64
"""DuckDB gets at least this much, because it can hardly read a file with less."""
RESERVED_MIB = 64
"""Part of the limit for modules that are loaded later, and for memory that DuckDB uses without counting it."""
SPILL = ".almanac-spill-"
"""Prefix of the folders that connections spill to."""
_OWNER = "owner"
_FRESH_S = 60


@contextlib.contextmanager
def connect(
    spill_parents: Sequence[Path], *, memory_limit_mib: int | None = None, threads: int = 0
) -> Iterator[duckdb.DuckDBPyConnection]:
    """A DuckDB connection of its own, in memory. threads: 0 for all cores. memory_limit_mib: None for DuckDB's own.

    spill_parents: where its private spill folder may be made, best first; $TMPDIR or /tmp comes last. If others could
    replace a folder in each of them, the connection does not spill.
    """
    config: dict[str, Any] = {"threads": threads or os.cpu_count() or 1, "autoinstall_known_extensions": False}
    if memory_limit_mib is not None:
        config["memory_limit"] = f"{memory_limit_mib}MiB"
    with spill_folder(spill_parents) as folder:
        with duckdb.connect(config={**config, "temp_directory": folder}) as db:
            yield db


@contextlib.contextmanager
def spill_folder(parents: Sequence[Path]) -> Iterator[str]:
    """A folder of mode 0700 that is removed at the end; an empty string (no spill) if none can be made.

    parents: folders to make it in, best first; $TMPDIR or /tmp comes last.
    """
    with contextlib.ExitStack() as stack:
        for parent in filter(_is_guarded, [*parents, Path(tempfile.gettempdir())]):
            with contextlib.suppress(OSError):
                folder = stack.enter_context(_private_folder(parent))
                break
        else:
            folder = ""
        yield folder


@contextlib.contextmanager
def _private_folder(parent: Path) -> Iterator[str]:
    """Made in parent, and locked while it is used, so that the folders of killed processes can be told and removed."""
    _sweep(parent)
    with tempfile.TemporaryDirectory(prefix=SPILL, dir=parent, ignore_cleanup_errors=True) as folder:
        with (Path(folder) / _OWNER).open("xb") as owner:
            with contextlib.suppress(OSError):  # no locks on this file system: then nobody sweeps
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder


def _is_guarded(folder: Path) -> bool:
    """Return True if we can write here, and nobody but us and root can rename what we make here."""
    try:
        found = folder.stat()
    except OSError:
        return False
    is_ours = found.st_uid in (0, os.geteuid())
    is_shared = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)) and not found.st_mode & stat.S_ISVTX
    return is_ours and not is_shared and os.access(folder, os.W_OK | os.X_OK)


def _sweep(parent: Path) -> None:
    """Remove what killed processes of this user left in parent."""
    with os.scandir(parent) as entries:
        left = [Path(entry.path) for entry in entries if entry.name.startswith(SPILL) and _is_left(entry)]
    for folder in left:
        with contextlib.suppress(OSError), open(folder / _OWNER, "r+b", opener=_no_link) as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _is_left(entry: os.DirEntry[str]) -> bool:
    """Return True for a folder of ours that was not made just now: its maker may not have locked it yet."""
    found = entry.stat(follow_symlinks=False)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and time.time() - found.st_ctime > _FRESH_S


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def resident_mib() -> int:
    """Memory of this process, MiB; 0 if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") // 2**20


def duckdb_share_mib(limit_mib: int) -> int:
    """DuckDB's share of a limit on the process, at least a quarter: DuckDB can spill to disk, other code cannot."""
    return max(limit_mib - resident_mib() - RESERVED_MIB, limit_mib // 4, LEAST_MIB)


def arrow(db: duckdb.DuckDBPyConnection, sql: str, parameters: dict[str, Any] | None = None) -> pa.Table:
    """The result of one query."""
    rows: pa.Table = db.sql(sql, params=parameters or {}).to_arrow_table()
    return rows


def names_sql(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


_CHECKED_BYTES = 2**32
"""Of files whose bytes are all compared without being asked to: a core compares about 1 GB/s."""
_THREADS = 8
"""Opening a file on a network file system is waiting."""
_TICK_NS = 20_000_000
"""By so much the kernel's clock for files can be late."""
_TRIAL_S = 60
_TRIAL_BYTES = 2**34
_WHOLE_TRIAL = 2**26
_TRIAL = """
import sys
sys.path[:] = sys.argv[2:]
from telemetry.store.database import try_file
try_file(sys.argv[1])
"""


@dataclass(frozen=True)
class FileCheck:
    """Number of files, number of those compared whole, damaged files, and strays, each sorted by path."""

    files: int
    read: int
    damaged: tuple[Stray, ...]
    strays: tuple[Stray, ...]


def check_files(root: Path, at_most_bytes: int | None = _CHECKED_BYTES) -> FileCheck:
    """Compare the footer of every file of a store's tables, and all bytes of the newest, up to this many; None: all."""
    files: list[Path] = []
    strays: list[Stray] = []
    for table in TABLES:
        clusters, more = cluster_folders(root / table)
        for found, others in map(partition_files, clusters):
            files += found
            more += others
        strays += more
    newest = sorted(files, key=partition_start, reverse=True)
    whole = set(newest if at_most_bytes is None else _within_size(newest, at_most_bytes))
    damaged = [Stray(path, fault, is_damaged=True) for path, fault in sorted(faults(files, whole).items())]
    return FileCheck(len(files), len(whole), tuple(damaged), tuple(sorted(strays, key=lambda one: one.path)))


def faults(paths: Sequence[Path], whole: Collection[Path] = ()) -> dict[Path, str]:
    """Return why files of the store cannot be believed, by path; sound ones are left out.

    whole: of these every byte is compared.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda path: fault_of(path, None if path in whole else WHOLE_BYTES), paths)
        return {path: fault for path, fault in zip(paths, found, strict=True) if fault}


@contextlib.contextmanager
def reading(root: Path, memory_limit_mib: int, suspects: Callable[[], Iterable[Path]]) -> Iterator[None]:
    """Turn errors of DuckDB and pyarrow inside into StoreError, which names the limit to raise or the damaged file.

    suspects: the files that may have been read, looked through only after an error. Raises BusyError if one was
    replaced or removed meanwhile.
    """
    since_ns = time.time_ns() - _TICK_NS
    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise StoreError(
            f"{root}: out of memory: {first_line(error)}",
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
    for path, reason in faults(suspects, set(_within_size(suspects, _CHECKED_BYTES))).items():
        return unreadable(path, reason)
    if replaced := next((path for path in suspects if path.stat().st_ctime_ns >= since_ns), None):
        return BusyError(f"{replaced}: was replaced while it was read", "run this again")
    todo = "run `almanac doctor --verify`: it reads every file"
    return StoreError(f"{root}: cannot be read: {first_line(error)}", todo)


def _within_size(paths: Iterable[Path], at_most_bytes: int) -> Iterator[Path]:
    """Paths, as long as their files' sizes add up to no more."""
    for path in paths:
        with contextlib.suppress(OSError):
            at_most_bytes -= path.stat().st_size
        if at_most_bytes < 0:
            return
        yield path


def require_readable(path: Path) -> None:
    """Raise FileFormatError for a Parquet file, not of the store, that ends or hangs native readers."""
    argv = [sys.executable, "-I", "-c", _TRIAL, str(path), *sys.path]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        raise FileFormatError(f"{path}: cannot be read: {_ending(done)}", "export it again")


def _ending(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode == -signal.SIGALRM:
        return f"not tried within {_TRIAL_S} s"
    if done.returncode == -signal.SIGKILL:
        return "not tried: the process that tried to read it was killed"
    if done.returncode < 0:
        return f"damaged: {signal.Signals(-done.returncode).name} ended the process that tried to read it"
    said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
    return f"not tried: {said[-1]}"


def try_file(name: str) -> None:
    """Read a file with each native reader: all of it, or of a large one the footer. Called in a process of its own.

    A Python error is none: whoever imports the file says it, and keeps the rows before it.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (_TRIAL_BYTES if most < 0 else min(_TRIAL_BYTES, most), most))
    signal.alarm(_TRIAL_S)
    path = Path(name)
    with contextlib.suppress(Exception):
        is_whole = path.stat().st_size <= _WHOLE_TRIAL
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
