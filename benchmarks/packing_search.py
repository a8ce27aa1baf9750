"""The search for GPU shares: how near to the best of all 100 pairs, in how many tries.

Run: benchmarks/packing_search.py [TABLES], by default 1,000 random tables of each kind.
The goals are those of two jobs: at most 13 tries. Remaining times differ by up to 25 times.
Further rows: algorithm 1 as printed (only the job of less priority is lowered, by 10% a try), runs at the same time,
and tasks of unequal length.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from figures import Figure, main

from advisor.packing.shares import (
    LEVELS,
    MOST_FAILURES,
    Objective,
    PackedJob,
    Shares,
    ShareSearch,
    lowered_first,
    next_shares,
    objective_value,
    record,
)

Table = np.ndarray
Curve = Callable[[Table, Table], Table]
"""Throughput of a job by its own share and the other's, both fractions."""
_SHARES = np.arange(1, 11) / 10
_OWN, _OTHER = np.meshgrid(_SHARES, _SHARES, indexing="ij")


def _saturating(rng: np.random.Generator) -> Curve:
    rate, loss = rng.uniform(0.8, 8), rng.uniform(0, 0.7)
    return lambda own, other: -np.expm1(-rate * own) * (1 - loss * other)


def _power(rng: np.random.Generator) -> Curve:
    exponent, loss, bend = rng.uniform(0.1, 1), rng.uniform(0, 0.8), rng.uniform(0.5, 2)
    return lambda own, other: own**exponent * (1 - loss * other**bend)


def _amdahl(rng: np.random.Generator) -> Curve:
    parallel, loss = rng.uniform(0.3, 0.99), rng.uniform(0, 2)
    return lambda own, other: 1 / ((1 - parallel) + parallel / own + loss * other)


def _bilinear(rng: np.random.Generator) -> Curve:
    base, loss = rng.uniform(0, 0.5), rng.uniform(0, 0.9)
    return lambda own, other: (base + (1 - base) * own) * (1 - loss * other)


def _knee(rng: np.random.Generator) -> Curve:
    knee, loss = rng.uniform(0.1, 1), rng.uniform(0, 0.8)
    return lambda own, other: np.minimum(own / knee, 1) * (1 - loss * other)


def _contended(rng: np.random.Generator) -> Curve:
    """Shares beyond 100% in sum are divided in proportion."""
    rate, loss = rng.uniform(1, 6), rng.uniform(0, 0.5)
    return lambda own, other: -np.expm1(-rate * own / np.maximum(1, own + other) * (1 - loss * other))


def _random_steps(rng: np.random.Generator) -> Curve:
    """Random gains, each less than the one before; random losses, in growing or in falling order."""
    gains = np.cumsum(np.sort(rng.uniform(0, 1, 10))[::-1])
    losses = np.sort(rng.uniform(0, 1, 10))[:: rng.choice([-1, 1])]
    losses = 1 - np.cumsum(losses) / losses.sum() * rng.uniform(0, 0.8)
    return lambda own, other: gains[_index(own)] * losses[_index(other)]


def _index(share: Table) -> Table:
    found: Table = np.rint(share * 10).astype(int) - 1
    return found


CONCAVE: dict[str, Callable[[np.random.Generator], Curve]] = {
    "saturating": _saturating,
    "power": _power,
    "Amdahl": _amdahl,
    "bilinear": _bilinear,
    "knee": _knee,
    "contended": _contended,
    "random steps": _random_steps,
}
"""Throughput grows in the own share, ever less, and falls in the other's."""


def _planes(rng: np.random.Generator) -> Curve:
    """The least of six planes: concave in both shares together, so each job's best share depends on the other's."""
    own_slopes, other_slopes = rng.uniform(-0.2, 0.2, 6) + rng.uniform(0, 0.6, 6), rng.uniform(-0.2, 0.2, 6)
    heights = rng.uniform(0.2, 1, 6)

    def curve(own: Table, other: Table) -> Table:
        planes = [h + a * own + b * other for h, a, b in zip(heights, own_slopes, other_slopes, strict=True)]
        found: Table = np.maximum(0.01, np.minimum.reduce(planes))
        return found

    return curve


JOINTLY_CONCAVE = {"planes": _planes}


def concave_tables(kind: str, rng: np.random.Generator) -> tuple[Table, Table]:
    """Steps per second of two jobs of one kind of curve, each with its own parameters."""
    kinds = {**CONCAVE, **JOINTLY_CONCAVE}
    first, second = kinds[kind](rng), kinds[kind](rng)
    scale = rng.uniform(1, 100, 2)
    return first(_OWN, _OTHER) * scale[0], second(_OTHER, _OWN) * scale[1]


def _distances(rng: np.random.Generator) -> Table:
    """Linear in the distance from the peak, each axis with its own slope."""
    first, second = (abs(np.arange(10) - rng.integers(10)) * rng.uniform(0.1, 3) for _ in range(2))
    return -(first[:, None] + second[None, :])


