"""Policies by name, as `almanac simulate --policy` takes them, and their runs on one workload.

Sites add policies by an entry point. Several processes can share the policies.
"""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any, get_args

from advisor.priority import RELIEF_SHARE
from almanac.config import Config
from almanac.errors import AlmanacError, RequestError
from almanac.files import load_trusted
from simulator.cluster import Cluster
from simulator.engine import simulate
from simulator.outcomes import PolicyRun, job_outcomes, timeline_of
from simulator.policies.base import (
    BF_UNITS,
    Backfill,
    BackfillLimits,
    FewestGpus,
    Fifo,
    LeastRequested,
    Multifactor,
    Policy,
    ShortestService,
    Sjf,
    Srtf,
    Weights,
)
from simulator.policies.priority import (
    AgedGpuCount,
    AgedQssf,
    DebugLaneQssf,
    Predicted,
    PredictedRunTimes,
    Qssf,
    RelievedQssf,
    ShuffledQssf,
)
from simulator.workload import Workload

GROUP = "almanac.policies"
"""Entry points of this group are callables (Config, **options) -> Policy; options are numbers."""
ESTIMATES = ("requested", "true", "predicted")

_DIVISORS = ("factor", "max_age_s", "tau_hours")
"""Options that cannot be 0. No option can be negative."""
_Maker = Callable[..., Policy]


def _multifactor(
    config: Config, age: float = 1000.0, fair_share: float = 1000.0, size: float = 0.0, max_age_s: float = 7 * 86_400.0
) -> Policy:
    return Multifactor(Weights(age=age, fair_share=fair_share, size=size, max_age_s=max_age_s))


def _aged(config: Config, tau_hours: float | None = None, exponent: float | None = None) -> Policy:
    hours = config.priority.tau_hours if tau_hours is None else tau_hours
    aged = dataclasses.replace(config, priority=dataclasses.replace(config.priority, tau_hours=hours))
    return AgedQssf(aged, exponent)


_MAKERS: Mapping[str, _Maker] = {
    "fifo": lambda config: Fifo(),
    "sjf": lambda config: Sjf(),
    "srtf": lambda config, restart_s=0: Srtf(int(restart_s)),
    "ssf": lambda config: ShortestService(),
    "gpu-count": lambda config, aged=0: AgedGpuCount(config) if aged else FewestGpus(),
    "gpu-limit": lambda config: LeastRequested(),
    "qssf": Qssf,
    "qssf-aged": _aged,
    "qssf-relief": lambda config, share=RELIEF_SHARE, points=1000.0: RelievedQssf(config, share, points),
    "qssf-debug": DebugLaneQssf,
    "qssf-shuffled": lambda config, seed=0, exponent=None, aged=0: ShuffledQssf(
        config, int(seed), exponent, bool(aged)
    ),
    "multifactor": _multifactor,
}


def policy_names() -> list[str]:
    """Return the names of policies without options and backfill, a site's own last."""
    return [*_MAKERS, *sorted(_own())]


def _own() -> dict[str, Any]:
    return {each.name: each for each in entry_points(group=GROUP) if each.name not in _MAKERS}


def make_policy(text: str, config: Config) -> Policy:
    """A policy of NAME[:option=number ...][+BACKFILL[:limit=number ...][:ESTIMATE]], such as sjf or fifo+easy:true.

    BACKFILL: none, skip, easy, or conservative; the last takes limits by their names in slurm.conf (BF_UNITS).
    ESTIMATE: the run times that it plans with: requested, true, or predicted. Raises RequestError for anything else.
    """
    order, plus, backfill = text.partition("+")
    name, *options = order.strip().split(":")
    policy = _made(name, _numbers(text, options), config)
    if plus:
        kind, *rest = backfill.split(":")
        estimates = [each for each in rest if "=" not in each] or ["requested"]
        policy = _with_backfill(text, policy, kind, ":".join(estimates), config)
        if limits := _numbers(text, [each for each in rest if "=" in each]):
            policy.limits = _limits(text, kind, limits)
    policy.label = text
    return policy


def _made(name: str, options: dict[str, float], config: Config) -> Policy:
    maker = _MAKERS.get(name)
    if maker is None and name in (own := _own()):
        maker = load_trusted(own[name])
    if maker is None:
        raise RequestError(f"there is no policy {name!r}", f"use one of {', '.join(policy_names())}")
    try:
        made: Policy = maker(config, **options)
    except TypeError as error:
        raise RequestError(f"policy {name}: {error}", "see docs/simulator.md for its options") from error
    return made


def _numbers(text: str, options: list[str]) -> dict[str, float]:
    numbers = {}
    for option in options:
        key, _, value = option.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise RequestError(f"policy {text}: {option!r} is no option", "write options as name=number") from None
        least = 1e-6 if key.strip() in _DIVISORS else 0.0
        if not least <= number <= 1e12:
            raise RequestError(f"policy {text}: {option!r} is out of range", f"use {least:g} to 1e12")
        numbers[key.strip()] = number
    return numbers


