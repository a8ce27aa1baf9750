"""Outcomes of hand-made traces, whose figures are known."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from almanac.config import Config
from simulator.cluster import Cluster, NodeGroup, uniform
from simulator.comparison import draws_of, run_policies, run_policy
from simulator.engine import simulate
from simulator.outcomes import job_outcomes, timeline_of
from simulator.policies.base import Fifo, Srtf
from simulator.requests import keep_known_features
from simulator.scores import (
    PolicyScores,
    distribution,
    jain_index,
    mean_of_draws,
    score_runs,
)
from simulator.workload import Workload, make_workload, split_history

CONFIG = Config()


def workload(**columns: object) -> Workload:
    return make_workload(pd.DataFrame(columns))


def three() -> Workload:
    """On one GPU under FIFO: job 0 runs 0-1000, job 1 waits 990 s and runs 100 s, job 2 waits 1080 s and runs 2 s."""
    return workload(
        submit_s=[0, 10, 20], run_s=[1000, 100, 2], gpu_count=[1, 1, 1], user=["a", "b", "b"], partition=["", "p", "p"]
    )


def scores(work: Workload, cluster: Cluster, *policies: str, first: int = 0) -> list[PolicyScores]:
    return score_runs(work.jobs, run_policies(work, cluster, policies, CONFIG, first=first), first)


def test_times_and_slowdowns_of_each_job() -> None:
    jobs = job_outcomes(three(), simulate(three(), uniform(1, 1), Fifo()))
    assert jobs.jct_s.tolist() == [1000, 1090, 1082]
    assert jobs.delay_s.tolist() == [0, 990, 1080]
    assert jobs.slowdown.tolist() == [1, 10.9, 541]
    assert jobs.bounded_slowdown.tolist() == [1, 10.9, 108.2]


def test_the_delay_of_a_preempted_job_is_all_the_time_in_which_it_does_not_run() -> None:
    jobs = job_outcomes(three(), simulate(three(), uniform(1, 1), Srtf()))
    assert jobs.jct_s.tolist() == [1102, 102, 2]
    assert jobs.delay_s.tolist() == [102, 2, 0]


def test_a_policy_is_scored_over_all_jobs_and_by_group() -> None:
    (fifo,) = scores(three(), uniform(1, 1), "fifo")
    assert (fifo.all_jobs.jobs, fifo.all_jobs.ended, fifo.all_jobs.queued) == (3, 3, 2)
    assert fifo.all_jobs.delay_s.mean == 690
    assert fifo.all_jobs.delay_s.median == 990
    assert fifo.all_jobs.delay_s.maximum == 1080
    assert fifo.by["length"]["under 15 min"].jobs == 2
    assert fifo.by["length"]["15 min to 6 h"].jct_s.mean == 1000
    assert fifo.by["length"]["over 6 h"].jobs == 0
    assert math.isnan(fifo.by["length"]["over 6 h"].jct_s.mean)
    assert list(fifo.by["partition"]) == ["p"], "a job without a partition belongs to none"
    assert fifo.by["user"]["b"].delay_s.mean == 1035
    assert fifo.by["gpu_count"]["1"].jobs == 3
    assert fifo.by["tier"] == {}


@pytest.mark.parametrize(("run_s", "length"), [(899, 0), (900, 1), (21_600, 1), (21_601, 2)])
def test_the_limits_of_the_lengths(run_s: int, length: int) -> None:
    (fifo,) = scores(workload(submit_s=[0], run_s=[run_s], gpu_count=[1]), uniform(1), "fifo")
    assert [group.jobs for group in fifo.by["length"].values()] == [int(place == length) for place in range(3)]


def test_the_first_policy_is_what_the_others_are_compared_with() -> None:
    fifo, sjf = scores(three(), uniform(1, 1), "fifo", "sjf")
    assert fifo.against_first.jct_ratio == 1
    assert fifo.against_first.worse_users == 0
    # Under SJF job 2 starts at 1000 and job 1 at 1002.
    assert sjf.against_first.jct_ratio == pytest.approx((1000 + 1092 + 982) / (1000 + 1090 + 1082))
    assert sjf.against_first.delay_difference_s.mean == pytest.approx((2 - 100) / 3)
    assert (sjf.against_first.worse_users, sjf.against_first.worse_jobs) == (0, pytest.approx(1 / 3))
    fewer = scores(three(), uniform(1, 1), "sjf", "fifo")[1]
    assert fewer.against_first.worse_users == 0.5


def test_jobs_of_unknown_users_count_for_no_user_and_are_drawn_by_day() -> None:
    day = 86_400
    work = workload(
        submit_s=[0, 10, 20, day, day + 1, day + 2], run_s=[1000, 100, 2, 1000, 100, 2], gpu_count=[1] * 6,
        user=["", "", "a", "", "", "b"],
    )  # fmt: skip
    sjf = scores(work, uniform(1, 1), "fifo", "sjf")[1]
    assert sjf.against_first.worse_users == 0
    assert list(sjf.by["user"]) == ["a", "b"]
    assert not math.isnan(sjf.against_first.jct_difference_s.low)
    nobody = scores(workload(submit_s=[0, 10, 20], run_s=[1000, 100, 2], gpu_count=[1] * 3), uniform(1, 1), "fifo")[0]
    assert math.isnan(nobody.against_first.worse_users)
    assert math.isnan(nobody.against_first.jct_difference_s.low), "one day is one block"
    assert math.isnan(nobody.jain)


def test_the_warm_up_is_simulated_and_not_scored() -> None:
    (fifo,) = scores(three(), uniform(1, 1), "fifo", first=1)
    assert fifo.all_jobs.jobs == 2
    assert fifo.all_jobs.delay_s.mean == 1035
    assert fifo.utilization == 1.0, "from the first scored submission on"


def test_the_later_part_of_a_trace_starts_on_an_empty_cluster_and_keeps_its_past() -> None:
    later = split_history(three(), 0.4)
    assert later.history is not None
    (fifo,) = scores(later, uniform(1, 1), "fifo")
    assert (fifo.all_jobs.jobs, fifo.all_jobs.delay_s.maximum) == (2, 90)


def test_deadlines_and_energy_are_counted() -> None:
    """Jobs 0 and 1 have deadlines; only job 0 ends in time. The GPU is busy until 1102 s."""
    jobs = three().jobs.assign(deadline_s=[1000, 1099, -1])
    (fifo,) = score_runs(jobs, run_policies(three(), uniform(1, 2), ["fifo"], CONFIG), watts=(100.0, 400.0))
    assert (fifo.deadlines, fifo.deadlines_met) == (2, 1.0)
    (fifo,) = score_runs(jobs, run_policies(three(), uniform(1, 1), ["fifo"], CONFIG), watts=(100.0, 400.0))
    assert (fifo.deadlines, fifo.deadlines_met, fifo.slow) == (2, 0.5, 0)
    assert fifo.energy_kwh == pytest.approx(400 * 1102 / 3.6e6)


def test_jobs_that_never_start_or_are_canceled_are_counted_and_not_scored() -> None:
    work = workload(submit_s=[0, 1, 2], run_s=[100, 5, 5], gpu_count=[1, 1, 9], cancel_s=[-1, 50, -1])
    (fifo,) = scores(work, uniform(1, 1), "fifo")
    assert (fifo.all_jobs.jobs, fifo.all_jobs.ended, fifo.all_jobs.canceled) == (3, 1, 1)
    assert fifo.all_jobs.jct_s.mean == 100
    assert fifo.unfinished == {"ask for more than the cluster has": 1}


def test_nothing_is_known_of_a_policy_that_starts_no_job() -> None:
    (fifo,) = scores(workload(submit_s=[0], run_s=[5], gpu_count=[9]), uniform(1, 1), "fifo")
    assert math.isnan(fifo.all_jobs.jct_s.mean)
    assert math.isnan(fifo.jain)
    assert math.isnan(fifo.against_first.jct_ratio)
    assert fifo.utilization == 0


def test_use_and_fragmentation_over_time() -> None:
    """Two nodes of 4 GPUs until 100 s: 3 GPUs of one node for 50 s, then all of it for 50 s, and the other never."""
    work = workload(submit_s=[0, 50, 100], run_s=[50, 50, 1], gpu_count=[3, 4, 1])
    line = timeline_of(work, uniform(2, 4), simulate(work, uniform(2, 4), Fifo()))
    half = len(line.busy_gpus) // 2
    np.testing.assert_allclose(line.busy_gpus[:half], 3)
    np.testing.assert_allclose(line.fragmented_gpus[:half], 1)
    np.testing.assert_allclose(line.busy_gpus[half:], 4)
    np.testing.assert_allclose(line.fragmented_gpus[half:], 0, atol=1e-9)
    assert line.busy_gpu_s == 3 * 50 + 4 * 50 + 1


def test_the_queue_over_time() -> None:
    """Jobs 1 to 3 come at 0 s with job 0. They start at 10, 20, and 30 s; the last one ends at 40 s."""
    work = workload(submit_s=[0] * 4, run_s=[10] * 4, gpu_count=[1] * 4)
    line = timeline_of(work, uniform(1, 1), simulate(work, uniform(1, 1), Fifo()))
    assert line.edges_s[-1] == 40, "all jobs come at once, so the end counts"
    assert line.waiting_jobs.mean() == pytest.approx((3 + 2 + 1 + 0) / 4)
    np.testing.assert_allclose(line.busy_gpus, 1)


def test_the_queue_of_preempted_and_canceled_jobs() -> None:
    """Job 0 waits again from 10 to 12 s and from 20 to 120 s; job 1 leaves the queue at 50 s."""
    work = workload(submit_s=[0, 10, 20], run_s=[900, 2, 100], gpu_count=[1, 1, 1])
    line = timeline_of(work, uniform(1, 1), simulate(work, uniform(1, 1), Srtf()))
    assert line.edges_s[-1] == 20
    assert line.waiting_jobs.sum() * 20 / len(line.waiting_jobs) == pytest.approx(2)
    work = workload(submit_s=[0, 0, 100], run_s=[500, 9, 1], gpu_count=[1, 1, 1], cancel_s=[-1, 50, -1])
    line = timeline_of(work, uniform(1, 1), simulate(work, uniform(1, 1), Fifo()))
    assert line.waiting_jobs.mean() == pytest.approx(0.5)


def test_every_gpu_second_of_a_trace_is_in_its_timeline() -> None:
    rng = np.random.default_rng(3)
    work = workload(
        submit_s=np.sort(rng.integers(0, 5000, 300)),
        run_s=rng.integers(1, 900, 300),
        gpu_count=rng.integers(1, 20, 300),
    )
    for policy in ("fifo", "srtf", "sjf+easy"):
        run = run_policy(make_workload(pd.concat([work.jobs, end_marker()])), uniform(4, 4), policy, CONFIG)
        width = run.timeline.edges_s[1] - run.timeline.edges_s[0]
        served = (work.array("run_s") * work.array("gpu_count"))[run.jobs.is_known[:300]].sum()
        assert run.timeline.busy_gpus.sum() * width == pytest.approx(served)
        waited = run.jobs.delay_s[np.isfinite(run.jobs.delay_s)].sum()
        unstarted = ((10**6 - work.array("submit_s"))[~run.jobs.is_known[:300]]).sum()
        assert run.timeline.waiting_jobs.sum() * width == pytest.approx(waited + unstarted)


def end_marker() -> pd.DataFrame:
    """A job so late that the timeline holds the whole trace."""
    return pd.DataFrame({"job_id": ["last"], "submit_s": [10**6], "run_s": [1], "gpu_count": [1]})


def test_fairness_is_1_if_all_users_wait_alike_and_lower_if_one_waits_for_all() -> None:
    assert jain_index([2.0, 2.0, math.nan]) == 1
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert math.isnan(jain_index([]))


def test_the_distribution_of_known_values() -> None:
    values = distribution(np.arange(101.0))
    assert (values.mean, values.median, values.p95, values.p99, values.maximum) == (50, 50, 95, 99, 100)


def test_several_processes_give_what_one_gives() -> None:
    names = ("fifo", "sjf", "sjf+easy")
    one, two = (run_policies(three(), uniform(1, 1), names, CONFIG, processes=number) for number in (1, 2))
    assert repr(score_runs(three().jobs, one)) == repr(score_runs(three().jobs, two))


def test_draws_of_a_control_are_the_same_in_any_process() -> None:
    rng = np.random.default_rng(1)
    frame = {"submit_s": np.sort(rng.integers(0, 9000, 60)), "run_s": rng.integers(1, 900, 60), "gpu_count": 1}
    work, names = make_workload(pd.DataFrame(frame)), [f"qssf-shuffled:seed={seed}" for seed in range(3)]
    together = run_policies(work, uniform(1, 2), names, CONFIG)
    alone = [run_policy(work, uniform(1, 2), name, CONFIG) for name in names]
    apart = run_policies(work, uniform(1, 2), ["fifo", *names], CONFIG, processes=2)[1:]
    jct_s = [[run.jobs.jct_s.tolist() for run in runs] for runs in (together, alone, apart)]
    assert jct_s[0] == jct_s[1] == jct_s[2]
    assert jct_s[0][0] != jct_s[0][1]


def test_the_draws_of_a_control_have_one_mean() -> None:
    assert draws_of(["fifo", "qssf-shuffled:seed=1+easy", "sjf", "qssf-shuffled:seed=22+easy"]) == [
        ["fifo"], ["qssf-shuffled:seed=1+easy", "qssf-shuffled:seed=22+easy"], ["sjf"],
    ]  # fmt: skip
    fifo, sjf = scores(three(), uniform(1, 1), "fifo", "sjf")
    mean = mean_of_draws([fifo, sjf], "both")
    assert (mean.policy, mean.all_jobs.jobs, mean.all_jobs.delay_s.maximum) == ("both", 3, (1080 + 992) / 2)
    assert (
        mean.by["user"]["b"].delay_s.mean == (fifo.by["user"]["b"].delay_s.mean + sjf.by["user"]["b"].delay_s.mean) / 2
    )
    assert repr(mean_of_draws([fifo], fifo.policy)) == repr(fifo)


def test_the_progress_of_each_policy_adds_up() -> None:
    told: list[tuple[float, str]] = []
    run_policies(three(), uniform(1, 1), ("fifo", "sjf"), CONFIG, advance=lambda *each: told.append(each))
    assert [policy for _, policy in told] == sorted(policy for _, policy in told)
    assert all(0 <= share <= 1 for share, _ in told)


def test_features_that_the_cluster_lacks_hold_up_no_job() -> None:
    work = workload(
        submit_s=[0, 1, 2, 3],
        run_s=[1] * 4,
        gpu_count=[1] * 4,
        constraint=["gpu&hbm80g", "hbm80g", "hbm40g|hbm80g", ""],
    )
    plain, dropped = keep_known_features(work, Cluster((NodeGroup(1, 4, features=frozenset({"hbm80g"})),)))
    assert plain.array("constraint").tolist() == ["hbm80g", "hbm80g", "", ""]
    assert dropped == {"gpu&hbm80g": 1, "hbm40g|hbm80g": 1}
    same, dropped = keep_known_features(plain, Cluster((NodeGroup(1, 4, features=frozenset({"hbm80g"})),)))
    assert same is plain
    assert dropped == {}
