"""The order of the queue that a replay chooses: by predictions if they are true, by none if jobs hardly wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from advisor.duration.rank import DEFAULT_RANK, NO_RANK, RankChoice, RankOutcome, RankRule, ReplayedJobs, rank_words
from almanac.submit_config import Priority
from simulator.rank_choice import MIN_JOBS, best_rule, choose_rank

PRIORITY = Priority()


def queued(seed: int, is_known: bool, jobs: int = 400, wait_s: float = 20_000.0) -> ReplayedJobs:
    """Jobs of 8 GPUs take minutes, those of one GPU hours. What is predicted is true, or of another job."""
    rng = np.random.default_rng(seed)
    gpus = rng.choice([1.0, 8.0], jobs)
    run_s = np.where(gpus > 1, 120.0, 36_000.0) * np.exp(rng.normal(0, 0.5, jobs)) + 1
    submit_s = np.sort(rng.integers(0, 7 * 86_400, jobs)).astype("float64")
    mean_s = run_s if is_known else rng.permutation(run_s)
    nothing, users = np.full(jobs, np.nan), rng.choice(["ann", "bob", "cleo"], jobs)
    return ReplayedJobs(submit_s, gpus, run_s, np.full(jobs, wait_s), nothing, mean_s, mean_s, users)


def test_true_run_times_count_and_random_ones_do_not() -> None:
    known, random = (choose_rank(queued(1, is_known), PRIORITY) for is_known in (True, False))
    assert known is not None and known.rule.by in ("mean", "quantile")
    assert known.outcome is not None and known.outcome.jct < 0.95 and known.outcome.longest <= 2.0
    assert random is not None and random.rule.by in ("none", "gpus")


def test_limits_that_tell_the_run_time_need_no_prediction() -> None:
    jobs = queued(1, False)
    choice = choose_rank(jobs._replace(limit_s=np.ceil(jobs.run_s)), PRIORITY)
    assert choice is not None and choice.rule.by == "limit"
    assert rank_words(choice).startswith("GPUs x time limit (replayed 400 jobs on about ")


def test_jobs_that_hardly_wait_need_no_order() -> None:
    choice = choose_rank(queued(1, True, wait_s=10.0), PRIORITY)
    assert choice == RankChoice(NO_RANK, 0, 400)
    assert rank_words(choice) == "none pays: jobs hardly wait"


def test_the_order_of_rows_does_not_matter() -> None:
    jobs = queued(1, True, 250)
    mixed = ReplayedJobs(*(each[np.random.default_rng(1).permutation(250)] for each in jobs))
    assert choose_rank(mixed, PRIORITY) == choose_rank(jobs, PRIORITY)


def test_few_jobs_and_impossible_ones_are_not_judged() -> None:
    assert choose_rank(queued(0, True, MIN_JOBS - 1), PRIORITY) is None
    jobs = queued(0, False)
    assert choose_rank(jobs._replace(gpu_count=np.full(len(jobs.run_s), 0.5)), PRIORITY) is None
    assert rank_words(None).startswith(str(DEFAULT_RANK))


def outcome(jct: float, longest: float = 1.0) -> RankOutcome:
    return RankOutcome(jct, longest, 0.0, None)


COUNT, LIMIT, MEAN = RankRule("gpus", 1.0), RankRule("limit", 1.0), RankRule("mean", 0.5)


@pytest.mark.parametrize(
    ("outcomes", "best"),
    [
        ({}, NO_RANK),
        ({COUNT: outcome(0.99), MEAN: outcome(0.985)}, NO_RANK),
        ({COUNT: outcome(0.90), LIMIT: outcome(0.85), MEAN: outcome(0.78)}, LIMIT),
        ({COUNT: outcome(0.90), MEAN: outcome(0.80)}, MEAN),
        ({COUNT: outcome(0.99), MEAN: outcome(0.95)}, COUNT),
        ({COUNT: outcome(1.05), MEAN: outcome(0.97)}, MEAN),
        ({COUNT: outcome(0.90), LIMIT: outcome(0.80, 2.1), MEAN: outcome(0.70, 3.0)}, COUNT),
    ],
)
def test_a_prediction_must_surely_be_better_and_hold_the_longest_wait(
    outcomes: dict[RankRule, RankOutcome], best: RankRule
) -> None:
    assert best_rule(outcomes.items()) == best


numbers = st.lists(
    st.tuples(st.integers(0, 10**6), st.sampled_from([1, 3, 8, 9, 100]), st.integers(1, 10**7), st.integers(0, 10**6),
              st.sampled_from([np.nan, 60.0, 1e6]), st.floats(1, 1e8), st.just(np.nan)),
    min_size=MIN_JOBS, max_size=MIN_JOBS + 5,
)  # fmt: skip


@examples(0.03)
@given(numbers)
def test_any_jobs_give_a_choice_that_holds_the_longest_wait(rows: list[tuple[Any, ...]]) -> None:
    columns: Any = [np.array(each, dtype="float64") for each in zip(*rows, strict=True)]
    choice = choose_rank(ReplayedJobs(*columns, np.full(len(rows), "ann")), PRIORITY)
    assert choice is not None
    assert choice.rule == NO_RANK or (choice.outcome is not None and choice.outcome.longest <= 2.0)
