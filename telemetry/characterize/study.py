"""The study of a site: its jobs, and why others are left out; every table of it; and the headline.

The headline has this site's figures and those that Cankur et al. published.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from almanac.config import Config
from almanac.errors import StoreError
from almanac.units import format_count
from slurm.states import PART_OF_JOB
from telemetry.characterize.relations import IMBALANCE_TABLES, RELATION_TABLES, ROOFLINE_TABLES
from telemetry.characterize.table import Result, StudyTable, columns
from telemetry.characterize.usage import USAGE, largest_tier_names
from telemetry.counters import AVERAGED, JOB_METRICS, PIPES
from telemetry.metrics.data_quality import NOT_SUMMARISED, OK
from telemetry.metrics.roofline import BINS
from telemetry.store.store import ClusterStore

PART_OF_A_JOB = "part of a job that was requeued or resized"
PROFILING_FAULT = "profiling counters read 0 while GPU_UTIL was high"

_USED = (
    "verdict", "reasons", "gpus_seen", "gpu_model", "hbm_capacity_mib", "hbm_peak_mib", "hbm_peak_frac",
    "is_preallocated", *(f"mean_{counter.column}" for counter in AVERAGED), "spatial_imbalance", "temporal_imbalance",
    "energy_j", "energy_power_w", "has_profiling_fault", "idle_gpus", "main_pipe", "job_class",
    *(f"{metric}_{pipe}" for pipe in PIPES
      for metric in ("class", "compute_sample_frac", "placed_samples", "intensity_bins")),
)  # fmt: skip
"""The metrics that tables are made of. For a million jobs, each number takes 8 MB."""

_KEY = ("job_id", "submit_s")
POPULATION = pa.schema(
    [
        *(JOB_METRICS.field(name).with_nullable(True) for name in _KEY),
        pa.field("state", pa.string()),
        pa.field("tier", pa.string()),
        pa.field("gpu_count", pa.int64()),
        pa.field("elapsed_s", pa.int64()),
        *(JOB_METRICS.field(name).with_nullable(True) for name in _USED),
    ]
)
"""Columns that `site-report --study` looks at: a job's size, time, tier and metrics."""

_SIZES = ("job_id", "submit_s", "state", "tier", "gpu_count", "gpu_count_req", "start_s", "end_s", "elapsed_s")
_METRICS = tuple(name for name in POPULATION.names if name in JOB_METRICS.names)
RUNS_SQL = """
FROM (
  SELECT *, coalesce(nullif(gpu_count, 0), gpu_count_req) AS gpus, coalesce(elapsed_s, end_s - start_s) AS ran_s
  FROM jobs WHERE start_s IS NOT NULL AND end_s IS NOT NULL) j
LEFT JOIN job_metrics m USING (job_id, submit_s)
WHERE j.gpus > 0"""
"""GPU jobs that have started and ended, with GPUs (gpus), run time (ran_s) and metrics (m), of two views."""
_JOIN = f"""
SELECT job_id, submit_s, j.state, j.tier, j.gpus AS gpu_count, j.ran_s AS elapsed_s,
       {", ".join(f"m.{name}" for name in _METRICS if name not in _KEY)}
{RUNS_SQL} AND hash(job_id, submit_s) % {10**6} < $per_million
"""
_LIBRARIES_MIB, _BYTES_A_JOB = 220, 1024
"""Memory of the tables: `site-report --study` of a million jobs takes about 1,200 MiB."""
_JOBS_AT_ONCE = 20_480
"""The histograms of this many jobs take about 20 MB."""
_HISTOGRAMS = {pipe: f"intensity_bins_{pipe}" for pipe in PIPES}
_REASON_END = "\n"


@dataclass(frozen=True)
class Population:
    """The jobs that tables are made of, and the sums of their intensity histograms.

    jobs: in the order of their keys, which are not columns. Numbers are float64, and NaN if missing. Columns are tier,
    gpu_count, the metrics, and:
    reasons: those of null metrics, one a line. intensity_bins_PIPE: 1 if the job has a histogram, else NaN.
    gpu_util_pct: mean GPU_UTIL, or without it (MIG) mean GR_ENGINE_ACTIVE as percent, as for the verdict.
    idle_gpu_count: GPUs never used; NaN unless every GPU of the job was seen, and its activity is known.
    excluded: the reason why no table has the job; empty if a table can have it.

    histograms: sums over the jobs that a table of profiling counters can use. Columns: pipe, gpu_model,
    hbm_capacity_mib (the largest), jobs, samples (an array, one count per bin). Several rows can have the same pipe and
    model.
    """

    jobs: pd.DataFrame
    histograms: pd.DataFrame

    def __len__(self) -> int:
        return len(self.jobs)


