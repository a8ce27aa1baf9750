"""Laws of every simulation: no GPU holds two jobs, no job is lost, and no limit of the input is broken."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from simulator.cluster import Cluster, NodeFailure, NodeGroup, PartitionSize, uniform
from simulator.engine import simulate
from simulator.policies.base import Actions, ClusterView, FewestGpus, Fifo, Multifactor, Policy, Sjf, Srtf
from simulator.simulation import CANCELED, UNFINISHED, Record
from simulator.workload import Workload, make_workload


class Sleepy(Fifo):
    """Sends idle nodes to sleep every 30 s."""

    tick_s = 30

    def tick(self, view: ClusterView) -> Actions:
        return Actions(sleep=view.idle_nodes[1:])


def random_site(rng: np.random.Generator) -> tuple[Workload, Cluster]:
    count = int(rng.integers(5, 60))
    submit_s = np.sort(rng.integers(0, 300, count))
    run_s = rng.integers(1, 120, count)
    frame = pd.DataFrame(
        {
            "job_id": [f"j{number}" for number in range(count)],
            "submit_s": submit_s,
            "run_s": run_s,
            "gpu_count": rng.choice([1, 2, 3, 4, 8, 12, 40], count, p=[0.3, 0.2, 0.1, 0.2, 0.1, 0.08, 0.02]),
            "partition": rng.choice(["a", "b", "", "elsewhere"], count),
            "constraint": rng.choice(["", "hbm80g"], count, p=[0.7, 0.3]),
            "is_exclusive": rng.random(count) < 0.1,
            "time_limit_s": np.where(rng.random(count) < 0.5, 0, run_s + rng.integers(-20, 200, count)),
            "cancel_s": np.where(rng.random(count) < 0.8, -1, submit_s + rng.integers(0, 200, count)),
            "depends_on": [
                f"j{rng.integers(number)}" if number and rng.random() < 0.2 else "" for number in range(count)
            ],
            "array_group": rng.choice([-1, 0, 1], count, p=[0.7, 0.2, 0.1]),
            "user": rng.choice(["x", "y", "z"], count),
        }
    )
    cluster = Cluster(
        (
            NodeGroup(3, 4, features=frozenset({"hbm80g"}), partitions=("a", "")),
            NodeGroup(2, 8, partitions=("a", "b", "")),
            NodeGroup(4, 8, partitions=("c",)),
        ),
        sizes={"c": (PartitionSize(0, 2), PartitionSize(150, 4), PartitionSize(250, 1))},
        failures=tuple(
            NodeFailure(int(node), int(down), int(down) + int(rng.integers(1, 100)))
            for node, down in zip(rng.choice(9, 3, replace=False), rng.integers(0, 400, 3), strict=True)
        ),
        boot_s=20,
        asleep=frozenset({1, 4}) if rng.random() < 0.5 else frozenset(),
    )
    frame.loc[frame["partition"] == "elsewhere", "partition"] = "c"
    return make_workload(frame, {0: 2, 1: 1}), cluster


def policies() -> list[Policy]:
    made: list[Policy] = [Fifo(), Sjf(), Srtf(5), Sleepy(), Multifactor(), FewestGpus()]
    for kind in ("skip", "easy", "conservative"):
        policy = Sjf()
        policy.backfill = kind  # type: ignore[assignment]
        made.append(policy)
    return made


@pytest.mark.parametrize("policy", policies(), ids=lambda policy: f"{policy.name} {policy.backfill} {policy.tick_s}")
@pytest.mark.parametrize("seeds", [range(3), range(3, 25)], ids=["few", "many"])
def test_the_laws_hold(policy: Policy, seeds: range) -> None:
    for seed in seeds:
        rng = np.random.default_rng([seed, 7])
        workload, cluster = random_site(rng)
        record = simulate(workload, cluster, policy)
        check_gpus(record, cluster)
        check_jobs(record, workload, policy)
        check_places(record, workload, cluster)
        check_order(record, workload)
        again = simulate(workload, cluster, policy)
        assert again.runs() == record.runs()


def check_gpus(record: Record, cluster: Cluster) -> None:
    """No GPU holds two jobs, and no job runs on a node that is out of service."""
    whole = cluster.gpus_by_node()
    held: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for run in record.runs():
        for node, mask in run.allocation:
            assert 0 < mask < 1 << whole[node]
            for gpu in range(whole[node]):
                if mask >> gpu & 1:
                    held[node, gpu].append((run.start_s, run.end_s))
    for times in held.values():
        times.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(times))
    away: dict[int, int] = {}
    spans = []
    for time_s, node, state in record.node_states:
        if state == "up":
            spans.append((node, away.pop(node), time_s))
        else:
            away.setdefault(node, time_s)
    spans += [(node, since, 2**40) for node, since in away.items()]
    for run in record.runs():
        for node, since, until in spans:
            if any(node == each for each, _ in run.allocation):
                assert run.end_s <= since or run.start_s >= until


def check_jobs(record: Record, workload: Workload, policy: Policy) -> None:
    """Every job ran for its run time, was canceled while it waited, or is counted."""
    run_s = workload.array("run_s")
    has_run = record.start_s >= 0
    assert (record.start_s[has_run] >= workload.array("submit_s")[has_run]).all()
    has_ended = record.end_s >= 0
    whole_s = (record.end_s - record.last_start_s)[has_ended]
    if policy.is_preemptive:
        lost = np.zeros(len(workload), dtype=int)
        for run in record.runs():
            lost[run.job] += run.end_s - run.start_s
        assert (lost[has_ended] >= run_s[has_ended]).all()
    else:
        assert (whole_s == run_s[has_ended]).all()
    canceled = record.state == CANCELED
    assert sum(record.unfinished.values()) == int((~has_ended & ~canceled).sum())
    assert ((record.state == UNFINISHED) == (~has_ended & ~canceled)).all()
    assert not (canceled & has_run).any()
    assert (workload.array("cancel_s")[canceled] >= 0).all()


def check_places(record: Record, workload: Workload, cluster: Cluster) -> None:
    sets = [place for place, each in enumerate(cluster.node_sets) for _ in range(each.nodes)]
    whole = cluster.gpus_by_node()
    for run in record.runs():
        row = workload.jobs.iloc[run.job]
        gpus = sum(mask.bit_count() for _, mask in run.allocation)
        assert gpus == row["gpu_count"] or row["is_exclusive"]
        nodes = [node for node, _ in run.allocation]
        assert len(set(nodes)) == len(nodes)
        assert all(row["partition"] in cluster.node_sets[sets[node]].partitions for node in nodes)
        assert not row["constraint"] or all("hbm80g" in cluster.node_sets[sets[node]].features for node in nodes)
        if row["is_exclusive"]:
            assert all(mask == (1 << whole[node]) - 1 for node, mask in run.allocation)


def check_order(record: Record, workload: Workload) -> None:
    for job, before in workload.dependencies:
        if record.start_s[job] >= 0:
            assert record.state[before] == CANCELED or 0 <= record.end_s[before] <= record.start_s[job]
    for group, limit in workload.array_limits.items():
        members = (workload.array("array_group") == group) & (record.start_s >= 0)
        changes = [(int(time_s), +1) for time_s in record.start_s[members]]
        changes += [(int(time_s), -1) for time_s in record.end_s[members]]
        running = 0
        for _, change in sorted(changes, key=lambda each: (each[0], each[1])):
            running += change
            assert running <= limit


def test_work_is_conserved_under_fifo_that_may_skip() -> None:
    """No GPU idles while a job of one GPU waits."""
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"submit_s": rng.integers(0, 500, 300), "run_s": rng.integers(1, 90, 300), "gpu_count": 1})
    workload, policy = make_workload(frame), Fifo()
    policy.backfill = "skip"
    record = simulate(workload, uniform(2, 4), policy)
    submit_s = workload.array("submit_s")
    for time_s in range(int(record.end_s.max())):
        busy = ((record.start_s <= time_s) & (record.end_s > time_s)).sum()
        waiting = ((submit_s <= time_s) & (record.start_s > time_s)).sum()
        assert busy == 8 or waiting == 0
