"""What the telemetry of a span holds: its GPUs, and how often they were scraped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.attribution.allocations import Inventory
from telemetry.attribution.host_names import HostNames
from telemetry.metrics.chunks import each_chunk
from telemetry.metrics.hours import DAY_MS, HOUR_MS, Files, Hour, MisplacedError, each_hour
from telemetry.metrics.runs import RowRuns
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
        "interval_ms": pa.float64(),
        "is_steady": pa.bool_(),
        "gaps_ms": pa.list_(pa.int64()),
    }
)
_KEYS = ["host", "gpu", "mig", "day"]


@dataclass(frozen=True)
class Survey:
    """units: one row per host, gpu, mig and day (days since 1970): model, total_mib; counted: samples of the span.

    chunks: the files, with a mark on those that are not sorted. nodes: see Files; empty before `named`. unclear: hosts
    that may be one of several nodes, or that share one with other hosts.
    """

    chunks: list[Files]
    units: pa.Table
    intervals: Intervals
    nodes: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    unclear: frozenset[str] = frozenset()

    @property
    def counted(self) -> int:
        return int(self.units["counted"].to_numpy().sum())

    def inventory(self) -> Inventory:
        found: dict[tuple[str, int], set[tuple[int, str]]] = defaultdict(set)
        columns = (self.units[name].to_pylist() for name in ("host", "day", "gpu", "mig"))
        for host, day, gpu, mig in zip(*columns, strict=True):
            found[host, day].add((gpu, mig))
        return Inventory({key: frozenset(units) for key, units in found.items()})

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
        renamed = pa.array([nodes.get(day, {}).get(host, host) for host, day in self._places()], pa.string())
        chunks = []
        for files in self.chunks:
            days = {day for day in nodes if day * DAY_MS < files.until_ms and (day + 1) * DAY_MS > files.from_ms}
            is_sorted = files.is_sorted and not days & merged
            chunks.append(replace(files, nodes={day: nodes[day] for day in days}, is_sorted=is_sorted))
        units = _by_unit(self.units.set_column(0, "host", renamed))
        intervals = self.intervals.named(nodes)
        return replace(self, chunks=chunks, units=units, intervals=intervals, nodes=nodes, unclear=unclear)


def survey(db: duckdb.DuckDBPyConnection, chunks: Sequence[Files], counted_ms: tuple[int, int]) -> Survey:
    """Survey telemetry files, and count the samples of the span counted_ms.

    Raises duckdb.Error, pa.ArrowException, or OSError if a file cannot be read.
    """

    def look(db: duckdb.DuckDBPyConnection, files: Files) -> tuple[Files, list[pa.Table]]:
        try:
            return files, each_hour(db, files, lambda hour: _look(hour, counted_ms))
        except MisplacedError:
            return look(db, replace(files, is_sorted=False))

    found = list(each_chunk(db, chunks, look))
    hours = pa.concat_tables([UNITS.empty_table(), *chain.from_iterable(tables for _, tables in found)])
    return Survey([files for files, _ in found], _by_unit(hours), intervals_of(hours))


def _by_unit(rows: pa.Table) -> pa.Table:
    """One row per GPU and day, sorted."""
    made = rows.group_by(_KEYS).aggregate([("model", "max"), ("total_mib", "max"), ("counted", "sum")])
    return made.rename_columns([*_KEYS, "model", "total_mib", "counted"]).sort_by(
        [(name, "ascending") for name in _KEYS]
    )


def _look(hour: Hour, counted_ms: tuple[int, int]) -> pa.Table:
    """One row per GPU of an hour."""
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
        "total_mib": pa.nulls(number) if total is None else pa.array(runs.max(total.to_numpy()), from_pandas=True),
        "counted": counted,
        "interval_ms": interval_ms,
        "is_steady": is_steady,
        "gaps_ms": pooled_gaps_ms(runs, time_ms, is_steady),
    }
    return pa.table(columns).cast(UNITS)


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
