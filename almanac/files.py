"""Read files that somebody else may have changed: never wait, never read without a bound.

`open_plain`, `read_plain`, `read_json`: files of the store. A FIFO, a device, or a bomb in their place is an error.
`read_trusted`, `require_trusted`, `load_trusted`: files and programs that say what almanac does. Root refuses those
that others can change; the folders above count, and so does each link. `almanac doctor` warns other users. A trusted
file belongs to root, SlurmUser, or the user who runs this, and nobody else can write to it.
"""

from __future__ import annotations

import errno
import os
import pwd
import re
import shlex
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from almanac.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


MOST_BYTES = 2**28
"""More than any file of almanac's own but its tables has."""
DEEPEST = 32
"""Brackets within brackets: almanac's own JSON has fewer than 10."""


@contextmanager
def open_plain(path: Path | str, flags: int = 0, dir_fd: int | None = None) -> Iterator[BinaryIO]:
    """Open a regular file for reading. flags: more flags of open(2). Raises OSError, also for another kind of file."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | flags, dir_fd=dir_fd)
    with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file


def read_plain(path: Path | str, most_bytes: int = MOST_BYTES, flags: int = 0) -> bytes:
    """Return the content of a regular file. Raises OSError, also for another kind and for a larger file."""
    with open_plain(path, flags) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes} bytes", str(path))
    return content


def read_json(path: Path | str, most_bytes: int = MOST_BYTES, flags: int = 0) -> Any:
    """Return the content of a JSON file.

    Raises OSError, and ValueError for everything that is wrong with the content: its encoding, syntax, nesting, and a
    checksum that differs (`with_checksum`).
    """
    return parse_json(read_plain(path, most_bytes, flags))


def parse_json(content: bytes) -> Any:
    """Return what JSON says. Raises ValueError, as `read_json` does."""
    import json  # the client's start does without it

    try:
        found = json.loads(_checked(content).decode("utf-8"))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [found]
    for _ in range(DEEPEST):
        level = [each for one in level for each in _inside(one) if isinstance(each, dict | list)]
        if not level:
            return found
    raise ValueError(_TOO_DEEP)


_TOO_DEEP = f"brackets within brackets more than {DEEPEST} deep"
_CHECKSUM = b',"sum":"'
"""Begins the last member of an object whose text has a checksum. 16 hexadecimal digits and `"}` follow."""


def with_checksum(text: str) -> bytes:
    """Return the text of a JSON object with its checksum as the last member, sum, which `read_json` compares."""
    content = text.rstrip().encode()
    if content == b"{}":
        return b"{}\n"
    return content[:-1] + _CHECKSUM + _sum(content) + b'"}\n'


def _checked(content: bytes) -> bytes:
    """The text without its checksum. A text without one is from an older almanac, or from somebody's editor."""
    body, found, rest = content.rpartition(_CHECKSUM)
    if not found or len(rest.rstrip()) != 18:
        return content
    if rest.rstrip() != _sum(body + b"}") + b'"}':
        raise ValueError("its checksum differs: it was damaged, or changed by hand")
    return body + b"}"


def _sum(content: bytes) -> bytes:
    import hashlib

    return hashlib.blake2b(content, digest_size=8).hexdigest().encode()


def _inside(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


SLURM_CONFS = (
    "/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/usr/local/etc/slurm.conf", "/opt/slurm/etc/slurm.conf",
    "/usr/local/slurm/etc/slurm.conf", "/run/slurm/conf/slurm.conf",
)  # fmt: skip
_MOST_LINKS = 40
_MOST_CONF_BYTES = 4 << 20
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_SLURM_USER = re.compile(r"(?im)^[ \t]*SlurmUser[ \t]*=[ \t]*([^\s#]+)")

Report = Callable[[ConfigError], None]


def read_trusted(path: Path, owners: Collection[int], most_bytes: int, *, is_strict: bool = True) -> str:
    """Text of a file that only these owners, root, SlurmUser, and the caller can write. Never waits.

    is_strict: also refuse it to a caller other than root. Raises OSError, ValueError for another content, and
    ConfigError that says how to correct owner and mode. The opened file is what is checked.
    """
    is_root = os.geteuid() == 0

    def refuse(error: ConfigError) -> None:
        if is_root or is_strict:
            raise error

    def is_owner(uid: int) -> bool:
        return uid in owners or _is_owner(uid)

    place = _open(path, is_owner, refuse if is_root else _ignore)
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise ValueError("not a regular file")
        _check(path, os.fstat(place), is_owner, refuse)
        handle = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(place)
    with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"larger than {most_bytes} bytes")
    return content.decode("utf-8")


