"""A user's week in figures: totals, earlier weeks, best jobs, and possible savings.

docs/formulas.md has the formulas, under the weekly digest.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

import pyarrow.compute as pc

from advisor.memory.runs import SPIKE_MARGIN
from almanac.config import Config
from almanac.units import DAY_S
from reports.mail.families import DigestJob
from slurm.states import ENDED_WELL, USER_FAILED
from telemetry.history import load_history_table
from telemetry.metrics.data_quality import IDLE, OK
from telemetry.store.store import JOBS_FROM, ClusterStore

WEEK_S = 7 * DAY_S
LATE_S = 600
"""Seconds by which slurmdbd may learn late that a job ended."""
WEEKS_BEFORE = 4
LONGEST_DAYS = 60
"""Most days from submission to end; a digest leaves out jobs that waited and ran longer."""
NAMED = 3
"""Most best jobs that a digest lists."""
WELL_USED_PCT = 70.0
"""Mean GPU_UTIL above which a job counts as well used (Cankur et al., VI)."""
MIN_COVERAGE = 0.9
MIN_ELAPSED_S = 180
"""Least run time that counts, as in the rules idle_gpus and all_idle of reports/job/rules.toml."""


class WeekRow(TypedDict):
    """A row of telemetry.history, with the columns that a digest needs. Missing values are None."""

    job_id: int
    submit_s: int
    end_s: int
    elapsed_s: float | None
    gpu_count: int
    state: str
    tier: str | None
    verdict: str
    coverage_frac: float | None
    mean_gpu_util_pct: float | None
    hbm_peak_mib: float | None
    hbm_evidence: str
    idle_gpu_count: int | None
    has_profiling_fault: bool | None
    energy_j: float | None


@dataclass(frozen=True)
class WeekSpan:
    """The time [start_s, end_s). name: the ISO week, "2026-W47"."""

    name: str
    start_s: int
    end_s: int


@dataclass(frozen=True)
class Totals:
    """Totals of some jobs. util_pct: mean over the jobs with a known value, weighted by GPU-hours.

    measured_hours: the GPU-hours of these. energy_j: sum over the jobs with a known value. Both means and sums are None
    if no job has one. failed: jobs that ended in a state that means failure.
    """

    jobs: int
    gpu_hours: float
    measured_hours: float
    util_pct: float | None
    energy_j: float | None
    failed: int


@dataclass(frozen=True)
class Saving:
    """GPU-hours that could be saved, and in how many jobs."""

    jobs: int
    gpu_hours: float


@dataclass(frozen=True)
class Week:
    """A user's week. before: totals of at most WEEKS_BEFORE weeks, oldest first. runs: (job_id, submit_s) of its jobs.

    idle: GPU-hours on GPUs that did nothing. tier: GPU-hours of other GPUs on a larger memory tier than needed. No
    GPU-hour counts twice.
    """

    span: WeekSpan
    totals: Totals
    before: tuple[tuple[WeekSpan, Totals], ...]
    runs: tuple[tuple[int, int], ...]
    idle: Saving
    tier: Saving


def last_week(now_s: int, weeks_ago: int = 0) -> WeekSpan:
    """The last whole week, Monday to Sunday (UTC, ISO 8601), or one so many before it."""
    today = dt.datetime.fromtimestamp(now_s, dt.UTC).date()
    monday = today - dt.timedelta(days=today.weekday() + 7 * (weeks_ago + 1))
    start_s = int(dt.datetime(monday.year, monday.month, monday.day, tzinfo=dt.UTC).timestamp())
    year, week, _ = monday.isocalendar()
    return WeekSpan(f"{year}-W{week:02d}", start_s, start_s + WEEK_S)


def is_known(store: ClusterStore, config: Config, week: WeekSpan, now_s: int) -> bool:
    """Return True if the store has all jobs of the week, with their metrics; always one day after the week."""
    if now_s >= week.end_s + DAY_S:
        return True
    marks_s = [(store.watermark("sacct") or 0) - LATE_S]
    if config.prometheus.servers:
        marks_s.append(store.telemetry_mark(config.prometheus.source_names) or 0)
    days = range(week.start_s // DAY_S, week.end_s // DAY_S)
    return min(marks_s) >= week.end_s and not any(day in days for day in store.peek_open_days())


def week_of(store: ClusterStore, user: str, config: Config, now_s: int) -> Week | None:
    """The user's GPU jobs that ended in the last whole week; None if none did. Raises StoreError."""
    spans = [last_week(now_s, ago) for ago in range(WEEKS_BEFORE, -1, -1)]
    since_s = spans[0].start_s - LONGEST_DAYS * DAY_S
    known = load_history_table(store, tuple(WeekRow.__annotations__), since_s, spans[-1].end_s, user)
    rows = cast(list[WeekRow], known.to_pylist())
    by_span = [[row for row in rows if span.start_s <= row["end_s"] < span.end_s] for span in spans]
    own = by_span[-1]
    if not own:
        return None
    known_s = _known_since(store, since_s, spans[-1].start_s)
    return Week(
        span=spans[-1],
        totals=totals_of(own),
        before=tuple(
            (span, totals_of(part))
            for span, part in zip(spans[:-1], by_span[:-1], strict=True)
            if span.start_s >= known_s
        ),
        runs=tuple((row["job_id"], row["submit_s"]) for row in own),
        idle=_saving(idle_gpu_hours(row) for row in own),
        tier=_saving(tier_gpu_hours(row, config) for row in own),
    )


