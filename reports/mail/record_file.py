"""The file of the mail record: its path and its tables, creating and opening it, and its counters."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from almanac.atomic import hand_over
from almanac.errors import NotAllowedError, SchemaVersionError, StoreError

VERSION = 4
OUTBOX_VERSION = 3
"""Of a file that holds the outbox of an older release."""
SYNCHRONOUS = "FULL"
"""A transaction is on the disk when it ends."""
ROOM = 256 * 1024
"""Bytes on the disk that the record of one sent mail can have."""
GIVEN_UP = "the mail server never took their mail"
MAILS_SHOWN = 10
"""Newest mails of a user that `almanac mail` knows."""
_MOVE = "move it away: jobs that have ended get no mail then"

_TAKE_OUTBOX = """
INSERT INTO run SELECT r.cluster, r.job_id, r.submit_s, r.user, r.end_s, r.gpu_count, r.array_job_id,
  CASE WHEN r.state != 'told' THEN r.state WHEN m.state = 'queued' AND m.attempts THEN 'failed'
       WHEN m.state = 'queued' THEN 'waiting' WHEN m.state = 'given up' THEN 'skipped' ELSE coalesce(m.kind, 'job') END,
  coalesce(m.decided_s, r.decided_s, 0), coalesce(m.recipient, ''), coalesce(m.error, r.reason),
  coalesce(r.message_id, '')
FROM old_run r LEFT JOIN message m USING (message_id);
-- Weeks end on Mondays (UTC), 259200 s before a multiple of 604800. A week with a queued digest is begun again.
INSERT OR IGNORE INTO run
SELECT c.cluster, 0, w.end_s - 604800, w.user, w.end_s, 0, NULL, w.kind, w.decided_s, w.recipient, '', w.message_id
FROM (SELECT *, put_s - (put_s + 259200) % 604800 AS end_s FROM message WHERE kind = 'weekly' AND state = 'sent') w
JOIN (SELECT DISTINCT cluster FROM mark) c
ON w.message_id LIKE '%@' || replace(lower(c.cluster), '_', '-') || '.almanac>';
UPDATE mark SET time_s = time_s - 604800
WHERE name = 'week' AND EXISTS (SELECT 1 FROM message WHERE kind = 'weekly' AND state = 'queued');
DELETE FROM told WHERE message_id IN (SELECT message_id FROM message WHERE state = 'queued');
DROP TABLE old_run;
DROP TABLE message;
"""
"""Takes over the outbox of a release that queued mails itself. The runs of queued mails are due again: their mails are
made from what the store and the users' choices say now."""


@dataclass(frozen=True)
class RecordCounts:
    """Counters and gauges of the record.

    sent (by kind), failed_tries, given_up, and skipped (by reason) count since the record was made, and never fall.
    waiting: runs without a decision now, but refused ones. oldest_end_s: end of the oldest one, or None.
    refused: mails that the server did not take, which are due again. oldest_refused_s: end of the first of their jobs,
    or None. words: recipient and answer of the last one, or "".
    """

    sent: Mapping[str, int]
    failed_tries: int
    given_up: int
    skipped: Mapping[str, int]
    waiting: int
    oldest_end_s: int | None
    refused: int
    oldest_refused_s: int | None
    words: str = ""


def record_path(store_root: Path) -> Path:
    """The file. An older release kept its outbox there, which gave it the name."""
    return store_root / "reports" / "outbox.sqlite"


