"""Run several policies on one workload, in this process or in several."""

from __future__ import annotations

import multiprocessing
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from almanac.config import Config
from almanac.errors import AlmanacError
from simulator.cluster import Cluster
from simulator.engine import simulate
from simulator.outcomes.jobs import job_outcomes
from simulator.outcomes.scores import PolicyRun
from simulator.outcomes.timeline import timeline
from simulator.policies.predicted import Predicted
from simulator.policies.registry import make_policy
from simulator.workload import Workload

CONTROLS = (
    "fifo+skip", "gpu-count", *(f"qssf-shuffled:seed={seed}" for seed in range(5)), "sjf", "sjf+easy",
)  # fmt: skip
"""What a policy that predicts must beat, and what perfect knowledge would reach."""
_DRAW = re.compile(r":seed=[^:+]*")
Advance = Callable[[float, str], None]
"""Told of the share of the work that is done, and of the policy."""


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
    return PolicyRun(
        policy=policy,
        jobs=job_outcomes(workload, record),
        timeline=timeline(workload, cluster, record, first),
        preemptions=int(record.preemptions.sum()),
        makespan_s=max(0, int(record.end_s.max()) - int(workload.array("submit_s")[0])),
        unfinished=record.unfinished,
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
    # Only spawn is safe: DuckDB and pyarrow have threads, which a fork would not copy.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(processes, len(policies)), context, _die_of_interrupts)
    try:
        futures = [pool.submit(_run_group, workload, cluster, group, config, first) for group in groups]
        done: dict[str, PolicyRun] = {}
        for group, future in zip(groups, futures, strict=True):
            advance(len(done) / len(policies), group[0])
            done.update({run.policy: run for run in future.result()})
        return [done[policy] for policy in policies]
    except BrokenProcessPool as error:
        raise AlmanacError("a simulation was killed, perhaps because memory ran out", "use --jobs 1") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _run_group(
    workload: Workload, cluster: Cluster, policies: Sequence[str], config: Config, first: int
) -> list[PolicyRun]:
    return [run_policy(workload, cluster, policy, config, first) for policy in policies]


def _die_of_interrupts() -> None:
    """On Ctrl-C, only the first process has something to say."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _in_turn(
    workload: Workload, cluster: Cluster, policies: Sequence[str], config: Config, first: int, advance: Advance
) -> Iterator[PolicyRun]:
    for number, policy in enumerate(policies):

        def progress(done: int, jobs: int, number: int = number, policy: str = policy) -> None:
            advance((number + done / jobs) / len(policies), policy)

        yield run_policy(workload, cluster, policy, config, first, progress)
