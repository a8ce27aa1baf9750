"""Steps on running jobs: no job is cancelled that works, that is kept, or whose owner was not warned twice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import Phase, event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from profiles import examples

from advisor.watch.actions import (
    LAST_CALL_S,
    MOST_CANCELS,
    USER_PAUSE_S,
    DueStep,
    PastStep,
    Run,
    due_steps,
    run_of,
)
from advisor.watch.decide import RULES, SETTLE_S, WatchState, decide
from advisor.watch.round import GPU_COUNTERS, GPUS, JOBS, Round, WatchFinding, comment_words
from almanac.actions_config import WatchSection
from almanac.units import HOUR_S

NOW_S, SPAN_S = 1_795_464_000, 120
SETTINGS = WatchSection(
    message=("idle", "xid"), operators=("xid",), operators_mail="ops@x", cancel=("idle",),
    partitions=("gpu", "lab"), interactive_partitions=("lab",), cancel_min=90,
)  # fmt: skip
ROW: dict[str, Any] = {
    "job_id": 1, "submit_s": 10, "restarts": 0, "user": "ann", "account": "a", "partition": "gpu", "name": "n",
    "node_count": 1, "gpu_count": 2, "start_s": NOW_S - 9000, "is_interactive": False, "is_shared": False,
    "is_serving": False, "comment": "",
}  # fmt: skip
FINDING = WatchFinding(1, NOW_S - 9000, "idle", NOW_S - 9000, NOW_S, 1.0, {}, "end it")


def a_round(*rows: Mapping[str, Any], at_s: int = NOW_S, unknown: str = "") -> Round:
    return Round(at_s, SPAN_S, pa.Table.from_pylist(list(map(dict, rows)), JOBS), GPUS.empty_table(), unknown)


def warned(*ago_s: int, cancel_s: int = 0) -> dict[Run, list[PastStep]]:
    return {run_of(ROW): [PastStep("warned", "idle", NOW_S - each, cancel_s) for each in ago_s]}


def step_of(
    past: Mapping[Run, list[PastStep]],
    settings: WatchSection = SETTINGS,
    finding: WatchFinding = FINDING,
    unknown: str = "",
    **row: Any,
) -> tuple[str, str]:
    """The step for the job, and why there is none."""
    steps, counts = due_steps(a_round({**ROW, **row}, unknown=unknown), [finding], past, settings)
    return next((each.what for each in steps), ""), next(iter(counts.dropped), "")


TWICE = warned(HOUR_S + LAST_CALL_S, LAST_CALL_S)


def test_a_job_is_cancelled_after_two_warnings_that_left_time_to_answer() -> None:
    assert step_of({}) == ("warn", "")
    assert step_of(warned(HOUR_S)) == ("warn", "")
    assert step_of(warned(HOUR_S - 1)) == ("", "told before, and not yet again")
    assert step_of(TWICE) == ("cancel", "")
    assert step_of(warned(HOUR_S + LAST_CALL_S, LAST_CALL_S - 1))[0] == ""
    assert step_of(warned(HOUR_S, LAST_CALL_S))[0] == ""  # the two are not an hour apart
    assert step_of(warned(9001, LAST_CALL_S))[0] == ""  # the first is about an idle time that ended
    assert step_of(warned(HOUR_S + LAST_CALL_S, LAST_CALL_S, cancel_s=NOW_S + 1))[0] == ""  # promised
    assert step_of({run_of(ROW): [each._replace(what="warn") for each in TWICE[run_of(ROW)]]})[0] == ""  # not taken
    assert step_of({(1, 10, 1): TWICE[run_of(ROW)]}) == ("warn", "")  # of another run
    assert step_of(TWICE, finding=replace(FINDING, since_s=NOW_S - 5399))[0] == ""  # idle for less than 90 minutes


def test_a_warning_says_a_time_that_the_cancel_keeps() -> None:
    first, _ = due_steps(a_round(ROW), [FINDING], {}, SETTINGS)
    assert first[0].cancel_s == NOW_S + HOUR_S + LAST_CALL_S
    second, _ = due_steps(a_round(ROW), [FINDING], warned(HOUR_S, cancel_s=first[0].cancel_s), SETTINGS)
    assert second[0].cancel_s == first[0].cancel_s
    later, _ = due_steps(a_round(ROW), [FINDING], {}, replace(SETTINGS, cancel_min=1440))
    assert later[0].cancel_s == FINDING.since_s + 1440 * 60


SPARED = [
    ({"settings": replace(SETTINGS, cancel=())}, "watch.cancel"),
    ({"settings": replace(SETTINGS, partitions=())}, "watch.partitions"),
    ({"partition": "other"}, "watch.partitions"),
    ({"is_interactive": True}, "watch.interactive_partitions"),
    ({"comment": None}, "comment cannot be read"),
    ({"comment": "almanac:keep"}, "almanac:keep"),
    ({"comment": "x,almanac:keep:3h"}, "almanac:keep"),
    ({"comment": "almanac:serving"}, "almanac:serving"),
    ({"is_serving": True}, "serves"),
    ({"is_serving": None}, "not known if it serves"),
    ({"het_job_id": 1}, "heterogeneous"),
    ({"unknown": "Prometheus did not answer"}, "cannot be trusted"),
    ({"finding": replace(FINDING, is_suspect=True)}, "cannot be trusted"),
    ({"finding": replace(FINDING, coverage=0.899)}, "90%"),
    ({"finding": replace(FINDING, coverage=float("nan"))}, "90%"),
    ({"finding": replace(FINDING, until_s=NOW_S - 1)}, "no samples now"),
    ({"finding": replace(FINDING, until_s=NOW_S + 1)}, "no samples now"),
    ({"finding": replace(FINDING, start_s=NOW_S)}, "another run"),
]


@pytest.mark.parametrize(("given", "why"), SPARED)
def test_a_job_that_is_spared_is_neither_warned_nor_cancelled(given: dict[str, Any], why: str) -> None:
    given = {"settings": replace(given.pop("settings", SETTINGS), message=()), **given}
    for past in ({}, TWICE):
        step, why_not = step_of(past, **given)
        assert not step and why in why_not


def test_what_protects_a_job_ends() -> None:
    assert step_of(TWICE, comment="almanac:keep:1h") == ("cancel", "")
    old = replace(FINDING, since_s=NOW_S - 25 * HOUR_S)
    for word in ("keep:999h", "serving"):
        assert step_of(TWICE, finding=old, comment=f"almanac:{word}") == ("cancel", "")
    assert step_of(TWICE, comment="almanac:keeper") == ("cancel", "")
    assert step_of(TWICE, is_interactive=True, partition="lab") == ("cancel", "")


def test_nothing_acts_by_default() -> None:
    findings = [FINDING, replace(FINDING, kind="xid"), replace(FINDING, kind="hang")]
    steps, counts = due_steps(a_round(ROW), findings, TWICE, WatchSection())
    assert not steps and counts.seen == 3 and sum(counts.dropped.values()) == 3


def test_a_message_is_mailed_once_and_then_at_most_hourly_and_ever_later() -> None:
    settings, times = replace(SETTINGS, cancel=()), list[int]()
    for now_s in range(NOW_S, NOW_S + 24 * HOUR_S, 600):
        past = {run_of(ROW): [PastStep("message", "idle", each) for each in times]}
        steps, _ = due_steps(a_round(ROW, at_s=now_s), [FINDING], past, settings)
        times += [now_s for each in steps if each.what == "message"]
    assert [(each - NOW_S) / HOUR_S for each in times] == [0, 1, 2, 4, 8, 16]


def test_a_round_that_is_older_than_the_last_mail_mails_nothing_twice() -> None:
    past = {run_of(ROW): [PastStep("warned", "idle", NOW_S + 60)]}
    assert not due_steps(a_round(ROW, at_s=NOW_S + 20), [FINDING], past, SETTINGS, now_s=NOW_S + 80)[0]
    assert step_of(past) == ("warn", ""), "a clock that was ahead silences nothing"


def test_the_mails_to_one_reader_are_bundled() -> None:
    rows = [{**ROW, "job_id": number, "user": user} for number, user in ((1, "ann"), (2, "ann"), (3, "bob"))]
    findings = [replace(FINDING, job_id=row["job_id"]) for row in rows]
    just_now = {run_of(rows[0]): [PastStep("message", "idle", NOW_S - USER_PAUSE_S + 1)]}
    steps, counts = due_steps(a_round(*rows), findings, just_now, SETTINGS)
    assert [each.job["job_id"] for each in steps] == [3] and counts.dropped["waits for its reader's next mail"] == 1
    steps, _ = due_steps(a_round(*rows), findings, {}, SETTINGS)
    assert [each.job["job_id"] for each in steps] == [1, 2, 3]


def test_owners_and_operators_are_told_apart() -> None:
    found = replace(FINDING, kind="xid")
    steps, _ = due_steps(a_round(ROW), [found], {}, SETTINGS)
    assert [each.what for each in steps] == ["message", "operators"]
    steps, counts = due_steps(a_round(ROW), [found], {}, SETTINGS, lambda job, step: "the user wants none")
    assert [each.what for each in steps] == ["operators"] and counts.dropped == {"the user wants none": 1}
    past = {run_of(ROW): [PastStep("message", "xid", NOW_S - 700), PastStep("operators", "xid", NOW_S - HOUR_S)]}
    steps, _ = due_steps(a_round(ROW), [found], past, SETTINGS)
    assert [each.what for each in steps] == ["operators"]


def test_an_hour_cancels_few_jobs_the_longest_idle_first() -> None:
    rows = [{**ROW, "job_id": number, "user": f"u{number}"} for number in range(30)]
    findings = [replace(FINDING, job_id=n, since_s=FINDING.since_s - n) for n in range(30)]
    past = {run_of(row): TWICE[run_of(ROW)] for row in rows}
    steps, counts = due_steps(a_round(*rows), findings, past, SETTINGS)
    assert [each.job["job_id"] for each in steps] == [*range(29, 29 - MOST_CANCELS, -1)]
    assert counts.dropped == {"waits (20 cancels an hour)": 10}
    cancels = {run_of(each.job): [PastStep("cancel", "idle", NOW_S)] for each in steps}
    ended = {
        run: own for run, own in cancels.items() if run[0] > 15
    }  # the others outlived it, and are not counted twice
    for later_s, fresh in ((HOUR_S - 1, []), (HOUR_S, [*range(9, -1, -1)])):
        live = a_round(*(row for row in rows if row["job_id"] <= 15), at_s=NOW_S + later_s)
        found = [replace(each, until_s=NOW_S + later_s) for each in findings if each.job_id <= 15]
        again = {run: [*past[run], *cancels.get(run, ())] for run in past if run not in ended}
        steps, _ = due_steps(live, found, again | ended, SETTINGS)
        assert [each.job["job_id"] for each in steps] == [*range(15, 9, -1), *fresh]


@dataclass
class LiveJob:
    """A job of the machine, on two GPUs. seen: each round's time, and what the counters show."""

    row: dict[str, Any]
    seen: list[tuple[int, str]] = field(default_factory=list)

    def gpus(self, place: int, now_s: int, state: str) -> list[dict[str, Any]]:
        """The rows of GPUS of a round. A frozen exporter repeats the power of the round before."""
        is_own = self.row["start_s"] + SETTLE_S <= now_s - SPAN_S
        self.seen.append((now_s, state if is_own else "hole"))
        fresh = [time_s for time_s, other in self.seen if other not in ("frozen", "hole")]
        values = {"gpu_util_pct": 90.0 * (state == "busy"), "power_w": float(fresh[-1]) if fresh else 1.0}
        count = {"hole": 0, "half": 1}.get(state, 2)
        whole = {**dict.fromkeys(GPU_COUNTERS, math.nan), **values, "job": place, "host": "n1", "sample_count": 12.0}
        return [{**whole, "gpu": str(number)} for number in range(count)]