def _bell(rng: np.random.Generator) -> Table:
    """The peak lies between the shares, so that no two of them tie: the search learns nothing from a tie."""
    peaks = rng.integers(10, size=2) + rng.uniform(-0.4, 0.4, 2)
    first, second = (((np.arange(10) - peak) / rng.uniform(1.5, 6)) ** 2 for peak in peaks)
    found: Table = np.exp(-first[:, None] - second[None, :])
    return found


def _uneven_sum(rng: np.random.Generator) -> Table:
    found: Table = _uneven(rng)[:, None] + _uneven(rng)[None, :]
    return found


def _uneven_product(rng: np.random.Generator) -> Table:
    first, second = (line - line.min() + rng.uniform(0.1, 3) for line in (_uneven(rng), _uneven(rng)))
    found: Table = first[:, None] * second[None, :]
    return found


def _uneven(rng: np.random.Generator) -> Table:
    """Ten values with one peak and random steps down from it."""
    peak, line = rng.integers(10), np.zeros(10)
    line[peak + 1 :] = -np.cumsum(rng.uniform(0.05, 1, 9 - peak))
    line[:peak] = -np.cumsum(rng.uniform(0.05, 1, peak))[::-1]
    return line


def _ordered(rng: np.random.Generator) -> Table:
    """Random values, sorted by the distance from the peak in steps along the axes; equal distances in random order."""
    rows, columns = (abs(np.arange(10) - rng.integers(10)) for _ in range(2))
    order = np.argsort((rows[:, None] + columns[None, :]).ravel() + rng.uniform(0, 0.9, 100))
    found = np.empty(100)
    found[order] = np.sort(rng.uniform(1, 100, 100))[::-1]
    return found.reshape(10, 10)


def _tilted(rng: np.random.Generator) -> Table:
    """A parabola with its axes at any angle: one peak, but the best share of one job depends on the other's."""
    angle, ratio = rng.uniform(0, np.pi), rng.uniform(1, 4)
    rows, columns = (np.arange(10)[:, None] - rng.integers(10)), (np.arange(10)[None, :] - rng.integers(10))
    along = np.cos(angle) * rows + np.sin(angle) * columns
    across = -np.sin(angle) * rows + np.cos(angle) * columns
    found: Table = -(along**2 + ratio * across**2)
    return found


def _ridge(rng: np.random.Generator) -> Table:
    """The same with a ridge of any steepness, and a peak that may lie between the shares."""
    matrix = rng.normal(size=(2, 2))
    curvature = matrix @ matrix.T + 0.05 * np.eye(2)
    away = 10 * (np.stack([_OWN, _OTHER], axis=-1) - rng.uniform(0.1, 1, 2))
    found: Table = -np.einsum("ijk,kl,ijl->ij", away, curvature, away)
    return found


SINGLE_PEAK: dict[str, Callable[[np.random.Generator], Table]] = {
    "distances": _distances,
    "bell": _bell,
    "uneven sum": _uneven_sum,
    "uneven product": _uneven_product,
    "ordered": _ordered,
}
"""Values fall strictly on every path along the axes away from the peak."""
TILTED = {"tilted": _tilted, "ridge": _ridge}


def peaked_table(kind: str, rng: np.random.Generator) -> Table:
    """Values above zero, the larger the better, with one best pair of shares."""
    found = ({**SINGLE_PEAK, **TILTED})[kind](rng)
    raised: Table = found - found.min() + rng.uniform(0.1, 10)
    return raised


NEAR, MOST_TRIES = 0.02, 13
AT_ONCE, LONGER, RUNS = 16, 10, 160
"""Runs at the same time; how many times as long as the others a task is; runs of those others."""
Measure = Callable[[Shares], list[float]]


@dataclass(frozen=True)
class FoundShares:
    """Outcome of one search. gap: how far the objective of the chosen shares is above the best, as a share of it."""

    gap: float
    tries: int


def search(start: ShareSearch, measure: Measure) -> ShareSearch:
    while not start.is_done:
        shares = next_shares(start)
        start = record(start, shares, measure(shares))
    return start


def at_once(start: ShareSearch, measure: Measure) -> ShareSearch:
    """Runs that start together know only what was measured before."""
    while not start.is_done:
        taken: list[Shares] = []
        for _ in range(AT_ONCE):
            taken.append(next_shares(replace(start, pending=tuple(taken))))
        for shares in taken:
            start = record(start, shares, measure(shares))
    return start


def staggered(start: ShareSearch, measure: Measure) -> ShareSearch:
    """The first job goes on while the second one changes, except each tenth time: then it changes alone."""
    shares = next_shares(start)
    for run in range(1, RUNS + 1):
        start = record(start, shares, measure(shares))
        shares = next_shares(start, {0: shares[0]} if run % LONGER else {1: shares[1]})
    return start


def printed(start: ShareSearch, measure: Measure) -> ShareSearch:
    """Algorithm 1 as the paper has it, with the best restored."""
    start = record(start, (100, 100), measure((100, 100)))
    (low,) = lowered_first(start)
    failures = 0
    for share in reversed(LEVELS[:-1]):
        shares = (share, 100) if low == 0 else (100, share)
        best = start.best_value
        start = record(start, shares, measure(shares))
        failures = 0 if start.best_value < best else failures + 1
        if failures == MOST_FAILURES:
            break
    return start


