"""sacct's text output: every number of a job, and no field that its owner can write freely.

Names and comments may hold newlines and delimiters, so this module does not read them. Every query draws a new
delimiter, and the first and last columns are Slurm's own. So no other field can pass for a row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from almanac.records import Counts
from almanac.tres import Gpus, parse_gpus, parse_shares, parse_tres, size_mib
from almanac.units import printable

_FIRST = ("Cluster", "JobIDRaw", "JobID", "User", "Account", "Partition", "QOS", "State", "Submit", "Eligible")
_MIDDLE = (
    "Start",
    "End",
    "ElapsedRaw",
    "TimelimitRaw",
    "NNodes",
    "NodeList",
    "ReqCPUS",
    "AllocCPUS",
    "ReqTRES",
    "AllocTRES",
)
COLUMNS = (*_FIRST, *_MIDDLE, "Constraints", "ExitCode")

_NUMBER = re.compile(r"[0-9]{1,15}")
_JOB_ID = re.compile(r"(?P<job>[0-9]{1,10})(?:_(?P<task>[0-9]{1,10})|(?P<pending>_\[.*)|\+(?P<offset>[0-9]{1,5}))?")
_WORD = re.compile(r"[A-Z_]+")
STATES = frozenset(
    {"PENDING", "RUNNING", "SUSPENDED", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}
    | {"BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "COMPLETING", "CONFIGURING", "RESIZING", "REQUEUED", "REVOKED"}
    | {"LAUNCH_FAILED", "RECONFIG_FAIL", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SIGNALING", "SPECIAL_EXIT"}
    | {"STAGE_OUT", "STOPPED", "POWER_UP_NODE", "UPDATE_DB", "EXPEDITING"}
)
"""Slurm's long names of job states (JOB STATE CODES in man sacct and man squeue)."""
UNKNOWN_STATE = "state not understood"
"""Reason to keep a record without a state."""
EXIT = re.compile(r"([0-9]{1,10}):([0-9]{1,10})")
_NO_TIME = ("Unknown", "None", "", "0")


class BadRowError(ValueError):
    """A row that is not kept; its text is the reason that is counted."""


def columns(helpformat: str) -> tuple[str, ...]:
    """What to ask for, by `sacct --helpformat`: one unknown column (Restarts, on 22.05) fails the whole query."""
    has_restarts = "Restarts" in helpformat.split()
    return (*COLUMNS[:-1], "Restarts", COLUMNS[-1]) if has_restarts else COLUMNS


def parse_text(
    data: bytes, delimiter: str, names: Sequence[str], cluster: str, latest_s: int, counts: Counts
) -> list[dict[str, Any]]:
    """Rows of the jobs table, one per record of `cluster`, without name, tier and jobstats; () becomes [].

    names: the columns asked for. A record that is malformed, of another cluster, or past latest_s is counted.
    """
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for line in data.decode("utf-8", "replace").split("\n"):
        if not line:
            continue
        counts.seen += 1
        try:
            row = _row(line.split(delimiter), names, cluster, latest_s, counts)
        except BadRowError as error:
            counts.drop(str(error), example=printable(line.replace(delimiter, "|")))
            continue
        if rows.pop((row["job_id"], row["submit_s"]), None):
            counts.drop("repeated record of a job", example=str(row["job_id"]))
        rows[row["job_id"], row["submit_s"]] = row
    counts.kept += len(rows)
    return list(rows.values())


def _row(values: list[str], names: Sequence[str], cluster: str, latest_s: int, counts: Counts) -> dict[str, Any]:
    """One record. Raises BadRowError."""
    if len(values) != len(names):
        raise BadRowError("wrong number of fields")
    value = dict(zip(names, values, strict=True))
    if value["Cluster"].lower() != cluster.lower():
        raise BadRowError("job of another cluster")
    row = {**_identity(value), **_times(value, latest_s), **_resources(value)}
    row["state"] = parse_state(value["State"], counts)
    note_shares(row, counts)
    for column, name in (("user", "User"), ("account", "Account"), ("partition", "Partition"), ("qos", "QOS")):
        row[column] = value[name] or None
    row["constraints"] = value["Constraints"]
    row["restarts"] = optional_number(value.get("Restarts", ""))
    exit_code = EXIT.fullmatch(value["ExitCode"])
    row["exit_code"], row["exit_signal"] = map(int, exit_code.groups()) if exit_code else (None, None)
    return row


def _identity(value: dict[str, str]) -> dict[str, Any]:
    """Job id, array and het ids. "13_0" is an array task, "89_[0-3%1]" its pending rest, "50+1" a het part."""
    job_id = _JOB_ID.fullmatch(value["JobID"])
    if not job_id or not _NUMBER.fullmatch(value["JobIDRaw"]):
        raise BadRowError("job id is not a number")
    is_array = job_id["task"] is not None or job_id["pending"] is not None
    return {
        "job_id": int(value["JobIDRaw"]),
        "array_job_id": int(job_id["job"]) if is_array else None,
        "array_task_id": optional_number(job_id["task"] or ""),
        "het_job_id": int(job_id["job"]) if job_id["offset"] else None,
        "het_offset": optional_number(job_id["offset"] or ""),
    }


