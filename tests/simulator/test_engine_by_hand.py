"""Small traces with answers that were worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest

from almanac.errors import RequestError
from simulator.cluster import Cluster, NodeFailure, NodeGroup, PartitionSize, uniform
from simulator.engine import STUCK, TOO_LARGE, simulate
from simulator.policies.base import Fifo, Policy, Sjf, Srtf
from simulator.simulation import CANCELED, COMPLETED, TIMEOUT, Record
from simulator.workload import make_workload


def run(rows: Sequence[tuple[int, int, int]], policy: Policy, cluster: Cluster | None = None, **columns: Any) -> Record:
    """rows: (submit_s, run_s, gpu_count)."""
    frame = pd.DataFrame(rows, columns=["submit_s", "run_s", "gpu_count"]).assign(**columns)
    return simulate(make_workload(frame), cluster or uniform(1, 4), policy)


def backfilled(kind: Any, estimate: Any = "requested") -> Policy:
    policy = Fifo()
    policy.backfill, policy.estimate = kind, estimate
    return policy


ROWS = [(0, 10, 3), (1, 5, 4), (2, 8, 1), (3, 20, 1)]


def test_fifo_blocks_behind_the_first_job() -> None:
    assert run(ROWS, Fifo()).start_s.tolist() == [0, 10, 15, 15]


def test_easy_starts_a_job_that_ends_before_the_reserved_start() -> None:
    # The job of 8 s ends at 10, when the first waiting job can start; that of 20 s would hold it up.
    assert run(ROWS, backfilled("easy")).start_s.tolist() == [0, 10, 2, 15]


def test_skip_starts_whatever_fits() -> None:
    rows = [(0, 10, 3), (1, 5, 4), (2, 20, 1), (3, 5, 1)]
    assert run(rows, backfilled("skip")).start_s.tolist() == [0, 22, 2, 10]


def test_sjf_and_srtf() -> None:
    rows = [(0, 100, 4), (10, 50, 4), (20, 5, 4)]
    assert run(rows, Sjf()).start_s.tolist() == [0, 105, 100]
    record = run(rows, Srtf())
    assert record.end_s.tolist() == [155, 65, 25]
    assert record.preemptions.tolist() == [1, 1, 0]
    assert run(rows, Srtf(restart_s=7)).end_s.tolist() == [169, 72, 25]


def test_placement_is_consolidated() -> None:
    record = run([(0, 9, 3), (0, 9, 6), (0, 9, 2), (0, 9, 8)], Fifo(), uniform(4, 4))
    # 6 GPUs are a whole node and 2 of another, the fullest that holds them; 8 GPUs wait for two whole nodes.
    assert list(record.allocations) == [
        ((0, 0b0111),),
        ((1, 0b1111), (2, 0b0011)),
        ((2, 0b1100),),
        ((0, 0b1111), (1, 0b1111)),
    ]
    assert record.start_s.tolist() == [0, 0, 0, 9]


def test_nodes_that_are_asked_for_share_the_gpus() -> None:
    record = run([(0, 9, 5)], Fifo(), uniform(4, 4), node_count=[3])
    assert [mask.bit_count() for _, mask in record.allocations[0]] == [2, 2, 1]


def test_limits_end_jobs_and_users_cancel_them() -> None:
    record = run([(0, 50, 4), (1, 9, 4), (2, 9, 4)], Fifo(), time_limit_s=[30, 0, 0], cancel_s=[5, 20, -1])
    assert record.state.tolist() == [TIMEOUT, CANCELED, COMPLETED]
    assert record.start_s.tolist() == [0, -1, 30]


def test_a_dependent_job_waits_for_the_end() -> None:
    record = run([(0, 50, 1), (1, 9, 1)], Fifo(), job_id=["a", "b"], depends_on=["", "a"])
    assert record.start_s.tolist() == [0, 50]


def test_a_failed_node_sends_its_jobs_back() -> None:
    cluster = Cluster((NodeGroup(1, 4),), failures=(NodeFailure(0, 10, 40),))
    record = run([(0, 20, 4)], Fifo(), cluster)
    assert [(each.start_s, each.end_s) for each in record.runs()] == [(0, 10), (40, 60)]


def test_a_reserved_node_that_fails_is_reserved_no_more() -> None:
    cluster = Cluster((NodeGroup(3, 4),), failures=(NodeFailure(2, 10, 300),))
    easy = Fifo()
    easy.backfill = "easy"
    record = run([(0, 100, 2), (0, 200, 4), (1, 50, 8), (20, 150, 2)], easy, cluster)
    # The third job was to start at 100 on the nodes 0 and 2; without node 2 it starts at 200, and the last fits before.
    assert record.start_s.tolist() == [0, 0, 200, 20]


def test_a_sleeping_node_boots_for_a_job_that_needs_it() -> None:
    cluster = Cluster((NodeGroup(3, 4),), boot_s=100, asleep=frozenset({1, 2}))
    record = run([(0, 500, 4), (5, 10, 4)], Fifo(), cluster)
    assert record.start_s.tolist() == [0, 105]
    assert [state for state in record.node_states if state[2] != "asleep"] == [(5, 1, "booting"), (105, 1, "up")]


def test_sleeping_nodes_boot_for_the_first_job_of_each_pool() -> None:
    cluster = Cluster(
        (NodeGroup(1, 4, partitions=("p",)), NodeGroup(1, 4, partitions=("q",))), asleep=frozenset({0, 1})
    )
    skip = Fifo()
    skip.backfill = "skip"
    record = run([(0, 10, 4), (5, 10, 4)], skip, cluster, partition=["p", "q"])
    assert record.start_s.tolist() == [300, 305]


def test_a_partition_grows_with_the_day() -> None:
    cluster = Cluster((NodeGroup(2, 4),), sizes={"vc": (PartitionSize(0, 1), PartitionSize(100, 2))})
    record = run([(0, 500, 4), (5, 10, 4)], Fifo(), cluster, partition="vc")
    assert record.start_s.tolist() == [0, 100]


def test_what_cannot_run_is_counted() -> None:
    cluster = Cluster((NodeGroup(1, 4), NodeGroup(1, 4, partitions=("p",))), asleep=frozenset())
    record = run([(0, 5, 16), (1, 5, 1)], Fifo(), cluster, partition="p", job_id=["a", "b"], depends_on=["", "a"])
    assert record.unfinished == {TOO_LARGE: 1, STUCK: 1}


def test_backfill_refuses_preemption() -> None:
    srtf = Srtf()
    srtf.backfill = "easy"
    with pytest.raises(RequestError, match="easy backfill"):
        run(ROWS, srtf)


def test_bad_records_are_counted_and_good_ones_kept() -> None:
    frame = pd.DataFrame(
        {
            "submit_s": [0, None, 3, 4, 5, 6],
            "run_s": [0, 5, None, -4, 5, 1e30],
            "gpu_count": [1, 1, 1, 1, 0, 1],
        }
    )
    workload = make_workload(frame)
    assert workload.array("run_s").tolist() == [1]
    assert workload.excluded == {
        "without a submit time": 1,
        "that never ran or have no end": 1,
        "with a negative run time": 1,
        "without a GPU": 1,
        "with an impossible run time": 1,
    }
    with pytest.raises(RequestError, match="no job to simulate: 1 without a GPU"):
        make_workload(frame.iloc[[4]])
