"""Telemetry files as a relation of SQL."""

from __future__ import annotations

from collections.abc import Sequence
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


def rows(db: duckdb.DuckDBPyConnection, sql: str, parameters: dict[str, Any] | None = None) -> pa.Table:
    """The result of one query."""
    found: pa.Table = db.sql(sql, params=parameters or {}).to_arrow_table()
    return found


def run(db: duckdb.DuckDBPyConnection, sql: str, parameters: dict[str, Any] | None = None) -> None:
    """One statement, to its end: DuckDB 2 refuses a further one before."""
    db.execute(sql, parameters or {}).fetchall()
