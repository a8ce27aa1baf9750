"""The folder where files for users wait until `almanac-distribute` copies them to their readers.

    <store>/published/<cluster>/user/<uid>/<name>   of the store's owner
    <store>/published/<cluster>/user/_site/<name>   for everybody

The layout is that of hooks.advice_dir. Only the store's owner writes here, and what is here says what is published.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from almanac.plain_file import read_plain
from telemetry.store.atomic import TEMPORARY, locked, make_folders
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.user_files import PUBLISHED, REPORTS, explained, flush_file_system, user_folder

FOLDER_MODE = 0o750


@dataclass(frozen=True)
class Outgoing:
    """Files by user and name. user: a uid, or `_site`; name: may have a folder, as in `reports/7`."""

    root: Path

    def path(self, user: str, name: str) -> Path:
        return user_folder(self.root, user) / name

    def users(self) -> list[str]:
        """Users with files, sorted; none before the first run."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(path.name for path in (self.root / "user").iterdir())
        return []

    def read(self, user: str, name: str) -> bytes | None:
        with contextlib.suppress(OSError):
            return read_plain(self.path(user, name), flags=os.O_NOFOLLOW)
        return None

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Held by the one who publishes. Raises BusyError where another does, StoreError."""
        with explained(self.root, self.root):
            make_folders(self.root, FOLDER_MODE)
        return locked(self.root / ".lock", "publishes now")

    def prepare(self) -> None:
        """Remove what a killed publisher left. To be called under the lock. Raises StoreError.

        The folder `user` comes with the first file: an empty one would say that nothing is published any more.
        """
        with explained(self.root, self.root):
            make_folders(self.root, FOLDER_MODE)
            for stale in self.root.glob(f"{TEMPORARY}*"):
                stale.unlink()

    def write(self, files: Iterable[tuple[str, str, bytes]]) -> None:
        """Replace files (user, name, content), each whole or not at all. Raises StoreError.

        All are on disk before the first is put in its place: after an error, old files are as before, or replaced.
        """
        staged = list[tuple[Path, Path]]()
        try:
            with explained(self.root, self.root):
                for user, name, content in files:
                    temporary = self.root / f"{TEMPORARY}{secrets.token_hex(8)}"
                    staged.append((temporary, self.path(user, name)))
                    temporary.touch(0o600)
                    temporary.write_bytes(content)
                flush_file_system(self.root)
                for temporary, path in staged:
                    make_folders(path.parent, FOLDER_MODE)
                    temporary.rename(path)
        finally:
            for temporary, _ in staged:
                temporary.unlink(missing_ok=True)

    def remove(self, user: str, names: Iterable[str]) -> None:
        """Remove files, and folders that are empty then. Raises StoreError."""
        folder = user_folder(self.root, user)
        with explained(folder, self.root):
            for name in names:
                (folder / name).unlink(missing_ok=True)
        for empty in (folder / REPORTS, folder):
            with contextlib.suppress(OSError):
                empty.rmdir()


def outgoing_of(store: ClusterStore) -> Outgoing:
    """Of a cluster: one hooks.advice_dir serves one cluster."""
    return Outgoing(store.root / PUBLISHED / store.cluster)


def all_outgoing(store: Path) -> list[Outgoing]:
    """Of all clusters of a store."""
    return [Outgoing(path) for path in sorted((store / PUBLISHED).glob("*")) if path.is_dir()]
