"""The generated site as a source, like sacct and Prometheus on a real one: its job table, and telemetry by the hour.

Its telemetry has faults: lost scrapes, and energy counters that start again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from almanac.records import Counts
from demo.shape import GPUS_PER_NODE, Arrays, Bools, Floats, Ints, SiteShape
from demo.signals import IDLE_W, Columns, Words, make_signals, mix, sample_columns
from demo.site import SitePlan, jobs_table, plan_site
from demo.users import MIB_40, MIB_80
from telemetry.sources.source import RowBatch
from telemetry.store.schema import TELEMETRY

HOUR_MS = 3_600_000
_OUTAGE_MS = 600_000


def lost_rows(shape: SiteShape, hour: int, node: Ints, times_ms: Ints) -> Bools:
    """Rows whose host was not scraped: one scrape, or ten minutes in a row. All GPUs of a host share that fate."""
    begin_ms, interval_ms = shape.start_s * 1000 + hour * HOUR_MS, shape.interval_s * 1000
    ticks = -(-HOUR_MS // interval_ms) + 1
    host = mix(np.arange(shape.node_count, dtype=np.uint64) + np.uint64(shape.seed * 7_777_777))
    tick = mix(np.arange(ticks, dtype=np.uint64) + np.uint64(hour * ticks))
    table = _chance(host[:, None] ^ tick[None, :]) < shape.faults.missing_share
    is_out = _chance(host + np.uint64(hour)) < shape.faults.outage_per_host_hour
    table[is_out, ticks // 3 : ticks // 3 + _OUTAGE_MS // interval_ms] = True
    lost: Bools = table.reshape(-1)[node * ticks + (times_ms - begin_ms) // interval_ms]
    return lost


def _chance(words: Words) -> Floats:
    """A number in [0, 1) for each word."""
    return (mix(words) >> np.uint64(11)).astype(float) * 2.0**-53


def driver_reloads(shape: SiteShape, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Return (node, time in ms) of each reload of a driver, in order of time."""
    number = rng.poisson(shape.faults.energy_reset_per_host_day * shape.days * shape.node_count)
    nodes = rng.integers(0, shape.node_count, number)
    times_ms = np.sort(rng.integers(shape.start_s * 1000, shape.end_s * 1000, number))
    return list(zip(nodes.tolist(), times_ms.tolist(), strict=True))


def restart_energy(reloads: list[tuple[int, int]], node: Ints, starts: Ints, energy: Floats, times_ms: Ints) -> None:
    """Takes from each counter what it held when its driver was loaded again, in place.

    node, starts: of each GPU, its node and its first sample in energy and times_ms.
    """
    ends = np.append(starts[1:], len(energy))
    for reloaded, at_ms in reloads:
        for n in np.flatnonzero(node == reloaded):
            part = slice(starts[n], ends[n])
            after = int(np.searchsorted(times_ms[part], at_ms))
            if 0 < after < ends[n] - starts[n] and times_ms[starts[n]] <= at_ms:
                energy[part][after:] -= energy[part][after - 1]


_MODELS = ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB")


def generate_jobs(shape: SiteShape) -> pa.Table:
    """Accounting at the end of the span, columns of schema JOBS."""
    return jobs_table(plan_site(shape))


@dataclass(frozen=True)
class GeneratedSource:
    """The site of `shape`. Reading a span again gives the same rows."""

    shape: SiteShape
    name = "generated"

    @cached_property
    def plan(self) -> SitePlan:
        return plan_site(self.shape)

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        """Yield the jobs that touch the span, as accounting has them at until_s; then the telemetry, hour by hour."""
        until_s = min(until_s, self.shape.end_s)
        rows = jobs_table(self.plan, until_s)
        yield _batch("jobs", rows.filter((pc.field("end_s") >= since_s) | pc.field("end_s").is_null()), None)
        for end_s, table in telemetry_by_hour(self.plan, since_s, until_s):
            if len(table) or end_s == until_s:
                yield _batch("telemetry", table, end_s)


def _batch(table: str, rows: pa.Table, watermark_s: int | None) -> RowBatch:
    return RowBatch(table, rows, Counts(seen=len(rows), kept=len(rows)), watermark_s)


