"""How often a user wants mail: one word in a file <uid> of their own in <advice_dir>/mail/.

The folder belongs to root and the mail service's group, with mode 3733: users can make files there, and cannot list the
folder or change files of others. Files get the folder's group (setgid) and mode 0640, so other users cannot read them.
A choice is only valid if its file belongs to the user, so nobody can choose for another.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from almanac.config import Config
from almanac.errors import StoreError
from telemetry.store.atomic import TEMPORARY

FREQUENCIES = ("off", "digest", "useful", "every")
UNKNOWN = "unknown"
"""Instead of a frequency: the system does not know the user now, for example while a directory service is down."""
USEFUL = "useful"
WEEKLY = ("digest", USEFUL)
"""Frequencies that come with a weekly digest."""
NOT_WANTED = {"off": "the user wants none", "digest": "the user wants weekly mail"}
"""Reasons to skip a run, by the frequency of its user."""
NOT_KNOWN = "the system does not know the user"
FOLDER_MODE = 0o3733
READABLE_FOLDER_MODE = 0o1733
"""Of an older folder: everybody can read its files (0644)."""
MAX_BYTES = 4096
OLD_NAMES = 64
"""Older releases wrote a choice to <uid>, <uid>.1, ... or <uid>.63. Such files are still read."""


@dataclass(frozen=True)
class Preference:
    """frequency: one of FREQUENCIES, or UNKNOWN. is_own: chosen by the user, not the site's default."""

    frequency: str
    is_own: bool


def uid_of(user: str) -> int | None:
    """The uid, or None if the system does not know the name."""
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        return None


def folder_of(config: Config) -> Path:
    return Path(config.hooks.advice_dir) / "mail"


def _old_paths(folder: Path, uid: int) -> list[Path]:
    return [folder / f"{uid}.{number}" for number in range(1, OLD_NAMES)]


def read(user: str, config: Config, uids: Callable[[str], int | None] = uid_of) -> Preference:
    """The user's choice, or the site's default without a valid choice.

    UNKNOWN without a uid, or if the user's file cannot be read: the default could be the opposite of the choice.
    """
    uid = uids(user)
    if uid is None:
        return Preference(UNKNOWN, False)
    folder = folder_of(config)
    try:
        for path in (folder / str(uid), *_old_paths(folder, uid)):
            if (word := _word(path, uid)) in FREQUENCIES:
                return Preference(word, True)
    except PermissionError:
        return Preference(UNKNOWN, False)
    return Preference(config.mail.frequency, False)


def _is_own(about: os.stat_result, uid: int) -> bool:
    """Whether it is a small regular file that belongs to the user, under one name.

    Another user can make a second name for a file that was not meant as a choice, if the kernel allows hard links to
    files of others (fs.protected_hardlinks=0, see `almanac doctor`).
    """
    is_file = stat.S_ISREG(about.st_mode) and about.st_nlink == 1
    return is_file and about.st_uid == uid and about.st_size <= MAX_BYTES


def _word(path: Path, uid: int) -> str:
    """The content of the user's own file, or "". Files of others are not opened. Raises PermissionError."""
    try:
        if not _is_own(path.lstat(), uid):
            return ""
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
            return file.read(MAX_BYTES).decode("ascii").strip() if _is_own(os.fstat(handle), uid) else ""
    except PermissionError:
        raise
    except (OSError, ValueError):
        return ""


def write(frequency: str | None, config: Config) -> None:
    """Set the caller's own choice; None removes it. Raises StoreError."""
    folder, uid = folder_of(config), os.getuid()
    if not folder.is_dir():
        todo = "ask an operator of almanac where to run this; for one job: sbatch --comment=almanac:nomail"
        raise StoreError(f"{folder} does not exist on this host: no choice can be kept", todo)
    path = folder / str(uid)
    try:
        if frequency is not None:
            _put(path, frequency)
        for old in [*([path] if frequency is None else []), *_old_paths(folder, uid)]:
            with contextlib.suppress(FileNotFoundError):
                if old.lstat().st_uid == uid:
                    old.unlink()
    except OSError as error:
        if isinstance(error, PermissionError) and _owner(path) not in (None, uid):
            said = f"{path} belongs to another user: no preference can be kept"
            raise StoreError(said, "tell an operator of almanac") from error
        raise StoreError(f"{folder}: cannot be written: {error.strerror}", "ask an operator of almanac") from error


def _owner(path: Path) -> int | None:
    try:
        return path.lstat().st_uid
    except OSError:
        return None


def _put(path: Path, frequency: str) -> None:
    """Write the file whole and rename it, so that no reader sees half of it."""
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(handle, "wb") as file:  # noqa: PTH123 - of a descriptor
            os.fchmod(handle, 0o640 if path.parent.stat().st_mode & stat.S_ISGID else 0o644)
            file.write(frequency.encode() + b"\n")
            file.flush()
            os.fsync(handle)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
