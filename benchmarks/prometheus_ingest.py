"""How fast raw samples come out of a real Prometheus and into the store, and what that means for 1,800 nodes.

Run: .venv/bin/python benchmarks/prometheus_ingest.py [--nodes N] [--hours H]
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from figures import Figure, report
from local_prometheus import LocalPrometheus, Series, find_binaries, write_openmetrics

from almanac.config import Prometheus
from almanac.records import Counts
from telemetry.counters import COUNTERS, Counter
from telemetry.sources.prometheus import PrometheusSource
from telemetry.store.store import Store

GPUS_A_NODE = 4
STEP_S = 10
SITE_NODES = 1800
END_S = 1_790_002_800
SITE_ROWS_A_DAY = SITE_NODES * GPUS_A_NODE * 86_400 // STEP_S


def series(counter: Counter, nodes: int, hours: int, rng: np.random.Generator) -> Iterator[Series]:
    """A history as dcgm-exporter would leave it: integers where it gives integers, else six decimals."""
    times = np.arange(END_S - hours * 3600, END_S, STEP_S) + 0.123
    fraction = counter.unit == "fraction"
    for node in range(nodes):
        for gpu in range(GPUS_A_NODE):
            labels = {
                "gpu": str(gpu),
                "UUID": f"GPU-{node:08x}-0000-4000-8000-{gpu:012x}",
                "device": f"nvidia{gpu}",
                "modelName": "NVIDIA A100-SXM4-40GB",
                "Hostname": f"nid{node:06d}",
                "hpc_job": str(1_000_000 + node),
                "instance": f"nid{node:06d}:9400",
                "job": "dcgm",
            }
            values = rng.random(len(times))
            yield labels, times, np.round(values, 6) if fraction else np.round(values * 90 + 1)


@dataclass
class Run:
    """One read of the whole history into a store of its own."""

    counts: Counts = field(default_factory=Counts)
    rows: int = 0
    batches: int = 0
    read_s: float = 0.0
    store_s: float = 0.0


def ingest(url: str, max_samples: int, hours: int, root: Path) -> Run:
    run, store = Run(), Store.create(root)
    source = PrometheusSource(Prometheus(url=url, max_samples=max_samples), clock=lambda: float(END_S + 3600))
    batches = source.read(END_S - hours * 3600, END_S)
    while True:
        began = time.perf_counter()
        batch = next(batches, None)
        run.read_s += time.perf_counter() - began
        if batch is None:
            return run
        began = time.perf_counter()
        store.of("bench").write(batch.table, batch.rows)
        run.store_s += time.perf_counter() - began
        run.counts.add(batch.counts)
        run.rows += batch.rows.num_rows
        run.batches += 1


def measure(nodes: int, hours: int, root: Path) -> list[Figure]:
    rng = np.random.default_rng(1)
    history = root / "history.om"
    number = write_openmetrics(history, {c.dcgm: series(c, nodes, hours, rng) for c in COUNTERS})
    prometheus = LocalPrometheus(root / "prometheus")
    prometheus.load(history)
    history.unlink()
    bound = Prometheus().max_samples
    with prometheus:
        # Cut as finely as the bound cuts a site of 1,800 nodes: every piece rewrites its hour's file.
        fine = ingest(prometheus.url, max(1000, bound * nodes // SITE_NODES), hours, root / "fine")
        whole = ingest(prometheus.url, bound, hours, root / "whole")
    for run in (fine, whole):
        if (run.counts.seen, run.counts.kept, run.rows) != (number, number, number // len(COUNTERS)):
            raise AssertionError(f"{number} samples were written, {run.counts} and {run.rows} rows came back")
    return figures(number, whole, fine)


def figures(number: int, whole: Run, fine: Run) -> list[Figure]:
    days_a_row = SITE_ROWS_A_DAY / whole.rows / 3600
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    site_h = (fine.read_s + fine.store_s) * days_a_row
    return [
        Figure("samples in the history", number),
        Figure("samples/s read and joined", number / whole.read_s),
        Figure("rows/s stored, an hour at once", whole.rows / whole.store_s),
        Figure("peak memory, MiB", peak_mib, "at most 2,048", peak_mib <= 2048),
        Figure(f"hours to read a day of {SITE_NODES} nodes x {len(COUNTERS)} counters", whole.read_s * days_a_row),
        Figure(f"hours to read and store it, {fine.batches} pieces here", site_h, "at most 6", site_h <= 6),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--hours", type=int, default=2)
    options = parser.parse_args()
    if find_binaries() is None:
        print("prometheus and promtool are not installed (Debian: apt-get install prometheus): nothing measured")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.nodes, options.hours, Path(folder))
    about = f"Prometheus ingest: {options.nodes} nodes of {GPUS_A_NODE} GPUs, {options.hours} h at {STEP_S} s"
    return 0 if report("prometheus_ingest", found, about) else 1


if __name__ == "__main__":
    sys.exit(main())
