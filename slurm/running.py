"""Running jobs by squeue's fixed-width text: of 10,000 jobs, JSON would take 15 s and 2 GiB.

Each field is cut and padded to its width in bytes (_print_str in src/squeue/print.c, the same since 2005; tried on
22.05.8). So records have one length and are cut by bytes, and a newline in a job's name or
comment forges none.
"""

from __future__ import annotations

import re
from typing import Any

from almanac.errors import CommandError
from almanac.hardware import profile_name
from almanac.tres import parse_gpus, parse_shares
from almanac.units import parse_time_limit, printable
from slurm.commands import Runner

_FIELDS = {
    "JobID": 16, "SubmitTime": 16, "RestartCnt": 12, "ArrayJobID": 16, "ArrayTaskID": 16, "UserName": 64, "Account": 64,
    "Partition": 64, "NumNodes": 12, "StartTime": 16, "EndTime": 16, "TimeLimit": 16, "BatchFlag": 4, "tres-alloc": 256,
    "NodeList": 1024, "Name": 128, "Comment": 256, "HetJobID": 16, "HetJobOffset": 16,
}  # fmt: skip
"""squeue's names (-O) and our widths. A text that fills its width may be cut: a node list and a comment are not read
then, and a record with such TRES is unreadable. A name may be cut."""
_SIZE = sum(_FIELDS.values()) + 1
SESSIONS = "^(interactive$|sys/dashboard/)"
"""Names of jobs in which a person works: of salloc, and of Open OnDemand, whose sessions are batch scripts.

job_defense_shield knows interactive jobs by these names, too (docs/alert/cancel_gpu_jobs.md).
"""


def read_running_text(commands: Runner) -> tuple[list[dict[str, Any]], int]:
    """Return the running jobs with GPUs, by job_id, and the number of records that cannot be read.

    Keys are columns of advisor/watch/round.py. Raises CommandError.
    """
    argv = ["squeue", "-a", "-h", "-t", "RUNNING", "-O", ",".join(f"{name}:{size}" for name, size in _FIELDS.items())]
    return parse_running(commands(argv))


def parse_running(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """Read the output of `read_running_text`. Raises CommandError if it is not made of records of one length."""
    if len(data) % _SIZE or any(data[end] != 0x0A for end in range(_SIZE - 1, len(data), _SIZE)):
        raise CommandError(
            f"squeue -O printed {printable(data[:80].decode('utf-8', 'replace'))!r}, not records of {_SIZE} bytes",
            "report this: almanac does not know the format",
        )
    rows, unreadable = list[dict[str, Any]](), 0
    for start in range(0, len(data), _SIZE):
        try:
            row = _row(data[start : start + _SIZE])
        except ValueError:
            unreadable += 1
            continue
        if row["gpu_count"] or row["is_shared"]:
            rows.append(row)
    return sorted(rows, key=lambda row: row["job_id"]), unreadable


def _row(record: bytes) -> dict[str, Any]:
    """Raises ValueError."""
    texts, full, at = dict[str, str | None](), set[str](), 0
    for name, size in _FIELDS.items():
        field = record[at : at + size]
        texts[name] = _text(field)
        full |= {name} if len(field.rstrip(b" ")) == size else set()
        at += size
    if "tres-alloc" in full:
        raise ValueError("TRES that may be cut")
    known = {name: text or "" for name, text in texts.items()}
    gpus, nodes = parse_gpus(known["tres-alloc"]), known["NodeList"]
    start_s, end = int(known["StartTime"]), known["EndTime"]
    limit_s = parse_time_limit(known["TimeLimit"])
    is_array = known["ArrayTaskID"].isdecimal()
    is_het = known["HetJobID"] not in ("N/A", "0")
    return {
        "job_id": int(known["JobID"]), "submit_s": int(known["SubmitTime"]), "restarts": int(known["RestartCnt"]),
        "array_job_id": int(known["ArrayJobID"]) if is_array else None,
        "array_task_id": int(known["ArrayTaskID"]) if is_array else None,
        "user": known["UserName"], "account": known["Account"], "partition": known["Partition"], "name": texts["Name"],
        "node_list": None if "NodeList" in full else nodes, "node_count": int(known["NumNodes"]),
        "gpu_count": gpus.count, "start_s": start_s,
        "limit_end_s": int(end) if limit_s is not None and end.isdecimal() else None,
        "is_interactive": known["BatchFlag"] != "1" or bool(re.match(SESSIONS, known["Name"])),
        "comment": None if "Comment" in full else "" if texts["Comment"] == "(null)" else texts["Comment"],
        "het_job_id": int(known["HetJobID"]) if is_het else None,
        "het_offset": int(known["HetJobOffset"]) if is_het else None,
        "is_shared": parse_shares(known["tres-alloc"]) is not None or bool(profile_name(gpus.type)),
    }  # fmt: skip


def _text(field: bytes) -> str | None:
    """The text of a field; None if it is not UTF-8, for another reason than that it was cut."""
    for cut in range(4):
        try:
            return field[: len(field) - cut].decode().rstrip(" ")
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                return None
    return None
