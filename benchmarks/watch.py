"""The watch on a generated site of 30 days: right cancels, lemon nodes, MTTF, and the cost of a round.

Run: make bench-watch. benchmarks/watch_site.py makes the site. Cancels: of `idle` in the site's only partition after
cancel_min, by the default settings otherwise. A cancel is right if the job would not have used its GPUs again; recall
is of the jobs that idle to their end, within 10 minutes of the threshold, without those that are never cancelled.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
from figures import Figure, at_least, at_most, between, exactly, main
from watch_site import HANG, INTERACTIVE, KINDS, LEMONS, NODE_FAILURES, WatchSite

from advisor.health.checkpoints import Exposure, mttf_by_gpus
from advisor.health.nodes import NodeRecord, incidents, node_rates
from advisor.watch.backtest import replay
from almanac.actions_config import WatchSection
from demo.shape import GPUS_PER_NODE, Arrays

DAY_S, SEEDS, LATE_S = 86_400, 100, 600
FOUND = ("idle", "hang", "unused_gpus")
TIMES, DAYS = (5, 10, 20, 50, 75, 100), (7, 14, 30)


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


def lemon_figures(site: WatchSite, seeds: int = 20) -> Iterator[Figure]:
    """Lemons found and nodes wrongly called one, by rate and by days of record; the goal is 75 times in 30 days."""
    lemons = {site.hosts[node] for node in site.lemons.tolist()}
    for times in TIMES:
        site.node_rates[site.lemons] = times * NODE_FAILURES
        drawn = [site.failed(np.random.default_rng([seed, times])) for seed in range(seeds)]
        for days in DAYS:
            found = [{r.node for r in node_rates(node_records(site, *each, days)) if r.is_lemon} for each in drawn]
            hits, false = [len(each & lemons) for each in found], [len(each - lemons) for each in found]
            said = f"lemons at {times} times the rate, {days} days"
            if (times, days) == (75, 30):
                yield exactly(f"{said}: found of 3, the least of {seeds} sites", min(hits), LEMONS)
                yield at_most(f"{said}: false, the most of {seeds} sites", max(false), 1)
            else:
                mean = sum(hits) / seeds
                yield Figure(f"{said}: found of 3, false", f"{mean:.2f}, {sum(false) / seeds:.2f} (most {max(false)})")
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


def cancel_figures(site: WatchSite) -> Iterator[Figure]:
    """Precision and recall of cancels of idle jobs over the whole site, and of the other findings."""
    runs, settings = site.runs, WatchSection(cancel=("idle",), partitions=("gpu",))
    job_ids, number = site.plan.jobs.job_id[runs.job], len(runs.job)
    starts = zip(job_ids.tolist(), runs.start_s.tolist(), strict=True)
    run_of = {start: run for run, start in enumerate(starts)}
    runs_by_key = zip(job_ids.tolist(), runs.submit_s.tolist(), runs.restarts.tolist(), strict=True)
    by_key = {key: run for run, key in enumerate(runs_by_key)}
    cancel_s, found_s = np.full(number, np.inf), {kind: np.full(number, np.inf) for kind in FOUND}
    began_s = time.process_time()
    for seen, findings, cancelled in replay(
        (each.seen for day in range(site.days) for each in site.rounds(day)), settings
    ):
        for each in findings:
            if each.kind in FOUND:
                run = run_of[each.job_id, each.start_s]
                found_s[each.kind][run] = min(found_s[each.kind][run], seen.at_s)
        cancel_s[[by_key[run] for run in cancelled]] = seen.at_s
    yield Figure("days of rounds: s of CPU, the site's own included", time.process_time() - began_s)
    is_cut, is_wrong = np.isfinite(cancel_s), runs.last_busy_s > cancel_s
    end_s, idle_s = np.minimum(runs.end_s, site.plan.shape.end_s), np.maximum(runs.last_busy_s, runs.start_s)
    least_s, gpus = settings.cancel_min * 60, runs.nodes * GPUS_PER_NODE
    is_spared = (runs.kind == HANG) | (runs.kind == INTERACTIVE) | (runs.comment != "")
    is_due = ~is_spared & (end_s - idle_s >= least_s + LATE_S)
    in_time = is_due & (cancel_s <= idle_s + least_s + LATE_S)
    wrong = Counter(KINDS[kind] for kind in runs.kind[is_cut & is_wrong].tolist())
    yield Figure("jobs; cancels; of them wrong, by kind", f"{number:,}; {is_cut.sum():,}; {dict(wrong) or 'none'}")
    yield at_least("cancels: precision", float(1 - (is_cut & is_wrong).sum() / max(1, is_cut.sum())), 0.99)
    yield at_least("cancels: recall within 10 min of the threshold", float(in_time.sum() / is_due.sum()), 0.9)
    late = is_due & ~in_time
    yield Figure("jobs to cancel that were not in time: cancelled later", f"{(late & is_cut).sum()} of {late.sum()}")
    freed_h = float(((end_s - cancel_s) * gpus)[is_cut & ~is_wrong].sum() / 3600)
    idle_h = float((np.maximum(end_s - idle_s, 0) * gpus)[~is_spared].sum() / 3600)
    yield Figure("GPU-h that cancels free; of all after a job's last work", f"{freed_h:,.0f}; {freed_h / idle_h:.0%}")
    is_long = runs.last_busy_s - runs.start_s >= 3600
    truth = {"hang": (np.isfinite(runs.hang_s), end_s - runs.hang_s >= 1200), "unused_gpus": (runs.is_one_gpu, is_long)}
    for kind, (is_so, is_lasting) in truth.items():
        is_found, due = np.isfinite(found_s[kind]), is_so & is_lasting
        said = f"{(is_found & due).sum()} of {due.sum()}; {(is_found & ~is_so).sum()}"
        yield Figure(f"findings of {kind}: jobs; wrong ones", said)


def measure() -> Iterator[Figure]:
    site = WatchSite()
    yield from cancel_figures(site)
    yield from lemon_figures(site)
    yield from mttf_figures(site)


if __name__ == "__main__":
    main(measure)
