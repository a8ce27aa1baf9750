"""Metrics of jobs from telemetry files: preparation, the map over chunks, and the SQL of gpu_metrics and job_metrics.

`per_gpu` makes a row for each GPU (allocation) from merged partials, and `per_job` one for each job, with the roofline
class, the data quality, and the reasons for nulls. Relations: parts, energies (per allocation), spatial, intensity (per
job), allocations, models, jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import duckdb
import pyarrow as pa

from almanac.config import Config
from telemetry.attribution.allocations import Attribution, JobRun, match_days
from telemetry.attribution.seen_units import Binding
from telemetry.counters import GPU_METRICS, JOB_METRICS, PIPES
from telemetry.metrics import energy_chain, roofline
from telemetry.metrics.arrays import Rows, rows, run
from telemetry.metrics.data_quality import IDLE, LOW_COVERAGE, NO_TELEMETRY, OK, flat_sql, preallocated_sql, reasons_sql
from telemetry.metrics.frames import allocation_frame, attribute_jobs, job_frame, model_frame
from telemetry.metrics.inventory import Survey, survey
from telemetry.metrics.partials import (
    ALLOCATION,
    ENERGY,
    HISTOGRAM,
    WINDOWS,
    Mapper,
    MetricOptions,
    Partials,
    Progress,
    Work,
    map_partials,
    silent,
    split_files,
)
from telemetry.metrics.roofline import PIPE_USED_FRAC
from telemetry.metrics.use import MEANS

MS_PER_HOUR = 3_600_000
# Columns of partials that no later step needs.
_USED_UP = (
    *(f"{name}_{counter}" for counter in MEANS for name in ("sum", "missing", "missing_extra", "weight")),
    *(f"{name}_{pipe}" for pipe in PIPES for name in ("compute", "unknown", "unknown_ms", "last", "ridge")),
    *(f"{name}_{pipe}" for pipe in PIPES for name in ("clocked_mhz", "clocked_weight", "clock_mhz")),
    "missing_energy_mj",
)

_COUNTED = (*MEANS, "activity", "energy")

_IDLE_COVERAGE = 0.9
"""A GPU whose use is known for less of the time is not said to be idle: it may have worked while nobody looked."""
_ACTIVE_FRAC = 0.01
"""A GPU whose SMs or engine are this active on average is in use, whatever GPU_UTIL says."""

# A GPU is said to have a profiling fault from this many samples, and this share of the busy ones, on.
FAULT_SAMPLES, FAULT_SHARE = 3, 0.05


def each(template: str, names: tuple[str, ...]) -> str:
    return ", ".join(template.format(x=name) for name in names)


def _coverage(number: str) -> str:
    # least() passes over nulls: without the condition an unknown interval would look like full coverage.
    return f"CASE WHEN expected_samples > 0 THEN least(1.0, coalesce({number}, 0) / expected_samples) END"


def per_gpu(config: Config) -> str:
    """job, host, gpu, mig, the columns of GPU_METRICS, and raw_*: values whatever their coverage."""
    enough = f"{config.filters.min_coverage!r} * expected_samples"
    others = tuple(name for name in MEANS if name != "gpu_util_pct")
    return f"""
WITH raw AS ({_raw()})
SELECT * EXCLUDE ({", ".join(_USED_UP)}),
       {_coverage("samples")} AS coverage_frac, hbm_peak_mib / hbm_capacity_mib AS hbm_peak_frac,
       {flat_sql("steady_samples", "steady_low_mib", "hbm_peak_mib", "hbm_capacity_mib")} AS is_flat,
       {preallocated_sql("is_flat", "hbm_peak_mib", "hbm_capacity_mib")} AS is_preallocated,
       {each(f"CASE WHEN n_{{x}} >= {enough} THEN raw_{{x}} END AS mean_{{x}}", others)},
       {each(_reached(enough), PIPES)}, coalesce(clock_mhz_fp64, clock_mhz_tensor) IS NOT NULL AS has_peak_clock,
       CASE WHEN n_gpu_util_pct >= {enough} AND NOT {_ENGINE_STANDS_IN} THEN raw_gpu_util_pct END AS mean_gpu_util_pct,
       CASE WHEN mean_gpu_util_pct IS NOT NULL THEN n_gpu_util_pct
            WHEN mean_gr_engine_active_frac IS NOT NULL THEN n_gr_engine_active_frac ELSE 0 END AS n_use,
       CASE WHEN n_activity >= {enough} THEN raw_temporal END AS temporal_imbalance,
       {_energy("mig = ''", f"n_energy >= {enough}")},
       CASE WHEN n_hbm_used_mib >= {enough} THEN raw_growth END AS hbm_growth_mib_h,
       CASE WHEN n_activity >= {enough} AND (max_activity > 0 OR shown_frac >= {_ACTIVE_FRAC!r}) THEN false
            WHEN n_activity >= {_IDLE_COVERAGE!r} * floor(expected_samples) THEN max_activity = 0 END AS is_idle
