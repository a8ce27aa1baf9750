"""Hadar's prices and its program over subsets, against brute force of its own objective."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from placement_rounds import random_view, view_of

from simulator.policies.types.hadar import (
    Hadar,
    HadarPrices,
    HadarRound,
    Use,
    choose_exactly,
    choose_greedily,
    prices_of,
)
from simulator.policies.types.rounds import RoundView


def game_of(view: RoundView, had: list[list[int]] | None = None) -> HadarRound:
    return HadarRound(view, prices_of(view, 360.0), np.array(had if had else np.zeros(view.rates.shape, dtype=int)))


def test_a_gpu_costs_the_least_when_idle_the_geometric_mean_at_half_and_the_most_when_full() -> None:
    prices = HadarPrices(0.01, 1.0, (4, 10))
    assert prices.of((0, 0)) == pytest.approx((0.01, 0.01))
    assert prices.of((2, 5)) == pytest.approx((0.1, 0.1))
    assert prices.of((4, 10)) == pytest.approx((1.0, 1.0))
    assert prices.of((1, 10)) == pytest.approx((0.01 * 100**0.25, 1.0))


def test_a_type_without_gpus_has_no_finite_price() -> None:
    assert HadarPrices(0.01, 1.0, (0, 2)).of((0, 0))[0] == math.inf


def test_prices_of_one_job_by_hand() -> None:
    """100 s on the fast type, 200 s on the slow one, of 2 GPUs each."""
    view = view_of([2], [[10.0, 5.0]], [2, 2])
    prices = prices_of(view, round_s=100.0)
    assert prices.highest == pytest.approx(1.0 / 2)
    # The horizon is 2 x 200 / 4 + 200 = 300 s; two rounds at most; eta is 1.
    assert prices.lowest == pytest.approx(100 / 300 / (2 * 2) / 4)


def payoff(view: RoundView, prices: HadarPrices, row: int, use: Use, used: Use) -> float:
    """Written again from the definition: best time over completion time, less GPUs times their price."""
    rate = min(view.rates[row, kind] for kind in range(len(use)) if use[kind])
    if rate == 0:
        return -math.inf
    best_s = (view.done[row] + view.left[row]) / max(view.rates[row])
    lost = 10.0 if view.done[row] > 0 else 0.0
    cost = 0.0
    for kind, count in enumerate(use):
        share = used[kind] / view.capacity[kind]
        cost += count * prices.lowest ** (1 - share) * prices.highest**share
    return best_s / (view.since_s[row] + lost + view.left[row] / rate) - cost


def brute_force(view: RoundView, prices: HadarPrices) -> float:
    """The best sum over all subsets; each job of a subset takes the better of one type and spread, fastest first."""
    best = 0.0
    for subset in itertools.product((False, True), repeat=len(view.gpus)):
        total, used = 0.0, (0,) * len(view.capacity)
        for row in np.flatnonzero(subset).tolist():
            free = [int(view.capacity[kind]) - used[kind] for kind in range(len(used))]
            gang, uses = int(view.gpus[row]), []
            for kind in range(len(used)):
                if free[kind] >= gang:
                    uses.append(tuple(gang * (kind == other) for other in range(len(used))))
            missing, spread = gang, [0] * len(used)
            for kind in sorted(range(len(used)), key=lambda each: -view.rates[row, each]):
                spread[kind] = min(missing, free[kind])
                missing -= spread[kind]
            uses += [] if missing else [tuple(spread)]
            values = [(payoff(view, prices, row, use, used), use) for use in uses]
            value, use = max(values, key=lambda each: round(each[0], 12), default=(-math.inf, used))
            if value <= 0:
                total = -math.inf
                break
            total += value
            used = tuple(a + b for a, b in zip(used, use, strict=True))
        best = max(best, total)
    return best


def value_of(game: HadarRound, chosen: dict[int, Use]) -> float:
    total, used = 0.0, (0,) * len(game.capacity)
    for row, use in chosen.items():
        total += payoff(game.view, game.prices, row, use, used)
        used = tuple(a + b for a, b in zip(used, use, strict=True))
    assert all(part <= whole for part, whole in zip(used, game.capacity, strict=True))
    return total


def test_the_program_equals_brute_force_of_its_own_objective() -> None:
    generator = np.random.default_rng(1)
    chosen_jobs = 0
    for _ in range(300):
        game = game_of(random_view(generator))
        rows = list(range(len(game.view.gpus)))
        chosen = choose_exactly(game, rows, (0,) * len(game.capacity))
        assert value_of(game, chosen) == pytest.approx(brute_force(game.view, game.prices), abs=1e-12)
        chosen_jobs += len(chosen)
    assert chosen_jobs > 300


def test_the_greedy_choice_is_close_to_the_program() -> None:
    generator = np.random.default_rng(2)
    ratios = []
    for _ in range(200):
        game = game_of(random_view(generator))
        rows, nothing = list(range(len(game.view.gpus))), (0,) * len(game.capacity)
        exact = value_of(game, choose_exactly(game, rows, nothing))
        if exact:
            ratios.append(value_of(game, choose_greedily(game, rows, nothing)) / exact)
    assert np.mean(ratios) > 0.9


def test_a_gang_spreads_over_types_when_it_fits_on_none_and_runs_at_the_slowest() -> None:
    view = view_of([3], [[4.0, 2.0]], [2, 2])
    found = Hadar().place(view)
    assert found.gpus.tolist() == [[2, 1]]
    assert found.rate.tolist() == [2.0]


def test_running_jobs_keep_their_gpus() -> None:
    policy = Hadar()
    first = policy.place(view_of([2, 2], [[4.0, 1.0], [4.0, 3.9]], [2, 2]))
    again = policy.place(view_of([2, 2], [[4.0, 1.0], [4.0, 3.9]], [2, 2], left=[10, 900], done=[990, 100]))
    assert first.gpus.any()
    assert (again.gpus == first.gpus)[first.gpus.any(axis=1)].all()


@pytest.mark.parametrize("exact_rows", [0, 8])
def test_counting_a_jobs_work_in_other_units_changes_nothing(exact_rows: int) -> None:
    """The paper's own utility, iterations per second, fails this."""
    generator = np.random.default_rng(3)
    for _ in range(50):
        view = random_view(generator)
        unit = np.exp(generator.normal(0, 3, len(view.gpus)))
        other = view_of(
            view.gpus.tolist(),
            (view.rates * unit[:, None]).tolist(),
            view.capacity.tolist(),
            (view.left * unit).tolist(),
            (view.done * unit).tolist(),
            view.since_s.tolist(),
        )
        first, second = (Hadar(exact_rows=exact_rows).place(each).gpus for each in (view, other))
        assert first.tolist() == second.tolist()
