"""Equipment of a cluster test: a running Slurm, the fake exporter, and the Prometheus that scrapes it."""

from __future__ import annotations

import os
import re
import shlex
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lab import SlurmLab
from processes import wait_until
from prometheus import Prometheus

HERE = Path(__file__).resolve().parent
TRACE = "h100_dcgm_10hz.parquet"
SERIES = re.compile(r"(?P<metric>\w+)\{(?P<labels>.*)\} (?P<value>\S+)")


def trace_path() -> Path:
    """Path of the recorded counters on a developer's machine; the file need not be there."""
    shared = os.environ.get("ALMANAC_SHARED_DATA") or HERE.parents[2] / "shared" / "data"
    return Path(shared) / TRACE


@dataclass(frozen=True)
class Series:
    """One line of the exporter: the metric, its labels and the value."""

    metric: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Cluster:
    """The running testbed. Jobs go in by train(); sacct, Prometheus and the Prolog's records tell of them."""

    lab: SlurmLab
    prometheus: Prometheus
    exporter_url: str
    prolog_dir: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prolog_dir", self.lab.root / "prolog")

    def train(self, user: str, *options: str, profile: str | float = "low", seconds: float = 10, tail: str = "") -> int:
        """Submits a job that uses memory as `profile` says (a name of fake_dcgm, or GiB) for `seconds`.

        tail: shell lines after it, such as "exit 3". Returns the job id.
        """
        said = f"echo {shlex.quote(str(profile))} > {self.lab.root}/profiles/$SLURM_JOB_ID"
        return self.lab.sbatch(user, *options, script=f"#!/bin/sh\n{said}\nsleep {seconds}\n{tail}\n")

    def scrape(self, metric: str = "") -> list[Series]:
        """Return the exporter's samples now, of one metric or of all."""
        with urllib.request.urlopen(self.exporter_url, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        matches = (SERIES.fullmatch(line) for line in lines)
        series = (
            Series(match["metric"], dict(re.findall(r'(\w+)="([^"]*)"', match["labels"])), float(match["value"]))
            for match in matches
            if match
        )
        return [one for one in series if metric in ("", one.metric)]

    def prolog_records(self, job_id: int) -> list[dict[str, str]]:
        """The records of one job, one per node, each as its keys and values."""
        paths = sorted(self.prolog_dir.glob(f"*.{job_id}.*"))
        return [dict(line.split("=", 1) for line in path.read_text().splitlines()) for path in paths]


@contextmanager
def running_cluster(root: Path) -> Iterator[Cluster]:
    """Starts everything below `root`; ends every process of it on leaving, also after a failure."""
    with SlurmLab(root) as lab:
        ports = lab.ports()
        exporter_port, prometheus_port = next(ports), next(ports)
        exporter = lab.start_daemon(
            "exporter", sys.executable, HERE / "fake_dcgm.py", f"--port={exporter_port}",
            f"--jobs={lab.root / 'hpc_job'}", f"--profiles={lab.root / 'profiles'}", f"--trace={trace_path()}",
            f"--mig={lab.root / 'mig'}",
        )  # fmt: skip
        cluster = Cluster(
            lab, Prometheus(lab, prometheus_port, exporter_port), f"http://127.0.0.1:{exporter_port}/metrics"
        )

        def answers() -> bool:
            exporter.check()
            try:
                return len(cluster.scrape("DCGM_FI_DEV_FB_USED")) > 0
            except OSError:
                return False

        wait_until("the exporter", answers, [exporter.log])
        cluster.prometheus.start()
        yield cluster
