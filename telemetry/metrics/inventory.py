"""The content of a span's telemetry: its GPUs, how often they were scraped, and when each MIG instance was seen.

The spans of an instance are cut at the time at which it became another one. Its capacity is its memory in use and its
free memory together (FB_USED + FB_FREE), so without what the driver reserves for itself (FB_RESERVED), as for a whole
GPU. Its nominal name is no capacity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.attribution.allocations import HostNames
from telemetry.attribution.seen_units import LONGEST_PAUSE, SAME_SIZE, InstanceSpan, Inventory, SpansByGpu, by_gpu
from telemetry.metrics.arrays import DAY_MS, HOUR_MS, Array, Files, Hour, MisplacedError, RowRuns, each_hour
from telemetry.metrics.partials import each_chunk
from telemetry.metrics.samples import Units
from telemetry.metrics.scrapes import Intervals, hour_intervals, intervals_of, pooled_gaps_ms
from telemetry.store.schema import schema_of

SPANS = schema_of(
    "host string, gpu int16, mig string, day int64, first_ms int64, last_ms int64, gap_ms double, samples int64, "
    "profile string, total_mib double"
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


UNITS = schema_of(
    "host string, gpu int16, mig string, day int64, hour_ms int64, model string, total_mib float, counted int64, "
    "samples int64, first_ms int64, last_ms int64, interval_ms double, is_steady bool"
).append(pa.field("gaps_ms", pa.list_(pa.int64())))
_KEYS = ["host", "gpu", "mig", "day"]


@dataclass(frozen=True)
class Survey:
    """The GPUs and MIG instances that telemetry shows in a span, with their scrape intervals.

    units: one row per host, gpu, mig, and day (days since 1970): model, total_mib; counted: samples of the span. split:
    when each unit of the GPUs with MIG instances was seen, and as what; see `instance_spans`. chunks: the files, with a
    mark on those that are not sorted. nodes: see Files; empty before `named`. unclear: hosts that may be one of several
    nodes, or that share one with other hosts.
    """

    chunks: list[Files]
    units: pa.Table
    intervals: Intervals
    split: pa.Table = field(default_factory=SPANS.empty_table)
    nodes: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    unclear: frozenset[str] = frozenset()

    @property
    def counted(self) -> int:
        return int(self.units["counted"].to_numpy().sum())

    def inventory(self) -> Inventory:
        return self._inventory

    @cached_property
    def _inventory(self) -> Inventory:
        found: dict[tuple[str, int], set[tuple[int, str]]] = defaultdict(set)
        columns = (self.units[name].to_pylist() for name in ("host", "day", "gpu", "mig"))
        for host, day, gpu, mig in zip(*columns, strict=True):
            found[host, day].add((gpu, mig))
        return Inventory({key: frozenset(units) for key, units in found.items()}, spans=of_split_gpus(self.split))

    def hosts(self) -> dict[int, set[str]]:
        """The hosts with samples, by day since 1970."""
        found: dict[int, set[str]] = defaultdict(set)
        columns: list[list[Any]] = [self.units[name].to_pylist() for name in ("host", "day")]
        for host, day in zip(*columns, strict=True):
            found[day].add(host)
        return found

    def named(self, names: Mapping[int, HostNames]) -> Survey:
        """A copy with the host names of Slurm. If two hosts are one node, their samples are sorted together."""
        nodes = {day: of_day.nodes for day, of_day in names.items() if of_day.nodes}
        unclear = frozenset[str]().union(*(of_day.unclear for of_day in names.values()))
        if not nodes:
            return replace(self, unclear=unclear)
        hosts = self.hosts()
        merged = {day for day in nodes if len({nodes[day].get(host, host) for host in hosts[day]}) < len(hosts[day])}
        chunks = []
        for files in self.chunks:
            days = {day for day in nodes if day * DAY_MS < files.until_ms and (day + 1) * DAY_MS > files.from_ms}
            is_sorted = files.is_sorted and not days & merged
            chunks.append(replace(files, nodes={day: nodes[day] for day in days}, is_sorted=is_sorted))
        return replace(
            self,
            chunks=chunks,
            units=_by_unit(_renamed(self.units, nodes)),
            intervals=self.intervals.named(nodes),
            split=_renamed(self.split, nodes),
            nodes=nodes,
            unclear=unclear,
        )


def survey(db: duckdb.DuckDBPyConnection, chunks: Sequence[Files], counted_ms: tuple[int, int]) -> Survey:
    """Survey telemetry files, and count the samples of the span counted_ms.

    Raises duckdb.Error, pa.ArrowException, or OSError if a file cannot be read.
    """

    def look(db: duckdb.DuckDBPyConnection, files: Files) -> tuple[Files, list[_Look]]:
        try:
            return files, each_hour(db, files, lambda hour: _look(hour, counted_ms))
        except MisplacedError:
            return look(db, replace(files, is_sorted=False))

    found = list(each_chunk(db, chunks, look))
    looks = list(chain.from_iterable(of_files for _, of_files in found))
    hours = pa.concat_tables([UNITS.empty_table(), *(look.units for look in looks)])
    split = pa.concat_tables([SPANS.empty_table(), *(look.spans for look in looks if look.spans is not None)])
    return Survey([files for files, _ in found], _by_unit(hours), intervals_of(hours), _with_whole(split, hours))


@dataclass(frozen=True)
class _Look:
    """The units of an hour, and the spans of its MIG instances; None without any."""

    units: pa.Table
    spans: pa.Table | None


def _with_whole(split: pa.Table, hours: pa.Table) -> pa.Table:
    """Spans of MIG instances, with those of the same GPUs as a whole, one an hour."""
    if not split.num_rows:
        return split
    names = [name for name in SPANS.names if name in UNITS.names]
    whole = hours.select([*names, "interval_ms"]).filter(pc.field("mig") == "")
    keys = ["host", "gpu", "day"]
    whole = whole.join(split.select(keys).group_by(keys).aggregate([]), keys, join_type="left semi")
    columns: dict[str, Any] = {name: whole[name] for name in names}
    columns["gap_ms"] = pc.if_else(pc.is_valid(whole["interval_ms"]), whole["interval_ms"], 0.0)
    columns["profile"] = pa.nulls(whole.num_rows, pa.string())
    return pa.concat_tables([split, pa.table(columns).select(SPANS.names).cast(SPANS)])


def _renamed(rows: pa.Table, nodes: Mapping[int, Mapping[str, str]]) -> pa.Table:
    """Rows with a host and a day, with Slurm's names of hosts."""
    columns: list[list[Any]] = [rows[name].to_pylist() for name in ("host", "day")]
    named = [nodes.get(day, {}).get(host, host) for host, day in zip(*columns, strict=True)]
    return rows.set_column(0, "host", pa.array(named, pa.string()))


