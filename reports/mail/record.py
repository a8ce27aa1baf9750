"""The record of mail in SQLite: the runs that still need a decision, and what became of the others.

A run is noticed once. It is skipped with a reason, or its mail is handed over to the site's mail server. What the
server does not take is due again. Each hand-over is recorded before it begins: if a kill prevents the record of its
outcome, the next run says so, and the mail is sent once more.
"""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from almanac.atomic import locked, make_inner_folder
from almanac.errors import StoreError
from almanac.units import DAY_S, printable
from reports.mail.record_file import GIVEN_UP as GIVEN_UP
from reports.mail.record_file import RecordCounts as RecordCounts
from reports.mail.record_file import counts_of, explained, keep_room, make_file, open_record
from reports.mail.record_file import read_counts as read_counts
from reports.mail.record_file import record_path as record_path

STARTED = "started"
"""Mark: when mail was switched on. Jobs that ended before get no mail."""
SEEN = "seen"
"""Mark: the end of the accounting data that was looked at."""
ASKED = "asked"
"""Mark: the time of the last accounting query of a run."""
DAILY = "day"
"""Mark: the last day that was begun."""
WEEK, WEEK_TRIED = "week", "week tried"
"""Marks: the end of the last week with digests, and the time of the last try that left digests."""
RAN, DOUBTED = "ran", "doubted"
"""Marks: the time of the last run, and the number of runs since then whose clock was not believed."""
DOUBTED_RUNS = 60
"""An hour of the timer."""
MOST_BEHIND_S = 60
"""A clock that is set back by no more costs nothing: NTP does so."""
RETRY_S = 900
"""Seconds until a mail that the server refused is due again. A refusing server gets four tries an hour."""
TOLD_S = 7 * DAY_S
"""Advice that a mail gave for a job family is not news for so long (s)."""
KILLED = "a run ended while the mail server took it: it may come twice"
_MAX_WORDS = 500
_RUN = "cluster, job_id, submit_s, user, end_s, gpu_count, array_job_id"
_VALUES = ", ".join(f":{name}" for name in _RUN.split(", "))
_KEY = "cluster = :cluster AND user = :user AND job_id = :job_id AND submit_s = :submit_s AND end_s = :end_s"
_OPEN = "kind IN ('waiting', 'trying', 'failed')"
_TAKEN = "kind IN ('job', 'digest', 'weekly')"
_SET_BACK = (
    "run SET time_s = :now_s WHERE time_s > :now_s",
    "mark SET time_s = :now_s - 3600 WHERE time_s > :now_s + 60",
    "told SET told_s = :now_s WHERE told_s > :now_s",
)


@dataclass(frozen=True)
class EndedRun:
    """A run of a job that has ended. If a job is requeued, its next run has another submit or end time.

    Times come from the table jobs only. The clock of a hook can differ by a second, which would make another run. A
    weekly digest has job_id 0 and its week as times.
    """

    cluster: str
    job_id: int
    submit_s: int
    user: str
    end_s: int
    gpu_count: int
    array_job_id: int | None = None


@dataclass(frozen=True)
class Told:
    """One thing that a mail told about a job family. what: the rule of an advice, or how jobs ended (`outcome_of`)."""

    cluster: str
    name_key: str
    gpu_count: int
    what: str


@dataclass(frozen=True)
class Message:
    """A mail, as the bytes that the server gets. kind: "job", "digest" (a burst of jobs), or "weekly"."""

    message_id: str
    user: str
    recipient: str
    kind: str
    raw: bytes
    runs: tuple[EndedRun, ...] = ()
    told: tuple[Told, ...] = ()


