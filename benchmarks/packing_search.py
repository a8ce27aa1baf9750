"""The search for GPU shares: how near to the best of all 100 pairs, in how many tries.

Run: benchmarks/packing_search.py [TABLES], by default 1,000 random tables of each kind of
`share_tables`.
The goals are those of two jobs: at most 13 tries. Remaining times differ by up to 25 times.
Beside it stand algorithm 1 as printed (only the job of less priority is lowered, by 10% a try), runs at the same time,
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
from share_tables import CONCAVE, JOINTLY_CONCAVE, SINGLE_PEAK, TILTED, concave_tables, peaked_table

from advisor.decisions.pack_shares import (
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

NEAR, MOST_TRIES = 0.02, 13
AT_ONCE, LONGER, RUNS = 16, 10, 160
"""Runs at the same time; how many times as long as the others a task is; runs of those others."""
Measure = Callable[[Shares], list[float]]


@dataclass(frozen=True)
class Result:
    """gap: of the shares that were chosen, relative to the best."""

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
) -> Result:
    def rates(shares: Shares) -> list[float]:
        return [float(table[shares[0] // 10 - 1, shares[1] // 10 - 1]) for table in tables]

    found = method(ShareSearch(objective, tuple(jobs)), lambda shares: [rate * noise() for rate in rates(shares)])
    values: dict[Shares, float] = {
        pair: objective_value(objective, jobs, rates(pair)) for pair in product(LEVELS, LEVELS)
    }
    chosen = found.best.shares if found.best else (100, 100)
    best = min(values.values())
    return Result(values[chosen] / best - 1 if best else float(values[chosen] > 0), len(found.tries))


def concave(tables: int, objective: Objective, kind: str, noise: float = 0.0, is_printed: bool = False) -> list[Result]:
    """deadline: at 0.3 to 1.1 of each job's time in free competition."""
    rng = np.random.default_rng([tables, *kind.encode()])
    found = []
    for _ in range(tables):
        pair = concave_tables(kind, rng)
        alone_s, slack = rng.uniform(0.2, 5, 2), rng.uniform(0.3, 1.1, 2)
        jobs = [PackedJob(float(alone_s[job] * pair[job][9, 9]), float(alone_s[job] * slack[job])) for job in range(2)]
        method = printed if is_printed else search
        found.append(run_once(objective, jobs, pair, method, lambda: float(np.exp(noise * rng.normal()))))
    return found


def peaked(tables: int, kind: str, method: Callable[[ShareSearch, Measure], ShareSearch] = search) -> list[Result]:
    rng = np.random.default_rng([tables, *kind.encode()])
    found = []
    for _ in range(tables):
        table = peaked_table(kind, rng)
        found.append(run_once("jct", [PackedJob(), PackedJob()], (table, table), method))
    return found


def show(about: str, results: Sequence[Result], has_goal: bool = True) -> Figure:
    gaps, tries = np.array([one.gap for one in results]), [one.tries for one in results]
    share, most = float((gaps <= NEAR).mean()), max(tries)
    text = f"{share:.1%}, worst gap {gaps.max():.1%}, {np.mean(tries):.1f} tries, most {most}"
    ok = share == 1 and most <= MOST_TRIES
    return Figure(f"within 2%: {about}", text, "all, at most 13" if has_goal else "", ok if has_goal else None)


def show_peaked(kind: str, results: Sequence[Result], has_goal: bool) -> Figure:
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
