"""The file of the outbox: its path and its tables, creating and opening it, and its counters."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from almanac.errors import NotAllowedError, SchemaVersionError, StoreError
from almanac.units import DAY_S
from telemetry.store.atomic import hand_over

VERSION = 3
_ADDED_AFTER = {1: "-- How far the mail timer", 2: "-- What recent mails told"}
"""By version, the place in outbox.sql from which on the text makes what that version lacks."""

SYNCHRONOUS = "FULL"
"""A transaction is on the disk when it ends."""
ROOM = 256 * 1024
"""Bytes on the disk that the record of one sent mail can have."""
TOLD_S = 7 * DAY_S
"""Advice that a mail gave for a job family is not news for so long (s)."""


@dataclass(frozen=True)
class EndedRun:
    """A run of a job that has ended. If a job is requeued, its next run has another submit or end time.

    Times come from the table jobs only. The clock of a hook can differ by a second, which would make another run.
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
    """A mail, as the bytes that the server gets. kind: "job", "digest" (a burst of jobs), or "weekly".

    runs: the runs that it reports; () for a weekly one. attempts: tries that were begun. put_s: when it was queued.
    told: kept only until it is queued.
    """

    message_id: str
    user: str
    recipient: str
    kind: str
    raw: bytes
    runs: tuple[EndedRun, ...] = ()
    attempts: int = 0
    next_try_s: int = 0
    put_s: int = 0
    told: tuple[Told, ...] = ()


@dataclass(frozen=True)
class OutboxCounts:
    """Counters and gauges of the outbox.

    sent (by kind), failed_tries, given_up, and skipped (by reason) count since the outbox was made, and never fall.
    waiting: runs without a decision now. oldest_end_s: end of the oldest one, or None.
    queued: messages that still have to be sent. oldest_put_s: when the oldest one was queued, or None.
    """

    sent: Mapping[str, int]
    failed_tries: int
    given_up: int
    skipped: Mapping[str, int]
    waiting: int
    oldest_end_s: int | None
    queued: int
    oldest_put_s: int | None


def outbox_path(store_root: Path) -> Path:
    return store_root / "reports" / "outbox.sqlite"


def read_counts(path: Path) -> OutboxCounts | None:
    """Counts without a lock. None if there is no outbox yet.

    Raises StoreError. Raises NotAllowedError for users other than the owner and root: they cannot read the file while
    no process has it open.
    """
    with explained(path):
        if not path.exists():
            return None
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        with contextlib.closing(database):
            database.execute("BEGIN")  # one consistent snapshot
            return counts_of(database)


def make_file(path: Path) -> None:
    """Make an empty file if there is none. Root gives it to the owner of its folder. Follows no link."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o640)
    try:
        hand_over(handle, path.parent)
    finally:
        os.close(handle)


def keep_room(path: Path) -> None:
    """Make a file of ROOM bytes, if it is not there yet. Raises OSError if the disk has no room for it."""
    make_file(path)
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.posix_fallocate(handle, 0, ROOM)
    finally:
        os.close(handle)


def open_outbox(path: Path) -> sqlite3.Connection:
    """The database in the file, made or upgraded in one transaction."""
    database = sqlite3.connect(path, isolation_level=None, timeout=30)
    try:
        database.execute("PRAGMA auto_vacuum = INCREMENTAL")  # works only on a new file
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {SYNCHRONOUS}")
        version = _version(database)
        if 0 <= version < VERSION:
            tables = (resources.files("reports.mail") / "outbox.sql").read_text(encoding="utf-8")
            missing = tables[tables.index(_ADDED_AFTER[version]) :] if version else tables
            database.executescript(f"BEGIN IMMEDIATE;{missing}PRAGMA user_version = {VERSION};COMMIT;")
        elif version != VERSION:
            raise SchemaVersionError(
                f"{path}: outbox version {version}, this almanac reads version {VERSION}",
                "use the almanac that wrote it, or move the file away: its mails will not be sent",
            )
    except BaseException:
        database.close()
        raise
    return database


def _version(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchall()[0][0])


def counts_of(database: sqlite3.Connection) -> OutboxCounts:
    if not 1 <= _version(database) <= VERSION:  # just made, or written by a newer release
        return OutboxCounts({}, 0, 0, {}, 0, None, 0, None)
    numbers: dict[str, dict[str, int]] = {}
    for name, label, number in database.execute("SELECT name, label, number FROM counter ORDER BY name, label"):
        numbers.setdefault(name, {})[label] = number
    waiting = database.execute("SELECT count(*), min(end_s) FROM run WHERE state = 'waiting'").fetchall()[0]
    queued = database.execute("SELECT count(*), min(put_s) FROM message WHERE state = 'queued'").fetchall()[0]
    return OutboxCounts(
        sent=numbers.get("sent", {}),
        failed_tries=sum(numbers.get("failed", {}).values()),
        given_up=sum(numbers.get("given up", {}).values()),
        skipped=numbers.get("skipped", {}),
        waiting=waiting[0],
        oldest_end_s=waiting[1],
        queued=queued[0],
        oldest_put_s=queued[1],
    )


def count(database: sqlite3.Connection, name: str, label: str, number: int) -> None:
    if number:
        database.execute(
            "INSERT INTO counter VALUES (?, ?, ?) ON CONFLICT (name, label) DO UPDATE "
            "SET number = number + excluded.number",
            (name, label, number),
        )


def remember(database: sqlite3.Connection, message: Message, now_s: int) -> None:
    """Keep what a message tells for TOLD_S. Removes what older ones told."""
    database.execute("DELETE FROM told WHERE told_s < ?", (now_s - TOLD_S,))
    database.executemany(
        "INSERT INTO told VALUES (:cluster, :user, :name_key, :gpu_count, :what, :message_id, :now_s)",
        [
            vars(each) | {"user": message.user, "message_id": message.message_id, "now_s": now_s}
            for each in set(message.told)
        ],
    )


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    try:
        for suffix in ("", "-journal", "-wal", "-shm"):  # SQLite waits for ever at a FIFO in the place of any
            file = path.with_name(path.name + suffix)
            if file.is_symlink() or (file.exists() and not file.is_file()):
                raise StoreError(f"{file}: not a regular file", "move it away")
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary one
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN) and _is_of_another(path):
            raise NotAllowedError(f"{path}: can be used by the store's owner only", "run this as its owner") from error
        is_damaged = code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
        hint = "move it away: what it holds will not be sent" if is_damaged else "see that its disk has room"
        raise StoreError(f"{path}: the outbox cannot be used: {error}", hint) from error
    except UnicodeDecodeError as error:  # in sqlite's words about a damaged schema, or in a damaged text
        raise StoreError(f"{path}: the outbox is damaged", "move it away: what it holds will not be sent") from error
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened: {error.strerror}", "run this as the store's owner") from error


def _is_of_another(path: Path) -> bool:
    """False for root, and if the owner is unknown."""
    try:
        return os.geteuid() not in (0, path.stat().st_uid)
    except OSError:
        return False
