"""Changes of the site factors of pending jobs, their log lines, and their outcomes, on a made-up queue."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.decisions.priority import check_ageing, decide_priority, site_factor
from advisor.duration.overrun import Overrun
from almanac.config import Priority
from almanac.errors import CommandError, NotAllowedError, StoreError
from almanac.records import Counts, PriorityAdvice, Request
from almanac.units import DAY_S
from slurm_hooks.priority.action_log import KEEP_DAYS, ActionLog, LoggedAction
from slurm_hooks.priority.reprioritize import (
    Actor,
    ReprioritizeOutcome,
    SiteFactorChange,
    plan_clearing,
    plan_site_factors,
)
from telemetry.slurm.backend import FactorChange, Node, PendingJob, SiteFactor

NOW_S = 1_795_256_100


def pending(number: int, **values: object) -> PendingJob:
    job = PendingJob(number, str(number), NOW_S - 600, "ann", f"job-{number}", gpu_count=1)
    return replace(job, **values)  # type: ignore[arg-type]


@dataclass
class Queue:
    """A Slurm that holds pending jobs and their factors, and refuses or ignores what it is told to."""

    jobs: list[PendingJob]
    factors: dict[int, SiteFactor] = field(default_factory=dict)
    refuses: dict[int, str] = field(default_factory=dict)
    ignores: set[int] = field(default_factory=set)
    starts: set[int] = field(default_factory=set)
    commands: list[list[tuple[str, int]]] = field(default_factory=list)
    fails_after: int = 10**9

    def __post_init__(self) -> None:
        for job in self.jobs:
            if not job.is_held:
                self.factors.setdefault(job.job_id, SiteFactor(0))

    def cluster(self) -> str:
        return "lab"

    def configuration(self) -> str:
        return "ClusterName = lab\n"

    def nodes(self) -> list[Node]:
        return []

    def pending(self, counts: Counts, job_ids: Collection[int] = ()) -> list[PendingJob]:
        return list(self.jobs)

    def site_factors(self) -> dict[int, SiteFactor]:
        return dict(self.factors)

    def set_site_factors(self, changes: Sequence[FactorChange]) -> list[str]:
        if len(self.commands) >= self.fails_after:
            raise CommandError("Unable to contact slurm controller", "check slurmctld")
        self.commands.append([(change.job.address, change.site_factor) for change in changes])
        said = []
        for change in changes:
            number = change.job.job_id
            if number in self.starts:
                self.factors.pop(number)
                said.append(f"Job is not pending for job {number}")
            elif number in self.refuses:
                said.append(f"{self.refuses[number]} for job {number}")
            elif number not in self.ignores:
                self.factors[number] = replace(self.factors[number], value=change.site_factor)
        return said

    @property
    def site_factors_now(self) -> dict[int, int]:
        return {number: factor.value for number, factor in self.factors.items()}


def predicted(**by_name: int | None) -> Callable[[Sequence[Request]], list[PriorityAdvice | None]]:
    """Predicts by the job's name; 500 for any other."""

    def predict(requests: Sequence[Request]) -> list[PriorityAdvice | None]:
        found = [by_name.get(request.job_name.replace("-", "_"), 500) for request in requests]
        return [None if each is None else PriorityAdvice(each, 3600.0, None, None) for each in found]

    return predict


@dataclass
class Site:
    """One run after another, as the command does it."""

    queue: Queue
    log: ActionLog
    predict: Callable[[Sequence[Request]], list[PriorityAdvice | None]] = field(default_factory=lambda: predicted())
    published: dict[int, set[int]] = field(default_factory=dict)
    now_s: int = NOW_S
    batch: int = 500
    counts: Counts = field(default_factory=Counts)
    agreed: list[SiteFactorChange] = field(default_factory=list)

    def plan(self, is_clearing: bool = False) -> list[SiteFactorChange]:
        self.counts = Counts()
        known = self.log.newest("lab", self.now_s)
        if is_clearing:
            return plan_clearing(self.queue, known, self.counts)
        published = self.published
        changes, self.agreed = plan_site_factors(
            self.queue,
            known,
            self.predict,
            lambda job, value: value in published.get(job.job_id, set()),
            self.counts,
        )
        assert self.counts.seen == self.counts.kept + self.counts.dropped.total()
        return changes

    def run(self, is_clearing: bool = False) -> ReprioritizeOutcome:
        changes = self.plan(is_clearing)
        actor = Actor(self.queue, self.log, "lab", "20261121T000000Z", lambda: self.now_s, self.batch)
        if not is_clearing:
            actor.note(self.agreed)
        return actor.apply(changes)

    def lines(self) -> list[dict[str, object]]:
        paths = sorted(self.log.folder.glob("*"))
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> ActionLog:
    return ActionLog(tmp_path / "actions")


