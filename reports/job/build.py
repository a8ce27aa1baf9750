"""Load the evidence of reports: from the store, and for jobs that still run from Prometheus.

The figures of a running job are computed as those of an ended one, in a store of its own.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import pyarrow as pa

from advisor.health.record import stored_checkpoints
from almanac.config import Prometheus
from almanac.errors import ConfigError
from almanac.hardware import engines_of
from almanac.units import DAY_S
from reports.job.evidence import JobContext
from reports.job.job_report import GpuRow, JobRow, MetricsRow
from reports.job.mfu import COLUMNS, HISTORY_DAYS, MfuFall, find_falls
from reports.job.rules import choices_of
from reports.job.series import SeriesRequest, SiteFigures, load_series, span_of
from reports.job.slice_energy import estimate_energy
from reports.job.sources import SlurmJob, requeued
from slurm.hostlist import expand
from slurm.queued_job import QueuedJob
from telemetry.history import UserHistories, load_history, load_history_table, plain_rows
from telemetry.metrics.data_quality import IDLE, OK
from telemetry.site import Site
from telemetry.store.schema import TABLES
from telemetry.store.store import ClusterStore, Store

if TYPE_CHECKING:
    import pandas as pd

    from advisor.packing.decide import PackingAdvice
    from almanac.records import Advice, HostOption
    from telemetry.ingest import Advance


_Row = TypeVar("_Row", JobRow, MetricsRow, GpuRow)
ACCOUNTED = ("hbm_peak_mib", "hbm_capacity_mib", "hbm_peak_frac", "mean_gpu_util_pct")


def build(
    site: Site,
    job_ids: Sequence[int],
    *,
    has_series: bool = True,
    is_bare: bool = False,
    user: str | None = None,
) -> list[JobContext]:
    """The contexts of these jobs, in their order, without ids that the store does not have.

    Reads every table once for all jobs. has_series: also read samples, for charts. is_bare: do not read other jobs, so
    there are no ranks and no advice. user: only this user's jobs, because Slurm can reuse job ids. Raises StoreError.
    """
    runs = _runs(site.store, job_ids, user)
    chosen = [runs[job_id] for job_id in dict.fromkeys(job_ids) if job_id in runs]
    return _build(site, chosen, has_series, is_bare)


def build_runs(
    site: Site, wanted: Sequence[tuple[int, int]], *, has_series: bool = True, is_bare: bool = False
) -> list[JobContext]:
    """The contexts of runs (job_id, submit_s), which need not be the last runs of their jobs. Raises StoreError."""
    runs = _runs(site.store, [job_id for job_id, _ in wanted])
    chosen = [[row for row in runs.get(job_id, ()) if row["submit_s"] <= submit_s] for job_id, submit_s in wanted]
    known = [rows for rows, key in zip(chosen, wanted, strict=True) if rows and _key(rows[-1]) == key]
    return _build(site, known, has_series, is_bare)


def _build(site: Site, runs: Sequence[Sequence[JobRow]], has_series: bool, is_bare: bool) -> list[JobContext]:
    """The context of each job's last run. runs: all runs of each job, oldest first."""
    jobs = [each[-1] for each in runs]
    if not jobs:
        return []
    site = site.at(site.now_s())
    store, now_s = site.store, site.now_s()
    metrics = {key: rows[0] for key, rows in _by_run(store, "job_metrics", MetricsRow, jobs).items()}
    sources = _add_accounted(store, metrics)
    gpus = _by_run(store, "gpu_metrics", GpuRow, jobs)
    without = [] if is_bare else [job for job in jobs if metrics.get(_key(job), {}).get("energy_j") is None]
    for run, estimate in estimate_energy(store, without, gpus).items():
        metrics[run] = cast(MetricsRow, {**metrics.get(run, {}), **estimate})
    wanted = [_wanted(job, metrics.get(_key(job), {}), gpus.get(_key(job), [])) for job in jobs]
    advices, packing = ({}, {}) if is_bare else _advise(site, jobs)
    host = {} if is_bare else _advise_host(site, jobs)
    falls = {} if is_bare else _load_falls(store, jobs, metrics.values())
    sizes = {_key(job): (job["gpu_count"] or 0, float(job["elapsed_s"] or 0)) for job in jobs}
    checkpoints = {} if is_bare else stored_checkpoints(store, now_s, sizes, site.config.advice.checkpoint_s)
    found = load_series(store, wanted) if has_series else [None] * len(jobs)
    choices = choices_of(site.config)
    spans = [(job["submit_s"], job["end_s"] or now_s) for job in jobs]
    figures = None if is_bare else SiteFigures.load(store, *span_of(spans))
    return [
        JobContext(
            cluster=store.cluster,
            now_s=now_s,
            job=job,
            metrics=metrics.get(_key(job), {}),
            gpus=tuple(gpus.get(_key(job), [])),
            series=series,
            ranks=figures.ranks(metrics.get(_key(job), {}), *span) if figures else {},
            advice=advices.get(_key(job)),
            tiers=site.config.tiers,
            earlier_runs=requeued(earlier, job),
            site=choices,
            packing=packing.get(_key(job)),
            host=host.get(_key(job), ()),
            mfu_fall=falls.get(_key(job)),
            checkpoints=checkpoints.get(_key(job)),
            source=sources.get(_key(job), ""),
        )
        for (*earlier, job), span, series in zip(runs, spans, found, strict=True)
    ]


