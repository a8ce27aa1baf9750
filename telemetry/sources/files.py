"""Import of exports: job traces and telemetry in Parquet or CSV (layouts.toml names the columns).

Telemetry that has a column per counter, and no GPU twice at one time, needs no join; the rest goes through the pivot of
Prometheus' samples.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import telemetry
from almanac.atomic import FileState, state_of
from almanac.config import Tier
from almanac.records import Counts, JobRequest
from almanac.tiers import requested_tier
from almanac.units import printable
from telemetry.counters import COUNTERS, Counter
from telemetry.sources.exporters import FILE, Metric, presets
from telemetry.sources.file_columns import (
    FileColumns,
    Kind,
    Layout,
    choose_layout,
    open_columns,
    read_blocks,
    unreadable,
)
from telemetry.sources.file_jobs import read_jobs
from telemetry.sources.pivot import Pivot
from telemetry.sources.prometheus_json import SeriesSamples
from telemetry.sources.series import (
    Gpu,
    SeriesLabels,
    UnusableSeriesError,
    identify,
    shared_names,
    within_unit,
)
from telemetry.sources.source import RowBatch
from telemetry.store.schema import TABLES, TELEMETRY

_Ints = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]
_Doubles = npt.NDArray[np.float64]


class Series(NamedTuple):
    """The series number of each row, and each series' labels."""

    codes: _Ints
    labels: list[dict[str, str]]


class CounterColumn(NamedTuple):
    """Values of one counter in its own unit, NaN if it is not a number; and flags of the rows that have a value."""

    counter: Counter
    value: _Doubles
    is_given: _Flags


class _Identified(NamedTuple):
    """Of each series: the GPU and job that its labels name, or None and the reason."""

    known: list[SeriesLabels | None]
    unusable: dict[int, str]


def rows_of(series: Series, time_ms: _Ints, columns: Sequence[CounterColumn], counts: Counts) -> pa.Table | None:
    """The rows with a usable value, in the order given; `counts` is in samples, as in `Pivot`.

    Text is dictionary-encoded. If a GPU has two rows at one time, or hosts share a short name, it returns None and
    counts nothing.
    """
    found = _identified(series.labels)
    if shared_names(series.labels, FILE) or _has_twice(found, series.codes, time_ms):
        return None
    for label in dict.fromkeys(one.bad_job_label for one in found.known if one and one.bad_job_label):
        counts.note("job label is no job id", 1, printable(label, 60))
    usable = np.array([one is not None for one in found.known], dtype=bool)[series.codes]
    has_value = np.zeros(len(time_ms), dtype=bool)
    arrays: dict[str, pa.Array[Any]] = _row_labels(found, series.codes, time_ms)
    for column in columns:
        keep = within_unit(
            FILE.named[column.counter.column], column.value, series.codes, column.is_given & usable, counts
        )
        counts.seen += int(column.is_given.sum())
        counts.kept += int(keep.sum())
        has_value |= keep
        kind = np.float32 if TELEMETRY.field(column.counter.column).type == pa.float32() else np.float64
        value = np.minimum(column.value, column.counter.high).astype(kind)
        arrays[column.counter.column] = pa.array(value, mask=None if keep.all() else ~keep)
        for at, reason in found.unusable.items():
            number = int(np.sum(column.is_given & (series.codes == at)))
            counts.drop(reason, number, printable(str(series.labels[at])))
    for field in TELEMETRY:
        if field.name not in arrays:
            arrays[field.name] = pa.nulls(len(time_ms), field.type)
    table = pa.table({name: arrays[name] for name in TELEMETRY.names})
    return table if has_value.all() else table.filter(pa.array(has_value))


def _identified(labels: Sequence[dict[str, str]]) -> _Identified:
    found = _Identified([], {})
    for at, one in enumerate(labels):
        try:
            found.known.append(identify(one, FILE))
        except UnusableSeriesError as error:
            found.known.append(None)
            found.unusable[at] = str(error)
    return found


def _has_twice(found: _Identified, codes: _Ints, time_ms: _Ints) -> bool:
    """Return True if two usable rows have the same GPU and time."""
    gpus: dict[Gpu, int] = {}
    gpu = np.array([gpus.setdefault(one.gpu, len(gpus)) if one else -1 for one in found.known], dtype=np.int64)[codes]
    key = np.stack([gpu, time_ms])[:, gpu >= 0]
    span_ms = int(time_ms.max(initial=0) - time_ms.min(initial=0)) + 1
    if span_ms * len(gpus) >= 2**62:
        return bool(np.unique(key, axis=1).shape[1] < key.shape[1])
    one = np.sort(key[0] * span_ms + (key[1] - time_ms.min(initial=0)))
    return bool((one[1:] == one[:-1]).any())


def _row_labels(found: _Identified, codes: _Ints, time_ms: _Ints) -> dict[str, pa.Array[Any]]:
    known = [one or SeriesLabels(Gpu("", 0), "", "") for one in found.known]
    job = np.array([one.job_id or 0 for one in known], dtype=np.int64)[codes]
    return {
        "host": _spread([one.gpu.host for one in known], codes),
        "gpu": pa.array(np.array([one.gpu.gpu for one in known], dtype=np.int16)[codes]),
        "mig": _spread([one.gpu.mig for one in known], codes),
        "time_ms": pa.array(time_ms),
        "uuid": _spread([one.uuid or None for one in known], codes),
        "model": _spread([one.model or None for one in known], codes),
        "job_label": pa.array(job, mask=job <= 0),
        "mig_profile": _spread([one.profile or None for one in known], codes),
    }


