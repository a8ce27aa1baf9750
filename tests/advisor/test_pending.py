"""Many waiting submissions at once: each is predicted as it would have been alone when it was submitted."""

from __future__ import annotations

import dataclasses

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.duration.features import Submission, submission_of
from advisor.duration.rolling import SiteMeans
from advisor.evaluation.replay import known_of_pending, observed_history
from advisor.service import Trained, advise, train
from advisor.services.gpu_time import priorities_of
from almanac.config import Config, Rolling
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


@pytest.mark.parametrize("families", ["mask", "levenshtein"])
def test_features_are_those_of_the_moment_of_submission(families: str, site_history: pd.DataFrame) -> None:
    rolling = dataclasses.replace(Rolling(), families=families)
    site = SiteMeans()
    site.add(1, 600.0)

    @settings(max_examples=15, deadline=None)
    @given(submitted)
    def check(jobs: list[Submission]) -> None:
        known = known_of_pending(jobs, site_history, NOW_S, rolling, site)
        for job, each in zip(jobs, known, strict=True):
            alone = observed_history([job.user], site_history, job.submit_s, rolling, site).known_at_submit(job)
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
    told = priorities_of(requests, site_history, trained, config, NOW_S)
    compared = 0
    for request, priority in zip(requests, told, strict=True):
        alone = advise(request, site_history, trained, config, request.submit_s).priority
        assert alone is not None
        assert priority is not None
        if alone.is_cautious == priority.is_cautious:
            assert priority == alone
            compared += 1
    assert compared > 30


def test_a_job_without_gpus_has_no_site_factor(trained: Trained, site_history: pd.DataFrame, config: Config) -> None:
    assert priorities_of([Request("u1", submit_s=NOW_S)], site_history, trained, config, NOW_S) == [None]
    assert priorities_of([], site_history, trained, config, NOW_S) == []


def test_runs_that_overrun_while_a_job_waits_make_its_site_factor_conservative(
    history_of: object, trained: Trained, config: Config
) -> None:
    """Ten jobs named like a short family wait; the first runs of that name then take a hundred times as long."""
    short = [{"name": f"quick-{number}", "elapsed_s": 60.0} for number in range(10)]
    long = [{"name": f"quick-{number}", "elapsed_s": 6000.0, "start_s": NOW_S - 8000, "end_s": NOW_S - 2000,
             "submit_s": NOW_S - 8000} for number in range(4)]  # fmt: skip
    history = history_of([*short, *long])  # type: ignore[operator]
    waits = Request(
        "ann", "quick-11", "ml", "gpu", "normal", "gpu&hbm80g", "", 4, "a100", 1, 32, 7200, False, NOW_S - 8000
    )
    before, after = (priorities_of([waits], history, trained, config, at_s)[0] for at_s in (NOW_S - 7000, NOW_S))
    assert before is not None
    assert after is not None
    assert not before.is_cautious
    assert after.is_cautious
    assert after.site_factor < before.site_factor


def test_a_share_of_overruns_known_from_elsewhere_counts_where_it_is_greater(
    trained: Trained, site_history: pd.DataFrame, config: Config
) -> None:
    requests = [Request(user, "famb-run1", "ml", gpu_count=2, cpu_count=32, submit_s=NOW_S) for user in ("u1", "u2")]
    plain = priorities_of(requests, site_history, trained, config, NOW_S)
    told = priorities_of(requests, site_history, trained, config, NOW_S, {"u1": 1.0, "u2": 0.0})
    assert [each.is_cautious for each in told if each] == [True, plain[1] and plain[1].is_cautious]
    assert told[1] == plain[1]
