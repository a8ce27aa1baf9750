"""The report of a job that still runs: its GPUs so far, from Prometheus, computed as those of an ended job."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from almanac.config import Config
from almanac.errors import ConfigError
from reports.job.context import JobContext, build
from reports.job.rows import JobRow
from telemetry.ingest import Advance, SourceSpan, ingest_all, show_nothing
from telemetry.metrics.summary import summarize
from telemetry.slurm.hostlist import expand
from telemetry.sources.live_jobs import LiveJob
from telemetry.sources.prometheus import PrometheusSource
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

Show = Callable[[str], AbstractContextManager[Advance]]
_RETRIES = 1
"""Retries of a failed query: somebody waits for the answer."""
_CHUNK_MINUTES = 1440
"""A query reads few hosts here, so it can read more hours; above max_samples it reads fewer."""


def live_contexts(
    jobs: Sequence[LiveJob],
    config: Config,
    now_s: int,
    *,
    known: ClusterStore | None = None,
    show: Show = show_nothing,
) -> list[JobContext]:
    """The contexts of running jobs, in their order, with figures up to now_s; without ranks and without advice.

    All is computed in a temporary store. known: the site's store, whose GPU bindings count too; nothing is written to
    it. Raises ConfigError if no Prometheus is configured, ServerError if it does not answer, StoreError.
    """
    if not jobs:
        return []
    with tempfile.TemporaryDirectory(prefix="almanac-running-") as folder:
        limits = {"memory_limit_mib": config.store.memory_limit_mib, "threads": config.store.threads}
        store = Store.create(Path(folder) / "store", **limits).of(jobs[0].cluster or "local")
        _write_jobs(store, jobs, now_s, known)
        with_gpus = [job for job in jobs if job.row["gpu_count"]]
        if with_gpus:
            _read_samples(store, with_gpus, config, now_s, show)
            summarize(store, config, min(job.row["start_s"] for job in jobs), _end_s(jobs, now_s))
        found = build(store, [job.job_id for job in jobs], config, now_s, is_bare=True)
        rows = {job.job_id: job.row for job in jobs}
        return [_so_far(context, rows[context.job_id]) for context in found]


def _end_s(jobs: Sequence[LiveJob], now_s: int) -> int:
    """Until when the jobs are looked at: now, and later where slurmctld's clock is ahead."""
    return max(now_s, 1 + max(int(job.row["start_s"]) for job in jobs))


def _write_jobs(store: ClusterStore, jobs: Sequence[LiveJob], now_s: int, known: ClusterStore | None) -> None:
    """The jobs as if they ended now, and which GPUs they have."""
    rows = [{**job.row, "end_s": _end_s([job], now_s)} for job in jobs]
    store.write("jobs", pa.Table.from_pylist(rows, TABLES["jobs"].schema))
    bindings = [dict(binding) for job in jobs for binding in job.bindings]
    if bindings:
        store.write("bindings", pa.Table.from_pylist(bindings, TABLES["bindings"].schema))
    if known is not None:
        ids = pa.array(sorted({job.job_id for job in jobs}), pa.int64())
        store.write("bindings", known.read("bindings", among={"job_id": ids}))


def _read_samples(store: ClusterStore, jobs: Sequence[LiveJob], config: Config, now_s: int, show: Show) -> None:
    if not config.prometheus.url:
        ids = ", ".join(job.shown_id for job in jobs[:4])
        raise ConfigError(
            f"job {ids} still runs, and your configuration names no Prometheus to read its figures from",
            "ask again after it ends; an operator can set prometheus.url in the configuration that users read",
        )
    section = config.prometheus
    prometheus = replace(
        section,
        delay_s=0,
        retries=min(section.retries, _RETRIES),
        chunk_minutes=max(section.chunk_minutes, _CHUNK_MINUTES),
    )
    source = PrometheusSource(prometheus, hosts=sorted({host for job in jobs for host in _hosts(job)}))
    span = SourceSpan(source, min(job.row["start_s"] for job in jobs), now_s)
    for result in ingest_all(store, [span], show).values():
        if result.error is not None:
            raise result.error


def _hosts(job: LiveJob) -> list[str]:
    try:
        return list(expand(job.row["node_list"] or ""))
    except ValueError:
        return []


def _so_far(context: JobContext, row: Any) -> JobContext:
    """The context as of a job without an end."""
    job = {**context.job, "end_s": None, "elapsed_s": row["elapsed_s"]}
    return replace(context, job=cast(JobRow, job), is_live=True)
