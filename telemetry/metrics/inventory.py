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
from telemetry.metrics.hours import HOUR_MS, Files, Hour, MisplacedError, each_hour
from telemetry.metrics.runs import Array, RowRuns
from telemetry.metrics.samples import Units
from telemetry.store.schema import schema_of

UNITS = schema_of(
    {
        "host": pa.string(),
        "gpu": pa.int16(),
        "mig": pa.string(),
        "day": pa.int64(),
        "model": pa.string(),
        "total_mib": pa.float32(),
        "counted": pa.int64(),
        "gap_ms": pa.float64(),
    }
)
_KEYS = ["host", "gpu", "mig", "day"]
_DAY_MS = 24 * HOUR_MS


@dataclass(frozen=True)
class Intervals:
    """The discovered scrape interval of each day since 1970, s."""

    by_day: Mapping[int, float]

    def expected(self, start_s: int, end_s: int) -> float | None:
        """Samples that one GPU should have in [start_s, end_s); None where no interval is known.

        The median of the other days of the span stands in for a day without an interval.
        """
        days = range(start_s // 86_400, (end_s - 1) // 86_400 + 1)
        known = sorted(self.by_day[day] for day in days if day in self.by_day)
        if not known:
            return None
        total = 0.0
        for day in days:
            seconds = min(end_s, (day + 1) * 86_400) - max(start_s, day * 86_400)
            total += seconds / self.by_day.get(day, known[(len(known) - 1) // 2])
        return total


@dataclass(frozen=True)
class Survey:
    """units: one row per host, gpu, mig and day (days since 1970): model, total_mib; counted: samples of the span.

    chunks: the files, those marked that are not sorted. nodes: see Files; none before `named`. unclear: hosts that may
    be one of several nodes, or that share one with other hosts.
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
        """With hosts named as Slurm names them. Where two hosts are one node, their samples are sorted together."""
        nodes = {day: of_day.nodes for day, of_day in names.items() if of_day.nodes}
        unclear = frozenset[str]().union(*(of_day.unclear for of_day in names.values()))
        if not nodes:
            return replace(self, unclear=unclear)
        hosts = self.hosts()
        merged = {day for day in nodes if len({nodes[day].get(host, host) for host in hosts[day]}) < len(hosts[day])}
        renamed = pa.array([nodes.get(day, {}).get(host, host) for host, day in self._places()], pa.string())
        chunks = []
        for files in self.chunks:
            days = {day for day in nodes if day * _DAY_MS < files.until_ms and (day + 1) * _DAY_MS > files.from_ms}
            is_sorted = files.is_sorted and not days & merged
            chunks.append(replace(files, nodes={day: nodes[day] for day in days}, is_sorted=is_sorted))
        units = _by_unit(self.units.set_column(0, "host", renamed))
        return replace(self, chunks=chunks, units=units, nodes=nodes, unclear=unclear)


def survey(db: duckdb.DuckDBPyConnection, chunks: Sequence[Files], counted_ms: tuple[int, int]) -> Survey:
    """Look through telemetry files, counting samples of the span counted_ms.

    A scrape interval is the median, over GPUs and hours, of the mean distance of samples. Raises duckdb.Error,
    pa.ArrowException or OSError where a file cannot be read.
    """

    def look(db: duckdb.DuckDBPyConnection, files: Files) -> tuple[Files, list[pa.Table]]:
        try:
            return files, each_hour(db, files, lambda hour: _look(hour, counted_ms))
        except MisplacedError:
            return look(db, replace(files, is_sorted=False))

    found = list(each_chunk(db, chunks, look))
    hours = pa.concat_tables([UNITS.empty_table(), *chain.from_iterable(tables for _, tables in found)])
    by_day = dict(_intervals(hours["day"].to_numpy(), hours["gap_ms"].to_numpy()))
    return Survey([files for files, _ in found], _by_unit(hours), Intervals(by_day))


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
    span_ms, steps = runs.last(time_ms) - runs.first(time_ms), runs.lengths - 1
    total = hour.read("hbm_total_mib")
    number = len(runs.starts)
    columns = {
        "host": units.host,
        "gpu": units.gpu,
        "mig": units.mig,
        "day": np.full(number, hour.start_ms // _DAY_MS),
        "model": _model(hour, runs),
        "total_mib": pa.nulls(number) if total is None else pa.array(runs.max(total.to_numpy()), from_pandas=True),
        "counted": counted,
        "gap_ms": np.divide(span_ms, steps, out=np.full(number, np.nan), where=steps > 0),
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


def _intervals(day: Array, gap_ms: Array) -> list[tuple[int, float]]:
    """Day and median of its gaps, s."""
    known = gap_ms > 0
    day, gap_ms = day[known], gap_ms[known]
    order = np.lexsort((gap_ms, day))
    days = RowRuns.of(day[order])
    median = gap_ms[order][days.starts + (days.lengths - 1) // 2] / 1000
    return list(zip(days.first(day[order]).tolist(), median.tolist(), strict=True))
