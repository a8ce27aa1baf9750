"""Promises of the engine of job changes, with each planner: consent, a limit, the record first, and a way back."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job_slurm import (
    LARGE,
    NOW_S,
    SCRIPT,
    SMALL,
    Job,
    Killed,
    Run,
    of_types,
    predicted,
    slice_job,
    sliced,
    speeds_of,
    start,
    start_raising,
    start_ranking,
)

from almanac.errors import AlmanacError, BusyError, CommandError, StoreError
from almanac.units import DAY_S
from slurm_hooks.jobs.engine import JOBS_PER_RUN, JobOutcome, one_at_a_time
from slurm_hooks.jobs.log import KEEP_DAYS, PLANNERS, ChangeHistory, JobLine, JobLog
from telemetry.store.store import Store

HELD = {"priority": 0, "reason": "JobHeldUser"}
THEIRS = {"place": "ib", "mig-raise": f"gres/gpu:{SMALL}:2", "reprioritize": 77}
"""Changes by an owner or an operator."""
UNTOUCHED = (14, 15)
OF_PENDING = [each for each in PLANNERS if each != "watch"]
planners = pytest.mark.parametrize("planner", OF_PENDING)


def site(planner: str, folder: Path, numbers: Iterator[int] | range = range(11, 14)) -> Run:
    """Jobs that the planner changes, one without consent (or GPU), and a held one."""
    folder.mkdir(exist_ok=True)
    if planner == "mig-raise":
        more = (slice_job(14, comment=""), slice_job(15, **HELD))
        return start_raising(folder, *map(slice_job, numbers), *more, nodes=sliced(40))
    if planner == "requeue":
        job = Job(11, comment="almanac:any-gpu,almanac:movable", state="RUNNING", nodes="n1", start_s=NOW_S - 7200,
                  reason="None", limit_min=2880, script=SCRIPT.replace("@30", "@4"))  # fmt: skip
        return replace(start(folder, job), speeds=speeds_of(a100=72_000, h100=18_000))
    if planner == "place":
        return start(folder, *map(Job, numbers), Job(14, comment=""), Job(15, **HELD), nodes=of_types(a100=40, h100=40))
    return start_ranking(folder, *map(Job, numbers), Job(14, gpus=0), Job(15, **HELD))


def shown(run: Run, job: Job) -> Any:
    if run.planner == "mig-raise":
        return job.requests["TresPerJob"]
    return job.features if run.planner == "place" else job.site_factor


def give(run: Run, job: Job, value: Any) -> None:
    keys = {"place": "Features", "mig-raise": "TresPerJob", "reprioritize": "SiteFactor"}
    run.slurm.change(job, keys[run.planner], str(value))


def all_shown(run: Run) -> dict[int, Any]:
    return {job.job_id: shown(run, job) for job in run.slurm.jobs.values()}


def is_order(command: str) -> bool:
    return command.startswith(("update", "release", "scancel", "scontrol requeue", "scontrol update"))


def check_record(run: Run, command: str) -> None:
    """Each order is the last line of its job in the record."""
    if command.startswith("update"):
        number, text = int(command.split("=")[1].split()[0]), command.split(" ", 2)[2].split("=", 1)[1]
        line = [each for each in run.log.read("lab", int(run.slurm.now_s)) if each.job_id == number][-1]
        assert (line.what in ("raise", "place", "set", "undo"), line.text) == (True, text)


def step(run: Run, rng: random.Random) -> None:
    """One run of a planner, with a fault in one of three."""
    slurm = run.slurm
    slurm.is_deaf, slurm.refuses_requeue = rng.random() < 0.15, rng.random() < 0.2
    slurm.bad, slurm.limits = {"h100"} if rng.random() < 0.2 else set(), {LARGE} if rng.random() < 0.2 else set()
    run.speeds = rng.choice([speeds_of(a100=72_000, h100=18_000), speeds_of(a100=18_000, h100=72_000)])
    run.predict = rng.choice([predicted(), predicted(x_JobId=20), lambda requests: [None] * len(requests)])
    left = rng.randrange(1, 40)

    def kill(command: str) -> None:
        nonlocal left
        check_record(run, command)
        left -= 1
        if left == 0 and rng.random() < 0.7:
            raise Killed

    slurm.before = kill
    with contextlib.suppress(Killed, AlmanacError):
        run(is_clearing=rng.random() < 0.1)
    slurm.before = lambda command: None
    slurm.sleep(rng.choice([60, 300, 700, 4000]))


def live(run: Run, job: Job, rng: random.Random) -> None:
    """A job starts, ends on a failed node and waits again, or finds its node full."""
    now_s = int(run.slurm.now_s)
    if job.state == "PENDING" and job.priority and rng.random() < 0.5:
        job.state, job.start_s, job.reason = "RUNNING", now_s, "None"
        job.nodes = "n2" if job.features == "h100" else "n1"
    elif job.state == "RUNNING" and rng.random() < 0.3:
        requeue(job, now_s)
    elif job.state == "PENDING" and job.reason == "BeginTime":
        job.reason = "Resources"


def requeue(job: Job, now_s: int) -> None:
    job.state, job.nodes, job.start_s, job.reason = "PENDING", "", 0, "Resources"
    job.restarts, job.submit_s = job.restarts + 1, now_s


@planners
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_a_job_gets_its_own_back_and_keeps_its_owners_change(
    tmp_path: Path, planner: str, seed: int
) -> None:
    rng = random.Random(seed)
    run = site(planner, tmp_path)
    slurm, own = run.slurm, all_shown(run)
    for number in (11, 12, 13):
        slurm.jobs[number].comment += ",almanac:movable"
        slurm.jobs[number].limit_min = 2880
    slurm.jobs[31] = Job(31, comment="", state="RUNNING", nodes="n1", gpus=38)
    for _ in range(10):
        step(run, rng)
        live(run, slurm.jobs[rng.choice([11, 12, 13])], rng)
        if seed % 2 and rng.random() < 0.2 and slurm.jobs[13].state == "PENDING":
            give(run, slurm.jobs[13], THEIRS[planner])
            own[13] = THEIRS[planner]
    slurm.is_deaf, slurm.bad, slurm.limits, slurm.is_scheduling = False, set(), set(), False
    for number in (11, 12, 13):
        if (job := slurm.jobs[number]).state == "RUNNING":
            requeue(job, int(slurm.now_s))
    for _ in range(2):
        run(is_clearing=True)
        slurm.sleep(60)
    assert {number: shown(run, slurm.jobs[number]) for number in own} == own, run.kinds
    assert all(slurm.jobs[number].priority > 0 for number in (11, 12)), run.kinds
    assert "owner" not in [line.what for line in run.log.read("lab", int(slurm.now_s)) if line.job_id in (11, 12)]
    assert not [line for line in slurm.sent if any(f"={number} " in line for number in UNTOUCHED)]


@planners
def test_a_run_that_is_killed_anywhere_is_finished_or_undone_by_the_next(tmp_path: Path, planner: str) -> None:
    for number in itertools.count(1):
        run, commands = site(planner, tmp_path / str(number)), itertools.count(1)
        run.slurm.is_scheduling, own, made = False, all_shown(run), run.plan()

        def kill(command: str, number: int = number, commands: Iterator[int] = commands) -> None:
            if next(commands) == number:
                raise Killed

        run.slurm.before = kill
        with contextlib.suppress(Killed):
            run.act(made)
        is_done = next(commands) <= number
        run.slurm.before = lambda command: None
        run.slurm.sleep(4000)
        run()
        assert all(shown(run, run.slurm.jobs[each]) in (own[each], run_to(planner)) for each in (11, 12, 13))
        run(is_clearing=True)
        run(is_clearing=True)
        assert all_shown(run) == own
        if is_done:
            break
    assert number > 5


def run_to(planner: str) -> Any:
    return {"place": "h100", "mig-raise": f"gres/gpu:{LARGE}:1", "reprioritize": 500}[planner]


CHANGES: dict[str, dict[str, object]] = {
    "another request": {},
    "no consent": {"comment": ""},
    "a hold": {"priority": 0, "reason": "JobHeldUser"},
    "an operator's hold": {"priority": 0, "reason": "JobHeldAdmin"},
    "another partition": {"partition": "other"},
    "another limit": {"limit_min": 61},
    "nodes to leave out": {"more": {"excluded_nodes": "n2"}},
    "an operator's mark": {"more": {"admin_comment": "leave it"}},
    "another QOS": {"more": {"qos": "high"}},
    "no requeue": {"requeue": False},
    "its number is another job's": {"submit_s": NOW_S + 1, "user": "bob"},
    "its start": {"state": "RUNNING", "nodes": "n1"},
    "its end": {},
}
STARTED = ("requeue", "its start")
IN_SPRIO = ("another request", "a hold", "an operator's hold", "its start", "its end")


@pytest.mark.parametrize(
    ("planner", "name"),
    [
        (planner, name)
        for name in CHANGES
        for planner in (*OF_PENDING, "requeue")
        if planner != "requeue" or name != "its start"
    ],
)
def test_no_order_follows_a_change_of_the_job(tmp_path: Path, planner: str, name: str) -> None:
    """Whatever look of a run the change comes before. Only a raised job that is held then gets its own type back."""
    for call in itertools.count(1):
        run, calls, after = site(planner, tmp_path / str(call)), itertools.count(1), list[str]()
        slurm, job, made = run.slurm, run.slurm.jobs[11], run.plan()
        slurm.is_scheduling, own = False, shown(run, job)

        def before(command: str) -> None:
            if is_order(command):
                after.append(command)  # noqa: B023 - called within this round
            elif (not command.startswith("sprio") or name in IN_SPRIO) and next(calls) == call:  # noqa: B023
                after.clear()  # noqa: B023
                for field, value in CHANGES[name].items():
                    setattr(job, field, value)  # noqa: B023
                if name == "another request":
                    give(run, job, THEIRS[run.planner])  # noqa: B023
                elif name == "its end":
                    del slurm.jobs[11]  # noqa: B023

        slurm.before = before
        outcome = run.act(made)
        if next(calls) <= call:
            break
        allowed = [f"update jobid=11 TresPerJob={own}"] if planner == "mig-raise" and "hold" in name else []
        assert [line for line in after if re.search(r"\b11\b", line)] in ([], allowed), call
        assert {key: getattr(job, key) for key in CHANGES[name]} == CHANGES[name]
        assert name != "another request" or shown(run, job) == THEIRS[run.planner]
        assert call > 1 or outcome.changed + outcome.started == 1
    assert call > 1, "the plan was acted on"


@planners
def test_a_dropped_order_is_not_almanacs(tmp_path: Path, planner: str) -> None:
    """Its owner gave the job what almanac was about to give it."""
    run = site(planner, tmp_path)
    run.slurm.is_scheduling, made = False, run.plan()
    give(run, run.slurm.jobs[11], run_to(planner))
    assert run.act(made).changed == 1
    run(is_clearing=True)
    assert all_shown(run)[11] == run_to(planner)


@planners
def test_at_most_so_many_jobs_are_changed_in_a_run(tmp_path: Path, planner: str) -> None:
    """A site factor takes nothing from its job, so that all of them may change: in batches, with a look before each."""
    run, looks, since = site(planner, tmp_path, range(21, 56)), list[int](), 0
    run.batch, run.slurm.is_scheduling = 10, False

    def before(command: str) -> None:
        nonlocal since
        since = since + 1 if is_order(command) else 0
        looks.append(since)

    run.slurm.before = before
    run()
    assert len(run.slurm.sent) == (35 if planner == "reprioritize" else JOBS_PER_RUN)
    assert max(looks) <= (10 if planner == "reprioritize" else JOBS_PER_RUN)


@planners
def test_undo_gives_back_what_was_there_and_a_second_run_changes_nothing(tmp_path: Path, planner: str) -> None:
    run = site(planner, tmp_path)
    run.slurm.is_scheduling, own = False, all_shown(run)
    assert run() == JobOutcome(waiting=3)
    assert {number for number, text in all_shown(run).items() if text != own[number]} == {11, 12, 13}
    assert run() == JobOutcome()
    give(run, run.slurm.jobs[12], THEIRS[planner])
    assert run(is_clearing=True) == JobOutcome(undone=2)
    assert all_shown(run) == {**own, 12: THEIRS[planner]}
    assert run(is_clearing=True) == JobOutcome()


@planners
def test_a_change_that_slurm_refuses_is_not_made_and_is_told(tmp_path: Path, planner: str) -> None:
    run = site(planner, tmp_path)
    run.slurm.is_scheduling, run.slurm.says, own = False, {11: "Invalid job state"}, all_shown(run)
    outcome = run()
    assert (outcome.waiting, outcome.refused, outcome.said) == (2, 1, ("Invalid job state for job 11",))
    assert all_shown(run)[11] == own[11]
    run()
    assert run.kinds.count("refused") == 1 + (planner == "reprioritize"), "a request is not sent again at once"


@planners
def test_a_number_that_comes_again_is_another_job(tmp_path: Path, planner: str) -> None:
    run = site(planner, tmp_path)
    run.slurm.is_scheduling = False
    run()
    later_s = NOW_S + 30 * DAY_S
    run.slurm.jobs[11] = replace(run.slurm.jobs[11], submit_s=later_s, user="bob", comment="")
    run.slurm.now_s = later_s + 9000
    run(is_clearing=True)
    run()
    assert all_shown(run)[11] == run_to(planner)


@planners
def test_two_runs_at_once_exclude_each_other(tmp_path: Path, planner: str) -> None:
    store = Store.create(tmp_path / "store").of("lab")
    with one_at_a_time(store, planner):
        with pytest.raises(BusyError, match=PLANNERS[planner]), one_at_a_time(store, planner):
            pass
        for other in set(PLANNERS) - {planner}:
            with one_at_a_time(store, other):
                pass


def _log_of_others(run: Run) -> None:
    run.log.folder.mkdir()
    (path := run.log.folder / f"{run.planner}-2026-11-23.jsonl").write_text("{}\n")
    path.chmod(0o666)


def _link_as_log(run: Run) -> None:
    run.log.folder.mkdir()
    (run.folder / "elsewhere").write_text("")
    (run.log.folder / f"{run.planner}-2026-11-23.jsonl").symlink_to(run.folder / "elsewhere")


FAULTS: list[tuple[Callable[[Run], Any], type[Exception]]] = [
    (lambda run: setattr(run.slurm, "is_gone", True), CommandError),
    (lambda run: setattr(run.slurm, "answer", b"slurm_load_jobs error\n"), CommandError),
    (lambda run: (run.folder / "actions").write_text("no folder"), StoreError),
    (_log_of_others, StoreError),
    (_link_as_log, StoreError),
]


@planners
@pytest.mark.parametrize(("break_it", "error"), FAULTS)
def test_faults_that_change_nothing(
    tmp_path: Path, planner: str, break_it: Callable[[Run], Any], error: type[Exception]
) -> None:
    run = site(planner, tmp_path)
    break_it(run)
    with pytest.raises(error):
        run()
    assert run.slurm.sent == []


@planners
def test_slurm_that_goes_away_in_between_is_said_and_the_next_run_finishes(tmp_path: Path, planner: str) -> None:
    run = site(planner, tmp_path)
    run.slurm.is_scheduling = False

    def lose(command: str) -> None:
        if command.startswith("update jobid=12"):
            raise CommandError("lost the connection to slurmctld", "")

    run.slurm.before = lose
    with pytest.raises(CommandError, match="after 0 of 3 changes: lost the connection"):
        run()
    assert all_shown(run)[11] == run_to(planner)
    run.slurm.before = lambda command: None
    run.slurm.sleep(300)
    run()
    for _ in range(2):
        run.slurm.sleep(3700)
        run()
    assert all_shown(run)[12] == run_to(planner)


@planners
def test_lines_of_a_forged_or_damaged_record_send_nothing_else(tmp_path: Path, planner: str) -> None:
    run = site(planner, tmp_path)
    run.slurm.is_scheduling, own = False, all_shown(run)
    run()
    path = next(run.log.folder.glob("*"))
    line = json.loads(path.read_text().splitlines()[-1])
    forged = [
        json.dumps({**line, "what": "placed", key: text})
        for key, text in (("own", "x jobid=1"), ("own", "a\nrelease 1"), ("new", "a;b"), ("what", "rm"),
                          ("key", "Priority"), ("own", 2000 * "x"), ("job_id", "x"), ("was", "\x1b"),
                          ("what", "\ud800"), ("reason", "\ud800"))
    ]  # fmt: skip
    forged += [json.dumps({"what": "set", "old": 0, "new": "a b"}), '{"what": "pla', '["no object"]', '{"what": null}']
    with path.open("ab") as file:
        file.write("\n".join(forged).encode() + b"\n\xff\n" + json.dumps({**line, "cluster": "other"}).encode())
    assert run(is_clearing=True) == JobOutcome(undone=3)
    assert all_shown(run) == own
    assert b"ann" not in path.read_bytes(), "no user is written down"


LINE = JobLine("set", NOW_S, "lab", 1, NOW_S, 0, "SiteFactor", "0", "500", "x")


def test_the_newest_line_counts_by_day_and_an_old_one_does_not(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "actions", "reprioritize")
    log.append(
        [LINE, replace(LINE, what="failed"), replace(LINE, job_id=2), replace(LINE, job_id=2, what="dropped")], NOW_S
    )
    (path,) = log.folder.iterdir()
    assert (path.name, path.stat().st_mode & 0o777) == ("reprioritize-2026-11-23.jsonl", 0o640)
    assert log.history("lab", NOW_S).newest == {1: LINE}
    assert log.history("lab", NOW_S + (KEEP_DAYS + 2) * DAY_S) == ChangeHistory()
    assert (len(log.day("lab", NOW_S + 3600)), log.day("lab", NOW_S + DAY_S), log.day("lab", NOW_S - 1)) == (4, [], [])
    log.append([replace(LINE, new="700")], NOW_S + 30 * DAY_S)
    assert log.history("lab", NOW_S).newest[1].new == "500", (
        "a clock that was ahead wrote the line before that of today"
    )
    assert log.history("lab", NOW_S + 30 * DAY_S).newest[1].new == "700"


@pytest.mark.parametrize(
    ("old", "what", "new", "texts"),
    [
        ({"what": "set", "old": 30, "new": 500}, "set", "500", {"0", "30", "500"}),
        ({"what": "set", "old": 0, "new": -5}, "set", "-5", {"0", "-5"}),
        ({"what": "clear", "old": 500, "new": 0}, "undo", "500", {"0", "500"}),
        ({"what": "agreed", "old": 500, "new": 500}, "agreed", "500", {"0", "500"}),
    ],
)
def test_lines_that_earlier_versions_wrote_of_site_factors_are_read(
    tmp_path: Path, old: dict[str, Any], what: str, new: str, texts: set[str]
) -> None:
    common = {"time_s": NOW_S, "cluster": "lab", "job_id": 7, "address": "7", "submit_s": 9, "reason": "GPU-time 1 h",
              "gpu_time_s": 3600.0, "model": "m", "almanac": "0.1"}  # fmt: skip
    (tmp_path / "reprioritize-2026-11-23.jsonl").write_text(json.dumps({**common, **old}) + "\n")
    line = JobLog(tmp_path, "reprioritize").history("lab", NOW_S).newest[7]
    assert (line.what, line.key, line.own, line.new, line.texts) == (what, "SiteFactor", "0", new, texts)
    assert (line.gpu_time_s, line.model) == (3600.0, "m")


def test_a_line_of_an_earlier_request_without_what_was_shown_is_read(tmp_path: Path) -> None:
    row = {"what": "placed", "time_s": NOW_S, "cluster": "lab", "job_id": 7, "submit_s": 9, "restarts": 0,
           "key": "Features", "own": "[a|b]", "new": "b", "reason": "", "type": "x"}  # fmt: skip
    (tmp_path / "place-2026-11-23.jsonl").write_text(json.dumps(row) + "\n")
    line = JobLog(tmp_path, "place").history("lab", NOW_S).newest[7]
    assert (line.texts, line.was) == ({"[a|b]", "b"}, None)
