"""The spool of ended jobs: one small file per job, written by slurm_hooks/spool/almanac-ended.sh within slurmctld.

A file only says that a job has ended, so almanac asks accounting now. Accounting says whose job it was, and whether it
has ended. So a false file costs one query. Other files move to `bad/`.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from almanac.errors import SourceError
from almanac.records import Counts
from almanac.units import printable
from telemetry.sources.bindings import BadRecordError, read_record
from telemetry.store.atomic import opened

MOST_FILES, MOST_NAMES = 50_000, 1_000_000
"""Of one run: files that are opened, and names that are listed; the others are left to the next."""
UNFINISHED_S = 60
BAD = "bad"
MAX_BYTES = 256

_NAME = re.compile(r"(?P<job>[1-9][0-9]{0,9})\.[0-9a-f-]{1,36}")
_CONTENT = re.compile(rb"job_id=(?P<job>[0-9]{1,10})\ncluster=(?P<cluster>[A-Za-z0-9_.-]{0,64})\n")


@dataclass(frozen=True)
class Notice:
    """A job that is said to have ended. seen_s: when the file was written, by the controller's clock."""

    name: str
    job_id: int
    seen_s: int


@dataclass(frozen=True)
class Spool:
    """The folder of one site; clusters that share it tell their files apart by their content.

    gids: groups of whoever runs almanac, who may be allowed to write there: they take files away.
    """

    folder: Path
    cluster: str
    gids: Collection[int]

    @property
    def is_there(self) -> bool:
        """False where no hook is in use, which is no fault."""
        return self.folder.is_dir()

    def read(self, now_s: int) -> tuple[list[Notice], Counts]:
        """The jobs that ended, oldest file first, and what became of the files; those of other clusters are left.

        Of more than MOST_FILES the newest are looked at, and of the others some, which change from run to run.
        Raises SourceError where others could write to the folder, or it cannot be read.
        """
        owners = self.trusted_owners()
        notices, counts = list[Notice](), Counts()
        for name in self._names(now_s):
            about = self._about(name)
            if about is None:
                continue
            try:
                notice = self._notice(name, int(about.st_mtime), owners)
            except _UnfinishedError as error:
                # rsync gives a file the time of its original just before it gives it its name.
                if now_s - int(about.st_ctime) < UNFINISHED_S:
                    continue
                self._move_to_bad(name, str(error), counts)
            except BadRecordError as error:
                self._move_to_bad(name, str(error), counts)
            else:
                if notice is not None:
                    counts.seen += 1
                    counts.kept += 1
                    notices.append(notice)
        return sorted(notices, key=lambda notice: (notice.seen_s, notice.name)), counts

    def remove(self, notices: Sequence[Notice]) -> None:
        """Take away files that are dealt with."""
        for notice in notices:
            with contextlib.suppress(OSError):
                (self.folder / notice.name).unlink()

    def trusted_owners(self) -> frozenset[int]:
        """Root and the folder's owner, which is SlurmUser: who may write there. Raises SourceError."""
        try:
            found = self.folder.lstat()
        except OSError as error:
            raise SourceError(f"{self.folder}: cannot be read: {error.strerror}", "see docs/admin.md") from error
        is_open = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and found.st_gid not in self.gids)
        if not stat.S_ISDIR(found.st_mode) or is_open:
            raise SourceError(
                f"{self.folder}: not trusted: not a folder, or others can write to it ({stat.filemode(found.st_mode)})",
                f"chown it to SlurmUser and almanac's group, then chmod 0770 {self.folder}",
            )
        return frozenset({0, found.st_uid})

    def waiting(self) -> list[Path]:
        """The files that nobody has dealt with, MOST_FILES at most. Raises SourceError."""
        return [self.folder / name for name in self._names(0)]

    def _names(self, seed: int) -> list[str]:
        """Half of them the newest, the others drawn by the seed: what other clusters leave hides nothing for long."""
        try:
            with os.scandir(self.folder) as entries:
                found = [entry for entry in islice(entries, MOST_NAMES) if entry.name != BAD]
        except OSError as error:
            raise SourceError(f"{self.folder}: cannot be read: {error.strerror}", "see docs/admin.md") from error
        if len(found) > MOST_FILES:
            found.sort(key=_age_key, reverse=True)
            newest, older = found[: MOST_FILES // 2], found[MOST_FILES // 2 :]
            found = newest + Random(seed).sample(older, MOST_FILES - len(newest))
        return [entry.name for entry in found]

    def _about(self, name: str) -> os.stat_result | None:
        """None where it is gone: rsync has renamed it, or another run has dealt with it."""
        try:
            return (self.folder / name).lstat()
        except OSError:
            return None

    def _notice(self, name: str, seen_s: int, owners: frozenset[int]) -> Notice | None:
        """None for another cluster's. Raises BadRecordError."""
        match = _NAME.fullmatch(name)
        if not match and name.startswith("."):
            raise _UnfinishedError("file name of another form")
        if not match:
            raise BadRecordError("file name of another form")
        data = read_record(self.folder / name, owners, MAX_BYTES, has_one_name=True)
        said = _CONTENT.fullmatch(data)
        if not said or said["job"].decode() != match["job"]:
            raise _UnfinishedError("content of another form")
        if said["cluster"].decode().lower() not in ("", self.cluster.lower()):
            return None
        return Notice(name, int(match["job"]), seen_s)

    def _move_to_bad(self, name: str, reason: str, counts: Counts) -> None:
        """Out of the way, so that it is counted once. What cannot be moved is counted again the next time.

        A link in the place of `bad/` is not followed: it would choose where root moves a file of any name.
        """
        if self._about(name) is None:
            return
        counts.seen += 1
        counts.drop(reason, example=printable(name))
        with contextlib.suppress(OSError), opened(self.folder) as folder:
            with contextlib.suppress(FileExistsError):
                os.mkdir(BAD, 0o700, dir_fd=folder)
            with opened(BAD, folder) as bad:
                os.rename(name, name, src_dir_fd=folder, dst_dir_fd=bad)

    def count_bad(self) -> int:
        """How many files lie in `bad/`, MOST_NAMES at most. Raises OSError, also where it is no folder."""
        try:
            with opened(self.folder) as folder, opened(BAD, folder) as bad, os.scandir(bad) as entries:
                return sum(1 for _ in islice(entries, MOST_NAMES))
        except FileNotFoundError:
            return 0


def _age_key(entry: os.DirEntry[str]) -> float:
    """When it was written; 0 of what is gone."""
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


class _UnfinishedError(BadRecordError):
    """The hook makes a file and then writes it, rsync writes .NAME.XXXXXX first: they can be seen in between."""
