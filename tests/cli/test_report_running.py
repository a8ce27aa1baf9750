"""`almanac report` of any job at any time: which source answers, whose jobs are shown, and what is said without one."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import click.testing
import pyarrow as pa
import pytest
from asking_user import ENDED, NOBODY, NOW_S, QUEUE, Reader, User, app_of, queued, silent, slurm, without
from fake_accounting import Accounting

from advisor.types.decide import TypeWait
from almanac.errors import AlmanacError, CommandError, NotAllowedError, StoreError
from almanac.submit_config import GpuType
from cli.jobs import command as jobs_command
from cli.mail import send
from cli.report import command
from reports.job.sources import FoundJobs, find_jobs
from slurm.named_jobs import named_jobs
from slurm.sacct import COLUMNS
from slurm_hooks.advice.kinds import WAITS, WaitsFile
from telemetry.store.schema import TABLES
from telemetry.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """alice's array 60, of which two tasks have ended, job 10, which was requeued, and job 11, which has ended."""
    rows = [
        {"job_id": job_id, "submit_s": 1_794_999_000, "user": "alice", "state": state, "start_s": 1_794_999_010,
         "end_s": 1_794_999_900, "elapsed_s": 890, "gpu_count": 1, "array_job_id": array, "array_task_id": task}
        for job_id, array, task, state in (
            (10, None, None, "REQUEUED"), (11, None, None, "COMPLETED"), (63, 60, 0, "COMPLETED"),
            (64, 60, 1, "FAILED"),
        )
    ]  # fmt: skip
    Store.create(tmp_path / "s").of("c").write("jobs", pa.Table.from_pylist(rows, TABLES["jobs"].schema))
    return tmp_path / "s"


def run(app: User, *argv: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(command, argv, obj=app)


def found(app: User, *texts: str) -> FoundJobs:
    return find_jobs(app, app.caller_jobs, named_jobs(texts))


@pytest.mark.parametrize(
    ("text", "stored", "running", "ended", "states"),
    [
        ("11", [11], [], [], []),
        ("60", [63, 64], ["60_2"], [65], ["waiting"]),
        ("60_[4,2]", [], ["60_2"], [], ["waiting"]),
        ("60_1", [64], [], [], []),
        ("10", [], ["10"], [], []),
        ("52", [], [], [], ["waiting"]),
        ("90,91", [], [], [90, 91], []),
        ("95", [], [], [95], []),
        ("51", [], [], [], ["not_yours"]),
        ("94", [], [], [], ["not_yours"]),
        ("60_9", [], [], [], ["unknown"]),
        ("62_1", [], [], [], ["unknown"]),
        ("97", [], [], [], ["unknown"]),
        ("12", [], [], [], ["too_old"]),
        ("11,12,50", [11], ["50"], [], ["too_old"]),
    ],
)
def test_each_job_is_read_where_it_is(
    store: Path, text: str, stored: list[int], running: list[str], ended: list[int], states: list[str]
) -> None:
    jobs = found(app_of(store, Reader), text)
    assert (list(jobs.stored), [job.shown_id for job in jobs.running]) == (stored, running)
    assert [job.row["job_id"] for job in jobs.ended] == ended
    assert [state.kind for state in jobs.states] == states
    assert len(jobs.newest(1)) == min(1, len(jobs))


def test_slurm_is_not_asked_for_a_job_that_has_ended(store: Path) -> None:
    assert found(app_of(store, Reader, runner=silent), "11").stored == (11,)


def test_a_number_that_slurm_gave_again_is_the_job_that_runs(store: Path) -> None:
    """The store has a job of this number that ended long ago."""

    class Later(Reader):
        def now_s(self) -> int:
            return NOW_S + 400 * 86_400

    again = queued(11, submit_time=NOW_S + 400 * 86_400 - 900, start_time=NOW_S + 400 * 86_400 - 600)
    jobs = found(app_of(store, Later, runner=lambda argv: json.dumps({"jobs": [again]}).encode()), "11")
    assert (jobs.stored, [job.job_id for job in jobs.running]) == ((), [11])
    assert found(app_of(store, Later, runner=silent), "11").stored == (11,)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("51", NotAllowedError, "job 51 belongs to another user"),
        ("94", NotAllowedError, "job 94 belongs to another user"),
        ("97", StoreError, "no job has the number 97 yet: Slurm's next one is 97"),
        ("12", StoreError, "is older than what Slurm's accounting and almanac keep"),
        ("60_9", StoreError, "job 60 has no task 60_9"),
    ],
)
def test_absence_is_not_reported_as_non_existence(store: Path, text: str, kind: type[AlmanacError], said: str) -> None:
    for reader in (User, Reader):
        done = run(app_of(store, reader), text)
        assert type(done.exception) is kind and said in str(done.exception) and done.exception.hint
        assert "mallory" not in str(done.exception) + done.output
        [shown] = json.loads(run(app_of(store, reader), text, "--json").stdout)
        assert shown["message"] == str(done.exception)


