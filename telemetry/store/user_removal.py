"""Count and remove files of one user, for `almanac forget`.

Users own files below mail/, and may own some below user/. No link is followed: each is removed itself.
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

from telemetry.store.atomic import opened

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
