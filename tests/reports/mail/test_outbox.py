"""The outbox: every run is decided once, and what is queued stays queued until it is sent or given up."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from forks import forks_of
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from mails import NOW_S, message, run
from profiles import examples

from almanac.config import Mail
from almanac.errors import BusyError, NotAllowedError, SchemaVersionError, StoreError
from reports.mail.due import Planner
from reports.mail.ended import ReportCandidate
from reports.mail.outbox import Outbox, OutboxCounts, outbox_path, read_counts

OWNER_UID, GROUP_GID = 60_001, 60_010


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return outbox_path(tmp_path)


@pytest.fixture
def outbox(path: Path) -> Iterator[Outbox]:
    with Outbox(path) as opened:
        yield opened


def test_an_ended_run_is_noticed_once(outbox: Outbox) -> None:
    assert outbox.notice([run(1), run(2, end_s=NOW_S - 90)]) == 2
    assert outbox.notice([run(2, end_s=NOW_S - 90), run(3)]) == 1
    assert [each.job_id for each in outbox.waiting(NOW_S, "test")] == [2, 1, 3]


def test_a_requeued_job_is_another_run(outbox: Outbox) -> None:
    again = run(1, end_s=NOW_S - 5)
    outbox.notice([run(1)])
    outbox.skip([run(1)], "too short", NOW_S)
    assert outbox.notice([run(1), again]) == 1
    assert outbox.waiting(NOW_S, "test") == [again]


def test_runs_keep_all_that_is_known_of_them(outbox: Outbox) -> None:
    task = run(7, array_job_id=5, gpu_count=4, user="o\"'; DROP TABLE run; --\n")
    outbox.notice([task])
    assert outbox.waiting(NOW_S, "test") == [task]


def test_a_delayed_run_comes_back(outbox: Outbox) -> None:
    outbox.notice([run(1), run(2)])
    outbox.delay([run(1)], NOW_S + 60, "could not be made")
    assert outbox.waiting(NOW_S + 59, "test") == [run(2)]
    assert outbox.waiting(NOW_S + 60, "test") == [run(1), run(2)]


def test_a_message_decides_on_its_runs(outbox: Outbox) -> None:
    outbox.notice([run(1), run(2), run(3)])
    assert outbox.put(message(1, run(1), run(2)), NOW_S)
    assert outbox.waiting(NOW_S, "test") == [run(3)]
    assert outbox.ready(NOW_S, 10) == [replace(message(1, run(1), run(2)), put_s=NOW_S)]
    assert not outbox.put(message(1, run(1), run(2)), NOW_S + 1)
    assert len(outbox.ready(NOW_S + 1, 10)) == 1


def test_what_is_sent_is_never_queued_again(outbox: Outbox) -> None:
    weekly = message(1, kind="weekly")
    outbox.put(weekly, NOW_S)
    outbox.sent(weekly, NOW_S + 1)
    assert not outbox.put(weekly, NOW_S + 2)
    assert outbox.ready(NOW_S + 9, 10) == []
    assert (outbox.sent_since(NOW_S + 1), outbox.mails_since(NOW_S + 1)) == (1, {"ann": 1})
    assert (outbox.sent_since(NOW_S + 2), outbox.mails_since(NOW_S + 2)) == (0, {})


def test_a_failed_message_is_tried_later_and_says_how_often(outbox: Outbox) -> None:
    outbox.put(message(1), NOW_S)
    outbox.trying(message(1), NOW_S + 30)
    assert outbox.ready(NOW_S + 29, 10) == []
    assert [each.attempts for each in outbox.ready(NOW_S + 30, 10)] == [1]
    outbox.failed(message(1), "451 later\r\nforged")
    assert [each.attempts for each in outbox.ready(NOW_S + 30, 10)] == [1]
    outbox.hold(message(1), NOW_S + 90, "unknown user")
    assert outbox.ready(NOW_S + 89, 10) == []
    assert [each.attempts for each in outbox.ready(NOW_S + 90, 10)] == [1]


def test_counts_say_what_became_of_everything(outbox: Outbox, path: Path) -> None:
    outbox.notice([run(number) for number in range(1, 7)])
    outbox.skip([run(1), run(2)], "opted out", NOW_S)
    outbox.skip([run(1)], "opted out", NOW_S)
    outbox.skip([run(3)], "too short", NOW_S)
    for number in (4, 5):
        outbox.put(message(number, run(number)), NOW_S + number)
    outbox.put(message(9, kind="weekly"), NOW_S + 9)
    outbox.sent(message(4), NOW_S + 20)
    outbox.sent(message(4), NOW_S + 20)
    outbox.put(message(8), NOW_S + 3)
    outbox.failed(message(8), "550 no such user")
    outbox.failed(message(5), "451")
    assert outbox.give_up(NOW_S + 2, NOW_S + 20, "") == []
    assert outbox.give_up(NOW_S + 3, NOW_S + 20, "no server") == ["ann@example.org: 550 no such user"]
    outbox.sent(message(9, kind="weekly"), NOW_S + 20)
    expected = OutboxCounts(
        {"job": 1, "weekly": 1}, 2, 1, {"opted out": 2, "too short": 1}, 1, NOW_S - 60, 1, NOW_S + 5
    )
    assert outbox.counts() == expected
    outbox.forget(NOW_S + 1000)
    assert outbox.counts() == expected
    assert read_counts(path) == expected  # while it is held


def test_counts_of_no_outbox_are_none_and_of_an_empty_one_zero(path: Path) -> None:
    assert read_counts(path) is None
    with Outbox(path) as outbox:
        assert outbox.counts() == OutboxCounts({}, 0, 0, {}, 0, None, 0, None)


def test_what_is_forgotten_is_no_news(outbox: Outbox) -> None:
    outbox.notice([run(number) for number in range(1, 5)])
    outbox.put(message(1, run(1)), NOW_S)
    outbox.sent(message(1), NOW_S)
    outbox.skip([run(2)], "too short", NOW_S)
    outbox.put(message(3, run(3)), NOW_S)
    assert outbox.forget(NOW_S + 1) == 3  # runs 1 and 2, and message 1
    assert outbox.waiting(NOW_S, "test") == [run(4)]
    assert outbox.ready(NOW_S, 10)[0].runs == (run(3),)
    assert outbox.notice([run(1), run(2), run(3), run(4)]) == 0
    assert outbox.notice([run(1, end_s=NOW_S + 1)]) == 1


def test_a_clock_that_was_ahead_makes_no_later_end_old(outbox: Outbox) -> None:
    outbox.notice([run(1)])
    outbox.skip([run(1)], "too short", NOW_S)
    outbox.forget(NOW_S + 10**7)
    assert outbox.notice([run(1), run(2, end_s=NOW_S)]) == 1


def test_what_cannot_be_told_yet_hides_nothing_else(outbox: Outbox) -> None:
    """Each minute a task of the large array ends, so that all of it is due, and other clusters' jobs wait as well."""
    tasks = [run(1000 + number, end_s=NOW_S - 900, array_job_id=1000) for number in range(300)]
    others = [run(number, cluster="other", end_s=NOW_S - 900) for number in range(300)]
    outbox.notice([*tasks, *others, run(1)])
    for minute in range(3):
        now_s = NOW_S + 60 * minute
        outbox.notice([run(2000 + minute, end_s=now_s, array_job_id=1000)])
        found = [
            ReportCandidate(each, 900, is_array_open=each.array_job_id is not None)
            for each in outbox.waiting(now_s, "test")
        ]
        plan = Planner(lambda user: "every", lambda user: "x", Mail(), now_s).plan(found)
        assert [each.run.job_id for each in plan.ready] == [1]


