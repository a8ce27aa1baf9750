"""What a partition file holds after rows were given to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from almanac.errors import StoreError
from telemetry.store.damage import naming, open_checked
from telemetry.store.order import in_order
from telemetry.store.schema import Table


@dataclass(frozen=True)
class WriteResult:
    """What became of the rows of one write; rows given twice within it count once."""

    added: int = 0
    unchanged: int = 0
    replaced: int = 0

    def __add__(self, other: WriteResult) -> WriteResult:
        return WriteResult(self.added + other.added, self.unchanged + other.unchanged, self.replaced + other.replaced)


def conform(rows: pa.Table, spec: Table) -> pa.Table:
    """Rows with the columns of the table, null where they are missing. Raises StoreError, also for null keys.

    Dictionary-encoded text stays so.
    """
    unknown = set(rows.column_names) - set(spec.schema.names)
    if unknown:
        raise StoreError(f"{spec.name}: unknown columns {sorted(unknown)}", f"expected some of {spec.schema.names}")
    table = with_columns(rows, spec)
    for name in {*spec.key, spec.time_column}:
        if table[name].null_count:
            raise StoreError(f"{spec.name}: {table[name].null_count} rows without {name}", "the source must drop these")
    return table.cast(pa.schema([_encoded(field, table[field.name].type) for field in spec.schema]))


def _encoded(field: pa.Field[Any], given: pa.DataType) -> pa.Field[Any]:
    is_kept = pa.types.is_string(field.type) and pa.types.is_dictionary(given)
    return field.with_type(pa.dictionary(pa.int32(), pa.string())) if is_kept else field


def with_columns(rows: pa.Table, spec: Table) -> pa.Table:
    """Rows with exactly the columns of the table, null where they are missing."""
    arrays = [
        rows[field.name] if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type)
        for field in spec.schema
    ]
    return pa.table(arrays, names=spec.schema.names)


def merge(
    db: duckdb.DuckDBPyConnection, spec: Table, path: Path, rows: pa.Table
) -> tuple[pa.Table | None, WriteResult]:
    """The file's rows with `rows` merged in by key, in order; None if nothing changes.

    A newer row wins over an older one, and a null never erases a known value. If several given rows have one key, each
    column keeps its last known value, or in telemetry its greatest. So the order of given samples does not matter.
    """
    new, is_unique = in_order(spec, rows)
    if not is_unique:
        db.register("given", rows)
        new, _ = in_order(spec, arrow(db, _one_of_each(spec)))
    new = new.cast(spec.schema)
    if not path.exists():
        return new, WriteResult(added=new.num_rows)
    old = _read_old(spec, path)
    if old.equals(new):
        return None, WriteResult(unchanged=new.num_rows)
    together, is_disjoint = in_order(spec, pa.concat_tables([old, new]))
    if is_disjoint:
        return together, WriteResult(added=new.num_rows)
    return _join(db, spec, old, new)


def _join(
    db: duckdb.DuckDBPyConnection, spec: Table, old: pa.Table, new: pa.Table
) -> tuple[pa.Table | None, WriteResult]:
    """`merge` for keys that both sides have."""
    db.register("old", old)
    db.register("new", new)
    on = " AND ".join(f'n."{key}" = e."{key}"' for key in spec.key)
    rest = [name for name in spec.schema.names if name not in spec.key]
    differs = " OR ".join(f'(n."{c}" IS NOT NULL AND n."{c}" IS DISTINCT FROM e."{c}")' for c in rest) or "false"
    both = _counts(db, f"SELECT count(*), count(*) FILTER (WHERE {differs}) FROM new n JOIN old e ON {on}")
    result = WriteResult(added=new.num_rows - both[0], unchanged=both[0] - both[1], replaced=both[1])
    if not (result.added or result.replaced):
        return None, result
    joined = ", ".join(f'coalesce(n."{c}", e."{c}") AS "{c}"' for c in spec.schema.names)
    order = names_sql(spec.order)
    return arrow(db, f"SELECT {joined} FROM old e FULL OUTER JOIN new n ON {on} ORDER BY {order}"), result


def replace(
    db: duckdb.DuckDBPyConnection, spec: Table, path: Path, rows: pa.Table, owners: pa.Table
) -> pa.Table | None:
    """The file's rows with `rows` in place of those of the owners, in order; None where nothing changes.

    owners: values of some columns of the key; every row that has one of them goes.
    """
    db.register("given", rows)
    db.register("owners", owners)
    order = names_sql(spec.order)
    if not path.exists():
        return arrow(db, f"SELECT * FROM given ORDER BY {order}") if rows.num_rows else None
    old = _read_old(spec, path)
    db.register("old", old)
    kept = f"SELECT * FROM old ANTI JOIN owners USING ({names_sql(owners.column_names)})"
    merged = arrow(db, f"SELECT * FROM ({kept} UNION ALL SELECT * FROM given) ORDER BY {order}")
    is_same = merged.cast(spec.schema).equals(old)
    return None if is_same else merged


def _read_old(spec: Table, path: Path) -> pa.Table:
    """Through pyarrow: DuckDB compares no checksums, and what is written again would be damage with a good one."""
    with naming(path), open_checked(path) as file:
        rows = file.read([name for name in spec.schema.names if name in file.schema_arrow.names])
        return with_columns(rows, spec).cast(spec.schema)


def names_sql(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _one_of_each(spec: Table) -> str:
    """One row per key of `given`."""
    rest = [field for field in spec.schema if field.name not in spec.key]
    if spec.is_unordered:
        values, source = greatest_sql(rest), "given"
    else:
        values = ", ".join(f'last("{c.name}" ORDER BY seq) FILTER ("{c.name}" IS NOT NULL) AS "{c.name}"' for c in rest)
        source = "(SELECT *, row_number() OVER () AS seq FROM given)"
    grouped = f"SELECT {names_sql(spec.key)}, {values} FROM {source} GROUP BY {names_sql(spec.key)}"
    return f"SELECT {names_sql(spec.schema.names)} FROM ({grouped})"


def greatest_sql(fields: Sequence[pa.Field[pa.DataType]]) -> str:
    """The greatest value of each column among rows with one key; null without a value. NaN is no value."""

    def is_known(field: pa.Field[pa.DataType]) -> str:
        return f'NOT isnan("{field.name}")' if pa.types.is_floating(field.type) else "true"

    return ", ".join(f'max("{field.name}") FILTER ({is_known(field)}) AS "{field.name}"' for field in fields)


def _counts(db: duckdb.DuckDBPyConnection, sql: str) -> tuple[int, ...]:
    # DuckDB 2 refuses a further query on a connection whose last result was not fetched to its end.
    row: tuple[int, ...] = db.execute(sql).fetchall()[0]
    return row


def arrow(db: duckdb.DuckDBPyConnection, sql: str, parameters: dict[str, Any] | None = None) -> pa.Table:
    """The result of one query."""
    rows: pa.Table = db.sql(sql, params=parameters or {}).to_arrow_table()
    return rows