def telemetry_by_hour(plan: SitePlan, since_s: int, until_s: int) -> Iterator[tuple[int, pa.Table]]:
    """(end of the hour in s, rows of [since_s, until_s) in it, columns of schema TELEMETRY), hour by hour.

    Rows are in order of host, gpu, mig and time_ms; hours without rows give empty tables.
    """
    maker = _TelemetryMaker(plan)
    shape = plan.shape
    for hour in range(-(-(shape.end_s - shape.start_s) // 3600)):
        begin_s, end_s = shape.start_s + hour * 3600, shape.start_s + (hour + 1) * 3600
        if begin_s >= until_s:
            return
        if end_s <= since_s:
            maker.skip(hour)
            continue
        table = maker.hour(hour)
        if begin_s < since_s or end_s > until_s:
            times_ms = table["time_ms"].to_numpy()
            table = table.filter(pa.array((times_ms >= since_s * 1000) & (times_ms < until_s * 1000)))
        yield min(end_s, until_s), table


class _TelemetryMaker:
    """Makes the hours of a site in order; the energy counters run through."""

    def __init__(self, plan: SitePlan) -> None:
        shape = plan.shape
        self._shape, self._wanted = shape, frozenset(shape.counters)
        self._interval_ms = shape.interval_s * 1000
        rng = np.random.default_rng([shape.seed, 11])
        each = (shape.node_count, GPUS_PER_NODE)
        self._idle_watts = (IDLE_W + rng.uniform(-4, 4, each)).astype(np.float32)
        self._energy_mj = np.rint(rng.uniform(0, 1e12, each)).reshape(-1)
        self._reloads = driver_reloads(shape, rng)
        self._fixed = _fixed_columns(plan, rng)
        self._signals = make_signals(plan)
        seeds = np.arange(shape.node_count, dtype=np.uint64) + np.uint64(shape.seed * 1_000_003)
        self._offset_ms = (mix(seeds) % np.uint64(self._interval_ms)).astype(np.int64)
        self._holdings = self._held(plan)

    def _tick_at(self, node: Ints, time_ms: Any) -> Ints:
        """The first scrape of each node at or after time_ms: tick m of a node is at m * interval + its offset."""
        ticks: Ints = -((self._offset_ms[node] - time_ms) // self._interval_ms)
        return ticks

    def _held(self, plan: SitePlan) -> Arrays:
        """One entry per run and node, by node and time: the ticks [first, end) in which the run holds the node.

        place: number of the node within its run. gap: ticks since the node was last held (from the span's start on).
        """
        sizes = np.array([len(nodes) for nodes in plan.nodes])
        run, node = np.repeat(np.arange(len(sizes)), sizes), np.concatenate(plan.nodes)
        place = np.arange(len(run)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        first = self._tick_at(node, plan.runs.start_s[run] * 1000)
        end = self._tick_at(node, np.minimum(plan.runs.end_s[run], self._shape.end_s) * 1000)
        order = np.lexsort((first, node))
        held = Arrays(run=run, node=node, place=place, first=first, end=end).take(order[(end > first)[order]])
        origin = self._tick_at(held.node, self._shape.start_s * 1000)
        is_same = np.diff(held.node, prepend=-1) == 0
        return held.replaced(gap=np.maximum(held.first - np.where(is_same, np.roll(held.end, 1), origin), 0))

    def skip(self, hour: int) -> None:
        """Passes over an hour: only the energy counters move on."""
        stretches = self._stretches(hour)
        self._energy(stretches, sample_columns(self._signals, self._idle_watts, stretches, frozenset()))

    def hour(self, hour: int) -> pa.Table:
        """Rows of the hour. Hours go up by one each."""
        stretches = self._stretches(hour)
        columns = sample_columns(self._signals, self._idle_watts, stretches, self._wanted)
        columns["energy_mj"] = self._energy(stretches, columns)
        times_ms = self._times_ms(stretches)
        node = np.repeat(stretches.node, stretches.length)
        unit = node * GPUS_PER_NODE + np.repeat(stretches.gpu, stretches.length)
        columns |= {"time_ms": times_ms, "hbm_total_mib": np.where(node >= self._shape.nodes_40, MIB_80, MIB_40)}
        kept = np.flatnonzero(~lost_rows(self._shape, hour, node, times_ms))
        return self._table(unit[kept], {name: values[kept] for name, values in columns.items()})

    def _stretches(self, hour: int) -> Arrays:
        """The samples of each GPU that a run holds within the hour, by host, GPU and time."""
        begin_ms = self._shape.start_s * 1000 + hour * HOUR_MS
        end_ms = min(begin_ms + HOUR_MS, self._shape.end_s * 1000)
        h = self._holdings
        first = np.maximum(self._tick_at(h.node, begin_ms), h.first)
        length = np.minimum(self._tick_at(h.node, end_ms), h.end) - first
        held = np.flatnonzero(length > 0)
        gpu = np.tile(np.arange(GPUS_PER_NODE), len(held))
        at = np.repeat(held, GPUS_PER_NODE)
        order = np.lexsort((first[at], gpu, h.node[at]))
        at, gpu = at[order], gpu[order]
        return Arrays(
            run=h.run[at], node=h.node[at], gpu=gpu, place=h.place[at] * GPUS_PER_NODE + gpu, first_tick=first[at],
            first_sample=(first - h.first)[at], length=length[at], gap=h.gap[at],
        )  # fmt: skip

    def _times_ms(self, stretches: Arrays) -> Ints:
        starts = np.cumsum(stretches.length) - stretches.length
        first_ms = stretches.first_tick * self._interval_ms + self._offset_ms[stretches.node]
        within = np.arange(int(stretches.length.sum())) * self._interval_ms
        times_ms: Ints = within + np.repeat(first_ms - starts * self._interval_ms, stretches.length)
        return times_ms

    def _energy(self, stretches: Arrays, columns: Columns) -> Floats:
        """Cumulated power of each GPU, mJ, its idle time before a run included; the sums go on in the next hour."""
        if not len(stretches.length):
            return np.zeros(0)
        each = columns["power_w"].astype(float) * self._interval_ms
        starts = np.cumsum(stretches.length) - stretches.length
        idle_mj = self._idle_watts[stretches.node, stretches.gpu].astype(float) * self._interval_ms
        each[starts] += np.where(stretches.first_sample == 0, stretches.gap * idle_mj, 0.0)
        gpu = stretches.node * GPUS_PER_NODE + stretches.gpu
        heads = np.flatnonzero(np.diff(gpu, prepend=-1))
        begin, gpu = starts[heads], gpu[heads]
        total = np.cumsum(each)
        before = self._energy_mj[gpu] - (total[begin] - each[begin])
        energy = total + np.repeat(before, np.diff(begin, append=len(each)))
        restart_energy(self._reloads, stretches.node[heads], begin, energy, self._times_ms(stretches))
        self._energy_mj[gpu] = energy[np.append(begin[1:], len(each)) - 1]
        whole: Floats = np.rint(energy)
        return whole

    def _table(self, unit: Ints, columns: Columns) -> pa.Table:
        arrays: dict[str, pa.Array[Any]] = {name: values.take(unit) for name, values in self._fixed.items()}
        arrays["mig"] = pa.repeat(pa.scalar("", pa.string()), len(unit))
        arrays["gpu"] = pa.array((unit % GPUS_PER_NODE).astype(np.int16))
        wanted = {*self._wanted, "time_ms"}
        arrays |= {n: pa.array(values, TELEMETRY.field(n).type) for n, values in columns.items() if n in wanted}
        filled = [arrays[f.name] if f.name in arrays else pa.nulls(len(unit), f.type) for f in TELEMETRY]
        return pa.Table.from_arrays(filled, schema=TELEMETRY)


def _fixed_columns(plan: SitePlan, rng: np.random.Generator) -> dict[str, pa.Array[Any]]:
    """host, uuid and model of each (node, gpu)."""
    node = np.repeat(np.arange(plan.shape.node_count), GPUS_PER_NODE)
    words = rng.bytes(16 * len(node)).hex()
    digits = [words[n * 32 : n * 32 + 32] for n in range(len(node))]
    uuids = [f"GPU-{d[:8]}-{d[8:12]}-{d[12:16]}-{d[16:20]}-{d[20:]}" for d in digits]
    hosts = plan.hosts
    return {
        "host": pa.array([hosts[n] for n in node.tolist()], pa.string()),
        "uuid": pa.array(uuids, pa.string()),
        "model": pa.array([_MODELS[int(n >= plan.shape.nodes_40)] for n in node], pa.string()),
    }
