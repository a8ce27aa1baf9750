"""Records of Slurm's hooks: the GPUs of each job, from the prolog or from squeue's gres_detail, and ended jobs.

sacct records the number of GPUs, but not which ones. Users cannot forge either source: a prolog record must be a file
of root, and squeue is read as JSON. A job name or comment can forge lines in the text of squeue and scontrol, but not
in JSON.

The spool of ended jobs has one small file per job, written by slurm_hooks/spool/almanac-ended.sh within slurmctld. A
file only says that a job has ended; accounting says whose job it was, and confirms its end. So a false file costs one
query. Invalid files move to `bad/`.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa

from almanac.atomic import opened
from almanac.errors import SourceError
from almanac.records import Counts
from almanac.tres import SHARED_GRES
from almanac.units import printable
from slurm.commands import Runner
from slurm.queue import read_running
from slurm.queued_job import QueuedJob
from telemetry.sources.prolog_record import HOST, NAME, BadRecordError, parse_prolog_record, read_record
from telemetry.sources.source import RowBatch
from telemetry.store.schema import BINDINGS

PROLOG_OVERLAP_S = 3600
ROWS_PER_BATCH = 100_000


def arrival_s(path: Path) -> float:
    """Return when a file got its name or content in this folder, by this host's clock; 0 if it is gone.

    Its modification time would not do: a copy may keep that of the original.
    """
    try:
        return path.lstat().st_ctime
    except OSError:
        return 0.0


@dataclass(frozen=True)
class PrologSource:
    """Records that slurm_hooks/prolog/almanac-gpus.sh writes: <cluster>.<job id>.<host>.<time>, one per job and node.

    owners: user ids whose files are believed; Slurm runs a Prolog as root. arrival: when a file came into the folder
    (s since 1970). Names that begin with a dot are still being written. Records are left where they are.
    """

    folder: Path
    cluster: str
    owners: frozenset[int] = frozenset({0})
    arrival: Callable[[Path], float] = arrival_s
    name: str = "prolog"

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        """Rows of the records that were made in [since_s, until_s), and of older ones that came after since_s.

        An hour is added before since_s, for clocks that differ. Raises SourceError where the folder cannot be read.
        """
        try:
            names = sorted(entry.name for entry in os.scandir(self.folder) if not entry.name.startswith("."))
        except OSError as error:
            raise SourceError(
                f"{self.folder}: cannot be read: {error.strerror}", "correct bindings.prolog_dir, or its permissions"
            ) from error
        counts, rows = Counts(), list[dict[str, Any]]()
        for name in names:
            match = NAME.fullmatch(name)
            if match and match["cluster"].lower() != self.cluster.lower():
                continue
            if match and not self._is_new(name, int(match["time"]), since_s - PROLOG_OVERLAP_S, until_s):
                continue
            self._add(name, match, rows, counts)
            if len(rows) >= ROWS_PER_BATCH:
                yield _batch(rows, counts)
                counts, rows = Counts(), []
        yield _batch(rows, counts, until_s)

    def _is_new(self, name: str, made_s: int, since_s: int, until_s: int) -> bool:
        return made_s < until_s and (made_s >= since_s or self.arrival(self.folder / name) >= since_s)

    def _add(self, name: str, match: re.Match[str] | None, rows: list[dict[str, Any]], counts: Counts) -> None:
        counts.seen += 1
        try:
            if not match:
                raise BadRecordError("file name of another form")
            record = parse_prolog_record(read_record(self.folder / name, self.owners), match)
            rows += [
                _row(record.job_id, record.host, gpu, "prolog", record.time_s, uuid, mig)
                for gpu, uuid, mig in record.devices
            ]
            counts.kept += 1
        except BadRecordError as error:
            counts.drop(str(error), example=printable(name))


@dataclass(frozen=True)
class SqueueSource:
    """GPU indices of the jobs that run now, by squeue's gres_detail. It keeps no past: poll it often."""

    commands: Runner
    clock: Callable[[], float]
    cluster: str = ""
    name: str = "squeue"

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        """One batch of the jobs that run now, whatever the span. seen_s is the job's start, so that polling again
        changes nothing. Raises CommandError where squeue fails, or gives no list of jobs.
        """
        queue = read_running(self.commands, self.cluster)
        counts, rows = Counts(seen=queue.unreadable), list[dict[str, Any]]()
        counts.drop("job that cannot be read", queue.unreadable, queue.example)
        for job in queue.jobs:
            if not job.has_started or not any(name in each for each in job.detail for name in ("gpu", *SHARED_GRES)):
                continue
            counts.seen += 1
            try:
                rows += squeue_rows(job, int(self.clock()))
                counts.kept += 1
            except ValueError as error:
                counts.drop(str(error), example=printable(f"job {job.job_id} on {job.node_list}"))
        yield _batch(rows, counts)


def squeue_rows(job: QueuedJob, now_s: int) -> list[dict[str, Any]]:
    """A row for each GPU of a job that runs. Raises ValueError; its text is the reason that is counted."""
    if not all(HOST.fullmatch(host) for host in job.hosts):
        raise ValueError("not a host name")
    seen_s = job.start_s if job.start_s and 0 < job.start_s <= now_s else now_s
    return [_row(job.job_id, host, gpu, "squeue", seen_s) for host, indices in job.gpu_indices() for gpu in indices]


def _row(
    job_id: int, host: str, gpu: int, origin: str, seen_s: int, uuid: str | None = None, mig: str | None = None
) -> dict[str, Any]:
    return {
        "job_id": job_id, "host": host, "gpu": gpu, "origin": origin, "seen_s": seen_s, "uuid": uuid, "mig": mig,
    }  # fmt: skip


def _batch(rows: list[dict[str, Any]], counts: Counts, watermark_s: int | None = None) -> RowBatch:
    return RowBatch("bindings", pa.Table.from_pylist(rows, schema=BINDINGS), counts, watermark_s)


MOST_FILES, MOST_NAMES = 50_000, 1_000_000
"""Files that one run opens, and names that it lists at most; the others are left to the next run."""
UNFINISHED_S = 60
BAD = "bad"
MAX_BYTES = 256

_ENDED_NAME = re.compile(r"(?P<job>[1-9][0-9]{0,9})\.[0-9a-f-]{1,36}")
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
        """True if a hook is in use. False is not a fault."""
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
        """Its stat; None if it is gone: rsync has renamed it, or another run has dealt with it."""
        try:
            return (self.folder / name).lstat()
        except OSError:
            return None

    def _notice(self, name: str, seen_s: int, owners: frozenset[int]) -> Notice | None:
        """None for another cluster's. Raises BadRecordError."""
        match = _ENDED_NAME.fullmatch(name)
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
        """Count the files in `bad/`, MOST_NAMES at most. Raises OSError, also if it is no folder."""
        try:
            with opened(self.folder) as folder, opened(BAD, folder) as bad, os.scandir(bad) as entries:
                return sum(1 for _ in islice(entries, MOST_NAMES))
        except FileNotFoundError:
            return 0


def _age_key(entry: os.DirEntry[str]) -> float:
    """Return the time of writing; 0 of a file that is gone."""
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


class _UnfinishedError(BadRecordError):
    """The hook makes a file and then writes it, rsync writes .NAME.XXXXXX first: they can be seen in between."""
