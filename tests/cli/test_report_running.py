"""`almanac report` of jobs that run or wait: whose they are, and what is said without their figures."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click.testing
import pyarrow as pa
import pytest
from fake_accounting import Accounting, job

from almanac.config import Config, Hooks, StoreSection
from almanac.config import Prometheus as PrometheusSection
from almanac.errors import AlmanacError, CommandError, ConfigError, ServerError, StoreError
from cli.app import App
from cli.report import command
from cli.report_running import find_jobs
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

NOW_S = 1_795_000_000
NOBODY = "http://127.0.0.1:1"


class User(App):
    """alice, who has the uid of this process, and no access to the store."""

    is_operator = False
    caller = "alice"
    may_read_store = False

    def now_s(self) -> int:
        return NOW_S


def queued(job_id: int, state: str = "RUNNING", uid: int | None = None, **more: Any) -> dict[str, Any]:
    given = {"job_state": [state], "user_id": os.getuid() if uid is None else uid, "user_name": "alice", "cpus": 8}
    times = {"submit_time": NOW_S - 900, "start_time": NOW_S - 600 if state == "RUNNING" else 0, "time_limit": 60}
    gpus = {"tres_alloc_str": "cpu=8,gres/gpu=1,node=1", "gres_detail": ["gpu:1(IDX:2)"], "nodes": "n1"}
    return {"job_id": job_id, "name": "x", **given, **times, **gpus, **more}


QUEUE = [
    queued(50), queued(51, uid=os.getuid() + 1), queued(52, "PENDING", state_reason="Priority", start_time=NOW_S + 60),
    queued(62, array_job_id=60, array_task_id=2), queued(60, "PENDING", array_job_id=60, array_task_string="3-5%1"),
    queued(10, restart_cnt=1), queued(80, start_time=NOW_S + 5, name="x\x1b[31m"),
    queued(70, tres_alloc_str="cpu=8,node=1", gres_detail=[]),
]  # fmt: skip


ENDED = [
    job(90, NOW_S - 60, user="alice", gpu_count=0), job(91, NOW_S - 60, 0, user="alice", state="FAILED", exit_code=127),
    job(93, NOW_S - 60, user="alice"), job(93, NOW_S - 10**8, user="alice", state="TIMEOUT"),
    job(94, NOW_S - 60, user="mallory"),
]  # fmt: skip
"""What accounting has of jobs that nobody else knows. Job 94 is another user's, and 93's number was used before."""


def squeue(argv: Sequence[str]) -> bytes:
    if argv[0] == "sacct":
        assert argv[argv.index("-u") + 1] == "alice"
        return Accounting(lambda: NOW_S, ENDED)(argv)
    assert argv[:2] == ["squeue", "-a"] and "--json" in argv
    return json.dumps({"jobs": QUEUE}).encode()


def silent(argv: Sequence[str]) -> bytes:
    raise CommandError("squeue timed out after 1 s")


def app_of(
    root: Path, kind: type[User] = User, url: str = NOBODY, runner: Callable[[Sequence[str]], bytes] = squeue
) -> User:
    app = kind()
    section = PrometheusSection(url=url, retries=0)
    app.config = dataclasses.replace(
        Config(), prometheus=section, store=StoreSection(path=str(root)), hooks=Hooks(advice_dir=str(root / "none"))
    )
    app.commands = runner  # type: ignore[assignment]
    return app


class Reader(User):
    may_read_store = True


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """alice's array 60, of which two tasks have ended, job 10, which was requeued, and job 11, which has ended."""
    rows = [
        {"job_id": job_id, "submit_s": 1_794_000_000, "user": "alice", "state": state, "start_s": 1_794_000_010,
         "end_s": 1_794_000_900, "elapsed_s": 890, "gpu_count": 1, "array_job_id": array, "array_task_id": task}
        for job_id, array, task, state in (
            (10, None, None, "REQUEUED"), (11, None, None, "COMPLETED"), (63, 60, 0, "COMPLETED"),
            (64, 60, 1, "FAILED"),
        )
    ]  # fmt: skip
    Store.create(tmp_path / "s").of("c").write("jobs", pa.Table.from_pylist(rows, TABLES["jobs"].schema))
    return tmp_path / "s"