def test_forgetting_gives_the_room_of_sent_mails_back(path: Path) -> None:
    mails = [replace(message(number), raw=b"x" * 100_000) for number in range(20)]
    with Outbox(path) as outbox:
        for each in mails:
            outbox.put(each, NOW_S)
        for each in mails:
            outbox.sent(each, NOW_S)
    assert path.stat().st_size > 2_000_000
    with Outbox(path) as outbox:
        outbox.forget(NOW_S)
    assert path.stat().st_size < 200_000
    with Outbox(path) as outbox:
        assert outbox.counts().sent == {"job": 20}


def test_a_run_that_ends_after_its_decision_is_kept(outbox: Outbox) -> None:
    """slurmctld's clock may be ahead of ours."""
    ahead = run(1, end_s=NOW_S + 200)
    outbox.notice([ahead])
    outbox.skip([ahead], "too short", NOW_S)
    assert outbox.forget(NOW_S + 100) == 0
    assert outbox.notice([ahead]) == 0


def test_two_processes_at_once_are_one_too_many(outbox: Outbox, path: Path) -> None:
    with pytest.raises(BusyError):
        Outbox(path).__enter__()
    assert outbox.notice([run(1)]) == 1


def test_others_cannot_read_it(outbox: Outbox, path: Path) -> None:
    outbox.put(message(1), NOW_S)
    for file in path.parent.iterdir():
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
    """The outbox of a store that belongs to a service user; others of its group may look into the store."""
    if os.getuid() != 0:
        pytest.skip("only root can act as other users")
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, OWNER_UID, GROUP_GID)
        Path(folder).chmod(0o750)
        yield outbox_path(Path(folder))


