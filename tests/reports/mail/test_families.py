"""Like runs share a mail, `useful` users hear of problems and news, and a digest says each piece of advice once."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mails import NOW_S, message, run
from profiles import examples

from almanac.config import Mail
from reports.job.conclusions import Conclusions, Suggestion
from reports.job.rules import packaged
from reports.mail.batch import News
from reports.mail.digest import render_burst
from reports.mail.due import FAMILY_TOLD, DuePlan, ReportCandidate, group_into_mails, outcome_of, wait_for_family
from reports.mail.families import DigestJob, families_of, shared_advice, time_limits, told_of_digest
from reports.mail.record import TOLD_S, EndedRun, MailRecord, Told, record_path
from reports.mail.week import best_of
from slurm.states import JOB_FAILED

CONFIG = Mail(family_wait_min=60)
HOUR_S = 3600
RULES = {rule.name: (rule.topic, rule.headline) for rule in packaged().rules}


def ended(job_id: int, state: str = "COMPLETED", name: str = "train-#", **more: Any) -> ReportCandidate:
    return ReportCandidate(run(job_id, **more), 900, name_key=name, state=state)


def told(each: ReportCandidate, ago_s: int) -> dict[tuple[str, Told], int]:
    return {(each.run.user, each.tells()): NOW_S - ago_s}


def waits(*found: ReportCandidate, told: dict[tuple[str, Told], int], config: Mail = CONFIG) -> list[int]:
    plan = DuePlan(ready=list(found))
    wait_for_family(plan, told, config, NOW_S)
    assert {each.run for each in plan.ready} | {*plan.delayed[FAMILY_TOLD]} == {each.run for each in found}
    return sorted(each.job_id for each in plan.delayed[FAMILY_TOLD])


@pytest.mark.parametrize(
    ("each", "ago_s", "waiting"),
    [
        (ended(2), 60, [2]),
        (ended(2), HOUR_S - 1, [2]),
        (ended(2), HOUR_S, []),
        (ended(2, state="CANCELLED by 1000"), 60, [2]),
        (ended(2, state="FAILED"), 60, []),
        (ended(2, name="eval"), 60, []),
        (ended(2, gpu_count=4), 60, []),
        (ended(2, user="bob"), 60, []),
        (ended(2, cluster="other"), 60, []),
        (ended(2, end_s=NOW_S - 36 * HOUR_S - 1), 60, []),
    ],
)
def test_like_runs_wait_for_an_hour_after_the_mail_about_the_first(
    each: ReportCandidate, ago_s: int, waiting: list[int]
) -> None:
    assert waits(each, told=told(ended(1), ago_s)) == waiting
    assert waits(each, told=told(ended(1), ago_s), config=replace(CONFIG, family_wait_min=0)) == []


def test_what_fails_in_a_new_way_takes_the_waiting_runs_along() -> None:
    done, failed = ended(2), ended(3, state="OUT_OF_MEMORY")
    assert waits(done, failed, told=told(ended(1), 60)) == []
    assert waits(done, failed, told=told(ended(1), 60) | told(failed, 60)) == [2, 3]


def test_like_runs_and_an_array_of_one_name_are_one_mail() -> None:
    found = [ended(1), ended(2), ended(3, name="eval"), *(ended(n, array_job_id=10) for n in (11, 12))]
    made = group_into_mails(found, CONFIG, lambda user: 99)
    assert sorted(sorted(each.job_id for each in runs) for runs in made) == [[1, 2, 11, 12], [3]]


each_end = st.tuples(
    st.integers(0, 5 * HOUR_S), st.sampled_from(["a", "b"]), st.sampled_from(["COMPLETED", "FAILED", "TIMEOUT"])
)


@examples(0.2)
@given(st.lists(each_end, max_size=40), st.sampled_from([0, 10, 60]))
def test_every_run_is_told_once_and_a_family_has_few_mails(
    tmp_path_factory: pytest.TempPathFactory, ends: list[tuple[int, str, str]], wait_min: int
) -> None:
    """Runs end at random for five hours; the timer looks every five minutes, and is a new process each time."""
    config, path = replace(CONFIG, family_wait_min=wait_min), record_path(tmp_path_factory.mktemp("site"))
    found = {run(number, end_s=NOW_S + after_s): (name, state) for number, (after_s, name, state) in enumerate(ends, 1)}
    mails: dict[str, list[int]] = defaultdict(list)
    told_s: dict[EndedRun, int] = {}
    for now_s in range(NOW_S, NOW_S + 7 * HOUR_S, 300):
        with MailRecord(path) as record:
            record.notice([each for each in found if each.end_s <= now_s])
            waiting = record.due(now_s, "test")
            plan = DuePlan(ready=[ReportCandidate(r, 900, name_key=found[r][0], state=found[r][1]) for r in waiting])
            tells = {each.run: each.tells() for each in plan.ready}
            wait_for_family(plan, record.told_since(now_s - TOLD_S, "test"), config, now_s)
            for runs in group_into_mails(plan.ready, replace(config, storm=999), lambda user: 999):
                number = sum(map(len, mails.values()))
                mail = replace(message(number, *runs), told=tuple({tells[each] for each in runs}))
                record.trying(mail, now_s)
                record.taken(mail, now_s)
                assert not told_s.keys() & {*runs}
                told_s |= dict.fromkeys(runs, now_s)
                mails[found[runs[0]][0]].append(now_s)
    assert told_s.keys() == found.keys()
    assert all(at_s - each.end_s <= max(wait_min * 60, 300) + 300 for each, at_s in told_s.items())
    for at_s in mails.values() if wait_min else ():
        hours = [sum(since_s <= each_s < since_s + wait_min * 60 for each_s in at_s) for since_s in at_s]
        assert max(hours) <= 3, "one for each way to end"


def job(job_id: int = 1, given_rules: tuple[str, ...] = (), headline: str = "ran", **more: Any) -> DigestJob:
    said = Conclusions(
        headline, ("It ran.",), tuple(Suggestion(rule, f"Do {rule}.", "So.") for rule in given_rules), given_rules
    )
    given = {
        "cluster": "test", "job_id": job_id, "shown_id": str(job_id), "name": "train-1", "name_key": "train-#",
        "gpu_count": 4, "state": "COMPLETED", "elapsed_s": 900, "gpu_hours": 1.0, "unused_hours": 0.1,
        "limit_s": 7200, "next_limit_s": 1800, "conclusions": said, "rules": RULES,
    }  # fmt: skip
    return DigestJob(**{**given, **more})


@pytest.mark.parametrize("state", sorted(JOB_FAILED))
def test_a_failed_job_is_useful_again_and_again(state: str) -> None:
    news = News(set())
    assert news.has_any("ann", [job(state=state)]) and news.has_any("ann", [job(state=state)])


def test_advice_is_useful_once_a_week_for_each_family_and_user() -> None:
    news = News({("ann", job().told("low_use"))})
    assert not news.has_any("ann", [job()])
    assert not news.has_any("ann", [job(given_rules=("low_use",))])
    assert news.has_any("bob", [job(given_rules=("low_use",))]) and not news.has_any(
        "bob", [job(given_rules=("low_use",))]
    )
    assert news.has_any("ann", [job(given_rules=("low_use",), gpu_count=8)])
    assert news.has_any("ann", [job(given_rules=("low_use", "tier_too_large"))])
    assert all(news.has_any("ann", [job(given_rules=("idle_gpus",))]) for _ in range(2))
    assert news.has_any("ann", [job(), job(state="FAILED")]), "an array with a failed task"
    assert not news.has_any("ann", [job(state="CANCELLED by 1000")])


def test_a_job_that_is_ok_is_no_news_and_its_advice_stays_new() -> None:
    news, fine = News(set()), "OK; to run faster, use the tensor cores"
    assert not news.has_any("ann", [job(given_rules=("tensor_unused",), headline=fine)])
    assert news.has_any("ann", [job(given_rules=("tensor_unused",), headline=fine, state="FAILED")])
    assert news.has_any("bob", [job(headline=fine), job(given_rules=("low_use",))]), "an array with one low task"


def test_each_advice_comes_once_with_all_its_jobs_and_what_wastes_most_comes_first() -> None:
    jobs = [
        *(job(number, ("memory_bound", "low_use")) for number in range(1, 41)),
        job(50, ("idle_gpus",), gpu_hours=90.0, unused_hours=80.0, name_key="big"),
        job(51, ("idle_gpus",), gpu_hours=None, unused_hours=None, name_key="<b>"),
    ]
    advice = shared_advice(jobs)
    assert [(each.rule, len(each.jobs)) for each in advice] == [("idle_gpus", 2), ("low_use", 40), ("memory_bound", 40)]
    assert [each.first.name_key for each in families_of(jobs)] == ["big", "train-#", "<b>"]
    assert job(51, name_key="<b>").told("idle_gpus") in told_of_digest(jobs, advice)
    assert families_of(jobs)[2].unused_hours is None and families_of(jobs)[2].unmeasured == 1


def test_one_fault_of_several_jobs_is_one_advice_with_the_figures_of_the_largest() -> None:
    def said(rule: str, number: int) -> Conclusions:
        return Conclusions("ran", (), (Suggestion(rule, f"Ask for {number}.", "So."),), (rule,))

    rules = {"idle_gpus": ("use", ""), "tier_too_large": ("memory", "")}
    jobs = [job(n, conclusions=said("idle_gpus", n), rules=rules, gpu_hours=float(n)) for n in (1, 2, 3)]
    [advice] = shared_advice(jobs)
    assert (advice.advice, len(advice.jobs)) == ("Ask for 3.", 3)
    assert advice.reason == "So. The figures are those of job 3; `almanac report JOBID` has the others'."
    tiers = [job(n, conclusions=said("tier_too_large", n), rules=rules) for n in (1, 2)]
    assert len(shared_advice(tiers)) == 2, "another tier is another request"


def test_time_limits_are_asked_for_and_never_more_saved_than_used() -> None:
    far = [job(number, ("limit_far",)) for number in (1, 2)]
    [limit] = time_limits(families_of([*far, job(3, elapsed_s=3000, next_limit_s=5400)]))
    assert (limit.asked_hours, limit.used_hours) == (16.0, 2.0)
    assert limit.spans == "ran 15 min of 2 h"
    assert time_limits(families_of([*far, job(3, state="TIMEOUT")])) == []
    assert time_limits(families_of([*far, job(3, next_limit_s=None)])) == []
    assert time_limits(families_of([job(1, ("limit_far",), state="CANCELLED")])) == [], "by a site's own rule"


def test_what_several_jobs_are_advised_names_no_figure_of_one_of_them() -> None:
    headlines = [("use", f"spread the work evenly over all {gpus} GPUs") for gpus in (4, 12)]
    jobs = [job(number, ("uneven",), rules={"uneven": each}) for number, each in enumerate(headlines)]
    assert [each.short for each in shared_advice(jobs)] == ["do uneven"]
    assert shared_advice(jobs[1:])[0].short == "spread the work evenly over all 12 GPUs"


def test_the_best_jobs_have_completed_and_are_of_different_families() -> None:
    jobs = [
        job(1), job(2, gpu_hours=2.0), job(3, name_key="eval"), job(4, name_key="slow", unused_hours=0.5),
        job(5, name_key="gone", state="CANCELLED by 1000"), job(6, name_key="new", unused_hours=None),
    ]  # fmt: skip
    assert [each.job_id for each in best_of(jobs)] == [2, 3]


def test_runs_of_one_family_are_named_in_the_subject_with_what_to_do(reported: Any) -> None:
    [context] = reported.build(201, has_series=False)
    runs = [dataclasses.replace(context, job={**context.job, "job_id": 5000 + number}) for number in range(12)]
    digest = render_burst(runs, reported.config)
    assert digest.rendered.subject == "12 runs of lonely: ask for 1 GPU"
    assert digest.rendered.text.count("Ask for 1 GPU") == 2, "as the headline and as the advice"
    assert {each.what for each in digest.told} >= {"idle_gpus", outcome_of("COMPLETED")}
    odd = [replace(each, job={**each.job, "name": "<b>\r\nBcc: eve@example.org", "name_key": "<b>"}) for each in runs]
    mail = render_burst([*odd, context], reported.config).rendered
    rules = tuple(replace(rule, summary="", headline="") for rule in context.site.rules.rules)
    site = replace(context.site, rules=replace(context.site.rules, rules=rules))
    silent = replace(context, site=site, job={**context.job, "state": "FAILED"})
    assert "Failed jobs" in render_burst([silent, context], reported.config).rendered.text, "a site removed all texts"
    assert "<b>\r" not in mail.html and "&lt;b&gt;??Bcc" in mail.html and len(mail.subject.splitlines()) == 1