FROM raw"""


def _reached(enough: str) -> str:
    """The share of a pipe's peak that a GPU reached: the mean of activity * clock, by the clock of the peak."""
    known = f"n_{{x}}_active_frac >= {enough} AND n_sm_clock_mhz >= {enough}"
    reached = "clocked_mhz_{x} / nullif(clocked_weight_{x} * clock_mhz_{x}, 0)"
    return f"CASE WHEN {known} THEN {reached} END AS reached_{{x}}"


# GPU_UTIL has holes that the engine's counter has not, or stands at 0 beside a busy engine. On MIG, see `samples`.
_ENGINE_STANDS_IN = f"""coalesce(mig = '' AND (
  (n_gpu_util_pct < {_IDLE_COVERAGE!r} * samples AND n_gr_engine_active_frac > n_gpu_util_pct)
  OR (raw_gpu_util_pct = 0 AND shown_engine_frac >= {_ACTIVE_FRAC!r})), false)"""


def _energy(*conditions: str) -> str:
    when = f"CASE WHEN {' AND '.join(conditions)} THEN"
    measured = "least(1.0, energy_measured_ms / energy_span_ms)"
    return f"""{when} raw_energy_j END AS energy_j, {when} raw_energy_power_w END AS energy_power_w,
       CASE WHEN energy_j IS NOT NULL THEN {measured} END AS energy_measured_frac"""


def _raw() -> str:
    numbers = each("samples - missing_{x} AS n_{x}", MEANS)
    weights = each("samples - missing_{x} + extra_weight - missing_extra_{x} AS weight_{x}", MEANS)
    mean = "CASE WHEN b.n_{x} > 0 THEN b.sum_{x} / b.weight_{x} END"
    of_slice = ("gpu_util_pct", "gr_engine_active_frac")
    means = each(f"{mean} AS raw_{{x}}", tuple(m for m in MEANS if m not in of_slice))
    # Without the slice's size, the engine's activity is a share of nobody knows what.
    has_size = "(mig = '' OR engines IS NOT NULL)"
    has_use = f"{has_size} OR b.n_sm_active_frac >= 0.9 * b.n_gpu_util_pct"
    return f"""
WITH b AS (SELECT *, sum_gpu_util_pct / weight_gpu_util_pct AS activity, n_gpu_util_pct AS n_activity
           FROM (SELECT *, {numbers}, {weights} FROM parts) JOIN allocations USING (allocation)
           LEFT JOIN energies USING (allocation))
SELECT b.* EXCLUDE (hbm_peak_ms), j.job_id, j.submit_s, 1000 * j.elapsed_s / interval_ms AS expected_samples,
       samples - missing_energy_mj AS n_energy,
       end_ms - start_ms AS energy_span_ms, raw_energy_j / energy_span_ms * 1000 AS raw_energy_power_w, {means},
       CASE WHEN {has_use} THEN {mean.format(x="gpu_util_pct")} END AS raw_gpu_util_pct,
       {mean.format(x="gr_engine_active_frac")} AS shown_engine_frac,
       CASE WHEN {has_size} THEN shown_engine_frac END AS raw_gr_engine_active_frac,
       greatest(raw_sm_active_frac, shown_engine_frac) AS shown_frac,
       CASE WHEN max_activity = 0 THEN 0.0 WHEN max_activity > 0
            THEN least(1.0, greatest(0.0, 1 - activity / max_activity)) END AS raw_temporal,
       CASE WHEN n_hbm_used_mib > 1 THEN hbm_slope / nullif(hbm_spread, 0) * {MS_PER_HOUR} END AS raw_growth,
       CASE WHEN hbm_peak_mib IS NOT NULL THEN start_ms + b.hbm_peak_ms END AS hbm_peak_ms,
       CASE WHEN busy_samples > 0 THEN fault_samples >= {FAULT_SAMPLES}
            AND fault_samples >= {FAULT_SHARE} * busy_samples END AS has_profiling_fault,
       {each("placed - unknown_{x} AS n_known_{x}, compute_{x} AS n_compute_{x}", PIPES)},
       {each("placed_until_ms - placed_from_ms - unknown_ms_{x} AS known_ms_{x}", PIPES)}
FROM b JOIN jobs j ON j.job = b.job"""


