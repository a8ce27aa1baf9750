"""The search over a short queue: known answers, and the least cost of all list schedules."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from advisor.types import decide as short_queue
from advisor.types.decide import WAITS, ShortQueue, best_choice, choices

search = short_queue._Search


def queue_of(run_s, capacity, gpus=None, **more):
    jobs = len(run_s)
    known = {
        "placed": [WAITS] * jobs, "keeps": [False] * jobs, "weights": [1.0] * jobs, "round_s": 1.0, "stay": 1.02,
        "makespan_weight": 0.3,
    }  # fmt: skip
    return ShortQueue(run_s, gpus or [1] * jobs, capacity, **(known | more))


def random_queue(seed: int, jobs: int = 4) -> ShortQueue:
    rng = np.random.default_rng(seed)
    run_s = np.where(rng.random((jobs, 2)) < 0.8, rng.uniform(0.3, 4, (jobs, 2)), math.inf)
    run_s[:, 0] = np.where(np.isinf(run_s).all(axis=1), 1.0, run_s[:, 0])
    capacity = [3, 2]
    gpus = rng.integers(1, 3, jobs).tolist()
    return queue_of(
        run_s.tolist(), capacity, gpus, keeps=[bool(seed % 2)] * jobs, weights=rng.uniform(1, 2, jobs).tolist()
    )


RUNNING = queue_of([[1.0, 9.0], [8.0, math.inf]], [1, 1], placed=[1, WAITS], keeps=[True, True])
ALMOST = queue_of([[3.0, 2.97]], [1, 1], placed=[0])


@pytest.mark.parametrize(
    ("queue", "choice"),
    [
        (queue_of([[3.0], [2.0]], [1]), (WAITS, 0)),  # the shorter job first
        (queue_of([[3.0], [2.0]], [1], weights=[2.0, 1.0]), (0, WAITS)),
        (RUNNING, (1, 0)),  # a job that keeps its GPUs stays where it is slow
        (replace(RUNNING, keeps=[False, False]), (0, WAITS)),
        # a type with fewer GPUs than its job holds starts nothing
        (queue_of([[3.0], [1.0]], [1], [2, 1], placed=[0, WAITS], keeps=[True, True]), (0, WAITS)),
        (ALMOST, (0,)),  # a job is moved only if that gains more than the factor
        (replace(ALMOST, stay=1.0), (1,)),
    ],
)
def test_choices_by_hand(queue, choice):
    assert best_choice(queue) == choice


def test_a_job_waits_for_the_fast_type_only_if_it_cannot_be_moved_later():
    # Fast takes 1 each; slow 9. The second job ends at 2 if it waits.
    both = queue_of([[1.0, 9.0], [1.0, 9.0]], [1, 1])
    assert sorted(best_choice(both)) == [0, 1]
    assert sorted(best_choice(replace(both, keeps=[True, True]))) == [WAITS, 0]


def test_the_makespan_counts_by_its_weight():
    # Two short jobs first: ends 1, 1, 5. The long one first, beside a short one: ends 4, 1, 2.
    three = queue_of([[1.0], [1.0], [4.0]], [2], makespan_weight=0.0)
    assert best_choice(three) == (0, 0, WAITS)
    assert best_choice(replace(three, makespan_weight=2.0))[2] == 0


def test_no_job_that_can_be_moved_waits_beside_idle_gpus():
    assert list(choices(queue_of([[1.0], [1.0]], [3]))) == [(0, 0)]
    assert set(choices(queue_of([[1.0], [1.0]], [1], keeps=[True, True]))) == {(0, WAITS), (WAITS, 0), (WAITS, WAITS)}


def least_cost(queue: ShortQueue, choice: tuple[int, ...]) -> float:
    """Of all list schedules after a choice, one by one."""
    rest = short_queue._after(queue, choice)
    best = math.inf
    for order in permutations(rest.run_s):
        for kinds in product(range(len(queue.capacity)), repeat=len(order)):
            cost, last_s, free = rest.cost, rest.last_s, [list(each) for each in rest.free]
            for job, kind in zip(order, kinds, strict=True):
                start_s = sorted(free[kind])[queue.gpus[job] - 1]
                end_s = start_s + rest.run_s[job][kind]
                if end_s < math.inf:
                    held = math.ceil(rest.run_s[job][kind] / queue.round_s - 1e-9) * queue.round_s
                    free[kind] = sorted(free[kind])[queue.gpus[job] :] + [start_s + held] * queue.gpus[job]
                cost, last_s = cost + queue.weights[job] * end_s, max(last_s, end_s)
            best = min(best, cost + queue.makespan_weight * len(queue.gpus) * last_s)
    return best


@given(st.integers(0, 2**32))
@examples(0.3)
def test_the_choice_costs_least_of_all(seed):
    queue = random_queue(seed)
    found = best_choice(queue)
    assert least_cost(queue, found) == pytest.approx(min(least_cost(queue, each) for each in choices(queue)))


def test_a_search_that_ends_early_leaves_a_choice(monkeypatch):
    monkeypatch.setattr(short_queue, "MOST_STEPS", 6)
    queue = random_queue(5, jobs=6)
    assert best_choice(queue) in set(choices(queue))


@pytest.mark.parametrize(
    ("seed", "expected"),
    [(5, ((0, 1, 0, WAITS, WAITS, 0), 33.311335, 28)), (6, ((0, WAITS, 1, WAITS, 1, 0), 21.725548, 276)),
     (8, ((0, WAITS, 1, 0, 1, WAITS), 24.48869, 3627))],
)  # fmt: skip
def test_what_the_least_cost_is_and_how_many_steps_find_it(monkeypatch, seed, expected):
    """A step more is a bound that is too low."""
    searches = []
    monkeypatch.setattr(short_queue, "_Search", lambda queue: searches.append(search(queue)) or searches[-1])
    queue = replace(random_queue(seed, jobs=6), placed=[0, 1, WAITS, WAITS, WAITS, WAITS], stay=1.2, round_s=0.7)
    found = best_choice(queue)
    assert (found, round(searches[0].least, 6), searches[0].steps) == expected
