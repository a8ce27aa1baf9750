"""The store: Parquet files below one root, written atomically and idempotently, read through DuckDB.

A row belongs to exactly one partition file, chosen by its time, and to exactly one key in it. Writing merges by
key, so the same rows can be written any number of times. A file is replaced by rename only, so a writer that is
killed at any moment leaves every file as it was before or as it is after.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from almanac.errors import SchemaVersionError, StoreError
from telemetry.schema import SCHEMA_VERSION, TABLES, Table

_CLUSTER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_TEMPORARY = ".tmp-"
_ROW_GROUP = 122_880
DAMAGED = (duckdb.IOException, duckdb.InvalidInputException, duckdb.SerializationException, pa.ArrowInvalid)
"""What reading a damaged Parquet file raises."""


@dataclass(frozen=True)
class WriteResult:
    """What became of the rows of one write; rows given twice within it count once.

    since_s: start of the earliest partition that changed; None where nothing did.
    """

    added: int = 0
    unchanged: int = 0
    replaced: int = 0
    since_s: int | None = field(default=None, compare=False)

    def __add__(self, other: WriteResult) -> WriteResult:
        starts = [start_s for start_s in (self.since_s, other.since_s) if start_s is not None]
        return WriteResult(
            self.added + other.added,
            self.unchanged + other.unchanged,
            self.replaced + other.replaced,
            min(starts, default=None),
        )


class Store:
    """A store that `open` or `create` returned."""

    def __init__(self, root: Path, *, memory_limit_mib: int = 2048, threads: int = 0) -> None:
        self.root = root
        self._memory_limit_mib = memory_limit_mib
        self._threads = threads

    @classmethod
    def create(cls, root: Path, **options: Any) -> Store:
        """Open the store of this root, made first where there is none. Raises StoreError, SchemaVersionError."""
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o750)
        except OSError as error:
            raise StoreError(
                f"{root}: cannot be made: {error}", "name a folder that you may write: --store DIR"
            ) from error
        mark = root / "store.json"
        if not mark.exists():
            if any(child for child in root.iterdir() if not child.name.startswith(_TEMPORARY)):
                raise StoreError(f"{root}: holds files, but no store.json", "name an empty folder, or an almanac store")
            write_atomically(mark, json.dumps({"schema_version": SCHEMA_VERSION}).encode() + b"\n")
        return cls.open(root, **options)

    @classmethod
    def open(cls, root: Path, **options: Any) -> Store:
        """The store of this root. Raises StoreError where there is none, SchemaVersionError where it is another's."""
        try:
            version = json.loads((root / "store.json").read_text(encoding="utf-8"))["schema_version"]
        except FileNotFoundError as error:
            raise StoreError(
                f"{root}: there is no store here", "run `almanac ingest` first, or name another --store"
            ) from error
        except PermissionError as error:
            raise StoreError(f"{root}: you may not read this store", "ask an operator of almanac") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{root}/store.json: cannot be read: {error}", "restore it, or name another --store"
            ) from error
        if version != SCHEMA_VERSION:
            raise SchemaVersionError(
                f"{root}: schema version {version!r}, this almanac reads version {SCHEMA_VERSION}",
                "use the almanac that wrote it, or ingest into a new store",
            )
        return cls(root, **options)

    def connect(self) -> duckdb.DuckDBPyConnection:
        """A DuckDB connection of its own, held to the configured memory and threads, spilling into the store."""
        spill = self.root / "spill"
        config: dict[str, Any] = {
            "memory_limit": f"{self._memory_limit_mib}MiB",
            "threads": self._threads or os.cpu_count() or 1,
            "autoinstall_known_extensions": False,
        }
        if os.access(self.root, os.W_OK):
            config["temp_directory"] = str(spill)
        return duckdb.connect(config=config)

    def clusters(self) -> list[str]:
        """Names of the clusters that have jobs or telemetry, sorted."""
        found = {
            folder.name.removeprefix("cluster=") for table in TABLES for folder in (self.root / table).glob("cluster=*")
        }
        return sorted(found)

    def models_dir(self, cluster: str) -> Path:
        """Folder of the models trained for a cluster; it need not exist."""
        return self._folder("models", cluster)

    def files(self, table: str, cluster: str, since_s: int | None = None, until_s: int | None = None) -> list[Path]:
        """Partition files that can hold rows of [since_s, until_s), in time order."""
        part_s = TABLES[table].part_s
        found = []
        for path in sorted(self._folder(table, cluster).glob("date=*/[0-9]*.parquet")):
            start_s = _partition_start(path)
            if (until_s is None or start_s < until_s) and (since_s is None or start_s + part_s > since_s):
                found.append(path)
        return found

    def read(
        self,
        table: str,
        cluster: str,
        columns: Sequence[str] | None = None,
        since_s: int | None = None,
        until_s: int | None = None,
    ) -> pa.Table:
        """Rows whose time is in [since_s, until_s), in the order of the files; an empty table where there are none."""
        spec = TABLES[table]
        names = list(columns) if columns is not None else spec.schema.names
        empty = pa.schema([spec.schema.field(name) for name in names]).empty_table()
        files = self.files(table, cluster, since_s, until_s)
        if not files:
            return empty
        low = -(2**62) if since_s is None else since_s * spec.ticks_per_s
        high = 2**62 if until_s is None else until_s * spec.ticks_per_s
        # Files written before a column was added lack it: the empty table has every column.
        files_sql = "SELECT * FROM read_parquet($files, union_by_name=true, hive_partitioning=false)"
        sql = (
            f"SELECT {_columns(names)} FROM ({files_sql} UNION ALL BY NAME SELECT * FROM empty)"
            f' WHERE "{spec.time_column}" >= $low AND "{spec.time_column}" < $high'
        )
        with self.connect() as db:
            db.register("empty", spec.schema.empty_table())
            try:
                rows = _arrow(db, sql, {"files": [str(f) for f in files], "low": low, "high": high})
            except DAMAGED as error:
                raise _unreadable(self.root / table, error) from error
        return rows.cast(empty.schema)

    def write(self, table: str, cluster: str, rows: pa.Table) -> WriteResult:
        """Merge rows into their partition files by key.

        A newer row wins over an older one, the last given over the first, and a null never erases a known
        value. Columns that are missing are null. Raises StoreError, also for null keys.
        """
        spec = TABLES[table]
        rows = _conform(rows, spec)
        result = WriteResult()
        if not rows.num_rows:
            return result
        with self._lock(), self.connect() as db:
            part = rows[spec.time_column].to_numpy() // (spec.part_s * spec.ticks_per_s)
            for number in np.unique(part).tolist():
                chosen = rows.filter(pa.array(part == number))
                result += self._merge(db, spec, self._partition(spec, cluster, number * spec.part_s), chosen)
        return result

    def watermark(self, source: str, cluster: str) -> int | None:
        """Up to when (s since 1970) a source has been read into the store; None before its first run."""
        path = self._watermark_path(source, cluster)
        try:
            return int(json.loads(path.read_text(encoding="utf-8"))["until_s"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path}: not a watermark: {error}", "remove it: the source is then read again") from error

    def set_watermark(self, source: str, cluster: str, until_s: int) -> None:
        """Remember how far a source has been read; it never moves back."""
        known = self.watermark(source, cluster)
        if known is None or until_s > known:
            path = self._watermark_path(source, cluster)
            path.parent.mkdir(mode=0o750, exist_ok=True)
            write_atomically(path, json.dumps({"until_s": until_s}).encode() + b"\n")

    def pending_since(self, cluster: str) -> int | None:
        """From when on (s since 1970) rows may have changed since job metrics were computed; None: none have."""
        path = self._watermark_path("summary-pending", cluster)
        try:
            return int(json.loads(path.read_text(encoding="utf-8"))["since_s"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path}: not a mark: {error}", "remove it, and run `almanac ingest -S TIME`") from error

    def set_pending(self, cluster: str, since_s: int | None) -> None:
        """Remember, or with None forget, that job metrics are to be computed from here on."""
        path = self._watermark_path("summary-pending", cluster)
        if since_s is None:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(mode=0o750, exist_ok=True)
        write_atomically(path, json.dumps({"since_s": since_s}).encode() + b"\n")

    def _watermark_path(self, source: str, cluster: str) -> Path:
        return self.root / "watermarks" / f"{_safe(source)}.{_safe(cluster)}.json"

    def _folder(self, table: str, cluster: str) -> Path:
        return self.root / table / f"cluster={_safe(cluster)}"

    def _partition(self, spec: Table, cluster: str, start_s: int) -> Path:
        try:
            start = dt.datetime.fromtimestamp(start_s, dt.UTC)
        except (ValueError, OverflowError, OSError) as error:
            raise StoreError(
                f"{spec.name}: a row's time is {start_s} s, which is no date", "correct the source"
            ) from error
        return self._folder(spec.name, cluster) / f"date={start:%Y-%m-%d}" / f"{start:%H%M}.parquet"

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """One writer at a time; what a killed writer left half-written is removed."""
        with (self.root / ".lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            for stale in [*self.root.glob(f"{_TEMPORARY}*"), *self.root.glob(f"*/*/*/{_TEMPORARY}*")]:
                stale.unlink(missing_ok=True)
            yield

    def _merge(self, db: duckdb.DuckDBPyConnection, spec: Table, path: Path, rows: pa.Table) -> WriteResult:
        db.register("given", rows)
        keys = _columns(spec.key)
        given = _counts(db, f"SELECT count(*), count(DISTINCT ({keys})) FROM given")
        source = "given" if given[0] == given[1] else f"({_last_of_each(spec)})"
        if not path.exists():
            merged = _arrow(db, f"SELECT * FROM {source} ORDER BY {_columns(spec.order)}")
            self._replace(path, merged, spec)
            return WriteResult(added=merged.num_rows, since_s=_partition_start(path))
        try:
            return self._merge_into(db, spec, path, source)
        except DAMAGED as error:
            raise _unreadable(path, error) from error

    def _merge_into(self, db: duckdb.DuckDBPyConnection, spec: Table, path: Path, source: str) -> WriteResult:
        on = " AND ".join(f'n."{key}" = e."{key}"' for key in spec.key)
        rest = [name for name in spec.schema.names if name not in spec.key]
        known_only = 'n."{c}" IS NOT NULL AND ' if spec.keeps_known else ""
        differs = " OR ".join(f'({known_only.format(c=c)}n."{c}" IS DISTINCT FROM e."{c}")' for c in rest)
        differs = differs or "false"
        known = set(pq.read_schema(path).names)
        old = ", ".join(f'"{c}"' if c in known else f'NULL AS "{c}"' for c in spec.schema.names)
        db.execute(
            f"CREATE OR REPLACE TEMP TABLE old AS SELECT {old} FROM read_parquet($f, hive_partitioning=false)",
            {"f": str(path)},
        )
        given = _counts(db, f"SELECT count(*) FROM {source}")
        both = _counts(db, f"SELECT count(*), count(*) FILTER (WHERE {differs}) FROM {source} n JOIN old e ON {on}")
        result = WriteResult(added=given[0] - both[0], unchanged=both[0] - both[1], replaced=both[1])
        if result.added or result.replaced:
            newer = (
                'coalesce(n."{c}", e."{c}")'
                if spec.keeps_known
                else f'CASE WHEN n."{spec.key[0]}" IS NULL THEN e."{{c}}" ELSE n."{{c}}" END'
            )
            joined = ", ".join(f'{newer.format(c=c)} AS "{c}"' for c in spec.schema.names)
            merged = _arrow(
                db, f"SELECT {joined} FROM old e FULL OUTER JOIN {source} n ON {on} ORDER BY {_columns(spec.order)}"
            )
            self._replace(path, merged, spec)
            result = replace(result, since_s=_partition_start(path))
        db.execute("DROP TABLE old")
        return result

    def _replace(self, path: Path, rows: pa.Table, spec: Table) -> None:
        for folder in reversed([path.parent, *path.parents[1:3]]):
            folder.mkdir(mode=0o750, exist_ok=True)
        table = rows.cast(spec.schema).replace_schema_metadata({"almanac.schema_version": str(SCHEMA_VERSION)})
        handle, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
        with os.fdopen(handle, "wb") as out:
            pq.write_table(table, out, compression="zstd", row_group_size=_ROW_GROUP)
            _commit(out, Path(name), path)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file by rename: a reader sees the old content or the new, never a part."""
    handle, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
    with os.fdopen(handle, "wb") as out:
        out.write(content)
        _commit(out, Path(name), path)


def _commit(out: Any, temporary: Path, path: Path) -> None:
    out.flush()
    os.fchmod(out.fileno(), 0o640)
    os.fsync(out.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _safe(name: str) -> str:
    if not _CLUSTER.fullmatch(name):
        raise StoreError(f"{name!r} cannot name a folder", "use letters, digits, '.', '_' and '-' in cluster names")
    return name


def _columns(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _partition_start(path: Path) -> int:
    text = f"{path.parent.name.removeprefix('date=')} {path.stem}"
    return int(dt.datetime.strptime(text, "%Y-%m-%d %H%M").replace(tzinfo=dt.UTC).timestamp())


def _conform(rows: pa.Table, spec: Table) -> pa.Table:
    unknown = set(rows.column_names) - set(spec.schema.names)
    if unknown:
        raise StoreError(f"{spec.name}: unknown columns {sorted(unknown)}", f"expected some of {spec.schema.names}")
    arrays = [
        rows[field.name] if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type)
        for field in spec.schema
    ]
    table = pa.table(arrays, names=spec.schema.names)
    for name in {*spec.key, spec.time_column}:
        if table[name].null_count:
            raise StoreError(f"{spec.name}: {table[name].null_count} rows without {name}", "the source must drop these")
    return table.cast(spec.schema)


def _last_of_each(spec: Table) -> str:
    """One row per key of `given`: of every column the last value that is not null."""
    rest = [name for name in spec.schema.names if name not in spec.key]
    last = ", ".join(f'last("{c}" ORDER BY seq) FILTER (WHERE "{c}" IS NOT NULL) AS "{c}"' for c in rest)
    numbered = "SELECT *, row_number() OVER () AS seq FROM given"
    grouped = f"SELECT {_columns(spec.key)}, {last} FROM ({numbered}) GROUP BY {_columns(spec.key)}"
    return f"SELECT {_columns(spec.schema.names)} FROM ({grouped})"


def _counts(db: duckdb.DuckDBPyConnection, sql: str) -> tuple[int, ...]:
    # DuckDB 2 refuses a further query on a connection whose last result was not fetched to its end.
    row: tuple[int, ...] = db.execute(sql).fetchall()[0]
    return row


def _arrow(db: duckdb.DuckDBPyConnection, sql: str, parameters: dict[str, Any] | None = None) -> pa.Table:
    rows: pa.Table = db.sql(sql, params=parameters or {}).to_arrow_table()
    return rows


def _unreadable(path: Path, error: Exception) -> StoreError:
    return StoreError(f"{path}: a file of the store cannot be read: {error}", "move it away and ingest its span again")
