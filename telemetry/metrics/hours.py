"""Telemetry hour by hour, sorted by GPU and time and unique: as the store keeps it, or sorted first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from telemetry.metrics.runs import Array
from telemetry.store.damage import naming, open_checked
from telemetry.store.merge import greatest_sql
from telemetry.store.partitions import partition_start
from telemetry.store.schema import TABLES, TELEMETRY

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
    """read: a column by its name, text as a dictionary; None where every value is null.

    nodes: the Slurm node of each host with another name in the file.
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
    """What `make` gives for each hour of the files' span that is wanted, by its start in ms; no other is read.

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
    """A text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def rows(db: duckdb.DuckDBPyConnection, sql: str) -> pa.Table:
    """The result of one query."""
    found: pa.Table = db.sql(sql).to_arrow_table()
    return found


def run(db: duckdb.DuckDBPyConnection, sql: str) -> None:
    """One statement, to its end: DuckDB 2 refuses a further one before."""
    db.execute(sql).fetchall()
