"""Which GPUs a job got, which sacct does not record: prolog records, and squeue's gres_detail.

Neither is the user's to write: a record must be root's own file, and squeue is read as JSON, whose lists no job
name or comment can forge (scontrol's and squeue's text can be forged).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from almanac.errors import SourceError
from almanac.records import Counts
from almanac.tres import parse_gpu_indices, parse_index_list
from almanac.units import printable
from telemetry.slurm.commands import Runner
from telemetry.slurm.hostlist import expand
from telemetry.slurm.queue_json import queued
from telemetry.sources.base import RowBatch
from telemetry.sources.sacct_json import number, words
from telemetry.store.schema import BINDINGS

MAX_RECORD_BYTES = 4096
PROLOG_OVERLAP_S = 3600
ROWS_PER_BATCH = 100_000

_NAME = re.compile(r"(?P<cluster>[A-Za-z0-9_-]+)\.(?P<job>[0-9]{1,10})\.(?P<host>.+)\.(?P<time>[0-9]{1,12})")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ORDINAL = re.compile(r"[0-9]{1,4}")
_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z-]{1,60}")
# Before driver 470.42 a MIG instance was named by its GPU, GPU instance and compute instance.
_OLD_MIG = re.compile(r"MIG-(?P<gpu>GPU-[0-9A-Za-z-]{1,60})/(?P<mig>[0-9]{1,4})/[0-9]{1,4}")
_MAPPED = re.compile(r"(?P<uuid>MIG-[0-9A-Za-z-]{1,60}) (?P<gpu>GPU-[0-9A-Za-z-]{1,60}) (?P<mig>[0-9]{1,4})")


class BadRecordError(ValueError):
    """A record that is not kept; its text is the reason that is counted."""


def arrival_s(path: Path) -> float:
    """When a file got its name or content in this folder, by this host's clock; 0 where it is gone.

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
            match = _NAME.fullmatch(name)
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
            rows += _prolog_rows(read_record(self.folder / name, self.owners), match)
            counts.kept += 1
        except BadRecordError as error:
            counts.drop(str(error), example=printable(name))


def read_record(
    path: Path, owners: frozenset[int], limit: int = MAX_RECORD_BYTES, *, has_one_name: bool = False
) -> bytes:
    """Content of a regular file of one of `owners`. Raises BadRecordError for anything else: no link is followed,
    no FIFO waited for, and what its owner lets others write is not believed.

    has_one_name: a file with a second name is refused, too. Only for a folder that is closed to other users: elsewhere
    anybody could void a file with a link to it (fs.protected_hardlinks=0).
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadRecordError("cannot be opened, or a link") from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise BadRecordError("not a regular file")
        if status.st_uid not in owners or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise BadRecordError("not root's own file")
        if has_one_name and status.st_nlink != 1:
            raise BadRecordError("a second name of another file")
        data = os.read(handle, limit + 1)
    finally:
        os.close(handle)
    if len(data) > limit:
        raise BadRecordError("too large")
    return data


def _prolog_rows(data: bytes, match: re.Match[str]) -> list[dict[str, Any]]:
    """One row per GPU. The file's name and its content must agree. Raises BadRecordError."""
    lines = [line.split("=", 1) for line in data.decode("utf-8", "replace").splitlines() if "=" in line]
    value = dict(lines)
    if value.get("job_id") != match["job"] or value.get("host") != match["host"] or value.get("time") != match["time"]:
        raise BadRecordError("content and file name differ")
    if not _HOST.fullmatch(match["host"]):
        raise BadRecordError("not a host name")
    try:
        parts = value["gpus"].split(",") if value.get("gpus") else []
        indices = [gpu for part in parts for gpu in parse_index_list(part)]
    except ValueError as error:
        raise BadRecordError("unreadable GPU indices") from error
    if not indices:
        raise BadRecordError("no GPU indices")
    mapped = {found["uuid"]: found for name, text in lines if name == "mig" and (found := _MAPPED.fullmatch(text))}
    devices = _devices(value.get("cuda", ""), mapped) or [(None, None)] * len(indices)
    if len(devices) != len(indices):
        raise BadRecordError("numbers of GPU indices and UUIDs differ")
    return [
        _row(int(match["job"]), match["host"], gpu, "prolog", int(match["time"]), uuid, mig)
        for gpu, (uuid, mig) in zip(indices, devices, strict=True)
    ]