class MailRecord:
    """Use it as `with MailRecord(path) as record`. A second process gets BusyError. All methods raise StoreError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open = contextlib.ExitStack()

    def __enter__(self) -> MailRecord:
        lock = self.path.with_suffix(".lock")
        with contextlib.ExitStack() as opened, explained(self.path):
            make_inner_folder(self.path.parent)
            opened.enter_context(locked(lock, "decides on reports and sends them now"))
            make_file(self.path)
            self._database = opened.enter_context(contextlib.closing(open_record(self.path)))
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def believes(self, now_s: int, cluster: str, most_ahead_s: int) -> bool:
        """Record a run, and return False if its clock was set since the last one: what is due by it may not be due.

        A clock that stays as it is for DOUBTED_RUNS runs is believed: the host was off, or the earlier time was wrong.
        Then times in the future, which mail would wait for, are corrected: marks to an hour ago, other times to now.
        """
        last_s, doubted = self.mark(RAN, cluster), self.mark(DOUBTED, cluster) or 0
        is_near = last_s is None or last_s - MOST_BEHIND_S <= now_s <= last_s + most_ahead_s
        is_believed = is_near or doubted >= DOUBTED_RUNS
        marks = [(RAN, now_s), (DOUBTED, 0)] if is_believed else [(DOUBTED, doubted + 1)]
        with self._changing() as db:
            for changes in _SET_BACK if is_believed else ():
                db.execute(f"UPDATE {changes}", {"now_s": now_s})
            db.executemany("INSERT OR REPLACE INTO mark (name, cluster, time_s) VALUES (?, ?, ?)",
                           [(name, cluster, value) for name, value in marks])  # fmt: skip
        return is_believed

    def start_now(self, cluster: str, now_s: int) -> None:
        """Jobs that end before now get no mail."""
        for name in (STARTED, SEEN):
            self.set_mark(name, cluster, now_s)

    def mark(self, name: str, cluster: str) -> int | None:
        """The time (s since 1970) of a mark. None if it was never set."""
        found = self._select("SELECT time_s FROM mark WHERE name = ? AND cluster = ?", (name, cluster))
        return found[0][0] if found else None

    def set_mark(self, name: str, cluster: str, time_s: int) -> None:
        """Move a mark forward. It never moves back."""
        with self._changing() as db:
            db.execute(
                "INSERT INTO mark VALUES (?, ?, ?) ON CONFLICT (name, cluster) DO UPDATE "
                "SET time_s = max(time_s, excluded.time_s)",
                (name, cluster, time_s),
            )

    def notice(self, runs: Sequence[EndedRun]) -> int:
        """Add runs that have ended, and return how many of them are new. Known runs stay as they are.

        Runs that ended before the time that `forget` has reached are not added: they may have had their mail.
        """
        with self._changing() as db:
            before = db.total_changes
            db.executemany(
                f"INSERT OR IGNORE INTO run ({_RUN}) SELECT {_VALUES} FROM horizon WHERE before_s <= :end_s",
                map(vars, runs),
            )
            return db.total_changes - before

    def due(self, now_s: int, cluster: str) -> list[EndedRun]:
        """A cluster's runs without a decision, the oldest end first. Refused ones come back after RETRY_S.

        The number is not limited, so runs that are not ready cannot hide others.
        """
        sql = (
            f"SELECT {_RUN} FROM run WHERE {_OPEN} AND job_id > 0 AND cluster = ? "
            "AND (kind = 'waiting' OR time_s <= ?) ORDER BY end_s, job_id, submit_s"
        )
        return [EndedRun(*row) for row in self._select(sql, (cluster, now_s - RETRY_S))]

    def failures(self, cluster: str) -> dict[EndedRun, str]:
        """The runs whose mail was not taken, and why: the recipient and the server's words."""
        sql = f"SELECT {_RUN}, recipient, why FROM run WHERE kind = 'failed' AND cluster = ? ORDER BY end_s"
        return {EndedRun(*row): f"{to or row[3]}: {why}" for *row, to, why in self._select(sql, (cluster,))}

    def is_taken(self, run: EndedRun) -> bool:
        """True if the server has taken a mail about the run, such as a weekly digest."""
        return bool(self._select(f"SELECT 1 FROM run WHERE {_TAKEN} AND {_KEY}", vars(run)))

    def skip(self, runs: Sequence[EndedRun], reason: str, now_s: int) -> None:
        """Decide that runs get no mail. reason: a few words, one of a small number of texts."""
        with self._changing() as db:
            number = _decide(db, runs, f"kind = 'skipped', time_s = {now_s}, why = :reason", reason=reason)
            if reason == GIVEN_UP:
                _count(db, "given up", "", number)
            else:
                _count(db, "skipped", reason, number)

    def trying(self, message: Message, now_s: int) -> None:
        """Record that a mail is handed over now. Do so only after this.

        If nothing can be written (a full disk), this raises. Then do not send: the outcome could not be recorded
        either, and every run would send the mail again. It also keeps room on the disk for `taken`.
        """
        with explained(self.path):
            keep_room(self._room)
        with self._changing() as db:
            db.executemany(f"INSERT OR IGNORE INTO run ({_RUN}) VALUES ({_VALUES})", map(vars, message.runs))
            changes = f"kind = 'trying', time_s = {now_s}, recipient = :recipient, message_id = :message_id"
            _decide(db, message.runs, changes, recipient=message.recipient, message_id=message.message_id)

    def taken(self, message: Message, now_s: int) -> None:
        """The server has taken the mail. A disk that is full by now has the room that `trying` kept."""
        try:
            self._taken(message, now_s)
        except StoreError:
            self._room.unlink(missing_ok=True)
            self._taken(message, now_s)

    def _taken(self, message: Message, now_s: int) -> None:
        with self._changing() as db:
            _decide(db, message.runs, f"kind = :sent_as, time_s = {now_s}, why = ''", sent_as=message.kind)
            _count(db, "sent", message.kind, 1)
            db.execute("DELETE FROM told WHERE told_s < ?", (now_s - TOLD_S,))
            more = {"user": message.user, "message_id": message.message_id, "now_s": now_s}
            db.executemany(
                "INSERT OR REPLACE INTO told VALUES (:cluster, :user, :name_key, :gpu_count, :what, :message_id, "
                ":now_s)",
                [vars(each) | more for each in message.told],
            )

    @property
    def _room(self) -> Path:
        return self.path.with_suffix(".room")

    def failed(self, runs: Sequence[EndedRun], why: str, now_s: int) -> None:
        """Record that the mail about these runs was not taken, or could not be made. They are due again later."""
        with self._changing() as db:
            _decide(db, runs, f"kind = 'failed', time_s = {now_s}, why = :why", why=printable(why, _MAX_WORDS))
            _count(db, "failed", "", 1)

    def killed(self) -> list[str]:
        """Recipients of mails that a killed run was handing over. They are due again after RETRY_S."""
        found = self._select("SELECT DISTINCT recipient FROM run WHERE kind = 'trying' ORDER BY recipient")
        if found:
            with self._changing() as db:
                db.execute("UPDATE run SET kind = 'failed', why = ? WHERE kind = 'trying'", (KILLED,))
        return [recipient for (recipient,) in found]

    def told_since(self, since_s: int, cluster: str) -> dict[tuple[str, Told], int]:
        """The last time at which a mail told a user each thing, at since_s or later."""
        sql = (
            "SELECT user, cluster, name_key, gpu_count, what, max(told_s) FROM told "
            "WHERE told_s >= ? AND cluster = ? GROUP BY user, name_key, gpu_count, what"
        )
        return {(user, Told(*told)): told_s for user, *told, told_s in self._select(sql, (since_s, cluster))}

    def taken_since(self, since_s: int) -> Counter[str]:
        """By user, the number of mails that the server took at since_s or later."""
        sql = f"SELECT DISTINCT user, message_id FROM run WHERE {_TAKEN} AND time_s >= ?"
        return Counter(user for user, _ in self._select(sql, (since_s,)))

    def counts(self) -> RecordCounts:
        with explained(self.path):
            return counts_of(self._database)

    def forget(self, before_s: int) -> int:
        """Remove rows that were decided before then, and return how many. The file shrinks."""
        old = f"FROM run WHERE NOT {_OPEN} AND time_s < :s AND end_s < :s"
        with self._changing() as db:
            # Take the time from the removed rows: the clock may be ahead.
            db.execute(
                f"UPDATE horizon SET before_s = max(before_s, (SELECT coalesce(max(end_s) + 1, 0) {old}))",
                {"s": before_s},
            )
            removed = db.execute(f"DELETE {old}", {"s": before_s}).rowcount
        with explained(self.path):
            self._database.executescript("PRAGMA incremental_vacuum")  # execute() would end after the first page
        return removed

    def _select(self, sql: str, values: Mapping[str, Any] | Sequence[Any] = ()) -> list[Any]:
        with explained(self.path):
            return self._database.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: fully on disk at the end, or not at all."""
        with explained(self.path):
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            finally:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")


@contextlib.contextmanager
def copied_record(store_root: Path) -> Iterator[MailRecord]:
    """A copy of the record, because a run may use the record itself now."""
    path = record_path(store_root)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        if path.exists():
            with (
                explained(path),
                contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source,
                contextlib.closing(sqlite3.connect(copy)) as to,
            ):
                source.backup(to)
        with MailRecord(copy) as record:
            yield record


def _decide(db: sqlite3.Connection, runs: Sequence[EndedRun], changes: str, **values: str) -> int:
    """Change the runs that are open. Return how many are."""
    sql = f"UPDATE run SET {changes} WHERE {_OPEN} AND {_KEY}"
    return db.executemany(sql, [vars(run) | values for run in runs]).rowcount if runs else 0


def _count(db: sqlite3.Connection, name: str, label: str, number: int) -> None:
    if number:
        db.execute(
            "INSERT INTO counter VALUES (?, ?, ?) ON CONFLICT (name, label) DO UPDATE "
            "SET number = number + excluded.number",
            (name, label, number),
        )
