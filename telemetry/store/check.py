"""Whether the files of a store can be read and believed, and which other files lie among them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from telemetry.store.damage import AT_MOST_BYTES, fault_of, query_faults, within_size
from telemetry.store.partitions import Stray, cluster_folders, partition_files, partition_start
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

_THREADS = 8
"""Opening a file on a network file system is waiting."""


@dataclass(frozen=True)
class Damaged:
    """A file that is not what the store's reader needs, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class FileCheck:
    """How many files there are, of how many every page was read, those that are damaged, and strays; by path."""

    files: int
    read: int
    damaged: tuple[Damaged, ...]
    strays: tuple[Stray, ...]


def check_files(store: Store, at_most_bytes: int | None = AT_MOST_BYTES) -> FileCheck:
    """Look at the footer of every Parquet file of the store's tables, and at all pages of the newest of them.

    at_most_bytes: read the pages of the newest files up to this many bytes; None reads all.
    """
    files, strays = _listed(store)
    newest = sorted(files, key=partition_start, reverse=True)
    whole = set(newest if at_most_bytes is None else within_size(newest, at_most_bytes))
    with ThreadPoolExecutor(_THREADS) as pool:
        reasons = list(pool.map(lambda path: fault_of(path, are_pages_read=path in whole), files))
    faults = {path: reason for path, reason in zip(files, reasons, strict=True) if reason}
    faults.update(query_faults(path for path in files if path in whole and path not in faults))
    damaged = [Damaged(path, reason) for path, reason in faults.items()]
    return FileCheck(
        len(files),
        len(whole),
        tuple(sorted(damaged, key=lambda one: one.path)),
        tuple(sorted(strays, key=lambda one: one.path)),
    )


def _listed(store: Store) -> tuple[Sequence[Path], Sequence[Stray]]:
    files: list[Path] = []
    strays: list[Stray] = []
    for table in TABLES:
        clusters, more = cluster_folders(store.root / table)
        strays += more
        for cluster in clusters:
            found, more = partition_files(cluster)
            files += found
            strays += more
    return files, strays