def _spread(values: Sequence[str | None], codes: _Ints) -> pa.Array[Any]:
    """The text of each code."""
    texts: pa.Array[Any] = pa.array(values, pa.string()).dictionary_encode().take(codes)
    return texts


_LABELS = ("host", "gpu", "mig", "uuid", "model", "job_label", "mig_profile")
_BETWEEN = "\x1f"
"""Separates the labels of a series."""
_MOST_NAMED = 40
"""Unknown metrics of a block that are counted by name."""
FUTURE = "time in the future"
"""The reason for dropping rows that a later import keeps."""


class ReadSpan(NamedTuple):
    """The span to read: times in [since_ms, until_ms), none later than latest_ms."""

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
    keys = block["series"].combine_chunks().dictionary_encode()
    labels = [_labels(str(key)) for key in keys.dictionary.to_pylist()]
    series = Series(np.asarray(keys.indices).astype(np.int64), labels)
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


def _values(block: pa.Table, rows: _Flags) -> int:
    """Return the number of samples in these rows."""
    if "metric" in block.column_names or not rows.any():
        return int(rows.sum())
    return sum(int(_is_given(block, name)[rows].sum()) for name in block.column_names if name in _metrics())


def _is_given(block: pa.Table, name: str) -> _Flags:
    return np.asarray(block[name].is_valid().to_numpy(), dtype=bool)


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


@functools.cache
def _metrics() -> dict[str, Metric]:
    """Every name of a counter: our own, and those of the exporters."""
    named = {name: m for exporter in presets().values() for name, m in exporter.named.items() if not m.where}
    return {**FILE.named, **named}


_BLOCK_ROWS = {"jobs": 10_000, "telemetry": 500_000}
_CLOCK_TOLERANCE_S = 300


class FileSource:
    """A `Source` of one file. Its batches come in the file's own order, and it has no watermark.

    Counts are in rows for jobs, and in samples (one value of one counter at one time) for telemetry.
    """

    def __init__(
        self,
        path: Path,
        kind: Kind,
        layout: str | None = None,
        *,
        tiers: Sequence[Tier] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """tiers: what a job's request is matched against, where the file does not name its tier."""
        self.name = f"file:{path.name}"
        self._path, self._kind, self._layout, self._clock = path, kind, layout, clock
        self._tiers = tiers
        self._hashed: FileState = ()
        self._has_future = False

    def layout(self) -> Layout:
        """Return the layout to read the file with. Raises FileFormatError."""
        return choose_layout(str(self._path), list(open_columns(self._path).types), self._kind, self._layout)

    def key(self, since_s: int, until_s: int) -> str | None:
        """Hash of a telemetry file, its layout, the span, and almanac's code. Raises FileFormatError.

        None for jobs, and for what is not a regular file.
        """
        self._hashed = state_of(self._path)
        if self._kind != "telemetry" or not self._path.is_file():
            return None
        layout = self.layout().name
        try:
            with self._path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise unreadable(self._path, error) from error
        # The name's end matters: Arrow decompresses by it.
        parts = (content, self._path.suffix, layout, since_s, until_s, _code_hash())
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def is_final(self) -> bool:
        """Return False if the file changed since `key`, or has rows of the future, which a later read would give."""
        return not self._has_future and self._hashed == state_of(self._path)

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        """Batches of bounded size with the rows of [since_s, until_s): by submit time (jobs), by time (telemetry).

        Raises FileFormatError where the file cannot be read, or its columns are those of no known layout.
        """
        columns, layout = open_columns(self._path), self.layout()
        layout = replace(layout, is_typed=layout.is_own and not columns.delimiter)
        latest_s = int(self._clock()) + _CLOCK_TOLERANCE_S
        span = ReadSpan(since_s * 1000, until_s * 1000, latest_s * 1000)
        counts = Counts()
        for name in layout.unknown(list(columns.types)):
            counts.note(f"column not known: {printable(name, 80)}")
        select = selection(columns, layout) if self._kind == "telemetry" else {
            name: columns.text(name) for name in layout.needed(list(columns.types))}  # fmt: skip
        for block in read_blocks(columns, select, _BLOCK_ROWS[self._kind], counts) if columns.has_rows else ():
            if self._kind == "jobs":
                rows = _with_tiers(read_jobs(block, layout, since_s, until_s, latest_s, counts), self._tiers)
            else:
                rows = read_telemetry(block, span, counts)
                self._has_future |= FUTURE in counts.dropped
            yield RowBatch(self._kind, rows, counts)
            counts = Counts()
        if counts.seen or counts.notes:
            yield RowBatch(self._kind, TABLES[self._kind].schema.empty_table(), counts)


@functools.cache
def _code_hash() -> str:
    """Hash of the package telemetry: other code can read the same file in another way."""
    folder, found = Path(telemetry.__file__).parent, hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.toml")]):
        found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def _with_tiers(rows: pa.Table, tiers: Sequence[Tier]) -> pa.Table:
    """The tier that each row's constraint, GPU type or partition asks for, where the row names none."""
    if not tiers:
        return rows
    columns = ("tier", "constraints", "gpu_type", "partition")
    names = []
    for known, constraints, gpu_type, partition in zip(*(rows[c].to_pylist() for c in columns), strict=True):
        request = JobRequest(user="", constraints=constraints or "", gpu_type=gpu_type or "", partition=partition or "")
        tier = None if known else requested_tier(request, tiers)
        names.append(known or (tier.name if tier else None))
    place = rows.schema.get_field_index("tier")
    return rows.set_column(place, rows.schema.field(place), pa.array(names, pa.string()))
