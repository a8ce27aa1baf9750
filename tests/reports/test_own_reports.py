"""A user's own reports: they say what the store says, to that user alone, and only what changed is made."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from almanac.config import Reports
from almanac.errors import BusyError, ConfigError, FileFormatError, StoreError
from reports.context import JobContext
from reports.job_report import render_email, render_page, to_json
from reports.own_choice import newest_runs
from reports.own_files import OwnFiles, open_own
from reports.own_folder import OwnFolder
from reports.own_format import MAX_FILE_BYTES, pack_report, unpack_index, unpack_report
from reports.own_publish import OwnJob, OwnPublished, publish_own
from reports.terminal import render_terminal
from telemetry.history import HISTORY, load_history_table
from telemetry.user_files import read_own

CLUSTER = "test"
NOW_S, DAY_S, HOUR_S = 1_795_003_200, 86_400, 3600
UIDS = {"alice": 60_001, "bob": 60_002}
NAMES = {uid: user for user, uid in UIDS.items()}
IS_ROOT = os.geteuid() == 0
CASES = {
    "balanced": 101, "idle": 201, "no-telemetry": 301, "half": 401, "out-of-memory": 501, "64-gpus": 601,
    "cancelled": 701, "requeued": 801, "mig": 901, "array-task": 1002, "hostile": 1101, "never-started": 1201,
    "failed": 1301, "timeout": 1401, "reserved": 1501,
}  # fmt: skip
only_root = pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")


class Publisher:
    """Publishes from the site's store into a folder of its own."""

    def __init__(self, reported: Any, root: Path) -> None:
        self.reported, self.root, self.uids, self.now_s = reported, root, dict(UIDS), NOW_S
        self.own = Reports()

    @property
    def folder(self) -> OwnFolder:
        return OwnFolder(self.root, os.geteuid())

    def __call__(self, **changes: Any) -> OwnPublished:
        config = dataclasses.replace(self.reported.config, reports=self.own)
        job = OwnJob(self.reported.store, CLUSTER, config, self.now_s, self.folder)
        return publish_own(dataclasses.replace(job, **changes), self.uids.get, NAMES.get)

    def of(self, user: str) -> OwnFiles:
        return open_own(self.root, UIDS[user])

    def files(self) -> dict[str, bytes]:
        found = (path for path in sorted((self.root / "user").rglob("*")) if path.is_file())
        return {str(path.relative_to(self.root / "user")): path.read_bytes() for path in found}

    def times(self) -> dict[str, int]:
        return {name: (self.root / "user" / name).stat().st_ino for name in self.files()}


@pytest.fixture
def publisher(reported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publisher:
    tmp_path.chmod(0o755)
    if not IS_ROOT:  # who runs this owns everybody's files
        monkeypatch.setattr("reports.own_files.read_own", lambda path, _, most: read_own(path, os.geteuid(), most))
    return Publisher(reported, tmp_path / "advice")


def on_terminal(context: JobContext) -> str:
    console = Console(width=100, file=io.StringIO(), highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(render_terminal(context, 100))
    return capture.get()


@pytest.mark.parametrize("case", CASES)
def test_what_is_published_says_what_the_store_says(reported: Any, case: str) -> None:
    context = reported.contexts[case]
    own = unpack_report(pack_report(context))
    assert dataclasses.replace(own, series=None) == dataclasses.replace(context, series=None)
    mail, of_store = render_email(own, reported.config), render_email(context, reported.config)
    assert (mail.subject, mail.text, mail.html) == (of_store.subject, of_store.text, of_store.html)
    assert list(mail.images) == list(of_store.images)
    assert to_json(own) == to_json(context)
    assert render_page(own).startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("no-telemetry", "never-started")])
