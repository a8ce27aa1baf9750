"""sacct's JSON output: names and comments, which text output cannot carry safely. No number is taken from it.

22.05 has wrong exit codes, no restart count and plain numbers; later releases write {set, infinite, number}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from almanac.errors import RequestError
from almanac.names import is_family, rule_key
from almanac.units import valid_unicode
from telemetry.slurm.options import parse_options
from telemetry.slurm.script_key import command_key

_NAMELESS = "allocation"
"""slurmdbd's name for a job that has none, and for one whose start it has not stored yet."""
_NO_MAIL, _PACKED = (re.compile(rf"(?<![\w:-])almanac:{word}(?![\w:-])") for word in ("nomail", "packed"))


@dataclass(frozen=True)
class JobText:
    """What people and programs wrote on a job. name: "" for a job without one, None where the record does not tell.

    refuses_mail: whether the job's comment has the word almanac:nomail. slurmdbd keeps comments only with
    AccountingStoreFlags=job_comment. is_packed: the same of almanac:packed, which almanac-pack adds; None without a
    comment: nobody knows whether comments are kept. partitions: the list that was asked for, of several partitions the
    job ran in one; "" where the record does not tell of a list. script_key: of telemetry.slurm.script_key; "" on 22.05,
    whose JSON has no submit line. rule: key of the workflow's rule that the comment names; "" without one.
    """

    name: str | None
    admin_comment: str = ""
    refuses_mail: bool = False
    is_packed: bool | None = None
    partitions: str = ""
    script_key: str = ""
    rule: str = ""


def parse_json(data: bytes, cluster: str) -> dict[tuple[int, int], JobText]:
    """Texts of each record of `cluster` by (job id, submit time in s).

    Raises ValueError where it is not JSON or holds no list of jobs: sacct then says why in `errors`, and ends with 0.
    """
    try:
        content = json.loads(data.decode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    jobs = content.get("jobs") if isinstance(content, dict) else None
    if not isinstance(jobs, list):
        raise ValueError(f"no list of jobs{_said(content)}")
    texts = {}
    for job in jobs:
        key = _key(job, cluster)
        if key:
            texts[key] = _text(job)
    return texts


def number(value: Any) -> int | None:
    """A whole number in either shape: 5, or {"set": true, "infinite": false, "number": 5}; None where unset.

    None too where it is greater than any of Slurm's, and so than a table can hold.
    """
    if isinstance(value, Mapping):
        value = value.get("number") if value.get("set") and not value.get("infinite") else None
    return value if type(value) is int and abs(value) < 2**53 else None


def words(value: Any) -> tuple[str, ...] | None:
    """Flags in either shape: "IDLE", or ["IDLE", "DRAIN"]; () where there are none, None where they are no text."""
    if value is None or value == "":
        return ()
    listed = value if isinstance(value, list) else [value]
    return tuple(map(valid_unicode, listed)) if all(isinstance(word, str) for word in listed) else None


def _said(content: Any) -> str:
    errors = content.get("errors") if isinstance(content, dict) else None
    first = errors[0] if isinstance(errors, list) and errors else None
    return f": {first.get('description') or first.get('error')}" if isinstance(first, dict) else ""


def _key(job: Any, cluster: str) -> tuple[int, int] | None:
    if not isinstance(job, dict) or str(job.get("cluster", "")).lower() != cluster.lower():
        return None
    time = job.get("time")
    job_id, submit_s = number(job.get("job_id")), number(time.get("submission") if isinstance(time, dict) else None)
    return None if job_id is None or submit_s is None else (job_id, submit_s)


def _text(job: dict[str, Any]) -> JobText:
    name, comment = job.get("name"), job.get("comment")
    admin, own = (comment.get("administrator"), comment.get("job")) if isinstance(comment, dict) else (None, None)
    rule = rule_key(valid_unicode(own)) if isinstance(own, str) else ""
    return JobText(
        name=valid_unicode("" if name == _NAMELESS else name) if isinstance(name, str) else None,
        admin_comment=admin if isinstance(admin, str) else "",
        refuses_mail=isinstance(own, str) and _NO_MAIL.search(own) is not None,
        is_packed=_PACKED.search(own) is not None if isinstance(own, str) and own else None,
        partitions=_partitions(job.get("submit_line"), job.get("partition")),
        script_key=_script_key(job),
        rule=rule if is_family(rule) else "",
    )


def _script_key(job: dict[str, Any]) -> str:
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