def per_job(config: Config) -> str:
    """The columns of JOB_METRICS, in steps: sums over GPUs, what follows from them, verdict, reasons."""
    filters = config.filters
    return f"""
WITH e AS ({_over_cards()}),
g AS ({_over_gpus()}),
windows AS ({_WINDOWS}),
known AS ({_known(filters.min_coverage)}),
derived AS ({_derived()}),
judged AS (
  SELECT *, CASE WHEN exclusion IS NOT NULL THEN exclusion
                 WHEN samples = 0 THEN '{NO_TELEMETRY}'
                 WHEN coverage_frac IS NULL OR coverage_frac < {filters.min_coverage!r} THEN '{LOW_COVERAGE}'
                 WHEN coalesce(mean_gpu_util_pct, 100 * mean_gr_engine_active_frac) < {filters.min_gpu_util_pct!r}
                   THEN CASE WHEN gpus_seen < gpu_count OR lowest_use_coverage < {_IDLE_COVERAGE!r}
                               OR 100 * shown_frac >= {filters.min_gpu_util_pct!r}
                             THEN '{LOW_COVERAGE}' ELSE '{IDLE}' END
                 ELSE '{OK}' END AS verdict
  FROM derived),
peaked AS (
  SELECT *, CASE WHEN verdict = '{OK}' AND coverage_hbm_used_mib >= {filters.min_coverage!r} THEN hbm_max_mib END
              AS hbm_peak_mib,
         CASE WHEN hbm_peak_mib IS NOT NULL THEN highest_share END AS hbm_peak_frac
  FROM judged)
SELECT *, {reasons_sql()} AS reasons FROM peaked ORDER BY job"""


def _over_gpus() -> str:
    """Means over GPUs of each GPU's mean (Cankur et al., eq. 8), without GPUs with low coverage.

    The peaks of a model do not hold for a MIG instance, so it has no flop/s and no bytes/s.
    """
    top = "ORDER BY hbm_peak_mib DESC NULLS LAST, host, gpu, mig"
    name = "host || ':' || gpu || CASE WHEN mig = '' THEN '' ELSE ':' || mig END"
    return f"""
SELECT p.job, count(*) AS gpus_seen, sum(samples) AS samples, max(hbm_peak_mib) AS hbm_max_mib,
       CASE WHEN count(hbm_peak_frac) = count(hbm_peak_mib) THEN max(hbm_peak_frac) END AS highest_share,
       CASE WHEN bool_or(is_preallocated) THEN true
            WHEN count(is_preallocated) = count(hbm_peak_mib) THEN bool_or(is_preallocated) END AS is_preallocated,
       first(is_flat {top}) AS is_flat,
       first(p.gpu_model {top}) AS gpu_model, first(hbm_capacity_mib {top}) AS hbm_capacity_mib,
       first(mig_profile {top}) AS mig_profile, bool_or(mig <> '') AS has_mig,
       min(hbm_peak_ms) FILTER (hbm_peak_mib = top_mib) AS hbm_peak_ms, max(raw_growth) AS raw_growth,
       {each("avg(mean_{x}) AS raw_{x}", tuple(name for name in MEANS if name != "gpu_util_pct"))},
       CASE WHEN count(mean_gpu_util_pct) > 0
            THEN avg(coalesce(mean_gpu_util_pct, 100 * mean_gr_engine_active_frac)) END AS raw_gpu_util_pct,
       min(coalesce({_coverage("n_use")}, 0)) AS lowest_use_coverage, avg(shown_frac) AS shown_frac,
       {each("sum(n_{x}) AS n_{x}", _COUNTED)},
       {each(f"sum({_coverage('n_{x}')}) AS covered_{{x}}", _COUNTED)},
       sum(coverage_frac) AS covered,
       max(temporal_imbalance) AS raw_temporal, max(window_ms) AS window_ms, max(max_activity) AS max_activity,
       max(max_temp_c) AS max_temp_c,
       bool_or(has_profiling_fault) AS has_profiling_fault,
       coalesce(list({name} ORDER BY host, gpu, mig) FILTER (is_idle), []) AS idle_gpus,
       sum(raw_dram_active_frac * m.hbm_bytes_per_s) AS raw_bytes_s,
       {each("sum(coalesce(reached_{x}, raw_{x}_active_frac) * m.{x}_flops) AS raw_flops_{x}", PIPES)},
       {each("avg(reached_{x}) AS reached_{x}", PIPES)}, bool_or(has_peak_clock) AS has_peak_clock,
       {each("sum(n_known_{x}) AS n_known_{x}, sum(n_compute_{x}) AS n_compute_{x}", PIPES)},
       {each("sum(known_ms_{x}) AS known_ms_{x}, sum(compute_ms_{x}) AS compute_ms_{x}", PIPES)}
FROM (SELECT *, max(hbm_peak_mib) OVER (PARTITION BY job) AS top_mib FROM per_gpu) p
LEFT JOIN models m ON m.gpu_model = p.gpu_model AND p.mig = '' GROUP BY p.job"""