_Part = tuple[pa.Table, pd.DataFrame]
"""Some jobs without lists, in any order, and the sums of their histograms."""


def load_population(
    store: ClusterStore, since_s: int | None = None, until_s: int | None = None, at_most: int | None = None
) -> Population:
    """GPU jobs submitted in [since_s, until_s) that have started and ended, with their metrics.

    The metrics of a job without a summary are missing. Names no user. Histograms are summed as they are read, so a
    million jobs take about 0.5 GB. at_most: of more jobs, take an even sample of about this many, chosen by their ids.
    Raises StoreError, also if the tables of the jobs would take more memory than the store's limit.
    """
    with store.connect() as db:
        store.view(db, "jobs", _SIZES, since_s, until_s)
        store.view(db, "job_metrics", _METRICS, since_s, until_s)
        [(jobs,)] = db.sql(f"SELECT count(*) {RUNS_SQL}").fetchall()
        taken = jobs if at_most is None else min(jobs, at_most)
        _check_memory(taken, store.memory_limit_mib)
        found = db.sql(_JOIN, params={"per_million": 10**6 * taken // max(jobs, 1)})
        parts = [_reduced(POPULATION.empty_table())]
        parts += [_reduced(pa.Table.from_batches([batch])) for batch in found.to_arrow_reader(_JOBS_AT_ONCE)]
    return _joined(parts)


def population_of(jobs: pa.Table | pd.DataFrame) -> Population:
    """The population of jobs that are given with columns of POPULATION. A missing column is unknown for every job."""
    if isinstance(jobs, pd.DataFrame):
        schema = pa.schema([field for field in POPULATION if field.name in jobs.columns])
        jobs = pa.Table.from_pandas(jobs[schema.names], schema=schema, preserve_index=False)
    return _joined([_reduced(jobs)])


def jobs_within(limit_mib: int) -> int:
    """Return how many jobs `site-report --study` can use in a process with this limit; at least about 30,000."""
    return max(limit_mib - _LIBRARIES_MIB, 32) * 2**20 // _BYTES_A_JOB


def _check_memory(jobs: int, limit_mib: int) -> None:
    if jobs > jobs_within(limit_mib):
        needed_mib = _LIBRARIES_MIB + jobs * _BYTES_A_JOB // 2**20
        raise StoreError(
            f"the tables of {format_count(jobs)} jobs take about {format_count(needed_mib)} MiB of memory, more than"
            f" store.memory_limit_mib ({limit_mib})",
            "raise store.memory_limit_mib in the configuration, or choose a shorter span with -S and -E",
        )


def _reduced(given: pa.Table) -> _Part:
    """given: rows with columns of POPULATION."""
    columns: dict[str, Any] = {
        field.name: given[field.name].cast(field.type)
        if field.name in given.column_names
        else pa.chunked_array([pa.nulls(given.num_rows, field.type)])
        for field in POPULATION
    }
    excluded = _exclusions(columns.pop("state"), columns.pop("verdict"))
    sums = _histogram_sums(columns, excluded)
    for name in _HISTOGRAMS.values():
        columns[name] = pc.if_else(columns[name].is_valid(), pa.scalar(1.0), pa.scalar(None, pa.float64()))
    columns["idle_gpus"] = pc.list_value_length(columns["idle_gpus"])
    for name, column in columns.items():
        if pa.types.is_integer(column.type) and name not in _KEY:
            columns[name] = column.cast(pa.float64(), safe=False)
    reasons: Any = pc.binary_join(columns["reasons"], _REASON_END)
    columns["reasons"] = reasons.fill_null("").dictionary_encode()
    columns["excluded"] = excluded.dictionary_encode()
    # A column of a batch keeps the whole batch in memory, so copy the rows.
    return pa.table(columns).take(np.arange(given.num_rows)), sums


def _exclusions(state: Any, verdict: Any) -> Any:
    """`excluded` of jobs, from their columns."""
    is_ok = pc.equal(verdict, pa.scalar(OK))
    of_verdict = pc.if_else(is_ok, "", pc.binary_join_element_wise("verdict: ", verdict, ""))
    is_part = pc.is_in(state, value_set=pa.array(sorted(PART_OF_JOB)))
    return pc.if_else(is_part, PART_OF_A_JOB, pc.fill_null(of_verdict, NOT_SUMMARISED))


def _histogram_sums(columns: dict[str, Any], excluded: Any) -> pd.DataFrame:
    """`Population.histograms` of these jobs."""
    has_fault = pc.fill_null(columns["has_profiling_fault"], False)
    is_used = pc.and_(pc.equal(excluded, pa.scalar("")), pc.invert(has_fault))
    sums = []
    for pipe, name in _HISTOGRAMS.items():
        wanted = {key: columns[key] for key in (name, "gpu_model", "hbm_capacity_mib")}
        known = pa.table(wanted).filter(pc.and_(is_used, columns[name].is_valid()))
        counts: Any = known[name].combine_chunks()
        samples = counts.flatten().to_numpy().reshape(-1, BINS + 2)
        for model, group in known.drop_columns([name]).to_pandas().groupby("gpu_model"):
            largest_mib = group["hbm_capacity_mib"].max()
            sums.append((pipe, str(model), largest_mib, len(group), samples[group.index].sum(axis=0)))
    return pd.DataFrame(sums, columns=["pipe", "gpu_model", "hbm_capacity_mib", "jobs", "samples"])


def _joined(parts: list[_Part]) -> Population:
    """Of all jobs. Removes the parts from the list, so that only one column is in memory twice."""
    histograms = pd.concat([sums for _, sums in parts], ignore_index=True)
    rows = pa.concat_tables([part for part, _ in parts]).unify_dictionaries()
    parts.clear()
    order = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in _KEY])
    columns = {}
    for name in rows.column_names:
        columns[name] = rows[name].take(order).to_pandas()
        rows = rows.drop_columns([name])
    frame = pd.DataFrame(columns, copy=False)
    is_whole = (frame["gpus_seen"] == frame["gpu_count"]) & frame["temporal_imbalance"].notna()
    jobs = frame.drop(columns=[*_KEY, "gpus_seen", "elapsed_s", "idle_gpus"]).assign(
        gpu_util_pct=frame["mean_gpu_util_pct"].fillna(100 * frame["mean_gr_engine_active_frac"]),
        elapsed_h=frame["elapsed_s"] / 3600,
        gpu_hours=frame["gpu_count"] * frame["elapsed_s"] / 3600,
        idle_gpu_count=frame["idle_gpus"].where(is_whole),
    )
    return Population(jobs, histograms)


