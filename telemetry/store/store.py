"""The store: Parquet files below one root, written atomically and idempotently, read through DuckDB.

A row belongs to exactly one partition file, chosen by its time, and to exactly one key in it. So the same rows can be
written any number of times, and a writer that is killed at any moment leaves every file as it was or as it is after.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from almanac.atomic import TEMPORARY, FileState, locked, make_folders, safe_name, state_of, write_atomically, writing
from almanac.errors import ConfigError, DamageWarning, SchemaVersionError, StoreError
from almanac.files import read_json, with_checksum
from telemetry.store import database
from telemetry.store.database import arrow, names_sql
from telemetry.store.forgotten import Forgotten, read_forgotten
from telemetry.store.partitions import (
    CLUSTER,
    FORBIDDEN,
    Stray,
    cluster_folders,
    of_ids,
    of_times,
    partition_files,
    partition_start,
    span_ticks,
)
from telemetry.store.progress import ImportedFiles, ImportOutcome, Marks
from telemetry.store.schema import SCHEMA_VERSION, TABLES, Table
from telemetry.store.writing import Opens, PartitionWriter, WriteResult, opens_nothing

_MOST_BYTES = 4096
JOBS_FROM = "jobs-from"
"""Older days of jobs were removed; those that are left hold only jobs that are not finished."""


class ClusterStore(Marks):
    """One cluster of a store, as `Store.of` returns it: its tables, and its progress (see `Marks`).

    root: of the store, which holds every cluster. connect, reading, lock, memory_limit_mib: see `Store`.
    """

    def __init__(self, store: Store, cluster: str) -> None:
        super().__init__(store.root, cluster, store.lock)
        self._store = store
        self.connect, self.reading, self.memory_limit_mib = store.connect, store.reading, store.memory_limit_mib

    def every_cluster(self) -> list[ClusterStore]:
        """Each cluster of the same store that has jobs or telemetry, sorted by name."""
        return [ClusterStore(self._store, name) for name in self._store.clusters()]

    @property
    def models_dir(self) -> Path:
        """The folder of the trained models; it need not exist."""
        return self._folder("models")

    def files(self, table: str, since_s: int | None = None, until_s: int | None = None) -> list[Path]:
        """Partition files that can hold rows of [since_s, until_s), in time order. Each was compared with its checksum.

        Strays and damaged files are left out and named.
        """
        return self.sound_files(self.all_files(table, since_s, until_s))

    def sound_files(self, paths: Sequence[Path]) -> list[Path]:
        """Return those of the files of one table, as `all_files` returns them, that are not damaged."""
        found = self._store.sound(paths)
        if found:
            self._store.listed[found[0].parents[2].name, self.cluster] = found
        return found

    def all_files(self, table: str, since_s: int | None = None, until_s: int | None = None) -> list[Path]:
        """Return `files`, and damaged ones: no native reader may open these."""
        part_s = TABLES[table].part_s
        files, strays = partition_files(self._folder(table))
        self._store.report_strays(strays)
        found = []
        for path in files:
            start_s = partition_start(path)
            if (until_s is None or start_s < until_s) and (since_s is None or start_s + part_s > since_s):
                found.append(path)
        return found

    def damaged_files(self, tables: Collection[str] = tuple(TABLES)) -> list[Path]:
        """Damaged files of these tables that were met so far."""
        folders = {self._folder(table) for table in tables}
        return [path for path in self._store.damaged if path.parents[1] in folders]

    def read(
        self,
        table: str,
        columns: Sequence[str] | None = None,
        since_s: int | None = None,
        until_s: int | None = None,
        among: Mapping[str, pa.Array[Any]] | None = None,
    ) -> pa.Table:
        """Rows whose time is in [since_s, until_s), in the order of the files; an empty table if there are none.

        among: for each of these columns, return only rows with one of the given values, in any order. Other rows are
        never in memory.
        If the time column or a job id is one of these columns, only files that can hold such a value are read.
        """
        spec = TABLES[table]
        names = list(columns) if columns is not None else spec.schema.names
        empty = pa.schema([spec.schema.field(name) for name in names]).empty_table()
        files = self.all_files(table, since_s, until_s)
        if among and spec.time_column in among:
            files = of_times(spec, files, among[spec.time_column])
        files = self.sound_files(files)
        if among and spec.time_column not in among:
            files = of_ids(files, among)
        if not files:
            return empty
        low, high = span_ticks(spec, since_s, until_s)
        # Files written before a column was added lack it: the empty table has every column.
        files_sql = "SELECT * FROM read_parquet($files, union_by_name=true, hive_partitioning=false)"
        sql = (
            f"SELECT {names_sql(names)} FROM ({files_sql} UNION ALL BY NAME SELECT * FROM empty)"
            f' WHERE "{spec.time_column}" >= $low AND "{spec.time_column}" < $high'
        )
        with self.connect() as db:
            db.register("empty", spec.schema.empty_table())
            for number, (column, values) in enumerate((among or {}).items()):
                db.register(f"among{number}", pa.table({"value": values}))
                sql += f" AND {names_sql([column])} IN (SELECT value FROM among{number})"
            rows = arrow(db, sql, {"files": [str(f) for f in files], "low": low, "high": high})
        return rows.rename_columns(names).cast(empty.schema)

    def view(
        self,
        db: duckdb.DuckDBPyConnection,
        table: str,
        columns: Sequence[str],
        since_s: int | None = None,
        until_s: int | None = None,
    ) -> None:
        """Make a view of these columns, named as the table, for readers of more rows than fit in memory.

        It has the rows of [since_s, until_s). Damaged files raise duckdb.Error when the view is read.
        """
        spec = TABLES[table]
        db.register(f"no_{table}", spec.schema.empty_table())
        parts = [f"FROM no_{table}"]
        files = self.files(table, since_s, until_s)
        if files:
            found = db.read_parquet([str(file) for file in files], union_by_name=True, hive_partitioning=False)
            found.create_view(f"found_{table}")
            parts.append(f"FROM found_{table}")
        low, high = span_ticks(spec, since_s, until_s)
        db.execute(
            f"CREATE VIEW {table} AS SELECT {names_sql(list(columns))} FROM ({' UNION ALL BY NAME '.join(parts)})"
            f' WHERE "{spec.time_column}" >= {low} AND "{spec.time_column}" < {high}'
        )

    def writer(self, table: str, file_key: str | None = None) -> PartitionWriter:
        """A writer of many rows in any order. file_key: of the telemetry file that they come from, if any."""
        return PartitionWriter(self, TABLES[table], file_key)

    def write(self, table: str, rows: pa.Table, opens: Opens = opens_nothing) -> WriteResult:
        """Merge rows into their partition files by key; see `PartitionWriter.write`."""
        with self.writer(table) as writer:
            writer.add(rows)
            return writer.write(opens)

    def replace(self, table: str, rows: pa.Table, owners: pa.Table) -> int:
        """Replace all rows of the owners by these rows; see `PartitionWriter.replace`.

        Rows of an owner that are not given again are removed, so that computing again leaves nothing stale.
        """
        with self.writer(table) as writer:
            writer.add(rows)
            return writer.replace(owners)

    def imported_files(self) -> ImportedFiles:
        """The record of the telemetry files that were imported."""
        spec = TABLES["telemetry"]
        return ImportedFiles(self._folder(spec.name), lambda start_s: self.partition(spec, start_s))

    def import_outcome(self, file_key: str) -> ImportOutcome | None:
        """The outcome of the import of a telemetry file whose rows are all in the store; None without one."""
        return self.imported_files().outcome(file_key)

    def complete_import(self, file_key: str, outcome: ImportOutcome) -> None:
        """Remember the outcome of an import, so that the same file need not be read again."""
        with self.lock():
            self.imported_files().complete(file_key, outcome)

    def forgotten(self) -> Forgotten:
        """The people whose rows are not stored again; see `almanac forget`."""
        return read_forgotten(self.root)

    def summarizing(self) -> contextlib.AbstractContextManager[None]:
        """The lock of the process that computes the cluster's job metrics. Raises BusyError if another has it."""
        return locked(self.root / f".summary-{safe_name(self.cluster)}.lock", "is computing the job metrics")

    def is_damaged(self, path: Path) -> bool:
        """True for a damaged partition file, which is reported, and stays as it is."""
        return not self._store.sound([path])

    def partition(self, spec: Table, start_s: int) -> Path:
        """Path of the partition file that starts then (s since 1970). Raises StoreError for what is no date."""
        try:
            start = dt.datetime.fromtimestamp(start_s, dt.UTC)
        except (ValueError, OverflowError, OSError) as error:
            raise StoreError(
                f"{spec.name}: a row's time is {start_s} s, which is not a date", "correct the source"
            ) from error
        return self._folder(spec.name) / f"date={start.date()}" / f"{start:%H%M}.parquet"

    def _folder(self, table: str) -> Path:
        return self.root / table / f"cluster={safe_name(self.cluster)}"