def _over_cards() -> str:
    """The mean power of a job's cards. MIG instances repeat the counter of their card, so each card counts once.

    has_cards: whether the job has every instance of its cards.
    """
    names = ("raw_energy_power_w", "energy_resets", "energy_rejected", "energy_measured_ms")
    best = "ORDER BY raw_energy_power_w IS NULL, energy_measured_ms DESC, mig"
    return f"""
SELECT job, count(*) AS cards, bool_and(has_card) AS has_cards,
       avg(raw_energy_power_w ORDER BY host, gpu) AS raw_energy_power_w,
       {each("sum({x}) AS {x}", tuple(name for name in names if name != "raw_energy_power_w"))}
FROM (SELECT job, host, gpu, bool_and(has_card) AS has_card, {each(f"first({{x}} {best}) AS {{x}}", names)}
      FROM per_gpu GROUP BY job, host, gpu) GROUP BY job"""


_WINDOWS = """
SELECT job, sum(windows) AS windows, sum(active_windows) AS active_windows, sum(ratio_sum / gpus) AS even_windows
FROM spatial JOIN g USING (job) WHERE 2 * gpus > gpus_seen GROUP BY job"""
"""Windows of spatial imbalance: those in which more than half of the job's GPUs have samples."""


def _known(min_coverage: float) -> str:
    """Metrics, null if the share of known samples is smaller than min_coverage.

    Coverage is the mean over the job's GPUs, so that a GPU with many samples does not hide one without.
    """
    share = "CASE WHEN expected_samples > 0 THEN coalesce({}, 0) / greatest(gpu_count, gpus_seen) END"
    # If two GPUs each have just enough samples, and lost others independently, they have the square in common.
    common = min_coverage**2
    silent = "CASE WHEN cards = gpus_seen THEN greatest(0, j.gpu_count - gpus_seen) ELSE 0 END"
    coverages = each(f"{share.format('covered_{x}')} AS coverage_{{x}}", _COUNTED)
    placed = each(
        f"CASE WHEN coverage_{{x}}_active_frac >= {min_coverage!r} AND coverage_dram_active_frac >= {min_coverage!r}"
        " THEN n_known_{x} END AS placed_{x}",
        PIPES,
    )
    return f"""
SELECT *, {share.format("covered")} AS coverage_frac, {coverages}, {placed},
       {each(f"CASE WHEN coverage_{{x}} >= {min_coverage!r} THEN raw_{{x}} END AS mean_{{x}}", MEANS)},
       CASE WHEN coverage_activity >= {min_coverage!r} THEN raw_temporal END AS temporal_imbalance,
       coalesce(windows, 0) >= {common!r}::DOUBLE * 1000 * elapsed_s / window_ms AS is_compared,
       CASE WHEN coverage_activity >= {min_coverage!r} AND gpus_seen > 1 AND max_activity > 0 AND is_compared
            THEN greatest(0.0, (active_windows - even_windows) / windows) END AS spatial_imbalance,
       {_energy("has_cards", f"coverage_energy >= {min_coverage!r}")},
       CASE WHEN coverage_hbm_used_mib >= {min_coverage!r} THEN raw_growth END AS hbm_growth_mib_h
FROM (SELECT j.*, coalesce(gpus_seen, 0) AS gpus_seen, coalesce(samples, 0) AS samples,
             expected * greatest(j.gpu_count, coalesce(gpus_seen, 0)) AS expected_samples,
             w.windows AS spatial_windows, w.* EXCLUDE (job), i.* EXCLUDE (job),
             e.* EXCLUDE (job), elapsed_s * 1000 * (cards + {silent}) AS energy_span_ms,
             raw_energy_power_w * energy_span_ms / 1000 AS raw_energy_j,
             g.* EXCLUDE (job, gpus_seen, samples)
      FROM jobs j LEFT JOIN g USING (job) LEFT JOIN e USING (job)
      LEFT JOIN windows w USING (job) LEFT JOIN intensity i USING (job))"""


