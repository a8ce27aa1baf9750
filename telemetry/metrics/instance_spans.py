"""The times at which samples show each MIG instance, cut where it became another one, and its memory then.

The capacity of an instance is what its memory in use and its free memory are together (FB_USED + FB_FREE), so without
what the driver reserves for itself (FB_RESERVED), as for a whole GPU. Its nominal name is no capacity.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from telemetry.attribution.instances import LONGEST_PAUSE, SAME_SIZE, InstanceSpan, SpansByGpu, by_gpu
from telemetry.metrics.hours import DAY_MS, Hour
from telemetry.metrics.runs import Array, RowRuns
from telemetry.metrics.samples import Units
from telemetry.store.schema import schema_of

SPANS = schema_of(
    {
        "host": pa.string(),
        "gpu": pa.int16(),
        "mig": pa.string(),
        "day": pa.int64(),
        "first_ms": pa.int64(),
        "last_ms": pa.int64(),
        "gap_ms": pa.float64(),
        "samples": pa.int64(),
        "profile": pa.string(),
        "total_mib": pa.float64(),
    }
)
"""One row per span, as `InstanceSpan`."""


def spans_of(hour: Hour, units: Units) -> pa.Table | None:
    """The spans of an hour's MIG instances; None where every GPU is whole."""
    is_mig = np.asarray(units.mig.to_numpy(zero_copy_only=False) != "", dtype=bool)
    if not is_mig.any():
        return None
    runs = RowRuns.of_lengths(units.runs.lengths[is_mig])
    rows = np.flatnonzero(units.runs.spread(is_mig))
    time_ms, total = units.time_ms[rows], _totals(hour, units.runs.rows)[rows]
    profile, profiles = _codes(hour, "mig_profile", rows)
    gap_ms = _median_gaps_ms(runs, time_ms)
    begins = np.diff(time_ms, prepend=0) > LONGEST_PAUSE * runs.spread(gap_ms)
    begins |= _changes(runs, profile) | _changes(runs, _codes(hour, "uuid", rows)[0])
    begins |= _resizes(runs, total)
    begins[runs.starts] = True
    spans = RowRuns(np.flatnonzero(begins), len(rows))
    whose = np.flatnonzero(is_mig)[np.searchsorted(runs.starts, spans.starts, side="right") - 1]
    known = spans.max(profile)
    columns: dict[str, Any] = {
        "host": units.host.take(whose),
        "gpu": units.gpu[whose],
        "mig": units.mig.take(whose),
        "day": np.full(len(whose), hour.start_ms // DAY_MS),
        "first_ms": spans.first(time_ms),
        "last_ms": spans.last(time_ms),
        "gap_ms": gap_ms[np.searchsorted(runs.starts, spans.starts, side="right") - 1],
        "samples": spans.lengths,
        "profile": profiles.take(pa.array(known, pa.int64(), mask=known < 0)),
        "total_mib": pa.array(medians(spans, total), from_pandas=True),
    }
    return pa.table(columns).cast(SPANS)


def _totals(hour: Hour, rows: int) -> Array:
    total = hour.read("hbm_total_mib")
    return np.full(rows, np.nan) if total is None else total.to_numpy().astype(np.float64)


def _codes(hour: Hour, name: str, rows: Array) -> tuple[Array, pa.Array[pa.StringScalar]]:
    """The text of these rows as codes, -1 without one, and the texts."""
    text = hour.text(name)
    if not len(text):
        return np.full(len(rows), -1), pa.array([], pa.string())
    return text.indices.fill_null(-1).to_numpy()[rows].astype(np.int64), text.dictionary.cast(pa.string())


def _median_gaps_ms(runs: RowRuns, time_ms: Array) -> Array:
    """The median time between the samples of each run; 0 for a lone one."""
    gap = np.diff(time_ms, append=0).astype(np.float64)
    gap[runs.ends - 1] = np.nan
    return np.nan_to_num(medians(runs, gap))


def medians(runs: RowRuns, values: Array) -> Array:
    """The middle one of each run's known values, the lower of two; NaN without any."""
    number = runs.sum(~np.isnan(values))
    order = np.lexsort((values, runs.spread(np.arange(len(runs.starts)))))  # NaN is the last of its run
    middle = values[order][runs.starts + np.maximum(number - 1, 0) // 2]
    found: Array = np.where(number > 0, middle, np.nan)
    return found


def _last_known(runs: RowRuns, is_known: Array) -> Array:
    """The place of the last known value before each row, within its run; -1 without one."""
    place = np.where(is_known, np.arange(runs.rows), -1)
    before = np.concatenate([[-1], np.maximum.accumulate(place)[:-1]])
    found: Array = np.where(before >= runs.spread(runs.starts), before, -1)
    return found


def _changes(runs: RowRuns, codes: Array) -> Array:
    """Flags of the rows whose code differs from the last known one."""
    before = _last_known(runs, codes >= 0)
    found: Array = (codes >= 0) & (before >= 0) & (codes != codes[before])
    return found


def _resizes(runs: RowRuns, total: Array) -> Array:
    """Flags of the rows whose capacity differs from the last known one."""
    before = _last_known(runs, ~np.isnan(total))
    with np.errstate(invalid="ignore"):
        differs = np.abs(total - total[before]) > SAME_SIZE * np.maximum(total, total[before])
    found: Array = differs & (before >= 0)
    return found


def of_split_gpus(rows: pa.Table) -> SpansByGpu:
    """The spans by host, day, and GPU."""
    names = ("mig", "first_ms", "last_ms", "gap_ms", "samples", "profile", "total_mib")
    places = zip(*(rows[name].to_pylist() for name in ("host", "day", "gpu")), strict=True)
    spans = (InstanceSpan(*values) for values in zip(*(rows[name].to_pylist() for name in names), strict=True))
    return by_gpu((host, day, gpu, span) for (host, day, gpu), span in zip(places, spans, strict=True))
