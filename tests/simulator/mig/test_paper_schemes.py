"""Schemes A and B on batches worked out by hand, and on random ones by their rules."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from advisor.mig.states import partition_states
from almanac.hardware import mig_models
from simulator.policies.mig.schemes import (
    LAYOUTS,
    SIZES_GB,
    BatchJob,
    SliceRun,
    run_scheme_a,
    run_scheme_b,
    throughput_gain,
)

MACHINE = partition_states(mig_models()["A100-40"])


def on(run: SliceRun) -> tuple[str, int]:
    return run.placement.profile.shape, run.placement.start


def spans(runs: Sequence[SliceRun]) -> list[tuple[int, str, int, float, float]]:
    return [(run.job, *on(run), run.start_s, run.end_s) for run in runs]


def test_each_layout_of_scheme_a_is_legal_and_full() -> None:
    for shapes in LAYOUTS.values():
        state = MACHINE.state_of(tuple(shapes.count(shape) for shape in MACHINE.shapes))
        assert state is not None
        assert all(MACHINE.allocate(state, shape) is None for shape in shapes)


def test_scheme_a_runs_the_sizes_one_after_the_other() -> None:
    jobs = [BatchJob(40, 5), BatchJob(20, 8), BatchJob(5, 3), BatchJob(5, 2), BatchJob(20, 4), BatchJob(10, 1)]
    runs = spans(run_scheme_a(jobs))
    assert runs == [
        (2, "1g", 0, 0, 3),
        (3, "1g", 1, 0, 2),
        (5, "2g", 0, 3, 4),
        (1, "4g", 0, 4, 12),
        (4, "3g", 4, 4, 8),
        (0, "7g", 0, 12, 17),
    ]


def test_scheme_a_fills_the_first_free_instance_from_one_queue() -> None:
    jobs = [BatchJob(20, 8), BatchJob(20, 1), BatchJob(20, 1), BatchJob(20, 1)]
    assert [on(run)[0] for run in run_scheme_a(jobs)] == ["4g", "3g", "3g", "3g"]
    # Two queues: every other job waits for the long one.
    runs = run_scheme_a(jobs, is_split=True)
    assert [(on(run)[0], run.end_s) for run in runs] == [("4g", 8), ("3g", 1), ("3g", 2), ("4g", 9)]


def test_fewer_compute_slices_make_a_job_slower() -> None:
    (run,) = run_scheme_a([BatchJob(5, 10, full_speed_slices=4.65)])
    assert run.end_s == pytest.approx(46.5)
    (run,) = run_scheme_a([BatchJob(40, 10, slice_s=20, full_speed_slices=4.65)])
    assert run.end_s == 10
    (run,) = run_scheme_b([BatchJob(20, 10, slice_s=20)])
    assert run.end_s == 20


@pytest.mark.parametrize("is_split", [False, True])
def test_a_job_without_memory_runs_again_on_the_next_size(is_split: bool) -> None:
    jobs = [BatchJob(5, 10, need_gb=20, out_of_memory_at=0.3), BatchJob(5, 4)]
    runs = run_scheme_a(jobs, is_split=is_split)
    assert [(run.job, on(run)[0], run.end_s, run.is_out_of_memory) for run in runs] == [
        (0, "1g", 3, True),
        (1, "1g", 4, False),
        (0, "2g", 7, True),
        (0, "4g", 17, False),
    ]
    # Scheme B starts the next size at once. For the 4g only the idle 2g goes.
    runs = run_scheme_b(jobs)
    assert [(run.job, on(run)[0], run.start_s, run.end_s, run.is_out_of_memory) for run in runs] == [
        (0, "1g", 0, 3, True),
        (1, "1g", 0, 4, False),
        (0, "2g", 3, 6, True),
        (0, "4g", 6, 16, False),
    ]


def test_the_head_of_scheme_b_blocks() -> None:
    jobs = [BatchJob(20, 4), BatchJob(40, 5), BatchJob(5, 1)]
    assert spans(run_scheme_b(jobs)) == [(0, "3g", 4, 0, 4), (1, "7g", 0, 4, 9), (2, "1g", 6, 9, 10)]


def test_scheme_b_takes_an_idle_instance_before_it_makes_one() -> None:
    jobs = [BatchJob(5, 1), BatchJob(40, 1), BatchJob(5, 1), BatchJob(5, 5), BatchJob(5, 1)]
    runs = run_scheme_b(jobs)
    # Fusion: the idle 1g went for the 7g. Fission: the idle 7g went for 1g.
    assert [on(run) for run in runs] == [("1g", 6), ("7g", 0), ("1g", 6), ("1g", 4), ("1g", 5)]
    assert [run.start_s for run in runs] == [0, 1, 2, 2, 2]
    jobs = [BatchJob(5, 1), BatchJob(20, 3), BatchJob(20, 3), BatchJob(5, 1)]
    # No second 20 GB fits beside the 1g at 6 and the 4g at 0 until the idle 1g goes.
    assert spans(run_scheme_b(jobs)) == [
        (0, "1g", 6, 0, 1),
        (1, "4g", 0, 0, 3),
        (2, "3g", 4, 1, 4),
        (3, "1g", 0, 3, 4),
    ]


def test_the_second_slice_of_20_gb_has_four_compute_slices() -> None:
    runs = run_scheme_b([BatchJob(20, 1), BatchJob(20, 1)])
    assert [on(run) for run in runs] == [("3g", 4), ("4g", 0)]


def test_scheme_b_prefers_idle_then_room_then_the_fewest_destroyed() -> None:
    # At 1 s, a 2g at 2 would fit too.
    jobs = [BatchJob(10, 1), BatchJob(20, 1), BatchJob(20, 2), BatchJob(10, 2)]
    assert spans(run_scheme_b(jobs)) == [
        (0, "2g", 0, 0, 1),
        (1, "3g", 4, 0, 1),
        (2, "3g", 4, 1, 3),
        (3, "2g", 0, 1, 3),
    ]
    # Of two idle ones, the one with more compute slices.
    assert on(run_scheme_b([BatchJob(20, 1)] * 3)[2]) == ("4g", 0)
    # A 3g costs three of the seven 1g, a 4g costs four.
    assert on(run_scheme_b([BatchJob(5, 1)] * 7 + [BatchJob(20, 1)])[7]) == ("3g", 4)


def random_batch(rng: random.Random) -> list[BatchJob]:
    jobs = []
    for _ in range(rng.randrange(1, 25)):
        size_gb = rng.choice(SIZES_GB)
        need_gb = rng.choice([None, None, *[each for each in SIZES_GB if each >= size_gb]])
        run_s, share = rng.choice([1, 2, 2, 3.5, 7]), rng.choice([0.5, 1])
        jobs.append(BatchJob(size_gb, run_s, need_gb=need_gb, out_of_memory_at=share))
    return jobs


def busy_at(runs: Sequence[SliceRun], time_s: float, but: SliceRun) -> int:
    """The instances with a job just after a time, by what started before this run."""
    earlier = runs[: runs.index(but)]
    return sum(MACHINE.bit(*on(run)) for run in earlier if run.start_s <= time_s < run.end_s)


@pytest.mark.parametrize("seed", range(25))
def test_random_batches_keep_the_rules(seed: int) -> None:
    jobs = random_batch(random.Random(seed))
    for runs in (run_scheme_a(jobs), run_scheme_a(jobs, is_split=True), run_scheme_b(jobs)):
        ended = [run.job for run in runs if not run.is_out_of_memory]
        assert sorted(ended) == list(range(len(jobs)))
        for run in runs:
            together = [each for each in runs if each.start_s <= run.start_s < each.end_s]
            assert sum({MACHINE.bit(*on(each)) for each in together}) in MACHINE.states
            assert len({each.placement for each in together}) == len(together)
        for job in range(len(jobs)):
            own = [run for run in runs if run.job == job]
            assert all(first.end_s <= second.start_s for first, second in pairwise(own))
            assert [run.is_out_of_memory for run in own] == [True] * (len(own) - 1) + [False]
            sizes = [next(gb for gb in SIZES_GB if on(run)[0] in LAYOUTS[gb]) for run in own]
            first = SIZES_GB.index(jobs[job].size_gb)
            assert sizes == list(SIZES_GB[first : first + len(own)])
            assert sizes[-1] == (jobs[job].need_gb or jobs[job].size_gb)


@pytest.mark.parametrize("seed", range(25))
def test_scheme_b_keeps_the_order_and_waits_only_for_busy_instances(seed: int) -> None:
    jobs = random_batch(random.Random(seed))
    runs = run_scheme_b(jobs)
    first_starts = {run.job: run.start_s for run in reversed(runs)}
    assert [first_starts[job] for job in range(len(jobs))] == sorted(first_starts.values())
    assert [run.start_s for run in runs] == sorted(run.start_s for run in runs)
    for before, run in pairwise(runs):
        # Since the run before it began, or its own job ran out of memory, no idle instances were enough.
        earlier = [each.end_s for each in runs if each.job == run.job and each.end_s <= run.start_s]
        for time_s in {each.end_s for each in runs}:
            if max([before.start_s, *earlier]) <= time_s < run.start_s:
                busy = busy_at(runs, time_s, run)
                shapes = LAYOUTS[next(gb for gb in SIZES_GB if on(run)[0] in LAYOUTS[gb])]
                assert all(MACHINE.allocate(busy, shape) is None for shape in shapes)


def test_an_empty_batch_and_wrong_jobs() -> None:
    assert run_scheme_a([]) == run_scheme_b([]) == []
    with pytest.raises(ValueError, match="at least one"):
        throughput_gain([], [])
    for wrong in ({"size_gb": 15}, {"size_gb": 5, "need_gb": 80}, {"size_gb": 5, "need_gb": 0}):
        with pytest.raises(ValueError, match="no slice of"):
            BatchJob(**{"run_s": 1.0, **wrong})  # type: ignore[arg-type]
    for run_s, at in ((0, 1), (-1, 1), (float("nan"), 1), (1, 0), (1, 1.1), (1, float("nan"))):
        with pytest.raises(ValueError, match="must be positive"):
            BatchJob(5, run_s, out_of_memory_at=at)
    with pytest.raises(ValueError, match="must be positive"):
        BatchJob(5, 1, slice_s=0)
