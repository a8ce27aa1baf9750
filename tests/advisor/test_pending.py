"""Many waiting submissions at once: each is predicted as it would have been alone when it was submitted."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from advisor.duration.features import Submission, submission_of
from advisor.duration.overrun import Overrun
from advisor.duration.rolling import SiteMeans
from advisor.evaluation.replay import known_of_pending, observed_history
from advisor.service import Trained, advise, train
from advisor.services.gpu_time import priorities_of
from almanac.config import Config
from almanac.records import Request

NOW_S = 1_750_000_000
FIRST_S = NOW_S - 60 * 86400


@pytest.fixture(scope="module")
def trained(site_history: pd.DataFrame, config: Config) -> Trained:
    return train(site_history, config, NOW_S)


def _submission(user: str, family: str, gpus: int, submit_s: int) -> Submission:
    return submission_of(Request(user, f"fam{family}-run7", "ml", gpu_count=gpus, submit_s=submit_s), ())


submitted = st.lists(
    st.builds(
        _submission,
        st.sampled_from(["u1", "u2", "u3", "stranger"]),
        st.sampled_from("abz"),
        st.sampled_from([1, 4]),
        st.integers(FIRST_S, NOW_S),
    ),
    max_size=12,
)


def test_features_are_those_of_the_moment_of_submission(site_history: pd.DataFrame) -> None:
    site = SiteMeans()
    site.add(1, 600.0)

    @examples(0.15)
    @given(submitted)
    def check(jobs: list[Submission]) -> None:
        known = known_of_pending(jobs, site_history, site)
        for job, each in zip(jobs, known, strict=True):
            alone = observed_history([job.user], site_history, job.submit_s, site).known_at_submit(job)
            assert repr(each.features) == repr(alone.features)
            assert each.rolling == alone.rolling

    check()


def test_the_site_factor_is_that_of_an_advice_at_submission(
    trained: Trained, site_history: pd.DataFrame, config: Config
) -> None:
    requests = [
        Request(f"u{number % 12}", "famb-run1", "ml", gpu_count=2, cpu_count=32, submit_s=FIRST_S + number * 86_400)
        for number in range(10, 50)
    ]
    told = priorities_of(requests, site_history, trained, config)
    for request, priority in zip(requests, told, strict=True):
        alone = advise(request, site_history, trained, config, request.submit_s).priority
        assert alone is not None
        assert priority == alone


def test_a_job_without_gpus_has_no_site_factor(trained: Trained, site_history: pd.DataFrame, config: Config) -> None:
    assert priorities_of([Request("u1", submit_s=NOW_S)], site_history, trained, config) == [None]
    assert priorities_of([], site_history, trained, config) == []


def test_the_jobs_of_a_user_who_overruns_rank_as_if_they_took_longer(
    trained: Trained, site_history: pd.DataFrame, config: Config
) -> None:
    requests = [Request(user, "famb-run1", "ml", gpu_count=2, cpu_count=32, submit_s=NOW_S) for user in ("u1", "u2")]
    plain = priorities_of(requests, site_history, trained, config)
    told = priorities_of(requests, site_history, trained, config, {"u1": Overrun(1.0, 3.0), "u2": Overrun()})
    assert [each.is_cautious for each in told if each] == [True, False]
    assert told[1] == plain[1]
