"""Ask sacct and sacctmgr: jobs, job steps, and what the steps of a job used.

Selection: `sacct -S a -E b` gives the records eligible before b that ended at or after a, or have not ended. Jobs
that were never eligible (cancelled while held) are not among them; they never ran. On 22.05 slurmdbd learns up to six
seconds late that a job was eligible.

A step's name is its owner's to write, so it is not asked for. Of each run sacct lists the job first and then its
steps: a step's own Submit is its start, so the run that it belongs to is that of the job's line before it. The batch,
extern and interactive steps make no row: each lasts as long as the job (or its shell) and holds the others. Their use
counts with the rest (slurm/step_use.py).
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from almanac.errors import CommandError, SourceError
from almanac.records import Counts
from almanac.tres import parse_gpus
from almanac.units import printable
from slurm.commands import Runner, Settings, slurm_settings
from slurm.sacct import (
    EXIT,
    BadRowError,
    JobText,
    columns,
    optional_number,
    parse_json,
    parse_node_list,
    parse_state,
    parse_text,
    parse_unix_time,
)
from slurm.step_use import USAGE_COLUMNS, StepUse, step_use

STEP_COLUMNS = (
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
    """Return rows of the steps table for these runs, with [] for (), and the use of all steps of each run.

    Lines of jobs, and of steps of other runs, are skipped without a count; what is malformed is counted, and its
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
        uses[run][value["JobIDRaw"]] = step_use(whole, row, value)
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
    """Return the columns of a line, and its step; None for a job, and for a step that is skipped."""
    if len(values) != len(STEP_COLUMNS):
        raise BadRowError("wrong number of fields")
    value = dict(zip(STEP_COLUMNS, values, strict=True))
    if cluster and value["Cluster"].lower() != cluster.lower():
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


MAX_CLOCK_SKEW_S = 300
"""Jobs that start or end further in the future are dropped and counted: hosts with NTP differ by less."""


def random_delimiter() -> str:
    """A delimiter that nobody can have put into a record beforehand."""
    return f"|~{os.urandom(8).hex()}~|"


@dataclass(frozen=True)
class Accounting:
    """sacct of one cluster. Its methods raise CommandError if sacct fails. clock: seconds since 1970."""

    commands: Runner
    cluster: str
    clock: Callable[[], float]
    delimiter: Callable[[], str] = random_delimiter

    def columns(self) -> tuple[str, ...]:
        return columns(_text(self.commands, ["sacct", "--helpformat"]))

    def jobs(self, selection: Sequence[str], names: Sequence[str], counts: Counts) -> list[dict[str, Any]]:
        """Rows of the jobs table, as parse_text gives them. names: of columns."""
        data, delimiter = self._ask([*selection, "-X"], names)
        return parse_text(data, delimiter, names, self.cluster, self._latest_s(), counts)

    def texts(self, selection: Sequence[str]) -> dict[Run, JobText]:
        """Return names and comments by job id and submit time. Raises ValueError if sacct gives no list of jobs."""
        return parse_json(self.commands([*self._base([*selection, "-X"]), "--json"]), self.cluster)

    def last_job(self, user: str, since_s: int) -> int | None:
        """The number of the job that a user submitted last, of those that have not ended before since_s."""
        data, delimiter = self._ask(["-X", "-u", user, "-S", sacct_time(since_s), "-E", "now"], ["Submit", "JobIDRaw"])
        rows = (line.split(delimiter) for line in data.decode("utf-8", "replace").splitlines())
        known = [tuple(map(optional_number, row)) for row in rows if len(row) == 2]
        return max(((submit_s, job_id) for submit_s, job_id in known if submit_s and job_id), default=(0, None))[1]

    def outputs(self, job_ids: Iterable[int]) -> dict[Run, tuple[str, str, str]]:
        """The folder, the submitting command, and the file for errors ("" before 24.05) of each run."""
        has_file = "StdErr" in _text(self.commands, ["sacct", "--helpformat"]).split()
        names = ["WorkDir", "SubmitLine", *(["StdErr"] if has_file else []), "Submit", "JobIDRaw"]
        data, delimiter = self._ask(["-X", "-j", ids_of(job_ids)], names)
        # A command can hold ends of lines, so both numbers end a record.
        end = rf"{re.escape(delimiter)}([0-9]+){re.escape(delimiter)}([0-9]+)\n"
        parts = re.split(end, data.decode("utf-8", "replace"))
        found: dict[Run, tuple[str, str, str]] = {}
        for text, submit_s, job_id in zip(parts[::3], parts[1::3], parts[2::3], strict=False):
            folder, line, file = [*text.split(delimiter), "", ""][:3]
            found[int(job_id), int(submit_s)] = folder, line, file
        return found

    def steps(
        self, runs: Collection[Run], counts: Counts
    ) -> tuple[list[dict[str, Any]], Mapping[Run, Sequence[StepUse]]]:
        """Rows of the steps table, and what the steps of each run used."""
        data, delimiter = self._ask(["-j", ids_of(job_id for job_id, _ in runs)], STEP_COLUMNS)
        return parse_steps(data, delimiter, self.cluster, self._latest_s(), frozenset(runs), counts)

    def _ask(self, selection: Sequence[str], names: Sequence[str]) -> tuple[bytes, str]:
        delimiter = self.delimiter()
        query = [*self._base(selection), "-n", "-P", f"--delimiter={delimiter}", "-o", ",".join(names)]
        return self.commands(query), delimiter

    def _base(self, selection: Sequence[str]) -> list[str]:
        return ["sacct", "-a", "-D", *(["-M", self.cluster] if self.cluster else []), *selection]

    def _latest_s(self) -> int:
        return int(self.clock()) + MAX_CLOCK_SKEW_S


