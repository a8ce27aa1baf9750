"""Columns of a Parquet or CSV file to import: its layout (layouts.toml), and its rows in blocks of bounded size.

The blocks come from one SELECT, which DuckDB computes while it reads.
"""

from __future__ import annotations

import codecs
import csv
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import duckdb
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from almanac.atomic import FileState, state_of
from almanac.errors import FileFormatError
from almanac.files import open_plain
from almanac.records import Counts
from almanac.units import printable
from telemetry.sources.exporters import presets
from telemetry.store.database import connect, require_readable
from telemetry.store.schema import TABLES

_MEMORY_MIB = 512
_LONGEST_HEADER = 2**20
_CSV_BLOCK_BYTES = 2**24
_ANY_BYTES = "almanac_any_bytes"
_FORGEABLE = frozenset({"JobName", "Comment", "AdminComment", "SystemComment", "SubmitLine", "WorkDir", "Extra"})
_NUMBER = r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*"
_MS_FROM = 1e11
"""Times without a unit are milliseconds above this, else seconds."""


@dataclass(frozen=True)
class FileColumns:
    """Names and types of a file's columns. delimiter: of CSV, whose columns are text; empty for Parquet.

    has_rows: False for a CSV file that ends with its header.
    """

    path: Path
    types: Mapping[str, pa.DataType]
    delimiter: str = ""
    has_rows: bool = True

    def text(self, name: str) -> str:
        """SQL of a column as text. Whole numbers have no ".0", although Parquet may hold them as floats."""
        column, kind = self._column(name)
        if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            whole = f"{column} = trunc({column}) AND abs({column}) < 1e18"
            return f"CASE WHEN {whole} THEN {column}::BIGINT::VARCHAR ELSE {column}::DOUBLE::VARCHAR END"
        if pa.types.is_timestamp(kind):
            return f"{_timestamp(column, kind)}::VARCHAR"
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
            return f"coalesce(TRY(decode({column})), {column}::VARCHAR)"
        return f"{column}::VARCHAR"

    def number(self, name: str) -> str:
        """SQL of a column as a double: null for a missing value or empty text, NaN for anything else but a number."""
        column, kind = self._column(name)
        if pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind):
            return f"{column}::DOUBLE"
        text = self.text(name)
        number = f"CASE WHEN regexp_full_match({text}, '{_NUMBER}') THEN TRY_CAST(trim({text}) AS DOUBLE) END"
        return f"CASE WHEN {text} <> '' THEN coalesce({number}, 'nan'::DOUBLE) END"

    def time_ms(self, name: str, *, is_ms: bool) -> str:
        """SQL of a column as ms since 1970, a double; null or NaN for anything but a time.

        Numbers are seconds, and milliseconds if is_ms or above 1e11. Text is a number or ISO 8601, in UTC unless it
        names a zone.
        """
        column, kind = self._column(name)
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            return f"(epoch_us({_timestamp(column, kind)}) // 1000)::DOUBLE"
        number = self.number(name)
        time_ms = number if is_ms else f"CASE WHEN abs({number}) > {_MS_FROM} THEN {number} ELSE {number} * 1000 END"
        if pa.types.is_floating(kind) or pa.types.is_integer(kind):
            return time_ms
        date = f"epoch_us(TRY_CAST(trim({self.text(name)}) AS TIMESTAMPTZ)) / 1000.0"
        return f"CASE WHEN isnan({number}) THEN {date} ELSE {time_ms} END"

    def _column(self, name: str) -> tuple[str, pa.DataType]:
        """A column by its number: its name may need quoting, or differ from another one's in case only.

        Raises FileFormatError for a type that is neither text, number, nor time.
        """
        kind = self.types[name]
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if pa.types.is_nested(kind) or pa.types.is_duration(kind) or pa.types.is_time(kind):
            raise FileFormatError(
                f"{self.path}: column {printable(name, 60)} has the type {printable(str(kind), 60)}",
                "export it as text, a number or a timestamp",
            )
        return f"c{list(self.types).index(name)}", kind


def _timestamp(column: str, kind: pa.DataType) -> str:
    """SQL of a date or timestamp as a timestamp; null beyond the years that DuckDB knows."""
    return f"TRY_CAST({column} AS {'TIMESTAMPTZ' if pa.types.is_timestamp(kind) and kind.tz else 'TIMESTAMP'})"


def open_columns(path: Path) -> FileColumns:
    """The columns of a file. Raises FileFormatError if it cannot be read or has no header."""
    try:
        with open_plain(path) as file:
            is_parquet = file.read(4) == b"PAR1"
        if not is_parquet:
            return _csv_columns(path)
        _require_readable(path, state_of(path))
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise unreadable(path, error) from error
    _check_names(path, schema.names)
    return FileColumns(path, dict(zip(schema.names, schema.types, strict=True)))