def run_once(
    objective: Objective,
    jobs: Sequence[PackedJob],
    tables: Sequence[np.ndarray],
    method: Callable[[ShareSearch, Measure], ShareSearch],
    noise: Callable[[], float] = lambda: 1.0,
) -> FoundShares:
    def rates(shares: Shares) -> list[float]:
        return [float(table[shares[0] // 10 - 1, shares[1] // 10 - 1]) for table in tables]

    found = method(ShareSearch(objective, tuple(jobs)), lambda shares: [rate * noise() for rate in rates(shares)])
    values: dict[Shares, float] = {
        pair: objective_value(objective, jobs, rates(pair)) for pair in product(LEVELS, LEVELS)
    }
    chosen = found.best.shares if found.best else (100, 100)
    best = min(values.values())
    return FoundShares(values[chosen] / best - 1 if best else float(values[chosen] > 0), len(found.tries))


def concave(
    tables: int, objective: Objective, kind: str, noise: float = 0.0, is_printed: bool = False
) -> list[FoundShares]:
    """Search shares for random pairs of jobs with concave curves.

    Deadlines are 0.3 to 1.1 of each job's time in free competition.
    """
    rng = np.random.default_rng([tables, *kind.encode()])
    found = []
    for _ in range(tables):
        pair = concave_tables(kind, rng)
        alone_s, slack = rng.uniform(0.2, 5, 2), rng.uniform(0.3, 1.1, 2)
        jobs = [PackedJob(float(alone_s[job] * pair[job][9, 9]), float(alone_s[job] * slack[job])) for job in range(2)]
        method = printed if is_printed else search
        found.append(run_once(objective, jobs, pair, method, lambda: float(np.exp(noise * rng.normal()))))
    return found


def peaked(tables: int, kind: str, method: Callable[[ShareSearch, Measure], ShareSearch] = search) -> list[FoundShares]:
    rng = np.random.default_rng([tables, *kind.encode()])
    found = []
    for _ in range(tables):
        table = peaked_table(kind, rng)
        found.append(run_once("jct", [PackedJob(), PackedJob()], (table, table), method))
    return found


def show(about: str, results: Sequence[FoundShares], has_goal: bool = True) -> Figure:
    gaps, tries = np.array([one.gap for one in results]), [one.tries for one in results]
    share, most = float((gaps <= NEAR).mean()), max(tries)
    text = f"{share:.1%}, worst gap {gaps.max():.1%}, {np.mean(tries):.1f} tries, most {most}"
    ok = share == 1 and most <= MOST_TRIES
    return Figure(f"within 2%: {about}", text, "all, at most 13" if has_goal else "", ok if has_goal else None)


def show_peaked(kind: str, results: Sequence[FoundShares], has_goal: bool) -> Figure:
    exact, near = (float(np.mean([one.gap <= most for one in results])) for most in (1e-12, NEAR))
    most, gap = max(one.tries for one in results), max(one.gap for one in results)
    tries = np.mean([one.tries for one in results])
    text = f"{exact:.1%}, within 2%: {near:.1%}, worst gap {gap:.1%}, {tries:.1f} tries, most {most}"
    ok = exact == 1 and most <= MOST_TRIES
    return Figure(f"as brute force: {kind}", text, "all, at most 13" if has_goal else "", ok if has_goal else None)


def measure() -> list[Figure]:
    tables = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    began_s, figures = time.process_time(), []
    objectives: tuple[Objective, ...] = ("jct", "makespan")
    for objective, kind in product(objectives, CONCAVE):
        figures.append(show(f"{kind}, {objective}", concave(tables, objective, kind)))
    for kind in (*SINGLE_PEAK, *TILTED):
        figures.append(show_peaked(kind, peaked(tables, kind), kind in SINGLE_PEAK))
    spent_ms = (time.process_time() - began_s) / len(figures) / tables * 1e3
    few = max(1, tables // 5)
    for objective, kind in product(objectives, JOINTLY_CONCAVE):
        figures.append(show(f"{kind}, {objective}", concave(tables, objective, kind), False))
    for about, method in ((f"{AT_ONCE} runs at once", at_once), (f"one task {LONGER} times as long", staggered)):
        results = [one for kind in SINGLE_PEAK for one in peaked(few, kind, method)]
        figures.append(show_peaked(f"all single peaks, {about}", results, False))
    for kind in CONCAVE:
        figures.append(show(f"{kind}, deadline (lateness near 0 too)", concave(few, "deadline", kind), False))
        figures.append(show(f"{kind}, jct, rates off by 1%", concave(few, "jct", kind, noise=0.01), False))
        for objective in objectives:
            results = concave(few, objective, kind, is_printed=True)
            figures.append(show(f"{kind}, {objective}, algorithm 1 as printed", results, False))
    return [*figures, Figure("CPU time of one search and its table, ms", spent_ms)]


if __name__ == "__main__":
    main(measure)
