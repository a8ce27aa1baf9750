"""Jobs of one GPU or slice that arrive at a MIG cluster: the generator, with every assumption as a parameter.

Arrivals are Poisson with a rate that follows the hour of the day. Each class of jobs has its own share of the offered
time, by day and by night. Run times are lognormal. A job needs memory and keeps some compute slices busy; its shape is
the smallest that holds the memory and slows it down by at most 1.5 (the advice's own rule). The load is the time that
the jobs would take on full GPUs, over the GPUs' time: with slices, loads above 1 can be served.
"""

from __future__ import annotations

import csv
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from advisor.mig.outlook import PoolJob
from advisor.mig.states import WHOLE, Sizes, is_placeable, sizes_of
from almanac.errors import FileFormatError
from almanac.files import parse_json, read_plain
from almanac.hardware import MigModel, profile_name
from almanac.units import DAY_S, HOUR_S, printable
from telemetry.store.database import require_readable

MAX_SLOWDOWN = 1.5


@dataclass(frozen=True)
class SliceRequest:
    """A simulated job that asks for one MIG slice or a whole GPU.

    submit_s, full_s: submission and run time on a full GPU, in seconds. shape: of the slice, such as "1g", or "gpu".
    compute: compute slices that it keeps busy.
    """

    submit_s: float
    full_s: float
    shape: str
    compute: float


@dataclass(frozen=True)
class JobClass:
    """Jobs of one kind. day, night: weight of its offered time at 15:00 and at 3:00, before the load scales them.

    median_s, sigma: of the lognormal run time on a full GPU. memory_gib, compute: uniform between the two.
    """

    name: str
    day: float
    night: float
    median_s: float
    sigma: float
    memory_gib: tuple[float, float]
    compute: tuple[float, float]

    @property
    def mean_s(self) -> float:
        """Mean run time on a full GPU."""
        return self.median_s * math.exp(self.sigma**2 / 2)


@dataclass(frozen=True)
class SliceDemand:
    """Jobs to generate. classes: see JobClass; flat demand uses the mean of day and night.

    drift_per_day: factor per day on the weights of the classes, in their order; () for none. bursts_per_day,
    burst_jobs: times that one class submits many jobs at once, such as an array, and the mean number of these.
    """

    classes: tuple[JobClass, ...]
    is_flat: bool = False
    drift_per_day: tuple[float, ...] = ()
    bursts_per_day: float = 0.0
    burst_jobs: float = 0.0


CLASSES = (
    JobClass("notebook", 0.40, 0.08, 20 * 60, 1.0, (0.5, 4.6), (0.2, 1.4)),
    JobClass("inference", 0.30, 0.12, 30 * 60, 1.0, (4.9, 9.4), (0.6, 3.0)),
    JobClass("fine-tuning", 0.28, 0.18, 60 * 60, 1.0, (10.0, 19.0), (1.5, 6.0)),
    JobClass("training", 0.18, 0.30, 90 * 60, 1.0, (20.0, 38.0), (3.5, 7.0)),
)
"""Shares of a site where people work on notebooks by day and train whole models overnight (an assumption)."""
TIGHT = (
    JobClass("notebook", 0.30, 0.06, 30 * 60, 1.0, (0.5, 4.6), (0.2, 1.4)),
    JobClass("inference", 0.24, 0.10, 45 * 60, 1.0, (4.9, 9.4), (0.6, 3.0)),
    JobClass("fine-tuning", 0.36, 0.20, 90 * 60, 1.0, (10.0, 19.0), (1.5, 6.0)),
    JobClass("training", 0.30, 0.34, 150 * 60, 1.0, (20.0, 38.0), (3.5, 7.0)),
)
"""Longer jobs, and more that need much of a GPU: at a load of 1.31 the slices are nine tenths full by day."""
DEMANDS = {
    "tight": SliceDemand(TIGHT),
    "tight-flat": SliceDemand(TIGHT, is_flat=True),
    "daynight": SliceDemand(CLASSES),
    "flat": SliceDemand(CLASSES, is_flat=True),
    "small": SliceDemand((JobClass("notebook", 0.6, 0.2, 20 * 60, 1.2, (0.5, 4.6), (0.2, 1.4)), *CLASSES[1:])),
    "large": SliceDemand((*CLASSES[:3], JobClass("training", 0.5, 0.7, 240 * 60, 0.8, (20.0, 38.0), (3.5, 7.0)))),
    "drift": SliceDemand(CLASSES, drift_per_day=(1.5, 1.2, 0.8, 0.7)),
    "drift-large": SliceDemand(CLASSES, drift_per_day=(0.7, 0.8, 1.2, 1.4)),
    "heavy": SliceDemand(
        tuple(JobClass(c.name, c.day, c.night, c.median_s / 2, 1.6, c.memory_gib, c.compute) for c in CLASSES)
    ),
    "short": SliceDemand(_scaled := tuple(replace(each, median_s=each.median_s / 2) for each in CLASSES)),
    "short-flat": SliceDemand(_scaled, is_flat=True),
    "bursts": SliceDemand(CLASSES, bursts_per_day=4, burst_jobs=30),
}
"""Named demands. `daynight` and `flat` are the ones that the goals name; the others test robustness."""


