"""Speed of raw samples from a real Prometheus into the store, and the time that 1,800 nodes would take.

Run: .venv/bin/python benchmarks/prometheus_ingest.py [--nodes N] [--hours H]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from figures import Figure, at_most, main

from almanac.config import Prometheus
from almanac.records import Counts
from telemetry.counters import COUNTERS, Counter
from telemetry.ingest import IngestResult, ingest
from telemetry.sources.exporters import presets
from telemetry.sources.prometheus import PrometheusSource
from telemetry.store.store import Store

Series = tuple[Mapping[str, str], np.ndarray, np.ndarray]
"""Labels, times (s) and values."""


def find_binaries() -> tuple[str, str] | None:
    """Paths of prometheus and promtool; None where one is missing."""
    found = shutil.which("prometheus"), shutil.which("promtool")
    return (found[0], found[1]) if found[0] and found[1] else None


def write_openmetrics(path: Path, metrics: Mapping[str, Iterable[Series]]) -> int:
    """Write a history as OpenMetrics text, all series of a metric together; the number of samples."""
    number = 0
    with path.open("w", encoding="utf-8") as out:
        for name, series in metrics.items():
            out.write(f"# TYPE {name} gauge\n")
            for labels, time_s, value in series:
                inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
                head = f"{name}{{{inside}}} "
                out.writelines(f"{head}{v!r} {t:.3f}\n" for v, t in zip(value.tolist(), time_s.tolist(), strict=True))
                number += len(value)
        out.write("# EOF\n")
    return number


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class LocalPrometheus:
    """A server over `root`; used as a context manager it is stopped at the end.

    scrapes: host:port of exporters. jobs: further scrape_configs.
    """

    def __init__(
        self, root: Path, *options: str, scrapes: Sequence[str] = (), jobs: Sequence[Mapping[str, object]] = ()
    ) -> None:
        binaries = find_binaries()
        if binaries is None:
            raise FileNotFoundError("prometheus and promtool are not installed (Debian: apt-get install prometheus)")
        self._prometheus, self._promtool = binaries
        self._root, self._options, self._scrapes, self._jobs = root, options, scrapes, jobs
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def load(self, openmetrics: Path) -> None:
        """Make blocks of a history; the server must not run."""
        argv = [self._promtool, "tsdb", "create-blocks-from", "openmetrics", "--quiet", str(openmetrics)]
        subprocess.run([*argv, str(self._root / "data")], check=True, capture_output=True)

    def __enter__(self) -> LocalPrometheus:
        self._root.mkdir(parents=True, exist_ok=True)
        config = self._root / "prometheus.yml"
        # honor_labels: the exporter's own labels win over Prometheus' job and instance. JSON is YAML.
        job = {"job_name": "dcgm", "honor_labels": True, "static_configs": [{"targets": list(self._scrapes)}]}
        jobs = [job, *self._jobs] if self._scrapes else list(self._jobs)
        wanted = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs} if jobs else {"global": {}}
        config.write_text(json.dumps(wanted) + "\n")
        with (self._root / "prometheus.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._prometheus,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={self._root / 'data'}",
                    "--storage.tsdb.retention.time=20y",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                    *self._options,
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, "TZ": "UTC"},
            )
        self._wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=30)

    def _wait(self, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise TimeoutError((self._root / "prometheus.log").read_text()[-2000:])


GPUS_A_NODE = 4
STEP_S = 10
SITE_NODES = 1800
END_S = 1_790_002_800
SITE_ROWS_A_DAY = SITE_NODES * GPUS_A_NODE * 86_400 // STEP_S
FILE_NODES = 300
"""Those of the day that telemetry_import.py imports from a file."""


def series(counter: Counter, nodes: int, hours: int, rng: np.random.Generator) -> Iterator[Series]:
    """A history as dcgm-exporter would leave it: integers for its integer fields, else six decimals."""
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
class IngestRun:
    """One ingest of the whole history into its own store, with the CPU seconds of this process and of Prometheus."""

    counts: Counts
    rows: int
    wall_s: float
    cpu_s: float
    server_cpu_s: float


def ingest_history(server: LocalPrometheus, max_samples: int, hours: int, root: Path) -> IngestRun:
    store = Store.create(root).of("bench")
    source = PrometheusSource(Prometheus(url=server.url, max_samples=max_samples), clock=lambda: float(END_S + 3600))
    result = IngestResult(source.name, END_S - hours * 3600, END_S)
    began, cpu, server_cpu = time.perf_counter(), time.process_time(), cpu_s(server.pid)
    ingest(source, store, result.since_s, result.until_s, result, lambda rows, reached_s: None)
    wall, cpu, server_cpu = time.perf_counter() - began, time.process_time() - cpu, cpu_s(server.pid) - server_cpu
    return IngestRun(result.counts, result.written["telemetry"].added, wall, cpu, server_cpu)


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


def figures(number: int, run: IngestRun) -> list[Figure]:
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
