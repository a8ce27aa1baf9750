"""Partials of telemetry files: small tables that merge exactly, over hours, days and machines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa

from telemetry.counters import COUNTER_COLUMNS
from telemetry.metrics.base import BASE
from telemetry.metrics.energy import ENERGY
from telemetry.metrics.family import Family
from telemetry.metrics.histogram import HISTOGRAM
from telemetry.metrics.options import Options
from telemetry.metrics.roofline import ROOFLINE
from telemetry.metrics.samples import Known, rows, run, source_sql
from telemetry.metrics.spatial import OPEN_WINDOWS, SPATIAL

FAMILIES = (BASE, ENERGY, SPATIAL, OPEN_WINDOWS, ROOFLINE, HISTOGRAM)

_SQL_TYPES = {
    pa.int8(): "TINYINT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float64(): "DOUBLE",
    pa.bool_(): "BOOLEAN",
    pa.decimal128(38, 0): "DECIMAL(38, 0)",
}
_KEYS = ("host", "gpu", "mig", "time_ms")
_HOURLY = """
CREATE OR REPLACE TEMP TABLE hourly AS
SELECT *, unnest(range(greatest(start_ms, $from_ms) // 3600000, (least(end_ms, $until_ms) - 1) // 3600000 + 1)) AS hour
FROM claims WHERE start_ms < $until_ms AND end_ms > $from_ms
"""


@dataclass(frozen=True)
class Files:
    """Telemetry files, and the span [from_ms, until_ms) in which their samples are looked at.

    is_sorted: as the store keeps them: by host, gpu, mig and time, unique, and every hour of a GPU in one file.
    """

    paths: tuple[Path, ...]
    from_ms: int
    until_ms: int
    is_sorted: bool


@dataclass(frozen=True)
class Partials:
    """One table per family, in the order of FAMILIES; empty where a family was not asked for."""

    tables: tuple[pa.Table, ...]

    def __getitem__(self, family: Family) -> pa.Table:
        return self.tables[FAMILIES.index(family)]

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables)


def no_partials() -> Partials:
    return Partials(tuple(family.schema.empty_table() for family in FAMILIES))


def wanted(family: Family, options: Options) -> bool:
    return (options.is_full or not family.only_full) and (options.is_aligned_to_job or not family.only_aligned)


def compute_partials(
    db: duckdb.DuckDBPyConnection, files: Files, claims: pa.Table, options: Options, counted_ms: tuple[int, int]
) -> Partials:
    """Partials of the samples of files that lie within claims (`frames.CLAIM_FRAME`).

    Files that turn out not to be sorted, although they were said to be, are sorted first.
    counted: samples in the span counted_ms. Raises duckdb.Error where a file cannot be read.
    """
    db.register("claims", claims)
    run(db, _HOURLY, {"from_ms": files.from_ms, "until_ms": files.until_ms})
    for name, value in (
        ("counted_from_ms", counted_ms[0]),
        ("counted_until_ms", counted_ms[1]),
        ("files_from_ms", files.from_ms),
        ("files_until_ms", files.until_ms),
    ):
        run(db, f"SET VARIABLE {name} = {value}::BIGINT")
    _open_samples(db, files, is_sorted=files.is_sorted)
    found = _run(db, options, Known.of(files.paths) if files.is_sorted else Known())
    if files.is_sorted and any(_misplaced(table) for table in found.tables):
        _open_samples(db, files, is_sorted=False)
        found = _run(db, options, Known())
    run(db, "DROP TABLE hourly")
    db.unregister("claims")
    return found


def merge_partials(db: duckdb.DuckDBPyConnection, parts: Iterable[Partials]) -> Partials:
    """One Partials of many; the order in which they are given does not matter."""
    columns = list(zip(*(part.tables for part in parts), strict=True))
    if not columns:
        return no_partials()
    return Partials(
        tuple(_merged(db, family, pa.concat_tables(tables)) for family, tables in zip(FAMILIES, columns, strict=True))
    )


def _run(db: duckdb.DuckDBPyConnection, options: Options, known: Known) -> Partials:
    tables = []
    for family in FAMILIES:
        if not wanted(family, options):
            tables.append(family.schema.empty_table())
            continue
        found = _typed(db, family, family.query(options, known))
        tables.append(_merged(db, family, found) if family.is_chained else found)
    return Partials(tuple(tables))


def _merged(db: duckdb.DuckDBPyConnection, family: Family, parts: pa.Table) -> pa.Table:
    if not parts.num_rows:
        return parts
    db.register("parts", parts)
    found = _typed(db, family, family.merge)
    db.unregister("parts")
    return found


def _typed(db: duckdb.DuckDBPyConnection, family: Family, query: str) -> pa.Table:
    columns = ", ".join(f"{field.name}::{_SQL_TYPES[field.type]} AS {field.name}" for field in family.schema)
    return rows(db, f"SELECT {columns} FROM ({query})").cast(family.schema)


def _misplaced(table: pa.Table) -> bool:
    return "misplaced" in table.column_names and any(table["misplaced"].to_numpy())


def _open_samples(db: duckdb.DuckDBPyConnection, files: Files, *, is_sorted: bool) -> None:
    """Make the relation `samples`: the files as they are, or sorted and without duplicates."""
    run(db, "DROP VIEW IF EXISTS samples")
    run(db, "DROP TABLE IF EXISTS sorted_samples")
    source = source_sql(files.paths)
    if not is_sorted:
        # Of samples given twice with different values the greater counts, whatever the order of the files.
        counters = ", ".join(f"max({column}) FILTER (NOT isnan({column})) AS {column}" for column in COUNTER_COLUMNS)
        keys = ", ".join(_KEYS)
        unique = f"SELECT {keys}, {counters} FROM {source} GROUP BY {keys} ORDER BY {keys}"
        run(db, f"CREATE TEMP TABLE sorted_samples AS {unique}")
        source = "sorted_samples"
    run(db, f"CREATE TEMP VIEW samples AS SELECT * FROM {source}")