def _link_bytes(link: str) -> str:
    """Bytes of a job's GPUs over a link. A MIG instance has none of its own: its card's traffic is others', too."""
    both = f"mean_{link}_tx_bytes_s + mean_{link}_rx_bytes_s"
    return f"CASE WHEN NOT has_mig THEN ({both}) * gpus_seen * elapsed_s END"


def _derived() -> str:
    means = {pipe: f"mean_{pipe}_active_frac" for pipe in PIPES}
    any_known = f"coalesce({', '.join(means.values())}) IS NOT NULL"
    used = ", ".join(f"CASE WHEN {mean} > {PIPE_USED_FRAC!r} THEN '{pipe}' END" for pipe, mean in means.items())
    highest = f"greatest({', '.join(means.values())})"
    main = " ".join(f"WHEN {mean} = {highest} THEN '{pipe}'" for pipe, mean in means.items())
    known = f"SELECT *, CASE WHEN {highest} > {PIPE_USED_FRAC!r} THEN CASE {main} END END AS main_pipe FROM known"
    classes = each(
        "CASE WHEN placed_{x} IS NULL THEN NULL WHEN known_ms_{x} > 0 THEN compute_ms_{x} / known_ms_{x}"
        " END AS compute_frac_{x}, n_compute_{x} / nullif(placed_{x}, 0) AS compute_sample_frac_{x},"
        " nullif(placed_{x}, 0) AS placed_samples_{x},"
        " CASE WHEN coalesce(compute_frac_{x}, compute_sample_frac_{x}) > 0.5 THEN 'compute'"
        " WHEN coalesce(compute_frac_{x}, compute_sample_frac_{x}) IS NOT NULL THEN 'memory' END AS class_{x},"
        " CASE WHEN mean_{x}_active_frac IS NOT NULL THEN raw_flops_{x} END AS flops_{x},"
        " CASE WHEN mean_{x}_active_frac IS NOT NULL AND mean_dram_active_frac > 0 THEN raw_flops_{x} / raw_bytes_s END"
        " AS intensity_{x}",
        PIPES,
    )
    of_main = " ".join(f"WHEN '{pipe}' THEN class_{pipe}" for pipe in PIPES)
    reached = " ".join(f"WHEN '{pipe}' THEN reached_{pipe}" for pipe in PIPES)
    return f"""
SELECT *, {classes}, CASE main_pipe {of_main} END AS job_class,
       CASE WHEN mean_sm_clock_mhz IS NOT NULL THEN CASE main_pipe {reached} END END AS mfu_frac,
       CASE WHEN {any_known} THEN [x FOR x IN [{used}] IF x IS NOT NULL] END AS pipes_used,
       CASE WHEN mean_dram_active_frac IS NOT NULL THEN raw_bytes_s END AS hbm_bytes_s,
       {_link_bytes("nvlink")} AS nvlink_bytes, {_link_bytes("pcie")} AS pcie_bytes
FROM ({known})"""


