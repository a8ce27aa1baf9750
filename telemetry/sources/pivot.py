"""Samples of many series and counters into one row per GPU and timestamp.

An exporter exposes all counters of a GPU in one scrape, which Prometheus stamps with one time: an outer join on GPU
and millisecond puts a scrape together again. A row's key is one int64, (GPU code << 42) + ms since the span's start.

Several Prometheus servers may scrape a GPU, or one server twice: each scrape counts once (`series.copies`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from almanac.records import Counts
from almanac.units import printable
from telemetry.counters import COUNTERS, PARTS, Counter
from telemetry.sources.exporters import FILE, Exporter, Metric
from telemetry.sources.prometheus_json import SeriesSamples
from telemetry.sources.series import (
    MAX_JOB_ID,
    NEAR,
    Gpu,
    Replica,
    SeriesLabels,
    UnusableSeriesError,
    copies,
    identify,
    replica_of,
    shared_names,
    within_unit,
)
from telemetry.store.schema import TELEMETRY

_Ints = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]
_SHIFT = 42
_Doubles = npt.NDArray[np.float64]
_TORN = -1
_JOB = Metric("job_label", Counter("job_label", "job id", "", 0, MAX_JOB_ID))


LabelKey = tuple[str, ...]
"""The labels of a series without its name: their names, then their values."""
_UNUSABLE = (-1, -1, 0, 0)


def _key(labels: Mapping[str, str]) -> LabelKey:
    if "__name__" in labels:
        labels = {name: value for name, value in labels.items() if name != "__name__"}
    return (*labels, *labels.values())


class _Codes(NamedTuple):
    """Of each series: GPU (-1: none), device (-1: unknown), replica, job id (0: none), and why it has no GPU."""

    gpu: _Ints
    device: _Ints
    replica: _Ints
    job: _Ints
    unusable: dict[int, str]


class _Points(NamedTuple):
    """Samples that can be used, sorted by key, each key once; `series` numbers the series of each."""

    key: _Ints
    value: _Doubles
    series: _Ints


class Pivot:
    """The rows of one span [start_ms, end_ms). `counts` is in samples: one value of one counter at one time.

    refuse: given a host, why its series are left out, or an empty text.
    """

    def __init__(
        self,
        exporter: Exporter,
        host_suffix: str,
        start_ms: int,
        end_ms: int,
        counts: Counts,
        refuse: Callable[[str], str] = lambda host: "",
    ) -> None:
        if end_ms - start_ms >= 1 << _SHIFT:
            raise ValueError(f"a span of {end_ms - start_ms} ms is too long for one table")
        self._exporter, self._host_suffix, self._refuse, self.counts = exporter, host_suffix, refuse, counts
        self._start_ms, self._end_ms = start_ms, end_ms
        self._gpus: dict[Gpu, int] = {}
        self._devices: dict[tuple[str, str, str], int] = {}
        self._replicas: dict[Replica, int] = {}
        self._known_labels = exporter.own_labels
        self._keys: list[_Ints] = []
        self._columns: dict[str, tuple[_Ints, npt.NDArray[np.floating]]] = {}
        self._device_of: list[tuple[_Ints, _Ints]] = []
        self._replica_of: list[tuple[_Ints, _Ints]] = []
        self._job_of: list[tuple[_Ints, _Ints]] = []
        self._flag_key = self._flag_job = np.empty(0, dtype=np.int64)
        self._bad_labels: set[str] = set()
        self._apart: frozenset[str] = frozenset()
        self._known: dict[LabelKey, tuple[int, int, int, int] | str] = {}
        self.newest_ms = start_ms
        """Time of the newest sample of the span, kept or not."""

    def add(self, metric: Metric, samples: SeriesSamples) -> None:
        """Take all samples of one metric. Of two metrics of one counter, the first one taken counts."""
        codes = self._identify(samples)
        points = self._accept(samples, codes, metric)
        key, is_new = self._shared(points.key)
        if is_new:
            self._device_of.append((key, codes.device[points.series]))
            self._replica_of.append((key, codes.replica[points.series]))
            self._job_of.append((key, codes.job[points.series]))
        column = metric.counter.column
        narrow = column not in TELEMETRY.names or TELEMETRY.field(column).type == pa.float32()
        value: npt.NDArray[np.floating] = points.value.astype(np.float32) if narrow else points.value
        self._columns[column] = self._beside(column, key, value) if column in self._columns else (key, value)

    def _beside(
        self, column: str, key: _Ints, value: npt.NDArray[np.floating]
    ) -> tuple[_Ints, npt.NDArray[np.floating]]:
        """The samples of a column, its gaps filled from another name of its counter."""
        known_key, known = self._columns[column]
        both = _union([known_key, key])
        twice = len(known_key) + len(key) - len(both)
        self.counts.kept -= twice
        self.counts.drop("counter given under two names", twice, column)
        first = _align(both, known_key, known)
        return self._shared(both)[0], np.where(np.isnan(first), _align(both, key, value), first)

    def add_jobs(self, samples: SeriesSamples) -> None:
        """Take the samples of a metric whose value is the job id (jobstats), or 1 while its job runs (CEEMS)."""
        if self._exporter.job_flag:
            self._add_flags(samples)
            return
        points = self._accept(samples, self._identify(samples), _JOB)
        self._job_of.append((points.key, points.value.astype(np.int64)))

    def _add_flags(self, samples: SeriesSamples) -> None:
        """Take flags of jobs, which have scrapes of their own. A GPU with two jobs at one time has none then."""
        codes, series = self._identify(samples), np.repeat(np.arange(len(samples.labels)), samples.lengths)
        time_ms, gpu = samples.time_ms, codes.gpu[series]
        keep = (gpu >= 0) & (samples.value > 0) & (time_ms >= self._start_ms) & (time_ms < self._end_ms)
        key, job = (gpu[keep] << _SHIFT) + time_ms[keep] - self._start_ms, codes.job[series[keep]]
        self._flag_key, first, number = np.unique(key, return_index=True, return_counts=True)
        self._flag_job = np.where(number > 1, 0, job[first])

    def _flagged(self, key: _Ints) -> _Ints:
        """The job of the nearest flag of each row's GPU, at most 0.75 of the flags' interval away; 0 for none."""
        flags, near_ms = self._flag_key, NEAR * float(np.median(np.diff(self._flag_key)))
        found, least = np.zeros(len(key), dtype=np.int64), np.full(len(key), near_ms)
        after = np.searchsorted(flags, key)
        for at in (np.maximum(after - 1, 0), np.minimum(after, len(flags) - 1)):
            distance = np.where(flags[at] >> _SHIFT == key >> _SHIFT, np.abs(flags[at] - key), np.inf)
            found, least = np.where(distance < least, self._flag_job[at], found), np.minimum(distance, least)
        return found

    def table(self, more: Sequence[str] = ()) -> pa.Table:
        """The rows, sorted by host, gpu, mig and time; those without any value are left out.

        more: counters that are not stored, as columns behind those of the table.
        """
        key = self._scrapes()
        self._complete_memory(key)
        gpus = sorted(self._gpus)
        rank = _rank(self._gpus)
        take = np.argsort(rank[key >> _SHIFT], kind="stable")
        gpu = rank[key >> _SHIFT][take]
        device, devices = _place(key, self._device_of, -1)[take], list(self._devices)
        flags = [(key, self._flagged(key))] if len(self._flag_key) > 1 else []
        job = _place(key, [*self._job_of, *flags], 0)[take]
        columns: dict[str, pa.Array[Any]] = {
            "host": _spread([one.host for one in gpus], gpu),
            "gpu": pa.array(np.array([one.gpu for one in gpus], dtype=np.int16)[gpu]),
            "mig": _spread([one.mig for one in gpus], gpu),
            "time_ms": pa.array((key[take] & ((1 << _SHIFT) - 1)) + self._start_ms),
            "uuid": _spread([uuid or None for uuid, _, _ in devices], device),
            "model": _spread([model or None for _, model, _ in devices], device),
            "job_label": pa.array(job, mask=job <= 0),
            "mig_profile": _spread([profile or None for _, _, profile in devices], device),
        }
        for counter in COUNTERS:
            columns[counter.column] = self._values(counter.column, key, take)
        found = pa.Table.from_arrays([columns[name] for name in TELEMETRY.names], schema=TELEMETRY)
        for name in more:
            found = found.append_column(name, pa.array(self._at(name, key)[take], pa.float64()))
        return found

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Every GPU that a series named so far."""
        return tuple(self._gpus)

    def median_gaps_s(self, most_gpus: int = 256) -> _Doubles:
        """The median gap between samples, s, of each of up to `most_gpus` GPUs that have two samples or more."""
        key = self._scrapes()
        first = np.flatnonzero(np.diff(key >> _SHIFT, prepend=-1))
        spans = list(zip(first, [*first[1:], len(key)], strict=False))[:: max(1, len(first) // most_gpus)]
        return np.array([np.median(np.diff(key[a:b])) / 1000 for a, b in spans if b - a > 1], dtype=np.float64)

    def _scrapes(self) -> _Ints:
        """The key of every row. Copies from further Prometheus servers are dropped from all columns."""
        key = _union([key for key, _ in self._columns.values()])
        if len(self._replicas) < 2:
            return key
        replica = _rank(self._replicas)[_place(key, self._replica_of, -1)]
        time_ms = (key & ((1 << _SHIFT) - 1)) + self._start_ms
        copied = copies(key >> _SHIFT, time_ms, replica, (self._start_ms, self._end_ms))
        if not copied.any():
            return key
        left = {id(own): ~copied[np.searchsorted(key, own)] for own, _ in self._columns.values()}
        keys = {id(own): own[left[id(own)]] for own, _ in self._columns.values()}
        for column, (own, value) in self._columns.items():
            self._columns[column] = (keys[id(own)], value[left[id(own)]])
            self.counts.kept -= len(own) - len(keys[id(own)])
            self.counts.drop("scraped by a second Prometheus", len(own) - len(keys[id(own)]))
        return _union(list(keys.values()))

    def _identify(self, samples: SeriesSamples) -> _Codes:
        keys = [_key(labels) for labels in samples.labels]
        known = [self._known.get(key) for key in keys]
        if None in known:
            if not self._host_suffix:
                self._keep_apart(shared_names(samples.labels, self._exporter))
            pairs = zip(keys, samples.labels, strict=True)
            known = [self._known.get(key) or self._learn(key, each) for key, each in pairs]
        rows = [each if isinstance(each, tuple) else _UNUSABLE for each in known]
        gpu, device, replica, job = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        return _Codes(gpu, device, replica, job, {at: each for at, each in enumerate(known) if isinstance(each, str)})

    def _learn(self, key: LabelKey, labels: dict[str, str]) -> tuple[int, int, int, int] | str:
        """The numbers of _Codes, found once for all counters of a GPU; why the series is not used."""
        try:
            series = identify(labels, self._exporter, self._host_suffix, self._apart)
            if reason := self._refuse(series.gpu.host):
                raise UnusableSeriesError(reason)
        except UnusableSeriesError as error:
            self._known[key] = str(error)
            return self._known[key]
        named, replica = (series.uuid, series.model, series.profile), replica_of(labels, self._known_labels)
        self._known[key] = (
            self._gpus.setdefault(series.gpu, len(self._gpus)),
            self._devices.setdefault(named, len(self._devices)) if any(named) else -1,
            self._replicas.setdefault(replica, len(self._replicas)),
            series.job_id or 0,
        )
        self._note_bad_label(series)
        return self._known[key]

    def _keep_apart(self, shared: frozenset[str]) -> None:
        """Let hosts of these short names keep their domain, and note this once per span."""
        if new := shared - self._apart:
            names = printable(", ".join(sorted(new)[:4]))
            self.counts.note("with its domain: several hosts share the short name", len(new), names)
            self._apart |= shared
            self._known.clear()

    def _note_bad_label(self, series: SeriesLabels) -> None:
        """A label that is no job id, once per span: its samples are kept without a job."""
        if series.bad_job_label and series.bad_job_label not in self._bad_labels:
            self._bad_labels.add(series.bad_job_label)
            self.counts.note("job label is no job id", 1, printable(series.bad_job_label, 60))

    def _accept(self, samples: SeriesSamples, codes: _Codes, metric: Metric) -> _Points:
        """The samples that can be used; the others are counted, but for those outside the span, which are others'."""
        series = np.repeat(np.arange(len(samples.labels)), samples.lengths)
        inside = (samples.time_ms >= self._start_ms) & (samples.time_ms < self._end_ms)
        time_ms, value, series = samples.time_ms[inside], samples.value[inside] * metric.scale, series[inside]
        self.counts.seen += len(value)
        self.newest_ms = int(time_ms.max(initial=self.newest_ms))
        for at, reason in codes.unusable.items():
            self.counts.drop(reason, int(np.sum(series == at)), printable(str(samples.labels[at])))
        keep = within_unit(metric, value, series, codes.gpu[series] >= 0, self.counts)
        key = (codes.gpu[series[keep]] << _SHIFT) + (time_ms[keep] - self._start_ms)
        points = self._unique(
            _Points(key, np.minimum(value[keep], metric.counter.high), series[keep]), codes.job, samples.labels
        )
        self.counts.kept += len(points.key)
        return points

    def _unique(self, points: _Points, jobs: _Ints, labels: Sequence[dict[str, str]]) -> _Points:
        """Sorted by key, with the greatest value of equal keys. A GPU labeled with two jobs at once gets no job."""
        key, value, series = points
        if not (key[1:] > key[:-1]).all():
            order = np.lexsort((-value, key))
            key, value, series = key[order], value[order], series[order]
        again = np.flatnonzero(key[1:] == key[:-1]) + 1
        if not len(again):
            return _Points(key, value, series)
        torn = again[jobs[series[again]] != jobs[series[again - 1]]]
        self._job_of.insert(0, (key[torn], np.full(len(torn), _TORN)))
        example = printable(str(labels[int(series[again[0]])]))
        self.counts.drop("several jobs on one GPU at once", len(torn), example)
        self.counts.drop("sample given twice", len(again) - len(torn), example)
        keep = np.ones(len(key), dtype=bool)
        keep[again] = False
        return _Points(key[keep], value[keep], series[keep])

    def _shared(self, key: _Ints) -> tuple[_Ints, bool]:
        """One array for the counters of the same scrapes, and whether it is new: seventeen counters share one."""
        for known in self._keys:
            if np.array_equal(known, key):
                return known, False
        self._keys.append(key)
        return key, True

    def _complete_memory(self, key: _Ints) -> None:
        """Compute a missing hbm_total_mib or hbm_used_mib: total = used + free + reserved."""
        free, reserved, share = (self._columns.pop(part.column, (key[:0], np.empty(0))) for part in PARTS)
        if len(share[0]):
            used, total = (self._at(column, key) for column in ("hbm_used_mib", "hbm_total_mib"))
            self._columns["hbm_used_mib"] = key, np.where(np.isnan(used), _align(key, *share) / 100 * total, used)
        if not len(free[0]):
            return
        unused, kept_back = _align(key, *free), _align(key, *reserved)
        used, total = (self._at(column, key) for column in ("hbm_used_mib", "hbm_total_mib"))
        if len(reserved[0]):
            in_use = total - unused - kept_back
            self._columns["hbm_used_mib"] = key, np.where(np.isnan(used) & (in_use >= 0), in_use, used)
        made = used + unused + np.nan_to_num(kept_back)
        limits = FILE.named["hbm_total_mib"].counter
        wrong = np.isnan(total) & ((made < limits.low) | (made > limits.high))
        made[wrong] = np.nan
        self.counts.kept -= int(wrong.sum())
        self.counts.drop("unit mismatch: hbm_total_mib", int(wrong.sum()))
        self._columns["hbm_total_mib"] = key, np.where(np.isnan(total), made, total)

    def _at(self, column: str, key: _Ints) -> npt.NDArray[np.floating]:
        """The values of a column at the keys; NaN for a missing value."""
        if column not in self._columns:
            return np.full(len(key), np.nan, dtype=np.float32)
        return _align(key, *self._columns[column])

    def _values(self, column: str, key: _Ints, take: _Ints) -> pa.Array[Any]:
        kind = TELEMETRY.field(column).type
        values: pa.Array[Any] = pa.nulls(len(key), kind)
        if column in self._columns:
            values = pa.array(self._at(column, key)[take], kind, from_pandas=True)
        return values


def _rank(codes: Mapping[Any, int]) -> _Ints:
    """The place of each code in the order of the values that the codes stand for."""
    return np.argsort(np.array([codes[one] for one in sorted(codes)], dtype=np.int64))


def _align(key: _Ints, own: _Ints, value: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """The values, given for the keys `own`, at the keys `key`; NaN where there is none. Both sorted and unique."""
    if own is key:
        return value
    aligned = np.full(len(key), np.nan, dtype=value.dtype)
    at = np.searchsorted(key, own)
    found = at < len(key)
    found[found] = key[at[found]] == own[found]
    aligned[at[found]] = value[found]
    return aligned


def _union(keys: Sequence[_Ints]) -> _Ints:
    """The sorted keys that are in any of the arrays, which are sorted and unique themselves."""
    distinct = list({id(key): key for key in keys}.values())
    if len(distinct) == 1:
        return distinct[0]
    return np.unique(np.concatenate(distinct)) if distinct else np.empty(0, dtype=np.int64)


def _place(key: _Ints, codes: Sequence[tuple[_Ints, _Ints]], missing: int) -> _Ints:
    """The code of each key: the first that is not `missing` of those given for it."""
    placed = np.full(len(key), missing, dtype=np.int64)
    for own, code in codes:
        if own is key:
            placed[:] = np.where(placed == missing, code, placed)
            continue
        at = np.searchsorted(key, own)
        found = at < len(key)
        found[found] = key[at[found]] == own[found]
        at, code = at[found], code[found]
        placed[at] = np.where(placed[at] == missing, code, placed[at])
    return placed


def _spread(values: Sequence[str | None], code: _Ints) -> pa.Array[Any]:
    """The string of each code; null for -1."""
    texts: pa.Array[Any] = pa.array([*values, None], pa.string()).take(code % (len(values) + 1))
    return texts
