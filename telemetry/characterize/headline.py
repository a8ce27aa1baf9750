"""This site's figures beside those that perlmutter-telemetry published, for `characterize` and the site report."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources

import pandas as pd
import pyarrow as pa

from almanac.config import Config
from telemetry.characterize.table import Result, StudyTable, columns
from telemetry.characterize.usage import largest_tier_names
from telemetry.store.cluster_store import ClusterStore

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
_SCHEMA = columns(
    ("finding", "text"),
    ("site_value", "real"),
    ("published_value", "real", "of perlmutter-telemetry; null: it has none"),
    ("unit", "text", "share of jobs or samples, rho, %, h, or imbalance"),
    ("jobs", "count", "jobs that the site's value is of"),
    ("why_null", "text", "why there is no value of the site"),
    ("from_table", "text"),
    ("figure", "text", "of the paper"),
    ("section", "text", "of the paper"),
    ("is_main", "flag", "of the study's main findings"),
)


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
