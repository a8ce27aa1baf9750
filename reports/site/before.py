"""The span of equal length before that of a site report, and why it cannot be compared."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field

from almanac.units import DAY_S
from reports.site.faults import FAILED_AGAIN, ItemKey, SiteFaults, load_fault_hours
from reports.site.runs import site_runs
from reports.site.totals import Share, load_total
from telemetry.store.cluster_store import JOBS_FROM, ClusterStore
from telemetry.store.partitions import partition_start

MAX_COVERAGE_GAP = 0.1
"""Measured shares of GPU-hours that differ by more are not compared: the change would be one of the measurement."""


@dataclass(frozen=True)
class Before:
    """The span before. why_none: why nothing is compared; then the rest is empty.

    why_no_use: why only accounting is compared: GPU-hours, and failed runs. faults, items: GPU-hours; no entry: 0.
    """

    since_s: int
    until_s: int
    why_none: str = ""
    why_no_use: str = ""
    total: Share | None = None
    faults: Mapping[str, float] = field(default_factory=dict)
    items: Mapping[ItemKey, float] = field(default_factory=dict)

    @property
    def used(self) -> Share | None:
        """The totals, if use can be compared."""
        return None if self.why_no_use else self.total

    def knows(self, fault: str) -> bool:
        return self.total is not None and (not self.why_no_use or fault == FAILED_AGAIN)


def load_before(store: ClusterStore, span_s: tuple[int, int], now_s: int, total: Share, faults: SiteFaults) -> Before:
    """The span before, with the items of `faults`. Raises StoreError.

    Its jobs count if they had ended as long after it as has now passed since span_s: else it would have more long jobs.
    """
    since_s, until_s = span_s
    before_s = since_s - (until_s - since_s), since_s
    why_none = _why_none(store, before_s[0], min(until_s, now_s)) if total.jobs else "this span has no jobs"
    if why_none:
        return Before(*before_s, why_none=why_none)
    with site_runs(store, *before_s, ended_by_s=since_s + max(now_s - until_s, 0), has_gpu_rows=False) as db:
        earlier = load_total(db)
        by_fault, by_item = load_fault_hours(db, (item.user for item in faults.items))
    if not earlier.jobs:
        return Before(*before_s, why_none="no GPU job was submitted and ended in it")
    return Before(*before_s, "", _why_no_use(earlier, total), earlier, by_fault, by_item)


def _why_none(store: ClusterStore, since_s: int, until_s: int) -> str:
    """Why the store cannot know all jobs of both spans; files hold a day each."""
    files = store.files("jobs")
    first_s = max(partition_start(files[0]), store.watermark(JOBS_FROM) or 0) if files else until_s
    mark_s = store.watermark("sacct")
    if first_s > since_s + DAY_S:
        return f"the store has jobs from {_date(first_s)} on"
    if mark_s is not None and mark_s < until_s - DAY_S:
        return f"accounting was read up to {_date(mark_s)} only"
    return ""


def _why_no_use(before: Share, now: Share) -> str:
    shares = [each.measured_hours / each.hours if each.hours else 0.0 for each in (before, now)]
    if abs(shares[1] - shares[0]) <= MAX_COVERAGE_GAP:
        return ""
    return f"{100 * shares[0]:.0f}% of its GPU-hours were measured, and now {100 * shares[1]:.0f}% are"


def _date(time_s: int) -> str:
    return f"{dt.datetime.fromtimestamp(time_s, dt.UTC):%Y-%m-%d}"