@functools.lru_cache(maxsize=64)
def _require_readable(path: Path, state: FileState) -> None:
    """`require_readable`, once for each state of a file."""
    require_readable(path)


def _check_names(path: Path, names: list[str]) -> None:
    if len(set(names)) != len(names) or not all(names):
        raise FileFormatError(f"{path}: two columns have the same name, or one has none", "name each column once")


def _csv_columns(path: Path) -> FileColumns:
    with _unpacked(path) as stream:
        # A bare CR ends a line too: Arrow, which reads the rows, takes it so.
        line, *rest = re.split(rb"\r\n|\n|\r", stream.read(_LONGEST_HEADER), maxsplit=1)
    try:
        header = line.decode("utf-8").removeprefix("\ufeff")
        delimiter = max(",|\t;", key=header.count)
        names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
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
    _check_names(path, names)
    return FileColumns(path, dict.fromkeys(names, pa.string()), delimiter, has_rows=bool(rest))


def read_blocks(columns: FileColumns, select: Mapping[str, str], rows: int, counts: Counts) -> Iterator[pa.Table]:
    """Blocks of up to `rows` rows, in the file's order. select: SQL by name of each column of the blocks.

    Rows of a CSV file with another number of fields are counted as seen and dropped. Raises FileFormatError if the file
    breaks off; blocks given before that stand.
    """
    sql = ", ".join(f'{expression} AS "{name}"' for name, expression in select.items())
    try:
        with open_plain(columns.path) as file, connect([], memory_limit_mib=_MEMORY_MIB, threads=1) as db:
            # A small buffer: a fault of a file costs no more rows before it than a buffer holds.
            db.execute("SET TimeZone = 'UTC'; SET streaming_buffer_size = '64KiB'")
            # By descriptor: in a path, DuckDB reads * and [ as a pattern, and key= as a column.
            source, given = "read_parquet($file)", {"file": f"/proc/self/fd/{file.fileno()}"}
            if columns.delimiter or "timestamp[ms" in str(columns.types):
                source, given = "batches", {}
                batches = _csv_rows(columns, counts) if columns.delimiter else _parquet_rows(columns.path)  # noqa: F841
            named = ", ".join(f"c{number}" for number in range(len(columns.types)))
            # Unlike `execute`, `sql` does not hold all rows before it gives the first.
            found = db.sql(f"SELECT {sql} FROM {source} AS file({named})", params=given)
            yield from (pa.Table.from_batches([batch]) for batch in found.to_arrow_reader(rows))
    except duckdb.InterruptException:
        raise
    except (OSError, pa.ArrowException, duckdb.Error) as error:
        raise unreadable(columns.path, error) from error


def _parquet_rows(path: Path) -> pa.RecordBatchReader:
    """The rows of a file with times in ms. DuckDB's own reader refuses a file for one time after the year 294,246."""
    file = pq.ParquetFile(path, pre_buffer=False)  # with pre_buffer, all bytes of the file stay in memory to its end
    return pa.RecordBatchReader.from_batches(file.schema_arrow, file.iter_batches())


def _csv_rows(columns: FileColumns, counts: Counts) -> pa.RecordBatchReader:
    """The rows of a CSV file. DuckDB's reader loses rows with bytes that are not UTF-8, and ignores extra fields."""

    def count_invalid(row: Any) -> Literal["skip"]:
        counts.seen += 1
        counts.drop("wrong number of fields", 1, printable(str(row.text or ""), 120))
        return "skip"

    quoted = columns.delimiter != "|"
    return pa.csv.open_csv(
        pa.transcoding_input_stream(_unpacked(columns.path), _ANY_BYTES, "utf-8"),  # type: ignore[arg-type]
        read_options=pa.csv.ReadOptions(block_size=_CSV_BLOCK_BYTES, column_names=list(columns.types), skip_rows=1),
        parse_options=pa.csv.ParseOptions(
            delimiter=columns.delimiter,
            quote_char='"' if quoted else False,
            newlines_in_values=quoted,
            invalid_row_handler=count_invalid,
        ),
        convert_options=pa.csv.ConvertOptions(column_types=dict(columns.types)),
    )


def _unpacked(path: Path) -> pa.NativeFile:
    return pa.input_stream(path, compression="detect")


def _replacing_codec(name: str) -> codecs.CodecInfo | None:
    """UTF-8 with a replacement for each byte that is none, so that one bad name does not cost the file.

    Before the rows are parsed: pyarrow cannot name a row with a wrong number of fields that is not UTF-8.
    """
    utf8 = codecs.lookup("utf-8")
    decoder = functools.partial(codecs.getincrementaldecoder("utf-8"), "replace")
    return codecs.CodecInfo(utf8.encode, utf8.decode, incrementaldecoder=lambda _="": decoder(), name=name) if (
        name == _ANY_BYTES) else None  # fmt: skip