def _known_since(store: ClusterStore, since_s: int, until_s: int) -> float:
    """The first end of any user's job among those submitted in between; infinite without one. Weeks whose jobs were
    removed are not known.

    The store knows nothing about earlier times, so an earlier week is unknown rather than empty.
    """
    first_s = pc.min(store.read("jobs", ["end_s"], since_s, until_s)["end_s"]).as_py()
    return math.inf if first_s is None else float(max(first_s, store.watermark(JOBS_FROM) or 0))


def gpu_hours(row: WeekRow) -> float:
    return float(row["gpu_count"]) * (row["elapsed_s"] or 0.0) / 3600


def totals_of(rows: Sequence[WeekRow]) -> Totals:
    assessed = [row for row in rows if row["verdict"] in (OK, IDLE)]
    used = [(row["mean_gpu_util_pct"], gpu_hours(row)) for row in assessed if row["mean_gpu_util_pct"] is not None]
    weight = sum(hours for _, hours in used)
    energies = [row["energy_j"] for row in rows if row["energy_j"] is not None]
    return Totals(
        jobs=len(rows),
        gpu_hours=sum(map(gpu_hours, rows)),
        measured_hours=weight,
        util_pct=sum(util * hours for util, hours in used) / weight if weight else None,
        energy_j=sum(energies) if energies else None,
        failed=sum(row["state"] in USER_FAILED for row in rows),
    )


def idle_gpu_hours(row: WeekRow) -> float:
    """GPU-hours on GPUs that did nothing in the whole job; 0 unless that is certain."""
    if row["has_profiling_fault"] or (row["elapsed_s"] or 0) < MIN_ELAPSED_S:
        return 0.0
    if row["verdict"] == IDLE:
        return gpu_hours(row)
    is_measured = row["verdict"] == OK and (row["coverage_frac"] or 0) >= MIN_COVERAGE
    return gpu_hours(row) * float(row["idle_gpu_count"] or 0) / float(row["gpu_count"]) if is_measured else 0.0


def tier_gpu_hours(row: WeekRow, config: Config) -> float:
    """GPU-hours on the requested tier, if a smaller tier would have held the peak with the margins of the advice.

    Leaves out idle_gpu_hours, which count already. 0 if the peak does not show the need: the peak is unknown, the job
    failed, or it was too short to allocate all its memory.
    """
    asked = next((tier.capacity_mib for tier in config.tiers if tier.name == row["tier"]), None)
    peak_mib, advice = row["hbm_peak_mib"], config.advice
    is_telling = row["state"].startswith(ENDED_WELL) and (row["elapsed_s"] or 0) >= MIN_ELAPSED_S
    is_telling &= row.get("hbm_evidence") != "unclear"
    if asked is None or peak_mib is None or not is_telling:
        return 0.0
    need_mib = peak_mib * (1 + SPIKE_MARGIN) + advice.headroom_mib
    is_held = any(need_mib <= tier.capacity_mib < asked for tier in config.tiers)
    return gpu_hours(row) - idle_gpu_hours(row) if is_held else 0.0


def _saving(hours: Iterable[float]) -> Saving:
    found = [each for each in hours if each > 0]
    return Saving(len(found), sum(found))


def best_of(jobs: Iterable[DigestJob]) -> list[DigestJob]:
    """Completed jobs from WELL_USED_PCT with the most used GPU-hours, at most NAMED, each of another family."""
    used = [(job, job.gpu_hours - job.unused_hours) for job in jobs if job.gpu_hours and job.unused_hours is not None]
    well = [
        (job, hours)
        for job, hours in used
        if job.state == "COMPLETED" and hours >= WELL_USED_PCT / 100 * (job.gpu_hours or 0.0)
    ]
    best: dict[tuple[str, int], DigestJob] = {}
    for job, _ in sorted(well, key=lambda each: (-each[1], each[0].job_id)):
        best.setdefault((job.name_key, job.gpu_count), job)
    return list(best.values())[:NAMED]
