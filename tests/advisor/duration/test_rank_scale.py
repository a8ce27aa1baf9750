"""How predicted run times become the GPU-times that rank the queue."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.duration.blend import clip_to_limit
from advisor.duration.rank_scale import RankScale, choose_scale
from advisor.evaluation.replay import replay_durations
from almanac.config import Config

EXPONENTS = (0.25, 0.5, 0.75, 1.0)
gpus = st.integers(1, 512)
seconds = st.floats(1, 1e8)


@given(gpus, seconds, seconds, st.sampled_from(EXPONENTS), st.floats(1, 1e6), st.floats(1, 4), st.floats(1, 64))
def test_the_scale_keeps_the_order_and_its_middle(
    count: int, one_s: float, other_s: float, exponent: float, middle_s: float, stretch: float, middle_gpus: float
) -> None:
    scale = RankScale(exponent, middle_s, stretch, middle_gpus)
    assert float(scale.ranked(middle_gpus, middle_s)) == pytest.approx(middle_gpus * middle_s)
    assert scale.ranked(count, one_s) <= scale.ranked(count, other_s) or one_s > other_s
    assert 0 < scale.ranked(count, one_s) < scale.ranked(count + 1, one_s)
    assert float(RankScale(1.0).ranked(count, one_s)) == pytest.approx(count * one_s)


def test_ranked_gpu_times_spread_as_widely_as_predicted_ones(site_history: pd.DataFrame, config: Config) -> None:
    past = replay_durations(site_history)
    scale = choose_scale(past, past.duration_s, lambda jobs: 0.5)
    count, run_s = past.features.number("gpu_count"), clip_to_limit(past.duration_s, past.features)
    assert 1 < scale.stretch < 2
    assert np.std(np.log(scale.ranked(count, run_s))) == pytest.approx(np.std(np.log(count * run_s)))
    assert np.mean(np.log(scale.ranked(count, run_s))) == pytest.approx(np.mean(np.log(count * run_s)))
