"""Rows of an imported file as rows of the telemetry table.

Complete rows need no join (file_rows); others go through the pivot of Prometheus' samples.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from almanac.records import Counts
from almanac.units import printable
from telemetry.counters import COUNTERS
from telemetry.sources.exporters import FILE, Metric, presets
from telemetry.sources.file_rows import CounterColumn, Series, rows_of
from telemetry.sources.layouts import Layout, Origin
from telemetry.sources.pivot import Pivot
from telemetry.sources.prometheus_json import SeriesSamples
from telemetry.store.schema import TELEMETRY

_LABELS = ("host", "gpu", "mig", "uuid", "model", "job_label", "mig_profile")
_MOST_NAMED = 40
"""Unknown metrics of a block that are counted by name."""
_NUMBER = r"^\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*$"
_MS_FROM = 1e11
FUTURE = "time in the future"
"""Why rows are dropped that a later import keeps."""
_Doubles = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ReadSpan:
    """What is read: times in [since_ms, until_ms), none later than latest_ms."""

    since_ms: int
    until_ms: int
    latest_ms: int


_Samples = tuple[Metric, _Ints, _Doubles]
"""The rows that have a value of a metric, and these values."""


def read_telemetry(block: pa.Table, layout: Layout, span: ReadSpan, counts: Counts) -> pa.Table:
    """The rows of one block; text can be dictionary-encoded. `counts` is in samples: a counter's value at one time."""
    block, time_ms = _in_span(block, layout, span, counts)
    series = _series(block, layout)
    if layout.form == "long":
        return _pivoted(series, time_ms, _long(block, counts), counts)
    columns = list(_wide(block, layout))
    for one in columns:
        _note_ratio(one.counter.column, one.value, counts)
    foreign = [(metric, read_numbers(block[name]), ~_is_empty(block[name])) for metric, name in _foreign(block, layout)]
    rows = None if foreign else rows_of(series, time_ms, columns, counts)
    if rows is not None:
        return rows
    given = [(FILE.named[one.counter.column], one.value, one.is_given) for one in columns] + foreign
    samples = [(metric, np.flatnonzero(is_given), value[is_given]) for metric, value, is_given in given]
    return _pivoted(series, time_ms, samples, counts)


def _pivoted(series: Series, time_ms: _Ints, samples: Sequence[_Samples], counts: Counts) -> pa.Table:
    """Samples joined to rows by GPU and time."""
    codes, labels = series
    end_ms = int(time_ms.max(initial=0)) + 1
    pivot = Pivot(FILE, "", int(time_ms.min(initial=0)), end_ms, counts)
    for metric, at, value in samples:
        order = at[np.argsort(codes[at], kind="stable")]
        position = np.empty(len(time_ms), dtype=np.int64)
        position[at] = np.arange(len(at))
        lengths = np.bincount(codes[order], minlength=len(labels))
        pivot.add(metric, SeriesSamples(labels, lengths, time_ms[order], value[position[order]]))
    return pivot.table()


def _in_span(block: pa.Table, layout: Layout, span: ReadSpan, counts: Counts) -> tuple[pa.Table, _Ints]:
    """The rows within the span and their times; rows without a time, or with one of the future, are counted."""
    column = layout.columns["time_ms"].columns[0]
    time_ms = read_times(block[column], is_ms=column.endswith("_ms"))
    bad = np.isnan(time_ms) | (time_ms < 0)
    future = ~bad & (time_ms > span.latest_ms)
    for reason, rows in (("time not understood", bad), (FUTURE, future)):
        number = _values(block, layout, rows)
        counts.seen += number
        counts.drop(reason, number)
    keep = ~bad & ~future & (time_ms >= span.since_ms) & (time_ms < span.until_ms)
    if keep.all():
        return block, np.rint(time_ms).astype(np.int64)
    return block.filter(pa.array(keep)), np.rint(time_ms[keep]).astype(np.int64)


def _values(block: pa.Table, layout: Layout, rows: npt.NDArray[np.bool_]) -> int:
    """How many samples these rows hold."""
    if layout.form == "long" or not rows.any():
        return int(rows.sum())
    counters = [origin.columns[0] for _, origin in _counter_columns(layout)]
    present = [name for name in counters if name in block.column_names] + [name for _, name in _foreign(block, layout)]
    return sum(int(np.sum(~_is_empty(block[column])[rows])) for column in present)


def read_times(column: pa.ChunkedArray[Any], *, is_ms: bool = False) -> _Doubles:
    """ms since 1970 of a column; NaN where it holds no time.

    Numbers are seconds, and milliseconds where is_ms or above 1e11; text is a number or ISO 8601, in UTC unless it
    names a zone.
    """
    if pa.types.is_timestamp(column.type):
        return _nan_for_null(column.cast(pa.timestamp("ms", column.type.tz), safe=False).cast(pa.int64()))
    number = read_numbers(column)
    time_ms = number if is_ms else np.where(np.abs(number) > _MS_FROM, number, number * 1000)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        text = np.flatnonzero(np.isnan(number))
        time_ms[text] = [_iso_ms(value) for value in column.take(text).to_pylist()]
    return time_ms


def _iso_ms(text: str | None) -> float:
    try:
        moment = dt.datetime.fromisoformat((text or "").strip())
    except ValueError:
        return np.nan
    return (moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)).timestamp() * 1000


