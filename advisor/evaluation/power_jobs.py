"""Jobs that a power controller would have delayed, and by how long, by the runs of the record."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from advisor.evaluation.power import ORACLE, PowerBacktest
from telemetry.nodes.runs import MINUTE_S, Ints, NodeRuns, merged
from telemetry.nodes.series import NodeSeries

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Starts:
    """Runs that began in a span and took a node that was not in use, in order of time. all_jobs: runs that began.

    minute: (n,) of the span. level: (n,) nodes in use right after.
    """

    minute: Ints
    level: Ints
    all_jobs: int


@dataclass(frozen=True)
class JobDelays:
    """jobs: that started in the scored minutes. delayed: of them. Minutes are of the delayed ones."""

    jobs: int
    delayed: int
    mean_min: float | None
    longest_min: int | None


def starts_of(runs: NodeRuns, start_s: int, end_s: int, is_usable: Bools) -> Starts:
    """Starts within the usable minutes of [start_s, end_s), whole minutes. Part by part, so that memory is bounded."""
    minutes, levels = [], []
    for low_s, high_s in runs.windows(start_s, end_s):
        moment, level = _of_part(runs, low_s, high_s)
        minutes.append((moment - start_s) // MINUTE_S)
        levels.append(level)
    minute = np.concatenate(minutes) if minutes else np.empty(0, dtype=np.int64)
    level = np.concatenate(levels) if levels else np.empty(0, dtype=np.int64)
    began = runs.start_s[(runs.start_s >= start_s) & (runs.start_s < end_s)]
    counted = is_usable[minute]
    return Starts(minute[counted], level[counted], int(is_usable[(began - start_s) // MINUTE_S].sum()))


def _of_part(runs: NodeRuns, low_s: int, high_s: int) -> tuple[Ints, Ints]:
    """Second of each start in [low_s, high_s) that took a node, and the nodes in use right after."""
    run, node, begin, until = runs.pairs(low_s - 1, high_s)  # a node that is free from low_s on was in use before
    begin, until, first = merged(node, begin, until)
    taken = np.unique(run[first])
    taken = taken[runs.start_s[taken] >= low_s]
    moment = runs.start_s[taken]
    begin, until = np.sort(begin), np.sort(until)
    level = np.searchsorted(begin, moment, side="right") - np.searchsorted(until, moment, side="right")
    return moment, level


def delays_of(starts: Starts, demand: Ints, short: Ints) -> JobDelays:
    """What shortage did to the starts. demand: (n_minutes,) nodes in use; short: of these, nodes that were not up.

    A run that takes a node is delayed while fewer nodes are up than were in use right after its start, until there are
    so many, or no shortage is left. It then runs as long as it did; nobody else is delayed by that.
    """
    up = demand - short
    ends = np.flatnonzero(short == 0)
    waits = []
    for minute, level in zip(starts.minute.tolist(), starts.level.tolist(), strict=True):
        if short[minute] and level > up[minute]:
            after = np.searchsorted(ends, minute)
            end = int(ends[after]) if after < len(ends) else len(short)
            enough = np.flatnonzero(up[minute:end] >= level)
            waits.append(int(enough[0]) if len(enough) else end - minute)
    if not waits:
        return JobDelays(starts.all_jobs, 0, None, None)
    return JobDelays(starts.all_jobs, len(waits), float(np.mean(waits)), max(waits))


def delays_in(runs: NodeRuns, series: NodeSeries, outcome: PowerBacktest) -> dict[str, JobDelays]:
    """Delayed jobs of each controller over the scored span; the oracle delays none."""
    rows = slice(outcome.spans.score, outcome.spans.end)
    usable = series.is_usable[rows]
    begin_s = int(series.start.astype("datetime64[s]").astype(np.int64))
    starts = starts_of(runs, begin_s + rows.start * MINUTE_S, begin_s + rows.stop * MINUTE_S, usable)
    nodes = np.minimum(np.ceil(series.active[rows]), series.total[rows])
    demand = np.where(usable, nodes, 0).astype(np.int64)
    found = {name: delays_of(starts, demand, np.where(usable, short, 0)) for name, short in outcome.shortage.items()}
    return {**found, ORACLE: JobDelays(starts.all_jobs, 0, None, None)}
