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
from types import TracebackType
from typing import Any

from almanac.units import printable
from reports.mail.outbox_file import OutboxCounts as OutboxCounts
from reports.mail.outbox_file import count, counts_of, explained, make_file, open_outbox
from reports.mail.outbox_file import outbox_path as outbox_path
from reports.mail.outbox_file import read_counts as read_counts
from reports.mail.records import EndedRun as EndedRun
from reports.mail.records import Message as Message
from telemetry.store.atomic import locked, make_inner_folder

_KEY = "cluster = ? AND job_id = ? AND submit_s = ? AND end_s = ?"
_RUN = "cluster, job_id, submit_s, user, end_s, gpu_count, array_job_id"
_FOREVER_S = 2**40
_MESSAGE = "message_id, user, recipient, kind, raw, attempts, next_try_s, put_s"
_MAX_ERROR = 500
MOST_DELAY_S = 86_400
"""No delay is ever longer than this."""
_SET_BACK = (
    "UPDATE run SET retry_s = $now_s WHERE state = 'waiting' AND retry_s > $late_s",
    "UPDATE run SET decided_s = $now_s WHERE decided_s > $now_s",
    "UPDATE message SET next_try_s = $now_s WHERE state = 'queued' AND next_try_s > $late_s",
    "UPDATE message SET put_s = $now_s WHERE state = 'queued' AND put_s > $now_s",
    "UPDATE message SET decided_s = $now_s WHERE decided_s > $now_s",
    "UPDATE mark SET time_s = $now_s - 3600 WHERE time_s > $now_s + 60",
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def set_back_times(self, now_s: int) -> None:
        """Correct times in the future, which a clock that was ahead has left: mail would wait for them.

        Marks are set to an hour ago, other times to now. Delays of up to MOST_DELAY_S stay as they are.
        """
        with self._changing() as db:
            for sql in _SET_BACK:
                db.execute(sql, {"now_s": now_s, "late_s": now_s + MOST_DELAY_S})

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

    def notice(self, runs: Sequence[EndedRun], now_s: int) -> int:
        """Add runs that have ended, and return how many of them are new. Known runs stay as they are.

        Runs that ended before the time that `forget` has reached are not added: they may have had their mail.
        """
        rows = [(*_values(run), run.end_s) for run in runs]
        with self._changing() as db:
            before = db.total_changes
            db.executemany(
                f"INSERT OR IGNORE INTO run ({_RUN}, state) SELECT ?, ?, ?, ?, ?, ?, ?, 'waiting' FROM horizon "
                "WHERE before_s <= ?",
                rows,
            )
            return db.total_changes - before

    def waiting(self, now_s: int, cluster: str) -> list[EndedRun]:
        """A cluster's runs without a decision whose delay is over, the oldest end first.

        Tasks of an array are decided together: if one is due, all waiting tasks are returned, delayed or not. The
        number is not limited, so runs that are not ready cannot hide others.
        """
        sql = f"""
            WITH those AS (SELECT * FROM run WHERE state = 'waiting' AND cluster = $cluster)
            SELECT {_RUN} FROM those
            WHERE retry_s <= $now_s OR array_job_id IN (SELECT array_job_id FROM those WHERE retry_s <= $now_s)
            ORDER BY end_s, job_id, submit_s"""
        return [EndedRun(*row) for row in self._select(sql, {"now_s": now_s, "cluster": cluster})]

    def has(self, message_id: str) -> bool:
        """Whether this message was ever queued."""
        return bool(self._select("SELECT 1 FROM message WHERE message_id = ?", (message_id,)))

    def delay(self, runs: Sequence[EndedRun], until_s: int, reason: str) -> None:
        """Let waiting runs wait until then, for example because their telemetry is not there yet."""
        with self._changing() as db:
            sql = f"UPDATE run SET retry_s = ?, reason = ? WHERE state = 'waiting' AND {_KEY}"
            db.executemany(sql, [(until_s, reason, *_key(run)) for run in runs])

    def put(self, message: Message, now_s: int) -> bool:
        """Queue a message and decide on its runs, in one transaction. False if it was queued before.

        Its runs must have been noticed. Earlier decisions on them stay.
        """
        with self._changing() as db:
            known = db.execute("SELECT 1 FROM message WHERE message_id = ?", (message.message_id,)).fetchall()
            if not known:
                values = (message.message_id, message.user, message.recipient, message.kind, message.raw)
                db.execute(
                    "INSERT INTO message (message_id, user, recipient, kind, raw, state, next_try_s, put_s) "
                    "VALUES (?, ?, ?, ?, ?, 'queued', ?, ?)",
                    (*values, message.next_try_s, now_s),
                )
            db.executemany(
                "UPDATE run SET state = 'told', reason = '', message_id = ?, decided_s = ? "
                f"WHERE state = 'waiting' AND {_KEY}",
                [(message.message_id, now_s, *_key(run)) for run in message.runs],
            )
            return not known

    def skip(self, runs: Sequence[EndedRun], reason: str, now_s: int) -> None:
        """Decide that waiting runs get no mail. reason: a few words, one of a small number of texts."""
        with self._changing() as db:
            before = db.total_changes
            db.executemany(
                f"UPDATE run SET state = 'skipped', reason = ?, decided_s = ? WHERE state = 'waiting' AND {_KEY}",
                [(reason, now_s, *_key(run)) for run in runs],
            )
            count(db, "skipped", reason, db.total_changes - before)

    def ready(self, now_s: int, limit: int, put_until_s: int | None = None) -> list[Message]:
        """Messages to send now, also those of a killed process: first tries, then repeated ones, each oldest first.

        So mail that is refused again and again delays no other. put_until_s: only messages queued then or before.
        """
        order = "attempts > 0, put_s, message_id"
        sql = (
            f"SELECT {_MESSAGE} FROM message WHERE state = 'queued' AND next_try_s <= ? AND put_s <= ? ORDER BY {order}"
        )
        found = self._select(f"{sql} LIMIT ?", (now_s, _FOREVER_S if put_until_s is None else put_until_s, limit))
        names = _MESSAGE.split(", ")
        return [Message(**dict(zip(names, row, strict=True)), runs=self._runs(row[0])) for row in found]

    def queued(self) -> Counter[str]:
        """The number of queued messages, by user."""
        rows = self._select("SELECT user, count(*) FROM message WHERE state = 'queued' GROUP BY user")
        return Counter(dict(rows))

    def sent_since(self, since_s: int) -> list[tuple[str, int]]:
        """User and time of each message that was sent then or later, in order of time."""
        sql = "SELECT user, decided_s FROM message WHERE state = 'sent' AND decided_s >= ? ORDER BY decided_s"
        return self._select(sql, (since_s,))

    def trying(self, message: Message, next_try_s: int) -> None:
        """Record that a try begins. Send the message only after this: it is not ready again before next_try_s.

        If nothing can be written (a full disk), this raises. Then do not send: the outcome could not be recorded
        either, and every run would send the mail again.
        """
        self._postpone(message, message.attempts + 1, next_try_s)

    def sent(self, message: Message, now_s: int) -> None:
        """The server has taken it. Removes its bytes."""
        self._decide(message, "sent", "", now_s, ("sent", message.kind, 1))

    def failed(self, message: Message, error: str, next_try_s: int) -> None:
        """The try that `trying` recorded has failed; a later one may succeed."""
        with self._changing() as db:
            changed = db.execute(
                "UPDATE message SET next_try_s = ?, error = ? WHERE state = 'queued' AND message_id = ?",
                (next_try_s, printable(error, _MAX_ERROR), message.message_id),
            ).rowcount
            count(db, "failed", "", changed)

    def hold(self, message: Message, until_s: int) -> None:
        """Let it wait without a try, while the system does not know its user."""
        self._postpone(message, None, until_s)

    def give_up(self, message: Message, error: str, now_s: int) -> None:
        """It will never be sent. Removes its bytes; the error stays until `forget`."""
        self._decide(message, "given up", printable(error, _MAX_ERROR), now_s, ("given up", "", 1))

    def withdraw(self, message: Message, reason: str, now_s: int) -> None:
        """It will not be sent, because its user no longer wants it. Its runs count as skipped. reason: see `skip`."""
        self._decide(message, "given up", reason, now_s, ("skipped", reason, max(1, len(message.runs))))

    def counts(self) -> OutboxCounts:
        with explained(self.path):
            return counts_of(self._database)

    def forget(self, before_s: int) -> int:
        """Remove rows that were decided, sent, or given up before then, and return how many. The file shrinks."""
        with self._changing() as db:
            before = db.total_changes
            # Runs of a message that is still queued stay with it.
            old = (
                "FROM run WHERE decided_s < $s AND end_s < $s AND coalesce(message_id, '') NOT IN "
                "(SELECT message_id FROM message WHERE state = 'queued')"
            )
            # Take the time from the removed rows: the clock may be ahead.
            db.execute(
                f"UPDATE horizon SET before_s = max(before_s, (SELECT coalesce(max(end_s) + 1, 0) {old}))",
                {"s": before_s},
            )
            db.execute(f"DELETE {old}", {"s": before_s})
            db.execute(
                "DELETE FROM message WHERE decided_s < ? AND message_id NOT IN "
                "(SELECT message_id FROM run WHERE message_id IS NOT NULL)",
                (before_s,),
            )
            removed = db.total_changes - before - 1
        with explained(self.path):
            self._database.executescript("PRAGMA incremental_vacuum")  # execute() would end after the first page
        return removed

    def _postpone(self, message: Message, attempts: int | None, until_s: int) -> None:
        with self._changing() as db:
            db.execute(
                "UPDATE message SET attempts = coalesce(?, attempts), next_try_s = ? "
                "WHERE state = 'queued' AND message_id = ?",
                (attempts, until_s, message.message_id),
            )

    def _decide(self, message: Message, state: str, error: str, now_s: int, counted: tuple[str, str, int]) -> None:
        """counted: name and label of the counter, and its increase if the message was still queued."""
        name, label, number = counted
        with self._changing() as db:
            changed = db.execute(
                "UPDATE message SET state = ?, raw = NULL, error = ?, decided_s = ? "
                "WHERE state = 'queued' AND message_id = ?",
                (state, error, now_s, message.message_id),
            ).rowcount
            count(db, name, label, number * changed)

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


def _values(run: EndedRun) -> tuple[Any, ...]:
    return (run.cluster, run.job_id, run.submit_s, run.user, run.end_s, run.gpu_count, run.array_job_id)


def _key(run: EndedRun) -> tuple[Any, ...]:
    return run.cluster, run.job_id, run.submit_s, run.end_s