def _by_unit(rows: pa.Table) -> pa.Table:
    """One row per GPU and day, sorted."""
    made = rows.group_by(_KEYS).aggregate([("model", "max"), ("total_mib", "max"), ("counted", "sum")])
    return made.rename_columns([*_KEYS, "model", "total_mib", "counted"]).sort_by(
        [(name, "ascending") for name in _KEYS]
    )


def _look(hour: Hour, counted_ms: tuple[int, int]) -> _Look:
    """One row per GPU of an hour, and the spans of its MIG instances."""
    units = Units.of(hour)
    runs, time_ms = units.runs, units.time_ms
    counted = runs.lengths
    if hour.start_ms < counted_ms[0] or hour.start_ms + HOUR_MS > counted_ms[1]:
        counted = runs.sum((time_ms >= counted_ms[0]) & (time_ms < counted_ms[1]))
    interval_ms, is_steady = hour_intervals(runs, time_ms)
    total = hour.read("hbm_total_mib")
    number = len(runs.starts)
    columns: dict[str, Any] = {
        "host": units.host,
        "gpu": units.gpu,
        "mig": units.mig,
        "day": np.full(number, hour.start_ms // DAY_MS),
        "hour_ms": np.full(number, hour.start_ms),
        "model": _model(hour, runs),
        "total_mib": pa.nulls(number) if total is None else _typical(runs, total.to_numpy()),
        "counted": counted,
        "samples": runs.lengths,
        "first_ms": runs.first(time_ms),
        "last_ms": runs.last(time_ms),
        "interval_ms": interval_ms,
        "is_steady": is_steady,
        "gaps_ms": pooled_gaps_ms(runs, time_ms, is_steady),
    }
    return _Look(pa.table(columns).cast(UNITS), spans_of(hour, units))


def _typical(runs: RowRuns, total: Array) -> pa.Array[Any]:
    """The capacity of each run: its median, as one torn scrape can say anything. Most runs never differ."""
    found = runs.max(total)
    places, some = runs.where(runs.spread(found > runs.min(total)))
    if len(places):
        found[places] = medians(some, total[runs.spread(np.isin(np.arange(len(found)), places))].astype(np.float64))
    typical: pa.Array[Any] = pa.array(found, from_pandas=True)
    return typical


def _model(hour: Hour, runs: RowRuns) -> pa.Array[Any]:
    """The model that each GPU's samples name; the last by the alphabet where there are several."""
    model = hour.text("model")
    if not len(model):
        return pa.nulls(len(runs.starts), pa.string())
    names = pc.sort_indices(model.dictionary)
    rank = np.append(np.argsort(names.to_numpy()), -1)  # the last one for null, whose code is -1
    found = runs.max(rank[model.indices.fill_null(-1).to_numpy()])
    named: pa.Array[Any] = model.dictionary.take(names).take(pa.array(found, pa.int64(), mask=found < 0))
    return named
