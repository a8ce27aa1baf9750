"""Policies of placement by name, their results, and the bounds beside them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from advisor.decisions.placement import NEVER_MOVE, Floats
from almanac.errors import AlmanacError
from simulator.placement.arrivals import believed_work
from simulator.placement.bounds import makespan_bound_s, mean_jct_bound_s
from simulator.placement.fairness import SharedRounds, duration_gains, plain_gains, throughput_gains
from simulator.placement.forked import HadarForked
from simulator.placement.hadar import Hadar
from simulator.placement.policies import FastestType, Fifo, GreedyPairs, PricedSrpt
from simulator.placement.problem import PlacementProblem
from simulator.placement.queues import AdvisedType, Chooser, RecentWaits, simulate_queues
from simulator.placement.rounds import PlacementRecord, RoundPolicy, simulate_rounds


@dataclass(frozen=True)
class PlacementOptions:
    """round_s: of a round. move_s: what a moved job loses. error: sigma of ln(predicted / true run time).

    gpus_per_node: of HadarE's nodes. seed: of the errors.
    """

    round_s: float = 360.0
    move_s: float = 10.0
    error: float = 0.0
    gpus_per_node: int = 4
    seed: int = 1


@dataclass(frozen=True)
class PlacementScore:
    """Times in seconds. longest_first_wait_s: from submission to the first start.

    decision_s: median of a round's decision; None where the jobs decide.
    """

    policy: str
    makespan_s: float
    mean_jct_s: float
    p95_jct_s: float
    longest_first_wait_s: float
    moves: int
    decision_s: float | None


@dataclass(frozen=True)
class PlacementBounds:
    """No schedule with each job in one place at a time is better (fluid and time-indexed linear programs)."""

    makespan_s: float
    mean_jct_s: float


Runner = Callable[[PlacementProblem, PlacementOptions, Floats | None], PlacementRecord]


def _rounds(make: Callable[[PlacementOptions], RoundPolicy]) -> Runner:
    def run(problem: PlacementProblem, options: PlacementOptions, known: Floats | None) -> PlacementRecord:
        return simulate_rounds(problem, make(options), options.round_s, options.move_s, known, time.perf_counter)

    return run


def _queues(make: Callable[[PlacementOptions], Chooser]) -> Runner:
    def run(problem: PlacementProblem, options: PlacementOptions, known: Floats | None) -> PlacementRecord:
        return simulate_queues(problem, make(options), known, options.round_s)

    return run


POLICIES: Mapping[str, tuple[str, Runner]] = {
    "fifo": ("one queue; each job takes its fastest free type", _rounds(lambda _: Fifo())),
    "fastest-type": ("all jobs ask for their own fastest type", _rounds(lambda _: FastestType())),
    "greedy-pairs": ("job and type of the least remaining GPU-time", _rounds(lambda _: GreedyPairs())),
    "max-min": ("Gavel-like fairness of time", _rounds(lambda _: SharedRounds(plain_gains))),
    "max-min-perf": ("Gavel-like fairness of throughput", _rounds(lambda _: SharedRounds(throughput_gains))),
    "min-makespan": ("Gavel-like least total duration", _rounds(lambda _: SharedRounds(duration_gains))),
    "hadar": (
        "Hadar's primal-dual, running jobs stay",
        _rounds(lambda given: Hadar(round_s=given.round_s, move_s=given.move_s)),
    ),
    "hadar-moves": (
        "Hadar's primal-dual, all jobs compete each round",
        _rounds(lambda given: Hadar(False, round_s=given.round_s, move_s=given.move_s)),
    ),
    "hadare": (
        "HadarE: copies of a job on several nodes at once",
        _rounds(lambda given: HadarForked(given.gpus_per_node, given.round_s)),
    ),
    "advice": ("no placing: jobs choose by wait plus run time", _queues(lambda given: AdvisedType(seed=given.seed))),
    "advice-half": (
        "the same, half of the jobs follow; the others take their fastest type",
        _queues(lambda given: AdvisedType(follow=0.5, seed=given.seed)),
    ),
    "recent-waits": ("no placing: jobs choose by the median of recent waits", _queues(lambda _: RecentWaits())),
    "priced-srpt": ("almanac's; jobs are moved", _rounds(lambda _: PricedSrpt())),
    "priced-srpt-stay": ("almanac's; no job is ever moved", _rounds(lambda _: PricedSrpt(NEVER_MOVE))),
}
"""Name to description and runner."""
ONE_PLACE_EXCEPT = ("hadare",)
"""Policies to which the bounds do not apply."""


def run_policy(problem: PlacementProblem, name: str, options: PlacementOptions) -> PlacementScore:
    """Simulate a policy of POLICIES."""
    record = POLICIES[name][1](problem, options, believed_work(problem, options.error, options.seed))
    return score_record(problem, name, record)


def score_record(problem: PlacementProblem, name: str, record: PlacementRecord) -> PlacementScore:
    """The figures of a simulation."""
    jct_s = record.end_s - problem.submit_s
    return PlacementScore(
        policy=name,
        makespan_s=float(record.end_s.max() - problem.submit_s.min()),
        mean_jct_s=float(jct_s.mean()),
        p95_jct_s=float(np.quantile(jct_s, 0.95)),
        longest_first_wait_s=float((record.start_s - problem.submit_s).max()),
        moves=int(record.moves.sum()),
        decision_s=float(np.median(record.decision_s)) if len(record.decision_s) else None,
    )


def find_bounds(problem: PlacementProblem) -> PlacementBounds:
    """Both lower bounds."""
    return PlacementBounds(makespan_bound_s(problem), mean_jct_bound_s(problem))


def compare_policies(
    problem: PlacementProblem,
    names: Sequence[str],
    options: PlacementOptions,
    processes: int = 1,
    advance: Callable[[float, str], None] = lambda share, policy: None,
) -> tuple[list[PlacementScore], PlacementBounds]:
    """Scores in the order of the names, and the bounds. The result does not depend on the number of processes."""
    count = len(names) + 1
    if processes == 1:
        scores = []
        with silent_solver():
            for number, name in enumerate(names):
                advance(number / count, name)
                scores.append(run_policy(problem, name, options))
            advance(len(names) / count, "bounds")
            return scores, find_bounds(problem)
    pool = ProcessPoolExecutor(min(processes, count), multiprocessing.get_context("spawn"), _start_worker)
    try:
        bounds = pool.submit(find_bounds, problem)
        futures = [pool.submit(run_policy, problem, name, options) for name in names]
        scores = []
        for number, (name, future) in enumerate(zip(names, futures, strict=True)):
            advance(number / count, name)
            scores.append(future.result())
        advance(len(names) / count, "bounds")
        return scores, bounds.result()
    except BrokenProcessPool as error:
        raise AlmanacError("a simulation was killed, perhaps because memory ran out", "use --jobs 1") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """On Ctrl-C, only the first process has something to say; what a solver prints goes nowhere."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def silent_solver() -> Iterator[None]:
    """Drop what HiGHS prints to file descriptor 1 whatever its options say: it would spoil JSON."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
