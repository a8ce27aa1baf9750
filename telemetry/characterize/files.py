"""Writing the tables as Parquet and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from almanac.errors import StoreError
from almanac.units import cell_text
from telemetry.characterize.table import Result, contents
from telemetry.store.atomic import make_folders, write_output

CONTENTS_NAME = "contents"


def write_tables(results: Mapping[str, Result], folder: Path) -> list[Path]:
    """Write NAME.parquet and NAME.csv of every table, and of `contents`; files of the same names are replaced.

    A reader sees each file as it was or as it is, never a part. Raises StoreError where they cannot be written.
    """
    tables = {name: _described(result) for name, result in results.items()}
    written = []
    try:
        make_folders(folder)
        for name, rows in {**tables, CONTENTS_NAME: contents(results)}.items():
            for path, content in (
                (folder / f"{name}.parquet", _parquet(rows)),
                (folder / f"{name}.csv", csv_content(rows)),
            ):
                write_output(path, content)
                written.append(path)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written: {error}", "choose a folder that you can write") from error
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
