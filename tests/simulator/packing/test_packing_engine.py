"""Laws of the packing simulation: work is conserved, GPUs have two workers at most, order and units do not matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from packing_rule import follows_rule

from almanac.errors import RequestError
from simulator.policies.packing import POLICIES, PackedJobs, PackingNodes, PackingPolicy, run_packing
from simulator.traces.packing import GANGS, ArrivalOptions, PackingJob, PairTable, draw_jobs, with_errors

MakeTable = Callable[..., PairTable]
NODES = PackingNodes.uniform(16, 8)
OPTIONS = ArrivalOptions(load=1.2, jobs=150, users=4, gpus=16, shares=GANGS)


class CheckedJobs(PackedJobs):
    """Integrates speeds, and holds every placement against the rule."""

    def __init__(self, jobs: tuple[PackingJob, ...], table: PairTable, policy: PackingPolicy) -> None:
        super().__init__(jobs, table, policy, NODES)
        self.work = np.zeros(len(jobs))
        self.before: tuple[float, dict[int, float]] = (0.0, {})
        self.most_workers = 0
        self.pairs: set[tuple[int, int]] = set()

    def settle(self) -> None:
        super().settle()
        now, placed, speeds = self.now_s, self.placed, self.speeds
        assert now >= self.before[0]
        for number, speed in self.before[1].items():
            self.work[number] += (now - self.before[0]) * speed
        self.before = now, dict(speeds)
        assert set(speeds) == set(placed)
        assert all(0 < speed <= 1 for speed in speeds.values())
        workers = Counter(gpu for gpus in placed.values() for gpu in gpus)
        self.most_workers = max([self.most_workers, *workers.values()])
        assert follows_rule(tuple(placed.values()), self.nodes)
        for number, gpus in placed.items():
            assert len(gpus) == self.jobs[number].gpus
            others = {other: theirs for other, theirs in placed.items() if other != number}
            self.pairs |= {(number, other) for other, theirs in others.items() if gpus & theirs}
            if len({other for other, theirs in others.items() if gpus & theirs}) == 0:
                assert speeds[number] == 1


@pytest.mark.parametrize("name", POLICIES)
def test_work_is_conserved_and_no_gpu_has_three_workers(name: str, make_table: MakeTable) -> None:
    table = make_table()
    jobs = draw_jobs(table, OPTIONS, seed=3)
    checks = CheckedJobs(jobs, table, POLICIES[name])
    checks.run()
    record = checks.outcomes()
    assert checks.most_workers == (1 if name == "none" else 2)
    np.testing.assert_allclose(checks.work, record.run_s, rtol=1e-9)
    assert (record.start_s >= record.submit_s).all()
    assert (np.diff(record.start_s) >= 0).all(), "first in, first out"
    assert (record.speed <= 1 + 1e-12).all()
    assert set(np.flatnonzero(checks.shared)) == {number for pair in checks.pairs for number in pair}
    for one, other in checks.pairs:
        assert name != "same-user" or jobs[one].user == jobs[other].user
        assert POLICIES[name].unequal or name == "blind" or jobs[one].gpus == jobs[other].gpus
        assert table.speeds(jobs[one].kind, jobs[other].kind) is not None


def test_pairs_by_speed_keep_each_job_above_its_limit(make_table: MakeTable) -> None:
    table = make_table(1)
    for name in ("speed", "same-user", "stars", "stars-steal"):
        jobs = PackedJobs(draw_jobs(table, OPTIONS, seed=5), table, POLICIES[name], NODES)
        jobs.run()
        assert jobs.outcomes().speed.min() >= 0.6 - 1e-9
        assert jobs.shared.any()


def test_the_order_and_the_names_of_jobs_change_nothing(make_table: MakeTable) -> None:
    table = make_table()
    jobs = draw_jobs(table, OPTIONS, seed=7)
    order = np.random.default_rng(0).permutation(len(jobs))
    shuffled = [replace(jobs[place], user=100 - jobs[place].user) for place in order]
    for name in ("blind", "same-user", "stars-all"):
        first = PackedJobs(jobs, table, POLICIES[name], NODES).outcomes()
        second = PackedJobs(shuffled, table, POLICIES[name], NODES).outcomes()
        np.testing.assert_array_equal(first.end_s[order], second.end_s)


def test_names_of_kinds_change_nothing(make_table: MakeTable) -> None:
    table = make_table()

    def renamed(kind: tuple[str, int]) -> tuple[str, int]:
        return kind[0][::-1], kind[1]

    other = PairTable(
        tuple(map(renamed, table.kinds)), {(renamed(a), renamed(b)): both for (a, b), both in table.measured.items()}
    )
    jobs = draw_jobs(table, OPTIONS, seed=7)
    moved = [replace(job, kind=renamed(job.kind)) for job in jobs]
    for name in ("blind", "speed", "stars-steal"):
        first = PackedJobs(jobs, table, POLICIES[name], NODES).outcomes()
        np.testing.assert_array_equal(first.end_s, PackedJobs(moved, other, POLICIES[name], NODES).outcomes().end_s)


def test_the_unit_of_time_changes_nothing(make_table: MakeTable) -> None:
    table = make_table()
    jobs = draw_jobs(table, OPTIONS, seed=9)
    slow = [replace(job, submit_s=job.submit_s * 4, duration_s=job.duration_s * 4) for job in jobs]
    for name in POLICIES:
        first = PackedJobs(jobs, table, POLICIES[name], NODES).outcomes()
        np.testing.assert_array_equal(first.end_s * 4, PackedJobs(slow, table, POLICIES[name], NODES).outcomes().end_s)


def test_two_jobs_by_hand() -> None:
    """They share from 10 s on: 90 s of a are left at 0.8, 112.5 s; b does 67.5 of its 100 s at 0.6, then runs alone."""
    a, b = ("a", 1), ("b", 1)
    table = PairTable((a, b), {(a, b): (0.8, 0.6), (b, a): (0.6, 0.8)})
    jobs = [PackingJob(0.0, a, 100.0, 0), PackingJob(10.0, b, 100.0, 0)]
    record = PackedJobs(jobs, table, POLICIES["speed"], PackingNodes.uniform(1, 1)).outcomes()
    assert record.end_s.tolist() == pytest.approx([122.5, 155.0])
    alone = PackedJobs(jobs, table, POLICIES["none"], PackingNodes.uniform(1, 1)).outcomes()
    assert alone.end_s.tolist() == [100.0, 200.0]


def test_a_job_on_part_of_a_larger_one_by_hand() -> None:
    """The worker on the shared GPU runs at 0.6: the job of 4 GPUs waits for it, or hands its samples to the others."""
    large, small = ("x", 4), ("y", 1)
    one = ("x", 1)
    table = PairTable((large, small, one), {(one, small): (0.6, 0.9), (small, one): (0.9, 0.6)})
    jobs = [PackingJob(0.0, large, 60.0, 0), PackingJob(0.0, small, 900.0, 0)]
    nodes = PackingNodes.uniform(4, 4)
    for name, speed in (("blind", 0.6), ("stars-steal", 0.9)):
        assert PackedJobs(jobs, table, POLICIES[name], nodes).outcomes().speed[0] == pytest.approx(speed)
    apart = PackedJobs(jobs, table, POLICIES["stars"], nodes)
    apart.run()
    assert not apart.shared.any(), "0.9 of one GPU does not pay for 0.4 of four"
    assert apart.busy_gpu_s == 4 * 60 + 900


def test_predictions_with_errors_are_wrong_in_both_orders_alike(make_table: MakeTable) -> None:
    table = make_table()
    believed = with_errors(table, 0.3, seed=1)
    assert with_errors(table, 0.0, seed=1) == table
    assert set(believed.measured) == set(table.measured) and believed != table
    assert all(believed.speeds(b, a) == both[::-1] and max(both) <= 1 for (a, b), both in believed.measured.items())


def test_a_policy_decides_by_what_it_believes_and_jobs_run_as_they_do() -> None:
    a = ("a", 1)
    table, believed = PairTable((a,), {(a, a): (0.5, 0.5)}), PairTable((a,), {(a, a): (0.9, 0.9)})
    jobs = [PackingJob(0.0, a, 100.0, 0), PackingJob(0.0, a, 100.0, 0)]
    nodes = PackingNodes.uniform(1, 1)
    assert PackedJobs(jobs, table, POLICIES["speed"], nodes).outcomes().end_s.tolist() == [100.0, 200.0]
    assert PackedJobs(jobs, table, POLICIES["speed"], nodes, believed=believed).outcomes().end_s.tolist() == [
        200.0,
        200.0,
    ]


def test_random_draws_are_the_same_whatever_the_users(make_table: MakeTable) -> None:
    table = make_table()
    few, many = (draw_jobs(table, replace(OPTIONS, users=users), seed=2) for users in (1, 1000))
    assert [replace(job, user=0) for job in many] == list(few)
    assert draw_jobs(table, OPTIONS, seed=2) != draw_jobs(table, OPTIONS, seed=3)


def test_the_load_is_what_was_asked_for(make_table: MakeTable) -> None:
    options = replace(OPTIONS, jobs=20_000, load=0.9)
    jobs = draw_jobs(make_table(), options, seed=1)
    load = sum(job.gpus * job.duration_s for job in jobs) / options.gpus / jobs[-1].submit_s
    assert load == pytest.approx(0.9, rel=0.03)


def test_a_job_that_is_larger_than_the_cluster_is_refused(make_table: MakeTable) -> None:
    jobs = [PackingJob(0.0, ("kind 0", 8), 60.0, 0)]
    with pytest.raises(RequestError, match="8 GPUs does not fit 4"):
        PackedJobs(jobs, make_table(), POLICIES["none"], PackingNodes.uniform(4, 4)).outcomes()


def test_every_policy_runs_the_same_jobs(make_table: MakeTable) -> None:
    jobs, (none, speed) = run_packing(make_table(), ["none", "speed"], OPTIONS, NODES, 1)
    assert none.jobs.submit_s.tolist() == speed.jobs.submit_s.tolist() == jobs["submit_s"].tolist()
    assert (none.details["shared"], none.details["least_speed"]) == (0, pytest.approx(1))
    assert none.busy_gpu_s == pytest.approx((jobs["run_s"] * jobs["gpu_count"]).sum())
    assert speed.busy_gpu_s < none.busy_gpu_s
    assert speed.jobs.jct_s.mean() < none.jobs.jct_s.mean()
