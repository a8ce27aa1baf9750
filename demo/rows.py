"""Telemetry of the site, one table per hour, with the faults that real telemetry has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from demo.counters import RowMaker, Segments, mix
from demo.families import MIB_40, MIB_80
from demo.plan import SitePlan
from demo.profile import Bools, Floats, Ints
from demo.segments import HOUR_MS, Timeline, make_timeline
from demo.signals import IDLE_W, Words, make_signals
from telemetry.store.schema import TELEMETRY

_GLITCH_PCT = 4096.0  # far beyond what the counter can be
_MODELS = ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB")
Columns = dict[str, npt.NDArray[np.generic]]


class TelemetryMaker:
    """Makes the hours of a site in order; the energy counters run through."""

    def __init__(self, plan: SitePlan) -> None:
        shape = plan.shape
        self._shape, self._plan = shape, plan
        self._timeline: Timeline = make_timeline(plan)
        draws = np.random.default_rng([shape.seed, 11])
        each = (shape.node_count, shape.gpus_per_node)
        idle_watts = (IDLE_W + draws.uniform(-4, 4, each)).astype(np.float32)
        self._idle_mj = idle_watts.astype(float) * shape.interval_s * 1000
        self._energy_mj = np.rint(draws.uniform(0, 1e12, each))
        self._resets = _resets(plan, draws)
        self._fixed = _fixed_columns(plan, draws)
        signals = make_signals(plan)
        self._full = RowMaker(signals, idle_watts, frozenset(shape.counters))
        self._power_only = RowMaker(signals, idle_watts, frozenset())

    @property
    def hours(self) -> int:
        return self._timeline.hours

    def skip(self, hour: int) -> None:
        """Passes over an hour: only the energy counters move on."""
        segments = self._timeline.segments(hour)
        self._energy(segments, self._power_only.columns(segments).get("power_w"), self._times_ms(segments))

    def hour(self, hour: int) -> pa.Table:
        """Rows of the hour, columns of schema TELEMETRY, by host, gpu, mig and time_ms. Hours go up by one each."""
        segments = self._timeline.segments(hour)
        columns = self._full.columns(segments)
        times_ms = self._times_ms(segments)
        columns["energy_mj"] = self._energy(segments, columns.get("power_w"), times_ms)
        columns["time_ms"] = times_ms
        kept = self._kept(segments, hour, times_ms)
        self._glitch(columns, times_ms)
        return self._table(segments, columns, kept)

    def _times_ms(self, segments: Segments) -> Ints:
        starts = np.cumsum(segments.length) - segments.length
        interval_ms = self._shape.interval_s * 1000
        first_ms = segments.first_tick * interval_ms + self._timeline.offset_ms[segments.node]
        within = np.arange(int(segments.length.sum())) * interval_ms
        times_ms: Ints = within + np.repeat(first_ms - starts * interval_ms, segments.length)
        return times_ms

    def _energy(self, segments: Segments, power_w: npt.NDArray[np.generic] | None, times_ms: Ints) -> Floats:
        """Cumulated power of each GPU, mJ, its idle time before a run included; the sums go on in the next hour."""
        if power_w is None or not len(times_ms):
            return np.zeros(0)
        each = power_w.astype(float) * (self._shape.interval_s * 1000)
        starts = np.cumsum(segments.length) - segments.length
        idle_mj = segments.gap_ticks * self._idle_mj[segments.node, segments.gpu]
        each[starts] += np.where(segments.first_sample == 0, idle_mj, 0.0)
        gpu = segments.node * self._shape.gpus_per_node + segments.gpu
        heads = np.flatnonzero(np.concatenate([[True], gpu[1:] != gpu[:-1]]))
        begin = starts[heads]
        end = np.append(begin[1:], len(each))
        total = np.cumsum(each)
        before = total[begin] - each[begin]
        carry = self._energy_mj.reshape(-1)
        energy = total + np.repeat(carry[gpu[heads]] - before, end - begin)
        self._reset(segments, energy, heads, begin, end, times_ms)
        carry[gpu[heads]] = energy[end - 1]
        whole: Floats = np.rint(energy)
        return whole

    def _reset(self, segments: Segments, energy: Floats, heads: Ints, begin: Ints, end: Ints, times_ms: Ints) -> None:
        """Takes from each counter what it held when its driver was loaded again, in place."""
        for node, at_ms in self._resets:
            for n in np.flatnonzero(segments.node[heads] == node):
                part = slice(begin[n], end[n])
                after = int(np.searchsorted(times_ms[part], at_ms))
                if 0 < after < end[n] - begin[n] and times_ms[begin[n]] <= at_ms:
                    energy[part][after:] -= energy[part][after - 1]

    def _kept(self, segments: Segments, hour: int, times_ms: Ints) -> Ints | None:
        """Positions of the rows that were scraped, some twice; None where that is all of them, once each."""
        faults = self._shape.faults
        lost = faults.missing_share > 0 or faults.outage_per_host_hour > 0
        if not lost and faults.duplicate_share <= 0:
            return None
        kept = np.arange(len(times_ms))
        if lost:
            node = np.repeat(segments.node, segments.length)
            kept = np.flatnonzero(~self._lost(hour, node, times_ms))
        if faults.duplicate_share > 0:
            chance = _chance(times_ms[kept].astype(np.uint64) * np.uint64(31) + kept.astype(np.uint64))
            kept = np.repeat(kept, 1 + (chance < faults.duplicate_share))
        return kept

    def _lost(self, hour: int, node: Ints, times_ms: Ints) -> Bools:
        """Rows whose host was not scraped: one scrape, or ten minutes in a row. All GPUs of a host share that fate."""
        faults, shape = self._shape.faults, self._shape
        begin_ms, interval_ms = shape.start_s * 1000 + hour * HOUR_MS, shape.interval_s * 1000
        ticks = -(-HOUR_MS // interval_ms) + 1
        host = np.arange(shape.node_count, dtype=np.uint64) + np.uint64(shape.seed * 7_777_777)
        outage = _chance(mix(host) + np.uint64(hour)) < faults.outage_per_host_hour
        tick = np.arange(ticks, dtype=np.uint64) + np.uint64(hour * ticks)
        table = _chance(mix(host)[:, None] ^ mix(tick)[None, :]) < faults.missing_share
        ten_minutes = 600_000 // interval_ms
        table[outage, ticks // 3 : ticks // 3 + ten_minutes] = True
        flat: Bools = table.reshape(-1)[node * ticks + (times_ms - begin_ms) // interval_ms]
        return flat

    def _glitch(self, columns: Columns, times_ms: Ints) -> None:
        share = self._shape.faults.glitch_share
        if share > 0 and "gpu_util_pct" in columns:
            rows = np.arange(len(times_ms), dtype=np.uint64) + times_ms.astype(np.uint64) * np.uint64(17)
            columns["gpu_util_pct"][_chance(rows) < share] = _GLITCH_PCT

    def _table(self, segments: Segments, columns: Columns, kept: Ints | None) -> pa.Table:
        total = int(segments.length.sum())
        unit = np.repeat(segments.node * self._shape.gpus_per_node + segments.gpu, segments.length)
        run = np.repeat(segments.run, segments.length)
        if kept is not None:
            unit, run, total = unit[kept], run[kept], len(kept)
            columns = {name: values[kept] for name, values in columns.items()}
        node = unit // self._shape.gpus_per_node
        arrays: dict[str, pa.Array[Any]] = {name: values.take(unit) for name, values in self._fixed.items()}
        arrays["mig"] = pa.repeat(pa.scalar("", pa.string()), total)
        arrays["gpu"] = pa.array((unit % self._shape.gpus_per_node).astype(np.int16))
        arrays["job_label"] = self._labels(run, node)
        if "hbm_total_mib" in self._shape.counters:
            is_large = (node >= self._shape.nodes_40) & (node < self._shape.nodes_40 + self._shape.nodes_80)
            columns["hbm_total_mib"] = np.where(is_large, MIB_80, MIB_40)
        wanted = {*self._shape.counters, "time_ms"}
        arrays |= {n: pa.array(v, TELEMETRY.field(n).type) for n, v in columns.items() if n in wanted}
        filled = [arrays.get(f.name, None) for f in TELEMETRY]
        return pa.Table.from_arrays(
            [pa.nulls(total, f.type) if a is None else a for a, f in zip(filled, TELEMETRY, strict=True)],
            schema=TELEMETRY,
        )

    def _labels(self, run: Ints, node: Ints) -> pa.Array[Any]:
        """Job ids on the shared nodes, whose exporter knows them; null elsewhere."""
        shape = self._shape
        if not shape.shared_nodes:
            return pa.nulls(len(run), pa.int64())
        is_labeled = (node >= shape.nodes_40 + shape.nodes_80) & (run < len(self._plan.runs))
        job_id = np.append(self._plan.jobs.job_id[self._plan.runs.job], 0)[run]
        return pa.array(job_id, pa.int64(), mask=~is_labeled)


def _chance(words: Words) -> Floats:
    """A number in [0, 1) for each word."""
    return (mix(words) >> np.uint64(11)).astype(float) * 2.0**-53


def _resets(plan: SitePlan, draws: np.random.Generator) -> list[tuple[int, int]]:
    """(node, time in ms) of each reload of a driver, in order of time."""
    shape = plan.shape
    number = draws.poisson(shape.faults.energy_reset_per_host_day * shape.days * shape.node_count)
    nodes = draws.integers(0, shape.node_count, number)
    times_ms = np.sort(draws.integers(shape.start_s * 1000, shape.end_s * 1000, number))
    return list(zip(nodes.tolist(), times_ms.tolist(), strict=True))


def _fixed_columns(plan: SitePlan, draws: np.random.Generator) -> dict[str, pa.Array[Any]]:
    """host, uuid and model of each (node, gpu)."""
    shape = plan.shape
    node = np.repeat(np.arange(shape.node_count), shape.gpus_per_node)
    words = draws.bytes(16 * len(node)).hex()
    digits = [words[n * 32 : n * 32 + 32] for n in range(len(node))]
    uuids = [f"GPU-{d[:8]}-{d[8:12]}-{d[12:16]}-{d[16:20]}-{d[20:]}" for d in digits]
    large = (node >= shape.nodes_40) & (node < shape.nodes_40 + shape.nodes_80)
    return {
        "host": pa.array([plan.hosts[n] for n in node.tolist()], pa.string()),
        "uuid": pa.array(uuids, pa.string()),
        "model": pa.array([_MODELS[int(is_large)] for is_large in large], pa.string()),
    }


def iterate_hours(plan: SitePlan, since_s: int, until_s: int) -> Iterator[tuple[int, pa.Table]]:
    """(end of the hour in s, rows of [since_s, until_s) in it), hour by hour; hours without rows give empty tables."""
    maker = TelemetryMaker(plan)
    start_s = plan.shape.start_s
    for hour in range(maker.hours):
        begin_s, end_s = start_s + hour * 3600, start_s + (hour + 1) * 3600
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
