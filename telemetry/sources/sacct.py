"""Slurm's accounting: numbers from sacct's text output, names and admin comments from its JSON, steps of GPU jobs.

slurm/accounting.py says what a query selects. A job that slurmdbd learned of late comes with the next run, which begins
config.overlap_hours earlier.

jobstats keeps its summary in a job's AdminComment: "JS1:" + base64(gzip(JSON)), a history of HBM peaks. The JSON holds
per host `gpu_used_memory` (highest seen) and `gpu_total_memory`, bytes by GPU index, and `gpu_utilization`, mean
percent by GPU index (PrincetonUniversity/jobstats). Unknown values are left out or null, such as the utilization of MIG
instances (job_defense_shield, issue 13). "JS1:None" and "JS1:Short" mean that there is no summary.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import pyarrow as pa

from almanac.config import Slurm, Tier
from almanac.errors import CommandError, ConfigError, SourceError
from almanac.records import Counts, JobRequest
from almanac.tiers import requested_tier
from slurm.accounting import Accounting, Run, check_cluster, ids_of, random_delimiter, sacct_time
from slurm.commands import Runner
from slurm.hostlist import expand
from slurm.nodes import NodeShape, smallest_shape
from slurm.sacct import JobText
from slurm.step_use import JOB_COLUMNS, StepUse, job_use
from telemetry.sources.source import RowBatch
from telemetry.store.schema import JOBS, STEPS

PREFIX = "JS1:"
NO_SUMMARY = ("None", "Short")
MAX_ENCODED_BYTES = 1 << 20
MAX_JSON_BYTES = 8 << 20
MIB = 1 << 20
_HIGHEST = 2.0**62


@dataclass(frozen=True)
class GpuSummary:
    """The HBM peak (MiB) and mean utilization (%) of one GPU of a job; None where jobstats did not record it."""

    host: str
    gpu: str
    peak_mib: float | None
    total_mib: float | None
    util_pct: float | None = None


@dataclass(frozen=True)
class JobstatsSummary:
    """Figures of a job's GPUs, at least one. unreadable: values that are not null and make no sense."""

    gpus: tuple[GpuSummary, ...]
    unreadable: int = 0

    @property
    def hbm_peak_mib(self) -> float | None:
        """The highest peak among the job's GPUs; None if that of any GPU is not known: it may be the highest."""
        peaks = [gpu.peak_mib for gpu in self.gpus if gpu.peak_mib is not None]
        return max(peaks) if len(peaks) == len(self.gpus) else None

    @property
    def hbm_total_mib(self) -> float | None:
        """The smallest capacity among the job's GPUs: what every one of them had; None where unknown."""
        return min((gpu.total_mib for gpu in self.gpus if gpu.total_mib is not None), default=None)

    @property
    def gpu_util_pct(self) -> float | None:
        """Mean over the GPUs with a known utilization, as jobstats prints it; None if there is none."""
        known = [gpu.util_pct for gpu in self.gpus if gpu.util_pct is not None]
        return sum(known) / len(known) if known else None


def has_jobstats(admin_comment: str) -> bool:
    """Return True if a summary is there to be read, well formed or not."""
    return admin_comment.startswith(PREFIX) and admin_comment[len(PREFIX) :].strip() not in NO_SUMMARY


