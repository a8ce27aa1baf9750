"""The wait of a new job, from a snapshot of the queue: by hand, and its laws."""

from __future__ import annotations

import dataclasses
import random

import pytest

from advisor.types.queue_forward import Probe, estimate_waits, first_starts, sizes
from advisor.types.queue_view import MOST_S, PoolNode, QueueView, RunningJob, Span, WaitingJob, left_span, run_span
from almanac.records import Duration

A100 = frozenset({"a100"})
HOUR_S = 3600.0


def span(likely_s: float) -> Span:
    return Span(likely_s / 2, likely_s, likely_s * 2)


def node(gpu_type: str = "a100", gpus: int = 4, partitions: tuple[str, ...] = ("gpu",)) -> PoolNode:
    return PoolNode(gpu_type, gpus, frozenset(partitions))


def waiting(gpus: int, run_s: float, nodes: int = 1, types: frozenset[str] = A100, **other: object) -> WaitingJob:
    fields = {"submitted_s": 10_000.0, "limit_s": run_s} | other
    return WaitingJob(gpus, nodes, types, span(run_s), **fields)  # type: ignore[arg-type]


def view(
    nodes: tuple[PoolNode, ...], running: tuple[RunningJob, ...] = (), queue: tuple[WaitingJob, ...] = ()
) -> QueueView:
    return QueueView(nodes, running, queue, 1000)


def running(node_gpus: dict[int, int], left_s: float, limit_s: float | None = None) -> RunningJob:
    return RunningJob(node_gpus, span(left_s), left_s if limit_s is None else limit_s)


def test_idle_gpus_mean_no_wait_and_a_type_holds_no_more_than_it_has() -> None:
    found = estimate_waits(view((node(), node("h100", 2))))
    assert {key: wait.wait_s for key, wait in found.items()} == {
        ("a100", 1): 0, ("a100", 2): 0, ("a100", 4): 0, ("h100", 1): 0, ("h100", 2): 0,
    }  # fmt: skip
    assert all(wait.as_of_s == 1000 for wait in found.values())


def test_a_new_job_waits_for_the_running_one_and_the_queue_ahead() -> None:
    """4 GPUs busy for 1 h, then a 4-GPU job of 2 h: a new job starts after 3 h; half and double by run times."""
    found = estimate_waits(view((node(),), (running({0: 4}, HOUR_S),), (waiting(4, 2 * HOUR_S),)))
    assert found["a100", 1].wait_s == 3 * HOUR_S
    assert (found["a100", 4].low_s, found["a100", 4].high_s) == (1.5 * HOUR_S, 6 * HOUR_S)


def test_jobs_of_other_types_and_partitions_are_not_ahead() -> None:
    nodes = (node(), node("h100", 4, ("big",)))
    queue = (
        waiting(4, HOUR_S, types=frozenset({"h100"})),
        waiting(4, HOUR_S, types=frozenset(), partitions=frozenset({"big"})),
    )
    found = estimate_waits(view(nodes, (), queue))
    assert found["a100", 4].wait_s == 0
    assert found["h100", 1].wait_s == 2 * HOUR_S


def test_a_job_of_any_type_takes_what_is_free_first() -> None:
    nodes = (node(), node("h100", 4))
    busy = (running({1: 4}, 5 * HOUR_S),)
    found = estimate_waits(view(nodes, busy, (waiting(4, HOUR_S, types=frozenset()),)))
    assert (found["a100", 1].wait_s, found["h100", 1].wait_s) == (HOUR_S, 5 * HOUR_S)


def test_a_short_job_starts_before_a_reservation_that_it_does_not_delay() -> None:
    """8 GPUs on 2 nodes wait for a node of 1 h. A probe of a limit of 30 min fits before; one of 2 h would delay."""
    queue = (waiting(8, HOUR_S, nodes=2),)
    snapshot = view((node(), node()), (running({0: 4}, HOUR_S),), queue)
    probes = [Probe("a100", 4, 1800.0), Probe("a100", 4, 2 * HOUR_S)]
    starts = first_starts(snapshot, queue, probes, lambda each: each.likely_s)
    assert [starts[probe] for probe in probes] == [0, 2 * HOUR_S]


