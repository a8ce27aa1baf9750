"""The removal of a person's rows and files, for `almanac forget`.

Each partition file is replaced as a whole, so a reader sees the old rows or the new ones. Rows of others, and their
order, stay as they are. A file without rows stays, because a reader may have listed it already.

Files are removed from folders that users can write to: no link is followed, and no mount is entered.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from almanac.atomic import opened
from almanac.units import DAY_S
from telemetry.store.database import arrow
from telemetry.store.partitions import partition_start, read_partition, write_partition
from telemetry.store.schema import TABLES

if TYPE_CHECKING:
    from telemetry.store.store import ClusterStore

_EARLY_S, _LATE_S = 3600, DAY_S
"""Job ids are used again after years: a record or label of an id counts from before the run's submission to after its
end, with room for clocks that differ and for an Epilog."""
_FOREVER_S = 2**40
_THEIRS = {
    ("user",): 'rows."user" = $user',
    ("job_id", "submit_s"): "EXISTS (SELECT 1 FROM runs r WHERE r.job_id = rows.job_id AND r.submit_s = rows.submit_s)",
    ("job_id", "seen_s"): (
        "EXISTS (SELECT 1 FROM runs r WHERE r.job_id = rows.job_id"
        f" AND rows.seen_s BETWEEN r.submit_s - {_EARLY_S} AND r.until_s)"
    ),
}
"""By the columns that say whose a row is, its test in SQL."""


def runs_of(store: ClusterStore, user: str) -> pa.Table:
    """Return job_id, submit_s, and until_s of the user's runs; records with the job id belong to the run until then."""
    rows = store.read("jobs", ["job_id", "submit_s", "end_s"], among={"user": pa.array([user])})
    ends = [_FOREVER_S if end_s is None else end_s + _LATE_S for end_s in rows["end_s"].to_pylist()]
    return rows.select(["job_id", "submit_s"]).append_column("until_s", pa.array(ends, pa.int64()))


def own_accounts(store: ClusterStore, user: str) -> set[str]:
    """Accounts of the user's jobs that no other user's job has."""
    sql = 'SELECT account FROM jobs WHERE account IS NOT NULL GROUP BY account HAVING bool_and("user" = $user)'
    with store.connect() as db:
        store.view(db, "jobs", ("user", "account"))
        return {account for (account,) in db.execute(sql, {"user": user}).fetchall()}


def user_rows(store: ClusterStore, table: str, by: tuple[str, ...], user: str, runs: pa.Table, remove: bool) -> int:
    """Count the user's rows of a table, and remove them if told. by: a key of _THEIRS. runs: of `runs_of`."""
    spec = TABLES[table]
    since_s, until_s = None, None
    if by == ("job_id", "submit_s"):
        if not runs.num_rows:
            return 0
        since_s, until_s = pc.min(runs["submit_s"]).as_py(), pc.max(runs["submit_s"]).as_py() + 1
    columns = ", ".join(f'rows."{name}"' for name in spec.key)
    with store.connect() as db:
        store.view(db, table, sorted({*spec.key, *by}), since_s, until_s)
        db.register("runs", runs)
        found = arrow(
            db, f"SELECT {columns} FROM {table} rows WHERE {_THEIRS[by]}", {"user": user} if by == ("user",) else {}
        )
    if remove:
        store.replace(table, spec.schema.empty_table(), found)
    return found.num_rows


def _label_files(store: ClusterStore, runs: pa.Table) -> list[Path]:
    """Files of telemetry of the time of the runs."""
    if not runs.num_rows:
        return []
    first_s, last_s = pc.min(runs["submit_s"]).as_py() - _EARLY_S, pc.max(runs["until_s"]).as_py()
    return store.files("telemetry", first_s, last_s)


def _labelled(store: ClusterStore, runs: pa.Table) -> list[tuple[Path, int]]:
    """Files with such a label, and how many samples have one."""
    files = [str(path) for path in _label_files(store, runs)]
    if not files:
        return []
    with store.connect() as db:
        db.register("runs", runs)
        found = db.execute(
            "SELECT filename, count(*) FROM read_parquet($files, union_by_name=true, hive_partitioning=false,"
            " filename=true) t WHERE job_label IS NOT NULL AND EXISTS (SELECT 1 FROM runs r"
            f" WHERE r.job_id = t.job_label AND t.time_ms // 1000 BETWEEN r.submit_s - {_EARLY_S} AND r.until_s)"
            " GROUP BY filename ORDER BY filename",
            {"files": files},
        ).fetchall()
    return [(Path(name), number) for name, number in found]


