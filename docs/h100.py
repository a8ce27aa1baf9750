"""Writes docs/h100.md: real H100 runs, treated as jobs, imported and summarised by almanac itself.

`python docs/h100.py` reads h100_dcgm_10hz.parquet of $ALMANAC_SHARED_DATA (by default ../shared/data) and writes the
page; `--check` only says whether the page is what the code gives. Nothing else is kept.
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

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq

from almanac.config import Filters
from almanac.hardware import gpu_models
from telemetry.store import Store

PAGE = Path(__file__).with_name("h100.md")
DATA = Path(os.environ.get("ALMANAC_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
FILE = "h100_dcgm_10hz.parquet"
CLUSTER = "h100"
LONG_GAP_S = 1.0
ABOUT = {
    "b1": "a model is loaded, and nothing is asked of it",
    "e2": "mixed inference traffic",
    "t2": "training, data parallel, 136M parameters",
    "t13": "training on two nodes, tensor and pipeline parallel",
}
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """One run of the recording: a job of whole nodes, from the second of its first sample to past that of its last."""

    job_id: int
    name: str
    nodes: tuple[str, ...]
    gpus: int
    start_s: int
    end_s: int


@dataclass(frozen=True)
class Power:
    """A run's energy twice: by the counter's steps and by the integral of its power samples (trapezoids), J.

    by_gpu: (counter, integral) of each GPU between its first and last sample. in_gaps_j: what of the difference
    arose between samples more than LONG_GAP_S apart.
    """

    by_gpu: tuple[tuple[float, float], ...]
    in_gaps_j: float
    longest_gap_s: float

    @property
    def difference(self) -> float:
        """The integral's difference to the counter, as a share of it."""
        return sum(integral for _, integral in self.by_gpu) / self.counter_j - 1

    @property
    def counter_j(self) -> float:
        return sum(counter for counter, _ in self.by_gpu)

    @property
    def without_gaps(self) -> float:
        return self.difference - self.in_gaps_j / self.counter_j

    @property
    def worst_gpu(self) -> float:
        return max((integral / counter - 1 for counter, integral in self.by_gpu), key=abs)


def read_runs(path: Path) -> list[Run]:
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
        Run(job_id, name, nodes, gpus, start_s, end_s)
        for job_id, (start_s, end_s, name, nodes, gpus) in enumerate(sorted(found), 1)
    ]


def write_jobs(runs: Iterable[Run], path: Path) -> None:
    """A job trace in almanac's own layout, one row per run."""
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(["job_id", "name", "submit_s", "start_s", "end_s", "gpu_count", "node_list", "state"])
        for run in runs:
            hosts = ",".join(run.nodes)
            writer.writerow([run.job_id, run.name, run.start_s, run.start_s, run.end_s, run.gpus, hosts, "COMPLETED"])