def test_published_samples_have_three_digits(reported: Any, case: str) -> None:
    context = reported.contexts[case]
    own = unpack_report(pack_report(context))
    assert own.series is not None
    assert (own.series.units, own.series.bin_s) == (context.series.units, context.series.bin_s)
    np.testing.assert_allclose(own.series.util_pct, context.series.util_pct, rtol=6e-4, atol=1e-6)
    used = context.series.values["hbm_used_mib"]
    np.testing.assert_allclose(own.series.values["hbm_used_mib"], used, rtol=6e-4)
    # A block can fall on the other side of a border: the terminals may differ in a few characters.
    ours, theirs = on_terminal(own), on_terminal(context)
    assert len(ours) == len(theirs)
    assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 0.01 * len(theirs)


def test_each_user_gets_their_own_jobs_and_no_others(publisher: Publisher) -> None:
    done = publisher()
    assert (done.lists, done.reports, done.waiting, done.not_shown) == (2, 59, 0, [])
    alice, bob = (publisher.of(user).index for user in ("alice", "bob"))
    assert {run.job_id for run in bob.runs} == set(range(1, 31))
    assert {run.job_id for run in alice.runs} == {*CASES.values(), *range(111, 123), 1001, 1003}
    assert all(run.report for run in (*alice.runs, *bob.runs))
    for name, content in publisher.files().items():
        uid, whole = int(name.split("/")[0]), gzip.decompress(content)
        other = {60_001: b'"bob"', 60_002: b'"alice"'}[uid]
        assert other not in whole


def test_reports_read_back_by_id_and_the_newest_run_counts(publisher: Publisher) -> None:
    publisher()
    own = publisher.of("alice")
    again, plain = own.contexts([801, 101, 801])
    assert [context.job_id for context in (again, plain)] == [801, 101]
    assert again.job["restarts"] == 1 and len(again.earlier_runs) == 1
    assert own.contexts([999]) == []


def test_the_list_has_the_rows_that_almanac_jobs_shows(publisher: Publisher) -> None:
    publisher()
    own = publisher.of("alice").history(HISTORY.names)
    stored = load_history_table(publisher.reported.store, CLUSTER, HISTORY.names, user="alice")
    as_rows = [
        [{name: None if value != value else value for name, value in row.items()} for row in table.to_pylist()]
        for table in (own, stored)
    ]
    assert own.schema == stored.schema
    assert as_rows[0] == as_rows[1]


def test_nothing_is_made_again_where_nothing_changed(publisher: Publisher) -> None:
    publisher()
    before = publisher.times()
    publisher.now_s += 600
    again = publisher()
    assert (again.lists, again.reports, again.removed) == (0, 0, 0)
    assert publisher.times() == before


def test_a_run_in_another_process_makes_nothing_again(publisher: Publisher) -> None:
    """What says that a job has not changed must not depend on the process."""
    runs = newest_runs(publisher.reported.store, CLUSTER, 0, 50)["alice"]
    program = (
        "import sys, pathlib; from telemetry.store import Store; from reports.own_choice import newest_runs;"
        f"runs = newest_runs(Store.open(pathlib.Path(sys.argv[1])), {CLUSTER!r}, 0, 50);"
        "print(*[run.digest for run in runs['alice']])"
    )
    root = str(publisher.reported.store.root)
    said = subprocess.run([sys.executable, "-c", program, root], capture_output=True, text=True, check=True).stdout
    assert said.split() == [run.digest for run in runs]


def test_only_the_newest_jobs_are_kept(publisher: Publisher) -> None:
    publisher()
    publisher.own = Reports(own_jobs=3)
    done = publisher()
    assert (done.lists, done.reports) == (2, 0)
    assert [run.job_id for run in publisher.of("bob").index.runs] == [3, 2, 1]
    assert len(publisher.files()) == 2 * (3 + 1)
    publisher.own = Reports(own_jobs=0)
    assert publisher().removed == 2
    assert publisher.files() == {}
    assert not list((publisher.root / "user").iterdir())


def test_old_jobs_go_and_with_the_last_one_everything(publisher: Publisher) -> None:
    publisher.own = Reports(own_days=2)
    publisher()
    assert 112 not in {run.job_id for run in publisher.of("alice").index.runs}
    assert 111 in {run.job_id for run in publisher.of("alice").index.runs}
    publisher.now_s += 3 * DAY_S
    done = publisher()
    assert (done.removed, publisher.files()) == (2, {})