def _with_backfill(text: str, policy: Policy, kind: str, estimate: str, config: Config) -> Policy:
    if kind not in get_args(Backfill):
        raise RequestError(f"policy {text}: there is no backfill {kind!r}", f"use {', '.join(get_args(Backfill))}")
    if estimate not in ESTIMATES:
        raise RequestError(f"policy {text}: there is no estimate {estimate!r}", f"use {', '.join(ESTIMATES)}")
    if estimate == "predicted" and not isinstance(policy, Predicted):
        policy = PredictedRunTimes(config, policy)
    policy.backfill = kind  # type: ignore[assignment]
    policy.estimate = estimate  # type: ignore[assignment]
    return policy


def _limits(text: str, kind: str, numbers: Mapping[str, float]) -> BackfillLimits:
    for name in numbers:
        if kind != "conservative" or name not in BF_UNITS:
            seen = f"policy {text}: +{kind} has no limit {name!r}"
            raise RequestError(seen, f"use +conservative with {', '.join(BF_UNITS)}")
    units = {BF_UNITS[name][0]: int(number) * BF_UNITS[name][1] for name, number in numbers.items()}
    for name in ("depth", "window_s", "resolution_s"):
        if not units.get(name, 1):
            raise RequestError(f"policy {text}: a limit of its backfill is 0", "use a whole number from 1 on")
    return BackfillLimits(**units)


@contextmanager
def worker_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Workers that end with this block. Raises AlmanacError if one is killed."""
    # Only spawn is safe: DuckDB and pyarrow have threads, which a fork would not copy.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start_worker)
    try:
        yield pool
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


BASE = "fifo+easy"
"""The order of most sites, with which policies are compared."""
CONTROLS = (
    "fifo+skip", "gpu-count", *(f"qssf-shuffled:seed={seed}" for seed in range(5)), "sjf", "sjf+easy",
)  # fmt: skip
"""Controls that a predicting policy must beat, and the result of perfect knowledge."""
_DRAW = re.compile(r":seed=[^:+]*")
Advance = Callable[[float, str], None]
"""Takes the share of the work that is done, and the policy."""


def with_controls(policies: Sequence[str], config: Config) -> list[str]:
    """The policies, and CONTROLS if one of them uses predictions: beating FIFO proves nothing about prediction."""
    if not any(isinstance(make_policy(policy, config), Predicted) for policy in policies):
        return list(policies)
    return [*policies, *(control for control in CONTROLS if control not in policies)]


def run_policy(
    workload: Workload,
    cluster: Cluster,
    policy: str,
    config: Config,
    first: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> PolicyRun:
    """Simulate one policy. first: number of the first scored job, where the timeline starts."""
    record = simulate(workload, cluster, make_policy(policy, config), progress)
    line = timeline_of(workload, cluster, record, first)
    return PolicyRun(
        policy=policy,
        jobs=job_outcomes(workload, record),
        gpus=cluster.gpu_count,
        busy_gpu_s=line.busy_gpu_s,
        interruptions=int(record.preemptions.sum()),
        unfinished=record.unfinished,
        timeline=line,
    )


def draws_name(policy: str) -> str:
    """The policy without its seed."""
    return _DRAW.sub("", policy)


def draws_of(policies: Sequence[str]) -> list[list[str]]:
    """The policies, and those that only differ in their seed together: the draws of one control."""
    found: dict[str, list[str]] = {}
    for policy in policies:
        found.setdefault(draws_name(policy), []).append(policy)
    return list(found.values())


def run_policies(
    workload: Workload,
    cluster: Cluster,
    policies: Sequence[str],
    config: Config,
    *,
    first: int = 0,
    processes: int = 1,
    advance: Advance = lambda share, policy: None,
) -> list[PolicyRun]:
    """Simulate policies in the given order. The result does not depend on the number of processes."""
    for policy in policies:
        make_policy(policy, config)  # a wrong name fails before any simulation
    if min(processes, len(policies)) == 1:
        return list(_in_turn(workload, cluster, policies, config, first, advance))
    groups = draws_of(policies)  # the draws of a control share the predictions of their process
    with worker_pool(min(processes, len(policies))) as pool:
        futures = [pool.submit(_run_group, workload, cluster, group, config, first) for group in groups]
        done: dict[str, PolicyRun] = {}
        for group, future in zip(groups, futures, strict=True):
            advance(len(done) / len(policies), group[0])
            done.update({run.policy: run for run in future.result()})
        return [done[policy] for policy in policies]


def _run_group(
    workload: Workload, cluster: Cluster, policies: Sequence[str], config: Config, first: int
) -> list[PolicyRun]:
    return [run_policy(workload, cluster, policy, config, first) for policy in policies]


def _in_turn(
    workload: Workload, cluster: Cluster, policies: Sequence[str], config: Config, first: int, advance: Advance
) -> Iterator[PolicyRun]:
    for number, policy in enumerate(policies):

        def progress(done: int, jobs: int, number: int = number, policy: str = policy) -> None:
            advance((number + done / jobs) / len(policies), policy)

        yield run_policy(workload, cluster, policy, config, first, progress)
