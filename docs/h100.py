"""Writes docs/h100.md: real H100 runs, treated as jobs, imported and summarized by almanac itself.

`python docs/h100.py` reads h100_dcgm_10hz.parquet of $ALMANAC_SHARED_DATA (by default ../shared/data) and writes the
page. `--check` only says whether the page is up to date.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq

from almanac.config import Filters
from almanac.hardware import gpu_models
from telemetry.store.store import Store

PAGE = Path(__file__).with_name("h100.md")
TEMPLATE = Path(__file__).with_name("h100.md.j2")
DATA = Path(os.environ.get("ALMANAC_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
FILE = "h100_dcgm_10hz.parquet"
CLUSTER = "h100"
LONG_GAP_S = 1.0
ABOUT = {
    "b1": "a model is loaded, and gets no requests",
    "e2": "mixed inference traffic",
    "t2": "training, data parallel, 136M parameters",
    "t13": "training on two nodes, tensor and pipeline parallel",
}
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RecordedRun:
    """One run of the recording: a job of whole nodes, from its first sample to its last, in whole seconds."""

    job_id: int
    name: str
    nodes: tuple[str, ...]
    gpus: int
    start_s: int
    end_s: int

    @property
    def length_s(self) -> int:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class RunEnergy:
    """A run's energy twice: by the counter's steps and by the integral of its power samples (trapezoids), J.

    by_gpu: (counter, integral) of each GPU between its first and last sample. in_gaps_j: the part of the difference
    from samples more than LONG_GAP_S apart.
    """

    by_gpu: tuple[tuple[float, float], ...]
    in_gaps_j: float
    longest_gap_s: float

    @property
    def difference(self) -> float:
        """The integral's difference to the counter, as a share of it."""
        return self.integral_j / self.counter_j - 1

    @property
    def counter_j(self) -> float:
        return sum(counter for counter, _ in self.by_gpu)

    @property
    def without_gaps(self) -> float:
        return self.difference - self.in_gaps_j / self.counter_j

    @property
    def integral_j(self) -> float:
        return sum(integral for _, integral in self.by_gpu)

    @property
    def worst_gpu(self) -> float:
        return max((integral / counter - 1 for counter, integral in self.by_gpu), key=abs)


def read_runs(path: Path) -> list[RecordedRun]:
    """The runs of the recording, in the order of their start."""
    table = pq.read_table(path, columns=["run", "node", "gpu", "timestamp"])
    found = []
    for name in pc.unique(table["run"]).to_pylist():
        mine = table.filter(pc.field("run") == name)
        first, last = (getattr(pc, side)(mine["timestamp"]).as_py() for side in ("min", "max"))
        nodes = tuple(sorted(str(node) for node in pc.unique(mine["node"]).to_pylist()))
        gpus = mine.group_by(["node", "gpu"]).aggregate([]).num_rows
        found.append((math.floor(first), math.floor(last) + 1, str(name), nodes, gpus))
    return [
        RecordedRun(job_id, name, nodes, gpus, start_s, end_s)
        for job_id, (start_s, end_s, name, nodes, gpus) in enumerate(sorted(found), 1)
    ]


def write_jobs(runs: Iterable[RecordedRun], path: Path) -> None:
    """A job trace in almanac's own layout, one row per run."""
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(["job_id", "name", "submit_s", "start_s", "end_s", "gpu_count", "node_list", "state"])
        for run in runs:
            hosts = ",".join(run.nodes)
            writer.writerow([run.job_id, run.name, run.start_s, run.start_s, run.end_s, run.gpus, hosts, "COMPLETED"])