def test_a_run_makes_so_many_reports_newest_jobs_first_and_the_next_one_goes_on(publisher: Publisher) -> None:
    publisher.own = Reports(own_per_run=20)
    seen = []
    for _ in range(3):
        done = publisher()
        seen.append((done.reports, done.waiting))
        own = publisher.of("bob")
        ends = [run.end_s for run in own.index.runs if run.report]
        waiting = [run.end_s for run in own.index.runs if not run.report]
        assert not waiting or not ends or min(ends) > max(waiting)
    assert seen == [(20, 39), (20, 19), (19, 0)]
    assert publisher().reports == 0


def test_a_job_without_its_report_is_listed_and_says_so(publisher: Publisher) -> None:
    publisher.own = Reports(own_per_run=1)
    publisher()
    own = publisher.of("bob")
    assert own.history(["job_id"]).num_rows == 30
    with pytest.raises(StoreError, match="not published yet"):
        own.contexts([30])


@pytest.mark.parametrize("fault", ["number", "size"])
def test_a_report_that_cannot_be_written_keeps_no_other_from_being_so(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def pack(context: JobContext) -> bytes:
        if context.job_id != 5:
            return pack_report(context)
        if fault == "size":
            return bytes(MAX_FILE_BYTES + 1)
        return pack_report(dataclasses.replace(context, metrics={**context.metrics, "energy_j": float("inf")}))

    monkeypatch.setattr("reports.own_publish.pack_report", pack)
    done = publisher()
    assert (done.reports, done.unwritable) == (58, 1)
    assert [run.job_id for run in publisher.of("bob").index.runs if run.report is None] == [5]


def test_a_dry_run_writes_nothing(publisher: Publisher) -> None:
    done = publisher(is_dry=True)
    assert (done.lists, done.reports) == (2, 59)
    assert not publisher.root.exists()


def test_users_without_a_uid_and_names_that_share_one_get_nothing(publisher: Publisher) -> None:
    publisher.uids = {"alice": 60_001, "bob": 60_001}
    assert publisher().lists == 0
    publisher.uids = {"alice": 60_001}
    assert publisher().lists == 1
    assert publisher.folder.uids() == [60_001]


def test_reports_stay_while_the_user_database_is_out_of_reach_until_their_jobs_are_too_old(
    publisher: Publisher,
) -> None:
    publisher()
    before = publisher.files()
    publisher.uids = {}
    done = publisher()
    assert (done.removed, len(done.warnings)) == (0, 1)
    assert publisher.files() == before
    publisher.now_s += 31 * DAY_S
    assert publisher().removed == 2
    assert publisher.files() == {}


def test_a_uid_that_is_another_users_now_shows_them_nothing_of_the_former(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher()
    del publisher.uids["bob"]
    monkeypatch.setitem(NAMES, 60_002, "carol")
    assert publisher().removed == 1
    assert publisher.folder.uids() == [60_001]
    with pytest.raises(StoreError, match="no jobs of yours"):
        publisher.of("bob")


# --- whose files they are


@only_root
def test_owners_and_modes(publisher: Publisher) -> None:
    publisher()
    user = publisher.root / "user"
    for path in (user, user / "60001", user / "60001" / "reports"):
        assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (0, 0o711)
    for name in publisher.files():
        found = (user / name).stat()
        assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (int(name.split("/")[0]), 0o400)


def as_user(uid: int, act: Callable[[], object]) -> str:
    """What becomes of an act of that user: "done", or the name of what it raises."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            act()
            said = "done"
        except BaseException as error:
            said = type(error).__name__
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader) as out:  # noqa: PTH123 - of a descriptor
        return out.read()


@pytest.fixture
def open_root(reported: Any) -> Iterator[Path]:
    """A folder that every user can reach: pytest's own are closed to others."""
    import shutil
    import tempfile

    root = Path(tempfile.mkdtemp(prefix="almanac-own-", dir="/var/tmp"))
    root.chmod(0o755)
    yield root / "advice"
    shutil.rmtree(root)


@only_root
def test_users_read_their_own_reports_and_can_neither_read_others_nor_make_files(
    reported: Any, open_root: Path
) -> None:
    publisher = Publisher(reported, open_root)
    publisher()
    names = {uid: [name for name in publisher.files() if name.startswith(str(uid))] for uid in NAMES}

    def own() -> None:
        assert len(open_own(open_root, 60_001).contexts([101, 201])) == 2

    assert as_user(60_001, own) == "done"
    assert as_user(60_002, lambda: open_own(open_root, 60_001)) == "StoreError"
    for name in names[60_002]:
        assert as_user(60_001, lambda name=name: (open_root / "user" / name).read_bytes()) == "PermissionError"
    for folder in ("60001", "60001/reports", "60002", ""):
        path = open_root / "user" / folder
        assert as_user(60_001, lambda path=path: (path / "new").write_text("x")) == "PermissionError"
        assert as_user(60_001, lambda path=path: list(path.iterdir())) == "PermissionError"
    assert as_user(60_001, lambda: (open_root / "user" / names[60_001][0]).unlink()) == "PermissionError"
    assert as_user(60_001, lambda: (open_root / ".reports.json").read_bytes()) == "PermissionError"


@only_root
@pytest.mark.parametrize("plant", ["link", "folder", "fifo", "file", "hard link"])
@pytest.mark.parametrize("place", ["jobs", "reports", "user"])
def test_what_a_user_made_while_the_folder_was_theirs_harms_nobody(
    publisher: Publisher, tmp_path: Path, plant: str, place: str
) -> None:
    """Releases before gave users their folders: whatever stands in a file's or a folder's place is not followed."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "kept").write_text("secret")
    secret.chmod(0o700)
    before = (secret / "kept").stat()
    folder = publisher.root / "user" / "60001"
    target = {"jobs": folder / "jobs", "reports": folder / "reports", "user": folder}[place]
    target.parent.mkdir(parents=True)
    for path in (publisher.root, publisher.root / "user"):
        path.chmod(0o711)
    {
        "link": lambda: target.symlink_to(secret),
        "folder": lambda: (target / "full").mkdir(parents=True),
        "fifo": lambda: os.mkfifo(target),
        "file": lambda: target.write_text("mine"),
        "hard link": lambda: os.link(secret / "kept", target),
    }[plant]()
    for path in (folder, target):
        if not path.is_symlink() and plant != "hard link":
            os.chown(path, 60_001, 60_001)
    done = publisher()
    after = (secret / "kept").stat()
    assert (after.st_uid, after.st_mode, (secret / "kept").read_text()) == (before.st_uid, before.st_mode, "secret")
    assert [path.name for path in secret.iterdir()] == ["kept"]
    assert stat.S_IMODE(secret.stat().st_mode) == 0o700
    assert publisher.of("bob").index.user == "bob"
    if place == "user" and plant != "folder":
        assert done.not_shown == ["alice"]  # what is no folder there is for root to look at
        return
    assert done.not_shown == []
    assert len(publisher.of("alice").contexts([101])) == 1
    assert (folder.stat().st_uid, stat.S_IMODE(folder.stat().st_mode)) == (0, 0o711)


@only_root
def test_a_user_who_swaps_files_while_they_are_published_steers_nothing(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A link in the folder's place, put there between looking and opening, is not gone through."""
    publisher()
    reports = publisher.root / "user" / "60001" / "reports"
    aside, elsewhere = tmp_path / "aside", tmp_path / "elsewhere"
    elsewhere.mkdir()
    real = os.stat

    def swapped(path: Any, *args: Any, **named: Any) -> os.stat_result:
        found = real(path, *args, **named)
        if path == "reports" and not reports.is_symlink():
            reports.rename(aside)
            reports.symlink_to(elsewhere)
        return found

    publisher.own = Reports(own_jobs=40, own_days=29)
    for path in list(reports.iterdir())[:5]:
        path.unlink()
    monkeypatch.setattr("reports.own_folder.os.stat", swapped)
    done = publisher()
    assert done.not_shown == ["alice"]
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("where", ["", "user", ".."])
def test_nothing_is_published_where_others_can_write(publisher: Publisher, where: str) -> None:
    publisher()
    (publisher.root / where).resolve().chmod(0o777)
    with pytest.raises(ConfigError, match="others can write to it"):
        publisher()


def test_two_publishers_do_not_meet(publisher: Publisher) -> None:
    with publisher.folder.publishing(), pytest.raises(BusyError):
        publisher()


@only_root
def test_a_user_whose_quota_is_used_up_keeps_no_other_user_from_their_reports(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fchown

    def fchown(handle: int, uid: int, gid: int) -> None:
        if uid == 60_001:
            raise OSError("quota")
        real(handle, uid, gid)

    monkeypatch.setattr("os.fchown", fchown)
    assert publisher().not_shown == ["alice"]
    assert len(publisher.of("bob").contexts([1])) == 1
    monkeypatch.undo()
    done = publisher()
    assert (done.lists, done.reports, done.not_shown) == (1, 29, [])


def test_a_full_disk_is_said_and_leaves_what_was_there(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher.own = Reports(own_per_run=20)
    publisher()
    before = publisher.files()

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("reports.own_folder.flush_file_system", full)
    with pytest.raises(StoreError, match="No space left") as caught:
        publisher()
    assert "make room" in caught.value.hint
    assert publisher.files() == before
    monkeypatch.undo()
    assert publisher().reports == 20


class Killed(BaseException):
    pass


@pytest.mark.parametrize("call", ["rename", "fchmod", "unlink"])
def test_killed_at_any_moment_every_list_names_reports_that_are_there(
    publisher: Publisher, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.own = Reports(own_jobs=6)
    publisher()
    publisher.own = Reports(own_jobs=9, own_days=29)
    killed = 0
    for after in range(0, 40, 2):
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            _die_at(patch, call, after)
            publisher()
            killed -= 1
        killed += 1
        for user in UIDS:
            own = publisher.of(user)
            ids = [run.job_id for run in own.index.runs if run.report]
            assert len(own.contexts(ids)) == len(ids) >= 6
    assert killed
    publisher()
    assert len(publisher.files()) == 2 * (9 + 1)


def _die_at(patch: pytest.MonkeyPatch, call: str, after: int) -> None:
    """From that call on nothing of this process reaches the disk."""
    calls = [0]

    def dies(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def counted(*args: Any, **named: Any) -> Any:
            calls[0] += name == call
            if calls[0] > after:
                calls[0] = 10**6
                raise Killed
            return real(*args, **named)

        return counted

    for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "fchmod", "fchown"):
        patch.setattr(os, name, dies(name))


# --- reading


def test_who_has_nothing_is_told_so(publisher: Publisher) -> None:
    with pytest.raises(StoreError, match="no jobs of yours are published") as caught:
        publisher.of("alice")
    assert "by mail" in caught.value.hint


def replaced(publisher: Publisher, content: bytes) -> None:
    path = publisher.root / "user" / "60001" / "jobs"
    path.chmod(0o600)
    path.write_bytes(content)
    path.chmod(0o400)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        gzip.compress(b"no json\n"),
        gzip.compress(b"[]\n"),
        gzip.compress(b"[" * 100_000 + b"\n"),
        gzip.compress(b'{"almanac": "report", "format": 1}\n'),
        gzip.compress(b'{"almanac": "jobs", "format": 1}\n'),
        gzip.compress(b'{"almanac": "jobs", "format": 2}\n'),
        gzip.compress(b'{"almanac": "jobs", "format": 1, "cluster": "c", "user": "u", "written_s": 1, "runs": 3}\n'),
        gzip.compress(bytes(100 << 20)),
        bytes(MAX_FILE_BYTES + 1),
    ],
    ids=["empty", "garbage", "no-json", "list", "nested", "kind", "keys", "format", "types", "bomb", "large"],
)
def test_a_damaged_file_is_named_and_not_used(publisher: Publisher, content: bytes) -> None:
    publisher()
    replaced(publisher, content)
    with pytest.raises(FileFormatError, match="user/60001/jobs"):
        publisher.of("alice")


@pytest.mark.parametrize("plant", ["link", "fifo", "folder", "writable"])
def test_what_others_could_have_made_is_not_read(publisher: Publisher, tmp_path: Path, plant: str) -> None:
    publisher()
    path = publisher.root / "user" / "60001" / "jobs"
    content = path.read_bytes()
    if plant == "writable":
        path.chmod(0o666)
    else:
        path.unlink()
        (tmp_path / "other").write_bytes(content)
        {"link": lambda: path.symlink_to(tmp_path / "other"), "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}[
            plant
        ]()
    with pytest.raises((StoreError, FileFormatError)):
        publisher.of("alice")


@only_root
def test_a_file_of_another_user_is_not_read(publisher: Publisher) -> None:
    publisher()
    os.chown(publisher.root / "user" / "60001" / "jobs", 60_002, 60_002)
    with pytest.raises(FileFormatError, match="others than you"):
        publisher.of("alice")


@pytest.mark.parametrize("name", ["../../60002/jobs", "/etc/passwd", "..", "1-1-zz", ""])
def test_a_list_names_reports_of_its_own_folder_only(publisher: Publisher, name: str) -> None:
    publisher()
    own = publisher.of("alice")
    runs = tuple(dataclasses.replace(run, report=name) for run in own.index.runs)
    with pytest.raises(StoreError, match="not published"):
        dataclasses.replace(own, index=dataclasses.replace(own.index, runs=runs)).contexts([101])


@given(cut=st.floats(0, 1), flip=st.integers(0, 255))
def test_no_damage_to_a_report_is_more_than_an_error(reported: Any, cut: float, flip: int) -> None:
    content = bytearray(pack_report(reported.contexts["balanced"]))
    content[int(cut * (len(content) - 1))] ^= flip
    for damaged in (bytes(content), bytes(content[: int(cut * len(content))])):
        with contextlib.suppress(FileFormatError):
            assert unpack_report(damaged).job_id == 101


def test_the_format_is_what_it_was(reported: Any) -> None:
    """Other keys are another format: raise FORMAT in reports/own_format.py, and say so in docs/own-reports.md."""
    line, _, samples = gzip.decompress(pack_report(reported.contexts["balanced"])).partition(b"\n")
    document = json.loads(line)
    assert list(document) == [
        "almanac", "format", "cluster", "now_s", "job", "metrics", "gpus", "earlier_runs", "ranks", "advice", "tiers",
        "series",
    ]  # fmt: skip
    advice = {name: sorted(part) for name, part in document["advice"].items() if isinstance(part, dict)}
    assert advice == {
        "request": ["account", "constraints", "cpu_count", "gpu_count", "gpu_type", "gres", "is_array", "job_name",
                    "node_count", "partition", "qos", "submit_s", "time_limit_s", "user"],
        "tier": ["is_change", "note", "reason", "requested_tier", "rewrite", "tier"],
        "bound": ["bound_mib", "evidence_class", "highest_mib", "risk", "runs", "scope"],
        "duration": ["case", "duration_s", "gpu_time_s", "high_s", "low_s", "model_s", "rolling_s", "runs"],
        "priority": ["extra", "gpu_time_s", "is_cautious", "share_longer", "term", "worth_wait_s"],
        "set_aside": [],
        "evidence": ["changes_above_mib", "newest_peaks_mib", "paused_until_s", "ran_out_mib", "ran_out_s", "runs",
                     "scope", "since_s", "until_s"],
        "services": [],
    }  # fmt: skip
    series = document["series"]
    assert series["counters"] == ["gpu_util_pct", "hbm_used_mib", "tensor_active_frac", "dram_active_frac"]
    assert len(samples) == 2 * 4 * len(series["units"]) * series["bins"]
    assert document["format"] == 1


def test_a_list_of_another_user_is_not_shown(publisher: Publisher) -> None:
    publisher()
    index = unpack_index((publisher.root / "user" / "60001" / "jobs").read_bytes())
    assert (index.user, index.cluster, index.written_s) == ("alice", CLUSTER, NOW_S)
