"""The folders of published reports, and how root writes to them.

    <advice_dir>/user/<uid>/jobs                                    0400  of that user: the list
    <advice_dir>/user/<uid>/reports/<job id>-<submission>-<digest>  0400  of that user: a report
    <advice_dir>/.reports.json                                      0640  of root: which list was written for
                                                                    whom, and which reports cannot be made

Folders belong to root with mode 0711: users can read files whose names they know, and can create nothing. File names
say what is published already. This module never reads a user's files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from almanac.errors import ConfigError
from telemetry.store.atomic import TEMPORARY, locked, opened, write_atomically
from telemetry.store.user_files import (
    FILE_MODE,
    FOLDER_MODE,
    explained,
    flush_file_system,
    gives,
    make_folder,
    move_aside,
    put,
    stage,
    taken_back,
    user_folder,
    writable_by_others,
)

INDEX, REPORTS, MANIFEST = "jobs", "reports", ".reports.json"
REPORT_NAME = re.compile(r"(\d{1,19}-\d{1,19})-[0-9a-f]{1,16}")


@dataclass(frozen=True)
class OwnFile:
    """A file to write for a user. name: INDEX, or the name of a report."""

    uid: int
    name: str
    content: bytes

    @property
    def is_report(self) -> bool:
        return self.name != INDEX


@dataclass
class Listed:
    """The list last written for a uid: its user, the digest of its content, and the newest end of its jobs."""

    user: str
    digest: str
    newest_end_s: int


@dataclass(frozen=True)
class OwnFolder:
    """All published folders. root: hooks.advice_dir. owner_uid: their owner, 0 except in tests."""

    root: Path
    owner_uid: int

    @property
    def user(self) -> Path:
        return self.root / "user"

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Hold the lock of everyone who publishes here, advice included.

        Raises ConfigError if others can write to the folder, BusyError, StoreError.
        """
        faults = writable_by_others(self.root, self.owner_uid)
        if faults:
            raise ConfigError(
                f"reports are not published: {'; '.join(faults)}",
                "correct owner and mode, or choose another hooks.advice_dir",
            )
        with explained(self.root, self.root):
            make_folder(self.root, FOLDER_MODE)
        with locked(self.root / ".lock", "publishes now"):
            with explained(self.user, self.root):
                make_folder(self.user, FOLDER_MODE)
                for stale in self.user.glob(f"{TEMPORARY}*"):
                    stale.unlink()
            yield

    def uids(self) -> list[int]:
        """The uids with a list or reports here, sorted."""
        with contextlib.suppress(FileNotFoundError):
            names = [path.name for path in self.user.iterdir() if path.name.isascii() and path.name.isdecimal()]
            return sorted(int(name) for name in names if self.has_index(int(name)) or self.reports(int(name)))
        return []

    def reports(self, uid: int) -> set[str]:
        """Names of the reports of a uid; empty if the folder is not ours, because anyone could have made them."""
        with contextlib.suppress(OSError), self._ours(uid) as folder, opened(REPORTS, folder) as handle:
            if self._is_ours(handle):
                return {entry.name for entry in os.scandir(handle) if REPORT_NAME.fullmatch(entry.name)}
        return set()

    def has_index(self, uid: int) -> bool:
        with contextlib.suppress(OSError), self._ours(uid) as folder:
            found = os.stat(INDEX, dir_fd=folder, follow_symlinks=False)
            return stat.S_ISREG(found.st_mode) and found.st_uid == (uid if self.owner_uid == 0 else self.owner_uid)
        return False

    def write(self, files: Iterable[OwnFile]) -> set[int]:
        """Write files, each whole or not at all. Returns the uids that could not be given a file.

        All files are on disk before the first one is put in place. After a StoreError, old files are unchanged or
        replaced as a whole.
        """
        staged, refused = list[tuple[Path, OwnFile]](), set[int]()
        try:
            for file in files:
                with explained(self.user, self.root):
                    temporary = self._stage(file)
                if temporary:
                    staged.append((temporary, file))
                else:
                    refused.add(file.uid)
            with explained(self.user, self.root):
                flush_file_system(self.user)
            refused |= {file.uid for temporary, file in staged if not self._put(temporary, file)}
            return refused
        finally:
            for temporary, _ in staged:
                temporary.unlink(missing_ok=True)

    def _stage(self, file: OwnFile) -> Path | None:
        """A temporary file with the content; None if it cannot be given to the user. Raises OSError."""
        temporary, handle = stage(self.user, file.content)
        try:
            os.fchmod(handle, FILE_MODE)
            if self.owner_uid == 0 and not gives(handle, file.uid):
                temporary.unlink()
                return None
            return temporary
        finally:
            os.close(handle)

    def _put(self, temporary: Path, file: OwnFile) -> bool:
        with contextlib.suppress(OSError), taken_back(user_folder(self.root, str(file.uid)), self.owner_uid) as folder:
            if not file.is_report:
                put(temporary, file.name, folder)
                return True
            with self._reports_folder(folder) as handle:
                put(temporary, file.name, handle)
                return True
        return False

    @contextlib.contextmanager
    def _reports_folder(self, folder: int) -> Iterator[int]:
        """A descriptor of `reports/`. Moves aside what a user made there while the folder was theirs."""
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(REPORTS, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != self.owner_uid:
                move_aside(REPORTS, folder)
        with taken_back(REPORTS, self.owner_uid, folder) as handle:
            yield handle

    def remove(self, uid: int, names: Iterable[str]) -> None:
        """Remove reports. Files that cannot be removed stay."""
        with contextlib.suppress(OSError), self._ours(uid) as folder, opened(REPORTS, folder) as handle:
            if not self._is_ours(handle):
                return
            for name in names:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=handle)

    def remove_all(self, uid: int) -> None:
        """Remove the list and all reports of a uid; other files stay."""
        with contextlib.suppress(OSError), self._ours(uid) as folder:
            with contextlib.suppress(OSError):
                os.unlink(INDEX, dir_fd=folder)
            self.remove(uid, self.reports(uid))
            with contextlib.suppress(OSError):
                os.rmdir(REPORTS, dir_fd=folder)
        with contextlib.suppress(OSError):
            user_folder(self.root, str(uid)).rmdir()

    def listed(self, cluster: str) -> dict[int, Listed]:
        """The lists written so far, by uid; empty if the manifest is missing or damaged: all are then written again."""
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            return {int(uid): Listed(**listed) for uid, listed in self._manifest(cluster)["users"].items()}
        return {}

    def unwritable(self, cluster: str) -> set[str]:
        """Names of reports that could not be made; empty if the manifest is missing or damaged."""
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            return set(map(str, self._manifest(cluster)["unwritable"]))
        return set()

    def _manifest(self, cluster: str) -> dict[str, Any]:
        """The manifest; empty if this cluster has none. Raises ValueError, KeyError, or TypeError if it is damaged."""
        try:
            document = json.loads((self.root / MANIFEST).read_bytes())
        except OSError:
            return {}
        return dict(document) if document["cluster"] == cluster else {}

    def set_published(self, cluster: str, users: dict[int, Listed], unwritable: set[str]) -> None:
        """Write the manifest: which lists were written, and which reports cannot be made."""
        document = {
            "cluster": cluster,
            "users": {str(uid): vars(listed) for uid, listed in users.items()},
            "unwritable": sorted(unwritable),
        }
        with explained(self.root / MANIFEST, self.root):
            write_atomically(self.root / MANIFEST, json.dumps(document).encode("ascii"))

    @contextlib.contextmanager
    def _ours(self, uid: int) -> Iterator[int]:
        """A descriptor of a user's folder. Raises OSError if there is none, or if it is not ours."""
        with opened(user_folder(self.root, str(uid))) as handle:
            if not self._is_ours(handle):
                raise PermissionError(errno.EPERM, "a user's folder")
            yield handle

    def _is_ours(self, handle: int) -> bool:
        found = os.fstat(handle)
        return found.st_uid == self.owner_uid and not found.st_mode & 0o022
