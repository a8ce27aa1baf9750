"""What to do next after each of many jobs, in a few words, from the rules of the job report.

Only the job's own row and its family's peaks count: no model and no samples are read. So there is no advice from the
memory bound, and the report can say more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pyarrow as pa

from almanac.config import Tier
from reports.job.context import JobContext
from reports.job.facts import Facts, facts_of
from reports.job.rows import JobRow, MetricsRow
from reports.job.rules import RuleSet, first_of_topics, packaged
from reports.job.site_choices import SiteChoices
from telemetry.job_selection import History, plain_rows

COLUMNS = (
    "user", "name_key", "state", "exit_code", "exit_signal", "start_s", "end_s", "elapsed_s", "time_limit_s",
    "gpu_count", "gpu_count_alloc", "unasked_gpu_count", "verdict",
    "coverage_frac", "has_profiling_fault", "gpus_seen", "idle_gpus", "mean_gpu_util_pct",
    "mean_gr_engine_active_frac", "spatial_imbalance", "temporal_imbalance", "is_preallocated", "hbm_peak_mib",
    "hbm_peak_frac", "hbm_evidence", "hbm_max_mib", "hbm_capacity_mib", "main_pipe", "job_class",
    "mean_dram_active_frac",
    "mean_tensor_active_frac", "mean_fp64_active_frac", "mean_fp32_active_frac", "mean_fp16_active_frac",
)  # fmt: skip
"""The columns of telemetry.history.HISTORY that a row needs."""
NO_EVIDENCE = "no evidence"

Row = Mapping[str, Any]
Family = tuple[str, str, int]
FAMILY = ("user", "name_key", "gpu_count")


def next_steps(
    rows: Sequence[Row], tiers: Sequence[Tier], history: History, since_s: int, rules: RuleSet | None = None
) -> list[str]:
    """For each row, the short text of the most important rule with advice; without one, why; else "".

    rows: with COLUMNS. history: the jobs that the caller may see. A smaller tier is suggested only if it holds the
    highest sample of all runs of the job's family since since_s, failed runs and reserved memory included.
    rules: the site's; None: the packaged ones.
    """
    site = SiteChoices(rules or packaged())
    found = [_facts(row, tiers, None, site) for row in rows]
    asking = [row for row, facts in zip(rows, found, strict=True) if _may_use_smaller(facts)]
    peaks = _family_peaks(asking, history, since_s) if asking else {}
    return [_short(_facts(row, tiers, peaks.get(_family(row)), site)) for row in rows]


def _family(row: Row) -> Family:
    return row["user"], row["name_key"], row["gpu_count"]


def _facts(row: Row, tiers: Sequence[Tier], highest_mib: float | None, site: SiteChoices) -> Facts:
    """The facts that the rules test. highest_mib: of the job's family; None if that is not known."""
    metrics = {name: value for name, value in row.items() if name in MetricsRow.__annotations__}
    if row.get("hbm_evidence") in ("telemetry", "jobstats"):
        metrics["is_preallocated"] = False
    if highest_mib is not None and metrics.get("hbm_peak_mib") is not None:
        metrics["hbm_peak_mib"] = max(highest_mib, row["hbm_peak_mib"])
    context = JobContext(
        cluster="",
        now_s=0,
        job=cast(JobRow, {**dict.fromkeys(JobRow.__annotations__), **row, **_gpus(row)}),
        metrics=cast(MetricsRow, metrics),
        gpus=(),
        series=None,
        ranks={},
        advice=None,
        tiers=tuple(tiers),
        site=site,
    )
    facts = facts_of(context)
    return Facts({**facts.values, "tier_reason": NO_EVIDENCE}, facts.words, facts.rules)


def _gpus(row: Row) -> dict[str, int | None]:
    """GPU counts that the job was given and asked for; None for the latter in lists that older releases published."""
    given, unasked = row["gpu_count_alloc"] or row["gpu_count"], row["unasked_gpu_count"]
    return {"gpu_count": given, "gpu_count_req": None if unasked is None else given - unasked}


def _may_use_smaller(facts: Facts) -> bool:
    return any(rule.name == "memory_spare" for rule in first_of_topics(facts.rules.rules, facts.values))


def _family_peaks(rows: Sequence[Row], history: History, since_s: int) -> dict[Family, float]:
    """The highest sample of each row's family, in MiB."""
    among = {name: pa.array(sorted({row[name] for row in rows}), pa.string()) for name in ("user", "name_key")}
    runs = history([*FAMILY, "hbm_max_mib"], since_s, None, None, among)
    highest = plain_rows(runs.group_by(list(FAMILY)).aggregate([("hbm_max_mib", "max")]))
    return {_family(row): row["hbm_max_mib_max"] for row in highest if row["hbm_max_mib_max"] is not None}


def _short(facts: Facts) -> str:
    found = [rule for rule in first_of_topics(facts.rules.rules, facts.values) if rule.short]
    found.sort(key=lambda rule: not rule.advice)
    return next((text for rule in found if (text := rule.short.format_map(facts.words))), "")