def _times(value: dict[str, str], latest_s: int) -> dict[str, Any]:
    submit, start, end = (parse_unix_time(value[name]) for name in ("Submit", "Start", "End"))
    if submit is None:
        raise BadRowError("unreadable time")
    if any(moment is not None and moment > latest_s for moment in (submit, start, end)):
        raise BadRowError("in the future")
    if start is not None and end is not None and end < start:
        raise BadRowError("ends before it starts")
    elapsed = None if start is None else optional_number(value["ElapsedRaw"])
    if start is not None and start < submit:
        # A resized job has a record of each size, submitted at the change; on 22.05 the later one keeps the start.
        elapsed = None if elapsed is None else max(0, elapsed - (submit - start))
        start = submit if end is None else min(submit, end)
    limit = optional_number(value["TimelimitRaw"])  # "UNLIMITED" and "Partition_Limit" name no number
    return {
        "submit_s": submit,
        "eligible_s": _eligible(value["Eligible"], submit, start),
        "start_s": start,
        "end_s": end,
        "elapsed_s": elapsed,
        "time_limit_s": None if limit is None else limit * 60,
    }


def _eligible(text: str, submit: int, start: int | None) -> int | None:
    """Not before the submission nor after the start; None where there is no such time yet, or it cannot be read."""
    eligible = optional_number(text)
    return max(submit, eligible if start is None else min(start, eligible)) if eligible else None


def parse_unix_time(text: str) -> int | None:
    """Seconds since 1970; None where there is no such time yet. Raises BadRowError."""
    if text in _NO_TIME:
        return None
    if not _NUMBER.fullmatch(text):
        raise BadRowError("unreadable time")
    return int(text)


def _resources(value: dict[str, str]) -> dict[str, Any]:
    """What was allocated; before the start, what was asked for (22.05 gives that as AllocCPUS even then).

    cpu_count_req and node_count_req are what was asked for at any time. ReqTRES is no source of CPUs: since 24.11 it
    can name those that were allocated.
    """
    asked = parse_gpus(value["ReqTRES"])
    given = parse_gpus(value["AllocTRES"]) if value["AllocTRES"] else Gpus(0)
    return {
        "node_count": optional_number(value["NNodes"]),
        "node_list": parse_node_list(value["NodeList"]),
        "cpu_count": optional_number(value["AllocCPUS"]) or optional_number(value["ReqCPUS"]),
        "gpu_count": given.count if value["AllocTRES"] else None,
        "gpu_count_req": asked.count if value["ReqTRES"] else None,
        "gpu_share_count": parse_shares(value["AllocTRES"] or value["ReqTRES"]),
        "cpu_count_req": optional_number(value["ReqCPUS"]) or None,
        "node_count_req": optional_number(parse_tres(value["ReqTRES"]).get("node", "")),
        "gpu_type": given.type or asked.type or None,
        "gpu_type_req": asked.type if value["ReqTRES"] else None,
        "host_mem_alloc_mib": size_mib(parse_tres(value["AllocTRES"]).get("mem", "")) or None,
    }


def read_state(text: str) -> str | None:
    """The state that a text names: the first word of "CANCELLED by 1000", or of what a narrow column left of it.

    A beginning ("OUT_OF_ME+") is the state that alone begins so. None for any other word, and for a beginning that
    several states share.
    """
    word = _WORD.match(text.strip().upper())
    if word is None or word[0] in STATES:
        return word[0] if word else None
    found = [state for state in STATES if state.startswith(word[0])]
    return found[0] if len(found) == 1 else None


def parse_state(text: str, counts: Counts) -> str | None:
    """As read_state; a word that is no state is noted. Raises BadRowError where there is no word."""
    state = read_state(text)
    if state is None and not _WORD.match(text):
        raise BadRowError("unreadable state")
    if state is None:
        counts.note(UNKNOWN_STATE, 1, printable(text, 80))
    return state


def note_shares(row: Mapping[str, Any], counts: Counts) -> None:
    """Count a job with a part of a GPU: nothing says what it did with it."""
    if row["gpu_share_count"]:
        counts.note("with a part of a GPU (shard, mps): not measured", 1, f"job {row['job_id']}")


def parse_node_list(text: str) -> str | None:
    """A hostlist; None before there is one."""
    return None if text in ("", "None assigned") else text


def optional_number(text: str) -> int | None:
    """A whole number, or None for any other text."""
    return int(text) if _NUMBER.fullmatch(text) else None