@dataclass(frozen=True)
class JobSelection:
    """The jobs that a table is made of, and the number of the others by reason; together they are all jobs.

    jobs: only the columns that the table reads.
    """

    jobs: pd.DataFrame
    left_out: dict[str, int]


def select(jobs: pd.DataFrame, table: StudyTable) -> JobSelection:
    """The jobs of a population that have what a table needs. Each other one counts once, by its first reason."""
    excluded = jobs["excluded"].value_counts().drop("", errors="ignore")
    counted = Counter({str(why): int(number) for why, number in excluded.items()})
    is_in = (jobs["excluded"] == "").to_numpy(copy=True)
    if table.is_profiled:
        has_fault = is_in & jobs["has_profiling_fault"].isin([True]).to_numpy()
        counted[PROFILING_FAULT] += int(has_fault.sum())
        is_in &= ~has_fault
    for metric in table.needs:
        is_null = is_in & jobs[metric].isna().to_numpy()
        for reasons, number in jobs.loc[is_null, "reasons"].value_counts().items():
            counted[_why_null(metric, str(reasons))] += int(number)
        is_in &= ~is_null
    if table.needs_any:
        is_missing = is_in & jobs[list(table.needs_any)].isna().all(axis=1).to_numpy()
        counted[f"not known: {', '.join(table.needs_any)}"] += int(is_missing.sum())
        is_in &= ~is_missing
    columns = list(dict.fromkeys((*table.needs, *table.needs_any, *table.reads)))
    left_out = {why: number for why, number in sorted(counted.items()) if number}
    return JobSelection(jobs.loc[is_in, columns].reset_index(drop=True), left_out)


def _why_null(metric: str, reasons: str) -> str:
    """The job's own reason for a metric that is null, such as "spatial_imbalance: one GPU"."""
    given = reasons.split(_REASON_END)
    return next((reason for reason in given if reason.startswith(f"{metric}: ")), f"{metric}: not known")


HEADLINE = "headline"
GENERATED_NOTE = (
    "This site is generated. Its shares are set by quota to the published ones, and its noise so that power, "
    "temperature, and the share of memory-bound samples come near, so most rows agree by construction. Other "
    "correlations and temporal imbalance follow from the generated samples, and some of them differ."
)
SHARE, PERCENT, HOURS = "share", "%", "h"


