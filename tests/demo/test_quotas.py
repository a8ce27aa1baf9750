"""Sharing out traits by jobs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from demo.quotas import deal, fill, pack, rank_within, reflect
from demo.shape import Curve, load_profile

COUNTS = st.lists(st.integers(0, 50), min_size=1, max_size=40).map(np.array)


def test_deal_by_hand() -> None:
    """7 of 10 jobs wanted in category 0: 6 + 1 go there, 3 to the other."""
    assert deal(np.array([3, 6, 1]), [0.7, 0.3]).tolist() == [1, 0, 0]


def test_deal_counts_what_is_held_already() -> None:
    assert deal(np.array([4]), [0.5, 0.5], already=np.array([5.0, 1.0])).tolist() == [1]


@given(COUNTS)
def test_deal_misses_a_share_by_no_more_than_the_largest_family(counts: np.ndarray) -> None:
    shares = np.array([0.5, 0.3, 0.2])
    category = deal(counts, shares.tolist())
    jobs = np.bincount(category, counts, minlength=3)
    assert np.abs(jobs - shares * counts.sum()).max() <= counts.max() + 1e-9


def test_deal_keeps_to_what_is_allowed() -> None:
    allowed = np.array([[True, False], [True, False]])
    assert deal(np.array([5, 5]), [0.1, 0.9], allowed=allowed).tolist() == [0, 0]


@given(COUNTS, st.floats(0, 1))
def test_fill_stays_below_what_is_wanted(counts: np.ndarray, share: float) -> None:
    wanted = share * counts.sum()
    taken = fill(counts, np.arange(len(counts)), wanted)
    assert counts[taken].sum() <= wanted * 1.02 + 0.5 + 1e-6


def test_fill_skips_the_family_that_would_be_too_much() -> None:
    assert fill(np.array([6, 9, 3]), np.array([0, 1, 2]), 10).tolist() == [True, False, True]


@given(COUNTS)
def test_pack_covers_the_unit_interval_without_overlap(counts: np.ndarray) -> None:
    low, width = pack(counts, -np.arange(len(counts), dtype=float))
    low, width = low[counts > 0], width[counts > 0]
    order = np.argsort(low, kind="stable")
    assert (low >= -1e-9).all()
    if counts.sum():
        assert np.isclose(width.sum(), 1)
    assert (low[order][1:] >= (low + width)[order][:-1] - 1e-9).all()


def test_rank_within() -> None:
    rank, size = rank_within(np.array([2, 0, 2, 2]))
    assert rank.tolist() == [0, 0, 1, 2]
    assert size.tolist() == [3, 1, 3, 3]


@given(st.floats(-0.5, 1.5))
def test_reflect_stays_inside(share: float) -> None:
    assert 0 <= reflect(np.array([share]))[0] <= 1


def test_curve_is_linear_between_its_knots() -> None:
    curve = Curve([[0.0, 10], [0.5, 20], [1.0, 100]])
    assert curve(np.array([0.25, 0.5, 0.75])).tolist() == [15, 20, 60]


def test_shares_of_the_profile_add_up() -> None:
    profile = load_profile()
    assert np.isclose(sum(b.share for b in profile.size.bins), 1)
    assert np.isclose(sum(c.share for c in profile.pipes.combos), 1, atol=0.002)
    assert np.isclose(sum(share for _, _, share in profile.memory.bands_80), 1)
