"""The generated site as a source, like sacct and Prometheus on a real one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from almanac.records import Counts
from demo.plan import SitePlan, jobs_table, plan_site, truth_table
from demo.rows import iterate_hours
from demo.shape import SiteShape
from telemetry.sources.base import RowBatch


def generate_jobs(shape: SiteShape) -> pa.Table:
    """Accounting at the end of the span, columns of schema JOBS."""
    return jobs_table(plan_site(shape))


def generate_truth(shape: SiteShape) -> pa.Table:
    """What accounting does not say of the same jobs (see `plan.truth_table`)."""
    return truth_table(plan_site(shape))


def generate_telemetry(plan: SitePlan) -> Iterator[pa.Table]:
    """Telemetry hour by hour, columns of schema TELEMETRY, each table by host, gpu, mig and time_ms."""
    for _, rows in iterate_hours(plan, plan.shape.start_s, plan.shape.end_s):
        yield rows


@dataclass(frozen=True)
class GeneratedSource:
    """The site of `shape`. Reading a span again gives the same rows."""

    shape: SiteShape
    name = "generated"

    @cached_property
    def plan(self) -> SitePlan:
        return plan_site(self.shape)

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        """Jobs as accounting has them at until_s, where they touch the span; then the telemetry hour by hour."""
        until_s = min(until_s, self.shape.end_s)
        rows = jobs_table(self.plan, until_s)
        yield _batch("jobs", rows.filter((pc.field("end_s") >= since_s) | pc.field("end_s").is_null()), None)
        for end_s, table in iterate_hours(self.plan, since_s, until_s):
            if len(table) or end_s == until_s:
                yield _batch("telemetry", table, end_s)


def _batch(table: str, rows: pa.Table, watermark_s: int | None) -> RowBatch:
    return RowBatch(table, rows, Counts(seen=len(rows), kept=len(rows)), watermark_s)
