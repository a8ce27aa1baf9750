"""Cost of reports in a batch: 100 with their pictures, from a store; and its growth with the number of jobs.

Run: python benchmarks/job_reports.py (`make bench-reports`).
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path

import numpy as np
from figures import Figure, at_most, main

from almanac.config_file import parse_config
from demo import GeneratedSource, SiteShape
from reports.job.build import build
from reports.job.conclusions import report_of
from reports.job.render import render_email
from telemetry.ingest import IngestResult, ingest
from telemetry.metrics.summary import summarize
from telemetry.site import Site
from telemetry.store.store import Store

BATCH, MOST_S, MOST_KB = 100, 0.5, 200
CLUSTER = "bench"
CONFIG = parse_config(
    {
        "tiers": [
            {"name": "hbm40g", "capacity_mib": 40960, "constraint": "hbm40g"},
            {"name": "hbm80g", "capacity_mib": 81920, "constraint": "hbm80g"},
        ]
    }
)


def fill(folder: Path) -> tuple[Store, int]:
    """Four days of the generated site with their summary, and when they end."""
    shape = dataclasses.replace(SiteShape.demo(1), days=4)
    store = Store.create(folder / "store")
    result = IngestResult("generated", shape.start_s, shape.end_s)
    ingest(GeneratedSource(shape), store.of(CLUSTER), shape.start_s, shape.end_s, result, lambda rows, reached_s: None)
    summarize(store.of(CLUSTER), CONFIG)
    return store, shape.end_s


def timed(store: Store, job_ids: list[int], now_s: int) -> tuple[float, float, list[int], list[float]]:
    """Wall and CPU seconds of the batch, bytes of each mail, and CPU seconds of each one's rendering."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    sizes, rendering_s = [], []
    for context in build(Site.of(store.of(CLUSTER), CONFIG, now_s), job_ids):
        started = time.process_time()
        mail = render_email(report_of(context))
        rendering_s.append(time.process_time() - started)
        sizes.append(len(mail.html) + len(mail.text) + sum(map(len, mail.images.values())))
    return time.perf_counter() - wall_s, time.process_time() - cpu_s, sizes, rendering_s


def measure(folder: Path) -> list[Figure]:
    store, now_s = fill(folder)
    metrics = store.of(CLUSTER).read("job_metrics", ["job_id", "verdict"]).to_pylist()
    measured = [row["job_id"] for row in metrics if row["verdict"] == "ok"]
    timed(store, measured[:2], now_s)  # imports and fonts, once a process
    wall_s, cpu_s, sizes, rendering_s = timed(store, measured[:BATCH], now_s)
    # The better of two runs each: the machine has other work.
    again_s = timed(store, measured[:BATCH], now_s)[1]
    double_s = min(timed(store, measured[: 2 * BATCH], now_s)[1] for _ in range(2))
    one_s, _, _, _ = timed(store, measured[:1], now_s)
    each_s, growth = wall_s / BATCH, double_s / min(cpu_s, again_s)
    return [
        at_most(f"a report in a batch of {BATCH}, with pictures, s", each_s, MOST_S),
        Figure("  of it CPU, s", cpu_s / BATCH),
        at_most("  of it CPU of the slowest rendering, s", max(rendering_s), MOST_S),
        Figure("  CPU of reading the store for the batch, s", cpu_s - sum(rendering_s)),
        at_most("CPU of twice as many jobs, times that of the batch", growth, 2.2),
        Figure("one report alone, s", one_s),
        Figure("size of a mail, median, kB", float(np.median(sizes)) / 1000),
        at_most("size of a mail, largest, kB", max(sizes) / 1000, MOST_KB),
        Figure("jobs measured in the store", len(measured)),
    ]


def in_new_folder() -> list[Figure]:
    with tempfile.TemporaryDirectory() as name:
        return measure(Path(name))


if __name__ == "__main__":
    main(in_new_folder)