def test_each_pending_gpu_job_gets_its_term_and_a_second_run_changes_nothing(log: ActionLog) -> None:
    site = Site(Queue([pending(1), pending(2), pending(3, gpu_count=0)]), log, predicted(job_1=900, job_2=0))
    assert site.run() == ReprioritizeOutcome(taken=1)
    assert site.queue.site_factors_now == {1: 900, 2: 0, 3: 0}
    assert site.counts.dropped == {"asks for no GPU": 1, "has its site factor already": 1}
    assert site.run() == ReprioritizeOutcome()
    assert site.queue.commands == [[("1", 900)]]


def test_a_newer_prediction_replaces_our_older_one(log: ActionLog) -> None:
    site = Site(Queue([pending(1)]), log, predicted(job_1=900))
    site.run()
    site.predict, site.now_s = predicted(job_1=20), NOW_S + DAY_S
    assert site.run() == ReprioritizeOutcome(taken=1)
    assert site.queue.site_factors_now == {1: 20}
    assert [(line["old"], line["new"]) for line in site.lines()] == [(0, 900), (900, 20)]


def test_somebody_elses_factor_is_left_alone_and_a_published_one_is_ours(log: ActionLog) -> None:
    jobs = [pending(1), pending(2), pending(3), pending(4)]
    queue = Queue(jobs, {1: SiteFactor(77), 2: SiteFactor(77), 3: SiteFactor(-5), 4: SiteFactor(0)})
    site = Site(queue, log, published={2: {60, 77}})
    assert site.run() == ReprioritizeOutcome(taken=2)
    assert queue.site_factors_now == {1: 77, 2: 500, 3: -5, 4: 500}
    assert site.counts.dropped["has a site factor that almanac did not set"] == 2
    queue.factors[4] = SiteFactor(123)
    assert site.run() == ReprioritizeOutcome(), "somebody took it over"


@pytest.mark.parametrize(
    ("job", "factor", "reason"),
    [
        (pending(1, is_held=True), None, "held"),
        (pending(1), None, "not ranked by Slurm yet"),
        (pending(1), SiteFactor(0, is_explicit=True), "has a priority that somebody set"),
        (pending(1, name="unknown"), SiteFactor(0), "nothing is known"),
    ],
)
def test_jobs_that_get_no_site_factor(log: ActionLog, job: PendingJob, factor: SiteFactor | None, reason: str) -> None:
    queue = Queue([job])
    queue.factors = {} if factor is None else {1: factor}
    site = Site(queue, log, predicted(unknown=None))
    assert site.run() == ReprioritizeOutcome()
    (why,) = site.counts.dropped
    assert why.startswith(reason)
    assert queue.commands == []
    assert not log.folder.exists(), "nothing was done, nothing is written"


def test_only_jobs_that_can_be_changed_are_predicted(log: ActionLog) -> None:
    asked: list[str] = []

    def predict(requests: Sequence[Request]) -> list[PriorityAdvice | None]:
        asked.extend(request.job_name for request in requests)
        return [None] * len(requests)

    jobs = [pending(1), pending(2, gpu_count=0), pending(3, is_held=True)]
    Site(Queue(jobs), log, predict).run()
    assert asked == ["job-1"]


def test_changes_are_on_disk_before_slurm_hears_of_them(log: ActionLog) -> None:
    site = Site(Queue([pending(number) for number in range(1, 6)]), log, batch=2)
    seen: list[int] = []
    tell = site.queue.set_site_factors

    def listening(changes: Sequence[FactorChange]) -> list[str]:
        seen.append(len(site.lines()))
        return tell(changes)

    site.queue.set_site_factors = listening  # type: ignore[method-assign]
    assert site.run() == ReprioritizeOutcome(taken=5)
    assert seen == [2, 4, 5]
    assert [len(batch) for batch in site.queue.commands] == [2, 2, 1]
    first = site.lines()[0]
    assert (first["what"], first["job_id"], first["old"], first["new"]) == ("set", 1, 0, 500)
    assert (first["model"], first["reason"], first["cluster"]) == ("20261121T000000Z", "GPU-time 1 h", "lab")
    assert "ann" not in json.dumps(site.lines()), "no user and no job name is written down"
    (path,) = log.folder.iterdir()
    assert path.name == "reprioritize-2026-11-21.jsonl"
    assert path.stat().st_mode & 0o777 == 0o640