@dataclass(frozen=True)
class Results:
    """Rows of the tables gpu_metrics and job_metrics. samples: of the span; those of no given job."""

    gpus: pa.Table
    jobs: pa.Table
    samples: int
    samples_without_job: int


ALWAYS = (-(2**40), 2**40)


@dataclass(frozen=True)
class Prepared:
    """The inputs of the partials of any chunk, and the end of the summary. Small: allocations and jobs, no samples."""

    work: Work
    jobs: pa.Table
    given: Sequence[JobRun]
    attribution: Attribution
    seen: Survey


def prepare(
    db: duckdb.DuckDBPyConnection,
    paths: Sequence[Path],
    jobs: Sequence[JobRun],
    bindings: Sequence[Binding],
    config: Config,
    counted_s: tuple[int, int] = ALWAYS,
    *,
    neighbors: Sequence[JobRun] = (),
    options: MetricOptions | None = None,
) -> Prepared:
    """Look through the files once: which GPUs there are, how often they were scraped, and whose they were.

    counted_s: the span in which samples are counted. neighbors: jobs without computed metrics, which may
    have had the same nodes.
    """
    counted_ms = (counted_s[0] * 1000, counted_s[1] * 1000)
    seen = survey(db, split_files(paths), counted_ms)
    seen = seen.named(match_days(seen.hosts(), [*jobs, *neighbors]))
    attribution = attribute_jobs(db, jobs, seen, bindings, config, neighbors)
    work = Work(seen.chunks, pa.table({}), options or MetricOptions(), counted_ms)
    return with_allocations(db, Prepared(work, pa.table({}), jobs, attribution, seen), config)


def with_allocations(db: duckdb.DuckDBPyConnection, prepared: Prepared, config: Config) -> Prepared:
    """Add the allocations of its attribution, and the frame of its jobs."""
    jobs, attribution, seen, work = prepared.given, prepared.attribution, prepared.seen, prepared.work
    allocations = allocation_frame(jobs, attribution, seen)
    frame = job_frame(jobs, attribution, seen, allocations, config.filters)
    return replace(prepared, work=replace(work, allocations=allocations), jobs=frame)


def compute(
    db: duckdb.DuckDBPyConnection,
    prepared: Prepared,
    config: Config,
    mapper: Mapper = map_partials,
    progress: Progress = silent,
) -> Results:
    """Metrics of what was prepared. mapper: where the chunks are computed."""
    return complete(db, prepared, mapper(db, prepared.work, progress), config)


def complete(db: duckdb.DuckDBPyConnection, prepared: Prepared, partials: Partials, config: Config) -> Results:
    """Metrics of every prepared job, also of those without any sample. partials: of all chunks, merged."""
    allocations = prepared.work.allocations
    given = {
        "spatial": _table(partials[WINDOWS]),
        "energies": energy_chain.energies(partials[ENERGY], allocations),
        "intensity": roofline.by_job(partials[HISTOGRAM]),
        "allocations": allocations,
        "models": model_frame(),
        "jobs": prepared.jobs,
    }
    for name, table in given.items():
        db.register(name, table)
    db.register("parts", _table(partials[ALLOCATION]))
    run(db, f"CREATE OR REPLACE TEMP TABLE per_gpu AS {per_gpu(config)}")
    db.unregister("parts")
    gpus = rows(db, f"SELECT {', '.join(GPU_METRICS.names)} FROM per_gpu ORDER BY job, host, gpu, mig")
    found = rows(db, per_job(config)).select(JOB_METRICS.names[:-1])
    found = found.append_column(JOB_METRICS.field("gpu_errors"), pa.nulls(found.num_rows, pa.list_(pa.string())))
    for name in given:
        db.unregister(name)
    run(db, "DROP TABLE per_gpu")
    samples = prepared.seen.counted
    return Results(gpus.cast(GPU_METRICS), found.cast(JOB_METRICS), samples, samples - partials.counted)


def _table(rows: Rows) -> pa.Table:
    """NaN becomes null."""
    return pa.table({name: pa.array(rows[name], from_pandas=True) for name in rows.kinds})
