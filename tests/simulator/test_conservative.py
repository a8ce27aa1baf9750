"""Conservative backfill: without limits it is the plain one, job by job; and what each limit of slurmctld does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from reference import fits
from test_engine_reference import random_trace

from almanac.config import Config
from almanac.errors import RequestError
from simulator.cluster import uniform
from simulator.comparison import make_policy
from simulator.engine import simulate
from simulator.policies.base import BackfillLimits, Policy
from simulator.workload import Workload, make_workload
from slurm.commands import Settings

NO_LIMITS = BackfillLimits()


class _Conservative(Policy):
    def __init__(self, limits: BackfillLimits) -> None:
        self.backfill, self.limits, self.estimate = "conservative", limits, "requested"


def starts_of(workload: Workload, nodes: int, size: int, limits: BackfillLimits) -> list[int]:
    return simulate(workload, uniform(nodes, size), _Conservative(limits)).start_s.tolist()


def plain_starts(workload: Workload, nodes: int, size: int) -> list[int]:
    """One second a row: each waiting job takes its GPUs from the first second on at which they are free for so long."""
    submit_s, run_s = workload.array("submit_s").tolist(), workload.array("run_s").tolist()
    gpus, limit_s = workload.array("gpu_count").tolist(), workload.requested_s().tolist()
    start_s, held = [-1] * len(submit_s), dict[int, list[tuple[int, int]]]()
    expected_s = list(limit_s)
    for now in range(submit_s[0], 2 * sum(limit_s) + submit_s[-1] + 1):
        waiting = [job for job, at in enumerate(submit_s) if at <= now and start_s[job] < 0]
        running = [job for job in held if start_s[job] + run_s[job] > now]
        free = np.full((2 * sum(limit_s) + 2, nodes), size)
        for job in running:
            while start_s[job] + expected_s[job] <= now:
                expected_s[job] *= 2
            for node, taken in held[job]:
                free[: start_s[job] + expected_s[job] - now, node] -= taken
        for job in waiting:
            for first in range(len(free)):
                least = free[first : first + expected_s[job]].min(axis=0).tolist()
                if chosen := fits(least, gpus[job], size):
                    for node, taken in chosen:
                        free[first : first + expected_s[job], node] -= taken
                    if first == 0:
                        start_s[job], held[job] = now, chosen
                    break
    return start_s


@pytest.mark.parametrize("are_limits_true", [True, False])
def test_without_limits_it_is_the_plain_one(are_limits_true: bool) -> None:
    for seed in range(12):
        rng = np.random.default_rng([seed, 39])
        nodes, size = int(rng.integers(1, 4)), int(rng.choice([1, 2, 4]))
        trace = random_trace(rng, nodes, size)[:12]
        wrong = 0 if are_limits_true else rng.integers(-5, 15, len(trace))
        limits_s = np.maximum(trace["run_s"] + wrong, trace["run_s"] if seed % 2 else 1)
        workload = make_workload(trace.assign(time_limit_s=limits_s, run_s=np.minimum(trace["run_s"], limits_s)))
        assert starts_of(workload, nodes, size, NO_LIMITS) == plain_starts(workload, nodes, size)


@pytest.mark.parametrize("size", [1, 4])
def test_limits_beyond_the_queue_change_nothing_and_one_reservation_is_easy(size: int) -> None:
    wide = BackfillLimits(depth=10**6, window_s=10**9, resolution_s=1, of_user=10**6, reserved=10**6)
    differ = 0
    for seed in range(15):
        workload = make_workload(random_trace(np.random.default_rng([seed, 40]), 5, size))
        plain = starts_of(workload, 5, size, NO_LIMITS)
        assert starts_of(workload, 5, size, wide) == plain
        one = starts_of(workload, 5, size, replace(NO_LIMITS, reserved=1))
        assert one == simulate(workload, uniform(5, size), make_policy("fifo+easy", Config())).start_s.tolist()
        differ += one != plain
    assert differ


def workload_of(*jobs: tuple[int, int, str], at_s: int | tuple[int, ...] = 0) -> Workload:
    """Jobs of (GPUs, run time, user), submitted in turn, at one time or at these."""
    gpus, run_s, users = zip(*jobs, strict=True)
    return make_workload(pd.DataFrame({"submit_s": at_s, "gpu_count": gpus, "run_s": run_s, "user": users}))


def test_a_job_that_would_start_beyond_the_window_gets_no_reservation() -> None:
    jobs = workload_of((3, 1000, "a"), (4, 100, "a"), (1, 5000, "a"))
    assert starts_of(jobs, 1, 4, replace(NO_LIMITS, window_s=1000)) == [0, 1000, 1100]
    assert starts_of(jobs, 1, 4, replace(NO_LIMITS, window_s=999)) == [0, 5000, 0]


def test_jobs_behind_the_depth_and_beyond_a_users_number_wait() -> None:
    jobs = workload_of((3, 1000, "a"), (4, 100, "a"), (4, 100, "b"), (1, 50, "a"), (1, 50, "c"))
    assert starts_of(jobs, 1, 4, NO_LIMITS) == [0, 1000, 1100, 0, 50]
    assert starts_of(jobs, 1, 4, replace(NO_LIMITS, depth=3))[3:] == [1200, 1200]
    assert starts_of(jobs, 1, 4, replace(NO_LIMITS, of_user=2)) == [0, 1000, 1100, 50, 0]


def test_reserved_times_are_rounded_down() -> None:
    """The second job is planned from 1000 to 1090, and the third, for 1090 s, may run into the rest of its minute."""
    jobs = workload_of((2, 1000, "a"), (4, 100, "a"), (2, 970, "a"))
    assert starts_of(jobs, 1, 4, NO_LIMITS) == [0, 1000, 0]
    assert starts_of(jobs, 1, 4, replace(NO_LIMITS, resolution_s=60)) == [0, 1000, 1100], "960 is before 970"


def test_only_the_first_in_turn_starts_between_two_plans() -> None:
    """The last two fit next to the first one: they wait for the next plan, but not for a change."""
    jobs = workload_of((3, 100, "a"), (4, 100, "a"), (1, 7, "a"), (1, 7, "a"), at_s=(0, 0, 0, 5))
    assert starts_of(jobs, 1, 4, NO_LIMITS) == [0, 100, 0, 7]
    assert starts_of(jobs, 1, 4, replace(NO_LIMITS, interval_s=30)) == [0, 100, 0, 30]
    assert starts_of(workload_of((4, 100, "a"), (4, 9, "a")), 1, 4, replace(NO_LIMITS, interval_s=900)) == [0, 100]
    for seed in range(15):
        workload = make_workload(random_trace(np.random.default_rng([seed, 41]), 5, 4))
        each_second = starts_of(workload, 5, 4, replace(NO_LIMITS, interval_s=1))
        assert each_second == starts_of(workload, 5, 4, NO_LIMITS)


def test_limits_are_written_as_in_slurm_conf() -> None:
    policy = make_policy("fifo+conservative:bf_window=10:bf_resolution=60:bf_max_job_test=7:true", Config())
    assert (policy.limits, policy.estimate) == (BackfillLimits(depth=7, window_s=600, resolution_s=60), "true")
    for bad, said in (("easy:bf_window=10", "has no limit"), ("conservative:bf_windw=1", "has no limit"),
                      ("conservative:bf_window=0", "is 0"), ("conservative:bf_window=-1", "out of range")):  # fmt: skip
        with pytest.raises(RequestError, match=said):
            make_policy(f"fifo+{bad}", Config())


def test_numbers_of_a_setting_leave_out_what_is_none() -> None:
    settings = Settings(
        SchedulerParameters="defer, BF_window=60,bf_resolution=x,bf_interval=-1,bf_max_job_test=" + "9" * 10
    )
    assert settings.numbers("SchedulerParameters") == {"bf_window": 60}
