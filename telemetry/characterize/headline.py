"""This site's figures beside those that perlmutter-telemetry published."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import pyarrow as pa

from almanac.config import Config
from telemetry.characterize.relations import X, Y
from telemetry.characterize.table import Result, StudyTable, columns
from telemetry.characterize.usage import PAPER, largest_tier_names
from telemetry.store.cluster_store import ClusterStore

HEADLINE = "headline"
GENERATED_NOTE = (
    "This site is generated. Its shares are set by quota to the published ones, so most rows agree by "
    "construction. Correlations, shares of samples, and temporal imbalance follow from the generated samples, and "
    "some of them differ."
)
Read = Callable[[pd.DataFrame], tuple[float, int]]
"""From a table's rows to a figure and the number of jobs that it is of; 0 jobs: there is no figure."""


SHARE, RHO, PERCENT, HOURS, IMBALANCE = "share", "rho", "%", "h", "imbalance"
"""Units of findings: a share of 0..1, a correlation, percent, hours, an imbalance of 0..1."""


@dataclass(frozen=True)
class Finding:
    """A figure of the paper's text, and how it is read from one of our tables. published: None where it has none."""

    words: str
    section: str
    published: float | None
    table: str
    read: Read
    unit: str = SHARE


@dataclass(frozen=True)
class Compared:
    """A finding at this site. value: None where there is none, and why_null then says why; jobs: that it is of."""

    finding: Finding
    value: float | None
    jobs: int
    why_null: str | None = None


def _where(rows: pd.DataFrame, values: Mapping[str, object]) -> pd.DataFrame:
    """The rows whose columns have these values, or one of the values of a tuple."""
    for column, value in values.items():
        rows = rows[rows[column].isin(value if isinstance(value, tuple) else (value,))]
    return rows


def _share(of: Mapping[str, object], among: Mapping[str, object]) -> Read:
    """Jobs of the rows that hold `among` and `of`, by those of the rows that hold `among`."""

    def read(rows: pd.DataFrame) -> tuple[float, int]:
        base = _where(rows, among)
        jobs = int(base["jobs"].sum())
        return (float(_where(base, of)["jobs"].sum() / jobs) if jobs else math.nan), jobs

    return read


def value_of(column: str, **where: object) -> Read:
    """`column` of the rows that hold `where` (a tuple: any of its values); several rows are weighted by their jobs."""

    def read(rows: pd.DataFrame) -> tuple[float, int]:
        chosen = _where(rows, where)
        jobs = int(chosen["jobs"].sum())
        return (float((chosen[column] * chosen["jobs"]).sum(skipna=False) / jobs) if jobs else math.nan), jobs

    return read


def pipes_share(words: str, published: float, pipes: str) -> Finding:
    """Jobs that use exactly these pipes, among the jobs with data on every pipe."""
    # Of a job with an unknown pipe it cannot be said that it uses only others.
    among = {"rule": PAPER, "pipes_unknown": ""}
    return Finding(words, "IV-B", published, "fig02_pipe_mix", _share({"pipes": pipes}, among))


def _peaks(words: str, published: float | None, column: str, reserved: str = "all") -> Finding:
    read = value_of(column, is_largest_tier=True, reserved=reserved)
    return Finding(f"largest tier: HBM peak {words}", "IV-C", published, "fig03_hbm_peak_shares", read)


def _bound(words: str, published: float | None, class_by: str, counted_in: str) -> Finding:
    read = value_of("memory_share", class_by=class_by, counted_in=counted_in)
    return Finding(f"{counted_in} memory-bound by {words}", "V", published, "fig04_class_shares", read)


def _imbalance(word: str, published: float, util_pct: int, column: str) -> Finding:
    band = "below 30%" if util_pct == 0 else "from 70%"
    limit = "at least 0.7" if column == "share_at_least_70pct" else "below 0.3"
    section, table = ("VI", "fig06_spatial_shares") if word == "spatial" else ("VII", "fig07_temporal_shares")
    words = f"GPU_UTIL {band}: {word} imbalance {limit}"
    return Finding(words, section, published, table, value_of(column, gpu_util_from_pct=util_pct))


def _heatmap(words: str, published: float, bound: str, counter: str) -> Finding:
    read = value_of("spearman", counter=counter, **{"class": bound})
    return Finding(f"{bound}-bound: GPU_UTIL with {words} (rho)", "VIII-A", published, "fig10_correlations", read, RHO)


