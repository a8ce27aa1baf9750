"""Energy from the cumulative counter: the stretches of readings whose steps are physically possible.

The counter is mJ since the driver was loaded. A stretch is a run of readings of one card. In it, no step falls, and no
step rises faster than the card can use power. So its energy is its last reading minus its first. Readings that stand
still for minutes are a stretch of their own, because every card that is on uses power. Stretches of hours join. When
the whole job is known, `energy_chain` separates faulty readings from resets and replaced cards.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from telemetry.metrics.arrays import NUMBER, REAL, WHOLE, Array, ColumnKind, Columns, RowRuns, Rows
from telemetry.metrics.samples import GpuSamples

_UNKNOWN_W = ColumnKind(np.float64, np.nan)

KINDS = {
    "allocation": WHOLE,
    **{f"{name}_ms": WHOLE for name in ("from", "second", "until")},
    **{f"{name}_mj": REAL for name in ("from", "second", "until")},
    **{f"{name}_w": _UNKNOWN_W for name in ("from", "until", "mean")},
    "limit_w": REAL,
    "readings": NUMBER,
    "card": WHOLE,
}
"""A row for each stretch. from, second, until: its first, second, and last reading, with the time since the start of
the allocation and the power sample. limit_w: more than the card can use. card: a hash of its UUID, 0 if unknown.
mean_w: the mean power sample, only of a stretch that stands still.
"""

SLACK_MS = 30_000
"""A step may hold the energy of this much more time: dcgm-exporter by default reads the counters every 30 s."""
_MARGIN = 1.25
"""Allowed above `max_power_w`: short peaks, and the error of the power sensor."""
LEAST_W = 2.0
"""Every card that is on uses more. A counter in J, read as mJ, shows less."""
STILL_MS = 300_000
"""A counter that shows less than LEAST_W for longer is faulty. Slow exporters repeat a reading for a shorter time."""
_EDGE_MS = 90_000
"""Readings that stand still longer at the start or end of an hour are separate, because they may go on beyond it."""


def missing(samples: GpuSamples) -> Columns:
    """Samples without a reading."""
    counter = samples.counter("energy_mj")
    return {"missing_energy_mj": samples.runs.lengths if counter is None else counter.missing(samples.runs)}


def measure(samples: GpuSamples) -> Columns:
    """The stretches of an hour."""
    counter = samples.counter("energy_mj")
    if counter is None:
        return {}
    rows: Array | slice = slice(None)
    places, runs = np.arange(len(samples.allocation)), samples.runs
    if counter.known is not None:
        rows = np.flatnonzero(counter.known)
        places, runs = runs.where(counter.known)
    allocation = samples.allocation[places]
    reading, time_ms = counter.values[rows], samples.time_ms[rows]
    limit_w = samples.allocations.max_power_w[allocation] * _MARGIN
    names, codes = samples.uuid()
    codes = codes[rows]
    joined = (codes[1:] == codes[:-1]) & is_step(np.diff(reading), np.diff(time_ms), runs.spread(limit_w)[1:])
    joined[runs.ends[:-1] - 1] = False
    _part_still(joined, reading, time_ms, runs)
    stretches = RowRuns(np.append(np.arange(min(len(reading), 1)), np.flatnonzero(~joined) + 1), len(reading))
    run = np.searchsorted(runs.starts, stretches.starts, side="right") - 1
    start_ms = samples.allocations.start_ms[allocation[run]]
    power = samples.counter("power_w")
    found = {"allocation": samples.allocations.number[allocation[run]], "limit_w": limit_w[run]}
    last = stretches.ends - 1
    ends = {"from": stretches.starts, "second": np.minimum(stretches.starts + 1, last), "until": last}
    for name, place in ends.items():
        found |= {f"{name}_ms": time_ms[place] - start_ms, f"{name}_mj": reading[place]}
        if name != "second" and power is not None:
            found[f"{name}_w"] = power.values[place if isinstance(rows, slice) else rows[place]]
    still = stands_still(found["until_mj"] - found["from_mj"], found["until_ms"] - found["from_ms"], _EDGE_MS)
    if power is not None and still.any():
        watts, known = power.values[rows], stretches.sum(~np.isnan(power.values[rows]))
        with np.errstate(invalid="ignore"):
            found["mean_w"] = np.where(still, stretches.sum(np.nan_to_num(watts)) / known, np.nan)
    cards = np.array([*(zlib.crc32(name.encode()) & 0x7FFFFFFF for name in names), 0], np.int64)  # no name: code -1
    return found | {"readings": stretches.lengths, "card": cards[codes[stretches.starts]]}


def is_step(step_mj: Array, step_ms: Array, limit_w: Array) -> Array:
    """Return True if a card can have used this energy in this time."""
    still: Array = stands_still(step_mj, step_ms, STILL_MS)
    possible: Array = ~still & (step_mj >= 0) & (step_mj <= limit_w * (step_ms + SLACK_MS))
    return possible


def stands_still(used_mj: Any, time_ms: Any, most_ms: int) -> Any:
    """Return True if the counter shows less than a card must use, for more than most_ms. Of numbers or arrays."""
    return (time_ms > most_ms) & (used_mj < LEAST_W * time_ms)


def _part_still(joined: Array, reading: Array, time_ms: Array, runs: RowRuns) -> None:
    """Cut the steps before and after readings that stand still for long. joined: of each step, changed in place."""
    flat = joined & (reading[1:] == reading[:-1])
    if not flat.any():
        return
    pieces = RowRuns.of(flat)
    chosen = flat[pieces.starts]
    first, last = pieces.starts[chosen], pieces.ends[chosen]
    is_edge = np.zeros(len(reading), bool)
    is_edge[runs.starts] = is_edge[runs.ends - 1] = True
    long_ms = np.where(is_edge[first] | is_edge[last], _EDGE_MS, STILL_MS)
    is_long = time_ms[last] - time_ms[first] > long_ms
    first, last = first[is_long], last[is_long]
    joined[first[first > 0] - 1] = False
    joined[last[last < len(joined)]] = False


def merge(given: Rows) -> Columns:
    """Stretches, joined if the step between them is possible, and neither stands still.

    Stretches of one hour do not join again.
    """
    rows, _ = given.by("allocation", "from_ms")
    row = {name: rows[name] for name in KINDS}
    step_mj = row["from_mj"][1:] - row["until_mj"][:-1]
    step_ms = row["from_ms"][1:] - row["until_ms"][:-1]
    joined = is_step(step_mj, step_ms, row["limit_w"][1:])
    still = stands_still(row["until_mj"] - row["from_mj"], row["until_ms"] - row["from_ms"], _EDGE_MS)
    joined &= ~(still[1:] | still[:-1])
    for name in ("allocation", "card"):
        joined &= row[name][1:] == row[name][:-1]
    length = len(row["allocation"])
    runs = RowRuns(np.append(np.arange(min(length, 1)), np.flatnonzero(~joined) + 1), length)
    first, last = runs.starts, runs.ends - 1
    found = {name: row[name][last if name.startswith("until") else first] for name in KINDS}
    is_alone = (row["readings"][first] == 1) & (runs.lengths > 1)
    for unit in ("ms", "mj"):
        found[f"second_{unit}"] = np.where(
            is_alone, row[f"from_{unit}"][np.minimum(first + 1, last)], found[f"second_{unit}"]
        )
    return found | {"readings": runs.sum(row["readings"])}