def test_what_root_makes_is_the_store_owner_s(owned: Path) -> None:
    with Outbox(owned) as outbox:
        outbox.notice([run(1)])
        made = [owned.parent, *owned.parent.iterdir()]
        assert len(made) >= 4
        assert {(file.stat().st_uid, file.stat().st_gid) for file in made} == {(OWNER_UID, GROUP_GID)}
    with acting_as(OWNER_UID, GROUP_GID), Outbox(owned) as outbox:
        assert outbox.notice([run(1), run(2)]) == 1


def test_root_gives_no_file_away_that_has_another_name(owned: Path) -> None:
    secret = owned.parents[1] / "secret"
    secret.touch()
    owned.parent.mkdir()
    owned.with_suffix(".lock").hardlink_to(secret)
    with Outbox(owned):
        assert secret.stat().st_uid == 0


def test_another_operator_is_told_that_it_is_not_theirs(owned: Path) -> None:
    with acting_as(OWNER_UID, GROUP_GID), Outbox(owned) as outbox:
        outbox.notice([run(1)])
    with acting_as(OWNER_UID + 1, GROUP_GID), pytest.raises(NotAllowedError, match="the store's owner only") as caught:
        read_counts(owned)
    assert "away" not in caught.value.hint
    counts = read_counts(owned)
    assert counts is not None and counts.waiting == 1
    with acting_as(OWNER_UID, GROUP_GID), Outbox(owned) as outbox:
        assert outbox.counts() == counts


def test_only_a_damaged_outbox_is_to_be_moved_away(path: Path) -> None:
    with Outbox(path) as outbox, pytest.raises(StoreError) as caught:
        outbox.put(replace(message(1), recipient=None), NOW_S)  # type: ignore[arg-type]
    assert "away" not in caught.value.hint
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError) as caught:
        read_counts(path)
    assert "move it away" in caught.value.hint


def test_faults_are_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        Outbox(tmp_path / "absent" / "reports" / "outbox.sqlite").__enter__()
    path = outbox_path(tmp_path)
    path.parent.mkdir()
    path.symlink_to("/etc/passwd")
    with pytest.raises(StoreError, match="not a regular file"):
        Outbox(path).__enter__()
    path.unlink()
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match="cannot be used"):
        Outbox(path).__enter__()
    path.unlink()
    with Outbox(path):
        pass
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 4")
    database.close()
    with pytest.raises(SchemaVersionError):
        Outbox(path).__enter__()