def shape_of(model: MigModel, memory_gib: float, compute: float) -> str:
    """The smallest shape that holds the memory and keeps the slow-down; the whole GPU if no slice does."""
    sizes = sizes_of(model)
    for shape, slices in zip(sizes.shapes[:-1], sizes.compute, strict=False):
        profile = model.profile(shape)
        held_gib = profile.memory_gib[0] if profile and profile.memory_gib else 0.0
        if memory_gib <= held_gib and compute / slices <= MAX_SLOWDOWN:
            return shape
    return sizes.shapes[-1]


def generate(
    demand: SliceDemand, model: MigModel, gpus: int, load: float, days: float, seed: int
) -> list[SliceRequest]:
    """Generate jobs by submit time. The same arguments give the same jobs. `load` is the expected one."""
    rng = random.Random(f"mig {seed}")
    scale = load * gpus / _mean_weight(demand, days)
    jobs: list[SliceRequest] = []
    for place, each in enumerate(demand.classes):
        peak = (
            scale * max(_weight(demand, place, hour * HOUR_S) for hour in range(math.ceil(days * 24) + 1)) / each.mean_s
        )
        share = _burst_share(demand, each, scale) if demand.bursts_per_day else 0.0
        now_s = 0.0
        while (now_s := now_s + rng.expovariate(peak)) < days * DAY_S:
            if rng.random() * peak < scale * _weight(demand, place, now_s) / each.mean_s * (1 - share):
                jobs.append(_job(rng, each, model, now_s))
    jobs += _bursts(rng, demand, model, days)
    return sorted(jobs, key=lambda job: job.submit_s)


def split_days(jobs: Sequence[SliceRequest], days: float) -> tuple[list[SliceRequest], list[SliceRequest]]:
    """The jobs of the first days as history, and the others with times from 0 s."""
    moved = [replace(job, submit_s=job.submit_s - days * DAY_S) for job in jobs]
    return [job for job in moved if job.submit_s < 0], [job for job in moved if job.submit_s >= 0]


def pool_jobs(jobs: Sequence[SliceRequest], sizes: Sizes) -> list[PoolJob]:
    """The jobs as advisor.mig.outlook wants them."""
    places = {shape: place for place, shape in enumerate(sizes.shapes)}
    return [PoolJob(job.submit_s, places[job.shape], sizes.run_times(job.full_s, job.compute)) for job in jobs]


def _weight(demand: SliceDemand, place: int, now_s: float) -> float:
    each = demand.classes[place]
    day = 0.5 if demand.is_flat else 0.5 + 0.5 * math.cos(2 * math.pi * (now_s / DAY_S - 15 / 24))
    drift = demand.drift_per_day[place] ** (now_s / DAY_S) if demand.drift_per_day else 1.0
    return (each.night + (each.day - each.night) * day) * drift


def _mean_weight(demand: SliceDemand, days: float) -> float:
    times = [hour * HOUR_S for hour in range(max(1, round(days * 24)))]
    return sum(_weight(demand, place, now_s) for place in range(len(demand.classes)) for now_s in times) / len(times)


def _burst_share(demand: SliceDemand, each: JobClass, scale: float) -> float:
    """The part of a class's mean offered time that arrives in bursts, at most one half."""
    burst_s = demand.bursts_per_day / len(demand.classes) * demand.burst_jobs * each.mean_s
    return min(0.5, burst_s / (scale * (each.day + each.night) / 2 * DAY_S))


def _bursts(rng: random.Random, demand: SliceDemand, model: MigModel, days: float) -> list[SliceRequest]:
    jobs: list[SliceRequest] = []
    now_s = 0.0
    while demand.bursts_per_day and (now_s := now_s + rng.expovariate(demand.bursts_per_day / DAY_S)) < days * DAY_S:
        each = rng.choice(demand.classes)
        first = _job(rng, each, model, now_s)
        for _ in range(round(rng.uniform(0.5, 1.5) * demand.burst_jobs)):
            jobs.append(
                SliceRequest(now_s, rng.lognormvariate(math.log(each.median_s), each.sigma), first.shape, first.compute)
            )
    return jobs


def _job(rng: random.Random, each: JobClass, model: MigModel, now_s: float) -> SliceRequest:
    compute = rng.uniform(*each.compute)
    shape = shape_of(model, rng.uniform(*each.memory_gib), compute)
    return SliceRequest(now_s, rng.lognormvariate(math.log(each.median_s), each.sigma), shape, compute)


