"""What the outbox keeps of one user, and how it is removed, for `almanac forget`."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from almanac.errors import StoreError
from almanac.kept import Kept
from reports.mail.outbox_file import explained, open_outbox
from telemetry.store.atomic import locked


def outbox_place(path: Path, user: str) -> Kept:
    """The user's ended runs, and their mails, queued or sent."""
    return Kept("outbox of mails", _number(path, user), "row", lambda: _remove(path, user))


def _number(path: Path, user: str) -> int:
    with explained(path):
        if not path.exists():
            return 0
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        with contextlib.closing(database):
            return sum(_rows(database, table, user) for table in _tables(database))


def _rows(database: sqlite3.Connection, table: str, user: str) -> int:
    return int(database.execute(f'SELECT count(*) FROM "{table}" WHERE user = ?', (user,)).fetchall()[0][0])


def _tables(database: sqlite3.Connection) -> list[str]:
    """Every table with a column `user`."""
    sql = (
        "SELECT m.name FROM sqlite_master m JOIN pragma_table_info(m.name) c"
        " WHERE m.type = 'table' AND c.name = 'user' ORDER BY m.name DESC"
    )
    return [name for (name,) in database.execute(sql).fetchall()]


def _remove(path: Path, user: str) -> None:
    """Delete the rows and write the file again without them; also the log beside it. Raises BusyError, StoreError."""
    if not path.exists():
        return
    with locked(path.with_suffix(".lock"), "decides on reports and sends them now"), explained(path):
        with contextlib.closing(open_outbox(path)) as database:
            database.execute("PRAGMA secure_delete = ON")
            database.execute("BEGIN IMMEDIATE")
            for table in _tables(database):  # `run` refers to `message`
                database.execute(f'DELETE FROM "{table}" WHERE user = ?', (user,))
            database.execute("COMMIT")
            database.execute("VACUUM")
            if database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()[0][0]:
                raise StoreError(f"{path}: another process reads it", "run this again when it is done")