def test_a_gang_never_mixes_types() -> None:
    snapshot = view((node("a100"), node("h100")))
    queue = (waiting(8, HOUR_S, nodes=2, types=frozenset()),)
    starts = first_starts(snapshot, queue, [Probe("a100", 4, HOUR_S)], lambda each: each.likely_s)
    assert starts[Probe("a100", 4, HOUR_S)] == 0


def test_fragmented_nodes_hold_no_larger_job() -> None:
    busy = (running({0: 3, 1: 3}, HOUR_S),)
    found = estimate_waits(view((node(), node()), busy))
    assert found["a100", 1].wait_s == 0
    assert found["a100", 2].wait_s == found["a100", 4].wait_s == HOUR_S


def test_what_was_submitted_lately_counts_once_more() -> None:
    """Within 10 minutes, and in the high wait only."""
    for submitted_s, likely_h, high_h in ((60.0, 1, 4), (599.0, 1, 4), (601.0, 1, 2)):
        queue = (waiting(4, HOUR_S, submitted_s=submitted_s),)
        found = estimate_waits(view((node(),), (), queue))["a100", 1]
        assert (found.wait_s, found.high_s) == (likely_h * HOUR_S, high_h * HOUR_S)


def test_jobs_that_a_limit_holds_back_count_in_the_high_wait_only() -> None:
    found = estimate_waits(view((node(),), (), (waiting(4, HOUR_S, is_ready=False),)))["a100", 4]
    assert (found.low_s, found.wait_s, found.high_s) == (0, 0, 2 * HOUR_S)


def test_a_type_that_is_busy_for_weeks_has_no_estimate() -> None:
    assert estimate_waits(view((node(),), (running({0: 4}, 30 * 86_400.0),))) == {}


def test_scaling_times_scales_waits_and_work_behind_the_queue_never_shortens_them() -> None:
    rng = random.Random(4)
    for _ in range(20):
        queue = tuple(waiting(rng.choice((1, 2, 4)), rng.randint(1, 9) * 600.0) for _ in range(rng.randint(1, 20)))
        busy = (running({0: 4}, 600.0), running({1: 4}, 1800.0), running({2: 4}, 5400.0))
        here = estimate_waits(view((node(),) * 3, busy, queue))
        slower = tuple(
            dataclasses.replace(job, run=span(2 * job.run.likely_s), limit_s=2 * (job.limit_s or 0)) for job in queue
        )
        twice = tuple(running(dict(job.gpus), 2 * job.left.likely_s) for job in busy)
        doubled = estimate_waits(view((node(),) * 3, twice, slower))
        assert {key: wait.wait_s for key, wait in doubled.items()} == {
            key: 2 * wait.wait_s for key, wait in here.items()
        }
        longer = estimate_waits(view((node(),) * 3, busy, (*queue, waiting(4, 86_400.0), *[waiting(4, 86_400.0)] * 2)))
        assert longer["a100", 4].wait_s >= here["a100", 4].wait_s
        assert all(wait.low_s <= wait.wait_s <= wait.high_s for wait in here.values())


def test_sizes_are_powers_of_two_and_all() -> None:
    assert sizes(view((node(), node(gpus=2))), "a100") == [1, 2, 4, 6]
    assert sizes(view(()), "a100") == []


@pytest.mark.parametrize(
    ("elapsed_s", "limit_s", "expected"),
    [
        (0.0, 10_000.0, (500, 1000, 2000)),
        (600.0, 10_000.0, (0, 400, 1400)),
        (1500.0, 10_000.0, (0, 250, 500)),  # longer than predicted, not than the interval
        (4000.0, 10_000.0, (0, 2000, 4000)),  # longer than the interval
        (600.0, 700.0, (0, 100, 100)),  # the limit ends it
        (900.0, 700.0, (0, 0, 0)),
    ],
)
def test_what_is_left_of_a_run(elapsed_s: float, limit_s: float, expected: tuple[float, float, float]) -> None:
    assert left_span(Span(500, 1000, 2000), elapsed_s, limit_s) == Span(*expected)


def test_a_run_time_that_nothing_predicts_is_anything_up_to_the_limit() -> None:
    assert run_span(None, 7200.0) == Span(1, 3600, 7200)
    assert run_span(None, None).high_s == MOST_S
    known = Duration(100.0, 100.0, 100.0, None, "name", 3, 50.0, 900.0)
    assert run_span(known, 300.0) == Span(50, 100, 300)