def test_jobs_that_start_meanwhile_or_are_refused_do_not_stop_the_others(log: ActionLog) -> None:
    queue = Queue([pending(number) for number in range(1, 5)], starts={1}, refuses={3: "Invalid job state"})
    site = Site(queue, log)
    assert site.run() == ReprioritizeOutcome(
        taken=2, gone=1, failed=1, said=("Job is not pending for job 1", "Invalid job state for job 3")
    )
    queue.refuses.clear()
    queue.jobs = [job for job in queue.jobs if job.job_id != 1]
    assert site.run() == ReprioritizeOutcome(taken=1), "what was refused is tried again"


def test_what_slurm_takes_and_does_not_count_is_told_once(log: ActionLog) -> None:
    site = Site(Queue([pending(1), pending(2)], ignores={1}), log)
    assert site.run() == ReprioritizeOutcome(taken=1, ignored=1)
    assert site.run() == ReprioritizeOutcome()
    assert site.counts.dropped["Slurm took this site factor before and did not count it"] == 1
    assert len(site.queue.commands) == 1
    site.predict = predicted(job_1=10)
    assert site.run().ignored == 1, "another site factor is another matter"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Access/permission denied", "Access/permission denied"),  # of one's own jobs
        ("Invalid user id", "Invalid user id"),  # of others' jobs
        ("Job/step already completing or completed", "Invalid user id"),
    ],
)
def test_a_user_without_the_right_is_told_so(log: ActionLog, first: str, second: str) -> None:
    site = Site(Queue([pending(1), pending(2)], refuses={1: first, 2: second}), log)
    with pytest.raises(NotAllowedError, match=f"refused 2 changes: {second}") as caught:
        site.run()
    assert "Operator" in caught.value.hint
    site.queue.refuses.clear()
    assert site.run() == ReprioritizeOutcome(taken=2), "with the right, it goes on"


def test_slurm_that_goes_away_in_between_is_said_and_the_next_run_finishes(log: ActionLog) -> None:
    queue = Queue([pending(number) for number in range(1, 6)], fails_after=1)
    site = Site(queue, log, batch=2)
    with pytest.raises(CommandError, match="after 2 of 5 changes: Unable to contact"):
        site.run()
    assert queue.site_factors_now == {1: 500, 2: 500, 3: 0, 4: 0, 5: 0}
    queue.fails_after = 10**9
    assert site.run() == ReprioritizeOutcome(taken=3)


def test_a_run_that_was_killed_between_writing_and_telling_leaves_no_job_behind(log: ActionLog) -> None:
    site = Site(Queue([pending(1)]), log, predicted(job_1=900))
    site.run()
    site.predict, site.queue.fails_after = predicted(job_1=20), 0
    with pytest.raises(CommandError):
        site.run()
    assert site.queue.site_factors_now == {1: 900}
    site.queue.fails_after = 10**9
    assert site.run() == ReprioritizeOutcome(taken=1), "900 is still known as ours"


def test_nothing_is_told_that_cannot_be_written_down(tmp_path: Path) -> None:
    (tmp_path / "actions").write_text("no folder")
    site = Site(Queue([pending(1)]), ActionLog(tmp_path / "actions"))
    with pytest.raises(StoreError, match="cannot be written"):
        site.run()
    assert site.queue.commands == []


def test_clear_undoes_what_is_still_as_we_set_it(log: ActionLog) -> None:
    queue = Queue([pending(number) for number in range(1, 6)], {4: SiteFactor(77)})
    site = Site(queue, log)
    site.run()
    queue.factors[2] = SiteFactor(499)
    queue.jobs[2] = replace(queue.jobs[2], is_held=True)
    queue.factors.pop(3)
    assert site.run(is_clearing=True) == ReprioritizeOutcome(taken=2)
    assert queue.site_factors_now == {1: 0, 2: 499, 4: 77, 5: 0}
    assert [line["what"] for line in site.lines()[-2:]] == ["clear", "clear"]
    assert site.run(is_clearing=True) == ReprioritizeOutcome()


