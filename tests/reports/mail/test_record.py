"""The record of mail: every run is decided once, and what the server did not take is due again."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from mails import NOW_S, message, run
from profiles import examples

from almanac.config import Mail
from almanac.errors import BusyError, NotAllowedError, SchemaVersionError, StoreError
from reports.mail.due import MailPlanner, ReportCandidate
from reports.mail.record import GIVEN_UP, RETRY_S, TOLD_S, MailRecord, RecordCounts, Told, read_counts, record_path

OWNER_UID, GROUP_GID = 60_001, 60_010


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return record_path(tmp_path)


@pytest.fixture
def record(path: Path) -> Iterator[MailRecord]:
    with MailRecord(path) as opened:
        yield opened


def send(record: MailRecord, *numbers: int, now_s: int = NOW_S) -> None:
    for number in numbers:
        record.trying(message(number), now_s)
        record.taken(message(number), now_s)


def test_an_ended_run_is_noticed_once(record: MailRecord) -> None:
    assert record.notice([run(1), run(2, end_s=NOW_S - 90)]) == 2
    assert record.notice([run(2, end_s=NOW_S - 90), run(3)]) == 1
    assert [each.job_id for each in record.due(NOW_S, "test")] == [2, 1, 3]


def test_a_requeued_job_is_another_run(record: MailRecord) -> None:
    again = run(1, end_s=NOW_S - 5)
    record.notice([run(1)])
    record.skip([run(1)], "too short", NOW_S)
    assert record.notice([run(1), again]) == 1
    assert record.due(NOW_S, "test") == [again]


def test_runs_keep_all_that_is_known_of_them(record: MailRecord) -> None:
    task = run(7, array_job_id=5, gpu_count=4, user="o\"'; DROP TABLE run; --\n")
    record.notice([task])
    assert record.due(NOW_S, "test") == [task] and record.due(NOW_S, "other") == []


def test_what_the_server_took_is_never_due_again(record: MailRecord) -> None:
    record.notice([run(1), run(2)])
    send(record, 1)
    assert record.is_taken(run(1)) and not record.is_taken(run(2))
    record.failed([run(1)], "550", NOW_S)
    record.skip([run(1)], "too short", NOW_S)
    assert record.notice([run(1)]) == 0 and record.due(NOW_S + RETRY_S, "test") == [run(2)]
    assert record.taken_since(NOW_S) == {"ann": 1} and record.taken_since(NOW_S + 1) == {}


def test_what_the_server_refused_is_due_later_with_its_words(record: MailRecord) -> None:
    record.notice([run(1), run(2)])
    record.trying(message(1), NOW_S)
    record.failed([run(1)], "550 no \x1b[31m", NOW_S)
    assert record.due(NOW_S + RETRY_S - 1, "test") == [run(2)]
    assert record.due(NOW_S + RETRY_S, "test") == [run(1), run(2)]
    assert record.failures("test") == {run(1): "ann@example.org: 550 no ?[31m"}


def test_a_killed_hand_over_is_named_once_and_due_again(record: MailRecord) -> None:
    record.notice([run(1), run(2)])
    record.trying(message(1), NOW_S)
    assert record.killed() == ["ann@example.org"] and record.killed() == []
    assert record.due(NOW_S, "test") == [run(2)] and run(1) in record.due(NOW_S + RETRY_S, "test")


def test_counts_say_what_became_of_everything(record: MailRecord, path: Path) -> None:
    record.notice([run(number, end_s=NOW_S - 100 + number) for number in range(1, 7)])
    send(record, 7)
    record.skip([run(1, end_s=NOW_S - 99)], "too short", NOW_S)
    refused = message(2, run(2, end_s=NOW_S - 98), run(3, end_s=NOW_S - 97))
    record.trying(refused, NOW_S)
    record.failed(refused.runs, "451 later", NOW_S)
    record.skip([run(4, end_s=NOW_S - 96)], GIVEN_UP, NOW_S)
    words = "ann@example.org: 451 later"
    expected = RecordCounts({"job": 1}, 1, 1, {"too short": 1}, 2, NOW_S - 95, 1, NOW_S - 98, words)
    assert record.counts() == read_counts(path) == expected


def test_counts_of_no_record_are_none_and_of_an_empty_one_zero(path: Path) -> None:
    assert read_counts(path) is None
    with MailRecord(path) as record:
        assert record.counts() == RecordCounts({}, 0, 0, {}, 0, None, 0, None)


def test_what_is_forgotten_is_no_news(record: MailRecord) -> None:
    record.notice([run(number) for number in range(1, 5)])
    send(record, 1)
    record.skip([run(2)], "too short", NOW_S)
    record.trying(message(3), NOW_S)
    assert record.forget(NOW_S + 1) == 2
    assert record.due(NOW_S + RETRY_S, "test") == [run(3), run(4)]
    assert record.notice([run(1), run(2), run(3), run(4)]) == 0
    assert record.notice([run(1, end_s=NOW_S + 1)]) == 1


def test_what_a_mail_told_is_known_once_the_server_took_it(record: MailRecord) -> None:
    tells = Told("test", "train-#", 4, "low_use")
    for number in (1, 2):
        record.trying(replace(message(number, user=f"u{number}"), told=(tells, tells)), NOW_S)
    record.taken(replace(message(2, user="u2"), told=(tells, tells)), NOW_S)
    assert record.told_since(NOW_S, "test") == {("u2", tells): NOW_S}
    assert record.told_since(NOW_S, "other") == record.told_since(NOW_S + 1, "test") == {}
    record.taken(replace(message(4), told=(tells,)), NOW_S + TOLD_S + 1)
    assert list(record.told_since(0, "test")) == [("ann", tells)]


def test_a_clock_that_was_ahead_makes_no_later_end_old(record: MailRecord) -> None:
    record.notice([run(1)])
    record.skip([run(1)], "too short", NOW_S)
    record.forget(NOW_S + 10**7)
    assert record.notice([run(1), run(2, end_s=NOW_S)]) == 1


def test_what_cannot_be_told_yet_hides_nothing_else(record: MailRecord) -> None:
    """Each minute a task of the large array ends, so that all of it is due, and other clusters' jobs wait as well."""
    tasks = [run(1000 + number, end_s=NOW_S - 900, array_job_id=1000) for number in range(300)]
    others = [run(number, cluster="other", end_s=NOW_S - 900) for number in range(300)]
    record.notice([*tasks, *others, run(1)])
    for minute in range(3):
        now_s = NOW_S + 60 * minute
        record.notice([run(2000 + minute, end_s=now_s, array_job_id=1000)])
        found = [
            ReportCandidate(each, 900, is_array_open=each.array_job_id is not None)
            for each in record.due(now_s, "test")
        ]
        plan = MailPlanner(lambda user: "every", lambda user: "x", Mail(), now_s).plan(found)
        assert [each.run.job_id for each in plan.ready] == [1]


