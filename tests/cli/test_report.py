"""`almanac report`: whose jobs are shown, which ids name what, and the forms."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pytest
from click.testing import CliRunner

from almanac.config import Config, Hooks, Reports, StoreSection
from almanac.errors import AlmanacError
from cli.app import App
from cli.job_ids import parse_id
from cli.jobs import command as jobs_command
from cli.report import command
from cli.report_running import find_jobs
from reports.published.folder import OwnFolder
from reports.published.publish import OwnJob, publish_own
from telemetry.store.outgoing import Outgoing
from telemetry.store.schema import TABLES
from telemetry.store.store import Store


class Ordinary(App):
    """Somebody who is no operator: alice."""

    is_operator = False
    caller = "alice"
    may_read_store = True


class Operator(App):
    is_operator = True
    caller = "root"
    may_read_store = True


class Outsider(Ordinary):
    may_read_store = False


JOBS = [
    (10, None, None, "alice"), (20, 20, 0, "alice"), (21, 20, 1, "alice"), (23, 20, 3, "alice"),
    (30, None, None, "bob"), (40, 40, 0, "bob"), (50, None, None, "alice"), (51, None, None, "alice"),
]  # fmt: skip
"""Job 50 is heterogeneous, and 51 is its second component."""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(stored(tmp_path / "store").root)


def stored(root: Path) -> Store:
    store = Store.create(root)
    rows = [
        {"job_id": job_id, "submit_s": 1_795_000_000, "array_job_id": array, "array_task_id": task, "user": user,
         "name": "x", "name_key": "x", "state": "COMPLETED", "start_s": 1_795_000_010, "end_s": 1_795_000_700 + job_id,
         "elapsed_s": 690, "gpu_count": 1, "node_list": "n1", "node_count": 1}
        for job_id, array, task, user in JOBS
    ]  # fmt: skip
    for offset, row in enumerate(rows[-2:]):
        row.update(het_job_id=50, het_offset=offset)
    store.of("c").write("jobs", pa.Table.from_pylist(rows, TABLES["jobs"].schema))
    return store


@pytest.mark.parametrize(
    ("text", "found"),
    [("10", [10]), ("20", [20, 21, 23]), ("21", [21]), ("20_1", [21]), ("20_[0-1]", [20, 21]), ("20_[0,3]", [20, 23]),
     ("50", [50, 51]), ("50+1", [51]), ("51", [51]), ("21,20_[0,3],10", [21, 20, 23, 10])],
)  # fmt: skip
def test_an_id_names_a_job_a_task_or_a_whole_array(folder: str, text: str, found: list[int]) -> None:
    assert find_jobs(Ordinary(store_path=folder), [text]).stored == tuple(found)


@pytest.mark.parametrize(
    "text",
    ["", "x", "-1", "1_", "1_[3-1]", "1_[1-999999999]", "1_[a]", "1;id", "１", "1" * 30, "9" * 19, "1+", "1_2+3"],
)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="not"):
        parse_id(text)


@pytest.mark.parametrize("text", ["30", "40", "40_0", "99"])
def test_others_jobs_are_as_unknown_as_jobs_that_never_were(folder: str, text: str) -> None:
    done = CliRunner().invoke(command, [text], obj=Ordinary(store_path=folder))
    assert "no such job of yours" in str(done.exception)
    assert "bob" not in str(done.exception) + done.output


def test_operators_see_everybodys(folder: str) -> None:
    assert find_jobs(Operator(store_path=folder), ["30", "40_0"]).stored == (30, 40)


@pytest.mark.parametrize("argv", [["--since", "@1", "-a"], ["--since", "@1", "-u", "bob"]])
def test_a_user_may_not_list_others(folder: str, argv: list[str]) -> None:
    done = CliRunner().invoke(command, argv, obj=Ordinary(store_path=folder))
    assert done.exit_code != 0 and "operator" in str(done.exception)


def test_who_may_not_read_the_store_is_told_how_the_report_comes(folder: str, tmp_path: Path) -> None:
    done: Any = CliRunner().invoke(command, ["10"], obj=outsider(folder, tmp_path / "nothing"))
    assert "no reports for you are published" in str(done.exception)
    assert "by mail" in done.exception.hint


def outsider(folder: str, advice: Path) -> Outsider:
    app = Outsider()
    app.config = dataclasses.replace(Config(), hooks=Hooks(advice_dir=str(advice)), store=StoreSection(path=folder))
    return app


@pytest.fixture
def published(built_once: Callable[[str, Callable[[Path], None]], Path]) -> Outsider:
    """alice, who has the uid of who runs this, with what was published for her."""
    folder = built_once("published for alice", publish)
    return outsider(str(folder / "store"), folder / "advice")


def publish(folder: Path) -> None:
    config, store = dataclasses.replace(Config(), reports=Reports(own_days=3650)), stored(folder / "store")
    metrics = [{"job_id": job_id, "submit_s": 1_795_000_000, "verdict": "no telemetry"} for job_id, *_ in JOBS]
    store.of("c").write("job_metrics", pa.Table.from_pylist(metrics, TABLES["job_metrics"].schema))
    job = OwnJob(store.of("c"), config, 1_795_100_000, OwnFolder(Outgoing(folder / "advice")))
    publish_own(job, {"alice": os.getuid()}.get)
    shutil.rmtree(store.root)


@pytest.mark.parametrize(
    ("text", "found"),
    [("10", ["10"]), ("20", ["20_0", "20_1", "20_3"]), ("21", ["20_1"]), ("20_[0,3]", ["20_0", "20_3"]),
     ("50", ["50+0", "50+1"]), ("50+1", ["50+1"])],
)  # fmt: skip
def test_who_may_not_read_the_store_sees_their_own_jobs_by_the_same_ids(
    published: Outsider, text: str, found: list[str]
) -> None:
    done = CliRunner().invoke(command, [text, "--json"], obj=published, catch_exceptions=False)
    assert [report["shown_id"] for report in json.loads(done.output)] == found


def test_they_have_every_form_and_the_list(published: Outsider, tmp_path: Path) -> None:
    page = tmp_path / "job.html"
    CliRunner().invoke(command, ["10", "--html", str(page)], obj=published, catch_exceptions=False)
    assert page.read_text().startswith("<!DOCTYPE html>")
    shown = CliRunner().invoke(command, ["10"], obj=published, catch_exceptions=False)
    assert "We have no measurements of this job's GPUs" in " ".join(shown.output.split())
    listed = CliRunner().invoke(command, ["--since", "@1"], obj=published, catch_exceptions=False)
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:]] == [
        "10", "20_0", "20_1", "20_3", "50+0", "50+1",
    ]  # fmt: skip
    assert listed.stderr == "showing the jobs published for you; the list last changed 2026-11-19 14:53 UTC\n"
    recent = CliRunner().invoke(command, ["--since", "@1795000721"], obj=published, catch_exceptions=False)
    assert [line.split()[0] for line in recent.stdout.splitlines()[1:]] == ["20_1", "20_3", "50+0", "50+1"]


def test_almanac_jobs_lists_them(published: Outsider) -> None:
    def jobs(*argv: str) -> Any:
        done = CliRunner().invoke(jobs_command, ["-S", "@1", *argv], obj=published, catch_exceptions=False)
        return json.loads(done.stdout) if "--json" in argv else done

    assert [row["job_id"] for row in jobs("--json")] == [10, 20, 21, 23, 50, 51]
    assert {row["user"] for row in jobs("--json")} == {"alice"}
    assert [row["job_id"] for row in jobs("--json", "-j", "21,30")] == [21]
    assert jobs("--json", "-o", "end_s", "-n", "1") == [{"end_s": 1_795_000_751}]
    assert jobs("--json", "-E", "@1795000000") == []
    assert "not measured" in jobs().output and "20_1" in jobs().output
    assert "no telemetry" in jobs("--wide").output
    assert [row["job_id"] for row in jobs("--json", "-j", "20_[1,3],10")] == [10, 21, 23]
    assert [row["job"] for row in jobs("--json", "-j", "20,50+1", "-o", "job")] == ["20_0", "20_1", "20_3", "50+1"]
    assert CliRunner().invoke(jobs_command, ["-u", "bob"], obj=published).exit_code != 0
    assert "not published" in str(CliRunner().invoke(jobs_command, ["--steps"], obj=published).exception)


@pytest.mark.parametrize("text", ["30", "40_0", "99"])
def test_of_others_jobs_they_are_told_nothing(published: Outsider, text: str) -> None:
    done: Any = CliRunner().invoke(command, [text], obj=published)
    assert "no such job of yours" in str(done.exception)
    assert "bob" not in str(done.exception) + done.output
    assert "ask an operator" in done.exception.hint


@pytest.mark.parametrize("program", [command, jobs_command], ids=["report", "jobs"])
def test_a_store_that_is_named_and_cannot_be_read_is_not_passed_over(published: Outsider, program: Any) -> None:
    published.store_path = "/nowhere/store"
    done = CliRunner().invoke(program, ["--since" if program is command else "-S", "@1"], obj=published)
    assert "/nowhere/store: there is no store here" in str(done.exception)


def test_a_number_that_came_again_is_not_shown_to_its_former_user(folder: str) -> None:
    """Slurm starts anew at MaxJobId: alice had a job 30 once, and bob's is the newer one."""
    store = Store.open(Path(folder))
    row = {"job_id": 30, "submit_s": 1_794_000_000, "user": "alice", "name": "x", "state": "COMPLETED",
           "start_s": 1_794_000_010, "end_s": 1_794_000_700, "gpu_count": 1}  # fmt: skip
    store.of("c").write("jobs", pa.Table.from_pylist([row], TABLES["jobs"].schema))
    for app, user in ((Ordinary(store_path=folder), "alice"), (Operator(store_path=folder), "bob")):
        done = CliRunner().invoke(command, ["30", "--json"], obj=app, catch_exceptions=False)
        assert [(report["job"]["user"], report["earlier_runs"]) for report in json.loads(done.output)] == [(user, [])]


