"""The data behind a job's report, from the store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pyarrow as pa

from advisor.decisions.packing import PackingAdvice
from almanac.config import Config, Tier
from almanac.hardware import GpuModel, gpu_models
from almanac.mig import engines_of
from almanac.records import Advice
from almanac.units import DAY_S, format_job_id
from reports.job.ranks import Rank, SiteFigures, span_of
from reports.job.rows import GpuRow, JobRow, MetricsRow
from reports.job.series import GpuSeries, SeriesRequest, load_series
from reports.job.site_choices import SiteChoices, choices_of
from telemetry.history import UserHistories, load_history
from telemetry.job_selection import plain_rows
from telemetry.metrics.data_quality import NOT_SUMMARISED
from telemetry.store.cluster_store import ClusterStore
from telemetry.unasked_gpus import unasked_gpus

if TYPE_CHECKING:
    import pandas as pd

_Row = TypeVar("_Row", JobRow, MetricsRow, GpuRow)


REQUEUED_WITHIN_S = DAY_S
"""Slurm takes no longer to end a run and to submit it again, and gives no number again so soon."""


@dataclass(frozen=True)
class JobContext:
    """One job. job: its last run in the table jobs. metrics: its row of job_metrics; {} if it has none.

    gpus: its rows of gpu_metrics, sorted by host, gpu, and mig. series: None without samples. ranks: by column of
    job_metrics. advice: what `almanac advise` would say now about the same submission; None if the job never started,
    if it was packed, or if other jobs were not read. earlier_runs: earlier rows of the same job id, oldest first, from
    requeues. site: what the site adds to the report.
    is_live: the job still runs, and the figures are those so far. packing: which jobs like this one can share a GPU;
    None: none, or not known.
    """

    cluster: str
    now_s: int
    job: JobRow
    metrics: MetricsRow
    gpus: tuple[GpuRow, ...]
    series: GpuSeries | None
    ranks: Mapping[str, Rank]
    advice: Advice | None
    tiers: tuple[Tier, ...]
    earlier_runs: tuple[JobRow, ...] = ()
    site: SiteChoices = field(default_factory=SiteChoices)
    is_live: bool = False
    packing: PackingAdvice | None = None

    @property
    def job_id(self) -> int:
        return int(self.job["job_id"])

    @property
    def shown_id(self) -> str:
        return format_job_id(self.job)

    @property
    def user(self) -> str:
        return self.job["user"] or ""

    @property
    def is_array(self) -> bool:
        """Whether the job is a task of a job array."""
        return self.job["array_job_id"] is not None

    @property
    def data_quality(self) -> str:
        """Whether the job's data can be used: the column `verdict` of job_metrics, or NOT_SUMMARISED."""
        return self.metrics.get("verdict") or NOT_SUMMARISED

    @property
    def gpu_count(self) -> int:
        """Allocated GPUs; requested GPUs if the job never started, or if its allocation is not known."""
        given = self.job["gpu_count"]
        return (
            given if given is not None and self.job["start_s"] is not None else given or self.job["gpu_count_req"] or 0
        )

    @property
    def unasked_gpus(self) -> int | None:
        """Allocated GPUs that the job did not ask for; None if that is not known."""
        return unasked_gpus(
            *(self.job[name] for name in ("gpu_count", "gpu_count_req", "node_count", "node_count_req"))
        )

    @property
    def elapsed_s(self) -> int | None:
        start_s, end_s = self.job["start_s"], self.job["end_s"]
        known: int | None = self.job["elapsed_s"]
        return end_s - start_s if known is None and start_s is not None and end_s is not None else known

    @property
    def gpu_hours(self) -> float | None:
        return None if self.elapsed_s is None else self.gpu_count * self.elapsed_s / 3600

    @property
    def cpu_use(self) -> float | None:
        """The share of its CPUs' time that the job used; above 1 where Slurm does not confine jobs to their CPUs."""
        cpu_s, cpus, elapsed_s = self.job["cpu_time_s"], self.job["cpu_count"], self.elapsed_s
        return None if cpu_s is None or not cpus or not elapsed_s else cpu_s / (cpus * elapsed_s)

    @property
    def is_mig(self) -> bool:
        """Whether the job had parts of GPUs. The peaks and the memory of a whole GPU do not apply to it then."""
        return bool(self.metrics.get("mig_profile")) or any(row["mig"] for row in self.gpus)

    @property
    def model(self) -> GpuModel | None:
        return gpu_models().get(self.metrics.get("gpu_model") or "")