def _devices(text: str, mapped: Mapping[str, re.Match[str]]) -> list[tuple[str | None, str | None]]:
    """UUID and MIG instance of each device of CUDA_VISIBLE_DEVICES as slurmd gives it: an index has neither.

    [] where it names indices only. Raises BadRecordError.
    """
    found: list[tuple[str | None, str | None]] = []
    for part in text.split(",") if text else ():
        if old := _OLD_MIG.fullmatch(part):
            found.append((old["gpu"], old["mig"]))
        elif part in mapped:
            found.append((mapped[part]["gpu"], mapped[part]["mig"]))
        elif _UUID.fullmatch(part):
            found.append((part, None))
        elif _ORDINAL.fullmatch(part):
            found.append((None, None))
        else:
            raise BadRecordError("unreadable GPU UUID")
    return found if any(uuid for uuid, _ in found) else []


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
        # Pending jobs take about 150 KiB of memory each. 22.05 lists them all the same.
        data = self.commands(["squeue", "-a", "-t", "RUNNING", "--json"])
        counts, rows = Counts(), list[dict[str, Any]]()
        for job in queued(data):
            if not _is_running_gpu_job(job) or not self._is_ours(job):
                continue
            counts.seen += 1
            try:
                rows += squeue_rows(job, int(self.clock()))
                counts.kept += 1
            except BadRecordError as error:
                counts.drop(str(error), example=printable(f"job {job.get('job_id')} on {job.get('nodes')}"))
        yield _batch(rows, counts)

    def _is_ours(self, job: Mapping[str, Any]) -> bool:
        return not self.cluster or str(job.get("cluster", self.cluster)).lower() == self.cluster.lower()


def _is_running_gpu_job(job: Mapping[str, Any]) -> bool:
    """job_state is "RUNNING" on 22.05, later a list of flags; gres_detail has one text per node.

    Where the state cannot be read, the job is looked at, and counted as not kept.
    """
    states, detail = words(job.get("job_state")), job.get("gres_detail")
    is_running = states is None or "RUNNING" in states
    return is_running and isinstance(detail, list) and any("gpu" in str(text) for text in detail)


def squeue_rows(job: Mapping[str, Any], now_s: int) -> list[dict[str, Any]]:
    """A row for each GPU of a job that runs, a record of squeue's JSON. Raises BadRecordError."""
    if words(job.get("job_state")) is None:
        raise BadRecordError("state cannot be read")
    job_id, start_s = number(job.get("job_id")), number(job.get("start_time"))
    if job_id is None:
        raise BadRecordError("job id is not a number")
    hosts = _hosts_in_order(job)
    if not isinstance(job["gres_detail"], list) or len(hosts) != len(job["gres_detail"]):
        raise BadRecordError("nodes and gres_detail differ in number")
    if not all(_HOST.fullmatch(host) for host in hosts):
        raise BadRecordError("not a host name")
    seen_s = start_s if start_s and 0 < start_s <= now_s else now_s
    try:
        by_host = [(host, parse_gpu_indices(str(text))) for host, text in zip(hosts, job["gres_detail"], strict=True)]
    except ValueError as error:
        raise BadRecordError("unreadable GPU indices") from error
    return [_row(job_id, host, gpu, "squeue", seen_s) for host, indices in by_host for gpu in indices]


def _hosts_in_order(job: Mapping[str, Any]) -> list[str]:
    """A job's hosts in gres_detail's order, which is the node table's.

    job_resources lists them so: `allocated_nodes` on 22.05, later `nodes.allocation`. Without it, a host list's order
    is sure for one host only: slurm.conf may name its nodes in any order.
    """
    resources = job.get("job_resources")
    resources = resources if isinstance(resources, dict) else {}
    nodes = resources.get("nodes")
    listed = nodes.get("allocation") if isinstance(nodes, dict) else resources.get("allocated_nodes")
    if isinstance(listed, list) and listed:
        names = [item.get("name") or item.get("nodename") for item in listed if isinstance(item, dict)]
        return [name for name in names if isinstance(name, str)]
    try:
        hosts = list(expand(str(job.get("nodes") or "")))
    except ValueError as error:
        raise BadRecordError("unreadable node list") from error
    if len(hosts) > 1:
        raise BadRecordError("order of the nodes unknown")
    return hosts


def _row(
    job_id: int, host: str, gpu: int, origin: str, seen_s: int, uuid: str | None = None, mig: str | None = None
) -> dict[str, Any]:
    return {
        "job_id": job_id, "host": host, "gpu": gpu, "origin": origin, "seen_s": seen_s, "uuid": uuid, "mig": mig,
    }  # fmt: skip


def _batch(rows: list[dict[str, Any]], counts: Counts, watermark_s: int | None = None) -> RowBatch:
    return RowBatch("bindings", pa.Table.from_pylist(rows, schema=BINDINGS), counts, watermark_s)