def test_a_run_that_ends_after_its_decision_is_kept(record: MailRecord) -> None:
    """slurmctld's clock may be ahead of ours."""
    ahead = run(1, end_s=NOW_S + 200)
    record.notice([ahead])
    record.skip([ahead], "too short", NOW_S)
    assert record.forget(NOW_S + 100) == 0
    assert record.notice([ahead]) == 0


def test_two_processes_at_once_are_one_too_many(record: MailRecord, path: Path) -> None:
    with pytest.raises(BusyError):
        MailRecord(path).__enter__()
    assert record.notice([run(1)]) == 1


def test_others_cannot_read_it(record: MailRecord, path: Path) -> None:
    send(record, 1)
    files = list(path.parent.iterdir())
    assert path in files
    for file in files:
        assert not stat.S_IMODE(file.stat().st_mode) & 0o007, file


@contextlib.contextmanager
def acting_as(uid: int, gid: int) -> Iterator[None]:
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def owned() -> Iterator[Path]:
    """The record of a store that belongs to a service user; others of its group may look into the store."""
    if os.getuid() != 0:
        pytest.skip("only root can act as other users")
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, OWNER_UID, GROUP_GID)
        Path(folder).chmod(0o750)
        yield record_path(Path(folder))


def test_what_root_makes_is_the_store_owner_s(owned: Path) -> None:
    with MailRecord(owned) as record:
        record.notice([run(1)])
        made = [owned.parent, *owned.parent.iterdir()]
        assert len(made) >= 4
        assert {(file.stat().st_uid, file.stat().st_gid) for file in made} == {(OWNER_UID, GROUP_GID)}
    with acting_as(OWNER_UID, GROUP_GID), MailRecord(owned) as record:
        assert record.notice([run(1), run(2)]) == 1


def test_root_gives_no_file_away_that_has_another_name(owned: Path) -> None:
    secret = owned.parents[1] / "secret"
    secret.touch()
    owned.parent.mkdir()
    owned.with_suffix(".lock").hardlink_to(secret)
    with MailRecord(owned):
        assert secret.stat().st_uid == 0


def test_another_operator_is_told_that_it_is_not_theirs(owned: Path) -> None:
    with acting_as(OWNER_UID, GROUP_GID), MailRecord(owned) as record:
        record.notice([run(1)])
    with acting_as(OWNER_UID + 1, GROUP_GID), pytest.raises(NotAllowedError, match="the store's owner only") as caught:
        read_counts(owned)
    assert "away" not in caught.value.hint
    counts = read_counts(owned)
    assert counts is not None and counts.waiting == 1
    with acting_as(OWNER_UID, GROUP_GID), MailRecord(owned) as record:
        assert record.counts() == counts