def ingest(path: Path, runs: Iterable[RecordedRun], folder: Path) -> Store:
    """A store that `almanac ingest` made from the recording, with its default configuration."""
    config, jobs = folder / "almanac.toml", folder / "jobs.csv"
    config.touch()
    write_jobs(runs, jobs)
    argv = ["--config", str(config), "--store", str(folder / "store"), "-M", CLUSTER]
    argv += ["ingest", "--telemetry", str(path), "--jobs", str(jobs)]
    done = subprocess.run([sys.executable, "-m", "cli.main", *argv], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return Store.open(folder / "store")


def power(store: Store, run: RecordedRun, every_s: float = 0.0) -> RunEnergy:
    """Return both energies of a run. every_s: keep one sample per so many seconds; 0: all."""
    columns = ["host", "gpu", "time_ms", "power_w", "energy_mj"]
    rows = (
        store.of(CLUSTER)
        .read("telemetry", columns, run.start_s, run.end_s)
        .sort_by([("host", "ascending"), ("gpu", "ascending"), ("time_ms", "ascending")])
    )
    both, in_gaps_j, longest_s = [], 0.0, 0.0
    for series in _series(rows.to_pylist()):
        time_s, watts, energy_j = series[_thinned(series[:, 0], every_s)].T
        gap_s, counter = np.diff(time_s), np.diff(energy_j)
        integral = gap_s * (watts[1:] + watts[:-1]) / 2
        both.append((float(counter.sum()), float(integral.sum())))
        in_gaps_j += float((integral - counter)[gap_s > LONG_GAP_S].sum())
        longest_s = max(longest_s, float(gap_s.max()))
    return RunEnergy(tuple(both), in_gaps_j, longest_s)


def _series(rows: list[dict[str, Any]]) -> Iterator[Doubles]:
    """For each GPU, a row per sample: time (s), power (W), energy (J)."""
    for _, mine in groupby(rows, key=lambda row: (row["host"], row["gpu"])):
        yield np.array([(row["time_ms"] / 1e3, row["power_w"], row["energy_mj"] / 1e3) for row in mine])


def _thinned(time_s: Doubles, every_s: float) -> npt.NDArray[np.int64]:
    """The first sample of each slot of every_s; all of them where that is 0."""
    if not every_s:
        return np.arange(len(time_s))
    return np.unique(time_s // every_s, return_index=True)[1]


def page(path: Path) -> str:
    """The page's text."""
    runs = read_runs(path)
    with tempfile.TemporaryDirectory() as folder:
        store = ingest(path, runs, Path(folder))
        metrics = {row["job_id"]: row for row in store.of(CLUSTER).read("job_metrics").to_pylist()}
        gpus = store.of(CLUSTER).read("gpu_metrics").to_pylist()
        energies = {run.name: [power(store, run, every_s) for every_s in (0, 10, 30)] for run in runs}
    uneven = max(runs, key=lambda run: metrics[run.job_id]["spatial_imbalance"])
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters |= {"show": show, "class": name_class}
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        file=FILE,
        about=ABOUT,
        filters=Filters(),
        model=gpu_models()["H100-80"],
        jobs=[(run, metrics[run.job_id]) for run in runs],
        uneven=uneven,
        gpus=[row for row in gpus if row["job_id"] == uneven.job_id],
        power=energies,
        worst=max(runs, key=lambda run: abs(energies[run.name][0].difference)),
        rare=max(abs(every_30s.difference) for _, _, every_30s in energies.values()),
    )


def show(value: Any, template: str = "{}") -> str:
    """A value of a table; null if it is not known."""
    return "null" if value is None else template.format(value)


def name_class(job: dict[str, Any], pipe: str) -> str:
    """The job's class by a pipe, or null and why."""
    reasons = dict(text.split(": ", 1) for text in job["reasons"])
    metric = f"class_{pipe}"
    return job[metric] or f"null ({reasons[metric]})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA / FILE, help=f"the recording [{DATA / FILE}]")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is stale")
    options = parser.parse_args()
    if not options.data.exists():
        sys.stderr.write(f"{options.data} is missing: the real traces are not part of the project\n")
        return 2
    text = page(options.data)
    if options.check:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
