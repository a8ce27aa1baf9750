"""The placement decision: known answers, and what must not matter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
from hypothesis import example, given
from hypothesis import strategies as st
from profiles import examples

from advisor.types.placement import (
    NEVER_MOVE,
    SOLVER_S,
    WAITS,
    PlacementRules,
    PlacementView,
    assign,
    decide_placement,
    price,
)

RULES = (PlacementRules(), NEVER_MOVE, PlacementRules(ageing=1.0))


def view(gpus, left, rates, placed, capacity, **more):
    return PlacementView(
        np.array(gpus), np.array(left, float), np.array(rates, float), np.array(placed), np.array(capacity), **more
    )


def random_view(seed: int) -> PlacementView:
    rng = np.random.default_rng(seed)
    jobs, types = int(rng.integers(1, 12)), int(rng.integers(1, 4))
    rates = rng.choice([0.0, 0.5, 1.0, 2.0], (jobs, types))
    capacity, gpus = rng.integers(1, 9, types), rng.choice([1, 2, 4], jobs)
    free, placed = capacity.copy(), np.full(jobs, WAITS)
    for job, kind in enumerate(rng.integers(0, types, jobs)):
        if rates[job, kind] > 0 and gpus[job] <= free[kind] and rng.random() < 0.4:
            placed[job] = kind
            free[kind] -= gpus[job]
    waited_s = np.where(placed == WAITS, rng.choice([0.0, 5.0, 50.0], jobs), 0.0)
    left, round_s = rng.choice([1.0, 3.0, 8.0], jobs), float(rng.choice([0.0, 0.7, 4.0])) or None
    may_move = rng.random(jobs) < 0.5 if seed % 3 == 0 else None
    return PlacementView(gpus, left, rates, placed, capacity, waited_s, may_move, round_s)


@pytest.mark.parametrize(
    ("seen", "types"),
    [
        (([1], [100], [[1, 3]], [WAITS], [4, 4]), [1]),  # where it is faster
        (([4], [100], [[1, 3]], [WAITS], [4, 2]), [0]),  # where its gang fits
        (([8], [100], [[1, 3]], [WAITS], [4, 2]), [WAITS]),
        (([1] * 5, [9, 5, 7, 5, 6], [[1.0]] * 5, [WAITS] * 5, [2]), [WAITS, 0, WAITS, 0, WAITS]),  # shorter ones first
        (([1, 1], [10, 10], [[2.0, 1.9], [2.0, 0.2]], [WAITS, WAITS], [1, 1]), [1, 0]),  # each where it is best
        (([], [], np.zeros((0, 2)), np.zeros(0, int), [1, 1]), []),
        (([1], [1], [[1.0]], [WAITS], [0]), [WAITS]),
    ],
)  # fmt: skip
def test_types_by_hand(seen, types):
    assert decide_placement(view(*seen)).types.tolist() == types


def test_price_of_one_job_is_that_of_the_only_type_it_uses():
    least_s, prices = price(np.array([2]), np.array([12.0]), np.array([[3.0, 0.0]]), np.array([1, 1]))
    assert least_s == pytest.approx(8.0)  # 2 GPUs x 4 s on 1 GPU
    assert prices @ [1, 1] == pytest.approx(1.0)
    assert prices[0] == pytest.approx(1.0, abs=2e-3) and 0 < prices[1] < 1e-3


def test_work_that_stays_lengthens_the_makespan():
    kept = np.array([0.0, 30.0])
    least_s, _ = price(np.ones(9, int), np.full(9, 2.0), np.ones((9, 2)), np.array([2, 2]), kept)
    assert least_s == pytest.approx(15.0)


def test_a_long_job_goes_first_once_it_decides_the_end():
    left, waits = [100] + [10] * 20, [WAITS] * 21
    assert decide_placement(view([1] * 21, left, [[1.0]] * 21, waits, [10])).types[0] == 0
    rules = PlacementRules(urgent_share=0.0)
    assert decide_placement(view([1] * 21, left, [[1.0]] * 21, waits, [10]), rules).types[0] == WAITS


def test_never_move_keeps_running_jobs_and_avoids_types_where_a_job_outlasts_the_rest():
    seen = view([1, 1], [10, 10], [[1.0, 5.0], [1.0, 0.01]], [0, WAITS], [1, 1])
    assert decide_placement(seen, NEVER_MOVE).types.tolist() == [0, WAITS]
    assert decide_placement(seen).types.tolist() == [1, 0]


def test_a_running_job_whose_owner_allows_no_move_stays():
    seen = view([1, 1], [10, 10], [[1.0, 5.0], [1.0, 0.5]], [0, WAITS], [1, 1])
    assert decide_placement(replace(seen, may_move=np.array([False, False]))).types[0] == 0


def test_a_type_with_fewer_gpus_than_its_jobs_hold_starts_nothing():
    seen = view([2, 1], [10, 1], [[1.0], [1.0]], [0, WAITS], [1])
    assert decide_placement(seen, NEVER_MOVE).types.tolist() == [0, WAITS]


def test_ageing_starts_the_job_that_waited_longer_than_the_backlog():
    seen = view([1, 1], [30, 10], [[1.0], [1.0]], [WAITS, WAITS], [1], waited_s=np.array([4000.0, 0.0]))
    without = PlacementRules(urgent_share=0.0)
    assert decide_placement(seen, without).types.tolist() == [WAITS, 0]
    assert decide_placement(seen, replace(without, ageing=1.0)).types.tolist() == [0, WAITS]


@pytest.mark.parametrize(
    "changed",
    [
        {"left": np.array([np.nan])}, {"rates": np.array([[-1.0]])}, {"gpus": np.array([0])}, {"placed": np.array([1])},
        {"rates": np.ones((2, 1))}, {"waited_s": np.array([-1.0])}, {"may_move": np.array([True, True])},
        {"rates": np.array([[np.nan]])}, {"waited_s": np.array([np.nan])},
    ],
)  # fmt: skip
def test_a_view_that_cannot_be_is_refused(changed):
    [(name, value)] = changed.items()
    with pytest.raises(ValueError, match=f"{name} must be finite" if np.isnan(value).any() else "."):
        decide_placement(replace(view([1], [1], [[1.0]], [WAITS], [1]), **changed))


def test_solvers_that_fail_leave_a_greedy_choice_at_equal_prices(monkeypatch):
    class Failed:
        status, x, message = 4, None, "numerical difficulties"

    monkeypatch.setattr(scipy.optimize, "linprog", lambda *_, **__: Failed)
    monkeypatch.setattr(scipy.optimize, "milp", lambda *_, **__: Failed)
    found = decide_placement(view([1, 1, 4], [10, 10, 10], [[2.0, 0.1], [1.0, 1.0], [1.0, 1.0]], [WAITS] * 3, [1, 2]))
    assert found.types.tolist() == [0, 1, WAITS]
    assert found.prices == pytest.approx([1 / 3, 1 / 3])


@pytest.mark.parametrize(
    ("seed", "rules", "expected"),
    [
        (0, RULES[0], "[0, -1, -1, 1, -1, -1, 0, -1, -1, -1] [0.167, 0.0]"),
        (1, RULES[0], "[0, -1, 0, -1, -1, 1] [0.143, 0.143]"),
        (2, RULES[1], "[-1, -1, 0, 0, 0, -1, -1, 0, 0, 0] [0.125]"),
        (3, RULES[1], "[-1, -1, -1, -1, 0, -1, -1, -1, -1] [0.25]"),
        (4, RULES[2], "[2, -1, 1, 2, -1, 0, -1, 1] [0.059, 0.059, 0.059]"),
        (6, RULES[2], "[-1, 0, -1, 1, 1] [0.25, 0.0]"),
        (7, replace(RULES[2], crowded=0.5, urgent_share=0.5),
         "[-1, -1, -1, 1, -1, -1, 0, -1, -1, -1, 0] [0.111, 0.111]"),
        (9, replace(RULES[0], short_queue=0, least_efficiency=0.6), "[-1, -1, 2, 0, 1] [0.083, 0.083, 0.083]"),
    ],
)  # fmt: skip
def test_types_and_prices_of_a_random_view(seed, rules, expected):
    found = decide_placement(random_view(seed), rules)
    numbers = [round(float(value), 3) for value in found.prices]
    assert f"{found.types.tolist()} {numbers}" == expected


@given(st.integers(0, 2**32), st.sampled_from(RULES))
@examples(0.6)
def test_no_gpu_is_used_twice_and_no_type_of_zero_speed(seed, rules):
    seen = random_view(seed)
    types = decide_placement(seen, rules).types
    runs = np.flatnonzero(types != WAITS)
    used = np.bincount(types[runs], weights=seen.gpus[runs], minlength=len(seen.capacity))
    assert (used <= seen.capacity).all()
    assert (seen.rates[runs, types[runs]] > 0).all()


def rows_placed(seen: PlacementView, types: np.ndarray) -> list[tuple[float, ...]]:
    """Jobs with their types; jobs alike in everything are interchangeable."""
    may_move = np.ones(len(types)) if seen.may_move is None else seen.may_move
    columns = np.column_stack([seen.gpus, seen.left, seen.rates, seen.placed, seen.waited_s, may_move, types])
    return sorted(tuple(row) for row in columns.tolist())


@pytest.mark.parametrize("round_s", [None, 0.7])
def test_of_two_jobs_the_same_one_starts_in_either_order_if_only_one_may_be_moved_later(round_s):
    started = []
    for may_move in (np.array([True, False]), np.array([False, True])):
        seen = view([1, 1], [10, 10], [[1.0], [1.0]], [WAITS] * 2, [1], may_move=may_move, round_s=round_s)
        started.append(may_move[decide_placement(seen).types != WAITS].tolist())
    assert started[0] == started[1] and len(started[0]) == 1


@given(st.integers(0, 2**32), st.sampled_from(RULES))
@example(5912, PlacementRules())  # two jobs that differ only on a type too small for them
@examples(0.6)
def test_another_order_of_jobs_changes_nothing(seed, rules):
    seen = random_view(seed)
    order = np.random.default_rng(seed + 1).permutation(len(seen.gpus))
    other = PlacementView(
        seen.gpus[order], seen.left[order], seen.rates[order], seen.placed[order], seen.capacity, seen.waited_s[order],
        None if seen.may_move is None else seen.may_move[order], seen.round_s,
    )  # fmt: skip
    assert rows_placed(seen, decide_placement(seen, rules).types) == rows_placed(
        other, decide_placement(other, rules).types
    )


@given(st.integers(0, 2**32), st.sampled_from([1e-6, 0.3, 7.0, 1e5]), st.sampled_from(RULES))
@examples(0.6)
def test_another_unit_of_work_of_one_job_or_of_time_changes_nothing(seed, factor, rules):
    seen = random_view(seed)
    units = np.ones(len(seen.gpus))
    units[seed % len(units)] = factor
    of_work = replace(seen, left=seen.left * units, rates=seen.rates * units[:, None])
    of_time = replace(
        seen, rates=seen.rates / factor, waited_s=seen.waited_s * factor, round_s=seen.round_s and seen.round_s * factor
    )
    found = decide_placement(seen, rules)
    assert decide_placement(of_work, rules).types.tolist() == found.types.tolist()
    slower = decide_placement(of_time, rules)
    assert slower.types.tolist() == found.types.tolist()


@given(st.integers(0, 2**32))
@examples(0.4)
def test_the_choice_is_the_best_of_all_choices(seed):
    rng = np.random.default_rng(seed)
    values, gpus, free = rng.uniform(0, 1, (5, 2)), rng.integers(1, 4, 5), rng.integers(1, 6, 2)
    best = 0.0
    for number in range(3**5):
        types = np.array([number // 3**job % 3 - 1 for job in range(5)])
        runs = np.flatnonzero(types != WAITS)
        if (np.bincount(types[runs], weights=gpus[runs], minlength=2) <= free).all():
            best = max(best, float(values[runs, types[runs]].sum()))
    types = assign(values, gpus, free, gap=0.0)
    runs = np.flatnonzero(types != WAITS)
    assert values[runs, types[runs]].sum() == pytest.approx(best)


def test_a_job_that_goes_first_leaves_no_gpu_idle_that_another_could_use():
    """One solver run for all once stopped at the value of the job that goes first, and left type 0 empty."""
    rates = np.array([[0.399, 0.784, 0.798], [0.78, 0.727, 0.784], [0.378, 0.996, 0.378]])
    decided = decide_placement(
        view(np.array([1, 2, 1]), np.array([0.951, 0.498, 2.952]), rates, np.full(3, WAITS), [2, 3, 2])
    )
    assert (decided.types != WAITS).all()


def test_solvers_that_run_out_of_time_leave_the_sorted_order(monkeypatch):
    """2,048 jobs: equal prices, and then the short jobs first as far as the GPUs reach."""
    left_s = np.random.default_rng(1).permutation(np.linspace(100, 9000, 2048))
    crowd = view(np.ones(2048, int), left_s, np.ones((2048, 2)), np.full(2048, WAITS), [30, 20])
    solvers, given_s = (scipy.optimize.linprog, scipy.optimize.milp), []

    def limited(solver):
        def solve(*args, options, **values):
            given_s.append(options["time_limit"])
            return solver(*args, options={**options, "time_limit": 0.0}, **values)

        return solve

    for solver in solvers:
        monkeypatch.setattr(scipy.optimize, solver.__name__, limited(solver))
    decided = decide_placement(crowd, replace(NEVER_MOVE, solver_s=SOLVER_S))
    assert set(given_s) == {SOLVER_S} and len(given_s) <= 3
    assert decided.prices.tolist() == [1 / 50, 1 / 50]
    started = np.flatnonzero(decided.types != WAITS)
    assert np.bincount(decided.types[started]).tolist() == [30, 20]
    urgent = np.flatnonzero(left_s > 8900)
    assert set(np.argsort(left_s)[:50]) >= set(started) - set(urgent)
