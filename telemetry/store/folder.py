"""The root folder of a store: its DuckDB connections, its lock, and the files that are skipped in it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import duckdb

from almanac.errors import DamageWarning
from telemetry.store import damage, database
from telemetry.store.atomic import TEMPORARY, locked
from telemetry.store.imported_files import FileState, state_of
from telemetry.store.marks import Marks
from telemetry.store.partitions import CLUSTER, Stray, cluster_folders
from telemetry.store.probed_files import ProbedFiles
from telemetry.store.process_memory import duckdb_share_mib
from telemetry.store.schema import TABLES

OnStrays = Callable[[Sequence[Stray]], None]
"""Called with strays among the store's files, each once."""


def warn_of_strays(strays: Sequence[Stray]) -> None:
    """Report strays as Python warnings."""
    for stray in strays:
        done, kind = ("left out", DamageWarning) if stray.is_damaged else ("skipped", UserWarning)
        warnings.warn(f"{stray.path} is {done}: {stray.reason}", kind, stacklevel=2)


class StoreFolder:
    """The folder of a store, with the limits on memory and threads.

    memory_limit_mib: what the process may hold; DuckDB gets what the process does not hold yet.
    listed: the files of the last reading, by table and cluster; an error names the damaged one among them.
    """

    def __init__(
        self, root: Path, *, memory_limit_mib: int = 2048, threads: int = 0, on_strays: OnStrays = warn_of_strays
    ) -> None:
        self.root = root
        self.marks = Marks(root / "watermarks")
        self.memory_limit_mib = memory_limit_mib
        self._threads = threads
        self._on_strays = on_strays
        self._strays: dict[Path, Stray] = {}
        self._looked: dict[Path, tuple[FileState, str]] = {}
        self.listed: dict[tuple[str, str], list[Path]] = {}

    @contextlib.contextmanager
    def connect(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A DuckDB connection of its own, with a private spill folder, within the limits on memory and threads.

        What goes wrong in it is raised as StoreError; see `reading`.
        """
        limits = {"memory_limit_mib": duckdb_share_mib(self.memory_limit_mib), "threads": self._threads}
        with self.reading(), database.connect([self.root], **limits) as db:
            yield db

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Turn errors of DuckDB and pyarrow into StoreError, which names the damaged file, or the limit to raise."""
        return damage.reading(
            self.root, self.memory_limit_mib, lambda: (path for paths in self.listed.values() for path in paths)
        )

    def clusters(self) -> list[str]:
        """Names of the clusters that have jobs or telemetry, sorted. Strays are skipped and named."""
        found = set()
        for table in TABLES:
            folders, strays = cluster_folders(self.root / table)
            found |= {folder.name.removeprefix(CLUSTER) for folder in folders}
            self.report_strays(strays)
        return sorted(found)

    def report_strays(self, strays: Sequence[Stray]) -> None:
        new = [stray for stray in strays if stray.path not in self._strays]
        self._strays |= {stray.path: stray for stray in new}
        if new:
            self._on_strays(new)

    @property
    def damaged(self) -> list[Path]:
        """The damaged files that were met so far."""
        return [stray.path for stray in self._strays.values() if stray.is_damaged]

    def sound(self, paths: Sequence[Path]) -> list[Path]:
        """Return the partition files that native readers can take. Others are damaged: they are reported once.

        A file that you may not read, or that is gone, is returned: it is no damage, and its reader says so.
        """
        states = {path: state_of(path) for path in paths}
        new = [path for path in paths if self._looked.get(path, ((), ""))[0] != states[path]]
        faults = self._faults(new) if new else {}
        self._looked |= {path: (states[path], faults.get(path, "")) for path in new}
        damaged = {path: self._looked[path][1] for path in paths if states[path] and self._looked[path][1]}
        self.report_strays([Stray(path, fault, is_damaged=True) for path, fault in damaged.items()])
        return [path for path in paths if path not in damaged]

    def _faults(self, paths: Sequence[Path]) -> Mapping[Path, str]:
        """Files without a seal are tried in a process of its own, and what came of it is kept, by their checksum."""
        looks = {path: damage.look(path) for path in paths}
        faults = {path: seen.fault for path, seen in looks.items() if seen.fault not in ("", damage.FORBIDDEN)}
        unsealed = {path: seen.unsealed for path, seen in looks.items() if seen.unsealed}
        return faults | ProbedFiles(self.root).faults(unsealed) if unsealed else faults

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Allow one writer at a time, and remove half-written files of a killed writer."""
        with locked(self.root / ".lock"):
            for folder in ("", "watermarks/", "*/*/", "*/*/*/"):
                for stale in self.root.glob(f"{folder}{TEMPORARY}*"):
                    with contextlib.suppress(OSError):  # a folder is none of ours
                        stale.unlink()
            yield

    @contextlib.contextmanager
    def writing(self) -> Iterator[duckdb.DuckDBPyConnection]:
        with self.lock(), self.connect() as db:
            yield db
