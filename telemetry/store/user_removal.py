"""What is published for one uid, and how it is removed, for `almanac forget`.

Users own files below mail/, and may own some below user/. No link is followed: each is removed itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from almanac.kept import Kept
from telemetry.store.atomic import opened
from telemetry.store.user_files import user_folder


def staged_place(root: Path, uid: int) -> Kept:
    """Files to distribute: once they are gone, `almanac-distribute` removes their copies, too. root: of Outgoing."""
    folder = user_folder(root, str(uid))
    return Kept("files to publish", _files(folder), "file", functools.partial(_remove_tree, folder))


def published_places(root: Path, uid: int) -> Iterator[Kept]:
    """The advice that job_submit reads, the folder that the user reads, and the user's choice of mail."""
    sched, shown = root / "sched" / str(uid), user_folder(root, str(uid))
    yield Kept("advice file", int(os.path.lexists(sched)), "file", functools.partial(_remove_file, sched))
    yield Kept("published for the user", _files(shown), "file", functools.partial(_remove_tree, shown))
    mail = root / "mail"
    choices = functools.partial(_choices, mail, uid)
    yield Kept("choice of mail", len(choices()), "file", lambda: _remove_choices(mail, choices()))


def _remove_file(path: Path) -> None:
    path.unlink(missing_ok=True)


def _files(folder: Path) -> int:
    """Files and links in a folder and below; 1 for something that is no folder."""
    if folder.is_symlink() or not folder.is_dir():
        return int(os.path.lexists(folder))
    return sum(len(files) for _, _, files, _ in os.fwalk(folder, follow_symlinks=False)) or 1


def _remove_tree(folder: Path) -> None:
    """Remove a folder whose content its user may change meanwhile."""
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
            with contextlib.suppress(FileNotFoundError):
                about = os.stat(name, dir_fd=handle, follow_symlinks=False)
                if about.st_uid == uid and not stat.S_ISDIR(about.st_mode):
                    found.append(name)
    return found


def _remove_choices(folder: Path, names: list[str]) -> None:
    if not names:
        return
    with opened(folder) as handle:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=handle)
