"""The store: Parquet files below one root, written atomically and idempotently, read through DuckDB.

A row belongs to exactly one partition file, chosen by its time, and to exactly one key in it. Writing merges by
key, so the same rows can be written any number of times. A file is replaced by rename only, so a writer that is
killed at any moment leaves every file as it was before or as it is after.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from almanac.errors import SchemaVersionError, StoreError
from telemetry.store import damage, database
from telemetry.store.atomic import (
    TEMPORARY,
    locked,
    make_folders,
    make_inner_folder,
    replacing,
    write_atomically,
    writing,
)
from telemetry.store.marks import Marks, ahead_s, safe_name
from telemetry.store.merge import WriteResult, arrow, conform, merge, names_sql, replace
from telemetry.store.partitions import (
    CLUSTER,
    Stray,
    by_partition,
    cluster_folders,
    of_times,
    partition_files,
    partition_start,
    span_ticks,
)
from telemetry.store.schema import SCHEMA_VERSION, TABLES, Table

_ROW_GROUP = 122_880

OnStrays = Callable[[Sequence[Stray]], None]
"""Told of strays among the store's files, each once."""
Opens = Callable[[int], Iterable[int]]
"""Of the start of a partition (s) that is about to change, the days since 1970 whose jobs' metrics depend on it."""


def warn_of_strays(strays: Sequence[Stray]) -> None:
    """As Python warnings."""
    for stray in strays:
        warnings.warn(f"{stray.path} is skipped: {stray.reason}", stacklevel=2)


def _opens_nothing(start_s: int) -> Iterable[int]:
    return ()