def decode_jobstats(admin_comment: str) -> JobstatsSummary | None:
    """The summary of an AdminComment; None where there is none, it is malformed, or nothing of a GPU can be read.

    Decompression is bounded. A value that cannot be read costs no other: it is None and counted. A peak above the GPU's
    memory says nothing, and neither does that memory.
    """
    if not has_jobstats(admin_comment) or len(admin_comment) > MAX_ENCODED_BYTES:
        return None
    try:
        packed = base64.b64decode(admin_comment[len(PREFIX) :].strip(), validate=True)
        content = json.loads(_gunzip(packed))
        nodes = content["nodes"].items()
    except (zlib.error, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    values = _Values()
    gpus = tuple(gpu for host, node in nodes for gpu in _gpus(host, node, values))
    is_empty = all(gpu.peak_mib is None and gpu.util_pct is None for gpu in gpus)
    return None if is_empty else JobstatsSummary(gpus, values.unreadable)


def _gunzip(packed: bytes) -> bytes:
    """Unpack bytes. Raises ValueError if they would grow past MAX_JSON_BYTES or are cut short."""
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    data = stream.decompress(packed, MAX_JSON_BYTES)
    if not stream.eof:
        raise ValueError("too large or cut short")
    return data


@dataclass
class _Values:
    """Reads values, and counts those that make no sense."""

    unreadable: int = 0

    def mapping(self, value: Any) -> Mapping[str, Any]:
        if value is None or isinstance(value, dict):
            return value or {}
        self.unreadable += 1
        return {}

    def number(self, value: Any, high: float = math.inf) -> float | None:
        """A number from 0 to high; None for any other value."""
        if value is None:
            return None
        if type(value) in (int, float) and 0 <= value <= high and value < _HIGHEST:
            return float(value)
        self.unreadable += 1
        return None


def _gpus(host: str, node: Any, values: _Values) -> Iterator[GpuSummary]:
    """The GPUs that a node names; one named "" stands for those of a node that cannot be read."""
    fields = ("gpu_used_memory", "gpu_total_memory", "gpu_utilization")
    is_read = isinstance(node, dict) and isinstance(node.get("gpu_used_memory", {}), dict)
    node = values.mapping(node)
    used, totals, utils = (values.mapping(node.get(field)) for field in fields)
    for gpu in dict.fromkeys((*used, *totals, *utils, *(() if is_read else ("",)))):
        peak, total = values.number(used.get(gpu)), values.number(totals.get(gpu))
        if peak is not None and total is not None and peak > total:
            values.unreadable += 2
            peak = total = None
        peak_mib, total_mib = (None if size is None else size / MIB for size in (peak, total))
        yield GpuSummary(host, gpu, peak_mib, total_mib, values.number(utils.get(gpu), 100))


_Row = TypeVar("_Row")

IDS_PER_QUERY = 500
SHAPE_COLUMNS = ("node_cpu_count", "node_gpu_count", "node_memory_mib", "node_threads", "gpu_memory_mib")
# JSON takes about 5 kB of output and several times that in memory for each record: past this many, by parts.
JSON_RECORDS = 5000


@dataclass(frozen=True)
class SacctSource:
    """Job records of one cluster. Needs the right to see all jobs (root, SlurmUser, or AdminLevel=Operator).

    open_jobs: jobs that the store holds without an end: ids, and when each was submitted. Those that the span does not
    bring are asked for by id, so that an end which slurmdbd learned late, or of long ago, is not missed. Slurm gives
    ids again: what was submitted before is another job. with_steps: the jobs of a batch whose steps are read.
    shapes: the sizes of the nodes now, by name; may raise CommandError. summaries: those that jobstats keeps in its own
    database, for jobs without one in AdminComment; may raise SourceError or ConfigError.
    """

    commands: Runner
    cluster: str
    tiers: Sequence[Tier]
    config: Slurm
    clock: Callable[[], float]
    open_jobs: Callable[[], Mapping[int, int]] = dict
    delimiter: Callable[[], str] = random_delimiter
    name: str = "sacct"
    with_steps: Callable[[pa.Table], pa.Table] = lambda jobs: jobs
    shapes: Callable[[], Mapping[str, NodeShape]] = dict
    summaries: Callable[[Sequence[Mapping[str, Any]]], Mapping[Run, str]] | None = None

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        """One batch of jobs per window of config.window_hours, from config.overlap_hours before since_s; before it
        the batches of its jobs' steps, so that the watermark passes a window only when its steps are stored.

        A record that ends after its window is left to a later one; the last window keeps what has not ended.
        Raises CommandError where sacct fails, SourceError where accounting does not know the cluster.
        """
        check_cluster(self.commands, self.cluster)
        names, shapes = self._sacct.columns(), self._shapes()
        seen: set[int] = set()
        spans = windows(max(0, since_s - self.config.overlap_hours * 3600), until_s, self.config.window_hours * 3600)
        for start_s, end_s in spans:
            span = ["-S", sacct_time(start_s), "-E", sacct_time(end_s)]
            upto_s = end_s if end_s < until_s else None
            yield from self._jobs_and_steps(self._batch(span, names, seen, upto_s, end_s), shapes)
        missing = sorted((job_id, submit_s) for job_id, submit_s in self.open_jobs().items() if job_id not in seen)
        for part in _parts(missing, IDS_PER_QUERY):
            query = ["-j", ids_of(job_id for job_id, _ in part)]
            yield from self._jobs_and_steps(self._batch(query, names, seen, None, None, dict(part)), shapes)

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
        rows = self._sacct.jobs(selection, names, counts)
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
            query = ["-j", ids_of(row["job_id"] for row in part)] if is_large else selection
            texts = self._texts(query, counts, len(part))
            summaries = self._summaries(part, counts)
            complete += [self._complete(row, texts, summaries, counts) for row in part]
        return RowBatch("jobs", pa.Table.from_pylist(complete, schema=JOBS), counts, watermark_s)

    def _jobs_and_steps(self, jobs: RowBatch, shapes: Mapping[str, NodeShape] | CommandError) -> Iterator[RowBatch]:
        """The batches of the jobs' steps, then the jobs, with what their steps used, and how large their nodes are."""
        uses: dict[Run, Sequence[StepUse]] = {}
        yield from self._steps(self.with_steps(jobs.rows), uses)
        if isinstance(shapes, CommandError):
            jobs.counts.note("without the size of their nodes: sinfo failed", jobs.rows.num_rows, str(shapes))
            shapes = {}
        yield replace(jobs, rows=with_shapes(with_use(jobs.rows, uses), shapes, self.tiers))

    def _shapes(self) -> Mapping[str, NodeShape] | CommandError:
        """Asked once: a lost slurmctld takes 9 s to say so."""
        try:
            return self.shapes()
        except CommandError as error:
            return error

    def _steps(self, jobs: pa.Table, uses: dict[Run, Sequence[StepUse]]) -> Iterator[RowBatch]:
        """Steps of the jobs that have ended, IDS_PER_QUERY jobs at once: a job may have any number of steps.

        Jobs without GPUs have no rows in the table steps. uses: filled with what the steps of each run used.
        """
        columns = (jobs[name].to_pylist() for name in ("job_id", "submit_s", "start_s", "end_s", "gpu_count"))
        ended = {run[:2]: bool(run[4]) for run in zip(*columns, strict=True) if run[2] is not None and run[3]}
        runs = sorted(ended)
        for part in _parts(runs, IDS_PER_QUERY) if self.config.read_steps else ():
            counts, rows = Counts(), list[dict[str, Any]]()
            try:
                rows, used = self._sacct.steps(part, counts)
                uses |= used
                found = len(rows)
                rows = [row for row in rows if ended[row["job_id"], row["submit_s"]]]
                counts.seen -= found - len(rows)
                counts.kept -= found - len(rows)
            except CommandError as error:
                counts.note("jobs without their steps: sacct failed", len(part), str(error))
            yield RowBatch("steps", pa.Table.from_pylist(rows, schema=STEPS), counts)

    @property
    def _sacct(self) -> Accounting:
        return Accounting(self.commands, self.cluster, self.clock, self.delimiter)

    def _texts(self, selection: list[str], counts: Counts, records: int) -> dict[Run, JobText] | None:
        """Names and comments; None, with a note in counts, where JSON cannot be had: numbers are kept without."""
        try:
            return self._sacct.texts(selection)
        except (CommandError, ValueError) as error:
            counts.note("without a name: sacct --json failed", records, str(error))
            return None

    def _summaries(self, rows: Sequence[dict[str, Any]], counts: Counts) -> Mapping[Run, str]:
        """Summaries from jobstats' database; none, with a note in counts, if it does not answer."""
        of_gpus = [row for row in rows if row["gpu_count"]]
        if self.summaries is None or not of_gpus:
            return {}
        try:
            return self.summaries(of_gpus)
        except (SourceError, ConfigError) as error:
            counts.note("without jobstats: its database failed", len(of_gpus), str(error))
            return {}

    def _complete(
        self, row: dict[str, Any], texts: dict[Run, JobText] | None, summaries: Mapping[Run, str], counts: Counts
    ) -> dict[str, Any]:
        text = (texts or {}).get((row["job_id"], row["submit_s"]), JobText(None))
        if text.name is None and texts is not None:
            counts.note("without a name: not in sacct --json", example=f"job {row['job_id']}")
        comment = text.admin_comment
        if not has_jobstats(comment):
            comment = summaries.get((row["job_id"], row["submit_s"]), comment)
        stats = decode_jobstats(comment)
        if stats is None and row["gpu_count"] and has_jobstats(comment):
            counts.note("jobstats summary unreadable", example=f"job {row['job_id']}")
        if stats and stats.unreadable:
            counts.note("jobstats values unreadable", stats.unreadable, f"job {row['job_id']}")
        partitions = text.partitions or None
        request = JobRequest(
            user=row["user"] or "",
            partition=partitions or row["partition"] or "",
            constraints=row["constraints"],
            gpu_type=row["gpu_type_req"] or "",
        )
        tier = requested_tier(request, self.tiers)
        return {
            **row,
            "partition_req": partitions,
            "name": text.name,
            "name_key": None if text.name is None else JobRequest("", text.name, rule=text.rule).name_key,
            "script_key": text.script_key or None,
            "framework": text.framework or None,
            "failed_node": text.failed_node or None,
            "refuses_mail": None if text.name is None else text.refuses_mail,
            "is_packed": text.is_packed,
            "tier": tier.name if tier else None,
            "jobstats_hbm_peak_mib": stats.hbm_peak_mib if stats else None,
            "jobstats_hbm_total_mib": stats.hbm_total_mib if stats else None,
            "jobstats_gpu_util_pct": stats.gpu_util_pct if stats else None,
        }


def with_shapes(jobs: pa.Table, shapes: Mapping[str, NodeShape], tiers: Sequence[Tier] = ()) -> pa.Table:
    """The jobs with SHAPE_COLUMNS: the smallest of each job's nodes. shapes: sizes by node; of no other node known."""

    @cache
    def sizes(node_list: str | None, gpu_type: str | None, partition: str | None) -> tuple[float | None, ...]:
        try:
            hosts = expand(node_list or "")
        except ValueError:
            hosts = ()
        shape = smallest_shape(map(shapes.get, hosts))
        memory = [_gpu_memory_mib(shapes.get(host), gpu_type, partition, tiers) for host in hosts]
        memory_mib = min((mib for mib in memory if mib is not None), default=None) if None not in memory else None
        return shape.cpus, shape.gpus, shape.memory_mib, shape.threads, memory_mib

    keys = zip(*(jobs[name].to_pylist() for name in ("node_list", "gpu_type", "partition")), strict=True)
    rows = [sizes(*key) for key in keys] if shapes else []
    for name, values in zip(SHAPE_COLUMNS, zip(*rows, strict=True), strict=False):
        place = jobs.schema.get_field_index(name)
        jobs = jobs.set_column(place, jobs.schema.field(place), pa.array(values, jobs.schema.field(place).type))
    return jobs


def _gpu_memory_mib(
    shape: NodeShape | None, gpu_type: str | None, partition: str | None, tiers: Sequence[Tier]
) -> float | None:
    """Nominal memory of the smallest GPU that a job can have had on a node; None if no tier describes it."""
    features = shape.features if shape else frozenset()
    types = {gpu_type} if gpu_type else shape.types if shape else frozenset()
    named = [
        tier.capacity_mib
        for tier in tiers
        if tier.constraint in features or (tier.gres and tier.gres in types) or (tier.partition or 0) == partition
    ]
    return min(named, default=None)


def _parts(rows: list[_Row], size: int) -> Iterator[list[_Row]]:
    return (rows[first : first + size] for first in range(0, len(rows), size))


def windows(since_s: int, until_s: int, length_s: int) -> list[tuple[int, int]]:
    """[since_s, until_s) cut into windows of at most length_s; [] for an empty span."""
    return [(start, min(start + length_s, until_s)) for start in range(since_s, until_s, length_s)]


def with_use(jobs: pa.Table, uses: Mapping[tuple[int, int], Sequence[StepUse]]) -> pa.Table:
    """The jobs with JOB_COLUMNS. uses: the steps of runs, by job_id and submit_s."""
    keys = list(zip(*(jobs[name].to_numpy().tolist() for name in ("job_id", "submit_s")), strict=True))
    found = {key: job_use(uses[key]) for key in keys if uses.get(key)}
    for name in JOB_COLUMNS:
        values = pa.array([found[key][name] if key in found else None for key in keys], pa.float64())
        place = jobs.schema.get_field_index(name)
        jobs = jobs.set_column(place, jobs.schema.field(place), values)
    return jobs
