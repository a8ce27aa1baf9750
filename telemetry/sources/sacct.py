"""Slurm's accounting: numbers from sacct's text output, names and admin comments from its JSON, steps of GPU jobs.

Selection: `sacct -S a -E b` gives the records eligible before b that ended at or after a, or have not ended. Jobs
that were never eligible (cancelled while held) are not among them; they never ran. On 22.05 slurmdbd learns up to six
seconds late that a job was eligible: such jobs come with the next run, which begins config.overlap_hours earlier.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import pyarrow as pa

from almanac.config import Slurm, Tier
from almanac.errors import CommandError, SourceError
from almanac.records import Counts, Request
from almanac.tiers import requested_tier
from almanac.tres import parse_gpus
from almanac.units import DAY_S
from telemetry.slurm.commands import Runner
from telemetry.sources.base import RowBatch
from telemetry.sources.jobstats import decode_jobstats, has_jobstats
from telemetry.sources.sacct_json import JobText, parse_json
from telemetry.sources.sacct_steps import COLUMNS as STEP_COLUMNS
from telemetry.sources.sacct_steps import Run, parse_steps
from telemetry.sources.sacct_text import COLUMNS, columns, parse_text
from telemetry.sources.sacct_usage import StepUse, with_use
from telemetry.store.schema import JOBS, STEPS

_Row = TypeVar("_Row")

IDS_PER_QUERY = 500
# JSON takes about 5 kB of output and several times that in memory for each record: past this many, by parts.
MAX_CLOCK_SKEW_S = 300
"""Jobs that start or end further in the future are dropped and counted: hosts with NTP differ by less."""
JSON_RECORDS = 5000


def _all_of(jobs: pa.Table) -> pa.Table:
    return jobs


def random_delimiter() -> str:
    """A delimiter that nobody can have put into a record beforehand."""
    return f"|~{secrets.token_hex(8)}~|"


@dataclass(frozen=True)
class SacctSource:
    """Job records of one cluster. Needs the right to see all jobs (root, SlurmUser, or AdminLevel=Operator).

    open_jobs: jobs that the store holds without an end: ids, and when each was submitted. Those that the span does not
    bring are asked for by id, so that an end which slurmdbd learned late, or of long ago, is not missed. Slurm gives
    ids again: what was submitted before is another job. with_steps: the jobs of a batch whose steps are read.
    """

    commands: Runner
    cluster: str
    tiers: Sequence[Tier]
    config: Slurm
    clock: Callable[[], float]
    open_jobs: Callable[[], Mapping[int, int]] = dict
    delimiter: Callable[[], str] = random_delimiter
    name: str = "sacct"
    with_steps: Callable[[pa.Table], pa.Table] = _all_of

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        """One batch of jobs per window of config.window_hours, from config.overlap_hours before since_s; before it
        the batches of its jobs' steps, so that the watermark passes a window only when its steps are stored.

        A record that ends after its window is left to a later one; the last window keeps what has not ended.
        Raises CommandError where sacct fails, SourceError where accounting does not know the cluster.
        """
        check_cluster(self.commands, self.cluster)
        names = columns(self.commands(["sacct", "--helpformat"]).decode("utf-8", "replace"))
        seen: set[int] = set()
        spans = windows(max(0, since_s - self.config.overlap_hours * 3600), until_s, self.config.window_hours * 3600)
        for start_s, end_s in spans:
            span = ["-S", _moment(start_s), "-E", _moment(end_s)]
            upto_s = end_s if end_s < until_s else None
            yield from self._jobs_and_steps(self._batch(span, names, seen, upto_s, end_s))
        missing = sorted((job_id, submit_s) for job_id, submit_s in self.open_jobs().items() if job_id not in seen)
        for part in _parts(missing, IDS_PER_QUERY):
            ids = ",".join(str(job_id) for job_id, _ in part)
            yield from self._jobs_and_steps(self._batch(["-j", ids], names, seen, None, None, dict(part)))

    def _batch(
        self,
        selection: list[str],
        names: Sequence[str],
        seen: set[int],
        upto_s: int | None,
        watermark_s: int | None,
        submitted_s: Mapping[int, int] | None = None,
    ) -> RowBatch:
        """The records of one selection; those that end at or after upto_s, or not yet, are for a later batch.

        submitted_s: by id; older records are of other jobs, and are skipped. -S would do that in
        sacct, but leaves out jobs that were never eligible.
        """
        counts = Counts()
        delimiter = self.delimiter()
        query = [*self._base(selection), "-n", "-P", f"--delimiter={delimiter}", "-o", ",".join(names)]
        text = self.commands(query)
        latest_s = int(self.clock()) + MAX_CLOCK_SKEW_S
        rows = parse_text(text, delimiter, names, self.cluster, latest_s, counts)
        is_large = len(rows) > JSON_RECORDS
        found = len(rows)
        if upto_s is not None:
            rows = [row for row in rows if row["end_s"] is not None and row["end_s"] < upto_s]
        if submitted_s is not None:
            rows = [row for row in rows if row["submit_s"] >= submitted_s.get(row["job_id"], 0)]
        counts.seen -= found - len(rows)
        counts.kept -= found - len(rows)
        seen.update(row["job_id"] for row in rows)
        complete: list[dict[str, Any]] = []
        for part in _parts(rows, JSON_RECORDS):
            texts = self._texts(_by_ids(part) if is_large else selection, counts, len(part))
            complete += [self._complete(row, texts, counts) for row in part]
        return RowBatch("jobs", pa.Table.from_pylist(complete, schema=JOBS), counts, watermark_s)

    def _jobs_and_steps(self, jobs: RowBatch) -> Iterator[RowBatch]:
        """The batches of the jobs' steps, then the jobs, with what their steps used."""
        uses: dict[Run, list[StepUse]] = {}
        yield from self._steps(self.with_steps(jobs.rows), uses)
        yield replace(jobs, rows=with_use(jobs.rows, uses))

    def _steps(self, jobs: pa.Table, uses: dict[Run, list[StepUse]]) -> Iterator[RowBatch]:
        """Steps of the GPU jobs that have ended, IDS_PER_QUERY jobs at once: a job may have any number of steps.

        uses: filled with what the steps of each run used.
        """
        columns = (jobs[name].to_pylist() for name in ("job_id", "submit_s", "end_s", "gpu_count"))
        runs = sorted(
            (job_id, submit_s) for job_id, submit_s, end_s, gpus in zip(*columns, strict=True) if gpus and end_s
        )
        for part in _parts(runs, IDS_PER_QUERY) if self.config.read_steps else ():
            counts, delimiter = Counts(), self.delimiter()
            ids = ",".join(sorted({str(job_id) for job_id, _ in part}))
            base = ["sacct", "-a", "-D", "-M", self.cluster, "-j", ids]
            query = [*base, "-n", "-P", f"--delimiter={delimiter}", "-o", ",".join(STEP_COLUMNS)]
            rows: list[dict[str, Any]] = []
            try:
                latest_s = int(self.clock()) + MAX_CLOCK_SKEW_S
                data = self.commands(query)
                rows, used = parse_steps(data, delimiter, self.cluster, latest_s, frozenset(part), counts)
                uses |= used
            except CommandError as error:
                counts.note("jobs without their steps: sacct failed", len(part), str(error))
            yield RowBatch("steps", pa.Table.from_pylist(rows, schema=STEPS), counts)

    def _base(self, selection: list[str]) -> list[str]:
        return ["sacct", "-a", "-X", "-D", "-M", self.cluster, *selection]

    def _texts(self, selection: list[str], counts: Counts, records: int) -> dict[tuple[int, int], JobText] | None:
        """Names and comments; None, with a note in counts, where JSON cannot be had: numbers are kept without."""
        try:
            return parse_json(self.commands([*self._base(selection), "--json"]), self.cluster)
        except (CommandError, ValueError) as error:
            counts.note("without a name: sacct --json failed", records, str(error))
            return None

    def _complete(
        self, row: dict[str, Any], texts: dict[tuple[int, int], JobText] | None, counts: Counts
    ) -> dict[str, Any]:
        text = (texts or {}).get((row["job_id"], row["submit_s"]), JobText(None))
        if text.name is None and texts is not None:
            counts.note("without a name: not in sacct --json", example=f"job {row['job_id']}")
        stats = decode_jobstats(text.admin_comment)
        if stats is None and row["gpu_count"] and has_jobstats(text.admin_comment):
            counts.note("jobstats summary unreadable", example=f"job {row['job_id']}")
        if stats and stats.unreadable:
            counts.note("jobstats values unreadable", stats.unreadable, f"job {row['job_id']}")
        partitions = text.partitions or None
        tier = requested_tier(_request(row, partitions or row["partition"] or ""), self.tiers)
        return {
            **row,
            "partition_req": partitions,
            "name": text.name,
            "name_key": None if text.name is None else Request("", text.name, rule=text.rule).name_key,
            "script_key": text.script_key or None,
            "refuses_mail": None if text.name is None else text.refuses_mail,
            "is_packed": text.is_packed,
            "tier": tier.name if tier else None,
            "jobstats_hbm_peak_mib": stats.hbm_peak_mib if stats else None,
            "jobstats_hbm_total_mib": stats.hbm_total_mib if stats else None,
            "jobstats_gpu_util_pct": stats.gpu_util_pct if stats else None,
        }