def _key(row: JobRow | MetricsRow | GpuRow) -> tuple[int, int]:
    return row["job_id"], row["submit_s"]


def _runs(store: ClusterStore, job_ids: Sequence[int], user: str | None = None) -> dict[int, list[JobRow]]:
    """All runs of each job, or those of one user, oldest first."""
    among: dict[str, pa.Array[Any]] = {"job_id": pa.array(sorted(set(job_ids)), pa.int64())}
    if user is not None:
        among["user"] = pa.array([user], pa.string())
    found = store.read("jobs", among=among).sort_by([("job_id", "ascending"), ("submit_s", "ascending")])
    runs: dict[int, list[JobRow]] = defaultdict(list)
    for row in cast(list[JobRow], plain_rows(found)):
        runs[row["job_id"]].append(row)
    return runs


def _by_run(
    store: ClusterStore, table: str, kind: type[_Row], jobs: Sequence[JobRow]
) -> dict[tuple[int, int], list[_Row]]:
    """The rows of a table for these runs, by run (job_id, submit_s). kind: the type of a row."""
    submitted = [job["submit_s"] for job in jobs]
    ids = pa.array(sorted({job["job_id"] for job in jobs}), pa.int64())
    rows = store.read(table, None, min(submitted), max(submitted) + 1, {"job_id": ids})
    found: dict[tuple[int, int], list[_Row]] = {}
    for row in cast(list[_Row], plain_rows(rows)):
        found.setdefault(_key(row), []).append(row)
    return found


def _add_accounted(store: ClusterStore, metrics: dict[tuple[int, int], MetricsRow]) -> dict[tuple[int, int], str]:
    """Add the memory and the use of GPUs that only accounting has, and return its source by run."""
    sources = {}
    silent = {key for key, row in metrics.items() if row.get("hbm_peak_mib") is None}
    among = {"job_id": pa.array(sorted({job_id for job_id, _ in silent}), pa.int64())}
    names = ["job_id", "submit_s", "hbm_evidence", *ACCOUNTED]
    for row in plain_rows(load_history_table(store, names, among=among)) if silent else ():
        key = row["job_id"], row["submit_s"]
        if key in silent and row["hbm_evidence"] in ("jobstats", "sacct"):
            known = {name: row[name] for name in ACCOUNTED if row[name] is not None}
            metrics[key] = cast(MetricsRow, {**metrics[key], **known, "is_preallocated": False})
            sources[key] = row["hbm_evidence"]
    return sources


def _wanted(job: JobRow, metrics: MetricsRow, gpus: Sequence[GpuRow]) -> SeriesRequest:
    start_s, end_s = job["start_s"] or 0, job["end_s"] or 0
    engines = {
        (row["host"], row["gpu"], row["mig"]): engines_of(row["mig_profile"], row["gpu_model"], row["hbm_capacity_mib"])
        for row in gpus
    }
    units = sorted(engines)
    expected = next((row["expected_samples"] for row in gpus if row["expected_samples"]), None)
    return SeriesRequest(
        start_s=start_s,
        end_s=end_s,
        units=tuple(units) if end_s > start_s else (),
        interval_s=(end_s - start_s) / expected if expected else None,
        label=job["job_id"] if metrics.get("attributed_by") == "label" else None,
        engines=tuple(engines[unit] for unit in units),
        pipes=tuple(metrics.get("pipes_used") or ()),
    )


