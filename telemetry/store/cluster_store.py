"""The tables of one cluster in a store, its watermarks, and its days that changed."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from almanac.errors import StoreError
from telemetry.store.atomic import locked
from telemetry.store.database import spill_folder
from telemetry.store.folder import StoreFolder
from telemetry.store.forgotten import Forgotten, read_forgotten
from telemetry.store.id_ranges import of_ids
from telemetry.store.imported_files import Change, ImportedFiles, ImportOutcome, state_of
from telemetry.store.marks import Stale, StaleRun, ahead_s, safe_name
from telemetry.store.merge import WriteResult, arrow, conform, merge, names_sql, replace
from telemetry.store.partition_file import write_partition
from telemetry.store.partitions import by_partition, of_times, partition_files, partition_start, span_ticks
from telemetry.store.schema import TABLES, Table
from telemetry.store.staging import Staging

COMPLETE_FROM = "complete-from"
JOBS_FROM = "jobs-from"
"""Older days of jobs were removed; those that are left hold only jobs that are not finished."""
Opens = Callable[[int], Iterable[int | StaleRun]]
"""Gives the days since 1970, and the runs, that a partition that starts then (s) makes stale when it changes."""


def _opens_nothing(start_s: int) -> Iterable[int | StaleRun]:
    return ()


class ClusterStore:
    """One cluster of a store, as `Store.of` returns it."""

    def __init__(self, store: StoreFolder, cluster: str) -> None:
        self.cluster = cluster
        self._store = store

    def every_cluster(self) -> list[ClusterStore]:
        """Each cluster of the same store that has jobs or telemetry, sorted by name."""
        return [ClusterStore(self._store, name) for name in self._store.clusters()]

    @property
    def root(self) -> Path:
        """The root folder of the store, which holds every cluster."""
        return self._store.root

    @property
    def memory_limit_mib(self) -> int:
        """See `StoreFolder`."""
        return self._store.memory_limit_mib

    def connect(self) -> contextlib.AbstractContextManager[duckdb.DuckDBPyConnection]:
        """See `StoreFolder.connect`."""
        return self._store.connect()

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """See `StoreFolder.reading`."""
        return self._store.reading()

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
        """Those of the files of one table, as `all_files` returns them, that are not damaged."""
        found = self._store.sound(paths)
        if found:
            self._store.listed[found[0].parents[2].name, self.cluster] = found
        return found

    def all_files(self, table: str, since_s: int | None = None, until_s: int | None = None) -> list[Path]:
        """`files`, and damaged ones: no native reader may open these."""
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

    def write(self, table: str, rows: pa.Table, opens: Opens = _opens_nothing) -> WriteResult:
        """Merge rows into their partition files by key.

        See `merge.merge` for rows with the same key. Columns that are missing are null. Days are opened just before
        the file changes that opens them. Rows of damaged files are left out, and counted.
        Raises StoreError, also for null keys.
        """
        spec = TABLES[table]
        return self._write(spec, by_partition(spec, conform(rows, spec)), opens)

    @contextlib.contextmanager
    def staging(self, table: str, file_key: str | None = None) -> Iterator[Staging]:
        """A staging of rows for `write_staged`. Rows that are never written are lost.

        file_key: of the telemetry file that the rows come from; see `ImportedFiles`.
        """
        with spill_folder([self.root]) as folder:
            yield Staging(TABLES[table], Path(folder) if folder else None, file_key)

    def write_staged(self, staged: Staging, opens: Opens = _opens_nothing) -> WriteResult:
        """`write` all rows of a staging, each partition file once, and clear it."""
        result = self._write(staged.spec, staged.parts(), opens, staged)
        staged.clear()
        return result

    def import_outcome(self, file_key: str) -> ImportOutcome | None:
        """The outcome of the import of a telemetry file whose rows are all in the store; None without one."""
        return self._imported_files().outcome(file_key)

    def complete_import(self, file_key: str, outcome: ImportOutcome) -> None:
        """Remember the outcome of an import, so that the same file need not be read again."""
        with self._store.lock():
            self._imported_files().complete(file_key, outcome)

    def _imported_files(self) -> ImportedFiles:
        return ImportedFiles(self._folder("telemetry"), lambda start_s: self._partition(TABLES["telemetry"], start_s))

    def _write(
        self, spec: Table, parts: Iterable[tuple[int, pa.Table]], opens: Opens, staged: Staging | None = None
    ) -> WriteResult:
        result, opened, changes = WriteResult(), set[int | StaleRun](), dict[int, Change]()
        with self._store.writing() as db:
            forgotten = self.forgotten()
            for start_s, given in parts:
                chosen = forgotten.without(spec.name, given)
                if not chosen.num_rows:
                    continue
                path = self._partition(spec, start_s)
                if not self._store.sound([path]):
                    result += WriteResult(left_out=chosen.num_rows)
                    continue
                before = state_of(path)
                merged, written = merge(db, spec, path, chosen)
                if merged is not None:
                    # Once per write is enough: no process reads the stale days before the lock is released.
                    days = set(opens(start_s)) - opened
                    self._store.marks.reopen(self.cluster, days)
                    opened |= days
                    write_partition(path, merged, spec)
                changes[start_s] = Change(before, state_of(path), written.replaced > 0)
                result += written
            if spec.name == "telemetry":
                file_key, is_first = (staged.file_key, not staged.is_written) if staged else (None, False)
                self._imported_files().note(changes, file_key, is_first)
        return result

    def replace(self, table: str, rows: pa.Table, owners: pa.Table) -> int:
        """Replace all rows of the owners by these rows. Returns the number of partition files that changed.

        owners: values of some columns of the key, including the time column. Rows of an owner that are not given
        again are removed, so that computing again leaves nothing stale. Damaged files stay as they are.
        """
        spec, changed = TABLES[table], 0
        given = dict(by_partition(spec, conform(rows, spec)))
        with self._store.writing() as db:
            for start_s, chosen in by_partition(spec, owners):
                path = self._partition(spec, start_s)
                if not self._store.sound([path]):
                    continue
                own = given.get(start_s, spec.schema.empty_table())
                replaced = replace(db, spec, path, own, chosen)
                if replaced is not None:
                    write_partition(path, replaced, spec)
                    changed += 1
        return changed

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Keep every other writer of the store away; readers go on."""
        return self._store.lock()

    def forgotten(self) -> Forgotten:
        """The people whose rows are not stored again; see `almanac forget`."""
        return read_forgotten(self.root)

    def watermark(self, source: str) -> int | None:
        """Up to when (s since 1970) a source has been read into the store; None before its first run."""
        return self._store.marks.watermark(source, self.cluster)

    def set_watermark(self, source: str, until_s: int) -> None:
        """Remember how far a source has been read; it never moves back."""
        with self._store.lock():
            self._store.marks.set_watermark(source, self.cluster, until_s)

    def complete_from(self) -> int:
        """Since when (s since 1970) all is stored that job metrics are computed from. Retention removed what is older.

        Jobs that began before keep the metrics that they have.
        """
        return self.watermark(COMPLETE_FROM) or 0

    def remove_watermark(self, source: str) -> None:
        """Remove a watermark, if there is one, because its value is now kept elsewhere."""
        if self._store.marks.watermark(source, self.cluster) is not None:
            with self._store.lock():
                self._store.marks.remove(source, self.cluster)

    def pull_back_watermark(self, source: str, now_s: int, to_s: int) -> int:
        """Set a watermark that lies in the future to to_s. Returns how many seconds it was ahead; 0 if it is right."""
        if not ahead_s(self._store.marks.watermark(source, self.cluster), now_s):
            return 0
        with self._store.lock():
            return self._store.marks.pull_back(source, self.cluster, now_s, to_s)

    def watermarks(self) -> dict[str, int]:
        """Every watermark (s since 1970) by its source."""
        return self._store.marks.watermarks(self.cluster)

    def stale(self) -> Stale:
        """Days and runs that changed since their jobs' metrics were computed; see `Marks.stale`."""
        with self._store.lock():
            return self._store.marks.stale(self.cluster)

    def peek_open_days(self) -> dict[int, int]:
        """Stale days, also those of stale runs, for readers: needs no right to write, and waits for no lock."""
        return self._store.marks.stale(self.cluster).all_days()

    def close(self, done: Stale) -> None:
        """Close days and runs as `stale` gave them, except those that have changed again."""
        with self._store.lock():
            self._store.marks.close(self.cluster, done)

    def summarizing(self) -> contextlib.AbstractContextManager[None]:
        """The lock of the process that computes the cluster's job metrics. Raises BusyError if another has it."""
        return locked(self.root / f".summary-{safe_name(self.cluster)}.lock", "is computing the job metrics")

    def _folder(self, table: str) -> Path:
        return self.root / table / f"cluster={safe_name(self.cluster)}"

    def _partition(self, spec: Table, start_s: int) -> Path:
        try:
            start = dt.datetime.fromtimestamp(start_s, dt.UTC)
        except (ValueError, OverflowError, OSError) as error:
            raise StoreError(
                f"{spec.name}: a row's time is {start_s} s, which is not a date", "correct the source"
            ) from error
        return self._folder(spec.name) / f"date={start:%Y-%m-%d}" / f"{start:%H%M}.parquet"
