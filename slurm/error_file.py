"""The end of what a job wrote to its error output, for the job's owner alone."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from almanac.errors import RequestError
from almanac.files import open_plain
from almanac.units import printable
from slurm.options import parse_options

MOST_BYTES = 4096
MOST_LINES, MOST_COLUMNS = 8, 300
ROOT = 0
_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""A terminal's control sequences: CSI (colors, cursor), OSC (title, links), and short ones."""
_PATTERN = re.compile(r"%(?:(\d{1,2})?([AaJjuxNnst])|%)")
_UNKNOWN = frozenset("Nnst")
"""Patterns of a node or a task: a job can have a file for each of them."""


def last_lines(path: str, owner_uid: int) -> tuple[str, ...]:
    """The last lines of a file, without escapes, if it is the caller's own regular file; () otherwise.

    Reads at most MOST_BYTES, never as root, follows no link, and never waits.
    """
    if not path.startswith("/") or owner_uid == ROOT or {os.getuid(), os.geteuid()} != {owner_uid}:
        return ()
    try:
        with open_plain(path, os.O_NOFOLLOW) as file:
            about = os.fstat(file.fileno())
            if about.st_uid != owner_uid or not stat.S_ISREG(about.st_mode):
                return ()
            file.seek(max(0, about.st_size - MOST_BYTES))
            content = file.read(MOST_BYTES)
    except (OSError, ValueError):
        return ()
    text = _ESCAPE.sub("", content.decode("utf-8", "replace").replace("\r", "\n").expandtabs(4))
    lines = [printable(line.rstrip(), MOST_COLUMNS) for line in text.split("\n")]
    return tuple([line for line in lines if line.strip()][-MOST_LINES:])


def error_path(asked: str, work_dir: str, job: Mapping[str, Any]) -> str:
    """The path of a job's error file; "" if it cannot be known. asked: with patterns (man sbatch, filename pattern).

    job: a row of the table jobs. Without `asked`, Slurm writes slurm-<id>.out in the job's folder.
    """
    default = "slurm-%A_%a.out" if job["array_task_id"] is not None else "slurm-%j.out"
    is_raw = "\\" in asked
    name = asked.replace("\\", "") if is_raw else _filled(asked or default, job)
    return str(Path(work_dir) / name) if name and (name.startswith("/") or work_dir.startswith("/")) else ""


def _filled(text: str, job: Mapping[str, Any]) -> str:
    array_id, task_id = job["array_job_id"], job["array_task_id"]
    values = {
        "A": array_id if array_id is not None else job["job_id"], "a": 2**32 - 2 if task_id is None else task_id,
        "J": job["job_id"], "j": job["job_id"], "u": job["user"], "x": job["name"],
    }  # fmt: skip
    if any(match[2] in _UNKNOWN or (match[2] and values.get(match[2]) is None) for match in _PATTERN.finditer(text)):
        return ""

    def fill(match: re.Match[str]) -> str:
        value = values.get(match[2] or "", "%")
        return str(value).zfill(min(int(match[1] or 0), 10)) if isinstance(value, int) else str(value)

    return _PATTERN.sub(fill, text)


def submitted_file(submit_line: str) -> str:
    """The file for errors that a command line names (-e, or -o); "" if it names none, or cannot be read."""
    words = submit_line.split()
    try:
        typed, _ = parse_options(words[1:]) if ":" not in words else ((), None)
    except RequestError:
        return ""
    chosen = {option.name: option.value or "" for option in typed}
    return chosen.get("error") or chosen.get("output") or ""
