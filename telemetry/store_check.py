"""Whether the files of a store can be read: their footers only, so that a year is looked through in seconds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from telemetry.schema import TABLES, Table
from telemetry.store import Store

_THREADS = 8
"""Opening a file on a network file system is waiting."""


@dataclass(frozen=True)
class Damaged:
    """A file that is not what the store's reader needs, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class FileCheck:
    """How many files there are, and those that cannot be read, in order of their paths."""

    files: int
    damaged: tuple[Damaged, ...]


def check_files(store: Store) -> FileCheck:
    """Look at the footer of every Parquet file of the store's tables."""
    found = [(path, table) for table in TABLES.values() for path in _files(store.root / table.name)]
    with ThreadPoolExecutor(_THREADS) as pool:
        reasons = list(pool.map(lambda one: _fault(*one), found))
    damaged = [Damaged(path, reason) for (path, _), reason in zip(found, reasons, strict=True) if reason]
    return FileCheck(len(found), tuple(sorted(damaged, key=lambda one: one.path)))


def _files(folder: Path) -> list[Path]:
    # Not Store.files: that one reads times from the names, and a name can be wrong, too.
    return list(folder.glob("cluster=*/date=*/[!.]*.parquet"))


def _fault(path: Path, table: Table) -> str:
    """Why a file cannot be read; empty where it can."""
    try:
        footer = pq.read_metadata(path)
    except PermissionError:
        return "you may not read it"
    except FileNotFoundError:
        return ""  # replaced or removed while we looked: no damage
    except pa.ArrowInvalid:
        return "no whole Parquet file"
    except OSError as error:
        return str(error)
    missing = [name for name in table.key if name not in footer.schema.names]
    return f"it lacks the columns {', '.join(missing)}" if missing else ""
