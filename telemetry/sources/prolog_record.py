"""The record that slurm_hooks/prolog/almanac-gpus.sh writes for each job and node, and files that only root writes.

The collector on compute nodes reads these too, so this module imports no library.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from almanac.tres import parse_index_list

MAX_RECORD_BYTES = 4096
NAME = re.compile(r"(?P<cluster>[A-Za-z0-9_-]+)\.(?P<job>[0-9]{1,10})\.(?P<host>.+)\.(?P<time>[0-9]{1,12})")
HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_ORDINAL = re.compile(r"[0-9]{1,4}")
_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z-]{1,60}")
# Before driver 470.42 a MIG instance was named by its GPU, GPU instance and compute instance.
_OLD_MIG = re.compile(r"MIG-(?P<gpu>GPU-[0-9A-Za-z-]{1,60})/(?P<mig>[0-9]{1,4})/[0-9]{1,4}")
_MAPPED = re.compile(r"(?P<uuid>MIG-[0-9A-Za-z-]{1,60}) (?P<gpu>GPU-[0-9A-Za-z-]{1,60}) (?P<mig>[0-9]{1,4})")


class BadRecordError(ValueError):
    """A record that is not kept; its text is the reason that is counted."""


@dataclass(frozen=True)
class PrologRecord:
    """The GPUs that a job got on a host. devices: Slurm's GPU index, UUID, and MIG instance; None if not recorded."""

    job_id: int
    host: str
    time_s: int
    devices: tuple[tuple[int, str | None, str | None], ...]


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


def parse_prolog_record(data: bytes, match: re.Match[str]) -> PrologRecord:
    """Return the content of a record. match: its name, by NAME; both must agree. Raises BadRecordError."""
    lines = [line.split("=", 1) for line in data.decode("utf-8", "replace").splitlines() if "=" in line]
    value = dict(lines)
    if value.get("job_id") != match["job"] or value.get("host") != match["host"] or value.get("time") != match["time"]:
        raise BadRecordError("content and file name differ")
    if not HOST.fullmatch(match["host"]):
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
    named = tuple((gpu, uuid, mig) for gpu, (uuid, mig) in zip(indices, devices, strict=True))
    return PrologRecord(int(match["job"]), match["host"], int(match["time"]), named)


def _devices(text: str, mapped: Mapping[str, re.Match[str]]) -> list[tuple[str | None, str | None]]:
    """UUID and MIG instance of each device of CUDA_VISIBLE_DEVICES as slurmd gives it: an index has neither.

    [] if it names indices only. Raises BadRecordError.
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