def read_counts(path: Path) -> RecordCounts | None:
    """Counts without a lock. None if there is no record yet.

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


_MAILS = """
SELECT * FROM (
  SELECT user, max(time_s) AS at_s, kind, min(job_id) AS job_id, count(*), recipient, why,
         row_number() OVER (PARTITION BY user ORDER BY max(time_s) DESC, min(job_id) DESC) AS place
  FROM run
  WHERE cluster = ? AND (kind IN ('job', 'digest', 'weekly', 'failed') OR (kind = 'skipped' AND why = ?))
  GROUP BY user, kind, CASE WHEN message_id = '' THEN CAST(job_id AS TEXT) ELSE message_id END
) WHERE place <= ? ORDER BY user, place
"""


def read_mails(path: Path, cluster: str) -> dict[str, list[tuple[int, str, int, int, str, str]]]:
    """By user, the newest mails that the server took, refused, or never took: the fields of a UserMail.

    Empty without a record. Raises what `read_counts` raises.
    """
    found: dict[str, list[tuple[int, str, int, int, str, str]]] = {}
    with explained(path):
        if path.exists():
            database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
            with contextlib.closing(database):
                known = _version(database) == VERSION
                for user, *mail, _ in database.execute(_MAILS, (cluster, GIVEN_UP, MAILS_SHOWN)) if known else ():
                    found.setdefault(user, []).append(tuple(mail))
    return found


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


def open_record(path: Path) -> sqlite3.Connection:
    """The database in the file. It is made, or takes over the outbox of an older release, in one transaction."""
    database = sqlite3.connect(path, isolation_level=None, timeout=30)
    try:
        database.execute("PRAGMA auto_vacuum = INCREMENTAL")  # works only on a new file
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {SYNCHRONOUS}")
        version = _version(database)
        if version not in (0, OUTBOX_VERSION, VERSION):
            raise SchemaVersionError(
                f"{path}: version {version} of the mail record, this almanac reads version {VERSION}",
                f"use the almanac that wrote it, or {_MOVE}",
            )
        if version != VERSION:
            tables = (resources.files("reports.mail") / "record.sql").read_text(encoding="utf-8")
            before = "ALTER TABLE run RENAME TO old_run; DROP INDEX run_waiting; DROP INDEX run_message;"
            upgrade = (before, tables, _TAKE_OUTBOX) if version else (tables,)
            database.executescript(f"BEGIN IMMEDIATE;{''.join(upgrade)}PRAGMA user_version = {VERSION};COMMIT;")
    except BaseException:
        database.close()
        raise
    return database


def _version(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchall()[0][0])


def counts_of(database: sqlite3.Connection) -> RecordCounts:
    if _version(database) != VERSION:  # just made, or written by another release
        return RecordCounts({}, 0, 0, {}, 0, None, 0, None)
    numbers: dict[str, dict[str, int]] = {}
    for name, label, number in database.execute("SELECT name, label, number FROM counter ORDER BY name, label"):
        numbers.setdefault(name, {})[label] = number
    waiting = database.execute("SELECT count(*), min(end_s) FROM run WHERE kind = 'waiting'").fetchall()[0]
    open_mails = "FROM run WHERE kind IN ('trying', 'failed')"
    refused = database.execute(f"SELECT count(DISTINCT message_id), min(end_s) {open_mails}").fetchall()[0]
    words = database.execute(f"SELECT recipient || ': ' || why {open_mails} ORDER BY time_s DESC LIMIT 1").fetchall()
    return RecordCounts(
        sent=numbers.get("sent", {}),
        failed_tries=sum(numbers.get("failed", {}).values()),
        given_up=sum(numbers.get("given up", {}).values()),
        skipped=numbers.get("skipped", {}),
        waiting=waiting[0],
        oldest_end_s=waiting[1],
        refused=refused[0],
        oldest_refused_s=refused[1],
        words=words[0][0] if words else "",
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
        hint = _MOVE if is_damaged else "see that its disk has room"
        raise StoreError(f"{path}: the mail record cannot be used: {error}", hint) from error
    except UnicodeDecodeError as error:  # in sqlite's words about a damaged schema, or in a damaged text
        raise StoreError(f"{path}: the mail record is damaged", _MOVE) from error
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened: {error.strerror}", "run this as the store's owner") from error


def _is_of_another(path: Path) -> bool:
    """False for root, and if the owner is unknown."""
    try:
        return os.geteuid() not in (0, path.stat().st_uid)
    except OSError:
        return False
