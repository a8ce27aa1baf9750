"""How often a user wants mail: one word in a file of their own in <advice_dir>/mail/, root's, mode 3733.

Everybody may make files there, nobody may list them or touch another's. The folder's group is that of the service that
sends the mail: files get this group (setgid) and mode 0640, so that other users cannot read them. Whose a preference
is, is said by the owner of the file, never by its name: nobody can speak for another. As others can take a name, each
user has several of them; all are looked at, and the newest of the user's own files counts.
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

FREQUENCIES = ("off", "digest", "every")
UNKNOWN = "unknown"
"""Instead of a frequency: the system does not know the user, or not now (a directory service that is away)."""
NOT_WANTED = {"off": "the user wants none", "digest": "the user wants weekly mail"}
"""Why a run gets no mail of its own, by its user's frequency."""
NOT_KNOWN = "the system does not know the user"
FOLDER_MODE = 0o3733
READABLE_FOLDER_MODE = 0o1733
"""Of an older folder: the service reads its files as everybody can (0644)."""
MAX_BYTES = 4096
NAMES = 64
"""Of each user: <uid>, <uid>.1, ... Who wants to keep a user from choosing has to own as many files."""


@dataclass(frozen=True)
class Preference:
    """frequency: one of FREQUENCIES, or UNKNOWN. is_own: the user's own, else the site's default."""

    frequency: str
    is_own: bool


def uid_of(user: str) -> int | None:
    """None for a name that the system does not know."""
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        return None


def folder_of(config: Config) -> Path:
    return Path(config.hooks.advice_dir) / "mail"


def names_of(uid: int) -> list[str]:
    return [str(uid), *(f"{uid}.{number}" for number in range(1, NAMES))]


def read(user: str, config: Config, uids: Callable[[str], int | None] = uid_of) -> Preference:
    """The site's default where the user has none, or none that can be read.

    UNKNOWN without a uid, or where a file of theirs may not be read: the default may be the opposite of their word.
    """
    uid = uids(user)
    if uid is None:
        return Preference(UNKNOWN, False)
    try:
        words = _own_words(folder_of(config), uid)
    except PermissionError:
        return Preference(UNKNOWN, False)
    return Preference(max(words)[1], True) if words else Preference(config.mail.frequency, False)


def _own_words(folder: Path, uid: int) -> list[tuple[int, str]]:
    """When each of a user's files was written (ns) and what it says. Raises PermissionError."""
    found = []
    for name in names_of(uid):
        # Another's file is not even opened; a missing one is the rule.
        try:
            if _is_own(about := (folder / name).lstat(), uid) and about.st_size <= MAX_BYTES:
                found.append(_word(folder / name, uid))
        except PermissionError:
            raise
        except (OSError, ValueError):
            continue
    return found


def _is_own(about: os.stat_result, uid: int) -> bool:
    """Whether it is a file of that user's alone.

    A second link may be another's doing: of a file of the user's that was never meant to be here. Where the kernel lets
    users link files of others (fs.protected_hardlinks=0, `almanac doctor` warns), they can void a choice so.
    """
    return about.st_uid == uid and stat.S_ISREG(about.st_mode) and about.st_nlink == 1


def _word(path: Path, uid: int) -> tuple[int, str]:
    """Raises OSError, or ValueError where it is no file of that user's that says a frequency."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
        about = os.fstat(handle)
        if not _is_own(about, uid) or about.st_size > MAX_BYTES:
            raise ValueError(f"{path}: not a preference of uid {uid}")
        word = file.read(MAX_BYTES).decode("ascii").strip()
    if word not in FREQUENCIES:
        raise ValueError(f"{path}: does not say a frequency")
    return about.st_mtime_ns, word


def write(frequency: str | None, config: Config) -> None:
    """The caller's own; None: the site's default from now on. Raises StoreError."""
    folder = folder_of(config)
    try:
        if not folder.is_dir():
            raise StoreError(f"{folder} is not there: no preference can be kept", "ask an operator of almanac")
        own, free = _places(folder, os.getuid())
        kept = None if frequency is None else _put(folder, [*own, *free], frequency)
        for path in own:
            if path != kept:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written: {error.strerror}", "ask an operator of almanac") from error


def _places(folder: Path, uid: int) -> tuple[list[Path], list[Path]]:
    """Names that hold something of the user's, whatever it is, and those that are free."""
    own, free = [], []
    for path in (folder / name for name in names_of(uid)):
        try:
            if path.lstat().st_uid == uid:
                own.append(path)
        except FileNotFoundError:
            free.append(path)
    return own, free


def _put(folder: Path, places: list[Path], frequency: str) -> Path:
    """Into the first place that can be had: between the look and the rename another may have taken one."""
    temporary = folder / f"{TEMPORARY}{secrets.token_hex(8)}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(handle, "wb") as file:  # noqa: PTH123 - of a descriptor
            os.fchmod(handle, 0o640 if folder.stat().st_mode & stat.S_ISGID else 0o644)
            file.write(frequency.encode() + b"\n")
            file.flush()
            os.fsync(handle)
        for path in places:
            with contextlib.suppress(PermissionError, IsADirectoryError):
                return temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    raise StoreError(f"{folder}: others have taken every name of yours", "tell an operator of almanac")
