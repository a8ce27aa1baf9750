"""Telemetry as arrays, hour by hour, sorted by GPU and time and unique: as the store keeps it, or sorted first.

`RowRuns` reduces runs of consecutive rows that belong together, as the samples of one GPU in an hour. `ColumnKind` and
`Rows` are the columns of partials: their types, their defaults, and their merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from telemetry.store.partitions import naming, open_checked, partition_start
from telemetry.store.schema import TABLES, TELEMETRY
from telemetry.store.writing import greatest_sql

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RowRuns:
    """Run i is the rows starts[i] up to the next start, the last one up to `rows`. No run is empty."""

    starts: Array
    rows: int

    @classmethod
    def of(cls, *keys: Array) -> RowRuns:
        """Runs of neighboring rows that are equal in every key."""
        rows = len(keys[0])
        differs = np.zeros(max(rows - 1, 0), bool)
        for key in keys:
            differs |= key[1:] != key[:-1]
        return cls(np.concatenate([np.arange(min(rows, 1)), np.flatnonzero(differs) + 1]), rows)

    @classmethod
    def of_lengths(cls, lengths: Array) -> RowRuns:
        ends = np.cumsum(lengths)
        return cls(ends - lengths, int(ends[-1]) if len(ends) else 0)

    @property
    def ends(self) -> Array:
        return np.append(self.starts[1:], self.rows)[: len(self.starts)]

    @property
    def lengths(self) -> Array:
        return self.ends - self.starts

    def sum(self, values: Array) -> Array:
        """Sums in 64 bits: whole numbers exactly; of flags how many are set."""
        kind: Any = np.float64 if values.dtype.kind == "f" else np.int64
        found: Array = np.add.reduceat(values, self.starts, dtype=kind) if len(self.starts) else np.zeros(0, kind)
        return found

    def max(self, values: Array) -> Array:
        """Highest values; NaN only where a run has nothing else."""
        return np.fmax.reduceat(values, self.starts) if len(self.starts) else values[:0]

    def min(self, values: Array) -> Array:
        """Lowest values; NaN only where a run has nothing else."""
        return np.fmin.reduceat(values, self.starts) if len(self.starts) else values[:0]

    def first(self, values: Array) -> Array:
        return values[self.starts]

    def last(self, values: Array) -> Array:
        places: Array = self.ends - 1
        return values[places]

    def spread(self, values: Array) -> Array:
        """One value a run, repeated for each of its rows."""
        return np.repeat(values, self.lengths)

    def where(self, flags: Array) -> tuple[Array, RowRuns]:
        """Places of the runs that keep a row where flags are set, and the runs of the rows kept."""
        kept = self.sum(flags)
        places = np.flatnonzero(kept)
        return places, RowRuns.of_lengths(kept[places])


def grouped(*keys: Array) -> tuple[Array, RowRuns]:
    """The order that sorts rows by the keys, the first one foremost, and the runs of equal first keys in that order."""
    order = np.lexsort(keys[::-1])
    return order, RowRuns.of(keys[0][order])


def ragged(firsts: Array, runs: RowRuns) -> Array:
    """Return firsts[i], firsts[i] + 1, ...: as many numbers as run i has rows, run after run."""
    return np.arange(runs.rows) + runs.spread(firsts - runs.starts)


Columns = dict[str, Array]


@dataclass(frozen=True)
class ColumnKind:
    """The type of a column, its empty value, and its merge: "sum", "max", or "min" over the rows of one allocation.

    merge is "" for a column that needs more than that.
    """

    dtype: type[np.generic]
    empty: float
    merge: str = ""


NUMBER, TOTAL = ColumnKind(np.int64, 0, "sum"), ColumnKind(np.float64, 0.0, "sum")
HIGHEST, LOWEST = ColumnKind(np.float64, np.nan, "max"), ColumnKind(np.float64, np.nan, "min")
WHOLE, REAL = ColumnKind(np.int64, 0), ColumnKind(np.float64, 0.0)

_NARROWER = {"i": (np.int8, np.int16, np.int32), "f": (np.int8, np.int16, np.int32, np.float32)}


@dataclass(frozen=True)
class Rows:
    """Rows of many parts, in an order of their own. A column is put together when it is asked for, and not kept."""

    kinds: Mapping[str, ColumnKind]
    parts: Sequence[Mapping[str, Array]]
    order: Array | None = None

    def __getitem__(self, name: str) -> Array:
        """Filled with what stands for nothing where a part leaves the column out."""
        kind = self.kinds[name]
        whole = np.concatenate([np.zeros(0, kind.dtype), *(_of(name, kind, part) for part in self.parts)])
        return whole if self.order is None else whole[self.order]

    def by(self, *keys: str) -> tuple[Rows, RowRuns]:
        """The rows sorted by columns, the first one foremost, and the runs that are equal in all of them."""
        order = np.lexsort([self[key] for key in reversed(keys)])
        rows = Rows(self.kinds, self.parts, order if self.order is None else self.order[order])
        return rows, RowRuns.of(*(rows[key] for key in keys))

    def totals(self, *keys: str) -> Columns:
        """The keys and the plain columns, a row for each combination of keys."""
        rows, runs = self.by(*keys)
        return {key: runs.first(rows[key]) for key in keys} | rows.merged(runs)

    def merged(self, runs: RowRuns) -> Columns:
        """The plain columns, a row for each run."""
        merges = {"sum": runs.sum, "max": runs.max, "min": runs.min}
        return {name: merges[kind.merge](self[name]) for name, kind in self.kinds.items() if kind.merge}


def _of(name: str, kind: ColumnKind, part: Mapping[str, Array]) -> Array:
    if name in part:
        return part[name].astype(kind.dtype)
    return np.full(len(next(iter(part.values()))), kind.empty, kind.dtype)


def scattered(rows: Columns, places: Array, length: int) -> Columns:
    """Rows put at their places among `length` rows, 0 elsewhere."""
    found = {}
    for name, values in rows.items():
        found[name] = np.zeros(length, values.dtype)
        found[name][places] = values
    return found


def packed(kinds: Mapping[str, ColumnKind], rows: Columns) -> pa.Table:
    """Return a table of the narrowest types that hold every value exactly, without columns that are empty."""
    key = next(iter(kinds))
    empty = {
        name: np.isnan(rows[name]) if np.isnan(kind.empty) else rows[name] == kind.empty for name, kind in kinds.items()
    }
    return pa.table({name: pa.array(_narrow(rows[name])) for name in kinds if name == key or not empty[name].all()})


def unpacked(table: pa.Table) -> Columns:
    return {name: table[name].to_numpy() for name in table.column_names}


def _narrow(values: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        for kind in _NARROWER[values.dtype.kind]:
            if np.array_equal(narrow := values.astype(kind), values, equal_nan=values.dtype.kind == "f"):
                return narrow
    return values


HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
_TEXT = ["host", "mig", "model", "uuid"]
_LATER_TEXT = "mig_profile"
"""Older files lack it, and pyarrow opens no file with a dictionary that is not there."""
_KEYS = "host, gpu, mig, time_ms"
_SQL_TYPES = {"string": "VARCHAR", "int16": "SMALLINT", "int64": "BIGINT", "float": "FLOAT", "double": "DOUBLE"}

Made = TypeVar("Made")
Column: TypeAlias = "pa.ChunkedArray[Any]"


class MisplacedError(Exception):
    """A file of the store is not sorted, has a sample twice, or one of another hour."""


@dataclass(frozen=True)
class Hour:
    """The telemetry of one hour.

    read: returns a column by its name, text as a dictionary; None if every value is null. nodes: the Slurm node of each
    host with another name in the file.
    """

    start_ms: int
    read: Callable[[str], Column | None]
    nodes: Mapping[str, str] = field(default_factory=dict)

    def text(self, name: str) -> Any:
        """A pa.DictionaryArray; an empty one where every value is null. Hosts are named as Slurm names them."""
        column = self.read(name)
        if column is None:
            return pa.array([], pa.string()).dictionary_encode()
        whole: Any = column.unify_dictionaries().combine_chunks()
        if name != "host" or not self.nodes:
            return whole
        hosts = [self.nodes.get(host, host) for host in whole.dictionary.to_pylist()]
        return pa.DictionaryArray.from_arrays(whole.indices, pa.array(hosts, pa.string()))

    def numbers(self, name: str) -> Array:
        column = self.read(name)
        return np.zeros(0, np.int64) if column is None else column.to_numpy()


@dataclass(frozen=True)
class Files:
    """Telemetry files, and the span [from_ms, until_ms) of their samples that counts.

    is_sorted: as in the store: a file for each hour, sorted by host, gpu, mig, and time, with unique keys.
    nodes: by day since 1970, the Slurm node of each host with another name in telemetry.
    """

    paths: tuple[Path, ...]
    from_ms: int
    until_ms: int
    is_sorted: bool
    nodes: Mapping[int, Mapping[str, str]] = field(default_factory=dict)


def stored_hour_ms(path: Path) -> int | None:
    """The hour that a file of the store holds; None: it is not one."""
    try:
        return partition_start(path) * 1000
    except ValueError:
        return None


def each_hour(
    db: duckdb.DuckDBPyConnection,
    files: Files,
    make: Callable[[Hour], Made],
    is_wanted: Callable[[int], bool] = lambda start_ms: True,
) -> list[Made]:
    """Yield the results of `make` for each wanted hour of the files' span, by its start in ms; no other hour is read.

    Raises MisplacedError where files are not sorted, although they were said to be, StoreError where a sorted file
    cannot be read, and duckdb.Error, pa.ArrowException or OSError where another one cannot.
    """

    def is_read(start_ms: int) -> bool:
        return files.from_ms <= start_ms < files.until_ms and is_wanted(start_ms)

    if files.is_sorted:
        return [
            make(_stored(path, start, files.nodes.get(start // DAY_MS, {})))
            for path, start in _starts(files.paths)
            if is_read(start)
        ]
    return [make(hour) for hour in _sorted(db, files, is_read)]


def _starts(paths: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    for path in paths:
        start_ms = stored_hour_ms(path)
        if start_ms is None:
            raise MisplacedError
        yield path, start_ms


def _stored(path: Path, start_ms: int, nodes: Mapping[str, str]) -> Hour:
    with naming(path):
        file = open_checked(path, read_dictionary=_TEXT)
    names, footer = file.schema_arrow.names, file.metadata

    def is_absent(name: str) -> bool:
        if name not in names:
            return True
        place = names.index(name)
        held: list[Any] = [footer.row_group(n).column(place).statistics for n in range(footer.num_row_groups)]
        return all(one is not None and one.has_null_count and not one.num_values for one in held)

    def read(name: str) -> Column | None:
        with naming(path):
            if is_absent(name):
                return None
            column = file.read([name], use_threads=False)[name]
            return column.dictionary_encode() if name == _LATER_TEXT else column

    return Hour(start_ms, read, nodes)


def _sorted(db: duckdb.DuckDBPyConnection, files: Files, is_read: Callable[[int], bool]) -> Iterator[Hour]:
    """Hours of files in any order. If a sample is given twice, its greatest values count, as in `store.merge`."""
    values = greatest_sql([field for field in TELEMETRY if field.name not in TABLES["telemetry"].key])
    run(
        db,
        f"CREATE OR REPLACE TEMP TABLE sorted_samples AS "
        f"SELECT time_ms - (time_ms % {HOUR_MS} + {HOUR_MS}) % {HOUR_MS} AS hour_ms, {_KEYS}, {values} "
        f"FROM {_named(files)} GROUP BY {_KEYS} ORDER BY hour_ms, {_KEYS}",
    )
    found = db.execute("SELECT DISTINCT hour_ms FROM sorted_samples ORDER BY hour_ms").fetchall()
    for (start_ms,) in found:
        if is_read(start_ms):
            yield Hour(start_ms, _reader(rows(db, f"FROM sorted_samples WHERE hour_ms = {start_ms} ORDER BY {_KEYS}")))
    run(db, "DROP TABLE sorted_samples")


def _named(files: Files) -> str:
    """SQL of the rows, with the names that Slurm gives to hosts."""
    rows = _source(files.paths)
    renamed = [
        f"({day}, {quoted(host)}, {quoted(node)})"
        for day, nodes in sorted(files.nodes.items())
        for host, node in sorted(nodes.items())
    ]
    if not renamed:
        return rows
    return (
        f"(SELECT s.* REPLACE (coalesce(n.node, s.host) AS host) FROM {rows} s LEFT JOIN "
        f"(VALUES {', '.join(renamed)}) n(day, host, node) "
        f"ON n.host = s.host AND n.day = s.time_ms // {DAY_MS})"
    )


def _reader(table: pa.Table) -> Callable[[str], Column | None]:
    def read(name: str) -> Column | None:
        column = table[name]
        if column.null_count == len(column):
            return None
        return column.dictionary_encode() if name in (*_TEXT, _LATER_TEXT) else column

    return read


def _source(paths: Sequence[Path]) -> str:
    """SQL of the rows of telemetry files; columns that none of them has are null."""
    known = [frozenset(pq.read_schema(path).names) for path in paths]
    everywhere = frozenset.union(*known)
    columns = ", ".join(
        field.name if field.name in everywhere else f"NULL::{_SQL_TYPES[str(field.type)]} AS {field.name}"
        for field in TELEMETRY
    )
    by_name = "" if len(set(known)) == 1 else ", union_by_name=true"
    listed = ", ".join(quoted(str(path)) for path in paths)
    return f"(SELECT {columns} FROM read_parquet([{listed}], hive_partitioning=false{by_name}))"


def quoted(text: str) -> str:
    """Return a string as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def rows(db: duckdb.DuckDBPyConnection, sql: str) -> pa.Table:
    """The result of one query."""
    found: pa.Table = db.sql(sql).to_arrow_table()
    return found


def run(db: duckdb.DuckDBPyConnection, sql: str) -> None:
    """One statement, to its end: DuckDB 2 refuses a further one before."""
    db.execute(sql).fetchall()
