"""The simulator and slurmctld start the jobs of small traces in the same order. Slurm runs sleeps of known length."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import pytest
from sites import Site
from slurm_traces import (
    DELAY_S,
    ON_SPARE,
    PARTITIONS,
    TWO_WAIT,
    SleepJob,
    disagreements,
    find_trace,
    overtaking,
    start_times,
)

pytestmark = pytest.mark.cluster

SEED = 1
QUICK = "batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1,bf_resolution=1,bf_continue"


@contextmanager
def scheduling(site: Site, kind: str, parameters: str) -> Iterator[None]:
    """slurm.conf of the controller with a scheduler and the traces' partitions, and as it was afterwards."""
    path = f"{site.etc_dir}/slurm.conf"
    before = site.read("ctl", path)
    text = re.sub(r"(?m)^(SchedulerType|SchedulerParameters|Priority\w+)=.*\n", "", before.decode())
    text += f"SchedulerType=sched/{kind}\nSchedulerParameters={parameters}\nPriorityType=priority/basic\n"
    text += "".join(
        f"PartitionName={name} Nodes={nodes} DefMemPerCPU=1000 MaxTime=2-0 State=UP\n"
        for name, nodes in PARTITIONS.items()
    )
    try:
        site.write("ctl", path, text.encode())
        site.restart_controller()
        yield
    finally:
        site.run("ctl", "root", "scancel", "--user=alice")
        site.write("ctl", path, before)
        site.restart_controller()


@dataclass(frozen=True)
class Started:
    """start_s: since the first start of the trace. nodes, gpus: of the whole job. is_backfilled: Slurm says so.

    late_s: added to its run, or to its submission after the first one.
    """

    start_s: float
    nodes: int
    gpus: int
    is_backfilled: bool
    late_s: float


def run_trace(site: Site, jobs: Sequence[SleepJob], check: Callable[[Sequence[Started]], None]) -> None:
    """Let slurmctld run the jobs and check how it started them.

    A run that fails proves nothing if the machine delayed a job by more than a trace stands: then another one counts.
    """
    for _ in range(4):
        started = run_once(site, jobs)
        try:
            return check(started)
        except AssertionError:
            if max(each.late_s for each in started) <= DELAY_S / 2:
                raise
    raise AssertionError(f"this machine delays every run: {started}")


def run_once(site: Site, jobs: Sequence[SleepJob]) -> list[Started]:
    """The first jobs wait in closed partitions, the others come later."""
    set_partitions(site, "DOWN")
    ids = submit(site, [job for job in jobs if not job.submit_s])
    set_partitions(site, "UP")
    opened_s = time.time()
    ids += submit(site, [job for job in jobs if job.submit_s])
    assert set(site.wait_for_accounting(*ids).values()) == {"COMPLETED"}
    wanted = ",".join(map(str, ids))
    columns = "JobIDRaw,Start,NNodes,AllocTRES,Flags,Submit,End"
    shown = site.run("ctl", "root", "sacct", "-anPX", "-j", wanted, "-S", "now-2days", "-o", columns).stdout
    rows = {int(row.split("|")[0]): row.split("|")[1:] for row in shown.splitlines()}
    times_s = {job: [datetime.fromisoformat(rows[job][at]).timestamp() for at in (0, 4, 5)] for job in ids}
    starts_s = [times_s[job][0] for job in ids]

    def late_s(number: int, job: SleepJob) -> float:
        start_s, submit_s, end_s = times_s[number]
        return max(end_s - start_s - job.sleep_s, submit_s - opened_s - job.submit_s if job.submit_s else 0)

    return [
        Started(
            start_s - min(starts_s), int(rows[job][1]), int(re.findall(r"gres/gpu=(\d+)", rows[job][2])[0]),
            "SchedBackfill" in rows[job][3], late_s(job, wanted_job),
        )
        for job, start_s, wanted_job in zip(ids, starts_s, jobs, strict=True)
    ]  # fmt: skip


def set_partitions(site: Site, state: str) -> None:
    for name in PARTITIONS:
        site.run("ctl", "root", "scontrol", "update", f"PartitionName={name}", f"State={state}")


def submit(site: Site, jobs: Sequence[SleepJob]) -> list[int]:
    """Submit each job at its time, in seconds from now."""
    lines, now_s = [], 0.0
    for job in jobs:
        lines.append(f"sleep {job.submit_s - now_s}")
        now_s = job.submit_s
        lines.append(
            f"sbatch --parsable -o /dev/null -p {job.partition} -N {job.nodes} --gpus-per-node={job.gpus} "
            f"-t {int(job.limit_s // 60)} --wrap 'exec sleep {job.sleep_s}'"
        )
    shown = site.run("login", "alice", "sh", "-ec", "\n".join(lines)).stdout
    return [int(line) for line in shown.splitlines()]


def check(jobs: Sequence[SleepJob], policy: str, started: Sequence[Started]) -> None:
    """The simulator starts the jobs in Slurm's order, on as many nodes, and backfills the same ones."""
    expected_s, seen_s = start_times(jobs, policy), [each.start_s for each in started]
    assert disagreements(jobs, expected_s, seen_s) == []
    assert overtaking(jobs, seen_s) == overtaking(jobs, expected_s)
    assert [(each.nodes, each.gpus) for each in started] == [(job.nodes, job.nodes * job.gpus) for job in jobs]
    assert all(started[job].is_backfilled for job in overtaking(jobs, expected_s))


def check_both(policy: str, started: Sequence[Started]) -> None:
    """Slurm reserves whole nodes. The simulator reserves GPUs, and starts a job on those that stay free."""
    check(TWO_WAIT, policy, started[: len(TWO_WAIT)])
    _, waits, after = (each.start_s for each in started[len(TWO_WAIT) :])
    assert after >= waits


def test_fifo_starts_jobs_in_the_order_of_sched_builtin(site: Site) -> None:
    found = (find_trace("fifo", SEED, name, "fifo+skip") for name in PARTITIONS)
    jobs = sorted((job for trace in found for job in trace), key=lambda job: job.submit_s)
    with scheduling(site, "builtin", QUICK):
        run_trace(site, jobs, partial(check, jobs, "fifo"))


@pytest.mark.parametrize(
    ("policy", "parameters"),
    [("fifo+easy", f"{QUICK},bf_job_part_count_reserve=1"), ("fifo+conservative", QUICK)],
    ids=["easy", "conservative"],
)
def test_backfill_starts_jobs_in_the_order_of_sched_backfill(site: Site, policy: str, parameters: str) -> None:
    # Slurm reserves for each waiting job, as conservative backfill does, unless bf_job_part_count_reserve limits it.
    random = find_trace(policy, SEED, "whole", "fifo")
    with scheduling(site, "backfill", parameters):
        run_trace(site, random, partial(check, random, policy))
        run_trace(site, [*TWO_WAIT, *ON_SPARE], partial(check_both, policy))
    assert start_times(ON_SPARE, policy)[2] == 0


@pytest.mark.parametrize(
    ("limits", "times"), [("bf_window=60", 1000), ("bf_max_job_test=3", 1)], ids=["window", "depth"]
)
def test_limits_of_backfill_are_slurmctlds(site: Site, limits: str, times: int) -> None:
    """A second of the trace is a thousand of the simulator's, so a minute of the window is, too."""
    name, _, number = limits.partition("=")
    policy = f"fifo+conservative:{name}={int(number) * times}"
    jobs = find_trace(policy, SEED, "whole", "fifo+conservative")
    with scheduling(site, "backfill", f"{QUICK},{limits}"):
        run_trace(site, jobs, partial(check, jobs, policy))