codecs.register(_replacing_codec)


def unreadable(path: Path, error: Exception) -> FileFormatError:
    """The error for a file that cannot be read."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
    return FileFormatError(
        f"{path}: cannot be read: {printable(said, 200)}", "check the path and its permissions, or export it again"
    )


Kind = Literal["jobs", "telemetry"]
_MOST_COLUMNS_SAID = 40


@dataclass(frozen=True)
class Origin:
    """The origin of one of our columns: the first of `columns` that is not missing, or `value` for every row."""

    columns: tuple[str, ...] = ()
    value: Any = None
    scale: float = 1.0
    parse: str = ""
    missing: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Layout:
    """One kind of file; see layouts.toml. is_own: its columns are the table's. is_typed: a text of it is never missing,
    even if it is empty or "None", as in Parquet files of the store's own columns.
    """

    name: str
    kind: Kind
    about: str
    requires: tuple[str, ...]
    columns: Mapping[str, Origin]
    states: Mapping[str, str] = field(default_factory=dict)
    form: str = "wide"
    is_own: bool = False
    is_typed: bool = False

    def needed(self, present: Sequence[str]) -> list[str]:
        """The columns of a file that this layout names, in the file's order."""
        named = {column for origin in self.columns.values() for column in origin.columns} | set(self.requires)
        return [column for column in present if column in named]

    def unknown(self, present: Sequence[str]) -> list[str]:
        """The columns of a telemetry file that look like an exporter's metrics, and that nothing reads."""
        if self.kind != "telemetry":
            return []
        known = [one for one in presets().values() if one.prefix]
        return sorted({name for one in known for name in one.unknown(present) if name.startswith(one.prefix)})


@cache
def layouts() -> tuple[Layout, ...]:
    """Every layout that almanac knows, in the order of preference."""
    text = (files("telemetry.sources") / "layouts.toml").read_text(encoding="utf-8")
    return tuple(_layout(entry) for entry in tomllib.loads(text)["layout"])


def _layout(entry: dict[str, Any]) -> Layout:
    columns = {name: _origin(given) for name, given in entry.get("columns", {}).items()}
    if entry.get("is_own"):
        columns = {name: Origin((name,)) for name in TABLES[entry["kind"]].schema.names}
    return Layout(
        name=entry["name"],
        kind=entry["kind"],
        about=entry["about"],
        requires=tuple(entry["requires"]),
        columns=columns,
        states=entry.get("states", {}),
        form=entry.get("form", "wide"),
        is_own=entry.get("is_own", False),
    )


def _origin(given: Any) -> Origin:
    table = given if isinstance(given, dict) else {"from": given}
    source = table.get("from", [])
    return Origin(
        columns=(source,) if isinstance(source, str) else tuple(source),
        value=table.get("value"),
        scale=table.get("scale", 1.0),
        parse=table.get("parse", ""),
        missing=frozenset(table.get("missing", [])),
    )


def choose_layout(where: str, columns: Sequence[str], kind: Kind, named: str | None = None) -> Layout:
    """The layout of a file with these columns, or the one named. Raises FileFormatError, which names all that fit."""
    known = [layout for layout in layouts() if layout.kind == kind]
    if named is not None:
        return _named(where, columns, kind, named, known)
    fitting = [layout for layout in known if set(layout.requires) <= set(columns)]
    if not fitting:
        expected = "; ".join(f"{layout.name} ({', '.join(layout.requires)})" for layout in known)
        raise FileFormatError(
            f"{where}: its columns ({_said(columns)}) fit no known {kind} file: {expected}",
            f"rename the columns to fit one of these, or check that it is a {kind} file",
        )
    return max(fitting, key=lambda layout: len(layout.requires))


def _named(where: str, columns: Sequence[str], kind: Kind, named: str, known: Sequence[Layout]) -> Layout:
    layout = next((layout for layout in known if layout.name == named), None)
    if layout is None:
        raise FileFormatError(
            f"{where}: there is no layout {printable(named, 60)} for {kind}",
            f"choose one of: {', '.join(layout.name for layout in known)}",
        )
    absent = [column for column in layout.requires if column not in columns]
    if absent:
        raise FileFormatError(
            f"{where}: layout {named} needs the columns {', '.join(absent)}; the file has: {_said(columns)}",
            "rename the columns",
        )
    return layout


def _said(columns: Sequence[str]) -> str:
    said = ", ".join(printable(column, 40) for column in columns[:_MOST_COLUMNS_SAID])
    return said + (f" and {len(columns) - _MOST_COLUMNS_SAID} more" if len(columns) > _MOST_COLUMNS_SAID else "")