OnStrays = Callable[[Sequence[Stray]], None]
"""Called with strays among the store's files, each once."""


def warn_of_strays(strays: Sequence[Stray]) -> None:
    """Report strays as Python warnings."""
    for stray in strays:
        done, kind = ("left out", DamageWarning) if stray.is_damaged else ("skipped", UserWarning)
        warnings.warn(f"{stray.path} is {done}: {stray.reason}", kind, stacklevel=2)


class Store:
    """A store, as `open` and `create` return it, with its limits on memory and threads.

    memory_limit_mib: memory that the process may hold; DuckDB gets what the process does not hold yet.
    listed: the files of the last reading, by table and cluster; an error names the damaged one among them.
    """

    def __init__(
        self, root: Path, *, memory_limit_mib: int = 2048, threads: int = 0, on_strays: OnStrays = warn_of_strays
    ) -> None:
        self.root = root
        self.memory_limit_mib = memory_limit_mib
        self._threads = threads
        self._on_strays = on_strays
        self._strays: dict[Path, Stray] = {}
        self._looked: dict[Path, tuple[FileState, str]] = {}
        self.listed: dict[tuple[str, str], list[Path]] = {}

    @classmethod
    def create(cls, root: Path, **options: Any) -> Store:
        """Open the store of this root, made first where there is none. Raises StoreError, SchemaVersionError."""
        mark = root / "store.json"
        try:
            make_folders(root)
            is_new = not mark.exists()
        except OSError as error:
            raise StoreError(
                f"{root}: cannot be created or read: {error}", "choose a folder that you can write with --store"
            ) from error
        if is_new:
            # It is almanac's home, too, and can be a disk of its own.
            if any(not child.name.startswith(".") and child.name != "lost+found" for child in root.iterdir()):
                raise StoreError(
                    f"{root}: holds files, but no store.json", "choose an empty folder or an almanac store"
                )
            with writing(mark):
                write_atomically(mark, with_checksum(json.dumps({"schema_version": SCHEMA_VERSION})))
        return cls.open(root, **options)

    @classmethod
    def open(cls, root: Path, **options: Any) -> Store:
        """The store of this root. Raises StoreError if there is none, SchemaVersionError for one of another release."""
        try:
            version = read_json(root / "store.json", _MOST_BYTES)["schema_version"]
        except FileNotFoundError as error:
            raise StoreError(
                f"{root}: there is no store here", "run `almanac ingest` first, or choose another --store"
            ) from error
        except PermissionError as error:
            raise StoreError(f"{root}: you cannot read this store", "ask an operator of almanac") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{root}/store.json: cannot be read: {error}", "restore it, or choose another --store"
            ) from error
        if version != SCHEMA_VERSION:
            raise SchemaVersionError(
                f"{root}: schema version {version!r}, this almanac reads version {SCHEMA_VERSION}",
                "use the almanac that wrote it, or ingest into a new store",
            )
        return cls(root, **options)

    def of(self, cluster: str) -> ClusterStore:
        """The tables of one cluster, which need not have any row yet."""
        return ClusterStore(self, cluster)

    def only_cluster(self) -> str:
        """Name of the store's only cluster. Raises ConfigError if it holds several, StoreError if it holds none."""
        known = self.clusters()
        if not known:
            raise StoreError(
                f"{self.root}: the store holds no jobs yet", "run `almanac ingest` first, or choose another --store"
            )
        if len(known) > 1:
            raise ConfigError(f"the store holds several clusters: {', '.join(known)}", "choose one with --cluster")
        return known[0]

    def clusters(self) -> list[str]:
        """Return the names of the clusters that have jobs or telemetry, sorted. Strays are skipped and named."""
        found = set()
        for table in TABLES:
            folders, strays = cluster_folders(self.root / table)
            found |= {folder.name.removeprefix(CLUSTER) for folder in folders}
            self.report_strays(strays)
        return sorted(found)

    @contextlib.contextmanager
    def connect(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A DuckDB connection of its own, with a private spill folder, within the limits on memory and threads.

        Errors in it are raised as StoreError; see `reading`.
        """
        limits = {"memory_limit_mib": database.duckdb_share_mib(self.memory_limit_mib), "threads": self._threads}
        with self.reading(), database.connect([self.root], **limits) as db:
            yield db

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Turn errors of DuckDB and pyarrow into StoreError, which names the damaged file, or the limit to raise."""
        return database.reading(
            self.root, self.memory_limit_mib, lambda: (path for paths in self.listed.values() for path in paths)
        )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep every other writer away; readers go on. Removes half-written files of a killed writer."""
        with locked(self.root / ".lock"):
            for folder in ("", "watermarks/", "*/*/", "*/*/*/"):
                for stale in self.root.glob(f"{folder}{TEMPORARY}*"):
                    with contextlib.suppress(OSError):  # a folder is none of ours
                        stale.unlink()
            yield

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
        """Return the partition files that are as almanac wrote them. Others are damaged: they are reported once.

        A file that you may not read, or that is gone, is returned: it is no damage, and its reader says so.
        """
        states = {path: state_of(path) for path in paths}
        new = [path for path in paths if self._looked.get(path, ((), ""))[0] != states[path]]
        found = database.faults(new) if new else {}
        self._looked |= {path: (states[path], found.get(path, "")) for path in new}
        faults = {path: self._looked[path][1] for path in paths if states[path]}
        damaged = [Stray(path, fault, True) for path, fault in faults.items() if fault not in ("", FORBIDDEN)]
        self.report_strays(damaged)
        bad = {stray.path for stray in damaged}
        return [path for path in paths if path not in bad]
