"""The scrape interval of each GPU, from the gaps between its own samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from almanac.units import DAY_S, HOUR_S
from telemetry.attribution.seen_units import days_of
from telemetry.metrics.arrays import HOUR_MS, Array, RowRuns, ragged

Place = tuple[str, int, str]
"""Host, GPU index, and MIG instance id."""
_PlaceDay = tuple[str, int, str, int]

EVEN = 1.1
"""Samples are even if their longest gap is at most this many times the shortest one."""
_FREQUENT_PCT = 5
_NEAR = (0.5, 1.5)
_ROUNDS = 3
_STEADY_FRAC, _STEADY_SAMPLES, _STEADY_HOURS = 0.75, 10, 0.25
_POOLED_GAPS, _LONG, _LIKELY, _MOST_TIMES = 64, 10, 0.4, 4
_USUAL_S = np.array([1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900])
"""Scrape intervals that sites configure. Others may be multiples of them, if scrapes are lost by turns."""
_SAME = 0.03


def gaps_ms(runs: RowRuns, time_ms: Array) -> Array:
    """Time from each sample to the next one of its run. The last one gets the gap before it; a lone one gets 0."""
    gap = np.diff(time_ms, append=0)
    last = runs.ends - 1
    gap[last] = np.where(runs.lengths > 1, gap[last - 1], 0)
    return gap


def hour_intervals(runs: RowRuns, time_ms: Array) -> tuple[Array, Array]:
    """The scrape interval of each GPU in an hour, in ms, and whether it held for most of the hour.

    runs: the samples of each GPU. The interval is NaN with fewer than two samples. Lost samples leave gaps of two or
    more intervals. So the interval is the mean of the gaps around the shortest frequent one.
    """
    gap, number = gaps_ms(runs, time_ms), runs.lengths
    is_uneven = runs.max(gap) > EVEN * runs.min(gap)
    span_ms = runs.last(time_ms) - runs.first(time_ms)
    interval_ms = np.divide(span_ms, number - 1, out=np.full(len(number), np.nan), where=number > 1)
    is_steady = ~is_uneven & (number >= _STEADY_SAMPLES)
    if is_uneven.any():
        chosen = runs.spread(is_uneven)
        chosen[runs.ends - 1] = False
        uneven = RowRuns.of_lengths(number[is_uneven] - 1)
        interval_ms[is_uneven], share = _shortest(uneven, gap[chosen])
        is_steady[is_uneven] = (share >= _STEADY_FRAC) & (number[is_uneven] >= _STEADY_SAMPLES)
    return interval_ms, is_steady


def pooled_gaps_ms(runs: RowRuns, time_ms: Array, is_steady: Array) -> pa.ListArray[Any]:
    """The first gaps of each GPU in an hour that is not steady; of a steady hour none."""
    number = np.where(is_steady, 0, np.minimum(runs.lengths - 1, _POOLED_GAPS))
    pooled = RowRuns.of_lengths(number)
    gap = np.diff(time_ms, append=0)[ragged(runs.starts, pooled)]
    return pa.ListArray.from_arrays(pa.array(np.append(pooled.starts, pooled.rows), pa.int32()), pa.array(gap))


def base_gap_ms(gaps: Array) -> float:
    """The scrape interval behind the gaps of a day in which no hour is steady.

    If a share of all scrapes is kept at random, it is also the share of gaps of one interval. So the interval is the
    shortest gap that is frequent enough, alone and with its multiples. The mean over these removes jitter.
    """
    gap = np.sort(gaps)
    gap = gap[gap <= _LONG * np.median(gap)]
    lost = 1 - np.minimum(gap * len(gap) / gap.sum(), 1)
    likely = np.ones(len(gap), bool)
    for times in (1, _MOST_TIMES):
        number = np.searchsorted(gap, (times + 0.5) * gap, side="right") - np.arange(len(gap))
        likely &= number >= _LIKELY * len(gap) * (1 - lost**times)
    shortest = gap[np.argmax(likely)] if likely.any() else np.median(gap)
    interval_ms = float(gap[(gap >= shortest) & (gap <= _NEAR[1] * shortest)].mean())
    for _ in range(_ROUNDS):
        times = np.rint(gap / interval_ms)
        chosen = (times >= 1) & (times <= _MOST_TIMES)
        interval_ms = float(gap[chosen].sum() / times[chosen].sum())
    return interval_ms


def _is_by_turns(interval_s: Array, base_s: Array | float) -> Array:
    """Return True if this is no configured interval, but a multiple of the base: every fifth scrape is kept."""
    times = np.maximum(np.rint(interval_s / base_s), 1)
    is_usual = (np.abs(interval_s[:, None] / _USUAL_S - 1) < _SAME).any(axis=1)
    found: Array = (times >= 2) & (np.abs(interval_s / base_s / times - 1) < _SAME) & ~is_usual
    return found


def _shortest(runs: RowRuns, gap: Array) -> tuple[Array, Array]:
    """As `_frequent`. No sort is needed where at least half of the gaps are as short as the shortest one."""
    near = gap <= runs.spread(EVEN * runs.min(gap))
    number, near_ms = runs.sum(near), runs.sum(gap * near)
    interval_ms, share = near_ms / number, near_ms / runs.sum(gap)
    few = 2 * number < runs.lengths
    if few.any():
        interval_ms[few], share[few] = _frequent(RowRuns.of_lengths(runs.lengths[few]), gap[runs.spread(few)])
    return interval_ms, share


def _frequent(runs: RowRuns, gap: Array) -> tuple[Array, Array]:
    """The shortest frequent gap of each run, and the share of the time that similar gaps fill.

    It starts at the 5th percentile. Because of jitter, that is below the interval. So the mean of the gaps near it
    replaces it, three times.
    """
    of_run = runs.spread(np.arange(len(runs.starts)) * HOUR_MS)
    gap = np.sort(of_run + gap) - of_run
    interval_ms = gap[runs.starts + _FREQUENT_PCT * (runs.lengths - 1) // 100].astype(np.float64)
    for _ in range(_ROUNDS):
        low, high = (runs.spread(factor * interval_ms) for factor in _NEAR)
        is_near = (gap >= low) & (gap <= high)
        near_ms = runs.sum(gap * is_near)
        interval_ms = near_ms / runs.sum(is_near)
    return interval_ms, near_ms / runs.sum(gap)


@dataclass(frozen=True)
class Intervals:
    """Scrape intervals of GPUs, in s: by place and day (days since 1970), and by hour where an hour differs.

    by_hour: hours of a place and day whose steady interval differs from that of the day by more than a tenth.
    """

    by_day: Mapping[_PlaceDay, float]
    by_hour: Mapping[_PlaceDay, Mapping[int, float]] = field(default_factory=dict)
    _typical: dict[tuple[str, range], float | None] = field(default_factory=dict, repr=False, compare=False)
    _of_host: dict[tuple[str, int], list[float]] = field(
        default_factory=lambda: defaultdict(list), repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for (host, _, _, day), interval_s in self.by_day.items():
            self._of_host[host, day].append(interval_s)
            self._of_host["", day].append(interval_s)

    def named(self, nodes: Mapping[int, Mapping[str, str]]) -> Intervals:
        """A copy with the host names of Slurm. nodes: by day, the node of each host.

        If two hosts are one node, the shorter interval counts.
        """

        def renamed(key: _PlaceDay) -> _PlaceDay:
            host, gpu, mig, day = key
            return nodes.get(day, {}).get(host, host), gpu, mig, day

        by_day: dict[_PlaceDay, float] = {}
        for key, interval_s in self.by_day.items():
            by_day[renamed(key)] = min(interval_s, by_day.get(renamed(key), interval_s))
        return Intervals(by_day, {renamed(key): hours for key, hours in self.by_hour.items()})

    def of(self, place: Place, start_s: int, end_s: int) -> float | None:
        """The mean interval of a GPU in [start_s, end_s); None if no GPU has one on these days.

        A day without an interval takes the median of the GPU's other days, else that of its host, else that of all.
        """
        days = days_of(start_s, end_s)
        own = {day: self.by_day[key] for day in days if (key := (*place, day)) in self.by_day}
        other_s = median_low(own.values()) if own else self._typical_of(place[0], days)
        if other_s is None:
            return None
        if len(days) == 1 and (*place, days[0]) not in self.by_hour:
            return other_s
        scrapes = sum(self._scrapes((*place, day), own.get(day, other_s), start_s, end_s) for day in days)
        return (end_s - start_s) / scrapes

    def _scrapes(self, key: _PlaceDay, interval_s: float, start_s: int, end_s: int) -> float:
        """The number of scrapes of a day in [start_s, end_s)."""
        day_s = key[-1] * DAY_S
        scrapes = _overlap_s(start_s, end_s, day_s, DAY_S) / interval_s
        for hour, its_s in self.by_hour.get(key, {}).items():
            held_s = _overlap_s(start_s, end_s, day_s + hour * HOUR_S, HOUR_S)
            scrapes += held_s / its_s - held_s / interval_s
        return scrapes

    def _typical_of(self, host: str, days: range) -> float | None:
        """The median over the GPUs of a host, else over those of every host."""
        if (host, days) not in self._typical:
            known = [interval_s for day in days for interval_s in self._of_host.get((host, day), ())]
            other_s = self._typical_of("", days) if host else None
            self._typical[host, days] = median_low(known) if known else other_s
        return self._typical[host, days]


def _overlap_s(start_s: int, end_s: int, from_s: int, length_s: int) -> int:
    return max(0, min(end_s, from_s + length_s) - max(start_s, from_s))


def intervals_of(hours: pa.Table) -> Intervals:
    """Intervals from one row per GPU and hour: host, gpu, mig, hour_ms, interval_ms, is_steady, gaps_ms.

    The interval of a day is the median of its steady hours. If none is steady, it follows from the gaps of all hours.
    """
    hours = hours.filter(pc.field("interval_ms") > 0)
    host, mig = (hours[name].combine_chunks().dictionary_encode() for name in ("host", "mig"))
    keys = (host.indices.to_numpy(), hours["gpu"].to_numpy(), mig.indices.to_numpy())
    day, hour = np.divmod(hours["hour_ms"].to_numpy() // HOUR_MS, 24)
    interval_s, is_steady = hours["interval_ms"].to_numpy() / 1000, hours["is_steady"].to_numpy(zero_copy_only=False)
    order = np.lexsort((interval_s, ~is_steady, day, *keys))
    hour, interval_s, is_steady = hour[order], interval_s[order], is_steady[order]
    runs = RowRuns.of(*(key[order] for key in keys), day[order])
    steady = runs.sum(is_steady)
    steady = np.where(steady >= _STEADY_HOURS * runs.lengths, steady, 0)
    usual_s = interval_s[runs.starts + np.maximum(steady - 1, 0) // 2]
    gaps: Any = hours["gaps_ms"].combine_chunks()
    gaps = gaps.take(order)
    for place in np.flatnonzero(steady == 0).tolist():
        of_day = gaps.slice(runs.starts[place], runs.lengths[place]).flatten().to_numpy()
        usual_s[place] = base_gap_ms(of_day) / 1000
    usual_s = _without_turns(runs.first(day[order]), usual_s)
    hosts, migs = host.dictionary.to_pylist(), mig.dictionary.to_pylist()
    codes = (runs.first(column[order]).tolist() for column in (*keys, day))
    places = [(hosts[h], gpu, migs[m], d) for h, gpu, m, d in zip(*codes, strict=True)]
    times = interval_s / runs.spread(usual_s)
    is_own = ((times > EVEN) | (times < 1 / EVEN)) & ~_is_by_turns(interval_s, runs.spread(usual_s))
    differs = np.flatnonzero(is_steady & is_own & (runs.spread(steady) > 0))
    by_hour: dict[_PlaceDay, dict[int, float]] = defaultdict(dict)
    number = runs.spread(np.arange(len(places)))
    for row in differs.tolist():
        by_hour[places[number[row]]][int(hour[row])] = float(interval_s[row])
    return Intervals(dict(zip(places, usual_s.tolist(), strict=True)), dict(by_hour))


def _without_turns(day: Array, interval_s: Array) -> Array:
    """Intervals of GPUs, without those that only a loss by turns explains: most GPUs of the day have a divisor."""
    found = interval_s.copy()
    for number in np.unique(day):
        of_day = day == number
        base_s = np.median(interval_s[of_day])
        is_base = np.abs(interval_s[of_day] / base_s - 1) < EVEN - 1
        if 2 * is_base.sum() > len(is_base):
            found[of_day] = np.where(_is_by_turns(interval_s[of_day], base_s), base_s, interval_s[of_day])
    return found