def job_labels(store: ClusterStore, runs: pa.Table, remove: bool) -> int:
    """Count the samples with a job label of one of the runs, and set these labels to null if told: the samples stay."""
    spec = TABLES["telemetry"]
    place = spec.schema.get_field_index("job_label")
    found = _labelled(store, runs)
    for path, _ in found if remove else ():
        start_s = partition_start(path)
        is_near = (runs["submit_s"].to_numpy() - _EARLY_S < start_s + spec.part_s) & (
            runs["until_s"].to_numpy() >= start_s
        )
        ids = pa.array(np.unique(runs["job_id"].to_numpy()[is_near]), pa.int64())
        with store.lock():
            rows = read_partition(spec, path)
            labels = rows["job_label"]
            cleared = pc.if_else(pc.is_in(labels, value_set=ids), pa.scalar(None, pa.int64()), labels)
            write_partition(path, rows.set_column(place, spec.schema.field(place), cleared), spec)
    return sum(number for _, number in found)


_LIBC = ctypes.CDLL(None, use_errno=True)
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_OF_A_MOUNT = (errno.EACCES, errno.ENOTCONN, errno.EIO)
"""Errors that root gets on a user's FUSE file system, alive or dead."""


def listed_files(folder: Path, is_theirs: Callable[[str], bool], remove: bool) -> int:
    """Count the files of a folder whose names are theirs, and remove them if told. 0 for a link as folder."""
    try:
        with opened(folder) as handle:
            names = [name for name in os.listdir(handle) if is_theirs(name)]  # noqa: PTH208 - of a descriptor
            _unlink(handle, names if remove else [])
            return len(names)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def tree(path: Path, remove: bool) -> int:
    """Count the files and links at a path and below, 1 for anything but a folder, and remove all if told.

    The user may change a folder meanwhile.
    """
    if not _is_there(path):
        return 0
    is_folder = not path.is_mount() and not path.is_symlink() and path.is_dir()
    number = sum(len(files) for _, _, files, _ in os.fwalk(path, follow_symlinks=False)) if is_folder else 1
    if remove:
        detach_mounts(path)
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path)  # by descriptors: it follows no link that is put in the way
    return number or 1


def mail_choices(folder: Path, uid: int, remove: bool) -> int:
    """Count the uid's own choices of mail, and remove them if told. Files of others by the same name stay."""
    names = _choices(folder, uid)
    if names and remove:
        for name in names:
            detach_mounts(folder / name)
        with opened(folder) as handle:
            _unlink(handle, names)
    return len(names)


def detach_mounts(path: Path) -> None:
    """Detach what is mounted at the path and below, which keeps files from being removed. Raises OSError.

    A user can mount a FUSE file system on a file or folder of their own; nobody else mounts anything there.
    """
    here = os.fsencode(os.path.realpath(path.parent) + "/" + path.name)
    while points := [each for each in _mount_points() if each == here or each.startswith(here + b"/")]:
        if _LIBC.umount2(points[-1], _MNT_DETACH | _UMOUNT_NOFOLLOW):  # the newest may hide others
            number = ctypes.get_errno()
            raise OSError(number, f"a mount cannot be detached: {os.strerror(number)}", os.fsdecode(points[-1]))


def _mount_points() -> list[bytes]:
    """Oldest first."""
    return [_unescaped(line.split(b" ")[4]) for line in Path("/proc/self/mountinfo").read_bytes().splitlines()]


def _unescaped(text: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), text)


def _is_there(path: Path) -> bool:
    """True also for a mount that shows nothing to root."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        return error.errno in _OF_A_MOUNT
    return True


def _unlink(folder: int, names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def _choices(folder: Path, uid: int) -> list[str]:
    """Names of the uid's own files: <uid>, and <uid>.1 and so on of older releases. Files of others stay."""
    names = [str(uid), *(f"{uid}.{number}" for number in range(1, 100))]
    found = []
    with contextlib.suppress(FileNotFoundError, PermissionError), opened(folder) as handle:
        for name in names:
            try:
                about = os.stat(name, dir_fd=handle, follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno in _OF_A_MOUNT:
                    found.append(name)
                continue
            if about.st_uid == uid and not stat.S_ISDIR(about.st_mode):
                found.append(name)
    return found