def _advise(
    site: Site, jobs: Sequence[JobRow]
) -> tuple[dict[tuple[int, int], Advice], dict[tuple[int, int], PackingAdvice]]:
    """Return the advice now for the same submission, by run (job_id, submit_s); and of packing it."""
    # `almanac jobs` needs the class JobContext alone, and these imports take 0.3 s.
    from advisor.duration.replay import recorded_requests
    from advisor.from_store import load_usable
    from advisor.service import advise_many

    store, config, now_s = site.store, site.config, site.now_s()
    history = _history(store, sorted({job["user"] or "" for job in jobs}))
    keys = list(zip(history["job_id"].tolist(), history["submit_s"].tolist(), strict=True))
    # The tier of a packed job has to hold all its tasks. One without a GPU or a tier in its request chose none.
    wanted = {_key(job) for job in jobs if not job["is_packed"] and (job["gpu_count_req"] != 0 or job["tier"])}
    chosen = [place for place, key in enumerate(keys) if key in wanted]
    requests = recorded_requests(history.iloc[chosen], config.tiers)
    trained = load_usable(store.models_dir, now_s)
    said = advise_many(requests, history, trained, config, now_s)
    advices = {keys[place]: advice for place, advice in zip(chosen, said, strict=True)}
    if all(request.gpu_count != 1 for request in requests):
        return advices, {}
    from advisor.packing.evidence import packing_by_run

    return advices, packing_by_run(advices, history, trained, config, now_s)


def _advise_host(site: Site, jobs: Sequence[JobRow]) -> dict[tuple[int, int], tuple[HostOption, ...]]:
    """Return the options on host memory and CPUs for the next submission, by run; empty before the first training."""
    from advisor.from_store import load_usable
    from advisor.host.options import advise_host
    from telemetry.history import load_host_history

    trained = load_usable(site.store.models_dir, site.now_s())
    runs = {_key(job) for job in jobs if job["host_mem_peak_mib"] is not None or job["state"] == "OUT_OF_MEMORY"}
    if not trained or not trained.host or not runs:
        return {}
    history = load_host_history(site.store, sorted({job["user"] or "" for job in jobs}))
    return advise_host(history, runs, trained.host, site.config.advice, site.now_s())


def _history(store: ClusterStore, users: Sequence[str]) -> pd.DataFrame:
    """All jobs of these users."""
    if len(users) == 1:
        return load_history(store, user=users[0], running=True)
    histories = UserHistories(store)
    try:
        return histories.of(users)
    finally:
        histories.close()


Show: TypeAlias = "Callable[[str], AbstractContextManager[Advance]]"
_RETRIES = 1
"""Retries of a failed query: somebody waits for the answer."""
_CHUNK_MINUTES = 1440
"""A query reads few hosts here, so it can read more hours; above max_samples it reads fewer."""
ENDED_TIMEOUT_S, MOST_ENDED_S = 2.0, 12 * 3600
"""Of a job that has just ended: how long a query may take, and how long the job may have run, for figures at once."""


def live_contexts(
    site: Site, jobs: Sequence[QueuedJob], *, known: ClusterStore | None = None, show: Show | None = None
) -> list[JobContext]:
    """The contexts of running jobs, in their order, with figures up to now_s; without ranks and without advice.

    All is computed in a temporary store. known: the site's store, whose GPU bindings count too; nothing is written to
    it. Raises ConfigError if no Prometheus is configured, ServerError if it does not answer, StoreError.
    """
    now_s = site.now_s()
    # Later than now where slurmctld's clock is ahead.
    rows = [{**job.row(now_s), "end_s": max(now_s, 1 + (job.start_s or 0))} for job in jobs]
    bindings = [binding for job in jobs for binding in _bindings(job, now_s)]
    elapsed_s = {job.job_id: job.row(now_s)["elapsed_s"] for job in jobs}
    found = _measured(site, rows, bindings, known, replace(site.config.prometheus, delay_s=0), show)
    return [_so_far(context, elapsed_s[context.job_id]) for context in found]


def ended_contexts(
    site: Site, jobs: Sequence[SlurmJob], *, known: ClusterStore | None = None, show: Show | None = None
) -> list[JobContext]:
    """The contexts of jobs that ended just now, with the figures that the store will have; only those that have them.

    Each figure is computed as for the store, of the same samples. Raises as live_contexts.
    """
    now_s = site.now_s()
    rows = [dict(job.row) for job in jobs if _is_measurable(job.row, now_s, site.config.prometheus.delay_s)]
    prometheus = replace(site.config.prometheus, timeout_s=min(site.config.prometheus.timeout_s, ENDED_TIMEOUT_S))
    found = _measured(site, rows, [], known, replace(prometheus, retries=0), show)
    earlier = {job.row["job_id"]: job.runs[:-1] for job in jobs}
    return [
        replace(context, earlier_runs=earlier[context.job_id])
        for context in found
        if context.data_quality in (OK, IDLE)
    ]


