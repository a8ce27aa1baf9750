"""Rows of an imported file that has a column per counter, and no GPU twice at one time: no join is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from almanac.records import Counts
from almanac.units import printable
from telemetry.counters import Counter
from telemetry.sources.exporters import FILE, Gpu, SeriesLabels, UnusableSeriesError, identify, shared_names
from telemetry.sources.unit_limits import within_unit
from telemetry.store.schema import TELEMETRY

_Ints = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]


class Series(NamedTuple):
    """The series number of each row, and each series' labels."""

    codes: _Ints
    labels: list[dict[str, str]]


class CounterColumn(NamedTuple):
    """Values of one counter in its own unit, NaN if it is not a number; and flags of the rows that have a value."""

    counter: Counter
    value: npt.NDArray[np.float64]
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
    arrays: dict[str, pa.Array[Any]] = _labels(found, series.codes, time_ms)
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
    """Whether two usable rows have the same GPU and time."""
    gpus: dict[Gpu, int] = {}
    gpu = np.array([gpus.setdefault(one.gpu, len(gpus)) if one else -1 for one in found.known], dtype=np.int64)[codes]
    key = np.stack([gpu, time_ms])[:, gpu >= 0]
    span_ms = int(time_ms.max(initial=0) - time_ms.min(initial=0)) + 1
    if span_ms * len(gpus) >= 2**62:
        return bool(np.unique(key, axis=1).shape[1] < key.shape[1])
    one = np.sort(key[0] * span_ms + (key[1] - time_ms.min(initial=0)))
    return bool((one[1:] == one[:-1]).any())


def _labels(found: _Identified, codes: _Ints, time_ms: _Ints) -> dict[str, pa.Array[Any]]:
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
