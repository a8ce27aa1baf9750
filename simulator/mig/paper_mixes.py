"""The mixes of migm-mig-scheduling (appendix A.1) under schemes A and B, beside what the paper reports."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from simulator.mig.paper_schemes import BatchJob, run_scheme_a, run_scheme_b, throughput_gain

ORDERS = 300


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


def not_redone() -> dict[str, str]:
    """What the paper reports and cannot be run again, and why."""
    return dict(_tables()["not_redone"])


def mixes_table(orders: int = ORDERS) -> list[MixRow]:
    """Every mix under both schemes. orders: random orders of a mix with several sizes, the same at each call."""
    if orders < 1:
        raise ValueError(f"{orders} orders: at least 1 is needed")
    return [mix_row(mix, orders) for mix in paper_mixes()]


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
    path = resources.files("simulator.mig") / "paper_mixes.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))