def _parts(rows: list[_Row], size: int) -> Iterator[list[_Row]]:
    return (rows[first : first + size] for first in range(0, len(rows), size))


def _by_ids(rows: list[dict[str, Any]]) -> list[str]:
    return ["-j", ",".join(sorted({str(row["job_id"]) for row in rows}))]


def windows(since_s: int, until_s: int, length_s: int) -> list[tuple[int, int]]:
    """[since_s, until_s) cut into windows of at most length_s; [] where it is empty."""
    return [(start, min(start + length_s, until_s)) for start in range(since_s, until_s, length_s)]


@dataclass(frozen=True)
class AccountingStatus:
    """What Slurm says of itself. tracks_gpus is None where slurmctld could not be asked."""

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
        shown = _text(commands, ["scontrol", "show", "config"])
    except CommandError:
        shown = ""
    settings = dict(_setting(line) for line in shown.splitlines() if "=" in line)
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


def ended_jobs(
    commands: Runner, job_ids: Collection[int], cluster: str, now_s: int, user: str | None = None
) -> list[dict[str, Any]]:
    """Rows of the table jobs, without names: the newest ended runs of these jobs and arrays, in the order of their ids.

    cluster: "" stands for the local one. user: only this user's. Raises CommandError.
    """
    delimiter, ids = random_delimiter(), ",".join(map(str, sorted(set(job_ids))))
    query = ["sacct", "-X", "-n", "-P", "-j", ids, f"--delimiter={delimiter}", "-o", ",".join(COLUMNS)]
    query += ["-a"] if user is None else ["-u", user]
    text = commands(query + (["-M", cluster] if cluster else []))
    named = cluster or text.split(delimiter.encode(), 1)[0].decode("utf-8", "replace")
    rows = parse_text(text, delimiter, COLUMNS, named, now_s + DAY_S, Counts())
    newest = {row["job_id"]: row for row in sorted(rows, key=lambda row: int(row["submit_s"]))}
    return [newest[job_id] for job_id in sorted(newest) if newest[job_id]["end_s"] is not None]


