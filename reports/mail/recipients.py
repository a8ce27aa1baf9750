"""The recipients of mail: how often each user wants it, and to which address it goes.

A choice is one word in a file <uid> of the user's own in <advice_dir>/mail/. The folder belongs to root and the mail
service's group, with mode 3733: users can make files there, and cannot list the folder or change files of others. Files
get the folder's group (setgid) and mode 0640, so other users cannot read them. A choice is only valid if its file
belongs to the user, so nobody can choose for another.

Only the site decides where mail goes: by mail.address_map, then mail.address_command, then mail.recipient. A map that
users can write is not read, and a name that is no plain user name is never given to the command."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from almanac.atomic import TEMPORARY, replacing
from almanac.bounded import run
from almanac.config import Config, Mail
from almanac.errors import ConfigError, SourceError, StoreError
from almanac.files import read_trusted
from almanac.names import address_of, is_address
from almanac.units import printable

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
"""Mode of an older folder, in which everybody can read the files (0644)."""
MAX_BYTES = 4096
OLD_NAMES = 64
"""Older releases wrote a choice to <uid>, <uid>.1, ... or <uid>.63. Such files are still read."""
LAST_READ = "last-read"
"""The file that says when the mail timer last read the folder. A host without the shared folder has one of its own,
which no timer reads. Nothing acts on the file: `almanac mail` shows it."""
WRITE_S = 600
"""The timer runs every minute. It writes the file again only when it is this old."""
_LINE = re.compile(r"([0-9]{1,11}) ([A-Za-z0-9._-]{1,255})\n")
_MOST_READ_BYTES = 300


@dataclass(frozen=True)
class Preference:
    """A user's choice of mail: one of FREQUENCIES, or UNKNOWN. is_own: chosen by the user, not the site's default."""

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
    """Return True for a small regular file that belongs to the user, under one name.

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


@dataclass(frozen=True)
class LastRead:
    """The last time a timer read the folder of choices, unix seconds, and the host on which it runs."""

    time_s: int
    host: str


def mark_read(folder: Path, now_s: int, host: str, owner_uid: int) -> None:
    """Note that the timer on this host reads the folder. Does nothing if it cannot be written: mail matters more.

    owner_uid: the store's owner, who gets a file that root writes: the folder is sticky, so the timer could not replace
    it. Another user can take the name before the first run. Then the file stays theirs, and doctor names them.
    """
    known = last_read(folder)
    if known and known.host == host and 0 <= now_s - known.time_s < WRITE_S:
        return
    with contextlib.suppress(OSError), replacing(folder / LAST_READ, 0o644) as out:
        out.write(f"{now_s} {host}\n".encode())
        if os.geteuid() == 0:
            os.fchown(out.fileno(), owner_uid, -1)


