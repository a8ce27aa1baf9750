"""The only place that connects to DuckDB: every connection has its limits, and spills where no other user can look.

DuckDB's own choice is `.tmp` in the current folder, mode 0755, with files that all can read and names that all can
foresee.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb

SPILL = ".almanac-spill-"
"""How the names of the folders begin that connections spill to."""
_OWNER = "owner"
_FRESH_S = 60


@contextlib.contextmanager
def connect(
    spill_parents: Sequence[Path], *, memory_limit_mib: int | None = None, threads: int = 0
) -> Iterator[duckdb.DuckDBPyConnection]:
    """A DuckDB connection of its own, in memory. threads: 0 for all cores. memory_limit_mib: None for DuckDB's own.

    spill_parents: where its private spill folder may be made, best first; $TMPDIR or /tmp comes last. If others could
    replace a folder in each of them, the connection does not spill.
    """
    config: dict[str, Any] = {"threads": threads or os.cpu_count() or 1, "autoinstall_known_extensions": False}
    if memory_limit_mib is not None:
        config["memory_limit"] = f"{memory_limit_mib}MiB"
    with spill_folder(spill_parents) as folder:
        with duckdb.connect(config={**config, "temp_directory": folder}) as db:
            yield db


@contextlib.contextmanager
def spill_folder(parents: Sequence[Path]) -> Iterator[str]:
    """A folder of mode 0700 that is removed at the end; an empty string (no spill) if none can be made.

    parents: folders to make it in, best first; $TMPDIR or /tmp comes last.
    """
    with contextlib.ExitStack() as stack:
        for parent in filter(_is_guarded, [*parents, Path(tempfile.gettempdir())]):
            with contextlib.suppress(OSError):
                folder = stack.enter_context(_private_folder(parent))
                break
        else:
            folder = ""
        yield folder


@contextlib.contextmanager
def _private_folder(parent: Path) -> Iterator[str]:
    """Made in parent, and locked while it is used, so that the folders of killed processes can be told and removed."""
    _sweep(parent)
    with tempfile.TemporaryDirectory(prefix=SPILL, dir=parent, ignore_cleanup_errors=True) as folder:
        with (Path(folder) / _OWNER).open("xb") as owner:
            with contextlib.suppress(OSError):  # no locks on this file system: then nobody sweeps
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder


def _is_guarded(folder: Path) -> bool:
    """Whether we can write here, and nobody but us and root can rename what we make here."""
    try:
        found = folder.stat()
    except OSError:
        return False
    is_ours = found.st_uid in (0, os.geteuid())
    is_shared = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)) and not found.st_mode & stat.S_ISVTX
    return is_ours and not is_shared and os.access(folder, os.W_OK | os.X_OK)


def _sweep(parent: Path) -> None:
    """Remove what killed processes of this user left in parent."""
    with os.scandir(parent) as entries:
        left = [Path(entry.path) for entry in entries if entry.name.startswith(SPILL) and _is_left(entry)]
    for folder in left:
        with contextlib.suppress(OSError), open(folder / _OWNER, "r+b", opener=_no_link) as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _is_left(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder of ours that was not made just now: its maker may not have locked it yet."""
    found = entry.stat(follow_symlinks=False)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and time.time() - found.st_ctime > _FRESH_S


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
