"""Reading and writing one partition file of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from telemetry.store.atomic import make_inner_folder, replacing, writing
from telemetry.store.damage import naming, open_checked
from telemetry.store.schema import SCHEMA_VERSION, Table
from telemetry.store.seals import write_sealed

_ROW_GROUP = 122_880


def with_columns(rows: pa.Table, spec: Table) -> pa.Table:
    """Rows with exactly the columns of the table, null where they are missing."""
    arrays = [
        rows[field.name] if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type)
        for field in spec.schema
    ]
    return pa.table(arrays, names=spec.schema.names)


def read_partition(spec: Table, path: Path) -> pa.Table:
    """The rows of a file. Raises StoreError where it is damaged.

    Through pyarrow: DuckDB compares no checksums, and what is written again would be damage with a good one.
    """
    with naming(path), open_checked(path) as file:
        rows = file.read([name for name in spec.schema.names if name in file.schema_arrow.names])
        return with_columns(rows, spec).cast(spec.schema)


def write_partition(path: Path, rows: pa.Table, spec: Table) -> None:
    """Replace a partition file, made with its folders where it is not there. Raises StoreError."""
    table = rows.cast(spec.schema).replace_schema_metadata({"almanac.schema_version": str(SCHEMA_VERSION)})
    with writing(path):
        for folder in reversed([path.parent, *path.parents[1:3]]):
            make_inner_folder(folder)
        with replacing(path, is_handed_over=True) as out:
            write_sealed(table, out, row_group_size=_ROW_GROUP, **_encodings(spec))


def _encodings(spec: Table) -> dict[str, Any]:
    """Byte stream split: measured values rarely repeat, so a dictionary would take more time and space."""
    measured = [field.name for field in spec.schema if pa.types.is_floating(field.type)]
    return {
        "compression": "zstd",
        "use_dictionary": [name for name in spec.schema.names if name not in measured],
        "column_encoding": dict.fromkeys(measured, "BYTE_STREAM_SPLIT"),
    }
