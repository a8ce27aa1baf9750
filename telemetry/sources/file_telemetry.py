"""Rows of an imported file as rows of the telemetry table.

Complete rows need no join (file_rows); others go through the pivot of Prometheus' samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from almanac.records import Counts
from almanac.units import printable
from telemetry.counters import COUNTERS
from telemetry.sources.blocks import FileColumns
from telemetry.sources.exporters import FILE, Metric, presets
from telemetry.sources.file_rows import CounterColumn, Series, rows_of
from telemetry.sources.layouts import Layout
from telemetry.sources.pivot import Pivot
from telemetry.sources.prometheus_json import SeriesSamples
from telemetry.store.schema import TELEMETRY

_LABELS = ("host", "gpu", "mig", "uuid", "model", "job_label", "mig_profile")
_BETWEEN = "\x1f"
"""Separates the labels of a series."""
_MOST_NAMED = 40
"""Unknown metrics of a block that are counted by name."""
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


def selection(columns: FileColumns, layout: Layout) -> dict[str, str]:
    """SQL of what `read_telemetry` needs of a file: times, labels, and values under the names of their metrics."""
    origins = {ours: origin.columns[0] for ours, origin in layout.columns.items() if origin.columns[0] in columns.types}
    time = layout.columns["time_ms"].columns[0]
    labels = [f"coalesce({columns.text(origins[ours])}, '')" if ours in origins else "''" for ours in _LABELS]
    found = {
        "time_ms": columns.time_ms(time, is_ms=time.endswith("_ms")),
        "series": f"concat_ws('{_BETWEEN}', {', '.join(labels)})",
    }
    if layout.form == "long":
        return {**found, "metric": f"coalesce({columns.text('metric')}, '')", "value": columns.number("value")}
    for counter in COUNTERS:
        if counter.column in origins:
            scale = layout.columns[counter.column].scale
            found[counter.column] = columns.number(origins[counter.column]) + (f" * {scale}" if scale != 1 else "")
    foreign = [name for name in _metrics() if layout.is_own and name in columns.types and name not in TELEMETRY.names]
    return found | {name: columns.number(name) for name in foreign}


def read_telemetry(block: pa.Table, span: ReadSpan, counts: Counts) -> pa.Table:
    """The rows of one block; text can be dictionary-encoded. `counts` is in samples: a counter's value at one time."""
    block, time_ms = _in_span(block, span, counts)
    series = _series(block)
    if "metric" in block.column_names:
        return _pivoted(series, time_ms, _long(block, counts), counts)
    columns = {name: CounterColumn(metric.counter, block[name].to_numpy(), _is_given(block, name))
               for name, metric in _metrics().items() if name in block.column_names}  # fmt: skip
    for name, one in columns.items():
        _note_ratio(name, one.value, counts)
    if columns.keys() <= FILE.named.keys():
        rows = rows_of(series, time_ms, list(columns.values()), counts)
        if rows is not None:
            return rows
    samples = [(_metrics()[name], np.flatnonzero(one.is_given), one.value[one.is_given])
               for name, one in columns.items()]  # fmt: skip
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


def _in_span(block: pa.Table, span: ReadSpan, counts: Counts) -> tuple[pa.Table, _Ints]:
    """The rows within the span and their times; rows without a time, or with one of the future, are counted."""
    time_ms = block["time_ms"].to_numpy()
    bad = np.isnan(time_ms) | (time_ms < 0)
    future = ~bad & (time_ms > span.latest_ms)
    for reason, rows in (("time not understood", bad), (FUTURE, future)):
        number = _values(block, rows)
        counts.seen += number
        counts.drop(reason, number)
    keep = ~bad & ~future & (time_ms >= span.since_ms) & (time_ms < span.until_ms)
    if keep.all():
        return block, np.rint(time_ms).astype(np.int64)
    return block.filter(pa.array(keep)), np.rint(time_ms[keep]).astype(np.int64)


def _values(block: pa.Table, rows: npt.NDArray[np.bool_]) -> int:
    """How many samples these rows hold."""
    if "metric" in block.column_names or not rows.any():
        return int(rows.sum())
    return sum(int(_is_given(block, name)[rows].sum()) for name in block.column_names if name in _metrics())


def _is_given(block: pa.Table, name: str) -> npt.NDArray[np.bool_]:
    return np.asarray(block[name].is_valid().to_numpy(), dtype=bool)


def _series(block: pa.Table) -> Series:
    keys = block["series"].combine_chunks().dictionary_encode()
    return Series(np.asarray(keys.indices).astype(np.int64), [_labels(str(key)) for key in keys.dictionary.to_pylist()])


def _labels(key: str) -> dict[str, str]:
    """The labels in a key. A label with the separator in it becomes a host, which has no such name."""
    labels = key.split(_BETWEEN)
    return dict(zip(_LABELS, labels, strict=True)) if len(labels) == len(_LABELS) else {"host": key}


def _long(block: pa.Table, counts: Counts) -> list[_Samples]:
    """Samples of a file with a row per sample, by metric in the presets' order."""
    metric = block["metric"].combine_chunks().dictionary_encode()
    indices, value = np.asarray(metric.indices), block["value"].to_numpy()
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