class Store:
    """A store that `open` or `create` returned."""

    def __init__(
        self, root: Path, *, memory_limit_mib: int = 2048, threads: int = 0, on_strays: OnStrays = warn_of_strays
    ) -> None:
        self.root = root
        self._marks = Marks(root / "watermarks")
        self._memory_limit_mib = memory_limit_mib
        self._threads = threads
        self._on_strays = on_strays
        self._strays: set[Path] = set()
        self._listed: dict[tuple[str, str], list[Path]] = {}

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
                write_atomically(mark, json.dumps({"schema_version": SCHEMA_VERSION}).encode() + b"\n")
        return cls.open(root, **options)

    @classmethod
    def open(cls, root: Path, **options: Any) -> Store:
        """The store of this root. Raises StoreError where there is none, SchemaVersionError where it is another's."""
        try:
            version = json.loads((root / "store.json").read_text(encoding="utf-8"))["schema_version"]
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

    @contextlib.contextmanager
    def connect(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A DuckDB connection of its own, held to the configured memory and threads, with a private spill folder.

        What goes wrong in it is raised as StoreError; see `reading`.
        """
        limits = {"memory_limit_mib": self._memory_limit_mib, "threads": self._threads}
        with self.reading(), database.connect([self.root], **limits) as db:
            yield db

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Raises StoreError for what DuckDB and pyarrow raise: names the damaged file, or the limit to raise."""
        return damage.reading(
            self.root, self._memory_limit_mib, lambda: (path for paths in self._listed.values() for path in paths)
        )

    def clusters(self) -> list[str]:
        """Names of the clusters that have jobs or telemetry, sorted. Strays are passed over, and named."""
        found = set()
        for table in TABLES:
            folders, strays = cluster_folders(self.root / table)
            found |= {folder.name.removeprefix(CLUSTER) for folder in folders}
            self._tell(strays)
        return sorted(found)

    def models_dir(self, cluster: str) -> Path:
        """Folder of the models trained for a cluster; it need not exist."""
        return self._folder("models", cluster)

    def files(self, table: str, cluster: str, since_s: int | None = None, until_s: int | None = None) -> list[Path]:
        """Partition files that can hold rows of [since_s, until_s), in time order. Strays are passed over and named."""
        part_s = TABLES[table].part_s
        files, strays = partition_files(self._folder(table, cluster))
        self._tell(strays)
        found = []
        for path in files:
            start_s = partition_start(path)
            if (until_s is None or start_s < until_s) and (since_s is None or start_s + part_s > since_s):
                found.append(path)
        self._listed[table, cluster] = found
        return found

    def _tell(self, strays: Sequence[Stray]) -> None:
        new = [stray for stray in strays if stray.path not in self._strays]
        self._strays |= {stray.path for stray in new}
        if new:
            self._on_strays(new)

    def read(
        self,
        table: str,
        cluster: str,
        columns: Sequence[str] | None = None,
        since_s: int | None = None,
        until_s: int | None = None,
        among: Mapping[str, pa.Array[Any]] | None = None,
    ) -> pa.Table:
        """Rows whose time is in [since_s, until_s), in the order of the files; an empty table where there are none.

        among: only rows whose value of each of these columns is one of those given, in any order; the others are never
        in memory. Where the time column is one of them, only files that can hold such a time are opened.
        """
        spec = TABLES[table]
        names = list(columns) if columns is not None else spec.schema.names
        empty = pa.schema([spec.schema.field(name) for name in names]).empty_table()
        files = self.files(table, cluster, since_s, until_s)
        if among and spec.time_column in among:
            files = of_times(spec, files, among[spec.time_column])
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
        cluster: str,
        columns: Sequence[str],
        since_s: int | None = None,
        until_s: int | None = None,
    ) -> None:
        """Make these columns a view of the table's name, for readers of more rows than fit in memory.

        Of the rows whose time is in [since_s, until_s). Damaged files raise duckdb.Error when the view is read.
        """
        spec = TABLES[table]
        db.register(f"no_{table}", spec.schema.empty_table())
        parts = [f"FROM no_{table}"]
        files = self.files(table, cluster, since_s, until_s)
        if files:
            found = db.read_parquet([str(file) for file in files], union_by_name=True, hive_partitioning=False)
            found.create_view(f"found_{table}")
            parts.append(f"FROM found_{table}")
        low, high = span_ticks(spec, since_s, until_s)
        db.execute(
            f"CREATE VIEW {table} AS SELECT {names_sql(list(columns))} FROM ({' UNION ALL BY NAME '.join(parts)})"
            f' WHERE "{spec.time_column}" >= {low} AND "{spec.time_column}" < {high}'
        )

    def write(self, table: str, cluster: str, rows: pa.Table, opens: Opens = _opens_nothing) -> WriteResult:
        """Merge rows into their partition files by key.

        A newer row wins over an older one, the last given over the first, and a null never erases a known
        value. Columns that are missing are null. Days are opened just before the file changes that opens them.
        Raises StoreError, also for null keys.
        """
        spec, result, opened = TABLES[table], WriteResult(), set[int]()
        rows = conform(rows, spec)
        with self._writing() as db:
            for start_s, chosen in by_partition(spec, rows):
                path = self._partition(spec, cluster, start_s)
                merged, written = merge(db, spec, path, chosen)
                if merged is not None:
                    # Once a write is enough: nobody looks at what is open before the lock is given back.
                    days = set(opens(start_s)) - opened
                    self._marks.reopen(cluster, days)
                    opened |= days
                    _replace(path, merged, spec)
                result += written
        return result

    def replace(self, table: str, cluster: str, rows: pa.Table, owners: pa.Table) -> int:
        """Store rows in place of all rows of their owners; how many partition files that changed.

        owners: values of some columns of the key, the time column among them. Rows of an owner that are not given
        again are gone, so that computing again leaves nothing stale.
        """
        spec, changed = TABLES[table], 0
        given = dict(by_partition(spec, conform(rows, spec)))
        with self._writing() as db:
            for start_s, chosen in by_partition(spec, owners):
                path = self._partition(spec, cluster, start_s)
                own = given.get(start_s, spec.schema.empty_table())
                replaced = replace(db, spec, path, own, chosen)
                if replaced is not None:
                    _replace(path, replaced, spec)
                    changed += 1
        return changed

    def watermark(self, source: str, cluster: str) -> int | None:
        """Up to when (s since 1970) a source has been read into the store; None before its first run."""
        return self._marks.watermark(source, cluster)

    def set_watermark(self, source: str, cluster: str, until_s: int) -> None:
        """Remember how far a source has been read; it never moves back."""
        with self._lock():
            self._marks.set_watermark(source, cluster, until_s)

    def remove_watermark(self, source: str, cluster: str) -> None:
        """Remove a watermark, if there is one: what it stood for is kept elsewhere."""
        if self._marks.watermark(source, cluster) is not None:
            with self._lock():
                self._marks.remove(source, cluster)

    def pull_back_watermark(self, source: str, cluster: str, now_s: int, to_s: int) -> int:
        """Set a watermark that lies in the future to to_s; by how many seconds it was ahead, 0 where it is right."""
        if not ahead_s(self._marks.watermark(source, cluster), now_s):
            return 0
        with self._lock():
            return self._marks.pull_back(source, cluster, now_s, to_s)

    def watermarks(self, cluster: str) -> dict[str, int]:
        """Every watermark of a cluster (s since 1970) by its source."""
        return self._marks.watermarks(cluster)

    def open_days(self, cluster: str) -> dict[int, int]:
        """Days since 1970 that changed since their jobs' metrics were computed; see `Marks.open_days`."""
        with self._lock():
            return self._marks.open_days(cluster)

    def peek_open_days(self, cluster: str) -> dict[int, int]:
        """The same for who only looks: needs no right to write, and waits for nobody."""
        return self._marks.open_days(cluster)

    def close_days(self, cluster: str, done: Mapping[int, int]) -> None:
        """Close days as open_days gave them, but for those that have changed again."""
        with self._lock():
            self._marks.close(cluster, done)

    def summarizing(self, cluster: str) -> contextlib.AbstractContextManager[None]:
        """Held by the one process that computes a cluster's job metrics. Raises BusyError where another does."""
        return locked(self.root / f".summary-{safe_name(cluster)}.lock", "is computing the job metrics")

    def _folder(self, table: str, cluster: str) -> Path:
        return self.root / table / f"cluster={safe_name(cluster)}"

    def _partition(self, spec: Table, cluster: str, start_s: int) -> Path:
        try:
            start = dt.datetime.fromtimestamp(start_s, dt.UTC)
        except (ValueError, OverflowError, OSError) as error:
            raise StoreError(
                f"{spec.name}: a row's time is {start_s} s, which is not a date", "correct the source"
            ) from error
        return self._folder(spec.name, cluster) / f"date={start:%Y-%m-%d}" / f"{start:%H%M}.parquet"

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """One writer at a time; what a killed writer left half-written is removed."""
        with locked(self.root / ".lock"):
            for folder in ("", "watermarks/", "*/*/*/"):
                for stale in self.root.glob(f"{folder}{TEMPORARY}*"):
                    with contextlib.suppress(OSError):  # a folder is none of ours
                        stale.unlink()
            yield

    @contextlib.contextmanager
    def _writing(self) -> Iterator[duckdb.DuckDBPyConnection]:
        with self._lock(), self.connect() as db:
            yield db


def _replace(path: Path, rows: pa.Table, spec: Table) -> None:
    table = rows.cast(spec.schema).replace_schema_metadata({"almanac.schema_version": str(SCHEMA_VERSION)})
    with writing(path):
        for folder in reversed([path.parent, *path.parents[1:3]]):
            make_inner_folder(folder)
        with replacing(path, is_handed_over=True) as out:
            pq.write_table(table, out, compression="zstd", row_group_size=_ROW_GROUP, write_page_checksum=True)
