"""sacct's jobs: numbers from its text output, names and comments from its JSON.

Names and comments may hold newlines and delimiters, so the text query does not ask for them. Every query draws a new
delimiter, and the first and last columns are Slurm's own: no other field can pass for a row. No number is taken from
the JSON: 22.05 has wrong exit codes there and no restart count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from almanac.errors import RequestError
from almanac.names import is_family, rule_key
from almanac.records import Counts
from almanac.tres import Gpus, parse_gpus, parse_shares, parse_tres, size_mib
from almanac.units import printable, valid_unicode
from slurm.options import parse_options
from slurm.releases import number, records
from slurm.sbatch import command_framework, command_key
from slurm.states import JOB_STATES

COLUMNS = (
    "Cluster", "JobIDRaw", "JobID", "User", "Account", "Partition", "QOS", "State", "Submit", "Eligible", "Start",
    "End", "ElapsedRaw", "TimelimitRaw", "NNodes", "NodeList", "ReqCPUS", "AllocCPUS", "ReqTRES", "AllocTRES",
    "Constraints", "ExitCode",
)  # fmt: skip

_NUMBER = re.compile(r"[0-9]{1,15}")
_JOB_ID = re.compile(r"(?P<job>[0-9]{1,10})(?:_(?P<task>[0-9]{1,10})|(?P<pending>_\[.*)|\+(?P<offset>[0-9]{1,5}))?")
_NODE = re.compile(r"[A-Za-z0-9_.-]{1,255}")
_WORD = re.compile(r"[A-Z_]+")
UNKNOWN_STATE = "state not understood"
"""Reason to keep a record without a state."""
EXIT = re.compile(r"([0-9]{1,10}):([0-9]{1,10})")
_NO_TIME = ("Unknown", "None", "", "0")
_NAMELESS = "allocation"
"""slurmdbd's name for a job that has none, and for one whose start it has not stored yet."""
NO_MAIL, _PACKED = (re.compile(rf"(?<![\w:-])almanac:{word}(?![\w:-])") for word in ("nomail", "packed"))


class BadRowError(ValueError):
    """A row that is not kept; its text is the reason that is counted."""


def columns(helpformat: str) -> tuple[str, ...]:
    """Return the columns to ask for, by `sacct --helpformat`: one unknown column (Restarts, on 22.05) fails the whole
    query.
    """
    has_restarts = "Restarts" in helpformat.split()
    return (*COLUMNS[:-1], "Restarts", COLUMNS[-1]) if has_restarts else COLUMNS


def parse_text(
    data: bytes, delimiter: str, names: Sequence[str], cluster: str, latest_s: int, counts: Counts
) -> list[dict[str, Any]]:
    """Rows of the jobs table, one per record of `cluster` ("": of any), without name, tier and jobstats; () becomes [].

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
    if cluster and value["Cluster"].lower() != cluster.lower():
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
    """Return the allocation; before the start, the request (22.05 gives that as AllocCPUS even then).

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
    if word is None or word[0] in JOB_STATES:
        return word[0] if word else None
    found = [state for state in JOB_STATES if state.startswith(word[0])]
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
    """Count a job with a part of a GPU: what it did with it shows only while no other job had a part."""
    if row["gpu_share_count"]:
        counts.note("with a part of a GPU (shard, mps): measured only if alone on it", 1, f"job {row['job_id']}")


def parse_node_list(text: str) -> str | None:
    """A hostlist; None before there is one."""
    return None if text in ("", "None assigned") else text


def optional_number(text: str) -> int | None:
    """A whole number, or None for any other text."""
    return int(text) if _NUMBER.fullmatch(text) else None


