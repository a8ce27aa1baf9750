"""Rows of a Parquet or CSV file in blocks of bounded size, columns as they are (Parquet) or as text (CSV)."""

from __future__ import annotations

import codecs
import csv
import functools
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from almanac.errors import FileFormatError
from almanac.plain_file import open_plain
from almanac.records import Counts
from almanac.units import printable
from telemetry.store.imported_files import FileState, state_of
from telemetry.store.probe import require_readable

_CSV_BLOCK_BYTES = 16 * 2**20
_READ_BYTES = 2**20
_LONGEST_HEADER = 2**20
_PLAIN = (
    pa.types.is_null, pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, pa.types.is_string,
    pa.types.is_large_string,
)  # fmt: skip
_PER_S = {"s": 1, "ms": 10**3, "us": 10**6}
_FIRST_S, _LAST_S = -62_135_596_800, 253_402_300_799  # 0001-01-01, 9999-12-31
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
        with open_plain(path) as file:
            is_parquet = file.read(4) == b"PAR1"
        if is_parquet:
            _require_readable(path, state_of(path))
        columns = FileColumns(path, tuple(pq.read_schema(path).names)) if is_parquet else _csv_columns(path)
    except (OSError, pa.ArrowException) as error:
        raise unreadable(path, error) from error
    if len(set(columns.names)) != len(columns.names) or not all(columns.names):
        raise FileFormatError(f"{path}: two columns have the same name, or one has none", "name each column once")
    return columns


@functools.lru_cache(maxsize=64)
def _require_readable(path: Path, state: FileState) -> None:
    """`require_readable`, once for each state of a file."""
    require_readable(path)


def _csv_columns(path: Path) -> FileColumns:
    with pa.input_stream(path, compression="detect") as stream:
        # A bare CR ends a line too: Arrow, which reads the rows, takes it so.
        line, *rest = re.split(rb"\r\n|\n|\r", stream.read(_LONGEST_HEADER), maxsplit=1)
    try:
        header = line.decode("utf-8").removeprefix("\ufeff")
        delimiter = max(",|\t;", key=header.count)
        names = tuple(name.strip() for name in next(csv.reader([header], delimiter=delimiter), []))
    except (UnicodeDecodeError, csv.Error) as error:
        raise FileFormatError(f"{path}: is neither Parquet nor CSV in UTF-8", "convert it to one of these") from error
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
    return FileColumns(path, names, delimiter, has_rows=bool(rest))


def read_blocks(columns: FileColumns, wanted: Sequence[str], rows: int, counts: Counts) -> Iterator[pa.Table]:
    """Blocks of about `rows` rows (Parquet) or 16 MiB (CSV) with the wanted columns.

    Rows of a CSV file with another number of fields are counted as seen and dropped. Raises FileFormatError where the
    file breaks off; blocks given before that stand.
    """
    try:
        if not columns.delimiter:
            # With pre_buffer, which is pyarrow's default, all bytes of the file stay in memory to its end.
            with pq.ParquetFile(columns.path, pre_buffer=False) as file:
                for batch in file.iter_batches(batch_size=rows, columns=list(wanted)):
                    yield _plain(columns.path, pa.Table.from_batches([batch]))
        elif columns.has_rows:
            yield from _csv_blocks(columns, wanted, counts)
    except (OSError, pa.ArrowException) as error:
        raise unreadable(columns.path, error) from error


def _csv_blocks(columns: FileColumns, wanted: Sequence[str], counts: Counts) -> Iterator[pa.Table]:
    def count_invalid(row: Any) -> Literal["skip"]:
        counts.seen += 1
        counts.drop("wrong number of fields", 1, printable(str(row.text or ""), 120))
        return "skip"

    quoted = columns.delimiter != "|"
    with pa.input_stream(columns.path, compression="detect") as stream:
        reader = pa.csv.open_csv(
            io.BufferedReader(_ValidText(stream), _READ_BYTES),
            read_options=pa.csv.ReadOptions(block_size=_CSV_BLOCK_BYTES, column_names=list(columns.names), skip_rows=1),
            parse_options=pa.csv.ParseOptions(
                delimiter=columns.delimiter,
                quote_char='"' if quoted else False,
                newlines_in_values=quoted,
                invalid_row_handler=count_invalid,
            ),
            convert_options=pa.csv.ConvertOptions(
                column_types=dict.fromkeys(columns.names, pa.string()), include_columns=list(wanted)
            ),
        )
        for batch in reader:
            yield pa.Table.from_batches([batch])


class _ValidText(io.RawIOBase):
    """The bytes of a stream; those that are not UTF-8 are replaced, so that one bad name does not cost the file.

    Before the rows are parsed: pyarrow cannot tell of a row with a wrong number of fields that is not UTF-8.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """As many bytes as fit: a byte that is replaced becomes three. 0 at the end only."""
        valid, data = b"", b"?"
        while data and not valid:
            data = self._stream.read((len(buffer) - 12) // 3)
            valid = self._decoder.decode(data, final=not data).encode()
        buffer[: len(valid)] = valid
        return len(valid)


def _plain(path: Path, table: pa.Table) -> pa.Table:
    """Parquet's columns as text, numbers, truth values and timestamps. Raises FileFormatError for any other type."""
    columns = [_plain_column(path, name, table[name]) for name in table.column_names]
    return pa.table(columns, names=table.column_names)


def _plain_column(path: Path, name: str, column: pa.ChunkedArray[Any]) -> pa.ChunkedArray[Any]:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _plain_column(path, name, column.cast(kind.value_type))
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        texts = [None if value is None else value.decode("utf-8", "replace") for value in column.to_pylist()]
        return pa.chunked_array([pa.array(texts, pa.string())])
    if pa.types.is_decimal(kind) or pa.types.is_float16(kind):
        return column.cast(pa.float64())
    if pa.types.is_date(kind):
        return _moments(column.cast(pa.timestamp("s")))
    if pa.types.is_timestamp(kind):
        return _moments(column)
    if not any(is_one(kind) for is_one in _PLAIN):
        raise FileFormatError(
            f"{path}: column {printable(name, 60)} has the type {printable(str(kind), 60)}",
            "export it as text, a number or a timestamp",
        )
    return column


def _moments(column: pa.ChunkedArray[Any]) -> pa.ChunkedArray[Any]:
    """Timestamps in us, of a time zone in UTC; null where Python, which ends with the year 9999, has no such date."""
    if column.type.unit == "ns":
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    unit, zone = column.type.unit, "UTC" if column.type.tz else None
    first, last = (pa.scalar(time_s * _PER_S[unit], pa.int64()) for time_s in (_FIRST_S, _LAST_S))
    known = column.cast(pa.int64())
    known = pc.if_else(pc.less_equal(known, last), known, None)
    known = pc.if_else(pc.greater_equal(known, first), known, None)
    moments: pa.ChunkedArray[Any] = known.cast(pa.timestamp(unit)).cast(pa.timestamp("us", zone))
    return moments


def unreadable(path: Path, error: Exception) -> FileFormatError:
    """The error for a file that cannot be read."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else printable(str(error), 200)
    return FileFormatError(f"{path}: cannot be read: {said}", "check the path and its permissions, or export it again")
