"""Check the files of a store, and list other files that lie among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from telemetry.store.damage import AT_MOST_BYTES, faults, look, within_size
from telemetry.store.partitions import Stray, cluster_folders, partition_files, partition_start
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

_SEALED = 16
"""So many times as many bytes are looked at of files with a seal: a core compares about 1 GB/s."""


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
    """Look at the footer of every Parquet file of the store's tables, and at all bytes of the newest of them.

    at_most_bytes: look at the newest files up to this many bytes, of files with a seal at 16 times as many; None: all.
    """
    files, strays = _listed(store)
    newest = sorted(files, key=partition_start, reverse=True)
    if at_most_bytes is not None:
        unsealed = {path for path in newest if look(path, 0).unsealed}
        old = within_size((path for path in newest if path in unsealed), at_most_bytes)
        newest = [*old, *within_size((path for path in newest if path not in unsealed), _SEALED * at_most_bytes)]
    whole = set(newest)
    found = faults(files, whole)
    damaged = [Damaged(path, reason) for path, reason in found.items()]
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