def test_a_task_that_got_a_record_of_its_own_has_the_factor_of_its_array(log: ActionLog) -> None:
    site = Site(Queue([pending(10, array_job_id=10)]), log)
    site.run()
    site.queue.jobs.append(pending(14, address="10_3", array_job_id=10, array_task_id=3, submit_s=NOW_S, restarts=1))
    site.queue.factors[14] = SiteFactor(500)
    site.predict = lambda requests: [PriorityAdvice(40, 1.0, None, None)] * len(requests)
    assert site.run() == ReprioritizeOutcome(taken=2)
    assert site.queue.commands[-1] == [("10", 40), ("10_3", 40)]


def test_a_number_that_came_again_is_another_job(log: ActionLog) -> None:
    """An operator gave the new job 500, which the one before it of that number had from us."""
    site = Site(Queue([pending(1), pending(7, array_job_id=7)]), log)
    site.run()
    later = {"submit_s": NOW_S + 30 * DAY_S}
    jobs = [pending(1, **later), pending(8, array_job_id=7, array_task_id=1, **later)]
    site.queue = Queue(jobs, {1: SiteFactor(500), 8: SiteFactor(500)})
    site.predict = lambda requests: [PriorityAdvice(40, 1.0, None, None)] * len(requests)
    assert site.run() == ReprioritizeOutcome()
    assert site.counts.dropped["has a site factor that almanac did not set"] == 2
    assert site.run(is_clearing=True) == ReprioritizeOutcome()
    site.queue.jobs = [replace(job, restarts=1) for job in jobs]
    assert site.run() == ReprioritizeOutcome(taken=2), "requeued: the record speaks of them"


def test_what_a_job_was_believed_is_noted_once_where_it_has_its_term_already(log: ActionLog) -> None:
    site = Site(Queue([pending(1)], {1: SiteFactor(500)}), log)
    site.plan()
    assert not log.folder.exists(), "a dry run"
    site.run()
    site.run()
    (line,) = site.lines()
    assert (line["what"], line["old"], line["new"], line["gpu_time_s"]) == ("agreed", 500, 500, 3600.0)
    assert site.queue.commands == []
    assert site.run(is_clearing=True) == ReprioritizeOutcome(), "it was not set by us"
    site.queue.jobs = [pending(1, submit_s=NOW_S, restarts=1)]
    site.run()
    assert [line["submit_s"] for line in site.lines()] == [NOW_S - 600, NOW_S], "and once more when it is requeued"


def test_the_record_survives_lines_cut_off_by_a_crash_and_lines_of_others(log: ActionLog) -> None:
    action = LoggedAction("set", NOW_S, "lab", 1, "1", NOW_S, 0, 500, "x")
    log.append([action, replace(action, cluster="other", job_id=2)], NOW_S)
    (path,) = log.folder.iterdir()
    with path.open("ab") as file:
        file.write(b'["no object"]\n{"what": "set", "time_s": "x"}\n\xff\n{"what": "set", "time')
    log.append([replace(action, job_id=3)], NOW_S + DAY_S)
    log.append([replace(action, job_id=4)], NOW_S)
    assert sorted(log.newest("lab", NOW_S)) == [1, 3, 4]
    assert log.newest("lab", NOW_S)[1].new == 500
    assert log.newest("lab", NOW_S + (KEEP_DAYS + 2) * DAY_S) == {}
    log.append([replace(action, new=700)], NOW_S + 30 * DAY_S)
    assert log.newest("lab", NOW_S)[1].new == 500, "a clock that was ahead wrote the line before that of today"
    assert log.newest("lab", NOW_S + 30 * DAY_S)[1].new == 700


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
        PRIORITY, relief_users=("relieved",), relief_points=relief_points, short_points=short_points,
        short_gpu_time_s=600.0,
    )  # fmt: skip
    assert check_ageing(f"PriorityMaxAge={MAX_AGE_DAYS}-0\nPriorityWeightAge={WEIGHT_AGE}", priority).fits
    options = relief_points + short_points
    apart_s = SPAN_S + options / priority.points_per_e * priority.tau_hours * 3600 + later_s
    max_age_s = MAX_AGE_DAYS * DAY_S
    for *both, share in runs:
        ranks = []
        since_s = apart_s + share * (max_age_s - apart_s)
        for (gpu_time_s, cautious_s, overran, user), age_s in zip(both, (since_s, since_s - apart_s), strict=True):
            found = decide_priority(gpu_time_s, cautious_s, overran, user, (), priority).site_factor
            assert 0 <= found <= site_factor(0, priority) + options
            ranks.append(found + WEIGHT_AGE * age_s / max_age_s)
        assert ranks[0] >= ranks[1] - 1, "site factors are whole numbers"