def _util_with(words: str, published: float, counter: str) -> Finding:
    read = value_of("spearman", counter_a="mean_gpu_util_pct", counter_b=counter)
    return Finding(f"GPU_UTIL with {words} (rho)", "VIII-B", published, "fig11_spearman", read, RHO)


FINDINGS = (
    Finding("jobs of 3 or 4 GPUs", "IV-A", 0.85, "fig01_job_size", _share({"gpus_from": 3}, {})),
    pipes_share("jobs that use only FP64", 0.44, "fp64"),
    pipes_share("jobs that use FP64 and tensor", 0.18, "fp64+tensor"),
    _peaks("below 20%", 0.12, "share_below_20pct"),
    _peaks("at or below 50%", 0.55, "share_at_most_50pct"),
    _peaks("at or below 50%, without preallocated", None, "share_at_most_50pct", "not preallocated"),
    _peaks("at least 80%", 0.20, "share_at_least_80pct"),
    _bound("FP64 intensity", 0.88, "fp64", "samples"),
    _bound("FP64 intensity", 0.81, "fp64", "jobs"),
    _bound("the pipe used most", None, "main pipe", "jobs"),
    Finding(
        "4-GPU jobs that never used three GPUs",
        "VI",
        0.12,
        "sec06_idle_gpus",
        _share({"idle_gpu_count": 3}, {"gpu_count": 4}),
    ),
    _imbalance("spatial", 0.165, 0, "share_at_least_70pct"),
    _imbalance("spatial", 0.971, 70, "share_below_30pct"),
    _imbalance("temporal", 0.663, 0, "share_at_least_70pct"),
    _imbalance("temporal", 0.889, 70, "share_below_30pct"),
    _heatmap("FP64", 0.508, "compute", X),
    _heatmap("DRAM", 0.102, "compute", Y),
    _heatmap("FP64", 0.513, "memory", X),
    _heatmap("DRAM", 0.570, "memory", Y),
    _util_with("power", 0.78, "energy_power_w"),
    _util_with("temperature", 0.77, "mean_temp_c"),
    _util_with("SM_ACTIVE", 0.76, "mean_sm_active_frac"),
    _util_with("DRAM_ACTIVE", 0.58, "mean_dram_active_frac"),
)
_SCHEMA = columns(
    ("finding", "text"),
    ("site_value", "real", "share of jobs or samples, or a correlation (rho)"),
    ("published_value", "real", "of perlmutter-telemetry; null: it has none"),
    ("jobs", "count", "jobs that the site's value is of"),
    ("why_null", "text", "why there is no value of the site"),
    ("from_table", "text"),
    ("section", "text", "of the paper"),
)


def headline(results: Mapping[str, Result], config: Config) -> Result:
    """One row per finding; the site's value is null, with a reason, where its table holds none."""
    rows = [
        (each.finding.words, each.value, each.finding.published, each.jobs, each.why_null, each.finding.table,
         each.finding.section)
        for each in compare(results, config, FINDINGS)
    ]  # fmt: skip
    made = pa.Table.from_pylist([dict(zip(_SCHEMA.names, row, strict=True)) for row in rows], schema=_SCHEMA)
    base = results["fig01_job_size"]
    table = StudyTable(HEADLINE, "", "This site beside the published figures", _SCHEMA, lambda jobs, config: jobs)
    return Result(table, made, base.jobs, base.left_out)


def note_on(store: ClusterStore) -> str:
    """A note on the comparison: GENERATED_NOTE for the site of `almanac demo`, else nothing."""
    return GENERATED_NOTE if store.watermark("generated") is not None else ""


def compare(results: Mapping[str, Result], config: Config, findings: Sequence[Finding]) -> list[Compared]:
    """What the tables of `characterize` say of each finding, in the order given."""
    return [Compared(finding, *_read(results[finding.table], finding, config)) for finding in findings]


def _read(result: Result, finding: Finding, config: Config) -> tuple[float | None, int, str | None]:
    if result.why_empty:
        return None, 0, result.why_empty
    if finding.table.startswith("fig03") and not largest_tier_names(config):
        return None, 0, "no memory tiers are configured"
    value, jobs = finding.read(result.rows.to_pandas())
    if not jobs:
        return None, 0, "no such jobs"
    return (None, jobs, "too few jobs, or a counter that does not vary") if math.isnan(value) else (value, jobs, None)
