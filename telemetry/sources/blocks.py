"""Rows of a Parquet or CSV file in blocks of bounded size, columns as they are (Parquet) or as text (CSV)."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from almanac.errors import FileFormatError
from almanac.records import Counts
from almanac.units import printable

_CSV_BLOCK_BYTES = 16 * 2**20
_LONGEST_HEADER = 2**20
_FORGEABLE = frozenset({"JobName", "Comment", "AdminComment", "SystemComment", "SubmitLine", "WorkDir", "Extra"})


@dataclass(frozen=True)
class FileColumns:
    """What stands at the top of a file. delimiter is empty for Parquet; has_rows: whether anything follows that."""

    path: Path
    names: tuple[str, ...]
    delimiter: str = ""
    has_rows: bool = True


def open_columns(path: Path) -> FileColumns:
    """The columns of a file. Raises FileFormatError where it cannot be read, or has no header."""
    try:
        with path.open("rb") as file:
            is_parquet = file.read(4) == b"PAR1"
        columns = FileColumns(path, tuple(pq.read_schema(path).names)) if is_parquet else _csv_columns(path)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    if len(set(columns.names)) != len(columns.names) or not all(columns.names):
        raise FileFormatError(f"{path}: two columns have the same name, or one has none", "name each column once")
    return columns


def _csv_columns(path: Path) -> FileColumns:
    with pa.input_stream(path, compression="detect") as stream:
        line, newline, _ = stream.read(_LONGEST_HEADER).partition(b"\n")
    try:
        header = line.decode("utf-8-sig").strip("\r")
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path}: is neither Parquet nor CSV in UTF-8", "convert it to one of these") from error
    delimiter = max(",|\t;", key=header.count)
    names = tuple(name.strip() for name in next(csv.reader([header], delimiter=delimiter), []))
    if len(names) < 2 or not header.replace("\t", "").isprintable():
        raise FileFormatError(
            f"{path}: is neither Parquet nor CSV: its first line is {printable(header, 80)!r}",
            "give it a header line with the names of the columns, separated by commas",
        )
    if delimiter == "|" and _FORGEABLE & set(names):
        # sacct -P quotes nothing: a newline or "|" in these, which users write, forges whole rows.
        raise FileFormatError(
            f"{path}: holds {', '.join(sorted(_FORGEABLE & set(names)))} in text that cannot quote them",
            "export without these columns, or as CSV with quotes, or as Parquet",
        )
    return FileColumns(path, names, delimiter, has_rows=bool(newline))


def read_blocks(columns: FileColumns, wanted: Sequence[str], rows: int, counts: Counts) -> Iterator[pa.Table]:
    """Blocks of about `rows` rows (Parquet) or 16 MiB (CSV) with the wanted columns.

    Rows of a CSV file with another number of fields are counted as seen and dropped. Raises FileFormatError where the
    file breaks off; blocks given before that stand.
    """
    try:
        if not columns.delimiter:
            with pq.ParquetFile(columns.path) as file:
                for batch in file.iter_batches(batch_size=rows, columns=list(wanted)):
                    yield pa.Table.from_batches([batch])
        elif columns.has_rows:
            yield from _csv_blocks(columns, wanted, counts)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(columns.path, error) from error


def _csv_blocks(columns: FileColumns, wanted: Sequence[str], counts: Counts) -> Iterator[pa.Table]:
    def count_invalid(row: Any) -> Literal["skip"]:
        counts.seen += 1
        counts.drop("wrong number of fields", 1, printable(str(row.text or ""), 120))
        return "skip"

    quoted = columns.delimiter != "|"
    with pa.input_stream(columns.path, compression="detect") as stream:
        reader = pa.csv.open_csv(
            stream,  # type: ignore[arg-type]  # the stubs know files only
            read_options=pa.csv.ReadOptions(block_size=_CSV_BLOCK_BYTES, column_names=list(columns.names), skip_rows=1),
            parse_options=pa.csv.ParseOptions(
                delimiter=columns.delimiter,
                quote_char='"' if quoted else False,
                newlines_in_values=quoted,
                invalid_row_handler=count_invalid,
            ),
            convert_options=pa.csv.ConvertOptions(
                column_types=dict.fromkeys(columns.names, pa.binary()), include_columns=list(wanted)
            ),
        )
        for batch in reader:
            yield pa.Table.from_arrays([_text(column) for column in batch.columns], names=batch.schema.names)


def _text(column: pa.Array[Any]) -> pa.Array[Any]:
    """Bytes as text; what is not UTF-8 is replaced, so that one bad name does not cost the file."""
    try:
        text: pa.Array[Any] = column.cast(pa.string())
    except pa.ArrowInvalid:
        text = pa.array([bytes(value).decode("utf-8", "replace") for value in column.to_numpy(False)], pa.string())
    return text


def _unreadable(path: Path, error: Exception) -> FileFormatError:
    said = error.strerror if isinstance(error, OSError) and error.strerror else printable(str(error), 200)
    return FileFormatError(f"{path}: cannot be read: {said}", "check the path and its permissions, or export it again")
