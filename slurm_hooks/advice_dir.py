"""The folder of the advice files: two copies of each, with different trust.

    <root>                 0711  of root
    <root>/sched/<uid>     0640  of root and SlurmUser's group, in a folder 0750: what job_submit believes
    <root>/user/<uid>/advice  0400  of that user, in a folder 0500 of theirs: for showing only, never believed
    <root>/.../_site       for everybody else; the user's copy is 0444

Only root (in tests: the one user who runs this) may write to root, sched and user: who could make a FIFO in sched would
stop slurmctld. A user can do as they like in their own folder: nothing there is read here, and files are put into it
by rename from a folder of root's, relative to an open descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from almanac.errors import ConfigError, StoreError
from slurm_hooks.advice_file import SITE
from telemetry.atomic import TEMPORARY, locked

SHOWN = "advice"
ROOT_MODE, SCHED_MODE, SCHED_FILE_MODE = 0o711, 0o750, 0o640


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
        """Make the folders, correct their modes, and take away what a killed publisher left. Raises StoreError."""
        with self._explained(self.root):
            for path, mode in ((self.root, ROOT_MODE), (self.sched, SCHED_MODE), (self.user, ROOT_MODE)):
                path.mkdir(mode=mode, parents=True, exist_ok=True)
                path.chmod(mode)
            if self.group_gid is not None:
                os.chown(self.sched, -1, self.group_gid)
            for folder in (self.sched, self.user):
                for stale in folder.glob(f"{TEMPORARY}*"):
                    stale.unlink()

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Held by the one who publishes. Raises BusyError where another does."""
        return locked(self.root / ".lock", "publishes now")

    def is_shown(self, name: str, content: bytes, uid: int) -> bool:
        """Whether the user's copy seems to be that content, by its owner, type and size."""
        with contextlib.suppress(OSError):
            found = self.shown(name).lstat()
            return stat.S_ISREG(found.st_mode) and found.st_size == len(content) and found.st_uid == self._owner(uid)
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
        """
        staged = list[_Staged]()
        try:
            for name, content, uid in files:
                with self._explained(self.sched / name):
                    self._stage(staged, name, content, uid)
            for folder in (self.sched, self.user):
                with self._explained(folder):
                    flush_file_system(folder)
            hidden = [each.name for each in staged if not self._put(each)]
            for folder in (self.sched, self.user):
                with self._explained(folder), _opened(folder) as handle:
                    os.fsync(handle)
            return hidden
        finally:
            for each in staged:
                each.temporary.unlink(missing_ok=True)

    def _stage(self, staged: list[_Staged], name: str, content: bytes, uid: int) -> None:
        """Both copies under other names, in folders that are ours alone."""
        is_site = name == SITE
        for folder, mode, owner, group, target in (
            (self.sched, SCHED_FILE_MODE, self.owner_uid, self.group_gid, None),
            (self.user, 0o444 if is_site else 0o400, uid, None, uid),
        ):
            staged.append(_Staged(folder / f"{TEMPORARY}{secrets.token_hex(8)}", name, target))
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(staged[-1].temporary, flags, 0o600), "wb") as out:  # noqa: PTH123 - of a descriptor
                out.write(content)
                if self.owner_uid == 0:
                    os.fchown(out.fileno(), owner, -1 if group is None else group)
                os.fchmod(out.fileno(), mode)

    def _put(self, staged: _Staged) -> bool:
        """False where the user keeps something else where their copy should be."""
        if staged.uid is None:
            with self._explained(self.sched / staged.name):
                staged.temporary.rename(self.sched / staged.name)
            return True
        folder = self.user / staged.name
        with self._explained(folder):
            self._make_folder(folder, staged.uid, staged.name == SITE)
            try:
                with _opened(folder) as handle:
                    os.rename(staged.temporary, SHOWN, dst_dir_fd=handle)
            except IsADirectoryError:
                return False
        return True

    def _make_folder(self, folder: Path, uid: int, is_site: bool) -> None:
        # Who is not root could not put a file into a folder that nobody may write.
        mode = (0o555 if is_site else 0o500) | (0 if self.owner_uid == 0 else 0o200)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        with _opened(folder) as handle:
            os.fchmod(handle, mode)
            if self.owner_uid == 0:
                os.fchown(handle, uid, -1)

    def remove(self, name: str) -> None:
        """Take both copies away; a folder that holds more than ours stays. Raises StoreError."""
        with self._explained(self.sched / name):
            (self.sched / name).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                with _opened(self.user / name) as handle:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(SHOWN, dir_fd=handle)
                with contextlib.suppress(OSError):
                    (self.user / name).rmdir()

    def _owner(self, uid: int) -> int:
        return uid if self.owner_uid == 0 else self.owner_uid

    @contextlib.contextmanager
    def _explained(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            todo = f"make room on the file system of {self.root}" if full else "run this as the folder's owner"
            raise StoreError(
                f"{path}: cannot be written: {error.strerror}; what was there before is still in place", todo
            ) from error


def shown_path(root: Path, name: str) -> Path:
    """The copy that a user reads. name: uid, or `_site`."""
    return root / "user" / name / SHOWN


def flush_file_system(folder: Path) -> None:
    """Bring to disk what has been written to its file system: one wait for thousands of files. Raises OSError.

    syncfs(2), which reports what could not be written from Linux 5.8 on.
    """
    with _opened(folder) as handle:
        if ctypes.CDLL(None, use_errno=True).syncfs(handle):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


def writable_by_others(root: Path, owner_uid: int) -> list[str]:
    """Why others could change what is below root, in words: owner and mode of root, its folders and all above them.

    A folder above with the sticky bit (/tmp) lets nobody replace what is not theirs.
    """
    real = root.resolve()
    faults = []
    for path in (*reversed(real.parents), real, real / "sched", real / "user"):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(found.st_mode):
            faults.append(f"{path} is no folder")
        elif found.st_uid not in (0, owner_uid):
            faults.append(f"{path} belongs to uid {found.st_uid}")
        elif found.st_mode & 0o022 and not (found.st_mode & stat.S_ISVTX and path in real.parents):
            faults.append(f"{path} has mode {stat.S_IMODE(found.st_mode):04o}: others can write to it")
    return faults