@pytest.mark.parametrize("suffix", ["", "-journal", "-wal", "-shm"])
@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/null")])
def test_nobody_waits_at_a_fifo_beside_the_outbox(path: Path, suffix: str, plant: Callable[[Path], None]) -> None:
    with Outbox(path) as outbox:
        outbox.notice([run(1)])
    planted = path.with_name(path.name + suffix)
    planted.unlink(missing_ok=True)
    plant(planted)
    for use in (lambda: Outbox(path).__enter__(), lambda: read_counts(path)):
        with pytest.raises(StoreError, match=rf"{planted}: not a regular file"):
            use()


def test_a_failed_transaction_leaves_nothing(outbox: Outbox) -> None:
    outbox.notice([run(1)])
    unnamed = replace(message(1, run(1)), recipient=None)  # type: ignore[arg-type]
    with pytest.raises(StoreError):
        outbox.put(unnamed, NOW_S)
    assert outbox.waiting(NOW_S, "test") == [run(1)]
    assert outbox.put(message(1, run(1)), NOW_S)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_fills_while_the_server_takes_a_mail_has_room_for_its_record(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], check=True)
    try:
        with Outbox(outbox_path(tmp_path)) as outbox:
            for number in (1, 2):
                outbox.put(replace(message(number), raw=bytes(100_000)), NOW_S)
            first, second = outbox.ready(NOW_S, 2)
            outbox.trying(first, NOW_S + 900)
            with contextlib.suppress(OSError), (tmp_path / "ballast").open("wb", buffering=0) as ballast:
                while ballast.write(bytes(512)):
                    pass
            outbox.sent(first, NOW_S)
            with pytest.raises(StoreError, match="No space left"):
                outbox.trying(second, NOW_S + 900)
            (tmp_path / "ballast").unlink()
            outbox.trying(second, NOW_S + 900)
            outbox.sent(second, NOW_S)
            assert outbox.counts().sent == {"job": 2}
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# Ends with SIGKILL before statement number kill_at; begins again where it finds the outbox, as a timer's runs do.
WORKER = """
import os, signal, sqlite3
from pathlib import Path
from forks import serve
from mails import NOW_S, message, run
from reports.mail.outbox import Outbox

connect = sqlite3.connect

def work(path, kill_at, taken):
    left = kill_at
    def traced(*args, **options):
        database = connect(*args, **options)
        def count(statement):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        database.set_trace_callback(count)
        return database
    sqlite3.connect = traced
    with Outbox(Path(path)) as outbox:
        outbox.notice([run(number) for number in range(1, 7)])
        for each in outbox.waiting(NOW_S, "test"):
            if each.job_id == 6:
                outbox.skip([each], "too short", NOW_S)
            else:
                outbox.put(message(each.job_id, each), NOW_S)
        for each in outbox.ready(NOW_S, 10):
            if each.message_id != "<m5@example.org>":
                with open(taken, "a") as server:  # what the server takes
                    server.write(each.message_id + "\\n")
                outbox.sent(each, NOW_S)
        outbox.give_up(NOW_S, NOW_S, "550")

serve(work)
"""


def test_killed_before_any_statement_nothing_is_lost_and_one_mail_at_most_is_sent_twice(tmp_path: Path) -> None:
    kill_at, code = 0, -9
    with forks_of("-c", WORKER) as work:
        while code == -9:
            kill_at += 1
            folder = tmp_path / str(kill_at)
            folder.mkdir()
            path, server = outbox_path(folder), folder / "server"
            code, _ = work(str(path), kill_at, str(server))
            if code == -9:
                assert work(str(path), 0, str(server))[0] == 0
            with Outbox(path) as outbox:
                counts = outbox.counts()
                assert counts == OutboxCounts({"job": 4}, 0, 1, {"too short": 1}, 0, None, 0, None), kill_at
            taken = Counter(server.read_text().split())
            assert set(taken) == {f"<m{number}@example.org>" for number in (1, 2, 3, 4)}
            assert taken.total() <= 5
    assert code == 0
    assert kill_at > 50, "statements were counted"