def last_read(folder: Path) -> LastRead | None:
    """Return the last time a timer noted that it reads the folder; None if none has."""
    try:
        handle = os.open(folder / LAST_READ, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
            about = os.fstat(handle)
            is_valid = stat.S_ISREG(about.st_mode) and is_from_service(about, folder.stat())
            found = _LINE.fullmatch(file.read(_MOST_READ_BYTES).decode("ascii")) if is_valid else None
    except (OSError, ValueError):
        return None
    return LastRead(int(found[1]), found[2]) if found else None


def is_from_service(about: os.stat_result, folder: os.stat_result) -> bool:
    """Return True if root or a member of almanac's group, to which the folder belongs, owns a file in it.

    Also an account that this host does not know: who can log in to this host has an account here. A folder of an older
    release does not belong to the group, so there anybody counts.
    """
    if about.st_uid == 0 or not folder.st_mode & stat.S_ISGID:
        return True
    try:
        account = pwd.getpwuid(about.st_uid)
    except KeyError:
        return True
    return folder.st_gid in os.getgrouplist(account.pw_name, account.pw_gid)


MOST_MAP_BYTES = 16 << 20
MOST_ANSWER_BYTES = 4096
COMMAND_TIMEOUT_S = 10.0
MOST_FAILURES = 3
"""Timeouts of the command in a row, or starts that fail, after which one run asks it no more."""


class AddressError(SourceError):
    """The address of a user cannot be looked up now. Mail waits until it can."""


@dataclass
class AddressBook:
    """Looks up each user once. faults: what to tell the operators, each once."""

    config: Mail
    timeout_s: float = COMMAND_TIMEOUT_S
    faults: list[str] = field(default_factory=list)
    _known: dict[str, str | AddressError | None] = field(default_factory=dict)
    _map: Mapping[str, str] | AddressError | None = None
    _failures: int = 0

    def address(self, user: str) -> str | None:
        """Return a user's address; None if the site gives the user none.

        Raises AddressError if that cannot be known now.
        """
        if user not in self._known:
            try:
                self._known[user] = self._looked_up(user)
            except AddressError as error:
                self._known[user] = error
                self._note(error)
        found = self._known[user]
        if isinstance(found, AddressError):
            raise found
        return found

    def _note(self, error: AddressError) -> None:
        said = f"{error}; try: {error.hint}"
        if said not in self.faults and len(self.faults) < MOST_FAILURES:
            self.faults.append(said)

    def _looked_up(self, user: str) -> str | None:
        by_recipient = address_of(user, self.config.recipient)
        if self.config.address_map and (mapped := self._mapped(user)) is not None:
            return mapped
        if not self.config.address_command:
            return by_recipient
        # A name with other characters than {user} may have must not become an option or a search filter.
        return self._asked(user) if address_of(user, "{user}") else None

    def _mapped(self, user: str) -> str | None:
        if self._map is None:
            try:
                self._map = read_map(Path(self.config.address_map))
            except AddressError as error:
                self._map = error
        if isinstance(self._map, AddressError):
            raise self._map
        found = self._map.get(user)
        if found is not None and not is_address(found):
            said = f"mail.address_map: the address of {printable(user, 40)} is {printable(repr(found), 80)}"
            raise AddressError(said, "write one address for each user")
        return found

    def _asked(self, user: str) -> str | None:
        program = self.config.address_command[0]
        hint = f"run it yourself, as the user of the timer: {' '.join(self.config.address_command)} {user}"
        if self._failures >= MOST_FAILURES:
            raise AddressError(f"mail.address_command: {program} gave no answer {MOST_FAILURES} times in a row", hint)
        try:
            answer = _answer([*self.config.address_command, user], self.timeout_s)
        except ConfigError as error:
            raise AddressError(f"mail.address_command: {error}", error.hint) from error
        except (OSError, ValueError) as error:
            # An exit code can be about this user alone. It costs no time, and must not hold up the others.
            self._failures += isinstance(error, OSError)
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise AddressError(f"mail.address_command: {program} {printable(why, 200)}", hint) from error
        self._failures = 0
        if answer and not is_address(answer):
            said = f"mail.address_command: {program} printed {printable(repr(answer), 80)} for {user}"
            raise AddressError(said, "let it print one address, or nothing for a user without one")
        return answer or None


def read_map(path: Path) -> dict[str, str]:
    """Addresses by user, from lines `user address`; # begins a comment. A faulty line gives a text that is no address.

    Raises AddressError if the file cannot be read, or if users could have written it.
    """
    try:
        text = read_trusted(path, (), MOST_MAP_BYTES)
    except ConfigError as error:
        raise AddressError(f"mail.address_map: {error}", error.hint) from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        todo = f"make it readable for the user of the timer, owned by root, with mode 0640: {path}"
        raise AddressError(f"mail.address_map: {path}: {why}", todo) from error
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        user, address = words[0], words[1] if len(words) == 2 else f"of line {number}: {' '.join(words[1:])}"
        found[user] = address if found.get(user, address) == address else f"of line {number}, and another one"
    return found


def _answer(argv: Sequence[str], timeout_s: float) -> str:
    """Return the line that the program printed; "" if it printed nothing. Ends it and its children.

    Raises OSError if it cannot start or takes too long, ConfigError if root must not run it, and ValueError if it fails
    or prints too much.
    """
    done = run(argv, timeout_s=timeout_s, most_bytes=MOST_ANSWER_BYTES)
    if done.code:
        raise ValueError(f"failed with exit code {done.code}" if done.code > 0 else f"was ended by signal {-done.code}")
    return done.stdout.decode("ascii", "backslashreplace").strip()
