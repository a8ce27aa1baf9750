"""List and remove what is published for one uid, for `almanac forget`.

Users own files below mail/, and may own some below user/. No link is followed: each is removed itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from almanac.kept import Kept
from telemetry.store.atomic import opened
from telemetry.store.user_files import user_folder

_LIBC = ctypes.CDLL(None, use_errno=True)
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_OF_A_MOUNT = (errno.EACCES, errno.ENOTCONN, errno.EIO)
"""Errors that root gets on a user's FUSE file system, alive or dead."""


def staged_place(root: Path, uid: int) -> Kept:
    """Files to distribute: once they are gone, `almanac-distribute` removes their copies, too. root: of Outgoing."""
    folder = user_folder(root, str(uid))
    return Kept("files to publish", _files(folder), "file", functools.partial(_remove_tree, folder))


def published_places(root: Path, uid: int) -> Iterator[Kept]:
    """The advice that job_submit reads, the folder that the user reads, and the user's choice of mail."""
    sched, shown = root / "sched" / str(uid), user_folder(root, str(uid))
    yield Kept("advice file", int(_is_there(sched)), "file", functools.partial(_remove_file, sched))
    yield Kept("published for the user", _files(shown), "file", functools.partial(_remove_tree, shown))
    mail = root / "mail"
    choices = functools.partial(_choices, mail, uid)
    yield Kept("choice of mail", len(choices()), "file", lambda: _remove_choices(mail, choices()))


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


def _remove_file(path: Path) -> None:
    detach_mounts(path)
    path.unlink(missing_ok=True)


def _files(folder: Path) -> int:
    """Files and links in a folder and below; 1 for something that is no folder."""
    if not _is_there(folder) or folder.is_mount() or folder.is_symlink() or not folder.is_dir():
        return int(_is_there(folder))
    return sum(len(files) for _, _, files, _ in os.fwalk(folder, follow_symlinks=False)) or 1


def _remove_tree(folder: Path) -> None:
    """Remove a folder whose content its user may change meanwhile."""
    detach_mounts(folder)
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder)  # by descriptors: it follows no link that is put in the way


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


def _remove_choices(folder: Path, names: list[str]) -> None:
    if not names:
        return
    for name in names:
        detach_mounts(folder / name)
    with opened(folder) as handle:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=handle)
