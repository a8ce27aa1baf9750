"""The watch on a generated site of 30 days: right cancels, and what else it finds.

Run: make bench-watch. benchmarks/watch_site.py makes the site. Cancels: of `idle` in the site's only partition after
cancel_min, by the default settings otherwise. A cancel is right if the job would not have used its GPUs again; recall
is of the jobs that idle to their end, within 10 minutes of the threshold, without those that are never cancelled.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
from figures import Figure, at_least, main
from watch_site import HANG, INTERACTIVE, KINDS, WatchSite

from advisor.watch.backtest import replay
from almanac.actions_config import WatchSection
from demo.shape import GPUS_PER_NODE

LATE_S = 600
FOUND = ("idle", "hang", "unused_gpus")


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
    yield from cancel_figures(WatchSite())


if __name__ == "__main__":
    main(measure)
