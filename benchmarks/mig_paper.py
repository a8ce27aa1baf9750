"""The mixes of the MIG paper under schemes A and B: what the paper reports, a trial gave, and we get.

Run: python benchmarks/mig_paper.py [ORDERS], by default 300 random orders of a mix with several sizes. The goals are
the trial's figures; the paper's are shown next to them. The mixes are those of Saraha et al., appendix A.1.
"""

from __future__ import annotations

import math
import random
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from figures import Figure, exactly, main

from simulator.policies.mig.schemes import BatchJob, run_scheme_a, run_scheme_b, throughput_gain

ORDERS = 300
TOLERANCE = 0.0051


@dataclass(frozen=True)
class PaperMix:
    """A batch of the paper. paper_a, paper_b: throughput gains; None where the text has none. is_at_most: "up to".

    trial_a, trial_b: of an earlier simulation. is_split: scheme A has one queue for each instance.
    """

    name: str
    about: str
    jobs: tuple[BatchJob, ...]
    paper_a: float | None
    paper_b: float | None
    is_at_most: bool
    trial_a: float | None
    trial_b: float | None
    trial_b_range: tuple[float, float] | None
    is_split: bool
    note: str


@dataclass(frozen=True)
class MixRow:
    """A mix, and the throughput gains that the simulation gives.

    ours_a: as the paper's program ran it. ours_a_one_queue: with one queue for all instances. ours_b: the mean of all
    orders; low_b, high_b: their 5th and 95th percentiles; least_b, greatest_b: their extremes.
    """

    mix: PaperMix
    ours_a: float
    ours_a_one_queue: float
    ours_b: float
    low_b: float
    high_b: float
    least_b: float
    greatest_b: float


@cache
def paper_mixes() -> tuple[PaperMix, ...]:
    """The mixes that can be run again."""
    return tuple(_mix(name, row) for name, row in _tables()["mix"].items())


def mix_row(mix: PaperMix, orders: int = ORDERS) -> MixRow:
    """One mix under both schemes. Order counts for scheme B only, and only if the jobs differ."""
    number = orders if len(set(mix.jobs)) > 1 else 1
    gains = sorted(gain_b(shuffled(mix.jobs, seed)) for seed in range(number))
    return MixRow(
        mix=mix,
        ours_a=gain_a(mix.jobs, is_split=mix.is_split),
        ours_a_one_queue=gain_a(mix.jobs),
        ours_b=sum(gains) / number,
        low_b=gains[round(0.05 * (number - 1))],
        high_b=gains[round(0.95 * (number - 1))],
        least_b=gains[0],
        greatest_b=gains[-1],
    )


def gain_a(jobs: Sequence[BatchJob], *, is_split: bool = False) -> float:
    """Throughput of scheme A over one job at a time."""
    return throughput_gain(jobs, run_scheme_a(jobs, is_split=is_split))


def gain_b(jobs: Sequence[BatchJob]) -> float:
    """Throughput of scheme B over one job at a time, with the jobs in this order."""
    return throughput_gain(jobs, run_scheme_b(jobs))


def shuffled(jobs: Sequence[BatchJob], seed: int) -> list[BatchJob]:
    """The jobs in a random order, the same for the same seed."""
    order = list(jobs)
    random.Random(seed).shuffle(order)
    return order


def _mix(name: str, row: dict[str, Any]) -> PaperMix:
    groups = [dict(group) for group in row["groups"]]
    low_high = row.get("trial_b_range")
    return PaperMix(
        name=name,
        about=row["about"],
        jobs=tuple(job for group in groups for job in [BatchJob(**_job(group))] * group["jobs"]),
        paper_a=row.get("paper_a"),
        paper_b=row.get("paper_b"),
        is_at_most=row.get("is_at_most", False),
        trial_a=row.get("trial_a"),
        trial_b=row.get("trial_b"),
        trial_b_range=(low_high[0], low_high[1]) if low_high else None,
        is_split=row.get("is_split", False),
        note=row["note"],
    )


def _job(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "jobs"}


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def figures_of(row: MixRow) -> list[Figure]:
    mix = row.mix
    figures = [
        _figure(f"{mix.name} A", row.ours_a, mix.paper_a, mix.trial_a, "up to " if mix.is_at_most else ""),
        _figure(f"{mix.name} B", row.ours_b, mix.paper_b, mix.trial_b),
    ]
    if mix.is_split:
        figures.append(Figure(f"{mix.name} A, one queue (A above has two)", row.ours_a_one_queue))
    if mix.trial_b_range:
        low, high = mix.trial_b_range
        is_met = abs(row.low_b - low) <= 2 * TOLERANCE and abs(row.high_b - high) <= 2 * TOLERANCE
        figures.append(
            Figure(f"{mix.name} B, 5% to 95%", f"{row.low_b:.3f} to {row.high_b:.3f}", f"{low} to {high}", is_met)
        )
        figures.append(Figure(f"{mix.name} B, least and greatest", f"{row.least_b:.3f} and {row.greatest_b:.3f}"))
    return figures


def _figure(name: str, ours: float, paper: float | None, trial: float | None, bound: str = "") -> Figure:
    about = name if paper is None else f"{name} (paper {bound}{paper:g})"
    if trial is None:
        return Figure(about, ours)
    return Figure(about, ours, f"{trial:g}", abs(ours - trial) <= TOLERANCE)


def measure() -> Iterator[Figure]:
    orders = int(sys.argv[1]) if len(sys.argv) > 1 else ORDERS
    rows = [mix_row(mix, orders) for mix in paper_mixes()]
    for row in rows:
        yield from figures_of(row)
    yield exactly(
        "Ht1 A, cut off after three decimals",
        math.floor(next(row.ours_a for row in rows if row.mix.name == "Ht1") * 1000) / 1000,
        1.783,
    )


if __name__ == "__main__":
    main(measure)