def test_since_lists_the_callers_jobs(folder: str) -> None:
    done = CliRunner().invoke(command, ["--since", "@1"], obj=Ordinary(store_path=folder), catch_exceptions=False)
    lines = done.output.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        "10", "20_0", "20_1", "20_3", "50+0", "50+1",
    ]  # fmt: skip


def test_the_forms(folder: str, tmp_path: Path) -> None:
    app = Ordinary(store_path=folder)
    page = tmp_path / "job.html"
    CliRunner().invoke(command, ["10", "--html", str(page)], obj=app, catch_exceptions=False)
    assert page.read_text().startswith("<!DOCTYPE html>")
    done = CliRunner().invoke(command, ["20", "--json"], obj=app, catch_exceptions=False)
    assert [report["shown_id"] for report in json.loads(done.output)] == ["20_0", "20_1", "20_3"]
    shown = CliRunner().invoke(command, ["10"], obj=app, catch_exceptions=False)
    assert "Not measured yet: try again in half an hour" in " ".join(shown.output.split())


def test_a_page_replaces_a_link_and_is_not_for_everybody(folder: str, tmp_path: Path) -> None:
    """A report of another user's job, written into that user's folder by root."""
    page, other = tmp_path / "job.html", tmp_path / "passwd"
    other.write_text("root:x:0:0\n")
    page.symlink_to(other)
    CliRunner().invoke(command, ["10", "--html", str(page)], obj=Ordinary(store_path=folder), catch_exceptions=False)
    assert other.read_text() == "root:x:0:0\n"
    assert not page.is_symlink() and page.read_text().startswith("<!DOCTYPE html>")
    assert page.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("place", ["folder", "pipe", "folder/none/job.html"])
def test_where_no_page_can_be_written_nothing_is_replaced(folder: str, tmp_path: Path, place: str) -> None:
    """Root who names /dev/stdout must not make a file of it."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    done = CliRunner().invoke(command, ["10", "--html", str(tmp_path / place)], obj=Ordinary(store_path=folder))
    assert isinstance(done.exception, AlmanacError) and place in str(done.exception)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["10", "--since", "@1"],
        ["10", "-a"],
        ["20", "--html", "x.html"],
        ["--since", "@1", "-n", "0", "--html", "x"],
    ],
)
def test_usage(folder: str, argv: list[str]) -> None:
    assert CliRunner().invoke(command, argv, obj=Ordinary(store_path=folder)).exit_code == 2


def test_report_of_a_generated_job(site: Any) -> None:
    rows = site.json("jobs", "-a", "--verdict", "ok", "--min", "gpu_count=4", "-n", "3", "--json")
    said = site("report", *(str(row["job_id"]) for row in rows))
    assert said.count("╭─ Job ") == len(rows) == 3
    assert "█" in said or "▄" in said
