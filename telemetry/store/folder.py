"""The root folder of a store: its DuckDB connections, its lock, and the files that are skipped in it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import duckdb

from telemetry.store import damage, database
from telemetry.store.atomic import TEMPORARY, locked
from telemetry.store.marks import Marks
from telemetry.store.partitions import CLUSTER, Stray, cluster_folders
from telemetry.store.process_memory import duckdb_share_mib
from telemetry.store.schema import TABLES

OnStrays = Callable[[Sequence[Stray]], None]
"""Called with strays among the store's files, each once."""


def warn_of_strays(strays: Sequence[Stray]) -> None:
    """Report strays as Python warnings."""
    for stray in strays:
        warnings.warn(f"{stray.path} is skipped: {stray.reason}", stacklevel=2)


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
        self._strays: set[Path] = set()
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
        self._strays |= {stray.path for stray in new}
        if new:
            self._on_strays(new)

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