def test_options_need_an_age_that_grows_longer() -> None:
    """12 days hold ln(8640000 / 60) = 11.9 of 24 h each; 2,000 more by options are 2 days more."""
    fits = "PriorityMaxAge=12-0\nPriorityWeightAge=12000"
    assert check_ageing(fits, PRIORITY).fits
    short = replace(PRIORITY, short_points=1500, relief_points=500)
    assert check_ageing(fits, short).lines == ("PriorityMaxAge=14-0", "PriorityWeightAge=14000")


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=30))
def test_whatever_sequence_of_predictions_a_job_keeps_a_site_factor_within_the_span(predicted_s: list[float]) -> None:
    queue = Queue([pending(1)])
    lines: dict[int, LoggedAction] = {}
    for gpu_time_s in predicted_s:
        advice = decide_priority(gpu_time_s, gpu_time_s, Overrun(), "ann", (), PRIORITY)
        predict = lambda requests, advice=advice: [advice]  # noqa: E731
        for change in plan_site_factors(queue, lines, predict, lambda *_: False, Counts())[0]:
            queue.set_site_factors([FactorChange(change.job, change.new)])
            lines[1] = LoggedAction("set", NOW_S, "lab", 1, "1", NOW_S - 600, change.old, change.new, "")
        assert queue.site_factors_now[1] == site_factor(gpu_time_s, PRIORITY)
        assert 0 <= queue.site_factors_now[1] <= site_factor(0, PRIORITY)


@dataclass
class Changing(Queue):
    """at: the look before which somebody changes job 2. looks: so far."""

    at: int = 0
    looks: int = 0
    change: Callable[[Queue], None] = lambda queue: None

    def _look(self) -> None:
        self.looks += 1
        if self.looks == self.at:
            self.change(self)

    def pending(self, counts: Counts, job_ids: Collection[int] = ()) -> list[PendingJob]:
        self._look()
        return [job for job in super().pending(counts) if not job_ids or job.job_id in job_ids]

    def site_factors(self) -> dict[int, SiteFactor]:
        self._look()
        return super().site_factors()


def _with_job(queue: Queue, **values: object) -> None:
    queue.jobs[1] = replace(queue.jobs[1], **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(("batch", "last"), [(1, 5), (500, 3)])
@pytest.mark.parametrize(
    ("change", "is_in_sprio"),
    [
        (lambda queue: queue.factors.update({2: SiteFactor(77)}), True),
        (lambda queue: queue.factors.update({2: SiteFactor(0, is_explicit=True)}), True),
        (lambda queue: queue.factors.pop(2), True),
        (lambda queue: (queue.factors.pop(2), queue.jobs.pop(1)), True),
        (lambda queue: _with_job(queue, submit_s=NOW_S), False),
        (lambda queue: _with_job(queue, time_limit_s=60), False),
        (lambda queue: _with_job(queue, partition="other"), False),
    ],
)
def test_no_factor_is_set_over_a_change_of_the_job(
    tmp_path: Path, change: Callable[[Queue], None], is_in_sprio: bool, batch: int, last: int
) -> None:
    """last: number of the last look at the queue before job 2 is told; one at its factor follows."""
    for at in range(3, last + 1 + is_in_sprio):
        queue = Changing([pending(1), pending(2), pending(3)], at=at, change=change)
        site = Site(queue, ActionLog(tmp_path / f"{at}"), batch=batch)
        site.run()
        told = [number for command in queue.commands for number, _ in command]
        assert told == ["1", "3"], at
        assert [line["job_id"] for line in site.lines() if line["what"] == "dropped"] == [2]


def test_a_dropped_order_is_logged_and_is_not_ours(log: ActionLog) -> None:
    queue = Changing([pending(1), pending(2)], at=3, change=lambda queue: queue.factors.update({2: SiteFactor(500)}))
    site = Site(queue, log)
    assert site.run() == ReprioritizeOutcome(taken=1, gone=1)
    assert [(line["what"], line["job_id"]) for line in site.lines()] == [("set", 1), ("set", 2), ("dropped", 2)]
    assert site.lines()[-1]["reason"] == "changed meanwhile: site factor"
    assert site.run(is_clearing=True) == ReprioritizeOutcome(taken=1)
    assert queue.site_factors_now == {1: 0, 2: 500}, "somebody else set it to the same number"
