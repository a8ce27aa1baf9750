"""What the telemetry of a span holds: its GPUs, and how often they were scraped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.attribution.host_names import HostNames
from telemetry.attribution.seen_units import Inventory
from telemetry.metrics.chunks import each_chunk
from telemetry.metrics.hours import DAY_MS, HOUR_MS, Files, Hour, MisplacedError, each_hour
from telemetry.metrics.instance_spans import SPANS, medians, of_split_gpus, spans_of
from telemetry.metrics.runs import Array, RowRuns
from telemetry.metrics.samples import Units
from telemetry.metrics.scrapes import Intervals, hour_intervals, intervals_of, pooled_gaps_ms
from telemetry.store.schema import schema_of

UNITS = schema_of(
    {
        "host": pa.string(),
        "gpu": pa.int16(),
        "mig": pa.string(),
        "day": pa.int64(),
        "hour_ms": pa.int64(),
        "model": pa.string(),
        "total_mib": pa.float32(),
        "counted": pa.int64(),
        "samples": pa.int64(),
        "first_ms": pa.int64(),
        "last_ms": pa.int64(),
        "interval_ms": pa.float64(),
        "is_steady": pa.bool_(),
        "gaps_ms": pa.list_(pa.int64()),
    }
)
_KEYS = ["host", "gpu", "mig", "day"]


@dataclass(frozen=True)
class Survey:
    """units: one row per host, gpu, mig and day (days since 1970): model, total_mib; counted: samples of the span.

    split: when each unit of the GPUs with MIG instances was seen, and as what; see `instance_spans`.
    chunks: the files, with a mark on those that are not sorted. nodes: see Files; empty before `named`. unclear: hosts
    that may be one of several nodes, or that share one with other hosts.
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
        for host, day in self._places():
            found[day].add(host)
        return found

    def _places(self) -> Iterator[tuple[str, int]]:
        """Host and day of each row of units."""
        columns: list[list[Any]] = [self.units[name].to_pylist() for name in ("host", "day")]
        return zip(*columns, strict=True)

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