def require_trusted(path: Path | str) -> None:
    """Raise ConfigError if this is root and others can change the file or replace it. OSError if it is not there."""
    if os.geteuid() == 0 and (fault := trust_fault(path)):
        raise fault


def load_trusted(entry: EntryPoint) -> Any:
    """Load an entry point. Raises ConfigError if this is root and others can change its package."""
    package = find_spec(entry.module.partition(".")[0])
    if package and package.origin:
        require_trusted(package.origin)
    return entry.load()


def _is_owner(uid: int) -> bool:
    return uid in {0, os.geteuid()} or uid in slurm_owners()


def trust_fault(path: Path | str, is_owner: Callable[[int], bool] = _is_owner) -> ConfigError | None:
    """Say how others can change or replace a file, with the fix; None if they cannot. Raises OSError."""
    found: list[ConfigError] = []
    os.close(_open(Path(path), is_owner, found.append))
    return found[0] if found else None


def _ignore(error: ConfigError) -> None:
    """Report nothing."""


def _open(path: Path, is_owner: Callable[[int], bool], report: Report) -> int:
    """A descriptor of what the path names, for fstat. Each folder and link on the way is opened and checked by itself.

    Nothing on a path whose folders are trusted changes between its check and its use. Raises OSError.
    """
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    where, here, links = Path("/"), os.open("/", flags), 0
    opened, left = [here], [*reversed(path.absolute().parts[1:])]
    try:
        while left:
            name = left.pop()
            there = os.open(name, flags, dir_fd=here)
            opened.append(there)
            about = os.fstat(there)
            _check(where / name, about, is_owner, report)
            if not stat.S_ISLNK(about.st_mode):
                where, here = where / name, there
                continue
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = Path(os.readlink("", dir_fd=there))
            left += reversed(target.parts[target.is_absolute() :])
            if target.is_absolute():
                where, here = Path("/"), opened[0]
        return os.dup(here)
    finally:
        for handle in opened:
            os.close(handle)


def _check(path: Path, about: os.stat_result, is_owner: Callable[[int], bool], report: Report) -> None:
    """Report a file, folder, or link that others can change. In a sticky folder they can replace only their own."""
    is_sticky = stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX
    is_open = bool(about.st_mode & _OTHERS) and not is_sticky and not stat.S_ISLNK(about.st_mode)
    is_owned = is_owner(about.st_uid)
    if is_owned and not is_open:
        return
    quoted = shlex.quote(str(path))
    link = "-h " if stat.S_ISLNK(about.st_mode) else ""
    fixes = [f"chown {link}root {quoted}"] * (not is_owned) + [f"chmod go-w {quoted}"] * is_open
    seen = f"{path} belongs to {_name(about.st_uid)} and has mode {stat.S_IMODE(about.st_mode):04o}"
    expected = f"{_expected()}, and no write permission for group or others"
    report(ConfigError(f"{seen}: expected {expected}", f"check who changed it last, then: {'; '.join(fixes)}"))


def _expected() -> str:
    names = dict.fromkeys(map(_name, sorted({0, *slurm_owners()})))
    return f"owner {' or '.join(names)}"


def _name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})" if uid else "root"
    except KeyError:
        return f"uid {uid}"


def slurm_owners() -> frozenset[int]:
    """SlurmUser, and the owner of this host's slurm.conf: slurmd obeys that file as root. Without one, the user slurm.

    $SLURM_CONF counts only if root alone can change that file: sudo may have kept the variable of another user. A
    slurm.conf that group or others can write to makes nobody an owner.
    """
    named = os.environ.get("SLURM_CONF", "")
    for place in (*([named] if named and _is_roots(Path(named)) else []), *SLURM_CONFS):
        try:
            with open(os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
                about, text = os.fstat(file.fileno()), file.read(_MOST_CONF_BYTES).decode("utf-8", "replace")
        except OSError:
            continue
        if about.st_mode & _OTHERS:
            return frozenset()
        found = _SLURM_USER.findall(text)
        return frozenset({about.st_uid, *_uid_of(found[-1] if found else "root")})
    return _uid_of("slurm")


def _is_roots(path: Path) -> bool:
    """True if the file and each folder above it belong to root, no other user can write to them, and none is a link."""
    try:
        return all(
            each.lstat().st_uid == 0 and not each.lstat().st_mode & _OTHERS for each in (path, *path.absolute().parents)
        )
    except OSError:
        return False


def _uid_of(name: str) -> frozenset[int]:
    try:
        return frozenset({int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid})
    except KeyError:
        return frozenset()