def _is_measurable(job: JobRow, now_s: int, delay_s: int) -> bool:
    """Return True if Prometheus has all samples of a job, and few enough to wait for them."""
    start_s, end_s = job["start_s"], job["end_s"]
    is_known = bool(job["gpu_count"]) and start_s is not None and end_s is not None and end_s > start_s
    return is_known and end_s + delay_s <= now_s and end_s - start_s <= MOST_ENDED_S  # type: ignore[operator]


def _measured(
    site: Site,
    rows: Sequence[dict[str, Any]],
    bindings: Sequence[dict[str, Any]],
    known: ClusterStore | None,
    prometheus: Prometheus,
    show: Show | None,
) -> list[JobContext]:
    """The contexts of rows of the table jobs, of samples that are read now, in a temporary store."""
    if not rows:
        return []
    # Only here: this loads all that reads and summarizes samples.
    from telemetry.metrics.summary import summarize

    config, ids = site.config, [row["job_id"] for row in rows]
    with tempfile.TemporaryDirectory(prefix="almanac-running-") as folder:
        limits = {"memory_limit_mib": config.store.memory_limit_mib, "threads": config.store.threads}
        cluster = site.cluster_name or config.site.cluster or (known.cluster if known else "local")
        store = Store.create(Path(folder) / "store", **limits).of(cluster)
        store.write("jobs", pa.Table.from_pylist(list(rows), TABLES["jobs"].schema))
        if bindings:
            store.write("bindings", pa.Table.from_pylist(list(bindings), TABLES["bindings"].schema))
        if known is not None:
            store.write("bindings", known.read("bindings", among={"job_id": pa.array(sorted(set(ids)), pa.int64())}))
        with_gpus = [row for row in rows if row["gpu_count"]]
        here = site.but(store=store).at(site.now_s())
        if with_gpus:
            start_s = min(row["start_s"] or here.now_s() for row in with_gpus)
            end_s = max(row["end_s"] for row in with_gpus)
            _read_samples(here, with_gpus, start_s, min(end_s, here.now_s()), prometheus, show)
            summarize(store, config, start_s, end_s)
        return build(here, ids, is_bare=True)


def _bindings(job: QueuedJob, now_s: int) -> list[dict[str, Any]]:
    """The job's GPUs as rows of the table bindings; none if their indices cannot be read."""
    from telemetry.sources.hook_records import squeue_rows

    try:
        return squeue_rows(job, now_s)
    except ValueError:
        return []


def _read_samples(
    site: Site, rows: Sequence[dict[str, Any]], start_s: int, end_s: int, prometheus: Prometheus, show: Show | None
) -> None:
    """Read the samples of the jobs' own nodes and time into the site's store."""
    from telemetry.ingest import SourceSpan, ingest_all, prometheus_sources, show_nothing

    if not prometheus.servers:
        raise ConfigError("your configuration names no Prometheus", "an operator can set prometheus.url in it")
    quick: dict[str, Any] = {"retries": min(prometheus.retries, _RETRIES), "timeout_s": prometheus.timeout_s,
             "delay_s": prometheus.delay_s, "chunk_minutes": max(prometheus.chunk_minutes, _CHUNK_MINUTES)}  # fmt: skip
    section = replace(prometheus, **quick, more=tuple(replace(each, **quick) for each in prometheus.more))
    hosts = sorted({host for row in rows for host in expand(row["node_list"] or "")})
    spans = [SourceSpan(source, start_s, end_s) for source in prometheus_sources(site, section, hosts)]
    errors = [result.error for result in ingest_all(site.store, spans, show or show_nothing).values() if result.error]
    if errors and (
        len(spans) == 1 or len(set(site.store.read("telemetry", ["host"])["host"].to_pylist())) < len(hosts)
    ):
        raise errors[0]


def _so_far(context: JobContext, elapsed_s: int) -> JobContext:
    """The context as of a job without an end."""
    job = {**context.job, "end_s": None, "elapsed_s": elapsed_s}
    return replace(context, job=cast(JobRow, job), is_live=True)


def _load_falls(
    store: ClusterStore, jobs: Sequence[JobRow], metrics: Iterable[MetricsRow]
) -> dict[tuple[int, int], MfuFall]:
    """The falls of these runs. metrics: their rows of job_metrics. Without an MFU among them, nothing is read."""
    if not any(row.get("mfu_frac") for row in metrics):
        return {}
    users, first_s = sorted({job["user"] or "" for job in jobs}), min(job["submit_s"] for job in jobs)
    rows = load_history_table(store, COLUMNS, since_s=first_s - HISTORY_DAYS * DAY_S, user=users)
    wanted = {(job["job_id"], job["submit_s"]) for job in jobs}
    return {run: fall for run, fall in find_falls(plain_rows(rows)).items() if run in wanted}
