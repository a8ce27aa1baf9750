"""Speeds of jobs that share a GPU, from a table of pairs in Gavel's format, and random arrivals of such jobs.

Pairs in free competition come from measurements. A model fills in the rest; each function names its source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from almanac.errors import FileFormatError, RequestError
from almanac.files import read_json
from almanac.units import HOUR_S

Kind = tuple[str, int]
"""Name of a type of job, and its number of GPUs."""
Speeds = tuple[float, float]
_LEAST_UTILIZATION = 0.05
_SLOWED = 0.98
"""A job below this speed is slowed: the measurements scatter by about 1%."""


@dataclass(frozen=True)
class PairTable:
    """Speeds of pairs of jobs that share a GPU, relative to alone.

    kinds: types of jobs that can run alone. measured: speeds in (0, 1] of pairs that fit.
    """

    kinds: tuple[Kind, ...]
    measured: Mapping[tuple[Kind, Kind], Speeds]
    _known: dict[tuple[Kind, Kind], Speeds | None] = field(default_factory=dict, compare=False, repr=False)

    def of_size(self, gpus: int) -> tuple[Kind, ...]:
        """Kinds with this number of GPUs."""
        return tuple(kind for kind in self.kinds if kind[1] == gpus)

    def speeds(self, one: Kind, other: Kind) -> Speeds | None:
        """Speeds of a worker of each, sharing one GPU freely; None if they do not fit, or nobody measured it.

        Jobs of unequal size have the speeds of their one-GPU jobs: an assumption, since Gavel measured equal ones only.
        """
        key = one, other
        if key not in self._known:
            wanted = key if one[1] == other[1] else ((one[0], 1), (other[0], 1))
            self._known[key] = self.measured.get(wanted)
        return self._known[key]

    @cached_property
    def utilization(self) -> Mapping[str, float]:
        """GPU utilization of each one-GPU kind, in [0.05, 1], by name: fitted to the pairs, since no file states it.

        Of two jobs that slow each other the GPU is always busy: u_a * speed_a + u_b * speed_b = 1, least squares over
        all such pairs. A rule on utilization that is fitted to the pairs fares better than one on measurements would.
        """
        ones = self.of_size(1)
        place = {kind: number for number, kind in enumerate(ones)}
        rows = [np.zeros(len(ones))]
        for (one, other), speeds in self.measured.items():
            if one in place and other in place and min(speeds) < _SLOWED:
                row = np.zeros(len(ones))
                row[place[one]] += speeds[0]
                row[place[other]] += speeds[1]
                rows.append(row)
        matrix = np.array(rows)
        found = np.linalg.lstsq(matrix, (matrix.sum(axis=1) > 0).astype(float), rcond=None)[0]
        seen = matrix.sum(axis=0) > 0
        used = np.where(seen, np.clip(found, _LEAST_UTILIZATION, 1.0), _LEAST_UTILIZATION)
        return {name: float(used[number]) for (name, _), number in place.items()}


SHARES = tuple(step / 10 for step in range(10, 0, -1))
"""MPS shares in steps of 10% (Gimbal, section 7.4: coarser steps miss the best)."""


def straggling_speed(workers: Sequence[float]) -> float:
    """Speed of a synchronous job whose workers have equal batches: each step waits for the slowest (Gimbal, 2.2).

    workers: speed of each relative to alone.
    """
    return min(workers)


def stealing_speed(workers: Sequence[float]) -> float:
    """Speed of a synchronous job that splits its global batch by its workers' speeds (LB-BSP; Gimbal, 4.1).

    Worker i gets b_i = B f_i / sum(f), and all end a step together after B / sum(f): the job has the mean speed.
    Batches of whole samples (examples/unequal_gpus/batch_shares.py) come a little lower.
    """
    return math.fsum(workers) / len(workers)


def squeezed_speed(free: float, share: float, utilization: float) -> float:
    """Speed of a worker that is limited to a share of the SMs.

    free: its speed in free competition, at a share of 1. Amdahl's law: only the part of a step in which the GPU is
    busy (utilization) takes 1 / share as long. Our assumption: Gimbal states no formula, and prints concave curves.
    """
    return free / ((1 - utilization) + utilization / share)


def relieved_speed(free: float, share: float) -> float:
    """Speed of a worker whose partner is limited to a share of the SMs: from `free` at 1 up to 1 at 0.

    The slowdown shrinks with the share: 1 / (1 + (1 / free - 1) share). Our assumption, as in squeezed_speed.
    """
    return 1 / (1 + (1 / free - 1) * share)


@lru_cache(maxsize=100_000)
def squeeze_pair(free: tuple[float, float], utilization: tuple[float, float]) -> tuple[float, float]:
    """Return both speeds at the shares of the largest sum. One of the two keeps a share of 1 (Gimbal, algorithm 1)."""
    found = []
    for share in SHARES:
        low = squeezed_speed(free[1], share, utilization[1])
        found.append((relieved_speed(free[0], share), low))
        low = squeezed_speed(free[0], share, utilization[0])
        found.append((low, relieved_speed(free[1], share)))
    return max(found, key=lambda speeds: (round(math.fsum(speeds), 9), min(speeds)))


def with_errors(table: PairTable, sigma: float, seed: int) -> PairTable:
    """The table as predictions know it: speeds times lognormal errors, at most 1. What fits stays known.

    sigma: standard deviation of ln(predicted / true speed).
    """
    if sigma == 0:
        return table
    rng = np.random.default_rng((seed, 4))
    found: dict[tuple[Kind, Kind], Speeds] = {}
    for (one, other), speeds in sorted(table.measured.items()):
        if one <= other:
            first, second = np.minimum(1.0, np.array(speeds) * np.exp(sigma * rng.standard_normal(2))).tolist()
            second = first if one == other else second
            found[one, other] = first, second
            found[other, one] = second, first
    return PairTable(table.kinds, found)


def read_pairs(path: Path, gpu_type: str) -> PairTable:
    """The table of one GPU type. Raises FileFormatError.

    A job is never faster in a pair than alone. Where a file has both orders of a pair, the speeds are their means, and
    the pair fits only if it does in both.
    """
    table = _type_of(path, gpu_type)
    alone: dict[Kind, float] = {}
    rows: dict[Kind, Mapping[Any, Any]] = {}
    for key, row in table.items():
        kind, rate = _kind(key), _number(row.get("null")) if isinstance(row, dict) else None
        if kind and rate:
            alone[kind], rows[kind] = rate, row
    if not alone:
        raise FileFormatError(f"{path}: {gpu_type} has no throughput of a job alone", "give each type of job a null")
    found: dict[tuple[Kind, Kind], list[Speeds | None]] = {}
    for one, row in rows.items():
        for key, value in row.items():
            other = _kind(key)
            if other in alone:
                speeds = _speeds(value, alone[one], alone[other])
                found.setdefault((one, other), []).append(speeds)
                found.setdefault((other, one), []).append(speeds and (speeds[1], speeds[0]))
    return PairTable(tuple(sorted(alone)), {pair: both for pair, each in found.items() if (both := _mean(each))})


def _type_of(path: Path, gpu_type: str) -> Mapping[str, Any]:
    try:
        content = read_json(path)
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}", "check the path and its rights") from error
    except ValueError as error:
        raise FileFormatError(f"{path}: is not JSON", "give a file of pairs in Gavel's format") from error
    known = [name for name, value in content.items() if isinstance(value, dict)] if isinstance(content, dict) else []
    if gpu_type not in known:
        raise FileFormatError(
            f"{path}: has no GPU type {gpu_type}", f"use one of {', '.join(known[:20])}" if known else "see the manual"
        )
    table: Mapping[str, Any] = content[gpu_type]
    return table


def _kind(key: object) -> Kind | None:
    """Of "('LM (batch size 5)', 1)"; None for another key, such as "null"."""
    if not isinstance(key, str) or not (key.startswith("('") and key.endswith(")")):
        return None
    name, _, gpus = key[2:-1].rpartition("', ")
    if not name or not (gpus.isascii() and gpus.isdecimal()) or len(gpus) > 6 or int(gpus) < 1:
        return None
    return name, int(gpus)


def _number(value: object) -> float | None:
    """A positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return None
    return float(value)


