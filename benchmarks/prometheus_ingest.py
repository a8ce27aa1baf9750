"""How fast raw samples come out of a real Prometheus and into the store, and what that means for 1,800 nodes.

Run: .venv/bin/python benchmarks/prometheus_ingest.py [--nodes N] [--hours H]
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from figures import Figure, at_most, main
from local_prometheus import LocalPrometheus, Series, find_binaries, write_openmetrics

from almanac.config import Prometheus
from almanac.records import Counts
from telemetry.counters import COUNTERS, Counter
from telemetry.ingest import IngestResult, ingest
from telemetry.sources.exporters import presets
from telemetry.sources.prometheus import PrometheusSource
from telemetry.store.store import Store

GPUS_A_NODE = 4
STEP_S = 10
SITE_NODES = 1800
END_S = 1_790_002_800
SITE_ROWS_A_DAY = SITE_NODES * GPUS_A_NODE * 86_400 // STEP_S
FILE_NODES = 300
"""Those of the day that telemetry_import.py imports from a file."""


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


@dataclass(frozen=True)
class Run:
    """One ingest of the whole history into its own store, with the CPU seconds of this process and of Prometheus."""

    counts: Counts
    rows: int
    wall_s: float
    cpu_s: float
    server_cpu_s: float


def ingest_history(server: LocalPrometheus, max_samples: int, hours: int, root: Path) -> Run:
    store = Store.create(root).of("bench")
    source = PrometheusSource(Prometheus(url=server.url, max_samples=max_samples), clock=lambda: float(END_S + 3600))
    result = IngestResult(source.name, END_S - hours * 3600, END_S)
    began, cpu, server_cpu = time.perf_counter(), time.process_time(), cpu_s(server.pid)
    ingest(source, store, result.since_s, result.until_s, result, lambda rows, reached_s: None)
    wall, cpu, server_cpu = time.perf_counter() - began, time.process_time() - cpu, cpu_s(server.pid) - server_cpu
    return Run(result.counts, result.written["telemetry"].added, wall, cpu, server_cpu)


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(nodes: int, hours: int, root: Path) -> list[Figure]:
    rng = np.random.default_rng(1)
    history, dcgm = root / "history.om", presets()["dcgm"]
    number = write_openmetrics(history, {dcgm.main(c.column).name: series(c, nodes, hours, rng) for c in COUNTERS})
    prometheus = LocalPrometheus(root / "prometheus")
    prometheus.load(history)
    history.unlink()
    with prometheus:
        # The bound is scaled, so that queries are as short as those of a site of 1,800 nodes.
        run = ingest_history(prometheus, Prometheus().max_samples * nodes // SITE_NODES, hours, root / "store")
    if (run.counts.seen, run.counts.kept, run.rows) != (number, number, number // len(COUNTERS)):
        raise AssertionError(f"{number} samples were written, {run.counts} and {run.rows} rows came back")
    return figures(number, run)


def figures(number: int, run: Run) -> list[Figure]:
    hours = SITE_ROWS_A_DAY / run.rows / 3600
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    both_h, day = (run.cpu_s + run.server_cpu_s) * hours, f"a day of {SITE_NODES} nodes x {len(COUNTERS)} counters"
    return [
        Figure("samples in the history", number),
        Figure("samples/s read and stored", number / run.wall_s),
        at_most("peak memory, MiB", peak_mib, 2048),
        at_most(f"{day}: hours", run.wall_s * hours, 0.5),
        Figure(
            f"a day of {FILE_NODES} nodes, as in telemetry_import: s",
            run.wall_s * hours * 3600 * FILE_NODES / SITE_NODES,
        ),
        Figure(f"{day}: CPU hours of almanac", run.cpu_s * hours),
        at_most(f"{day}: CPU hours of almanac and Prometheus, on two cores", both_h, 1),
    ]


def measured() -> list[Figure]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--hours", type=int, default=2)
    options = parser.parse_args()
    if find_binaries() is None:
        raise FileNotFoundError("prometheus and promtool are not installed (Debian: apt-get install prometheus)")
    with tempfile.TemporaryDirectory() as folder:
        return measure(options.nodes, options.hours, Path(folder))


if __name__ == "__main__":
    main(measured)
