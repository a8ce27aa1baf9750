"""Metrics of job steps: what each srun of a job did, by the engine that measures jobs.

A step owns the GPUs that its job had on the step's hosts, during the step. No record says which of them a step
got. So a step is excluded if it has fewer GPUs than its job had there, or shares a host with another step at the same
time. Only jobs with two steps or more count: a single step has the metrics of its job.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from almanac.config import Config
from almanac.units import format_count
from telemetry.attribution.allocations import ALLOCATIONS, NO_NODES, Attribution, JobRun, overlaps, parse_hosts
from telemetry.counters import STEP_METRICS
from telemetry.metrics.data_quality import exclusion, host_filter
from telemetry.store.schema import TABLES, table_of
from telemetry.store.store import ClusterStore

CONCURRENT = "concurrent steps share a host"
SOME_GPUS = "step with some of its job's GPUs"
NO_GPUS = "step without GPUs"
UNKNOWN_COUNT = "GPU count of the step unknown"

Run = tuple[int, int]
"""A run of a job: job id and submit time, s."""

_STEPS = """
SELECT j.number, s.step, greatest(s.start_s, j.start_s) AS start_s, least(s.end_s, j.end_s) AS end_s,
       s.node_list, s.gpu_count
FROM steps s JOIN jobs j USING (job_id, submit_s)
WHERE greatest(s.start_s, j.start_s) < least(s.end_s, j.end_s)
QUALIFY count(*) OVER (PARTITION BY j.number) > 1
ORDER BY j.number, start_s, end_s, s.step
"""


@dataclass(frozen=True)
class MeasuredStep:
    """A step that ran in [start_s, end_s), which lies within its job's time.

    job: place of its job in the list of jobs. gpu_count: GPUs allocated to it; None: not recorded.
    """

    job: int
    step: str
    start_s: int
    end_s: int
    gpu_count: int | None
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class JobSteps:
    """The steps found of one job. samples: of the job; step_samples: of them, those of steps measured."""

    samples: int
    step_samples: int
    verdicts: Counter[str]


@dataclass
class StepCounts:
    """Counts of a pass over steps, by run of a job: a job that is looked at twice counts once."""

    of_job: dict[Run, JobSteps] = field(default_factory=dict)

    def add(self, other: StepCounts) -> None:
        self.of_job |= other.of_job

    def as_dict(self) -> dict[str, Any]:
        """Return the counts for JSON. samples_without_step: of jobs with steps, those that no measured step has."""
        found = self.of_job.values()
        verdicts = sum((job.verdicts for job in found), Counter[str]())
        samples = sum(job.samples for job in found)
        return {
            "jobs": len(found),
            "steps": verdicts.total(),
            "verdicts": dict(verdicts.most_common()),
            "samples": samples,
            "samples_without_step": samples - sum(job.step_samples for job in found),
        }

    def lines(self) -> list[str]:
        """Lines for a person; [] if no job has steps to look at."""
        if not self.of_job:
            return []
        found = self.as_dict()
        verdicts = ", ".join(f"{format_count(number)} {verdict}" for verdict, number in found["verdicts"].items())
        samples, outside = format_count(found["samples"]), format_count(found["samples_without_step"])
        return [
            f"steps: {format_count(found['steps'])} in {format_count(found['jobs'])} jobs: {verdicts}",
            f"  samples: {samples} of these jobs, {outside} of no step that was measured",
        ]


Measure = Callable[[Sequence[JobRun], Attribution], pa.Table]
"""Metrics of intervals of jobs with these allocations: rows of the table job_metrics, in the order of the intervals."""


def summarize_steps(
    db: duckdb.DuckDBPyConnection,
    store: ClusterStore,
    config: Config,
    jobs: Sequence[JobRun],
    owned: Attribution,
    job_metrics: pa.Table,
    measure: Measure,
) -> StepCounts:
    """Compute and store the metrics of job steps, for jobs with at least two steps; return counts of what was found.

    owned: the allocations of the jobs. job_metrics: one row a job, in the same order. Raises duckdb.Error, StoreError.
    """
    steps = load_steps(db, store, jobs)
    if not steps:
        return StepCounts()
    found = measure_steps(steps, config, jobs, owned, measure)
    store.replace("step_metrics", found, found.select(["job_id", "submit_s"]))
    return _counted(steps, found, jobs, job_metrics)


def _counted(
    steps: Sequence[MeasuredStep], found: pa.Table, jobs: Sequence[JobRun], job_metrics: pa.Table
) -> StepCounts:
    samples: list[Any] = job_metrics["samples"].to_pylist()
    outcomes: dict[int, list[Any]] = defaultdict(list)
    for step, *outcome in zip(steps, found["verdict"].to_pylist(), found["samples"].to_pylist(), strict=True):
        outcomes[step.job].append(outcome)
    return StepCounts(
        {
            (jobs[number].job_id, jobs[number].submit_s): JobSteps(
                samples[number], sum(own for _, own in pairs), Counter(verdict for verdict, _ in pairs)
            )
            for number, pairs in outcomes.items()
        }
    )


def load_steps(db: duckdb.DuckDBPyConnection, store: ClusterStore, jobs: Sequence[JobRun]) -> list[MeasuredStep]:
    """Steps that ran, of those of the jobs that have two or more; by job, start, end and name."""
    submits = [job.submit_s for job in jobs]
    kept = store.read("steps", since_s=min(submits), until_s=max(submits) + 1) if jobs else None
    if kept is None or not kept.num_rows:
        return []
    keys = [(number, job.job_id, job.submit_s, job.start_s, job.end_s) for number, job in enumerate(jobs)]
    names = ("number", "job_id", "submit_s", "start_s", "end_s")
    db.register("steps", kept)
    db.register("jobs", pa.table(dict(zip(names, map(pa.array, zip(*keys, strict=True)), strict=True))))
    found = db.sql(_STEPS).to_arrow_table().to_pylist()
    db.unregister("steps")
    db.unregister("jobs")
    hosts = functools.cache(parse_hosts)
    return [
        MeasuredStep(r["number"], r["step"], r["start_s"], r["end_s"], r["gpu_count"], hosts(r["node_list"]))
        for r in found
    ]


def stored_steps(store: ClusterStore, runs: Sequence[Run], columns: Sequence[str]) -> list[dict[str, Any]]:
    """Steps of runs with their metrics, by run and number; [] where there are none.

    columns: of the tables steps and step_metrics. Those of the metrics are None where a step was not measured.
    """
    if not runs:
        return []
    since_s, until_s = min(submit_s for _, submit_s in runs), max(submit_s for _, submit_s in runs) + 1
    key = TABLES["steps"].key
    ids = pa.array(sorted({job_id for job_id, _ in runs}), pa.int64())
    given = store.read("steps", since_s=since_s, until_s=until_s, among={"job_id": ids})
    measured = [*key, *(name for name in columns if name not in given.column_names)]
    metrics = store.read("step_metrics", measured, since_s, until_s, {"job_id": ids})
    found = given.join(metrics, list(key)).select(list(columns)).to_pylist()
    wanted = set(runs)
    return sorted(
        (row for row in found if (row["job_id"], row["submit_s"]) in wanted),
        key=lambda row: (row["submit_s"], row["job_id"], *map(int, row["step"].split("+"))),
    )


def measure_steps(
    steps: Sequence[MeasuredStep], config: Config, jobs: Sequence[JobRun], owned: Attribution, measure: Measure
) -> pa.Table:
    """Rows of the table step_metrics, in the order of the steps."""
    as_jobs = [
        replace(jobs[step.job], start_s=step.start_s, end_s=step.end_s, gpu_count=step.gpu_count or 0, hosts=step.hosts)
        for step in steps
    ]
    login_nodes = host_filter(config.filters.login_nodes)
    ignored = {n: why for n, job in enumerate(as_jobs) if (why := exclusion(job, config.filters, login_nodes))}
    rows = measure(as_jobs, attribute_steps(steps, jobs, owned, ignored))
    named = rows.append_column("step", pa.array([step.step for step in steps], pa.string()))
    return named.select(STEP_METRICS.names).cast(STEP_METRICS)


def attribute_steps(
    steps: Sequence[MeasuredStep], jobs: Sequence[JobRun], owned: Attribution, ignored: Mapping[int, str] | None = None
) -> Attribution:
    """Allocations of steps: their job's, on their hosts and in their time. No two allocations of a unit overlap.

    owned: allocations of the jobs. ignored: steps that are not looked at, and why.
    """
    units = _units_by_job({step.job for step in steps}, owned)
    crowded = concurrent_steps(steps)
    result = Attribution(ALLOCATIONS.empty_table())
    allocations = []
    for number, step in enumerate(steps):
        on_hosts = [unit for unit in units[step.job] if unit[0] in step.hosts]
        why = (ignored or {}).get(number) or owned.failed.get(step.job) or _without_gpus(step)
        why = why or (CONCURRENT if number in crowded else None)
        if why or _has_some(step, jobs[step.job], on_hosts, len(units[step.job])):
            result.failed[number] = why or SOME_GPUS
            continue
        result.origin[number] = owned.origin[step.job]
        allocations += [(number, *unit, step.start_s * 1000, step.end_s * 1000) for unit in on_hosts]
    result.allocations = table_of(ALLOCATIONS, allocations)
    return result


_Place = tuple[str, int, str]


def _units_by_job(numbers: set[int], owned: Attribution) -> Mapping[int, list[_Place]]:
    """Host, GPU and instance of each allocation of the jobs."""
    found: dict[int, list[_Place]] = defaultdict(list)
    chosen = owned.allocations.filter(pc.is_in(owned.allocations["job"], pa.array(sorted(numbers), pa.int32())))
    columns = (chosen[name].to_pylist() for name in ("job", "host", "gpu", "mig"))
    for number, host, gpu, mig in zip(*columns, strict=True):
        found[number].append((host, gpu, mig))
    return found


def _without_gpus(step: MeasuredStep) -> str | None:
    """Say why a step cannot be said to have any GPU."""
    if not step.hosts:
        return NO_NODES
    return {None: UNKNOWN_COUNT, 0: NO_GPUS}.get(step.gpu_count)


def _has_some(step: MeasuredStep, job: JobRun, on_hosts: list[_Place], seen: int) -> bool:
    """Return True if a step has fewer GPUs than its job on the step's hosts.

    Where the job has GPUs that telemetry does not show, each of its hosts is taken to have an equal share of them.
    """
    share = 0 if seen >= job.gpu_count else -(-job.gpu_count * len(step.hosts) // len(job.hosts))
    return (step.gpu_count or 0) < max(len(on_hosts), share)


def concurrent_steps(steps: Sequence[MeasuredStep]) -> set[int]:
    """Places of the steps that share a host with another step of their job for some time; both may have GPUs."""
    by_host: dict[tuple[int, str], list[tuple[int, int, int]]] = defaultdict(list)
    for number, step in enumerate(steps):
        if step.gpu_count != 0:
            for host in step.hosts:
                by_host[step.job, host].append((step.start_s, step.end_s, number))
    return set().union(*(overlaps(spans) for spans in by_host.values()))
