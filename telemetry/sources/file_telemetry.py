"""Rows of an imported file as rows of the telemetry table.

Complete rows need no join (file_rows); others go through the pivot of Prometheus' samples.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from almanac.records import Counts
from almanac.units import printable
from telemetry.counters import COUNTERS, Counter
from telemetry.sources.exporters import EXPORTERS, FILE
from telemetry.sources.file_rows import CounterColumn, Series, rows_of
from telemetry.sources.layouts import Layout
from telemetry.sources.pivot import Pivot
from telemetry.sources.prometheus_json import SeriesSamples

_LABELS = ("host", "gpu", "mig", "uuid", "model", "job_label", "mig_profile")
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


@dataclass(frozen=True)
class _Metric:
    counter: Counter
    scale: float
    is_free: bool = False


_Samples = tuple[_Metric, _Ints, _Doubles]
"""The rows that have a value of a counter, and these values."""


def read_telemetry(block: pa.Table, layout: Layout, span: ReadSpan, counts: Counts) -> pa.Table:
    """The rows of one block; text can be dictionary-encoded. `counts` is in samples: a counter's value at one time."""
    block, time_ms = _in_span(block, layout, span, counts)
    series = _series(block, layout)
    if layout.form != "long":
        columns = list(_wide(block, layout))
        rows = rows_of(series, time_ms, columns, counts)
        if rows is not None:
            return rows
        samples = [
            (_Metric(one.counter, 1.0), np.flatnonzero(one.is_given), one.value[one.is_given]) for one in columns
        ]
    else:
        samples = _long(block, counts)
    return _pivoted(series, time_ms, samples, counts)


def _pivoted(series: Series, time_ms: _Ints, samples: Sequence[_Samples], counts: Counts) -> pa.Table:
    """Samples joined to rows by GPU and time."""
    codes, labels = series
    end_ms = int(time_ms.max(initial=0)) + 1
    is_free = any(metric.is_free for metric, _, _ in samples)
    pivot = Pivot(replace(FILE, total_is_free=is_free), "", int(time_ms.min(initial=0)), end_ms, counts)
    for metric, at, value in samples:
        order = at[np.argsort(codes[at], kind="stable")]
        position = np.empty(len(time_ms), dtype=np.int64)
        position[at] = np.arange(len(at))
        lengths = np.bincount(codes[order], minlength=len(labels))
        pivot.add(metric.counter, SeriesSamples(labels, lengths, time_ms[order], value[position[order]] * metric.scale))
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
    present = [column for metric, column in _counter_columns(layout) if column in block.column_names]
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


def _counter_columns(layout: Layout) -> list[tuple[_Metric, str]]:
    found = [(counter, layout.columns.get(counter.column)) for counter in COUNTERS]
    return [(_Metric(counter, origin.scale), origin.columns[0]) for counter, origin in found if origin is not None]


def _wide(block: pa.Table, layout: Layout) -> Iterator[CounterColumn]:
    for metric, column in _counter_columns(layout):
        if column in block.column_names:
            value = read_numbers(block[column])
            scaled = value if metric.scale == 1.0 else value * metric.scale
            yield CounterColumn(metric.counter, scaled, ~_is_empty(block[column]))


def _long(block: pa.Table, counts: Counts) -> list[_Samples]:
    """Samples of a file with a row per sample; two names of one counter become one."""
    metric = _as_text(block["metric"]).combine_chunks().dictionary_encode()
    indices, value = np.asarray(metric.indices), read_numbers(block["value"])
    found: dict[_Metric, list[_Ints]] = {}
    for code, name in enumerate(metric.dictionary.to_pylist()):
        at = np.flatnonzero(indices == code)
        if name in _metrics():
            known = _metrics()[name]
            value[at] *= known.scale
            found.setdefault(replace(known, scale=1.0), []).append(at)
        else:
            counts.seen += len(at)
            counts.drop("metric not known", len(at), printable(str(name), 80))
    return [(known, at, value[at]) for known, at in _without_free(found, counts).items()]


def _without_free(found: dict[_Metric, list[_Ints]], counts: Counts) -> dict[_Metric, _Ints]:
    """The rows of each counter; free memory is left out where the total itself is given."""
    rows = {metric: np.sort(np.concatenate(at)) for metric, at in found.items()}
    if sum(metric.counter.column == "hbm_total_mib" for metric in rows) > 1:
        free = next(metric for metric in rows if metric.is_free)
        number = len(rows.pop(free))
        counts.seen += number
        counts.drop("free memory beside the total", number)
    return rows


@cache
def _metrics() -> dict[str, _Metric]:
    """Every name of a counter: our own, dcgm-exporter's and jobstats' exporter's."""
    named = {counter.column: _Metric(counter, 1.0) for counter in COUNTERS}
    for exporter in EXPORTERS.values():
        for name, counter in exporter.counters().items():
            is_free = exporter.total_is_free and counter.column == "hbm_total_mib"
            named[name] = _Metric(counter, exporter.scale(counter), is_free)
    return named
