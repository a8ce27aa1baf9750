"""Modes of the files that almanac makes, with the caller's umask 000."""

from __future__ import annotations

import dataclasses
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from mails import NOW_S, message

from almanac.atomic import write_output
from almanac.errors import StoreError
from cli.demo import CONFIG
from cli.main import cli
from demo import GeneratedSource, SiteShape
from reports.mail.record import MailRecord, record_path
from slurm_hooks.jobs.log import JobLine, JobLog
from telemetry.characterize.table import write_tables
from telemetry.ingest import IngestResult, ingest
from telemetry.store.store import Store

MEANT_FOR_ALL = {"advice/user/_site/advice", "advice/user/_site/advice.json",
                 "almanac.prom", "slurm/almanac-ended.sh", "slurm/job_submit.lua",
                 "slurm/cli_filter.lua"}  # fmt: skip
LINE = JobLine("set", NOW_S, "demo", 1, NOW_S, 0, "SiteFactor", "0", "1", "")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make folders of other users")


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def run(folder: Path, *argv: str) -> None:
    """In this process: what `main` does about the umask does not count."""
    options = ["--config", str(folder / "almanac.toml"), "--store", str(folder / "deep/below/store")]
    done = CliRunner().invoke(cli, [*options, *argv])
    assert done.exit_code == 0, f"{argv}: {done.output}{done.exception!r}"


def make_site(folder: Path) -> Store:
    """A day of a small site, through the store's own functions."""
    start_s = (int(time.time()) // 86400 - 2) * 86400
    shape = dataclasses.replace(SiteShape.demo(), days=2, start_s=start_s, users=4, jobs_per_day=40)
    store = Store.create(folder / "deep/below/store")
    result = IngestResult("generated", shape.start_s, shape.end_s)
    ingest(GeneratedSource(shape), store.of("demo"), shape.start_s, shape.end_s, result, lambda rows, reached_s: None)
    config = CONFIG + f'\n[hooks]\nadvice_dir = "{folder}/advice"\ngroup = "root"\n'
    (folder / "almanac.toml").write_text(config)
    (folder / "almanac.toml").chmod(0o644)
    return store


def test_no_file_is_writable_by_others_and_none_of_jobs_is_readable(tmp_path: Path, no_umask: None) -> None:
    store = make_site(tmp_path)
    for command in ("summarize", "train", "publish"):
        run(tmp_path, command)
    job_id = str(store.of("demo").read("jobs", ["job_id"]).to_pylist()[0]["job_id"])
    run(tmp_path, "report", job_id, "--html", str(tmp_path / "job.html"))
    run(tmp_path, "site-report", "--csv", str(tmp_path / "new/tables"))
    run(tmp_path, "site-report", "--study", "--csv", str(tmp_path / "new/figures"))
    run(tmp_path, "backtest", "tier", "--plot", str(tmp_path / "plot.png"))
    run(tmp_path, "metrics", "--textfile", str(tmp_path / "almanac.prom"))
    (tmp_path / "slurm").mkdir(mode=0o755)
    run(tmp_path, "install-hooks", "--prefix", str(tmp_path / "slurm"), "--yes")
    run(tmp_path, "install-hooks", "--prefix", str(tmp_path / "slurm"), "ended", "--yes")
    JobLog(store.root / "actions", "reprioritize").append([LINE], NOW_S)
    with MailRecord(record_path(store.root)) as record:
        record.trying(message(1), NOW_S)
        assert (store.root / "reports/outbox.sqlite-wal").exists()
        faults = faults_below(tmp_path)
    assert faults == []


def faults_below(root: Path) -> list[str]:
    """Files and folders that others may write to, and files that they may read and that are not meant for them."""
    found = []
    for path in sorted(root.rglob("*")):
        mode, name = path.lstat().st_mode, str(path.relative_to(root))
        is_shown = name in MEANT_FOR_ALL or path.name == "almanac.toml" or stat.S_ISDIR(mode)
        if mode & stat.S_IWOTH or (mode & stat.S_IROTH and not is_shown):
            found.append(f"{stat.filemode(mode)} {name}")
    return found


def test_a_command_lets_no_library_make_what_others_may_write(tmp_path: Path) -> None:
    code = (
        "import os, sys; from cli import main as m; m.cli.main = lambda **_: open(sys.argv[1], 'w').close(); m.main()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "made")], umask=0, check=False)
    assert done.returncode == 0
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o664


@needs_root
@pytest.mark.parametrize(
    ("owner", "group", "mode", "expected"),
    [(60001, 60001, 0o755, 0o600), (60001, 60001, 0o2775, 0o600), (0, 60001, 0o2770, 0o600), (0, 0, 0o755, 0o640)],
    ids=["another's", "another's, setgid", "root's, setgid", "root's"],
)
def test_what_root_writes_into_a_folder_of_others_is_roots_alone(
    tmp_path: Path, owner: int, group: int, mode: int, expected: int
) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    os.chown(folder, owner, group)
    folder.chmod(mode)
    elsewhere.write_text("precious")
    (folder / "page.html").symlink_to(elsewhere)
    write_output(folder / "page.html", b"page")
    assert (folder / "page.html").lstat().st_mode & 0o777 == expected
    assert (folder / "page.html").read_bytes() == b"page" and elsewhere.read_text() == "precious"


@needs_root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's link")
def test_another_users_link_does_not_choose_where_tables_are_written(tmp_path: Path) -> None:
    """In /tmp, and where fs.protected_symlinks is 0."""
    (tmp_path / "of-root").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "of-root")
    os.lchown(tmp_path / "out", 60_001, 60_001)
    with pytest.raises(StoreError, match="a link of another user"):
        write_tables({}, tmp_path / "out")
    assert not list((tmp_path / "of-root").iterdir())
    os.chown(tmp_path / "of-root", 60_001, 60_001)
    assert write_tables({}, tmp_path / "out")


def test_root_writes_actions_through_no_link_and_hands_them_over(tmp_path: Path) -> None:
    """The store is almanac's: what it plants there must not make root write elsewhere."""
    os.chown(tmp_path, 60001, 60001)
    log, actions = (
        JobLog(tmp_path / "actions", "reprioritize"),
        [LINE],
    )
    log.append(actions, NOW_S)
    [made] = (tmp_path / "actions").iterdir()
    assert (made.stat().st_uid, made.parent.stat().st_uid) == (60001, 60001)
    made.unlink()
    made.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Exception, match="cannot be written"):
        log.append(actions, NOW_S)
    assert not (tmp_path / "elsewhere").exists()
