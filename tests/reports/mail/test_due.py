"""Ended runs in the store, and what is decided on each."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mails import NOW_S, message, run

from almanac.config import Mail
from almanac.errors import DamageWarning
from reports.mail.batch import GAP_S, RECENT_S, spans_to_summarize
from reports.mail.due import (
    ENOUGH_MAIL,
    GIVE_UP_S,
    NO_COMMENT,
    NO_TELEMETRY,
    RAN_AGAIN,
    TOO_OLD,
    DuePlan,
    MailPlanner,
    ReportCandidate,
    ended_since,
    first_of,
    group_into_mails,
    known_ends,
    leave_for_later,
    look_up,
)
from reports.mail.record import GIVEN_UP, EndedRun, MailRecord, record_path
from reports.mail.run import PER_USER_HOUR
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

CONFIG = Mail(min_elapsed_s=60, family_wait_min=0)
HOUR_S = 3600


_FACTS = ("is_last", "is_array_open", "has_metrics", "refuses_mail", "has_comments")


def ended(job_id: int = 1, elapsed_s: int = 900, **more: object) -> ReportCandidate:
    facts = {name: more.pop(name) for name in _FACTS if name in more}
    return ReportCandidate(run(job_id, **more), elapsed_s, **facts)  # type: ignore[arg-type]


def plan(
    *found: ReportCandidate,
    telemetry_s: int | None = NOW_S,
    frequency: str = "every",
    address: str | None = "x",
    failures: Sequence[EndedRun] = (),
) -> DuePlan:
    return MailPlanner(lambda user: frequency, lambda user: address, CONFIG, NOW_S, telemetry_s, failures).plan(found)


def any_number(user: str) -> int:
    """No rate limit."""
    return 10**9


def reasons(made: DuePlan) -> list[str]:
    return [*made.skipped, *made.delayed, *("ready" for _ in made.ready)]


@pytest.mark.parametrize(
    ("each", "reason"),
    [
        (ended(), "ready"),
        (ended(elapsed_s=59), "too short"),
        (ended(elapsed_s=60), "ready"),
        (ended(is_last=False), RAN_AGAIN),
        (ended(end_s=NOW_S - 72 * HOUR_S - 1), "too long ago"),
        (ended(end_s=NOW_S - 72 * HOUR_S), "ready"),
    ],
)
def test_a_job_that_is_over_and_ran_long_enough_is_told(each: ReportCandidate, reason: str) -> None:
    assert reasons(plan(each)) == [reason]


@pytest.mark.parametrize(
    ("frequency", "reason"),
    [("every", "ready"), ("off", "the user wants none"), ("digest", "the user wants weekly mail")],
)
def test_the_user_says_how_often(frequency: str, reason: str) -> None:
    assert reasons(plan(ended(), frequency=frequency)) == [reason]


def test_a_user_whom_the_system_does_not_know_is_waited_for() -> None:
    """A directory service that is away must not bring mail to who said "off"; nor does a day of it lose mail."""
    for age_s in (60, 24 * HOUR_S, 72 * HOUR_S):
        assert reasons(plan(ended(end_s=NOW_S - age_s), frequency="unknown")) == ["the system does not know the user"]
    assert reasons(plan(ended(end_s=NOW_S - 72 * HOUR_S - 1), frequency="unknown")) == [
        "the system does not know the user"
    ]


@pytest.mark.parametrize(
    ("refuses", "age_s", "has_comments", "reason"),
    [
        (True, 60, True, "the job wants none"),
        (False, 60, True, "ready"),
        (None, 60, True, NO_COMMENT),
        (None, 7200, True, NO_COMMENT),
        (None, 72 * HOUR_S + 1, True, NO_COMMENT),
        (None, 72 * HOUR_S + 1, False, "too long ago"),
        (None, 60, False, NO_COMMENT),
        (None, 1800, False, "ready"),
    ],
)
def test_a_comment_that_is_not_known_is_no_consent(
    refuses: bool | None, age_s: int, has_comments: bool, reason: str
) -> None:
    each = ended(end_s=NOW_S - age_s, refuses_mail=refuses, has_comments=has_comments)
    assert reasons(plan(each)) == [reason]


def test_without_an_address_there_is_no_mail() -> None:
    assert reasons(plan(ended(), address=None)) == ["no address"]


def test_a_report_waits_for_telemetry_of_the_jobs_end_but_not_for_ever() -> None:
    early, covered, old = (ended(end_s=NOW_S - age_s) for age_s in (60, 61, 1800))
    made = plan(early, covered, old, telemetry_s=NOW_S - 61)
    assert [each.run.end_s for each in made.ready] == [covered.run.end_s, old.run.end_s]
    assert made.delayed == {NO_TELEMETRY: [early.run]}
    assert reasons(plan(early, telemetry_s=None)) == ["ready"]


def test_a_task_waits_for_its_array_but_not_for_ever() -> None:
    task = ended(array_job_id=7, is_array_open=True)
    assert reasons(plan(task)) == ["the array still runs"]
    late = replace(task, run=replace(task.run, end_s=NOW_S - 24 * HOUR_S))
    assert reasons(plan(late)) == ["ready"]


def test_an_array_is_one_mail_and_a_lone_task_is_a_job() -> None:
    tasks = [ended(number, array_job_id=10) for number in (11, 12, 13)]
    alone = ended(21, array_job_id=20)
    found = group_into_mails([*tasks, alone, ended(1), ended(2)], CONFIG, any_number)
    assert sorted([run.job_id for run in runs] for runs in found) == [[1], [2], [11, 12, 13], [21]]


def test_a_job_whose_id_is_an_arrays_is_not_taken_for_it() -> None:
    assert len(group_into_mails([ended(10), ended(11, array_job_id=10)], CONFIG, any_number)) == 2


def test_more_than_a_storm_of_one_user_is_one_mail() -> None:
    calm, stormy = [ended(number) for number in range(5)], [ended(number, user="bob") for number in range(10, 16)]
    found = group_into_mails([*calm, *stormy], CONFIG, any_number)
    assert Counter((runs[0].user, len(runs)) for runs in found) == {("ann", 1): 5, ("bob", 6): 1}


@pytest.mark.parametrize(
    ("tasks", "gap_s", "sizes"),
    [(100, 60, [100]), (100, 600, [100]), (200, 1200, [72, 72, 56])],
    ids=["within 100 minutes", "within 16 hours", "within 66 hours"],
)
def test_an_array_is_one_mail_however_its_tasks_end(tmp_path: Path, tasks: int, gap_s: int, sizes: list[int]) -> None:
    """One for each 24 hours that it runs: of the first 73 tasks, the last has no telemetry when the first is due."""
    runs = [run(100 + number, end_s=NOW_S + number * gap_s, array_job_id=100) for number in range(tasks)]
    last_s, told = runs[-1].end_s, []
    with MailRecord(record_path(tmp_path)) as record:
        for now_s in range(NOW_S, last_s + HOUR_S, 60):
            record.notice([each for each in runs if now_s - 60 < each.end_s <= now_s])
            found = [ReportCandidate(each, 600, is_array_open=now_s < last_s) for each in record.due(now_s, "test")]
            made = MailPlanner(lambda user: "every", lambda user: "x", CONFIG, now_s, now_s - 90).plan(found)
            for told_now in group_into_mails(made.ready, CONFIG, any_number):
                record.skip(told_now, "told", now_s)
                told.append(len(told_now))
    assert told == sizes


@pytest.mark.parametrize(("gap_s", "most_mails", "seed"), [(30, 20, None), (240, 15, None), (90, 20, 1), (90, 20, 2)])
def test_no_hour_has_too_many_mails_and_all_are_told(
    tmp_path: Path, gap_s: int, most_mails: int, seed: int | None
) -> None:
    """A job ends every so often for nine hours. With a seed, the server is down at times."""
    chance, end_s = random.Random(seed), NOW_S + 9 * HOUR_S
    told, at_s, is_up, change_s = list[int](), list[int](), True, NOW_S + 300 if seed else 2 * NOW_S
    with MailRecord(record_path(tmp_path)) as record:
        for now_s in range(NOW_S, end_s + 4 * HOUR_S, 60):
            if now_s >= change_s:
                is_up, change_s = not is_up or now_s > end_s, now_s + chance.randrange(300, 3 * HOUR_S)
            ends = [each_s for each_s in range(NOW_S, end_s, gap_s) if now_s - 60 < each_s <= now_s]
            record.notice([run(each_s, end_s=each_s) for each_s in ends])
            used = record.taken_since(now_s - HOUR_S + 1)
            made = DuePlan(ready=[ReportCandidate(each, 600) for each in record.due(now_s, "test")])
            leave_for_later(made, lambda user, used=used: PER_USER_HOUR - used[user])  # type: ignore[misc]
            for runs in group_into_mails(made.ready, CONFIG, lambda user, used=used: PER_USER_HOUR - used[user]):  # type: ignore[misc]
                if is_up:
                    mail = message(runs[0].job_id, *runs)
                    record.trying(mail, now_s)
                    record.taken(mail, now_s)
                    at_s.append(now_s)
                    told += [each.job_id for each in runs]
    assert sorted(told) == list(range(NOW_S, end_s, gap_s))
    hours = [sum(since_s - HOUR_S < each_s <= since_s for each_s in at_s) for since_s in at_s]
    assert max(hours) <= most_mails


def test_mails_that_the_server_refused_come_after_the_others() -> None:
    found = [ended(1, end_s=NOW_S - 900), ended(2, end_s=NOW_S - 60), ended(3, end_s=NOW_S - 100)]
    mails = group_into_mails(found, CONFIG, any_number, [found[0].run])
    assert [runs[0].job_id for runs in mails] == [3, 2, 1]


def test_a_refused_report_of_days_ago_is_given_up() -> None:
    old = ended(1, end_s=NOW_S - GIVE_UP_S - 1)
    assert reasons(plan(old)) == [TOO_OLD] and reasons(plan(old, failures=[old.run])) == [GIVEN_UP]


@pytest.mark.parametrize(("left", "mails"), [(3, 2), (2, 2), (1, 1)])
def test_a_user_never_gets_more_mails_than_are_left(left: int, mails: int) -> None:
    assert len(group_into_mails([ended(1), ended(2)], CONFIG, lambda user: left)) == mails


def test_a_user_who_got_enough_mail_waits() -> None:
    plan = DuePlan(ready=[ended(1), ended(2, user="bob")])
    leave_for_later(plan, {"ann": 0, "bob": 1}.__getitem__)
    assert plan.delayed == {ENOUGH_MAIL: [run(1)]}
    assert [each.run.user for each in plan.ready] == ["bob"]


def test_an_array_that_is_over_waits_for_the_last_tasks_telemetry() -> None:
    tasks = [ended(number, array_job_id=10, end_s=NOW_S - age_s) for number, age_s in ((11, 900), (12, 60))]
    assert reasons(plan(*tasks, telemetry_s=NOW_S - 61)) == [NO_TELEMETRY]
    assert len(plan(*tasks, telemetry_s=NOW_S - 60).ready) == 2


def test_one_unknown_comment_does_not_hold_an_array_for_days() -> None:
    tasks = [ended(number, array_job_id=10, end_s=NOW_S - 900) for number in (11, 12)]
    unknown = ended(13, array_job_id=10, end_s=NOW_S - 900, refuses_mail=None)
    assert reasons(plan(*tasks, unknown)) == [NO_COMMENT]
    later = [replace(each, run=replace(each.run, end_s=NOW_S - 1800)) for each in (*tasks, unknown)]
    assert reasons(plan(*later)) == [NO_COMMENT, "ready", "ready"]


each_ended = st.builds(
    lambda job_id, user, array: ended(job_id, user=user, array_job_id=array),
    st.integers(1, 40), st.sampled_from(["ann", "bob"]), st.sampled_from([None, 100, 200]),
)  # fmt: skip


def test_one_users_many_jobs_keep_nobody_elses_from_a_run() -> None:
    many = [ended(number, user="mallory", end_s=NOW_S - 900) for number in range(1, 60)]
    late = ended(99, user="ann", end_s=NOW_S - 60)
    first = first_of([*many, late], 10)
    assert late in first and len(first) == 10


def test_an_array_number_of_two_users_is_two_mails() -> None:
    mails = group_into_mails([ended(1, array_job_id=100), ended(2, user="bob", array_job_id=100)], CONFIG, any_number)
    assert [{each.user for each in runs} for runs in mails] == [{"ann"}, {"bob"}]


@given(st.lists(each_ended, unique_by=lambda each: each.run.job_id), st.integers(1, 6))
def test_every_run_is_in_one_mail_of_its_owner(found: list[ReportCandidate], storm: int) -> None:
    made = group_into_mails(found, replace(CONFIG, storm=storm), any_number)
    assert Counter(run for runs in made for run in runs) == Counter(each.run for each in found)
    assert all(run.user == runs[0].user for runs in made for run in runs)
    assert all(number <= storm for number in Counter(runs[0].user for runs in made).values())


def test_metrics_are_computed_for_what_ended_lately_or_has_none() -> None:
    recent = ended(end_s=NOW_S - 60, has_metrics=True)
    old = ended(end_s=NOW_S - RECENT_S - 60, has_metrics=True)
    assert spans_to_summarize([recent, old], NOW_S) == [(NOW_S - 61, NOW_S - 59)]
    assert spans_to_summarize([old], NOW_S) == []
    bare = replace(old, has_metrics=False)
    assert spans_to_summarize([bare], NOW_S) == [(old.run.end_s - 1, old.run.end_s + 1)]


@given(st.lists(st.integers(0, 200_000), max_size=30))
def test_ends_far_apart_are_not_computed_together(ages_s: list[int]) -> None:
    spans = spans_to_summarize([ended(end_s=NOW_S - age_s) for age_s in ages_s], NOW_S)
    ends = sorted(NOW_S - age_s for age_s in ages_s)
    assert all(any(since_s < end_s < until_s for since_s, until_s in spans) for end_s in ends)
    for since_s, until_s in spans:
        inside = [end_s for end_s in ends if since_s < end_s < until_s]
        assert all(later - one <= GAP_S for one, later in pairwise(inside))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def row(job_id: int, **more: Any) -> dict[str, Any]:
    given = {"submit_s": NOW_S - 900, "start_s": NOW_S - 860, "end_s": NOW_S - 60, "elapsed_s": 800, "user": "ann"}
    return {
        "job_id": job_id,
        **given,
        "gpu_count": 1,
        "state": "COMPLETED",
        "refuses_mail": False,
        "name_key": "a-#",
        **more,
    }


def known(*facts: Any, **more: Any) -> ReportCandidate:
    return ReportCandidate(*facts, name_key="a-#", state="COMPLETED", **more)


def write(store: Store, *rows: dict[str, Any], table: str = "jobs") -> None:
    schema = TABLES[table].schema
    whole = [{name: each.get(name) for name in schema.names} for each in rows]
    store.of("test").write(table, pa.Table.from_pylist(whole, schema=schema))


def test_gpu_runs_that_ended_since_then(store: Store) -> None:
    write(
        store,
        row(1), row(2, end_s=NOW_S - 30, state="FAILED"), row(3, end_s=NOW_S - 61), row(4, gpu_count=0),
        row(5, end_s=None, state="RUNNING"), row(6, state="REQUEUED"), row(7, state="RESIZING"),
        row(8, start_s=None, gpu_count=None, state="CANCELLED"), row(9, user=None),
    )  # fmt: skip
    assert ended_since(store.of("test"), NOW_S - 60) == [run(1), run(2, end_s=NOW_S - 30)]
    assert ended_since(store.of("other"), 0) == []


def test_a_requeued_job_is_over_with_its_last_run(store: Store) -> None:
    first, last = row(1, state="NODE_FAIL"), row(1, submit_s=NOW_S - 50, start_s=NOW_S - 40, end_s=NOW_S - 20)
    write(store, first)
    assert [each.is_last for each in look_up(store.of("test"), [run(1)])] == [True]
    write(store, {**last, "end_s": None, "elapsed_s": None})
    assert [each.is_last for each in look_up(store.of("test"), [run(1)])] == [False]
    write(store, last)
    again = run(1, submit_s=NOW_S - 50, end_s=NOW_S - 20)
    assert [each.is_last for each in look_up(store.of("test"), [run(1), again])] == [False, True]


def test_a_job_of_another_user_with_the_same_number_is_no_later_run(store: Store) -> None:
    write(store, row(1), row(1, submit_s=NOW_S - 50, start_s=NOW_S - 40, end_s=NOW_S - 20, user="bob"))
    assert [each.is_last for each in look_up(store.of("test"), [run(1)])] == [True]


def test_an_array_is_open_while_a_task_of_it_runs_or_pends(store: Store) -> None:
    task = row(11, array_job_id=10, array_task_id=0)
    ours = run(11, array_job_id=10)
    write(store, task, row(20, array_job_id=21, end_s=None))
    assert [each.is_array_open for each in look_up(store.of("test"), [ours])] == [False]
    write(store, row(10, array_job_id=10, start_s=None, end_s=None, state="PENDING"))
    assert [each.is_array_open for each in look_up(store.of("test"), [ours])] == [True]


def test_what_the_store_does_not_have_is_no_last_run(store: Store) -> None:
    write(store, row(1))
    write(store, {"job_id": 1, "submit_s": NOW_S - 900, "verdict": "ok"}, table="job_metrics")
    found = look_up(store.of("test"), [run(2), run(1)])
    assert found == [ReportCandidate(run(2), 0, is_last=False), known(run(1), 800, has_metrics=True)]
    assert look_up(store.of("test"), []) == []


def test_a_comment_that_is_not_known_is_not_taken_for_another(store: Store) -> None:
    write(store, row(1, refuses_mail=None), row(2, refuses_mail=None))
    found = look_up(store.of("test"), [run(1)])
    assert found == [known(run(1), 800, refuses_mail=None, has_comments=False)]
    write(store, row(2, refuses_mail=True))
    assert look_up(store.of("test"), [run(1), run(2)]) == [
        known(run(1), 800, refuses_mail=None), known(run(2), 800, refuses_mail=True)
    ]  # fmt: skip


def test_only_comments_of_jobs_that_ended_lately_show_that_accounting_tells_them(store: Store) -> None:
    write(store, row(1, refuses_mail=None), row(2, refuses_mail=True, end_s=NOW_S - 3600))
    assert look_up(store.of("test"), [run(1)], NOW_S - 3600)[0].has_comments
    assert not look_up(store.of("test"), [run(1)], NOW_S - 3599)[0].has_comments


@pytest.mark.parametrize("submit_s", [NOW_S - 900, NOW_S - 10**8])
def test_a_damaged_file_of_metrics_keeps_no_job_from_being_looked_at(store: Store, submit_s: int) -> None:
    write(store, row(1))
    write(store, {"job_id": 9, "submit_s": submit_s, "verdict": "ok"}, table="job_metrics")
    for path in (store.root / "job_metrics").rglob("*.parquet"):
        path.write_bytes(b"damaged")
    assert ended_since(store.of("test"), 0) == [run(1)]
    with pytest.warns(DamageWarning) if submit_s > NOW_S - 10**6 else contextlib.nullcontext():
        assert look_up(store.of("test"), [run(1)]) == [known(run(1), 800)]


def test_when_jobs_ended_last(store: Store) -> None:
    write(store, row(1), row(1, submit_s=NOW_S - 50, end_s=NOW_S - 20), row(2, end_s=None), row(3, gpu_count=0))
    assert known_ends(store.of("test"), {1, 2, 3, 4}) == {1: NOW_S - 20, 3: NOW_S - 60}
