"""The weight of predicted run times in the queue: full for perfect ones, little for random ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from advisor.duration.blend import DEFAULT_EXPONENT, QueuedJobs
from simulator.policies.priority import EXPONENTS, MIN_JOBS, choose_exponent, mean_jct_s


def queued(seed: int, is_known: bool, jobs: int = 800) -> QueuedJobs:
    """Jobs of 8 GPUs take minutes, those of one GPU hours. What is predicted is true, or of another job."""
    rng = np.random.default_rng(seed)
    gpus = rng.choice([1.0, 8.0], jobs)
    run_s = np.where(gpus > 1, 120.0, 36_000.0) * np.exp(rng.normal(0, 0.5, jobs)) + 1
    submit_s = np.sort(rng.integers(0, 14 * 86_400, jobs)).astype("float64")
    return QueuedJobs(submit_s, gpus, run_s, run_s if is_known else rng.permutation(run_s))


def test_true_run_times_count_and_random_ones_do_not() -> None:
    gain = [np.log(each[0.25] / each[1.0]) for each in (mean_jct_s(queued(seed, True)) for seed in range(4))]
    assert np.mean(gain) > 0.02
    assert [choose_exponent(queued(seed, False)) for seed in range(4)] == [0.25] * 4


def test_the_order_of_rows_does_not_matter() -> None:
    jobs = queued(1, True, 300)
    mixed = QueuedJobs(*(each[np.random.default_rng(1).permutation(300)] for each in jobs))
    assert mean_jct_s(mixed) == pytest.approx(dict(mean_jct_s(jobs)))


def test_few_jobs_and_impossible_ones_give_the_default() -> None:
    assert choose_exponent(queued(0, True, MIN_JOBS - 1)) == DEFAULT_EXPONENT
    jobs = queued(0, False)
    assert choose_exponent(jobs._replace(gpu_count=np.full(len(jobs.run_s), 0.5))) == DEFAULT_EXPONENT
    some = jobs._replace(gpu_count=np.where(np.arange(len(jobs.run_s)) % 10 == 0, 1e9, jobs.gpu_count))
    assert choose_exponent(some) == 0.25, "the good records count"


numbers = st.lists(
    st.tuples(st.integers(0, 10**6), st.sampled_from([1, 3, 8, 9, 100]), st.integers(1, 10**7), st.floats(1, 1e8)),
    min_size=MIN_JOBS, max_size=MIN_JOBS + 20,
)  # fmt: skip


@examples(0.08)
@given(numbers)
def test_any_jobs_give_an_exponent(rows: list[tuple[int, int, int, float]]) -> None:
    columns: Any = (np.array(each, dtype="float64") for each in zip(*rows, strict=True))
    assert choose_exponent(QueuedJobs(*columns)) in EXPONENTS