def build(
    store: ClusterStore,
    job_ids: Sequence[int],
    config: Config,
    now_s: int,
    *,
    has_series: bool = True,
    is_bare: bool = False,
    user: str | None = None,
) -> list[JobContext]:
    """The contexts of these jobs, in their order, without ids that the store does not have.

    Reads every table once for all jobs. has_series: also read samples, for charts. is_bare: do not read other jobs, so
    there are no ranks and no advice. user: only this user's jobs, because Slurm can reuse job ids. Raises StoreError.
    """
    runs = _runs(store, job_ids, user)
    chosen = [runs[job_id] for job_id in dict.fromkeys(job_ids) if job_id in runs]
    return _build(store, chosen, config, now_s, has_series, is_bare)


def build_runs(
    store: ClusterStore,
    wanted: Sequence[tuple[int, int]],
    config: Config,
    now_s: int,
    *,
    has_series: bool = True,
    is_bare: bool = False,
) -> list[JobContext]:
    """The contexts of runs (job_id, submit_s), which need not be the last runs of their jobs. Raises StoreError."""
    runs = _runs(store, [job_id for job_id, _ in wanted])
    chosen = [[row for row in runs.get(job_id, ()) if row["submit_s"] <= submit_s] for job_id, submit_s in wanted]
    known = [rows for rows, key in zip(chosen, wanted, strict=True) if rows and _key(rows[-1]) == key]
    return _build(store, known, config, now_s, has_series, is_bare)


def _build(
    store: ClusterStore,
    runs: Sequence[Sequence[JobRow]],
    config: Config,
    now_s: int,
    has_series: bool,
    is_bare: bool,
) -> list[JobContext]:
    """The context of each job's last run. runs: all runs of each job, oldest first."""
    jobs = [each[-1] for each in runs]
    if not jobs:
        return []
    metrics = {key: rows[0] for key, rows in _by_run(store, "job_metrics", MetricsRow, jobs).items()}
    gpus = _by_run(store, "gpu_metrics", GpuRow, jobs)
    wanted = [_wanted(job, metrics.get(_key(job), {}), gpus.get(_key(job), [])) for job in jobs]
    advices, packing = ({}, {}) if is_bare else _advise(store, jobs, config, now_s)
    found = load_series(store, wanted) if has_series else [None] * len(jobs)
    choices = choices_of(config)
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
            tiers=config.tiers,
            earlier_runs=_requeued(earlier, job),
            site=choices,
            packing=packing.get(_key(job)),
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


def _requeued(earlier: Sequence[JobRow], job: JobRow) -> tuple[JobRow, ...]:
    """The runs before this one of the same job: each was requeued, and its end is when the next one was submitted.

    Slurm gives numbers again, so that any other run is of another job, even if it is the same user's.
    """
    found: list[JobRow] = []
    for row in reversed([row for row in earlier if row["user"] == job["user"]]):
        next_s = (found[-1] if found else job)["submit_s"]
        if abs(next_s - (row["end_s"] or next_s)) > REQUEUED_WITHIN_S:
            break
        found.append(row)
    return tuple(reversed(found))


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
    )


def _advise(
    store: ClusterStore, jobs: Sequence[JobRow], config: Config, now_s: int
) -> tuple[dict[tuple[int, int], Advice], dict[tuple[int, int], PackingAdvice]]:
    """What `almanac advise` would say now about the same submission, by run (job_id, submit_s); and of packing it."""
    # `almanac jobs` needs the class JobContext alone, and these imports take 0.3 s.
    from advisor.artefacts import load
    from advisor.evaluation.recorded import recorded_requests
    from advisor.lifecycle import trusted
    from advisor.service import advise_many
    from reports.job.packing import packing_by_run

    history = _history(store, sorted({job["user"] or "" for job in jobs}))
    keys = list(zip(history["job_id"].tolist(), history["submit_s"].tolist(), strict=True))
    # The tier of a packed job has to hold all its tasks. One without a GPU or a tier in its request chose none.
    wanted = {_key(job) for job in jobs if not job["is_packed"] and (job["gpu_count_req"] != 0 or job["tier"])}
    chosen = [place for place, key in enumerate(keys) if key in wanted]
    requests = recorded_requests(history.iloc[chosen], config.tiers)
    trained = trusted(load(store.models_dir), config, now_s)
    said = advise_many(requests, history, trained, config, now_s)
    advices = {keys[place]: advice for place, advice in zip(chosen, said, strict=True)}
    return advices, packing_by_run(advices, history, trained, config, now_s)


def _history(store: ClusterStore, users: Sequence[str]) -> pd.DataFrame:
    """All jobs of these users."""
    if len(users) == 1:
        return load_history(store, user=users[0], running=True)
    histories = UserHistories(store)
    try:
        return histories.of(users)
    finally:
        histories.close()