def run(app: User, *argv: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(command, argv, obj=app)


def test_an_array_is_its_ended_its_running_and_its_pending_tasks(store: Path) -> None:
    found = find_jobs(app_of(store, Reader), ["60"])
    assert found.stored == (63, 64)
    assert [job.shown_id for job in found.running] == ["60_2"]
    assert [job.shown_id for job in found.pending] == ["60_[3-5%1]"]
    assert [job.shown_id for job in find_jobs(app_of(store, Reader), ["60_[4,2]"]).running] == ["60_2"]
    assert len(found.newest(2)) == 2 and found.newest(2).stored == (64,)


def test_a_job_that_runs_again_is_not_its_earlier_run(store: Path) -> None:
    found = find_jobs(app_of(store, Reader), ["10"])
    assert (found.stored, [job.job_id for job in found.running]) == ((), [10])


def test_slurm_is_not_asked_for_a_job_that_has_ended(store: Path) -> None:
    assert find_jobs(app_of(store, Reader, runner=silent), ["11"]).stored == (11,)


def test_a_number_that_slurm_gave_again_is_the_job_that_runs(store: Path) -> None:
    """The store has a job of this number that ended long ago."""

    class Later(Reader):
        def now_s(self) -> int:
            return NOW_S + 400 * 86_400

    again = queued(11, submit_time=NOW_S + 400 * 86_400 - 900, start_time=NOW_S + 400 * 86_400 - 600)
    found = find_jobs(app_of(store, Later, runner=lambda argv: json.dumps({"jobs": [again]}).encode()), ["11"])
    assert (found.stored, [job.job_id for job in found.running]) == ((), [11])
    assert find_jobs(app_of(store, Later, runner=silent), ["11"]).stored == (11,)


@pytest.mark.parametrize("text", ["51", "99", "62_1", "60_9"])
def test_another_users_running_job_is_as_unknown_as_one_that_never_was(store: Path, text: str) -> None:
    done = run(app_of(store), text)
    assert isinstance(done.exception, StoreError)
    assert str(done.exception).startswith(f"{text}: no such job of yours runs or waits, and no reports for you")


def test_operators_see_everybodys_running_jobs(store: Path) -> None:
    class Operator(Reader):
        is_operator = True

    assert [job.job_id for job in find_jobs(app_of(store, Operator), ["51"]).running] == [51]


def test_a_pending_job_says_why_it_waits(store: Path) -> None:
    done = run(app_of(store), "52")
    assert done.output == (
        "Job 52 is waiting to start, so there is nothing to report. Reason: Priority. "
        "Expected start: 2026-11-18 11:07 UTC.\n"
    )
    [shown] = json.loads(run(app_of(store), "52", "--json").output)
    assert (shown["job"]["state"], shown["reason"], shown["expected_start_s"]) == ("PENDING", "Priority", NOW_S + 60)


def test_a_page_of_a_pending_job_is_refused(store: Path, tmp_path: Path) -> None:
    done = run(app_of(store), "52", "--html", str(tmp_path / "x.html"))
    assert "is waiting to start" in str(done.exception) and not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("job", ["62", "52", "10"])
def test_a_mail_is_about_an_ended_job(store: Path, job: str) -> None:
    done = run(app_of(store, Reader), job, "--mail")
    assert isinstance(done.exception, AlmanacError)
    assert "has not ended" in str(done.exception) and "--mail" in done.exception.hint


@pytest.mark.parametrize(("url", "kind", "said"), [("", ConfigError, "names no Prometheus"), (NOBODY, ServerError, "")])
def test_without_figures_the_reason_is_said(store: Path, url: str, kind: type[AlmanacError], said: str) -> None:
    done = run(app_of(store, url=url), "50")
    assert isinstance(done.exception, kind) and done.exception.hint
    assert said in str(done.exception) and done.output == ""


def test_ended_tasks_are_shown_where_prometheus_does_not_answer(store: Path) -> None:
    done = run(app_of(store, Reader), "60")
    assert isinstance(done.exception, ServerError)
    assert "Job 60_0" in done.output and "Job 60_1" in done.output and "Job 60_[3-5%1] is waiting" in done.output


def test_a_running_job_without_gpus_needs_no_prometheus(store: Path) -> None:
    done = run(app_of(store, url=""), "70")
    assert done.exit_code == 0 and "no GPU" in done.output


def test_where_slurm_does_not_answer_an_unknown_job_says_so(store: Path) -> None:
    done = run(app_of(store, Reader, runner=silent), "99")
    assert isinstance(done.exception, StoreError) and "squeue timed out" in done.exception.hint
    assert "no such job of yours in the store: 99" in str(done.exception)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("90", "had no GPU, so there is nothing to report"),
        ("91", "failed after 0 s (exit code 127)"),
        ("93", "not there yet: try again"),
    ],
)
def test_an_ended_job_that_only_accounting_has_is_no_unknown_job(store: Path, text: str, said: str) -> None:
    for kind in (User, Reader):
        done = run(app_of(store, kind), text)
        assert done.exit_code == 0 and said in " ".join(done.output.replace("│", " ").split())
    [shown] = json.loads(run(app_of(store), text, "--json").output)
    assert (shown["job"]["job_id"], shown["still_running"]) == (int(text), False)


def test_accounting_gives_nobody_anothers_job(store: Path) -> None:
    assert isinstance(run(app_of(store), "94").exception, StoreError)
    done = run(app_of(store, Reader), "11,90,94")
    assert "no such job of yours in the store: 94" in str(done.exception)


def test_a_job_that_has_just_started_has_no_figures_yet(store: Path) -> None:
    """By a clock that is ahead of this host's, so that there is nothing to read of Prometheus."""
    done = run(app_of(store), "80")
    assert done.exit_code == 0 and "It is too early" in done.output and "\x1b" not in done.output
    [shown] = json.loads(run(app_of(store), "80", "--json").output)
    assert shown["still_running"] and shown["job"]["end_s"] is None and shown["job"]["elapsed_s"] == 0
    assert shown["metrics"]["verdict"] == "short" and shown["advice"] is None and shown["ranks"] == {}
