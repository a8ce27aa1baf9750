"""Lemon nodes and MTTF on a generated site of 30 days: nodes found by rate and days of record, and intervals that hold.

Run: make bench-health. benchmarks/watch_site.py makes the site: 200 nodes with 0.2 failures each in 30 days, and three
lemons. A failure counts if a job was on the node, as in a record of jobs. The failures are drawn SEEDS times.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from figures import Figure, at_most, between, exactly, main
from watch_site import LEMONS, NODE_FAILURES, WatchSite

from advisor.health.checkpoints import Exposure, mttf_by_gpus
from advisor.health.nodes import NodeRecord, incidents, node_rates
from almanac.units import DAY_S
from demo.shape import GPUS_PER_NODE, Arrays

SEEDS = 100
OFTEN = 4
"""Incidents in the longest record that a healthy node hardly ever has."""
TIMES, DAYS = (5, 10, 20, 30, 50, 75, 100), (7, 14, 30)


def node_records(site: WatchSite, runs: Arrays, failures: Arrays, days: int) -> list[NodeRecord]:
    """Each node's days with jobs, as whole days, and its incidents on them, in the first days of the record."""
    start_s = site.plan.shape.start_s
    until_s, busy = start_s + days * DAY_S, np.zeros((site.nodes, days), dtype=bool)
    for row, from_s, to_s in zip(runs.row.tolist(), runs.start_s.tolist(), runs.end_s.tolist(), strict=True):
        if from_s < until_s:
            busy[site.plan.nodes[row], (from_s - start_s) // DAY_S : (to_s - start_s) // DAY_S + 1] = True
    counted = failures.is_node & (failures.run >= 0) & (failures.time_s < until_s)
    return [
        NodeRecord(site.hosts[n], float(busy[n].sum()), len(incidents(failures.time_s[counted & (failures.node == n)])))
        for n in range(site.nodes)
    ]


def lemon_figures(site: WatchSite) -> Iterator[Figure]:
    """Lemons found and nodes wrongly called one, by rate and by days of record; the goal is 75 times in 30 days."""
    lemons = {site.hosts[node] for node in site.lemons.tolist()}
    for times in TIMES:
        site.node_rates[site.lemons] = times * NODE_FAILURES
        drawn = [site.failed(np.random.default_rng([seed, times])) for seed in range(SEEDS)]
        for days in DAYS:
            rates = [node_rates(node_records(site, *each, days)) for each in drawn]
            found = [{node.node for node in each if node.is_lemon} for each in rates]
            hits, false = [len(each & lemons) for each in found], [len(each - lemons) for each in found]
            said = f"lemons at {times} times the rate, {days} days"
            if (times, days) == (75, 30):
                yield exactly(f"{said}: found of 3, the least of {SEEDS} sites", min(hits), LEMONS)
                yield at_most(f"{said}: false, the most of {SEEDS} sites", max(false), 1)
            mean, all_of = sum(hits) / SEEDS, sum(each == LEMONS for each in hits)
            text = f"{mean:.2f}, {sum(false) / SEEDS:.2f} (most {max(false)}), {all_of}"
            yield Figure(f"{said}: found of 3, false, sites of {SEEDS} with all found", text)
        often = [{node.node for node in each if node.failures >= OFTEN} for each in rates]
        hit, other = (
            sum(map(len, each)) / SEEDS for each in ([n & lemons for n in often], [n - lemons for n in often])
        )
        yield Figure(f"the same, nodes with {OFTEN} incidents or more: of 3, others", f"{hit:.2f}, {other:.2f}")
    site.node_rates[site.lemons] = 75 * NODE_FAILURES


def mttf_figures(site: WatchSite) -> Iterator[Figure]:
    """Seeds whose 95% interval of the MTTF holds the truth, by the number of GPUs."""
    holds: dict[int, list[bool]] = {}
    for seed in range(SEEDS):
        runs, failures = site.failed(np.random.default_rng([seed, 0]))
        rate_h = np.array([site.node_rates[site.plan.nodes[row]].sum() for row in runs.row.tolist()]) / 30 / 24
        until_s = np.minimum(runs.end_s, site.plan.shape.end_s)
        hours, gpus = np.maximum(until_s - runs.start_s, 0) / 3600, runs.nodes * GPUS_PER_NODE
        failed = np.bincount(failures.run[failures.is_node & (failures.run >= 0)], minlength=len(gpus))
        exposures = [Exposure(*each) for each in zip(gpus.tolist(), hours.tolist(), failed.tolist(), strict=True)]
        for each in mttf_by_gpus(exposures):
            of = (gpus >= each.from_gpus) & (gpus <= each.to_gpus)
            true_h = hours[of].sum() / (rate_h * hours)[of].sum()
            holds.setdefault(each.to_gpus, []).append(bool(each.low_h <= true_h <= each.high_h))
    for size, held in sorted(holds.items()):
        yield between(f"MTTF of {size} GPUs or fewer: intervals with the truth, of {len(held)}", sum(held), 90, 98)


def measure() -> Iterator[Figure]:
    site = WatchSite()
    yield from lemon_figures(site)
    yield from mttf_figures(site)


if __name__ == "__main__":
    main(measure)