def read_numbers(column: pa.ChunkedArray[Any]) -> _Doubles:
    """The numbers of a column; NaN where it holds none."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        valid = pc.match_substring_regex(column, _NUMBER)
        column = pc.utf8_trim_whitespace(pc.if_else(valid, column, None))
    if pa.types.is_timestamp(column.type):
        return np.full(len(column), np.nan)
    return _nan_for_null(column)


def _nan_for_null(column: pa.ChunkedArray[Any]) -> _Doubles:
    return np.array(column.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)


def _is_empty(column: pa.ChunkedArray[Any]) -> npt.NDArray[np.bool_]:
    """Where a column says nothing: null, or empty text."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = pc.if_else(pc.equal(column, pa.scalar("", column.type)), None, column)
    return np.asarray(column.is_null().to_numpy(), dtype=bool)


def _series(block: pa.Table, layout: Layout) -> Series:
    present = [(ours, layout.columns[ours].columns[0]) for ours in _LABELS if ours in layout.columns]
    encoded = {ours: _encoded(block[theirs]) for ours, theirs in present if theirs in block.column_names}
    if not len(block):
        return Series(np.zeros(0, dtype=np.int64), [])
    code = np.zeros(len(block), dtype=np.int64)
    for own, texts in encoded.values():
        both = pa.array(code * len(texts) + own).dictionary_encode()
        code = np.asarray(both.indices).astype(np.int64)
    first = np.empty(int(code.max()) + 1, dtype=np.int64)
    first[code[::-1]] = np.arange(len(code))[::-1]
    labels = {ours: texts.take(own[first]) for ours, (own, texts) in encoded.items()}
    return Series(code, pa.table(list(labels.values()), names=list(labels)).to_pylist())


def _encoded(column: pa.ChunkedArray[Any]) -> tuple[_Ints, pa.ChunkedArray[Any]]:
    """Each value's place among the distinct ones, and these as text."""
    distinct: Any = column.combine_chunks().dictionary_encode("encode")
    return np.asarray(distinct.indices).astype(np.int64), _as_text(pa.chunked_array([distinct.dictionary]))


def _as_text(column: pa.ChunkedArray[Any]) -> pa.ChunkedArray[Any]:
    """Labels as text, "" where there is none; whole numbers that Parquet holds as floats are written without ".0"."""
    if pa.types.is_floating(column.type) and pc.all(pc.equal(column, pc.round(column))).as_py() is not False:
        column = column.cast(pa.int64(), safe=False)
    text: pa.ChunkedArray[Any] = pc.if_else(column.is_null(), "", column.cast(pa.string()))
    return text


def _counter_columns(layout: Layout) -> list[tuple[Metric, Origin]]:
    return [(FILE.named[c.column], layout.columns[c.column]) for c in COUNTERS if c.column in layout.columns]


def _foreign(block: pa.Table, layout: Layout) -> list[tuple[Metric, str]]:
    """The columns of the store's own layout that an exporter's metrics give their names, in the presets' order."""
    if not layout.is_own:
        return []
    return [(metric, name) for name, metric in _metrics().items() if name not in TELEMETRY.names
            and name in block.column_names]  # fmt: skip


def _wide(block: pa.Table, layout: Layout) -> Iterator[CounterColumn]:
    for metric, origin in _counter_columns(layout):
        if origin.columns[0] in block.column_names:
            value = read_numbers(block[origin.columns[0]])
            scaled = value if origin.scale == 1.0 else value * origin.scale
            yield CounterColumn(metric.counter, scaled, ~_is_empty(block[origin.columns[0]]))


def _long(block: pa.Table, counts: Counts) -> list[_Samples]:
    """Samples of a file with a row per sample, by metric in the presets' order."""
    metric = _as_text(block["metric"]).combine_chunks().dictionary_encode()
    indices, value = np.asarray(metric.indices), read_numbers(block["value"])
    names = [str(name) for name in metric.dictionary.to_pylist()]
    rows = {name: np.flatnonzero(indices == code) for code, name in enumerate(names)}
    unread = sorted(rows.keys() - _metrics().keys())
    is_unused = {name: any(exporter.is_unused(name) for exporter in presets().values()) for name in unread}
    unknown = [name for name in unread if not is_unused[name]][:_MOST_NAMED]
    for name in unread:
        shown, number = printable(name, 80), len(rows[name])
        counts.seen += number
        if name in unknown:
            counts.drop(f"metric not known: {shown}", number)
        else:
            counts.drop("metric not used" if is_unused[name] else "metric not known", number, shown)
    samples = [(metric, rows[name], value[rows[name]]) for name, metric in _metrics().items() if name in rows]
    for own, _, values in samples:
        _note_ratio(own.name, values, counts)
    return samples


def _note_ratio(column: str, value: _Doubles, counts: Counts) -> None:
    """Note a utilization of our own name that is never above 1%: it may be a ratio, or a site that is idle."""
    if column == "gpu_util_pct":
        known = value[np.isfinite(value)]
        if known.max(initial=0) <= 1 and ((known > 0) & (known < 1)).any():
            counts.note("gpu_util_pct is never above 1%: is it a ratio?", 1, f"{known.max():g}")


@cache
def _metrics() -> dict[str, Metric]:
    """Every name of a counter: our own, and those of the exporters."""
    return {**FILE.named, **{name: m for exporter in presets().values() for name, m in exporter.named.items()}}