def test_faults_are_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        MailRecord(tmp_path / "absent" / "reports" / "outbox.sqlite").__enter__()
    path = record_path(tmp_path)
    path.parent.mkdir()
    path.symlink_to("/etc/passwd")
    with pytest.raises(StoreError, match="not a regular file"):
        MailRecord(path).__enter__()
    path.unlink()
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match="cannot be used"):
        MailRecord(path).__enter__()
    path.unlink()
    with MailRecord(path):
        pass
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 5")
    database.close()
    with pytest.raises(SchemaVersionError):
        MailRecord(path).__enter__()


@pytest.mark.parametrize("suffix", ["", "-journal", "-wal", "-shm"])
@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/null")])
def test_nobody_waits_at_a_fifo_beside_the_record(path: Path, suffix: str, plant: Callable[[Path], None]) -> None:
    with MailRecord(path) as record:
        record.notice([run(1)])
    planted = path.with_name(path.name + suffix)
    planted.unlink(missing_ok=True)
    plant(planted)
    for use in (lambda: MailRecord(path).__enter__(), lambda: read_counts(path)):
        with pytest.raises(StoreError, match=rf"{planted}: not a regular file"):
            use()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_fills_while_the_server_takes_a_mail_has_room_for_its_record(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], check=True)
    try:
        with MailRecord(record_path(tmp_path)) as record:
            record.trying(message(1), NOW_S)
            with contextlib.suppress(OSError), (tmp_path / "ballast").open("wb", buffering=0) as ballast:
                while ballast.write(bytes(512)):
                    pass
            record.taken(message(1), NOW_S)
            with pytest.raises(StoreError, match="No space left"):
                record.trying(message(2), NOW_S)
            (tmp_path / "ballast").unlink()
            send(record, 2)
            assert record.counts().sent == {"job": 2}
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


class Transitions(RuleBasedStateMachine):
    """The record against a dictionary that says what became of each run."""

    runs = Bundle("runs")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.record = MailRecord(record_path(self.folder)).__enter__()
        self.states: dict[int, str] = {}

    def teardown(self) -> None:
        self.record.__exit__(None, None, None)
        shutil.rmtree(self.folder)

    @rule(target=runs, job_id=st.integers(1, 8))
    def notice(self, job_id: int) -> int:
        assert self.record.notice([run(job_id)]) == (job_id not in self.states)
        self.states.setdefault(job_id, "waiting")
        return job_id

    @rule(job_id=runs, becomes=st.sampled_from(["skipped", "trying", "failed", "taken"]))
    def decide(self, job_id: int, becomes: str) -> None:
        if becomes == "skipped":
            self.record.skip([run(job_id)], "too short", NOW_S)
        else:
            self.record.trying(message(job_id), NOW_S)
        if becomes == "failed":
            self.record.failed([run(job_id)], "451", NOW_S)
        if becomes == "taken" and self.states[job_id] not in ("skipped", "taken"):
            self.record.taken(message(job_id), NOW_S)
        if self.states[job_id] not in ("skipped", "taken"):
            self.states[job_id] = becomes

    @rule()
    def close_open_and_forget(self) -> None:
        self.record.__exit__(None, None, None)
        self.record = MailRecord(self.record.path).__enter__()
        assert len(self.record.killed()) == ("trying" in self.states.values())
        self.states = {job_id: "failed" if state == "trying" else state for job_id, state in self.states.items()}

    @invariant()
    def every_run_is_in_one_place(self) -> None:
        states = list(self.states.values())
        due = {each.job_id for each in self.record.due(NOW_S + RETRY_S, "test")}
        assert due == {job_id for job_id, state in self.states.items() if state in ("waiting", "trying", "failed")}
        counts = self.record.counts()
        assert (counts.waiting, counts.refused) == (states.count("waiting"), len(due) - states.count("waiting"))
        assert sum(counts.skipped.values()) == states.count("skipped")
        assert counts.sent.get("job", 0) == states.count("taken")


TestTransitions = Transitions.TestCase
TestTransitions.settings = examples(0.4, stateful_step_count=20)


def test_a_schema_that_is_no_text_is_damage(path: Path) -> None:
    with MailRecord(path):
        pass
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE ", b"CREATE TABLE\xa0"))
    with pytest.raises(StoreError, match=r"record is damaged|cannot be used") as caught, MailRecord(path):
        pass
    assert "move it away" in caught.value.hint
