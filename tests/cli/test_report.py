"""`almanac report`: whose jobs are shown, which ids name what, and the forms."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from almanac.config import Config, Hooks, Reports, StoreSection
from almanac.errors import AlmanacError, CommandError, RequestError
from almanac.published.outgoing import Outgoing
from cli.app import App
from cli.jobs import command as jobs_command
from cli.report import command
from reports.job.sources import find_jobs
from reports.published.publish import OwnFolder, OwnJob, publish_own
from slurm.named_jobs import named_jobs, parse_id
from telemetry.site import Site
from telemetry.store.schema import TABLES
from telemetry.store.store import Store


def silent(argv: Sequence[str]) -> bytes:
    raise CommandError(f"{argv[0]} was not found")


class Ordinary(App):
    """Somebody who is no operator: alice. No Slurm answers."""

    commands = staticmethod(silent)  # type: ignore[assignment]
    is_operator = False
    caller = "alice"
    may_read_store = True


class Operator(Ordinary):
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
    assert stored_ids(Ordinary(store_path=folder), text) == tuple(found)


def stored_ids(app: App, *texts: str) -> tuple[int, ...]:
    return find_jobs(app, app.caller_jobs, named_jobs(texts)).stored


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-1", "1_", "1_[3-1]", "1_[1-999999999]", "1_[a]", "1;id", "１", "²", "1" * 30, "4294967294", "1+",
     "1_2+3", "1.", "1.shell", "%j", "1\n2", "99999999999"],
)  # fmt: skip
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="not"):
        parse_id(text)


def test_ids_stand_between_commas_or_blanks() -> None:
    found = named_jobs(["12 13", "14_[1,3],15.batch"])
    assert [(each.job_id, each.step) for each in found] == [(12, ""), (13, ""), (14, ""), (15, "batch")]


@pytest.mark.parametrize("text", ["30", "40", "40_0", "99"])
def test_without_slurm_nothing_is_said_about_others_jobs(folder: str, text: str) -> None:
    done = CliRunner().invoke(command, [text], obj=Ordinary(store_path=folder))
    assert isinstance(done.exception, CommandError)
    assert f"almanac has nothing about job {text}, and Slurm did not answer" in str(done.exception)
    assert "bob" not in str(done.exception) + done.output


def test_operators_see_everybodys(folder: str) -> None:
    assert stored_ids(Operator(store_path=folder), "30", "40_0") == (30, 40)


@pytest.mark.parametrize("argv", [["-S", "@1", "-a"], ["-S", "@1", "-u", "bob"]])
def test_a_user_may_not_list_others(folder: str, argv: list[str]) -> None:
    done = CliRunner().invoke(jobs_command, argv, obj=Ordinary(store_path=folder))
    assert done.exit_code != 0 and "operator" in str(done.exception)


def test_who_may_not_read_the_store_is_told_how_the_report_comes(folder: str, tmp_path: Path) -> None:
    done: Any = CliRunner().invoke(command, ["10"], obj=outsider(folder, tmp_path / "nothing"))
    assert "Slurm did not answer" in str(done.exception)
    assert "no reports for you are published" in done.exception.hint


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
    job = OwnJob(Site.of(store.of("c"), config, 1_795_100_000), OwnFolder(Outgoing(folder / "advice")))
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
    listed = CliRunner().invoke(jobs_command, ["--ended-since", "@1"], obj=published, catch_exceptions=False)
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:-1]] == [
        "10", "20_0", "20_1", "20_3", "50+0", "50+1",
    ]  # fmt: skip
    assert (
        listed.stderr.splitlines()[-1]
        == "showing the jobs published for you; the list last changed 2026-11-19 14:53 UTC"
    )
    recent = CliRunner().invoke(jobs_command, ["--ended-since", "@1795000721"], obj=published, catch_exceptions=False)
    assert [line.split()[0] for line in recent.stdout.splitlines()[1:-1]] == ["20_1", "20_3", "50+0", "50+1"]


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
    for program, argv in ((command, [text]), (jobs_command, ["-S", "@1", "-j", text])):
        done: Any = CliRunner().invoke(program, argv, obj=published)
        assert f"{text}" in str(done.exception) and done.exception.hint
        assert "bob" not in str(done.exception) + done.output


@pytest.mark.parametrize("program", [command, jobs_command], ids=["report", "jobs"])
def test_a_store_that_is_named_and_cannot_be_read_is_not_passed_over(published: Outsider, program: Any) -> None:
    published.store_path = "/nowhere/store"
    done = CliRunner().invoke(program, ["10"] if program is command else ["-S", "@1"], obj=published)
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
        ["10", "--me"],
        ["10", "-a"],
        ["20", "--html", "x.html"],
    ],
)
def test_usage(folder: str, argv: list[str]) -> None:
    assert CliRunner().invoke(command, argv, obj=Ordinary(store_path=folder)).exit_code == 2


def test_report_of_a_generated_job(site: Any) -> None:
    rows = site.json("jobs", "-a", "--where", "verdict=ok", "--min", "gpu_count=4", "-n", "3", "--json")
    said = site("report", *(str(row["job_id"]) for row in rows))
    assert len(re.findall("^[╭│][─ ]+Job ", said, re.MULTILINE)) == len(rows) == 3
    assert "█" in said or "▄" in said
