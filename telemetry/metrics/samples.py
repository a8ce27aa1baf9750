"""Telemetry files as a relation of SQL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from telemetry.schema import TELEMETRY

_SQL_TYPES = {"string": "VARCHAR", "int16": "SMALLINT", "int64": "BIGINT", "float": "FLOAT", "double": "DOUBLE"}


def source_sql(paths: Sequence[Path]) -> str:
    """SQL of the rows of telemetry files; columns that none of them has are null. Raises OSError, pa.ArrowInvalid."""
    known = [frozenset(pq.read_schema(path).names) for path in paths]
    everywhere = frozenset.union(*known)
    columns = ", ".join(
        field.name if field.name in everywhere else f"NULL::{_SQL_TYPES[str(field.type)]} AS {field.name}"
        for field in TELEMETRY
    )
    by_name = "" if len(set(known)) == 1 else ", union_by_name=true"
    quoted = ", ".join("'" + str(path).replace("'", "''") + "'" for path in paths)
    return f"(SELECT {columns} FROM read_parquet([{quoted}], hive_partitioning=false{by_name}))"


@dataclass(frozen=True)
class Known:
    """What the footers of files say of their columns, so that queries need not ask of each sample.

    complete: never null. absent: always null. fractions: never null and within 0..1. is_whole: no MIG instances.
    """

    complete: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    fractions: frozenset[str] = frozenset()
    is_whole: bool = False

    @classmethod
    def of(cls, paths: Sequence[Path]) -> Known:
        """By the statistics of every row group; a column without them is in none of the sets."""
        bounds: dict[str, list[tuple[bool, bool, bool, bool]]] = {field.name: [] for field in TELEMETRY}
        for path in paths:
            footer = pq.read_metadata(path)
            for number in range(footer.num_row_groups):
                group = footer.row_group(number)
                found = {c.path_in_schema: c for c in map(group.column, range(group.num_columns))}
                for name, judged in bounds.items():
                    judged.append(_judge(found.get(name)))
        held = {name: [all(flags) for flags in zip(*judged, strict=True)] for name, judged in bounds.items() if judged}
        complete, absent, fractions, empty = (
            frozenset(name for name, flags in held.items() if flags[place]) for place in range(4)
        )
        return cls(complete, absent, fractions, "mig" in empty)

    def count(self, column: str) -> str:
        """SQL: how many samples have the column."""
        if column in self.absent:
            return "0"
        return "count(*)" if column in self.complete else f"count({column})"

    def total(self, column: str) -> str:
        """SQL: the sum of the column."""
        return "NULL" if column in self.absent else f"sum({column}::DOUBLE)"


def _judge(chunk: Any) -> tuple[bool, bool, bool, bool]:
    """Whether a column chunk is complete, absent, complete within 0..1, and complete with empty text only."""
    if chunk is None:
        return False, True, False, False
    held = chunk.statistics
    if held is None or not held.has_null_count:
        return False, False, False, False
    complete = held.null_count == 0
    bounded = complete and held.has_min_max
    within = bounded and isinstance(held.min, float) and held.min >= 0 and held.max <= 1
    return complete, held.null_count == chunk.num_values, within, bounded and held.min == held.max == ""


def rows(db: duckdb.DuckDBPyConnection, sql: str, parameters: dict[str, Any] | None = None) -> pa.Table:
    """The result of one query."""
    found: pa.Table = db.sql(sql, params=parameters or {}).to_arrow_table()
    return found


def run(db: duckdb.DuckDBPyConnection, sql: str, parameters: dict[str, Any] | None = None) -> None:
    """One statement, to its end: DuckDB 2 refuses a further one before."""
    db.execute(sql, parameters or {}).fetchall()