def test_others_answers_are_printed_before_the_error(store: Path) -> None:
    done = run(app_of(store), "97,90,94,52")
    assert type(done.exception) is NotAllowedError or type(done.exception) is StoreError
    assert "Job 90" in done.stdout and "Job 52 waits to start" in done.stdout
    assert "no job has the number 97 yet" in done.stderr + str(done.exception)
    assert "belongs to another user" in done.stderr + str(done.exception)


def test_operators_see_everybodys_running_jobs(store: Path) -> None:
    class Operator(Reader):
        is_operator = True

    assert [job.job_id for job in found(app_of(store, Operator), "51").running] == [51]
    assert [job.row["user"] for job in found(app_of(store, Operator), "94").ended] == ["mallory"]


def test_a_pending_job_says_why_it_waits_and_what_helps(store: Path) -> None:
    done = run(app_of(store), "52")
    assert done.output == (
        "Job 52 waits to start: jobs with a higher priority come first (Priority). Slurm\n"
        "expects it to start at 2026-11-18 11:07 UTC (in 1 min).\n"
        "try: a shorter time limit can let it start in a gap: scontrol update jobid=52\n"
        "timelimit=TIME\n"
    )
    [shown] = json.loads(run(app_of(store), "52", "--json").output)
    assert (shown["job"]["state"], shown["reason"], shown["expected_start_s"]) == ("PENDING", "Priority", NOW_S + 60)
    assert "scontrol release 53" in run(app_of(store), "53").output


def test_a_page_of_a_pending_job_is_refused(store: Path, tmp_path: Path) -> None:
    done = run(app_of(store), "52", "--html", str(tmp_path / "x.html"))
    assert "waits to start" in str(done.exception) and not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("job", ["62", "52", "10"])
def test_a_mail_is_about_an_ended_job(store: Path, job: str) -> None:
    done = click.testing.CliRunner().invoke(send, [job], obj=app_of(store, Reader))
    assert isinstance(done.exception, AlmanacError)
    assert "has not ended" in str(done.exception) and "almanac report" in done.exception.hint


@pytest.mark.parametrize(("url", "said"), [("", "names no Prometheus"), (NOBODY, "127.0.0.1")])
def test_without_figures_the_rest_and_the_reason_are_said(store: Path, url: str, said: str) -> None:
    done = run(app_of(store, url=url), "50")
    assert done.exit_code == 0 and done.output.count("till running") == 1
    assert "usually within 45 minutes" in " ".join(done.output.replace("│", " ").split())
    assert said in " ".join(done.output.split())


def test_all_tasks_are_shown_where_prometheus_does_not_answer(store: Path) -> None:
    done = run(app_of(store, Reader), "60")
    for shown in ("Job 60_0", "Job 60_1", "Job 60_2", "Job 60_6", "Job 60_[3-5%1] waits"):
        assert shown in done.output


def test_a_running_job_without_gpus_needs_no_prometheus(store: Path) -> None:
    done = run(app_of(store, url=""), "70")
    assert done.exit_code == 0 and "GPU" not in done.output and "so far" in done.output


@pytest.mark.parametrize(
    ("text", "lost", "said"),
    [("99", "squeue", "Slurm did not answer: squeue timed out"), ("91", "sacct", "Slurm did not answer: sacct timed")],
)
def test_where_slurm_does_not_answer_an_unknown_job_says_so(store: Path, text: str, lost: str, said: str) -> None:
    done = run(app_of(store, Reader, runner=without(lost)), text)
    assert isinstance(done.exception, CommandError) and said in str(done.exception) and done.exception.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("90", "does not have all of its CPU time and memory"),
        ("91", "failed after 0 s (exit code 127: command not found)"),
        ("93", "not there yet: try again"),
        ("95", "failed after 10 min (exit code 137: killed, often for too much memory)"),
    ],
)
def test_an_ended_job_that_only_slurm_has_is_no_unknown_job(store: Path, text: str, said: str) -> None:
    for kind in (User, Reader):
        done = run(app_of(store, kind), text)
        assert done.exit_code == 0 and said in " ".join(done.output.replace("│", " ").split())
    [shown] = json.loads(run(app_of(store), text, "--json").output)
    assert (shown["job"]["job_id"], shown["still_running"]) == (int(text), False)


