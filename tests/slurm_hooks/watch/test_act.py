"""Steps on running jobs as the engine carries them out: the record first, a second look, and nothing else."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from job_slurm import NOW_S, FakeSlurm, Job, Killed

from advisor.watch.actions import MOST_CANCELS, DueStep
from advisor.watch.round import GPUS, JOBS, Round, WatchFinding
from almanac.actions_config import WatchSection
from almanac.errors import AlmanacError, ServerError, StoreError
from slurm_hooks.jobs.engine import JobOutcome
from slurm_hooks.jobs.log import JobLog
from slurm_hooks.watch.act import WatchEngine, plan_steps

START_S = NOW_S - 1800
SETTINGS = WatchSection(
    message=("idle",), operators=("xid",), operators_mail="ops@x", cancel=("idle",), partitions=("gpu",), cancel_min=90
)


def running(number: int, **more: Any) -> Job:
    given = {"state": "RUNNING", "comment": "", "start_s": START_S, "nodes": "n1", "reason": "None"}
    return Job(number, **{**given, **more})


@dataclass
class Watched:
    """Rounds of the watch on jobs that idle from their start on, each two minutes after the last.

    finds: changes the findings of the second look. mails: what each mail was about, by reader.
    """

    slurm: FakeSlurm
    folder: Path
    mails: list[tuple[str, str, list[int]]] = field(default_factory=list)
    finds: Callable[[WatchFinding], WatchFinding | None] = lambda finding: finding
    fault: AlmanacError | None = None
    kind: Any = "idle"
    serves: bool | None = False
    serves_again: bool | None = False

    @property
    def log(self) -> JobLog:
        return JobLog(self.folder / "actions", "watch")

    @property
    def lines(self) -> list[tuple[str, int]]:
        return [(line.what, line.job_id) for line in self.log.read("lab", int(self.slurm.now_s))]

    def round(self) -> tuple[Round, list[WatchFinding]]:
        now_s = int(self.slurm.now_s)
        rows = [
            {"job_id": job.job_id, "submit_s": job.submit_s, "restarts": job.restarts, "user": job.user, "name": "n",
             "account": "a", "partition": job.partition, "node_count": 1, "gpu_count": 1, "start_s": job.start_s,
             "is_interactive": False, "is_shared": False, "is_serving": self.serves, "comment": job.comment}
            for job in self.slurm.jobs.values() if job.state == "RUNNING"
        ]  # fmt: skip
        found = [
            WatchFinding(row["job_id"], row["start_s"], self.kind, row["start_s"], now_s, 1.0, {}, "end it")
            for row in rows
        ]
        return Round(now_s, 120, pa.Table.from_pylist(rows, JOBS), GPUS.empty_table()), found

    def look_again(self) -> tuple[Round, Iterable[WatchFinding]]:
        self.serves, before = self.serves_again, self.serves
        round_, findings = self.round()
        self.serves = before
        return round_, [seen for each in findings if (seen := self.finds(each))]

    def hand_over(self, reader: str, steps: Sequence[DueStep]) -> None:
        self.slurm.before(f"mail to {reader}")
        if self.fault:
            raise self.fault
        self.mails.append((reader, steps[0].what, [each.job["job_id"] for each in steps]))

    def __call__(self, rounds: int = 1) -> JobOutcome:
        """The outcome of the last of so many rounds."""
        for _ in range(rounds):
            round_, findings = self.round()
            lines = self.log.read("lab", round_.at_s, 4)
            plan = plan_steps(round_, findings, lines, SETTINGS, lambda job, step: "", int(self.slurm.now_s))
            engine = WatchEngine(
                commands=self.slurm, log=self.log, cluster="lab", clock=self.slurm.clock, sleep=self.slurm.sleep,
                hand_over=self.hand_over, look_again=self.look_again, settings=SETTINGS,
            )  # type: ignore[arg-type]  # fmt: skip
            outcome = engine.apply(plan)
            self.slurm.now_s = round_.at_s + 120
        return outcome


def watched(folder: Path, *jobs: Job) -> Watched:
    return Watched(FakeSlurm({job.job_id: job for job in jobs}), folder)


def almost_cancelled(folder: Path, *jobs: Job) -> Watched:
    """Two warnings were mailed, and the next round cancels."""
    site = watched(folder, *(jobs or (running(11),)))
    site(38)
    assert [what for _, what, _ in site.mails] == ["warn", "warn"] and not site.slurm.sent
    return site


def test_an_idle_job_is_warned_twice_cancelled_and_its_owner_told(tmp_path: Path) -> None:
    site = almost_cancelled(tmp_path, running(11), running(12, comment="almanac:keep"), running(13, partition="cpu"))
    written = list[list[tuple[str, int]]]()
    site.slurm.before = lambda command: written.append(site.lines) if "scancel" in command else None
    outcome = site()
    assert (outcome.cancelled, outcome.told, outcome.failed) == (1, 1, ())
    assert site.slurm.sent == ["scancel --state=RUNNING --user=ann 11"]
    assert written[0][-1] == ("cancel", 11)
    assert site.mails[-1] == ("ann", "cancel", [11])
    assert [what for what, number in site.lines if number == 11] == ["warn", "warned"] * 2 + ["cancel", "cancelled"]
    assert {what for what, number in site.lines if number != 11} == {"message"}
    assert {job.job_id: job.state for job in site.slurm.jobs.values()} == {
        11: "CANCELLED",
        12: "RUNNING",
        13: "RUNNING",
    }
    site(60)
    assert len(site.slurm.sent) == 1


def test_findings_for_operators_reach_them_only(tmp_path: Path) -> None:
    site = watched(tmp_path, running(11), running(12, user="bob"))
    site.kind = "xid"
    assert site(30).told == 0
    assert site.mails == [("", "operators", [11, 12])]
    assert site(1).told == 2


LATE: list[dict[str, Any]] = [
    {"state": "COMPLETED"}, {"state": "SUSPENDED"}, {"restarts": 1}, {"submit_s": NOW_S}, {"start_s": NOW_S},
    {"user": "eve"}, {"partition": "cpu"}, {"comment": "almanac:keep"}, {"more": {"het_job_id": 11}},
]  # fmt: skip


@pytest.mark.parametrize("change", LATE, ids=str)
@pytest.mark.parametrize("look", [1, 2])
@pytest.mark.parametrize("is_old", [False, True])
def test_a_job_that_changes_right_before_the_cancel_lives(
    tmp_path: Path, change: dict[str, Any], look: int, is_old: bool
) -> None:
    """look: the query of Slurm before which it changes."""
    site = almost_cancelled(tmp_path)
    site.slurm.is_old = is_old
    looks = list[str]()

    def before(command: str) -> None:
        looks.extend([command] if command.startswith("squeue") else [])
        if len(looks) == look:
            vars(site.slurm.jobs[11]).update(change)

    site.slurm.before = before
    outcome = site()
    assert not site.slurm.sent and not outcome.cancelled and outcome.changed + outcome.started == 1
    assert [what for what, _ in site.lines[4:]] == ([] if look == 1 else ["cancel", "dropped"])


SEEN: dict[str, Callable[[WatchFinding], WatchFinding | None]] = {
    "works": lambda each: None,
    "worked": lambda each: replace(each, since_s=each.since_s + 1),
    "suspect": lambda each: replace(each, is_suspect=True),
    "thin": lambda each: replace(each, coverage=0.8),
    "silent": lambda each: replace(each, until_s=each.until_s - 120),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_job_that_the_second_look_does_not_find_idle_lives(tmp_path: Path, name: str) -> None:
    site = almost_cancelled(tmp_path)
    site.finds = SEEN[name]
    assert site().changed == 1 and not site.slurm.sent
    site.finds = lambda finding: finding
    assert site().cancelled == 1


@pytest.mark.parametrize("serves", [True, None])
def test_a_job_that_may_serve_at_the_second_look_lives(tmp_path: Path, serves: bool | None) -> None:
    site = almost_cancelled(tmp_path)
    site.serves_again = serves
    assert site().changed == 1 and not site.slurm.sent


def test_cancels_of_an_hour_are_counted_from_the_record(tmp_path: Path) -> None:
    site = almost_cancelled(tmp_path, *(running(number) for number in range(11, 11 + MOST_CANCELS + 5)))
    assert site().cancelled == MOST_CANCELS
    assert site(28).cancelled == 0  # the rest of the hour
    assert site(2).cancelled + site().cancelled == 5


@pytest.mark.parametrize("at", ["mail", "squeue", "scancel"])
def test_a_run_that_is_killed_anywhere_cancels_nothing_it_should_not(tmp_path: Path, at: str) -> None:
    site = watched(tmp_path, running(11))

    def kill(command: str) -> None:
        if command.startswith(at):
            raise Killed

    site.slurm.before = kill
    for _ in range(60):
        with contextlib.suppress(Killed):
            site()
        site.slurm.now_s += 120
    assert site.slurm.jobs[11].state == "RUNNING"
    assert ("warned", 11) not in site.lines or at != "mail"


def test_a_mail_server_that_takes_nothing_saves_every_job(tmp_path: Path) -> None:
    site = watched(tmp_path, running(11))
    site.fault = ServerError("mail:25 takes no mail: 451 later", "see `almanac doctor`")
    assert site().refused == 1
    site(120)
    assert not site.slurm.sent and ("warned", 11) not in site.lines
    assert len([what for what, _ in site.lines if what == "warn"]) < 6  # at most hourly, ever later


def test_without_a_record_nothing_is_done(tmp_path: Path) -> None:
    site = watched(tmp_path, running(11))
    (tmp_path / "actions").write_text("not a folder")
    with pytest.raises(StoreError):
        site()
    assert not site.mails


def test_a_job_that_outlives_scancel_is_named(tmp_path: Path) -> None:
    site = almost_cancelled(tmp_path)
    site.slurm.is_deaf = True
    outcome = site()
    assert outcome.failed == ("11",) and not outcome.cancelled and site.lines[-1] == ("failed", 11)
    assert re.fullmatch("scancel .* 11", site.slurm.sent[-1])
