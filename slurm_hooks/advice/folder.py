"""The folder of the advice files: two copies of each, with different trust.

    <root>                 0711  of root
    <root>/sched/<uid>     0640  of root and SlurmUser's group, in a folder 0750: what job_submit believes
    <root>/user/<uid>/advice  0400  of that user, in a folder 0711 of root's: for showing only, never believed
    <root>/.../_site       for everybody else; the user's copy is 0444

Only root (in tests: the one user who runs this) may write to these folders: who could make a FIFO in sched would stop
slurmctld. A user can change the content of their own copy: it is not read here. Folders that once were given to their
users, with whatever they keep there, are taken back. What is wrong with one user's copy never keeps others from theirs.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from almanac.errors import ConfigError
from slurm_hooks.advice.file import SITE
from telemetry.store.atomic import TEMPORARY, locked, opened
from telemetry.store.user_files import (
    FILE_MODE,
    FOLDER_MODE,
    explained,
    flush_file_system,
    gives,
    make_folder,
    put,
    stage,
    taken_back,
    user_folder,
    writable_by_others,
)

SHOWN = "advice"
SCHED_MODE, SCHED_FILE_MODE = 0o750, 0o640


@dataclass(frozen=True)
class _Staged:
    """A copy that waits for its place. uid: None for the one in sched."""

    temporary: Path
    name: str
    uid: int | None


@dataclass(frozen=True)
class AdviceDir:
    """owner_uid: whose the folders are: root's, in tests one's own. group_gid: of sched; None: left as it is."""

    root: Path
    owner_uid: int
    group_gid: int | None = None

    @property
    def sched(self) -> Path:
        return self.root / "sched"

    @property
    def user(self) -> Path:
        return self.root / "user"

    def shown(self, name: str) -> Path:
        """The copy that a user reads."""
        return shown_path(self.root, name)

    def names(self) -> list[str]:
        """Entries of sched but for what a killed publisher left; () before the first run."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(path.name for path in self.sched.iterdir() if not path.name.startswith(TEMPORARY))
        return []

    def require_safe(self) -> None:
        """Raises ConfigError, naming it, where another user can write to the folder or to one above it."""
        faults = writable_by_others(self.root, self.owner_uid)
        if faults:
            raise ConfigError(
                f"advice is not published: {'; '.join(faults)}",
                "who can write there can stop slurmctld: correct owner and mode, or choose another hooks.advice_dir",
            )

    def prepare(self) -> None:
        """Make the folders, correct their modes, and take away what a killed publisher left. Raises StoreError.

        To be called under the lock: what another publisher has made by now looks the same.
        """
        with explained(self.root, self.root):
            for path, mode in ((self.root, FOLDER_MODE), (self.sched, SCHED_MODE), (self.user, FOLDER_MODE)):
                make_folder(path, mode)
            if self.group_gid is not None:
                os.chown(self.sched, -1, self.group_gid)
            for folder in (self.sched, self.user):
                for stale in folder.glob(f"{TEMPORARY}*"):
                    stale.unlink()

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Held by the one who publishes; makes the root folder. Raises BusyError where another does, StoreError."""
        with explained(self.root, self.root):
            make_folder(self.root, FOLDER_MODE)
        return locked(self.root / ".lock", "publishes now")

    def is_shown(self, name: str, content: bytes, uid: int) -> bool:
        """Whether the user's copy seems to be that content, by its owner, type and size, in a folder of ours."""
        with contextlib.suppress(OSError):
            found = self.shown(name).lstat()
            is_file = stat.S_ISREG(found.st_mode) and found.st_size == len(content)
            return is_file and found.st_uid == self._owner(uid) and not self.is_given_away(name)
        return False

    def is_given_away(self, name: str) -> bool:
        """Whether somebody else could make files in the folder of a user's copy. False where there is none."""
        with contextlib.suppress(OSError):
            found = (self.user / name).lstat()
            return found.st_uid != self.owner_uid or bool(found.st_mode & 0o022)
        return False

    def believed(self, name: str) -> bytes | None:
        """Content of the file in sched; None where there is none, or it is none."""
        with contextlib.suppress(OSError):
            handle = os.open(self.sched / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
                return file.read() if stat.S_ISREG(os.fstat(handle).st_mode) else None
        return None

    def write(self, files: Iterable[tuple[str, bytes, int]]) -> list[str]:
        """Replace both copies of files (name, content, uid), each whole or not at all; names that could not be shown.

        All are on disk before the first is put in its place. Raises StoreError: what was not replaced is as before.
        What fails with one user's copy alone is no error: the others get theirs.
        """
        staged, hidden = list[_Staged](), list[str]()
        try:
            for name, content, uid in files:
                with explained(self.sched / name, self.root):
                    if not self._stage(staged, name, content, uid):
                        hidden.append(name)
            for folder in (self.sched, self.user):
                with explained(folder, self.root):
                    flush_file_system(folder)
            hidden += [each.name for each in staged if not self._put(each)]
            for folder in (self.sched, self.user):
                with explained(folder, self.root), opened(folder) as handle:
                    os.fsync(handle)
            return hidden
        finally:
            for each in staged:
                each.temporary.unlink(missing_ok=True)

    def _stage(self, staged: list[_Staged], name: str, content: bytes, uid: int) -> bool:
        """Both copies under other names, in folders that are ours alone. False: the user cannot be given theirs."""
        for folder, mode, group, target in (
            (self.sched, SCHED_FILE_MODE, self.group_gid, None),
            (self.user, 0o444 if name == SITE else FILE_MODE, None, uid),
        ):
            temporary, handle = stage(folder, content)
            staged.append(_Staged(temporary, name, target))
            try:
                os.fchmod(handle, mode)
                if self.owner_uid == 0 and group is not None:
                    os.fchown(handle, -1, group)
                elif self.owner_uid == 0 and target and not gives(handle, target):
                    staged.pop().temporary.unlink()
                    return False
            finally:
                os.close(handle)
        return True

    def _put(self, staged: _Staged) -> bool:
        """False where the user's copy cannot be put in its place."""
        if staged.uid is None:
            with explained(self.sched / staged.name, self.root):
                staged.temporary.rename(self.sched / staged.name)
            return True
        try:
            self._show(staged)
        except OSError:
            return False
        return True

    def _show(self, staged: _Staged) -> None:
        """Raises OSError, for instance where another file system is mounted on the user's folder."""
        with taken_back(self.user / staged.name, self.owner_uid) as handle:
            put(staged.temporary, SHOWN, handle)

    def give(self, uid: int, name: str, content: bytes) -> bool:
        """Replace one more file beside a user's copy, which only they can read: for showing only.

        False where it cannot be given to them. Raises StoreError.
        """
        with explained(self.user, self.root):
            temporary, handle = stage(self.user, content)
        try:
            os.fchmod(handle, FILE_MODE)
            if self.owner_uid == 0 and not gives(handle, uid):
                return False
            with taken_back(self.user / str(uid), self.owner_uid) as place:
                put(temporary, name, place)
        except OSError:
            return False
        finally:
            os.close(handle)
            temporary.unlink(missing_ok=True)
        return True

    def take(self, uid: int, name: str) -> None:
        """Take such a file away where it is there."""
        with contextlib.suppress(OSError), opened(self.user / str(uid)) as handle:
            os.unlink(name, dir_fd=handle)

    def remove(self, name: str) -> None:
        """Take both copies away; a user's folder that holds more than ours stays. Raises StoreError."""
        with explained(self.sched / name, self.root):
            (self.sched / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError), opened(self.user / name) as handle:
            os.unlink(SHOWN, dir_fd=handle)
        with contextlib.suppress(OSError):
            (self.user / name).rmdir()

    def _owner(self, uid: int) -> int:
        return uid if self.owner_uid == 0 else self.owner_uid


def shown_path(root: Path, name: str) -> Path:
    """The copy that a user reads. name: uid, or `_site`."""
    return user_folder(root, name) / SHOWN
