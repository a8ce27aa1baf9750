"""HadarE: shares of steps by largest remainder, and at most one copy of a job on a node."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_rounds import random_view, view_of

from simulator.policies.types.hadar import HadarForked, nodes_of, place_copies, prices_of, step_shares


@pytest.mark.parametrize(
    ("steps", "rates", "shares"),
    [
        (7, [3, 1], [5, 2]),  # 5.25 and 1.75
        (10, [1, 1, 1], [4, 3, 3]),  # equal remainders: the first copy
        (100, [4, 2, 1], [57, 29, 14]),  # 57.14, 28.57, 14.29
        (3, [1, 0, 2], [1, 0, 2]),
        (0, [1, 2], [0, 0]),
    ],
)
def test_steps_are_shared_by_largest_remainder(steps: int, rates: list[float], shares: list[int]) -> None:
    assert step_shares(steps, np.array(rates, dtype=float)).tolist() == shares


@given(st.integers(0, 10**7), st.lists(st.floats(0.001, 1000), min_size=1, max_size=15))
def test_shares_sum_to_the_steps_and_are_within_one_of_the_proportion(steps: int, rates: list[float]) -> None:
    speeds = np.array(rates)
    shares = step_shares(steps, speeds)
    assert shares.sum() == steps
    assert (np.abs(shares - steps * speeds / speeds.sum()) < 1 + 1e-6).all()


@pytest.mark.parametrize("rates", [[], [0.0], [1.0, -1.0], [float("nan")]])
def test_shares_need_a_speed(rates: list[float]) -> None:
    with pytest.raises(ValueError, match="positive rate"):
        step_shares(10, np.array(rates))


def test_a_single_job_has_a_copy_on_every_node() -> None:
    """Nodes of 4 and 2 GPUs: 2 GPUs each, at 2, 2, and 1 steps/s."""
    found = HadarForked(gpus_per_node=4).place(view_of([2], [[2.0, 1.0]], [8, 2]))
    assert found.gpus.tolist() == [[4, 2]]
    assert found.rate.tolist() == [pytest.approx(5.0)]


def test_a_gang_larger_than_a_node_runs_in_parts() -> None:
    found = HadarForked(gpus_per_node=4).place(view_of([8], [[8.0]], [8]))
    assert found.gpus.tolist() == [[8]]
    assert found.rate.tolist() == [pytest.approx(8.0)]


def test_no_node_has_two_copies_of_a_job_or_too_many_gpus_and_none_is_idle() -> None:
    generator = np.random.default_rng(4)
    for _ in range(100):
        view = random_view(generator)
        nodes = nodes_of(view.capacity, 2)
        copies = place_copies(view, nodes, prices_of(view, 360.0))
        sizes, kinds = np.array([node.gpus for node in nodes]), [node.kind for node in nodes]
        whole = np.minimum(view.gpus[:, None], sizes[None, :])
        assert ((copies == 0) | (copies == whole)).all()
        assert (copies.sum(axis=0) <= sizes).all()
        assert (copies[view.rates[:, kinds] == 0] == 0).all()
        could = (view.rates[:, kinds] > 0).any(axis=0)
        assert (copies.sum(axis=0)[could] > 0).all()