def test_without_an_id_it_is_the_job_submitted_last(store: Path) -> None:
    for argv in ([], ["--me"]):
        [shown] = json.loads(run(app_of(store), *argv, "--json").stdout)
        assert shown["job_id"] == 95
    queue = json.dumps({"jobs": []}).encode()
    [shown] = json.loads(
        run(app_of(store, runner=lambda argv: queue if argv[0] == "squeue" else slurm(argv)), "--json").stdout
    )
    assert shown["job_id"] == 91
    [shown] = json.loads(run(app_of(store, Reader, runner=silent), "--json", "-n", "1").stdout)
    assert shown["shown_id"] == "60_1"
    none: Any = run(app_of(store, runner=silent)).exception
    assert isinstance(none, StoreError) and "has no job" in str(none) and "Slurm did not answer" in str(none)


def test_the_list_of_jobs_names_the_command_that_knows_more(store: Path) -> None:
    done: Any = click.testing.CliRunner().invoke(jobs_command, ["-j", "90"], obj=app_of(store, Reader))
    assert str(done.exception) == "not in your list of ended GPU jobs: 90"
    assert done.exception.hint == "see any job, at any time: almanac report 90"


def test_a_job_that_has_just_started_has_no_figures_yet(store: Path) -> None:
    """By a clock that is ahead of this host's, so that there is nothing to read of Prometheus."""
    done = run(app_of(store), "80")
    assert done.exit_code == 0 and "It is too early" in done.output and "\x1b" not in done.output
    [shown] = json.loads(run(app_of(store), "80", "--json").output)
    assert shown["still_running"] and shown["job"]["end_s"] is None and shown["job"]["elapsed_s"] == 0
    assert shown["metrics"]["verdict"] == "short" and shown["advice"] is None and shown["ranks"] == {}


def test_a_pending_job_hears_of_a_type_that_starts_sooner(store: Path) -> None:
    app = app_of(store)
    waits = tuple((4, TypeWait(name, wait_s, wait_s - 60, wait_s + 60, NOW_S)) for name, wait_s in WAITS_S)
    types = tuple(GpuType(name, gres=name) for name, _ in WAITS_S)
    folder = Path(app.config.hooks.advice_dir) / "user/_site"
    folder.mkdir(parents=True)
    (folder / WAITS.name).write_bytes(WAITS.render(WaitsFile(NOW_S, types, (), waits)))
    (folder / WAITS.name).chmod(0o644)
    said = " ".join(run(app, "54").output.split())
    assert "A job that is submitted now waits about 12 min on h100, and about 3 h on a100." in said
    assert "submitted now" not in run(app, "52").output
    (folder / WAITS.name).chmod(0o644)
    (folder / WAITS.name).write_bytes(WAITS.render(WaitsFile(NOW_S, types, waits, waits[1:])))
    said = " ".join(run(app, "54").output.split())
    assert "How long such jobs wait is not predicted: recent predictions did not hold." in said
    (folder / WAITS.name).write_bytes(WAITS.render(WaitsFile(NOW_S - 700, types, waits, waits[1:])))
    assert "not predicted" not in run(app, "54").output


WAITS_S = (("a100", 10_800), ("h100", 720), ("v100", 10_790))


def test_hosts_with_the_client_package_need_no_library_for_it(store: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    rows = Accounting(lambda: NOW_S, ENDED)
    for name, text in (("squeue", json.dumps({"jobs": QUEUE})), ("scontrol", "NEXT_JOB_ID = 97")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    row = rows(["sacct", "-X", "-j", "90", "--delimiter=|", "-o", ",".join(COLUMNS)]).decode()
    row = row.replace("alice", pwd.getpwuid(os.getuid()).pw_name).strip().replace("|", "$d")
    delimiter = '$(echo "$*" | sed "s/.*--delimiter=//; s/ .*//")'
    (tmp_path / "bin/sacct").write_text(f'#!/bin/sh\nd={delimiter}\necho "{row}"\n')
    for path in (tmp_path / "bin").iterdir():
        path.chmod(0o755)
    (tmp_path / "c.toml").write_text(f'[slurm]\nbin_dir = "{tmp_path}/bin:/usr/bin:/bin"\n[store]\npath = "/nowhere"\n')
    program = Path(__file__).parents[1] / "cluster/report_as_user.py"
    words = [sys.executable, str(program), pwd.getpwuid(os.getuid()).pw_name, "client", str(tmp_path / "c.toml")]
    asked = [f"report {job}" for job in ("50", "90", "97")]
    done = subprocess.run([*words, *asked], capture_output=True, text=True, check=True, timeout=300)
    found = {words.split()[-1]: answer for words, answer in json.loads(done.stdout).items()}
    assert [found[job][0] for job in ("50", "90", "97")] == [0, 0, 4]
    assert "come after it ends" in found["50"][1] and "COMPLETED" in found["90"][1]
    assert "Slurm's next one is 97" in found["97"][2]
