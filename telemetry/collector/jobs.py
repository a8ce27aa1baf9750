"""The Slurm jobs on the GPUs of this node. Nothing that a user can write decides which job a GPU is labeled with.

Three sources, in this order; the first one that knows of a job on a device counts:

- The folder of dcgm-exporter's --hpc-job-mapping-dir: a file for each GPU index, or GPU.INSTANCE, with job ids.
- Records of almanac's prolog, of jobs that still have a cgroup on this node: nothing removes a record at a job's end.
- The processes that compute on the device, by their cgroup. Only slurmstepd, as root, makes cgroups at these places.

Files must be root's own, in a folder that only root can change. No command line or environment of a process is read.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from telemetry.sources.prolog_record import NAME, BadRecordError, PrologRecord, parse_prolog_record, read_record

MOST_JOBS = 64
"""Most jobs of one GPU. A longer list is taken for an error."""
_MOST_NAMES = 100_000
_MOST_BYTES = 4096
_JOB = re.compile(r"[1-9][0-9]{0,9}")
_MAPPED_NAME = re.compile(r"[0-9]{1,4}(?:\.[0-9]{1,4})?")
_JOB_FOLDER = re.compile(r"job_([1-9][0-9]{0,9})")
# Slurm's cgroup/v2 and cgroup/v1 plugins, 22.05 to 26.05. With several slurmd on a host the node's name is added.
_V2 = re.compile(r"0::/system\.slice/(?:[A-Za-z0-9._-]+_)?slurmstepd\.scope/job_([1-9][0-9]{0,9})(?:/|\Z)")
_V1 = re.compile(r"[0-9]+:[a-z_,]+:/slurm(?:_[A-Za-z0-9._-]+)?/uid_[0-9]+/job_([1-9][0-9]{0,9})(?:/|\Z)")
_CONTROLLERS = ("freezer", "memory", "cpuset", "devices", "cpu,cpuacct")


@dataclass
class GpuJobs:
    """Finds the jobs of GPUs. Call `refresh` before each sample. None: that source is not used.

    host: Slurm's name of this node, as far as the first dot. owners: user ids whose files are believed.
    """

    host: str
    mapping_dir: Path | None
    prolog_dir: Path | None
    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    owners: frozenset[int] = frozenset({0})
    _mapped: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _recorded: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    _known: dict[str, PrologRecord | None] = field(default_factory=dict)
    _names: tuple[int, list[str]] = (0, [])
    _since_ticks: float = 0

    def refresh(self) -> None:
        """Read what has changed. Processes that start later are not believed: their id may be another's by then."""
        self._since_ticks = time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
        self._mapped = dict(self._mappings())
        self._recorded = self._records()

    def of(self, gpu: int, uuid: str, mig: str) -> tuple[int, ...]:
        """Return the jobs that files name for a GPU or MIG instance, sorted. mig: "" for a whole GPU."""
        mapped = self._mapped.get(f"{gpu}.{mig}" if mig else str(gpu))
        by_index = None if mig else self._recorded.get(("", str(gpu)))
        return mapped or self._recorded.get((uuid, mig)) or by_index or ()

    def of_processes(self, pids: Iterable[int]) -> tuple[int, ...]:
        """Return the jobs of the processes, sorted."""
        return tuple(sorted({job for pid in pids if (job := self._job_of(pid))}))[:MOST_JOBS]

    def _mappings(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        if self.mapping_dir is None or not self._is_closed(self.mapping_dir):
            return
        for name in _listed(self.mapping_dir):
            if not _MAPPED_NAME.fullmatch(name):
                continue
            with contextlib.suppress(BadRecordError):
                text = read_record(self.mapping_dir / name, self.owners, _MOST_BYTES, has_one_name=True)
                words = text.decode("ascii", "replace").split()
                if len(words) <= MOST_JOBS and all(map(_JOB.fullmatch, words)):
                    yield name, tuple(sorted(set(map(int, words))))

    def _records(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """By UUID and MIG instance, or by ("", Slurm's index) of a whole GPU."""
        if self.prolog_dir is None or not self._is_closed(self.prolog_dir):
            return {}
        running, found = self._running(), dict[tuple[str, str], set[int]]()
        newest: dict[int, tuple[int, str]] = {}
        for name in self._record_names(self.prolog_dir) if running else ():
            match = NAME.fullmatch(name)
            if match and int(match["job"]) in running and match["host"].partition(".")[0] == self.host:
                newest[int(match["job"])] = max(newest.get(int(match["job"]), (0, "")), (int(match["time"]), name))
        names = {name for _, name in newest.values()}
        self._known = {name: self._known.get(name) or self._record(self.prolog_dir, name) for name in names}
        for record in filter(None, self._known.values()):
            for index, uuid, mig in record.devices:
                place = (uuid, mig or "") if uuid else ("", str(index))
                found.setdefault(place, set()).add(record.job_id)
        return {place: tuple(sorted(jobs)) for place, jobs in found.items() if len(jobs) <= MOST_JOBS}

    def _record_names(self, folder: Path) -> list[str]:
        """Nothing is listed or read again as long as the folder is the same: it may keep a year of records."""
        with contextlib.suppress(OSError):
            changed = folder.stat().st_mtime_ns
            if changed != self._names[0] or time.time_ns() - changed < 2_000_000_000:
                self._names, self._known = (changed, list(_listed(folder))), {}
        return self._names[1]

    def _record(self, folder: Path, name: str) -> PrologRecord | None:
        match = NAME.fullmatch(name)
        with contextlib.suppress(BadRecordError):
            return match and parse_prolog_record(read_record(folder / name, self.owners), match)
        return None

    def _running(self) -> set[int]:
        """Jobs that have a cgroup on this node."""
        places = [self.cgroup / "system.slice"]
        scopes = [places[0] / name for name in _listed(places[0]) if name.endswith("slurmstepd.scope")]
        for controller in _CONTROLLERS:
            for name in _listed(self.cgroup / controller):
                if name == "slurm" or name.startswith("slurm_"):
                    top = self.cgroup / controller / name
                    scopes += [top / user for user in _listed(top) if user.startswith("uid_")]
        return {int(match[1]) for scope in scopes for name in _listed(scope) if (match := _JOB_FOLDER.fullmatch(name))}

    def _job_of(self, pid: int) -> int | None:
        """None for a process outside jobs, of several jobs, or one that took the id after `refresh`."""
        try:
            lines = (self.proc / str(pid) / "cgroup").read_text(errors="replace").splitlines()
            # The name in brackets may hold anything, brackets too.
            started = int((self.proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[19])
        except (OSError, ValueError, IndexError):
            return None
        if started > self._since_ticks:
            return None
        found = {int(match[1]) for line in lines if (match := _V2.match(line) or _V1.match(line))}
        return found.pop() if len(found) == 1 else None

    def _is_closed(self, folder: Path) -> bool:
        """True if only the owners can add or rename files there: a second name of a file would be another GPU's."""
        try:
            about = folder.lstat()
        except OSError:
            return False
        is_open = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return stat.S_ISDIR(about.st_mode) and about.st_uid in self.owners and not is_open


def _listed(folder: Path) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= _MOST_NAMES:
                return
            yield entry.name