@dataclass(frozen=True)
class Finding:
    """A figure of the paper's text, and how it is read from the table of ours. findings.toml explains each field."""

    table: str
    section: str
    words: str
    published: float | None = None
    unit: str = SHARE
    where: Mapping[str, object] = field(default_factory=dict)
    value: str = ""
    share_of: Mapping[str, object] = field(default_factory=dict)
    is_main: bool = False

    def read(self, rows: pd.DataFrame) -> tuple[float, int]:
        """The site's figure, and the number of jobs that it is of; 0 jobs: there is no figure."""
        chosen = _where(rows, self.where)
        jobs = int(chosen["jobs"].sum())
        if self.share_of:
            met = _where(chosen, self.share_of)["jobs"].sum()
        else:
            met = (chosen[self.value] * chosen["jobs"]).sum(skipna=False)
        return (float(met / jobs) if jobs else math.nan), jobs


def _where(rows: pd.DataFrame, values: Mapping[str, object]) -> pd.DataFrame:
    """The rows whose columns have these values, or one of the values of a list."""
    for column, value in values.items():
        rows = rows[rows[column].isin(value if isinstance(value, list) else [value])]
    return rows


def _findings() -> tuple[Finding, ...]:
    text = (resources.files(__package__) / "findings.toml").read_text(encoding="utf-8")
    found = []
    for table, about in tomllib.loads(text).items():
        for each in about.pop("findings"):
            where = {**about.get("where", {}), **each.get("where", {})}
            found.append(Finding(table, **{**about, **each, "where": where}))
    return tuple(found)


FINDINGS = _findings()
_SCHEMA = columns(("finding", "text"), ("site_value", "real"),
                  ("published_value", "real", "of Cankur et al.; null: none published"),
                  ("unit", "text", "share of jobs or samples, rho, %, h, or imbalance"),
                  ("jobs", "count", "jobs that the site's value is of"),
                  ("why_null", "text", "why there is no value of the site"), ("from_table", "text"),
                  ("figure", "text", "of the paper"), ("section", "text", "of the paper"),
                  ("is_main", "flag", "of the study's main findings"))  # fmt: skip


def headline(results: Mapping[str, Result], config: Config) -> Result:
    """One row per finding; the site's value is null, with a reason, where its table holds none."""
    rows = []
    for finding in FINDINGS:
        result = results[finding.table]
        value, jobs, why_null = _read(result, finding, config)
        rows.append((finding.words, value, finding.published, finding.unit, jobs, why_null, finding.table,
                     result.table.figure, finding.section, finding.is_main))  # fmt: skip
    made = pa.Table.from_pylist([dict(zip(_SCHEMA.names, row, strict=True)) for row in rows], schema=_SCHEMA)
    base = results["fig01_job_size"]
    table = StudyTable(HEADLINE, "", "This site beside the published figures", _SCHEMA, lambda jobs, config: jobs)
    return Result(table, made, base.jobs, base.left_out)


def note_on(store: ClusterStore) -> str:
    """A note on the comparison: GENERATED_NOTE for the site of `almanac demo`, else nothing."""
    return GENERATED_NOTE if store.watermark("generated") is not None else ""


def _read(result: Result, finding: Finding, config: Config) -> tuple[float | None, int, str | None]:
    if result.why_empty:
        return None, 0, result.why_empty
    if finding.table.startswith("fig03") and not largest_tier_names(config):
        return None, 0, "no memory tiers are configured"
    value, jobs = finding.read(result.rows.to_pandas())
    if not jobs:
        return None, 0, "no such jobs"
    return (None, jobs, "too few jobs, or a counter that does not vary") if math.isnan(value) else (value, jobs, None)


TABLES: tuple[StudyTable, ...] = (*USAGE, *ROOFLINE_TABLES, *IMBALANCE_TABLES, *RELATION_TABLES)
"""Every table but the headline, which is read off these."""


def characterize(population: Population, config: Config) -> dict[str, Result]:
    """Every table by its name, "headline" last. A table without suitable jobs is empty, and says why."""
    results = {table.name: _result(table, population, config) for table in TABLES}
    return {**results, HEADLINE: headline(results, config)}


def _result(table: StudyTable, population: Population, config: Config) -> Result:
    selection = select(population.jobs, table)
    if selection.jobs.empty:
        return Result(table, table.schema.empty_table(), 0, selection.left_out, _why_empty(selection.left_out))
    given = population.histograms if table.is_of_histograms else selection.jobs
    frame = table.of(given, config)[table.schema.names]
    rows = pa.Table.from_pandas(frame, schema=table.schema, preserve_index=False).replace_schema_metadata(None)
    return Result(table, rows, len(selection.jobs), selection.left_out)


def _why_empty(left_out: dict[str, int]) -> str:
    """The commonest reason for which jobs that have a verdict were left out, else for which any were."""
    if not left_out:
        return "there are no jobs"
    reasons = [why for why in left_out if not why.startswith("verdict: ")] or list(left_out)
    return max(reasons, key=lambda why: left_out[why])
