"""Site factors of pending jobs on a made-up Slurm, and their promises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_slurm import NOW_S, Job, predicted, start_ranking

from advisor.priority import Overrun, check_ageing, decide_priority, site_factor
from almanac.config import Priority
from almanac.errors import NotAllowedError
from almanac.records import JobRequest, PriorityAdvice
from almanac.units import DAY_S
from slurm_hooks.jobs.engine import JobOutcome


def pending(number: int, **values: Any) -> Job:
    return Job(number, **{"name": f"job-{number}", "submit_s": NOW_S - 600, **values})


def factors(run: Any) -> dict[int, int]:
    return {job.job_id: job.site_factor for job in run.slurm.jobs.values()}


def test_each_pending_gpu_job_gets_its_term(tmp_path: Path) -> None:
    run = start_ranking(tmp_path, pending(11), pending(12), pending(13, gpus=0))
    run.predict = predicted(job_11=900, job_12=0)
    assert run() == JobOutcome(waiting=1)
    assert factors(run) == {11: 900, 12: 0, 13: 0}
    assert run.why == {"asks for no GPU": 1, "has its site factor already": 1}
    first = run.lines()[0]
    assert (first["what"], first["job_id"], first["was"], first["new"]) == ("agreed", 12, "0", "0")
    line = run.lines()[1]
    assert (line["what"], line["model"], line["reason"], line["gpu_time_s"]) == (
        "set", "20261121T000000Z", "GPU-time 1 h", 3600.0
    )  # fmt: skip


def test_a_newer_prediction_replaces_our_older_one(tmp_path: Path) -> None:
    run = start_ranking(tmp_path, pending(11))
    run()
    run.predict, run.slurm.now_s = predicted(job_11=20), NOW_S + DAY_S
    assert run() == JobOutcome(waiting=1)
    assert [(line["was"], line["new"]) for line in run.lines()] == [("0", "500"), ("500", "20")]
    assert run(is_clearing=True) == JobOutcome(undone=1)
    assert factors(run) == {11: 0}


def test_what_almanac_set_stays_while_the_prediction_hardly_moves(tmp_path: Path) -> None:
    run = start_ranking(tmp_path, pending(11), pending(12, site_factor=450))
    run.least_change, run.published = 200.0, {12: {450}}
    assert run() == JobOutcome(waiting=2), "a published one is replaced at once"
    for value, is_changed in ((301, False), (699, False), (300, True), (0, True), (1, True)):
        before = factors(run)[11]
        run.predict = predicted(job_11=value)
        assert run() == JobOutcome(waiting=int(is_changed))
        assert factors(run)[11] == (value if is_changed else before)


def test_somebody_elses_factor_is_left_alone_and_a_published_one_is_ours(tmp_path: Path) -> None:
    jobs = [pending(number, site_factor=value) for number, value in enumerate((77, 77, -5, 0), 11)]
    run = start_ranking(tmp_path, *jobs)
    run.published = {12: {60, 77}}
    assert run() == JobOutcome(waiting=2)
    assert factors(run) == {11: 77, 12: 500, 13: -5, 14: 500}
    assert run.why["has a site factor that almanac did not set"] == 2
    run.slurm.jobs[14].site_factor = 123
    assert (run(), run()) == (JobOutcome(), JobOutcome()), "somebody took it over"


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"priority": 0}, "held"),
        ({"site_factor": None}, "not ranked by Slurm yet"),
        ({"has_own_priority": True}, "has a priority that somebody set"),
        ({"name": "unknown"}, "nothing is known"),
    ],
)
def test_jobs_that_get_no_site_factor(tmp_path: Path, job: dict[str, Any], reason: str) -> None:
    run = start_ranking(tmp_path, pending(11, **job))
    run.predict = predicted(unknown=None)
    assert run() == JobOutcome()
    (why,) = run.why
    assert why.startswith(reason)
    assert run.slurm.sent == []
    assert not run.log.folder.exists(), "nothing was done, nothing is written"


def test_only_jobs_that_can_be_changed_are_predicted(tmp_path: Path) -> None:
    asked: list[str] = []

    def predict(requests: Sequence[JobRequest]) -> list[PriorityAdvice | None]:
        asked.extend(request.job_name for request in requests)
        return [None] * len(requests)

    run = start_ranking(tmp_path, pending(11), pending(12, gpus=0), pending(13, priority=0))
    run.predict = predict
    run()
    assert asked == ["job-11"]


def test_what_slurm_takes_and_does_not_count_is_told_once(tmp_path: Path) -> None:
    run = start_ranking(tmp_path, pending(11), pending(12), deaf_to={11})
    assert run() == JobOutcome(waiting=1, ignored=1)
    assert run() == JobOutcome()
    assert run.why["Slurm took this site factor before and did not count it"] == 1
    run.predict = predicted(job_11=10)
    assert run().ignored == 1, "another site factor is another matter"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Access/permission denied", "Access/permission denied"),  # of one's own jobs
        ("Invalid user id", "Invalid user id"),  # of others' jobs
        ("Job/step already completing or completed", "Invalid user id"),
    ],
)
def test_a_user_without_the_right_is_told_so(tmp_path: Path, first: str, second: str) -> None:
    run = start_ranking(tmp_path, pending(11), pending(12), says={11: first, 12: second})
    with pytest.raises(NotAllowedError, match=f"refused 2 changes: {second}") as caught:
        run()
    assert "Operator" in caught.value.hint
    run.slurm.says.clear()
    assert run() == JobOutcome(waiting=2), "with the right, it goes on"


ARRAY = {"array_job_id": 20, "tres_req_str": "gres/gpu=1"}


def test_a_task_that_got_a_record_of_its_own_has_the_factor_of_its_array(tmp_path: Path) -> None:
    run = start_ranking(tmp_path, pending(20, more={**ARRAY, "array_task_string": "1-9", "address": "20_[1-9]"}))
    run()
    more = {**ARRAY, "array_task_id": 3, "address": "20_3"}
    run.slurm.jobs[24] = pending(24, submit_s=NOW_S, restarts=1, site_factor=500, more=more)
    run.predict = lambda requests: [PriorityAdvice(40, 1.0, None, None)] * len(requests)
    assert run() == JobOutcome(waiting=2)
    assert factors(run) == {20: 40, 24: 40}
    assert run(is_clearing=True) == JobOutcome(undone=2)


def test_an_array_number_that_came_again_is_another_job(tmp_path: Path) -> None:
    """An operator gave the new job 500, which the one before it of that number had from us."""
    run = start_ranking(tmp_path, pending(20, more={**ARRAY, "array_task_string": "1-9", "address": "20_[1-9]"}))
    run()
    more = {**ARRAY, "array_task_id": 1, "address": "20_1"}
    run.slurm.jobs = {28: pending(28, site_factor=500, submit_s=NOW_S + 30 * DAY_S, more=more)}
    run.predict = lambda requests: [PriorityAdvice(40, 1.0, None, None)] * len(requests)
    assert run() == JobOutcome()
    assert run.why["has a site factor that almanac did not set"] == 1
    assert run(is_clearing=True) == JobOutcome()
    run.slurm.jobs[28].restarts = 1
    assert run() == JobOutcome(waiting=1), "requeued: the record speaks of it"


def test_what_a_job_was_believed_is_noted_once_where_it_has_its_term_already(tmp_path: Path) -> None:
    run = start_ranking(tmp_path, pending(11, site_factor=500))
    run.plan()
    assert not run.log.folder.exists(), "a dry run"
    run()
    run()
    (line,) = run.lines()
    assert (line["what"], line["was"], line["new"], line["gpu_time_s"]) == ("agreed", "500", "500", 3600.0)
    assert run.slurm.sent == []
    assert run(is_clearing=True) == JobOutcome(), "it was not set by us"
    run.slurm.jobs = {11: pending(11, site_factor=500, submit_s=NOW_S, restarts=1)}
    run()
    assert [line["submit_s"] for line in run.lines()] == [NOW_S - 600, NOW_S], "and once more when it is requeued"


PRIORITY = Priority(mode="apply")
SPAN_S = PRIORITY.tau_hours * 3600 * math.log(PRIORITY.max_gpu_time_s / PRIORITY.min_gpu_time_s)


MAX_AGE_DAYS, WEIGHT_AGE = 30, 30_000
overrun = st.builds(Overrun, st.floats(0, 1), st.floats(1, 1e9))
predictions = st.tuples(st.floats(0, 1e9), st.floats(0, 1e9), overrun, st.sampled_from(["ann", "relieved"]))


@given(
    runs=st.lists(st.tuples(predictions, predictions, st.floats(0, 1)), min_size=1, max_size=8),
    later_s=st.floats(1, 5 * DAY_S),
    relief_points=st.integers(0, 3000),
    short_points=st.integers(0, 3000),
)
def test_no_job_is_overtaken_by_one_submitted_much_later(
    runs: list[tuple[tuple[float, float, Overrun, str], tuple[float, float, Overrun, str], float]],
    later_s: float,
    relief_points: int,
    short_points: int,
) -> None:
    """This holds for any predictions of both jobs, run after run, as long as the first one's age still grows.

    Options of a site can delay it by their share of tau.
    """
    priority = replace(
        PRIORITY, relief_points=relief_points, short_points=short_points,
        short_gpu_time_s=600.0,
    )  # fmt: skip
    assert check_ageing({"PriorityMaxAge": f"{MAX_AGE_DAYS}-0", "PriorityWeightAge": str(WEIGHT_AGE)}, priority).fits
    options = relief_points + short_points
    apart_s = SPAN_S + options / priority.points_per_e * priority.tau_hours * 3600 + later_s
    max_age_s = MAX_AGE_DAYS * DAY_S
    for *both, share in runs:
        ranks = []
        since_s = apart_s + share * (max_age_s - apart_s)
        for (gpu_time_s, cautious_s, overran, user), age_s in zip(both, (since_s, since_s - apart_s), strict=True):
            found = decide_priority(gpu_time_s, cautious_s, overran, (), priority).site_factor
            found += relief_points if user == "relieved" else 0
            assert 0 <= found <= site_factor(0, priority) + options
            ranks.append(found + WEIGHT_AGE * age_s / max_age_s)
        assert ranks[0] >= ranks[1] - 1, "site factors are whole numbers"


def test_options_need_an_age_that_grows_longer() -> None:
    """12 days hold ln(8640000 / 60) = 11.9 of 24 h each; 2,000 more by options are 2 days more."""
    fits = {"PriorityMaxAge": "12-0", "PriorityWeightAge": "12000"}
    assert check_ageing(fits, PRIORITY).fits
    short = replace(PRIORITY, short_points=1500, relief_points=500)
    assert check_ageing(fits, short).lines == ("PriorityMaxAge=14-0", "PriorityWeightAge=14000")


def test_jobs_of_the_user_who_waits_most_get_relief_until_they_no_longer_do(tmp_path: Path) -> None:
    early = NOW_S // 3600 * 3600 - 5000
    run = start_ranking(tmp_path, pending(11, user="ann", submit_s=early), pending(12, user="bob", submit_s=early + 9))
    run.predict, run.least_change, run.relief_points = predicted(job_11=900, job_12=900), 200.0, 300
    run()
    assert factors(run) == {11: 1200, 12: 900}
    assert "options of this site add 300" in run.lines()[0]["reason"]
    assert run() == JobOutcome(), "the choice holds within the hour"
    del run.slurm.jobs[11]
    run()
    assert factors(run) == {12: 1200}
    run.slurm.jobs[13] = pending(13, user="cay", submit_s=early - 9)
    run.predict = predicted(job_12=900, job_13=500)
    run()
    assert factors(run) == {12: 900, 13: 800}


def test_whatever_sequence_of_predictions_a_job_keeps_a_site_factor_within_the_span(tmp_path: Path) -> None:
    run = start_ranking(tmp_path, pending(11))
    for gpu_time_s in (0.0, 1e9, 60.0, 5e4, 86_400.0, 1e-38):
        advice = decide_priority(gpu_time_s, gpu_time_s, Overrun(), (), PRIORITY)
        run.predict = lambda requests, advice=advice: [advice]
        run()
        assert factors(run)[11] == site_factor(gpu_time_s, PRIORITY)
        assert 0 <= factors(run)[11] <= site_factor(0, PRIORITY)