class Transitions(RuleBasedStateMachine):
    """The outbox against a dictionary that says where each run and message is."""

    runs = Bundle("runs")
    messages = Bundle("messages")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.outbox = Outbox(outbox_path(self.folder)).__enter__()
        self.now_s = NOW_S
        self.run_states: dict[int, str] = {}
        self.states: dict[str, str] = {}
        self.put_s: dict[str, int] = {}

    def teardown(self) -> None:
        self.outbox.__exit__(None, None, None)
        shutil.rmtree(self.folder)

    @rule(target=runs, job_id=st.integers(1, 8))
    def notice(self, job_id: int) -> int:
        self.now_s += 1
        new = self.outbox.notice([run(job_id)])
        assert new == (job_id not in self.run_states)
        self.run_states.setdefault(job_id, "waiting")
        return job_id

    @rule(job_id=runs)
    def skip(self, job_id: int) -> None:
        self.outbox.skip([run(job_id)], "too short", self.now_s)
        if self.run_states[job_id] == "waiting":
            self.run_states[job_id] = "skipped"

    @rule(job_id=runs)
    def delay(self, job_id: int) -> None:
        self.outbox.delay([run(job_id)], self.now_s + 3, "telemetry")

    @rule(target=messages, number=st.integers(1, 4), of=st.lists(runs, max_size=3, unique=True))
    def put(self, number: int, of: list[int]) -> str:
        each = message(number, *map(run, of))
        assert self.outbox.put(each, self.now_s) == (each.message_id not in self.states)
        self.states.setdefault(each.message_id, "queued")
        self.put_s.setdefault(each.message_id, self.now_s)
        for job_id in of:
            if self.run_states[job_id] == "waiting":
                self.run_states[job_id] = "told"
        return each.message_id

    @rule(name=messages, outcome=st.sampled_from(["sent", "failed", "held"]))
    def settle(self, name: str, outcome: str) -> None:
        each = replace(message(0), message_id=name)
        if outcome == "sent":
            self.outbox.sent(each, self.now_s)
        elif outcome == "failed":
            self.outbox.failed(each, "451")
        else:
            self.outbox.hold(each, self.now_s + 2, "unknown user")
        if self.states[name] == "queued" and outcome == "sent":
            self.states[name] = outcome

    @rule()
    def give_up(self) -> None:
        self.outbox.give_up(self.now_s - 5, self.now_s, "550")
        for name, put_s in self.put_s.items():
            if self.states[name] == "queued" and put_s <= self.now_s - 5:
                self.states[name] = "given up"

    @rule(late=consumes(messages))
    def close_and_open(self, late: str) -> None:
        self.outbox.__exit__(None, None, None)
        self.outbox = Outbox(self.outbox.path).__enter__()

    @invariant()
    def every_run_and_message_is_in_one_place(self) -> None:
        far_s = self.now_s + 10
        waiting = {each.job_id for each in self.outbox.waiting(far_s, "test")}
        assert waiting == {job_id for job_id, state in self.run_states.items() if state == "waiting"}
        queued = {each.message_id for each in self.outbox.ready(far_s, 100)}
        assert queued == {name for name, state in self.states.items() if state == "queued"}
        counts = self.outbox.counts()
        assert (counts.waiting, counts.queued) == (len(waiting), len(queued))
        assert sum(counts.skipped.values()) == list(self.run_states.values()).count("skipped")
        assert counts.sent.get("job", 0) == list(self.states.values()).count("sent")
        assert counts.given_up == list(self.states.values()).count("given up")


TestTransitions = Transitions.TestCase
TestTransitions.settings = examples(0.4, stateful_step_count=20)


def test_a_schema_that_is_no_text_is_damage(path: Path) -> None:
    with Outbox(path):
        pass
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE ", b"CREATE TABLE\xa0"))
    with pytest.raises(StoreError, match=r"outbox is damaged|cannot be used") as caught, Outbox(path):
        pass
    assert "move it away" in caught.value.hint