def _speeds(value: object, alone: float, other_alone: float) -> Speeds | None:
    if not isinstance(value, list) or len(value) != 2:
        return None
    rates = [_number(each) for each in value]
    if rates[0] is None or rates[1] is None:
        return None
    return min(1.0, rates[0] / alone), min(1.0, rates[1] / other_alone)


def _mean(each: list[Speeds | None]) -> Speeds | None:
    known = [speeds for speeds in each if speeds is not None]
    if len(known) < len(each):
        return None
    return sum(first for first, _ in known) / len(known), sum(second for _, second in known) / len(known)


ONE_GPU: Mapping[int, float] = {1: 1.0}
GANGS: Mapping[int, float] = {1: 0.6, 2: 0.2, 4: 0.15, 8: 0.05}
"""Share of jobs by GPUs: mostly small, as in Philly and Helios."""


@dataclass(frozen=True)
class PackingJob:
    """A job of a packing simulation. duration_s: its run time alone on its GPUs, seconds."""

    submit_s: float
    kind: Kind
    duration_s: float
    user: int

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        return self.kind[1]


@dataclass(frozen=True)
class ArrivalOptions:
    """Options of generated arrivals. shares: share of jobs by number of GPUs.

    load: GPU-hours that arrive each hour, of jobs that run alone, as a share of the GPUs.
    """

    load: float = 1.1
    jobs: int = 1500
    users: int = 30
    gpus: int = 36
    shortest_s: float = 1 * HOUR_S
    longest_s: float = 4 * HOUR_S
    shares: Mapping[int, float] = field(default_factory=lambda: ONE_GPU)


def draw_jobs(table: PairTable, options: ArrivalOptions, seed: int) -> tuple[PackingJob, ...]:
    """Poisson arrivals, by submission; durations are uniform.

    Kinds, durations, users, and gaps have random streams of their own: the number of users changes no job. Raises
    RequestError if the table has no kind of any of the sizes.
    """
    shares = {size: share for size, share in options.shares.items() if table.of_size(size)}
    if not shares:
        raise RequestError("the table has no one-GPU jobs", "add types of jobs such as \"('LM', 1)\" with their null")
    kinds, durations, users, gaps = (np.random.default_rng((seed, stream)) for stream in range(4))
    sizes = np.array(sorted(shares))
    weights = np.array([shares[int(size)] for size in sizes])
    weights = weights / weights.sum()
    mean_gpu_s = float(sizes @ weights) * (options.shortest_s + options.longest_s) / 2
    submit_s = np.cumsum(gaps.exponential(mean_gpu_s / (options.load * options.gpus), options.jobs))
    drawn = kinds.choice(sizes, options.jobs, p=weights)
    picks = kinds.random(options.jobs)
    duration_s = durations.uniform(options.shortest_s, options.longest_s, options.jobs)
    user = users.integers(options.users, size=options.jobs)
    return tuple(
        PackingJob(float(submit_s[number]), _pick(table, int(drawn[number]), float(picks[number])),
                   float(duration_s[number]), int(user[number]))
        for number in range(options.jobs)
    )  # fmt: skip


def _pick(table: PairTable, gpus: int, share: float) -> Kind:
    kinds = table.of_size(gpus)
    return kinds[int(share * len(kinds))]
