"""sacct's job steps: what srun started within a job, and no field that its owner can write freely.

A step's name is its owner's to write, so it is not asked for. Of each run sacct lists the job first and then its
steps: a step's own Submit is its start, so the run that it belongs to is that of the job's line before it.

The batch, extern and interactive steps make no row: each lasts as long as the job (or its shell) and holds the others,
so that it says nothing that the job's own row does not say. What they used counts with the rest.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from almanac.records import Counts
from almanac.tres import parse_gpus
from almanac.units import printable
from telemetry.sources.sacct_text import (
    EXIT,
    BadRowError,
    optional_number,
    parse_node_list,
    parse_state,
    parse_unix_time,
)
from telemetry.sources.sacct_usage import COLUMNS as USAGE_COLUMNS
from telemetry.sources.sacct_usage import StepUse, step_use

COLUMNS = (
    "Cluster", "JobIDRaw", "State", "Submit", "Start", "End", "NNodes", "NodeList", "AllocTRES", "ExitCode",
    *USAGE_COLUMNS,
)  # fmt: skip

Run = tuple[int, int]
"""A run of a job: job id and submit time, s."""

_ID = re.compile(
    r"(?P<job>[0-9]{1,10})(?:\.(?:(?P<step>[0-9]{1,10}(?:\+[0-9]{1,5})?)|(?P<whole>[a-z]+)(?:\+[0-9]+)?))?"
)
_WHOLE = ("batch", "extern", "interactive")


def parse_steps(
    data: bytes, delimiter: str, cluster: str, latest_s: int, runs: Collection[Run], counts: Counts
) -> tuple[list[dict[str, Any]], dict[Run, list[StepUse]]]:
    """Rows of the steps table, of the runs asked for; () becomes []. And what all steps of each run used.

    Lines of jobs, and of steps of other runs, are passed over without a count; what is malformed is counted, and its
    run has no known use.
    """
    rows: dict[tuple[int, int, str], dict[str, Any]] = {}
    uses: dict[Run, dict[str, StepUse]] = defaultdict(dict)
    torn: set[Run] = set()
    run: Run | None = None
    for line in data.decode("utf-8", "replace").split("\n"):
        if not line:
            continue
        try:
            value, step = _fields(line.split(delimiter), cluster)
        except BadRowError as error:
            _drop(counts, error, line, delimiter)
            torn |= {run} if run else set()
            run = None  # this may have been a job's line
            continue
        if "." not in value["JobIDRaw"]:
            run = _run(value)
            continue
        try:
            if run is None or run[0] != int(value["JobIDRaw"].split(".")[0]):
                raise BadRowError("step without its job")
            if run not in runs:
                continue
            row = {"job_id": run[0], "submit_s": run[1], "step": step, **_row(value, latest_s, counts)}
        except BadRowError as error:
            if step is not None:
                _drop(counts, error, line, delimiter)
            torn |= {run} if run else set()
            continue
        whole = None if step else value["JobIDRaw"].split(".")[1].split("+")[0]
        uses[run][value["JobIDRaw"]] = step_use(whole, row["start_s"], row["end_s"], value)
        if step is None:
            continue
        counts.seen += 1
        if rows.pop((*run, step), None):
            counts.drop("repeated record of a step", example=value["JobIDRaw"])
        rows[*run, step] = row
    counts.kept += len(rows)
    return list(rows.values()), {run: list(used.values()) for run, used in uses.items() if run not in torn}


def _drop(counts: Counts, error: BadRowError, line: str, delimiter: str) -> None:
    counts.seen += 1
    counts.drop(str(error), example=printable(line.replace(delimiter, "|")))


def _fields(values: list[str], cluster: str) -> tuple[dict[str, str], str | None]:
    """The columns of a line, and its step; None of a job, and of a step that is passed over."""
    if len(values) != len(COLUMNS):
        raise BadRowError("wrong number of fields")
    value = dict(zip(COLUMNS, values, strict=True))
    if value["Cluster"].lower() != cluster.lower():
        raise BadRowError("job of another cluster")
    match = _ID.fullmatch(value["JobIDRaw"])
    if not match or (match["whole"] and match["whole"] not in _WHOLE):
        raise BadRowError("step id of another form")
    return value, match["step"]


def _run(value: dict[str, str]) -> Run | None:
    try:
        submit_s = parse_unix_time(value["Submit"])
    except BadRowError:
        return None
    return None if submit_s is None else (int(value["JobIDRaw"]), submit_s)


def _row(value: dict[str, str], latest_s: int, counts: Counts) -> dict[str, Any]:
    start, end = parse_unix_time(value["Start"]), parse_unix_time(value["End"])
    if any(moment is not None and moment > latest_s for moment in (start, end)):
        raise BadRowError("in the future")
    if start is not None and end is not None and end < start:
        raise BadRowError("ends before it starts")
    exit_code = EXIT.fullmatch(value["ExitCode"])
    code, signal = map(int, exit_code.groups()) if exit_code else (None, None)
    return {
        "state": parse_state(value["State"], counts),
        "start_s": start,
        "end_s": end,
        "node_count": optional_number(value["NNodes"]),
        "node_list": parse_node_list(value["NodeList"]),
        "gpu_count": parse_gpus(value["AllocTRES"]).count if value["AllocTRES"] else None,
        "exit_code": code,
        "exit_signal": signal,
    }