def read_trace(path: Path, model: MigModel) -> tuple[list[SliceRequest], Mapping[str, int]]:
    """The jobs by submit time, the first one at 0 s, and why rows were left out, with their number.

    Columns: submit_s; run_s, the run time on a full GPU; and either shape ("1g", "2g.10gb", "gpu") or memory_gib.
    compute: compute slices that the job keeps busy, such as 4.65. Without it a job runs equally long on its own shape
    and on larger ones; with memory_gib alone, the memory decides. Raises FileFormatError for a file without jobs.
    """
    left_out: Counter[str] = Counter()
    jobs = []
    for row in _rows(path):
        job = _slice_request(row, model)
        if isinstance(job, str):
            left_out[job] += 1
        else:
            jobs.append(job)
    if not jobs:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items())) or "no row"
        raise FileFormatError(
            f"{path}: no job to simulate ({reasons})", "give the columns submit_s, run_s, and shape or memory_gib"
        )
    first_s = min(job.submit_s for job in jobs)
    moved = [SliceRequest(job.submit_s - first_s, job.full_s, job.shape, job.compute) for job in jobs]
    return sorted(moved, key=lambda job: job.submit_s), dict(left_out)


def parse_layouts(text: str, model: MigModel, gpus: int) -> tuple[tuple[str, ...], ...]:
    """A layout for each GPU, of a text such as "4:1g+2g+4g,gpu": four GPUs cut so, and all others full.

    Raises ValueError for one that the model cannot have.
    """
    found: list[tuple[str, ...]] = []
    last: tuple[str, ...] = (WHOLE,)
    for part in text.split(","):
        count, _, name = part.strip().rpartition(":")
        shapes = tuple(sorted(name.split("+")))
        is_known = all(shape in sizes_of(model).shapes[:-1] for shape in shapes)
        if shapes != (WHOLE,) and not (is_known and is_placeable(model, {each: shapes.count(each) for each in shapes})):
            raise ValueError(f"{printable(name)} is no layout of {model.name}")
        if count and not (count.isdecimal() and 0 < int(count) <= gpus):
            raise ValueError(f"{printable(count)} is no number of GPUs up to {gpus}")
        found += [shapes] * (int(count) if count else 0)
        last = last if count else shapes
    if len(found) > gpus:
        raise ValueError(f"names {len(found)} GPUs; the nodes have {gpus}")
    return tuple(found + [last] * (gpus - len(found)))


def _rows(path: Path) -> Iterable[Mapping[str, Any]]:
    try:
        if path.suffix.lower() == ".parquet":
            from pyarrow import parquet

            require_readable(path)
            rows: Any = parquet.read_table(path).to_pylist()
        elif path.suffix.lower() in (".json", ".jsonl"):
            text = read_plain(path).decode("utf-8")
            is_list = text.lstrip().startswith("[")
            texts = [text] if is_list else [line for line in text.splitlines() if line.strip()]
            rows = [parse_json(each.encode()) for each in texts]
            rows = rows[0] if is_list else rows
        else:
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise FileFormatError(f"{path} cannot be read: {error}", "give a CSV, JSON, or Parquet file") from error
    return [row for row in rows if isinstance(row, Mapping)]


def _slice_request(row: Mapping[str, Any], model: MigModel) -> SliceRequest | str:
    """The job of a row, or why there is none."""
    submit_s, run_s = _number(row.get("submit_s")), _number(row.get("run_s"))
    if submit_s is None or run_s is None or run_s <= 0:
        return "without submit_s and a positive run_s"
    compute = _number(row.get("compute"))
    if compute is not None and not 0 <= compute <= model.compute_slices:
        return f"with compute outside 0..{model.compute_slices}"
    shape = _shape(row, model, compute)
    if shape is None:
        return "without a shape of the model or memory_gib that fits"
    sizes = sizes_of(model)
    own = sizes.compute[sizes.shapes.index(shape)]
    return SliceRequest(submit_s, run_s, shape, float(own) if compute is None else compute)


def _shape(row: Mapping[str, Any], model: MigModel, compute: float | None) -> str | None:
    sizes = sizes_of(model)
    named = row.get("shape")
    if isinstance(named, str) and named.strip():
        name = named.strip().lower()
        if name in (WHOLE, "full", "whole"):
            return WHOLE
        profile = model.profile(profile_name(name) or name)
        shape = WHOLE if profile == model.whole else profile.shape if profile else ""
        return shape if shape in sizes.shapes else None
    memory_gib = _number(row.get("memory_gib"))
    whole_gib = model.whole.memory_gib
    if memory_gib is None or memory_gib < 0 or (whole_gib and memory_gib > whole_gib[1]):
        return None
    return shape_of(model, memory_gib, 0.0 if compute is None else compute)


def _number(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