class WatchMachine(RuleBasedStateMachine):
    """Jobs that idle, work, and vanish from the counters, for days; mail that fails; owners who answer."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.is_up, self.is_killed = NOW_S, True, False
        kinds = [("gpu", False), ("gpu", True), ("other", False), ("lab", True), ("gpu", False)]
        self.jobs = {n: self.start(n, *kind) for n, kind in enumerate(kinds, 1)}
        self.past: dict[Run, list[PastStep]] = {}
        self.mails: dict[Run, list[tuple[int, int]]] = {}
        self.state: WatchState | None = None

    def start(self, number: int, partition: str, is_interactive: bool, restarts: int = 0) -> LiveJob:
        more = {"partition": partition, "is_interactive": is_interactive, "restarts": restarts, "start_s": self.now_s}
        return LiveJob({**ROW, "job_id": number, "user": f"u{number % 3}", **more})

    @rule(
        rounds=st.integers(20, 60),
        states=st.lists(st.sampled_from(["idle"] * 12 + ["busy", "hole", "half", "frozen"]), min_size=5, max_size=5),
        holes=st.lists(st.integers(0, 59), max_size=8),
    )
    def watch(self, rounds: int, states: list[str], holes: list[int]) -> None:
        for number in range(rounds):
            self.now_s += SPAN_S
            now = [each if number not in holes else "hole" for each in states]
            rows = [
                row for place, (job, each) in enumerate(zip(self.jobs.values(), now, strict=True))
                for row in job.gpus(place, self.now_s, each)
            ]  # fmt: skip
            jobs = a_round(*(job.row for job in self.jobs.values()), at_s=self.now_s)
            round_ = replace(jobs, gpus=pa.Table.from_pylist(rows, GPUS))
            self.state, found = decide(self.state, round_)
            for each in due_steps(round_, found, self.past, SETTINGS)[0]:
                self.take(each)

    def take(self, step: DueStep) -> None:
        run, kind = run_of(step.job), step.finding.kind
        if step.what == "cancel":
            self.require_fair(step)
            event("cancelled")
            restarts = step.job["restarts"] + 1
            number = step.job["job_id"]
            self.jobs[number] = self.start(number, step.job["partition"], step.job["is_interactive"], restarts)
            return
        lines = self.past.setdefault(run, [])
        lines.append(PastStep(step.what, kind, self.now_s, step.cancel_s))
        if self.is_up and step.what == "warn":
            self.mails.setdefault(run, []).append((self.now_s, step.cancel_s))
            if not self.is_killed:
                lines.append(PastStep("warned", kind, self.now_s, step.cancel_s))

    def require_fair(self, step: DueStep) -> None:
        """From what the counters showed and which mails arrived, without the rules of the watch."""
        job, row = self.jobs[step.job["job_id"]], step.job
        assert row["partition"] in ("gpu", "lab") and (not row["is_interactive"] or row["partition"] == "lab")
        assert job.seen[-1] in ((self.now_s, "idle"), (self.now_s, "frozen"))
        assert {*[state for _, state in job.seen if state != "hole"][-5:]} != {"frozen"}
        count, first_s = 0.0, self.now_s
        for time_s, state in reversed(job.seen):
            if state == "busy" or first_s - SPAN_S - time_s > RULES.silence_s:
                break
            count += state not in ("half", "hole")
            first_s = time_s if state in ("idle", "frozen") else first_s
        since_s = first_s - SPAN_S
        assert self.now_s - since_s >= 90 * 60
        assert count * SPAN_S >= 0.9 * (self.now_s - since_s)
        assert self.now_s >= since_s + comment_words(row["comment"]).keep_s
        mails = [each for each in self.mails.get(run_of(row), []) if each[0] >= since_s]
        assert len(mails) >= 2 and mails[-1][0] - mails[0][0] >= HOUR_S
        assert self.now_s >= mails[-1][0] + LAST_CALL_S and all(self.now_s >= cancel_s for _, cancel_s in mails)

    @rule(number=st.integers(1, 5), word=st.sampled_from(["", "almanac:keep", "almanac:keep:2h", "almanac:serving"]))
    def answer(self, number: int, word: str) -> None:
        self.jobs[number].row["comment"] = word

    @rule(number=st.integers(1, 5))
    def requeue(self, number: int) -> None:
        row = self.jobs[number].row
        self.jobs[number] = self.start(number, row["partition"], row["is_interactive"], row["restarts"] + 1)

    @rule(is_up=st.sampled_from([True] * 5 + [False]), is_killed=st.sampled_from([False] * 5 + [True]))
    def disturb(self, is_up: bool, is_killed: bool) -> None:
        """Stop the mail server, or kill almanac between a mail and its line."""
        self.is_up, self.is_killed = is_up, is_killed

    @rule(rounds=st.integers(1, 30))
    def sleep(self, rounds: int) -> None:
        """Run no round for a while."""
        self.now_s += rounds * SPAN_S


TestWatchMachine = WatchMachine.TestCase
TestWatchMachine.settings = examples(0.5, deadline=None, phases=[Phase.reuse, Phase.generate])