def known_clusters(commands: Runner) -> list[str] | None:
    """Clusters that slurmdbd knows; None where sacctmgr cannot be asked."""
    try:
        return _text(commands, ["sacctmgr", "-n", "-P", "show", "cluster", "format=Cluster"]).split()
    except CommandError:
        return None


def check_cluster(commands: Runner, cluster: str) -> None:
    """Raises SourceError for a cluster that slurmdbd does not know.

    sacct answers with no rows and exit code 0 then: that must not look like idleness.
    """
    known = known_clusters(commands)
    if known is not None and cluster.lower() not in (name.lower() for name in known):
        names = ", ".join(known) or "none"
        raise SourceError(
            f"accounting has no cluster {cluster!r}; it has: {names}", "correct site.cluster or --cluster"
        )


def _request(row: dict[str, Any], partitions: str) -> Request:
    return Request(
        user=row["user"] or "",
        partition=partitions,
        constraints=row["constraints"],
        gpu_type=row["gpu_type_req"] or "",
    )


def _text(commands: Runner, argv: Sequence[str]) -> str:
    return commands(argv).decode("utf-8", "replace")


def _setting(line: str) -> tuple[str, str]:
    name, _, value = line.partition("=")
    return name.strip(), value.strip()


def _moment(seconds: int) -> str:
    """As sacct takes it, in UTC, which is the commands' time zone. Times before 1970 become 1970."""
    return datetime.fromtimestamp(max(seconds, 0), UTC).strftime("%Y-%m-%dT%H:%M:%S")