@dataclass(frozen=True)
class AccountingStatus:
    """Version, cluster, and abilities of a Slurm. tracks_gpus is None if slurmctld gave no answer."""

    version: str
    cluster: str
    has_json: bool
    json_error: str
    jobs_last_day: int
    tracks_gpus: bool | None


def probe_accounting(commands: Runner) -> AccountingStatus:
    """Ask Slurm what can be read. cluster is "" where neither slurmctld nor slurmdbd names just one.

    Raises CommandError where sacct cannot be run or slurmdbd does not answer.
    """
    version = _text(commands, ["sacct", "--version"]).split()
    jobs = _text(commands, ["sacct", "-a", "-X", "-n", "-P", "-S", "now-1day", "-o", "JobIDRaw"])
    try:
        settings = slurm_settings(commands)
    except CommandError:
        settings = Settings()
    clusters = [settings["ClusterName"]] if settings.get("ClusterName") else known_clusters(commands) or []
    tracked = settings.get("AccountingStorageTRES")
    try:
        parse_json(commands(["sacct", "-X", "--json", "-j", "1"]), "")
        json_error = ""
    except (CommandError, ValueError) as error:
        json_error = str(error)
    return AccountingStatus(
        version=version[-1] if version else "",
        cluster=clusters[0] if len(clusters) == 1 else "",
        has_json=not json_error,
        json_error=json_error,
        jobs_last_day=len(jobs.split()),
        tracks_gpus=None if tracked is None else parse_gpus(tracked.lower()).count > 0,
    )


def known_clusters(commands: Runner) -> list[str] | None:
    """Clusters that slurmdbd knows; None where sacctmgr cannot be asked."""
    try:
        return _text(commands, ["sacctmgr", "-n", "-P", "show", "cluster", "format=Cluster"]).split()
    except CommandError:
        return None


def check_cluster(commands: Runner, cluster: str) -> None:
    """Raise SourceError if slurmdbd lists its clusters, but not this one.

    For an unknown cluster, sacct prints no rows and exits with 0, which must not look like an idle cluster.
    """
    known = known_clusters(commands)
    if known is not None and cluster.lower() not in (name.lower() for name in known):
        names = ", ".join(known) or "none"
        raise SourceError(
            f"accounting has no cluster {cluster!r}; it has: {names}", "correct site.cluster or --cluster"
        )


def _text(commands: Runner, argv: Sequence[str]) -> str:
    return commands(argv).decode("utf-8", "replace")


def sacct_time(seconds: int) -> str:
    """Format a time for sacct, in UTC, the commands' time zone. Times before 1970 become 1970."""
    return datetime.fromtimestamp(max(seconds, 0), UTC).strftime("%Y-%m-%dT%H:%M:%S")


def ids_of(job_ids: Iterable[int]) -> str:
    """Join distinct job ids for sacct -j, ascending."""
    return ",".join(map(str, sorted(set(job_ids))))


def submit_line(commands: Runner, job_id: int, since_s: int) -> str:
    """The command that submitted a job; "" if accounting does not have it, or has an older job of this number only."""
    submitted, _, line = _text(commands, ["sacct", "-j", str(job_id), "-nPX", "-o", "Submit,SubmitLine"]).partition("|")
    return line.strip() if (optional_number(submitted) or 0) >= since_s else ""


def count_users(commands: Runner, nodes: Iterable[str]) -> int:
    """Users whose jobs ran on some nodes in the last day. Raises CommandError."""
    query = ["sacct", "-anXP", "-S", "now-1days", "-o", "User", "-N", ",".join(nodes)]
    return len(set(_text(commands, query).split()))
