"""What goes wrong in the telemetry of the generated site: lost scrapes, and energy counters that start again."""

from __future__ import annotations

import numpy as np

from demo.shape import Bools, Floats, Ints, SiteShape
from demo.signals import Words, mix

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
    """(node, time in ms) of each reload of a driver, in order of time."""
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
