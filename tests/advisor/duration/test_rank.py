"""Ranks are monotone in GPUs and time, on one scale, and 0 if no order pays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.duration.features import NUMBERS, Features
from advisor.duration.model import Fitted
from advisor.duration.rank import (
    NO_RANK,
    RankBy,
    RankChoice,
    RankOutcome,
    RankRule,
    counted_time_s,
    expected_s,
    rank_words,
)
from advisor.duration.service import RANK_S, chosen_rank
from advisor.priority import site_factor
from almanac.submit_config import Priority

times = st.floats(1, 1e7)


@given(st.sampled_from(["gpus", "limit", "mean", "quantile"]), st.floats(0.25, 1), st.floats(0.5, 4),
       st.integers(1, 512), times, times)  # fmt: skip
def test_a_rule_grows_with_time_and_gpus(
    by: RankBy, exponent: float, stretch: float, gpus: int, one_s: float, other_s: float
) -> None:
    rule = RankRule(by, exponent, stretch)
    low_s, high_s = sorted((one_s, other_s))
    assert 0 < rule.ranked(gpus, low_s) <= rule.ranked(gpus, high_s) < rule.ranked(gpus + 1, high_s)
    assert float(rule.ranked(1, 3600.0)) == 3600.0, "one scale for all rules and trainings"


def test_the_expected_time_of_what_varies_is_longer_and_a_new_users_is_not_certain() -> None:
    numbers = np.full((4, len(NUMBERS)), np.nan)
    numbers[:3, NUMBERS.index("user_spread")] = [0.0, 0.5, 9.0]
    numbers[1, NUMBERS.index("log_time_limit")] = np.log(62.0)
    expected = expected_s(Features(numbers, np.full((4, 6), "", dtype=object)), np.full(4, 60.0))
    assert expected == pytest.approx([60.0, 62.0, 60.0 * np.exp(2.0), 60.0 * np.exp(0.5)])


def test_no_order_gives_every_job_the_site_factor_0() -> None:
    ranked_s = NO_RANK.ranked(np.array([1, 64]), np.array([1.0, 1e6]))
    assert [site_factor(each, Priority()) for each in ranked_s.tolist()] == [0, 0]


def test_what_is_not_known_counts_as_the_mean() -> None:
    known, nothing = np.array([60.0, 60.0]), np.array([np.nan, 7.0])
    assert counted_time_s("limit", nothing, known, known).tolist() == [60.0, 7.0]
    assert counted_time_s("quantile", nothing, known, nothing).tolist() == [60.0, 7.0]
    assert counted_time_s("gpus", nothing, known, nothing).tolist() == [60.0, 60.0]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (NO_RANK, "no order"), (RankRule("gpus", 1.0), "GPU count"), (RankRule("limit", 1.0), "GPUs x time limit"),
        (RankRule("mean", 0.5), "GPUs x expected time^0.5"), (RankRule("mean", 1.0), "GPUs x expected time"),
    ],
)  # fmt: skip
def test_people_read_the_order(rule: RankRule, said: str) -> None:
    assert str(rule) == said


def test_the_best_order_is_named_where_none_pays() -> None:
    best = RankOutcome(0.99, 1.0, 0.0, None)
    assert rank_words(RankChoice(NO_RANK, 0, 300, (4, 5, 6), ((RankRule("mean", 0.25), best),))) == (
        "none pays (replayed 300 jobs on about 5 nodes: the best, GPUs x expected time^0.25, has 0.99 of the mean time "
        "of first in, first out)"
    )


def test_an_order_is_kept_for_a_week() -> None:
    before = RankChoice(RankRule("gpus", 1.0), 1000)
    fitted: Fitted | None = None
    assert chosen_rank(fitted, before, lambda jobs: RankChoice(NO_RANK, 0), 1000 + RANK_S - 1) == before
    assert chosen_rank(fitted, None, None, 1000) is None
