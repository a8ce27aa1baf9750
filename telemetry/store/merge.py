"""What a partition file holds after rows were given to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from almanac.errors import StoreError
from telemetry.store.order import in_order, repeats
from telemetry.store.partition_file import read_partition, with_columns
from telemetry.store.schema import Table


@dataclass(frozen=True)
class WriteResult:
    """Counts of the rows of one write; rows given twice within it count once.

    left_out: rows whose file is damaged, and so stays as it is.
    """

    added: int = 0
    unchanged: int = 0
    replaced: int = 0
    left_out: int = 0

    def __add__(self, other: WriteResult) -> WriteResult:
        return WriteResult(
            self.added + other.added,
            self.unchanged + other.unchanged,
            self.replaced + other.replaced,
            self.left_out + other.left_out,
        )


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
    old = read_partition(spec, path)
    if old.equals(new):
        return None, WriteResult(unchanged=new.num_rows)
    together, is_disjoint = in_order(spec, pa.concat_tables([old, new]))
    if is_disjoint:
        return together, WriteResult(added=new.num_rows)
    if in_order(spec, old)[1]:
        return _join(spec, together, old.num_rows)
    # A file that the store did not write can have a key twice.
    db.register("given", old)
    known = arrow(db, _one_of_each(spec)).cast(spec.schema)
    return _join(spec, in_order(spec, pa.concat_tables([known, new]))[0], known.num_rows)


def _join(spec: Table, rows: pa.Table, known: int) -> tuple[pa.Table | None, WriteResult]:
    """`merge` of rows in order: of each key an old row, a new one, or an old one and then a new one.

    known: how many rows are old.
    """
    is_second = repeats(spec, rows)
    second, first = np.flatnonzero(is_second), np.flatnonzero(~is_second)
    pair = np.searchsorted(first, second) - 1
    differs = {
        name: _differs(rows[name].take(second - 1), rows[name].take(second))
        for name in spec.schema.names
        if name not in spec.key
    }
    replaced = int(np.any(list(differs.values()), axis=0).sum())
    added = len(first) - known
    result = WriteResult(added=added, unchanged=len(second) - replaced, replaced=replaced)
    if not (added or replaced):
        return None, result
    columns = []
    for name in spec.schema.names:
        chosen = first.copy()
        if name in differs:
            chosen[pair[differs[name]]] = second[differs[name]]
        columns.append(rows[name].take(chosen))
    return pa.Table.from_arrays(columns, schema=spec.schema), result


def _differs(old: Any, new: Any) -> npt.NDArray[np.bool_]:
    """Flags of the values of a column that are known, and not the old ones. NaN equals NaN."""
    if pa.types.is_list(new.type):
        pairs = zip(old.to_pylist(), new.to_pylist(), strict=True)
        return np.array([value is not None and value != known for known, value in pairs], dtype=bool)
    is_same = pc.fill_null(pc.equal(old, new), False)
    if pa.types.is_floating(new.type):
        is_same = pc.or_(is_same, pc.fill_null(pc.and_(pc.is_nan(old), pc.is_nan(new)), False))
    return np.array(new.is_valid().to_numpy() & ~is_same.to_numpy(), dtype=bool)


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
    old = read_partition(spec, path)
    db.register("old", old)
    kept = f"SELECT * FROM old ANTI JOIN owners USING ({names_sql(owners.column_names)})"
    merged = arrow(db, f"SELECT * FROM ({kept} UNION ALL SELECT * FROM given) ORDER BY {order}")
    is_same = merged.cast(spec.schema).equals(old)
    return None if is_same else merged


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


def arrow(db: duckdb.DuckDBPyConnection, sql: str, parameters: dict[str, Any] | None = None) -> pa.Table:
    """The result of one query."""
    rows: pa.Table = db.sql(sql, params=parameters or {}).to_arrow_table()
    return rows
