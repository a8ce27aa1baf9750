"""Writing the tables as Parquet and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from almanac.errors import StoreError
from almanac.units import cell_text
from telemetry.characterize.table import Result, contents
from telemetry.store.atomic import make_folders, write_output

CONTENTS_NAME = "contents"


def write_tables(results: Mapping[str, Result], folder: Path) -> list[Path]:
    """Write NAME.parquet and NAME.csv of every table, and of `contents`, as `write_files` does."""
    tables = {name: _described(result) for name, result in results.items()} | {CONTENTS_NAME: contents(results)}
    kinds = ((".parquet", _parquet), (".csv", csv_content))
    return write_files(folder, ((name + end, of(rows)) for name, rows in tables.items() for end, of in kinds))


def write_files(folder: Path, files: Iterable[tuple[str, bytes]]) -> list[Path]:
    """Write files by their names; existing ones are replaced. Returns their paths.

    A reader sees each file as it was or as it is, never a part. Raises StoreError if one cannot be written.
    """
    written = []
    try:
        make_folders(folder)
        for name, content in files:
            write_output(folder / name, content)
            written.append(folder / name)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written: {error}", "choose a folder that you can write to") from error
    return written


def _described(result: Result) -> pa.Table:
    about = {
        "almanac.title": result.table.title,
        "almanac.figure": result.table.figure,
        "almanac.jobs": str(result.jobs),
        "almanac.left_out": json.dumps(dict(result.left_out)),
        "almanac.why_empty": result.why_empty,
    }
    return result.rows.replace_schema_metadata(about)


def _parquet(rows: pa.Table) -> bytes:
    out = io.BytesIO()
    pq.write_table(rows, out, compression="zstd", write_page_checksum=True)
    return out.getvalue()


def csv_content(rows: pa.Table) -> bytes:
    """A table as CSV that is safe to open in a spreadsheet; a missing value is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(rows.column_names)
    writer.writerows([cell_text(value, is_for_spreadsheets=True) for value in row.values()] for row in rows.to_pylist())
    return out.getvalue().encode()