@dataclass(frozen=True)
class JobText:
    """Texts that people and programs wrote on a job. name: "" for a job without one, None if the record does not tell.
    refuses_mail: the job's comment has the word almanac:nomail. slurmdbd keeps comments only with
    AccountingStoreFlags=job_comment. is_packed: the same of almanac:packed, which almanac-pack adds; None without a
    comment: nobody knows whether comments are kept. partitions: the list that was asked for, of several partitions the
    job ran in one; "" where the record does not tell of a list. script_key: of slurm.sbatch; "" on 22.05, whose JSON
    has no submit line. rule: key of the workflow's rule that the comment names; "" without one.
    framework: that the submit line shows, "" for none; the line itself is not kept. failed_node: whose failure ended
    the job; "" for none, and on 22.05.
    """

    name: str | None
    admin_comment: str = ""
    refuses_mail: bool = False
    is_packed: bool | None = None
    partitions: str = ""
    script_key: str = ""
    rule: str = ""
    framework: str = ""
    failed_node: str = ""


def parse_json(data: bytes, cluster: str) -> dict[tuple[int, int], JobText]:
    """Texts of each record of `cluster` by (job id, submit time in s).

    Raises ValueError if it holds no list of jobs: sacct then says why in `errors`, and ends with 0.
    """
    jobs = records(data, "jobs")
    if jobs is None:
        said = [f": {each.get('description') or each.get('error')}" for each in records(data, "errors") or ()]
        raise ValueError(f"no list of jobs{''.join(said[:1])}")
    return {key: _text(job) for job in jobs if (key := _key(job, cluster))}


def _key(job: Mapping[str, Any], cluster: str) -> tuple[int, int] | None:
    if cluster and str(job.get("cluster", "")).lower() != cluster.lower():
        return None
    time = job.get("time")
    job_id, submit_s = number(job.get("job_id")), number(time.get("submission") if isinstance(time, dict) else None)
    return None if job_id is None or submit_s is None else (job_id, submit_s)


def _text(job: Mapping[str, Any]) -> JobText:
    name, comment = job.get("name"), job.get("comment")
    name = str(name) if type(name) is int else name
    admin, own = (comment.get("administrator"), comment.get("job")) if isinstance(comment, dict) else (None, None)
    rule = rule_key(valid_unicode(own)) if isinstance(own, str) else ""
    return JobText(
        name=valid_unicode("" if name == _NAMELESS else name) if isinstance(name, str) else None,
        admin_comment=admin if isinstance(admin, str) else "",
        refuses_mail=isinstance(own, str) and NO_MAIL.search(own) is not None,
        is_packed=_PACKED.search(own) is not None if isinstance(own, str) and own else None,
        partitions=_partitions(job.get("submit_line"), job.get("partition")),
        script_key=_script_key(job),
        rule=rule if is_family(rule) else "",
        failed_node=node if isinstance(node := job.get("failed_node"), str) and _NODE.fullmatch(node) else "",
        framework=command_framework(line) if isinstance(line := job.get("submit_line"), str) else "",
    )


def _script_key(job: Mapping[str, Any]) -> str:
    user, submit_line, work_dir, het = (job.get(key) for key in ("user", "submit_line", "working_directory", "het"))
    if isinstance(het, dict) and number(het.get("job_id")):
        return ""
    if not (isinstance(user, str) and isinstance(submit_line, str) and isinstance(work_dir, str)):
        return ""
    return command_key(user, submit_line, work_dir)


def _partitions(submit_line: Any, ran_in: Any) -> str:
    """The partitions that a submit line (22.05 gives none) lists; "" where the job's own is not among several.

    Slurm joins the words of a command by blanks, so that a value with blanks ends what can be read of it. A line that
    lies about the partition changes nothing but what is made of its user's own jobs.
    """
    words = submit_line.split() if isinstance(submit_line, str) else []
    if ":" in words:
        return ""  # of a het job, and which words are this component's is not sure
    try:
        typed, _ = parse_options(words[1:])
    except RequestError:
        return ""
    listed = next((option.value or "" for option in reversed(typed) if option.name == "partition"), "")
    return valid_unicode(listed) if "," in listed and ran_in in listed.split(",") else ""