def ingest(path: Path, runs: Iterable[Run], folder: Path) -> Store:
    """A store that `almanac ingest` made of the recording, with its default configuration."""
    config, jobs = folder / "almanac.toml", folder / "jobs.csv"
    config.touch()
    write_jobs(runs, jobs)
    argv = ["--config", str(config), "--store", str(folder / "store"), "-M", CLUSTER]
    argv += ["ingest", "--telemetry", str(path), "--jobs", str(jobs)]
    done = subprocess.run([sys.executable, "-m", "cli.main", *argv], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return Store.open(folder / "store")


def power(store: Store, run: Run, every_s: float = 0.0) -> Power:
    """Both energies of a run. every_s: as if it had been scraped so rarely."""
    columns = ["host", "gpu", "time_ms", "power_w", "energy_mj"]
    rows = store.read("telemetry", CLUSTER, columns, run.start_s, run.end_s).sort_by(
        [("host", "ascending"), ("gpu", "ascending"), ("time_ms", "ascending")]
    )
    both, in_gaps_j, longest_s = [], 0.0, 0.0
    for series in _series(rows.to_pylist()):
        time_s, watts, energy_j = series[_thinned(series[:, 0], every_s)].T
        gap_s, counter = np.diff(time_s), np.diff(energy_j)
        integral = gap_s * (watts[1:] + watts[:-1]) / 2
        both.append((float(counter.sum()), float(integral.sum())))
        in_gaps_j += float((integral - counter)[gap_s > LONG_GAP_S].sum())
        longest_s = max(longest_s, float(gap_s.max()))
    return Power(tuple(both), in_gaps_j, longest_s)


def _series(rows: list[dict[str, Any]]) -> Iterator[Doubles]:
    """Of each GPU a row per sample: time (s), power (W), energy (J)."""
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
        jobs = {row["job_id"]: row for row in store.read("job_metrics", CLUSTER).to_pylist()}
        gpus = store.read("gpu_metrics", CLUSTER).to_pylist()
        energies = {run.job_id: [power(store, run, every_s) for every_s in (0, 10, 30)] for run in runs}
    metrics = [(run, jobs[run.job_id]) for run in runs]
    uneven = max(runs, key=lambda run: jobs[run.job_id]["spatial_imbalance"])
    parts = [
        _head(),
        _samples(metrics),
        _use(metrics),
        _gpus(uneven, [row for row in gpus if row["job_id"] == uneven.job_id]),
        _roofline(metrics),
        _energy([(run, jobs[run.job_id], energies[run.job_id]) for run in runs]),
    ]
    return "\n".join(parts)


def _head() -> str:
    return f"""# Real H100 runs

<!-- Written by docs/h100.py from {FILE}; `python docs/h100.py` writes it anew. -->

What almanac makes of four real runs on nodes of 8 H100-80GB, recorded through DCGM ten times a second (traces of
gpu-telemetry-exploration; not part of this repository). Each run is treated as a job of whole nodes, from its first
sample to its last:

```sh
almanac ingest --telemetry {FILE} --jobs jobs.csv    # the layout is found from the columns
almanac jobs -a
```

`docs/h100.py` makes `jobs.csv` from the recording, runs this command with the default configuration, and writes this
page from the tables `job_metrics` and `gpu_metrics`. Formulas: [formulas.md](formulas.md).
"""


def _samples(metrics: list[tuple[Run, dict[str, Any]]]) -> str:
    rows = [
        (run.name, ABOUT.get(run.name, ""), f"{len(run.nodes)} x {run.gpus // len(run.nodes)}",
         f"{run.end_s - run.start_s}", f"{job['samples']:,}",
         f"{(run.end_s - run.start_s) * run.gpus / job['expected_samples']:.3f}",
         f"{job['coverage_frac']:.3f}", f"{job['spatial_windows']}", job["verdict"])
        for run, job in metrics
    ]  # fmt: skip
    columns = ("run", "what it does", "nodes x GPUs", "length, s", "samples", "scrape interval, s", "coverage",
               "windows of 60 s", "verdict")  # fmt: skip
    idle = Filters().min_gpu_util_pct
    return f"""## Samples

{_table(columns, rows)}

The scrape interval is found in the data. A run with a mean GPU_UTIL below {idle:g}% is idle: it keeps its metrics, and
has no HBM peak to learn from.
"""


def _use(metrics: list[tuple[Run, dict[str, Any]]]) -> str:
    rows = [
        (run.name, f"{job['mean_gpu_util_pct']:.1f}", f"{job['mean_sm_active_frac']:.3f}",
         f"{job['spatial_imbalance']:.3f}", f"{job['temporal_imbalance']:.3f}",
         _or(job, "hbm_peak_mib", "{:,.0f}"), _or(job, "hbm_peak_frac", "{:.1%}"), f"{job['hbm_max_mib']:,.0f}",
         f"{job['max_temp_c']:.0f}")
        for run, job in metrics
    ]  # fmt: skip
    columns = ("run", "GPU_UTIL, %", "SM active", "spatial imbalance", "temporal imbalance", "HBM peak, MiB",
               "of capacity", "highest sample, MiB", "hottest, degC")  # fmt: skip
    capacity = gpu_models()["H100-80"].hbm_mib
    return f"""## Use and imbalance

{_table(columns, rows)}

Capacity is the nominal {capacity:,} MiB. Temporal imbalance is that of the GPU with the highest: 0 is steady work, near
1 a short burst in a long idleness.
"""


def _gpus(run: Run, gpus: list[dict[str, Any]]) -> str:
    rows = [
        (f"{row['host']}:{row['gpu']}", f"{row['mean_gpu_util_pct']:.1f}", f"{row['temporal_imbalance']:.3f}",
         f"{row['hbm_peak_mib']:,.0f}", f"{row['mean_tensor_active_frac']:.3f}",
         f"{row['mean_dram_active_frac']:.3f}", f"{row['energy_j']:,.0f}", f"{row['energy_power_w']:.0f}")
        for row in sorted(gpus, key=lambda row: (row["host"], row["gpu"]))
    ]  # fmt: skip
    columns = ("GPU", "GPU_UTIL, %", "temporal imbalance", "HBM peak, MiB", "tensor active", "DRAM active", "energy, J",
               "mean power, W")  # fmt: skip
    return f"""The most uneven run, {run.name}, GPU by GPU. With half of the GPUs idle, spatial imbalance would be 0.5.

{_table(columns, rows)}
"""


def _roofline(metrics: list[tuple[Run, dict[str, Any]]]) -> str:
    rows = [
        (run.name, f"{job['mean_tensor_active_frac']:.3f}", f"{job['mean_dram_active_frac']:.3f}",
         f"{job['flops_tensor'] / 1e12:,.1f}", f"{job['hbm_bytes_s'] / 1e12:.2f}",
         f"{job['intensity_tensor']:.1f}", _or(job, "compute_frac_tensor", "{:.1%}"),
         job["class_tensor"] or f"null ({_reason(job, 'class_tensor')})",
         job["class_fp64"] or f"null ({_reason(job, 'class_fp64')})")
        for run, job in metrics
    ]  # fmt: skip
    columns = ("run", "tensor active", "DRAM active", "tensor Tflop/s", "HBM TB/s", "intensity, flop/byte",
               "time compute-bound", "class, tensor", "class, FP64")  # fmt: skip
    model = gpu_models()["H100-80"]
    assert model.tensor_flops
    tflops, ridge = model.tensor_flops / 1e12, model.tensor_flops / model.hbm_bytes_per_s
    return f"""## Roofline

{_table(columns, rows)}

Flop/s and bytes/s are sums over all GPUs, from the mean activity and the peaks of an H100 SXM ({tflops:g} Tflop/s of
the dense FP16/BF16 tensor pipe, {model.hbm_bytes_per_s / 1e12:g} TB/s): an upper bound of the flop, since an active
pipe need not be a full one. The ridge lies at {ridge:.0f} flop/byte. The class is that of the larger share of the
time, so a run whose sums lie right of the ridge can still be memory-bound most of the time. The recording has no FP64
and FP32 counters: those classes are null with the reason, and not `memory`. Metrics that are null, and why:

{_table(("run", "null, and why"), [(run.name, "; ".join(job["reasons"])) for run, job in metrics])}
"""


def _energy(runs: list[tuple[Run, dict[str, Any], list[Power]]]) -> str:
    rows = [
        (run.name, f"{job['energy_j']:,.0f}", f"{job['energy_j'] / 3.6e6:.3f}", f"{job['energy_power_w']:.1f}",
         f"{sum(integral for _, integral in all_samples.by_gpu):,.0f}", f"{all_samples.difference:+.2%}",
         f"{all_samples.worst_gpu:+.2%}", f"{all_samples.longest_gap_s:.2f}",
         f"{every_10s.difference:+.2%}", f"{every_30s.difference:+.2%}")
        for run, job, (all_samples, every_10s, every_30s) in runs
    ]  # fmt: skip
    columns = ("run", "energy, J", "kWh", "mean power of a GPU, W", "integral of power, J", "difference", "worst GPU",
               "longest gap, s", "scraped every 10 s", "every 30 s")  # fmt: skip
    worst, _, (found, *_) = max(runs, key=lambda item: abs(item[2][0].difference))
    return f"""## Energy

Energy is the sum of the steps of the cumulative counter. Beside it the integral of the power samples over the same
time (trapezoids), and by how much it differs; the last two columns are the difference as it would be with one sample
every 10 and 30 s.

{_table(columns, rows)}

The two agree within {math.ceil(abs(found.difference) * 100)}% for every run. The largest difference is that of
{worst.name}: {found.difference:+.2%}, and {found.without_gaps:+.2%} without the hole of {found.longest_gap_s:.2f} s in
its recording. Across a hole the integral can only draw a straight line; the counter goes on counting. For the same
reason the integral gets worse with rarer samples and the counter does not: almanac takes energy from the counter.
"""


def _or(job: dict[str, Any], metric: str, template: str) -> str:
    """A metric, or null and the reason."""
    return "null" if job[metric] is None else template.format(job[metric])


def _reason(job: dict[str, Any], metric: str) -> str:
    reasons: list[str] = job["reasons"]
    return next(text.partition(": ")[2] for text in reasons if text.startswith(f"{metric}: "))


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(columns)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA / FILE, help=f"the recording [{DATA / FILE}]")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the page is stale")
    options = parser.parse_args()
    if not options.data.exists():
        sys.stderr.write(f"{options.data} is not there: the real traces are not part of the project\n")
        return 2
    text = page(options.data)
    if options.check:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
