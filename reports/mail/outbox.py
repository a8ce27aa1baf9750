"""The ended runs that still need a decision, and the mails that still have to be sent, in SQLite: no kill loses one.

A run is noticed once and decided once: it becomes part of a message, or is skipped with a reason. One transaction
queues a message and decides on its runs. A message leaves the queue when the server has taken it, or it is given up.

Each try is recorded, with the time of the next try, before it begins. If a kill or a full disk then prevents the record
of its outcome, the same mail is sent once more, with the same Message-ID, and not before that time.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from almanac.errors import StoreError
from almanac.units import printable
from reports.mail.outbox_file import EndedRun as EndedRun
from reports.mail.outbox_file import Message as Message
from reports.mail.outbox_file import OutboxCounts as OutboxCounts
from reports.mail.outbox_file import Told as Told
from reports.mail.outbox_file import count, counts_of, explained, keep_room, make_file, open_outbox, remember
from reports.mail.outbox_file import outbox_path as outbox_path
from reports.mail.outbox_file import read_counts as read_counts
from telemetry.store.atomic import locked, make_inner_folder

_KEY = "cluster = :cluster AND job_id = :job_id AND submit_s = :submit_s AND end_s = :end_s"
_RUN = "cluster, job_id, submit_s, user, end_s, gpu_count, array_job_id"
_MESSAGE = "message_id, user, recipient, kind, raw, attempts, next_try_s, put_s"
_MAX_ERROR = 500
_DECIDED = "raw = NULL, error = ?, decided_s = ?"
RAN, DOUBTED = "ran", "doubted"
"""Marks: the time of the last run, and the number of runs since then whose clock was not believed."""
DOUBTED_RUNS = 60
"""An hour of the timer."""
MOST_BEHIND_S = 60
"""A clock that is set back by no more costs nothing: NTP does so."""
MOST_DELAY_S = 86_400
"""No delay is ever longer than this."""
_SET_BACK = (
    "run SET retry_s = :now_s WHERE state = 'waiting' AND retry_s > :late_s",
    "run SET decided_s = :now_s WHERE decided_s > :now_s",
    "message SET next_try_s = :now_s WHERE state = 'queued' AND next_try_s > :now_s + 3600",
    "message SET put_s = :now_s WHERE state = 'queued' AND put_s > :now_s",
    "message SET decided_s = :now_s WHERE decided_s > :now_s",
    "mark SET time_s = :now_s - 3600 WHERE time_s > :now_s + 60",
    "told SET told_s = :now_s WHERE told_s > :now_s",
)


class Outbox:
    """Use it as `with Outbox(path) as outbox`. A second process gets BusyError. All methods raise StoreError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Outbox:
        lock = self.path.with_suffix(".lock")
        with contextlib.ExitStack() as opened, explained(self.path):
            make_inner_folder(self.path.parent)
            opened.enter_context(locked(lock, "decides on reports and sends them now"))
            make_file(self.path)
            self._database = opened.enter_context(contextlib.closing(open_outbox(self.path)))
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def believes(self, now_s: int, cluster: str, most_ahead_s: int) -> bool:
        """Record a run, and return False if its clock was set since the last one: what is due by it may not be due.

        A clock that stays as it is for DOUBTED_RUNS runs is believed: the host was off, or the earlier time was wrong.
        """
        last_s, doubted = self.mark(RAN, cluster), self.mark(DOUBTED, cluster) or 0
        is_near = last_s is None or last_s - MOST_BEHIND_S <= now_s <= last_s + most_ahead_s
        is_believed = is_near or doubted >= DOUBTED_RUNS
        marks = [(RAN, now_s), (DOUBTED, 0)] if is_believed else [(DOUBTED, doubted + 1)]
        with self._changing() as db:
            db.executemany("INSERT OR REPLACE INTO mark (name, cluster, time_s) VALUES (?, ?, ?)",
                           [(name, cluster, value) for name, value in marks])  # fmt: skip
        return is_believed

    def set_back_times(self, now_s: int) -> None:
        """Correct times in the future, which a clock that was ahead has left: mail would wait for them.

        Marks are set to an hour ago, other times to now. Delays of up to MOST_DELAY_S stay as they are, and those of a
        queued mail of up to an hour.
        """
        with self._changing() as db:
            for changes in _SET_BACK:
                db.execute(f"UPDATE {changes}", {"now_s": now_s, "late_s": now_s + MOST_DELAY_S})

    def mark(self, name: str, cluster: str) -> int | None:
        """The time (s since 1970) of a mark (`reports.mail.marks`). None if it was never set."""
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

    def add_marks(self, cluster: str, marks: Mapping[str, int]) -> None:
        """Set all of these marks, unless the cluster has a mark already."""
        if marks and not self._select("SELECT 1 FROM mark WHERE cluster = ?", (cluster,)):
            with self._changing() as db:
                db.executemany(
                    "INSERT INTO mark VALUES (?, ?, ?)", [(name, cluster, time_s) for name, time_s in marks.items()]
                )

    def notice(self, runs: Sequence[EndedRun]) -> int:
        """Add runs that have ended, and return how many of them are new. Known runs stay as they are.

        Runs that ended before the time that `forget` has reached are not added: they may have had their mail.
        """
        values = ", ".join(f":{name}" for name in _RUN.split(", "))
        with self._changing() as db:
            before = db.total_changes
            db.executemany(
                f"INSERT OR IGNORE INTO run ({_RUN}, state) SELECT {values}, 'waiting' FROM horizon "
                "WHERE before_s <= :end_s",
                map(vars, runs),
            )
            return db.total_changes - before

    def waiting(self, now_s: int, cluster: str) -> list[EndedRun]:
        """A cluster's runs without a decision whose delay is over, the oldest end first.

        The number is not limited, so runs that are not ready cannot hide others.
        """
        sql = (
            f"SELECT {_RUN} FROM run WHERE state = 'waiting' AND cluster = ? AND retry_s <= ? "
            "ORDER BY end_s, job_id, submit_s"
        )
        return [EndedRun(*row) for row in self._select(sql, (cluster, now_s))]

    def has(self, message_id: str) -> bool:
        """Whether this message was ever queued."""
        return bool(self._select("SELECT 1 FROM message WHERE message_id = ?", (message_id,)))

    def delay(self, runs: Sequence[EndedRun], until_s: int, reason: str) -> None:
        """Let waiting runs wait until then, because their mail could not be made."""
        with self._changing() as db:
            _decide(db, runs, "retry_s = :until_s, reason = :reason", until_s=until_s, reason=reason)

    def put(self, message: Message, now_s: int) -> bool:
        """Queue a message and decide on its runs, in one transaction. False if it was queued before.

        Its runs must have been noticed. Earlier decisions on them stay.
        """
        with self._changing() as db:
            is_new = not db.execute("SELECT 1 FROM message WHERE message_id = ?", (message.message_id,)).fetchall()
            if is_new:
                db.execute(
                    "INSERT INTO message (message_id, user, recipient, kind, raw, state, next_try_s, put_s) "
                    "VALUES (:message_id, :user, :recipient, :kind, :raw, 'queued', :next_try_s, :now_s)",
                    {**vars(message), "now_s": now_s},
                )
                remember(db, message, now_s)
            changes = "state = 'told', reason = '', message_id = :message_id, decided_s = :now_s"
            _decide(db, message.runs, changes, message_id=message.message_id, now_s=now_s)
            return is_new

    def told_since(self, since_s: int, cluster: str) -> dict[tuple[str, Told], int]:
        """When each user was last told each thing, at since_s or later, by mails that are queued or were sent."""
        sql = (
            "SELECT user, cluster, name_key, gpu_count, what, max(told_s) FROM told "
            "WHERE told_s >= ? AND cluster = ? GROUP BY user, name_key, gpu_count, what"
        )
        return {(user, Told(*told)): told_s for user, *told, told_s in self._select(sql, (since_s, cluster))}

    def skip(self, runs: Sequence[EndedRun], reason: str, now_s: int) -> None:
        """Decide that waiting runs get no mail. reason: a few words, one of a small number of texts."""
        with self._changing() as db:
            changes = "state = 'skipped', reason = :reason, decided_s = :now_s"
            count(db, "skipped", reason, _decide(db, runs, changes, reason=reason, now_s=now_s))

    def ready(self, now_s: int, limit: int) -> list[Message]:
        """Messages to send now, also those of a killed process: first tries, then repeated ones, each oldest first.

        So mail that is refused again and again delays no other.
        """
        sql = (
            f"SELECT {_MESSAGE} FROM message WHERE state = 'queued' AND next_try_s <= ? "
            "ORDER BY attempts > 0, put_s, message_id LIMIT ?"
        )
        names = _MESSAGE.split(", ")
        return [
            Message(**dict(zip(names, row, strict=True)), runs=self._runs(row[0]))
            for row in self._select(sql, (now_s, limit))
        ]

    def mails_since(self, since_s: int) -> Counter[str]:
        """By user, the number of messages that are queued, or were sent at since_s or later."""
        sql = (
            "SELECT user FROM message WHERE state = 'queued' "
            "UNION ALL SELECT user FROM message WHERE state = 'sent' AND decided_s >= ?"
        )
        return Counter(user for (user,) in self._select(sql, (since_s,)))

    def sent_since(self, since_s: int) -> int:
        """The number of messages that were sent at since_s or later."""
        return len(self._select("SELECT 1 FROM message WHERE state = 'sent' AND decided_s >= ?", (since_s,)))

    def trying(self, message: Message, next_try_s: int) -> None:
        """Record that a try begins. Send the message only after this: it is not ready again before next_try_s.

        If nothing can be written (a full disk), this raises. Then do not send: the outcome could not be recorded
        either, and every run would send the mail again. It also keeps room on the disk for `sent`.
        """
        with explained(self.path):
            keep_room(self._room)
        with self._changing() as db:
            _update(db, message, "attempts = attempts + 1, next_try_s = ?", next_try_s)

    def sent(self, message: Message, now_s: int) -> None:
        """The server has taken it. Removes its bytes. A disk that is full by now has the room that `trying` kept."""
        try:
            self._sent(message, now_s)
        except StoreError:
            self._room.unlink(missing_ok=True)
            self._sent(message, now_s)

    def _sent(self, message: Message, now_s: int) -> None:
        with self._changing() as db:
            count(db, "sent", message.kind, _update(db, message, f"state = 'sent', {_DECIDED}", "", now_s))

    @property
    def _room(self) -> Path:
        return self.path.with_suffix(".room")

    def failed(self, message: Message, error: str) -> None:
        """The try that `trying` recorded has failed; a later one may succeed."""
        with self._changing() as db:
            count(db, "failed", "", _update(db, message, "error = ?", printable(error, _MAX_ERROR)))

    def hold(self, message: Message, until_s: int, reason: str) -> None:
        """Let it wait without a try, while the system does not know its user."""
        with self._changing() as db:
            _update(db, message, "error = ?, next_try_s = ?", reason, until_s)

    def withdraw(self, message: Message, reason: str, now_s: int) -> None:
        """It will not be sent, because its user no longer wants it. Its runs count as skipped. reason: see `skip`."""
        with self._changing() as db:
            changed = _update(db, message, f"state = 'given up', {_DECIDED}", reason, now_s)
            count(db, "skipped", reason, changed * max(1, len(message.runs)))
            if changed:
                db.execute("DELETE FROM told WHERE message_id = ?", (message.message_id,))

    def give_up(self, put_until_s: int, now_s: int, error: str) -> list[str]:
        """Drop the messages that were queued then or before, with their bytes. Return recipient and error of each.

        error: of messages that were never tried.
        """
        old = "FROM message WHERE state = 'queued' AND put_s <= ?"
        with self._changing() as db:
            found = db.execute(f"SELECT message_id, recipient, error {old} ORDER BY put_s", (put_until_s,)).fetchall()
            error = printable(error, _MAX_ERROR)
            db.executemany(
                f"UPDATE message SET state = 'given up', {_DECIDED} WHERE message_id = ?",
                [(own or error, now_s, message_id) for message_id, _, own in found],
            )
            db.executemany("DELETE FROM told WHERE message_id = ?", [(message_id,) for message_id, *_ in found])
            count(db, "given up", "", len(found))
        return [f"{recipient}: {own or error}" for _, recipient, own in found]

    def counts(self) -> OutboxCounts:
        with explained(self.path):
            return counts_of(self._database)

    def forget(self, before_s: int) -> int:
        """Remove rows that were decided, sent, or given up before then, and return how many. The file shrinks."""
        with self._changing() as db:
            before = db.total_changes
            # Runs of a message that is still queued stay with it.
            old = (
                "FROM run WHERE decided_s < :s AND end_s < :s AND coalesce(message_id, '') NOT IN "
                "(SELECT message_id FROM message WHERE state = 'queued')"
            )
            # Take the time from the removed rows: the clock may be ahead.
            for sql in (
                f"UPDATE horizon SET before_s = max(before_s, (SELECT coalesce(max(end_s) + 1, 0) {old}))",
                f"DELETE {old}",
                "DELETE FROM message WHERE decided_s < :s AND message_id NOT IN "
                "(SELECT message_id FROM run WHERE message_id IS NOT NULL)",
            ):
                db.execute(sql, {"s": before_s})
            removed = db.total_changes - before - 1
        with explained(self.path):
            self._database.executescript("PRAGMA incremental_vacuum")  # execute() would end after the first page
        return removed

    def _runs(self, message_id: str) -> tuple[EndedRun, ...]:
        sql = f"SELECT {_RUN} FROM run WHERE message_id = ? ORDER BY cluster, job_id, submit_s, end_s"
        return tuple(EndedRun(*row) for row in self._select(sql, (message_id,)))

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


def _update(db: sqlite3.Connection, message: Message, changes: str, *values: Any) -> int:
    """Change a message if it is still queued. Return the number of changed rows: 0 or 1."""
    sql = f"UPDATE message SET {changes} WHERE state = 'queued' AND message_id = ?"
    return db.execute(sql, (*values, message.message_id)).rowcount


def _decide(db: sqlite3.Connection, runs: Sequence[EndedRun], changes: str, **values: Any) -> int:
    """Change the runs that still wait. Return how many did."""
    sql = f"UPDATE run SET {changes} WHERE state = 'waiting' AND {_KEY}"
    return db.executemany(sql, [vars(run) | values for run in runs]).rowcount if runs else 0
