"""The tables of the site report, for its page and its CSV files alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from almanac.config import Cost
from reports.site.power import power_rows
from reports.site.report import SiteReport
from reports.site.totals import DIMENSIONS, Share
from telemetry.characterize import contents
from telemetry.characterize.files import CONTENTS_NAME, csv_content, write_files
from telemetry.characterize.table import columns

_SHARE = columns(
    ("name", "text"),
    ("jobs", "count"),
    ("gpu_hours", "real", "GPUs times run time"),
    ("gpu_hours_share", "real", "of all GPU-hours"),
    ("measured_jobs", "count", "with data quality ok or idle"),
    ("measured_gpu_hours", "real", "of these jobs, covered by samples"),
    ("mean_gpu_util_frac", "real", "weighted by measured GPU-hours"),
    ("idle_job_gpu_hours", "real", "measured, of jobs that did nothing"),
    ("never_used_gpu_hours", "real", "measured, of GPUs never used in other jobs"),
    ("never_used_known_gpu_hours", "real", "measured, of jobs where this is known"),
    ("no_kernel_gpu_hours", "real", "measured, of other GPUs while no kernel ran"),
    ("unused_gpu_hours", "real", "sum of idle_job, never_used, and no_kernel"),
    ("unused_cost", "real", "by cost.per_gpu_hour; null: not configured, or not measured"),
    ("energy_kwh", "real", "of the GPUs"),
    ("energy_gpu_hours", "real", "of the jobs whose energy is known"),
    ("energy_cost", "real", "by cost.per_kwh"),
    ("idle_energy_kwh", "real", "of idle jobs and of GPUs never used"),
    ("idle_energy_gpu_hours", "real", "of the idle GPU-hours whose energy is known"),
    ("idle_energy_cost", "real", "by cost.per_kwh"),
)
_STANDINGS = columns(("verdict", "text"), ("jobs", "count"), ("gpu_hours", "real"))
_LARGEST = columns(
    ("user", "text"),
    ("asked_jobs", "count", "that asked for the largest tier"),
    ("asked_gpu_hours", "real"),
    ("known_jobs", "count", "of these, with a known peak"),
    ("fit_jobs", "count", "of these, that would fit in the next smaller tier"),
    ("fit_gpu_hours", "real"),
    ("median_peak_mib", "real", "MiB, of the jobs with a known peak"),
    ("highest_peak_mib", "real", "MiB"),
)
_TO_DO = columns(
    ("fault", "text"),
    ("user", "text"),
    ("gpus", "count", "GPUs of each of these jobs"),
    ("jobs", "count"),
    ("gpu_hours", "real", "that could be won, at most"),
    ("gpu_hours_before", "real", "in the span before; null: not known"),
    ("used_gpus_min", "count", "fewest GPUs that one of these jobs used; null: not known for all"),
    ("used_gpus_max", "count"),
    ("busy_frac", "real", "share of the measured time with a kernel, on the GPUs in use"),
    ("example_job", "count", "the job with the most GPU-hours; null: without --names"),
)
_FAULTS = columns(
    ("fault", "text"),
    ("jobs", "count"),
    ("users", "count"),
    ("gpu_hours", "real", "that could be won, at most"),
    ("unused_gpu_hours", "real", "of these, in the table of unused GPU-hours"),
    ("gpu_hours_before", "real", "in the span before; null: not known"),
)
_LONG_LIMITS = columns(
    ("user", "text"),
    ("gpus", "count", "GPUs of each of these jobs"),
    ("jobs", "count", "completed jobs that used at most half of their time limit"),
    ("unused_limit_gpu_hours", "real", "requested and not used"),
    ("used_frac", "real", "median share of the time limit that was used"),
)
_ADVICE = columns(
    ("outcome", "text", "of jobs that were advised a memory tier"),
    ("jobs", "count"),
    ("gpu_hours", "real", "of these that have ended"),
)
_PACKING = columns(
    ("user", "text"),
    ("families", "text", "empty without --names"),
    ("tasks", "count", "on each GPU"),
    ("is_with_itself", "count", "1: runs of one family; 0: of two"),
    ("gpu_hours", "real", "that could run together"),
    ("saved_gpu_hours", "real", "of these, at the low end of the gain"),
    ("gain_low", "real", "work per GPU-hour, times one job alone"),
    ("gain_high", "real"),
    ("runs", "count", "fewest measured runs of a family"),
    ("needed_mib", "real", "MiB, of a GPU's memory, at the stated risk"),
    ("usable_mib", "real", "MiB"),
)


def price(amount: float | None, per_unit: float) -> float | None:
    """The cost of an amount; None if the amount is unknown, or the price is not configured (negative)."""
    return None if amount is None or per_unit < 0 else amount * per_unit


def site_tables(report: SiteReport) -> dict[str, pa.Table]:
    """The tables by the name of their file. Users have pseudonyms, unless the report has names."""
    totals, cost, before = report.totals, report.config.cost, report.before.total
    parts = {
        f"by_{dimension}": _shares(_shown(report, dimension), totals.total.hours, cost) for dimension in DIMENSIONS
    }
    largest = [
        (report.shown_user(row.user), row.asked_jobs, row.asked_hours, row.known_jobs, row.fit_jobs, row.fit_hours,
         row.median_peak_mib, row.highest_peak_mib)
        for row in totals.largest.users
    ]  # fmt: skip
    return {
        "total": _shares([("all", totals.total)], totals.total.hours, cost),
        "coverage": _table(_STANDINGS, ((row.name, row.jobs, row.hours) for row in totals.standings)),
        **parts,
        "to_do": _table(_TO_DO, _to_do(report)),
        "faults": _table(_FAULTS, _faults(report)),
        "long_limits": _table(
            _LONG_LIMITS,
            (
                (report.shown_user(each.user), each.gpus, each.jobs, each.hours, each.used_frac)
                for each in report.faults.limits
            ),
        ),
        "advice": _table(_ADVICE, ((each.name, each.jobs, each.hours) for each in report.advice.outcomes)),
        "before": _shares([("all", before)] if before else [], before.hours if before else 0.0, cost),
        "largest_tier": _table(_LARGEST, largest),
        "packing": _table(_PACKING, _packing(report)),
        "power": power_rows(report.power),
    }


def write_csv(report: SiteReport, folder: Path) -> list[Path]:
    """Write a CSV file for each table, and for each table of the figures. Existing files are replaced.

    Returns their paths. Raises StoreError if a file cannot be written.
    """
    tables = site_tables(report)
    if report.study:
        figures = {name: result.rows for name, result in report.study.results.items()}
        tables |= {**figures, CONTENTS_NAME: contents(report.study.results)}
    return write_files(folder, ((f"{name}.csv", csv_content(rows)) for name, rows in tables.items()))


def _to_do(report: SiteReport) -> Iterator[tuple[object, ...]]:
    for each in report.faults.items:
        example = each.example if report.has_names else None
        before = report.before.items.get(each.key, 0.0) if report.before.knows(each.fault) else None
        yield (each.fault, report.shown_user(each.user), each.gpus, each.jobs, each.hours, before, each.used_least,
               each.used_most, each.busy_frac, example)  # fmt: skip


def _faults(report: SiteReport) -> Iterator[tuple[object, ...]]:
    for each in report.faults.sums:
        before = report.before.faults.get(each.fault, 0.0) if report.before.knows(each.fault) else None
        yield each.fault, each.jobs, each.users, each.hours, each.unused_hours, before


def _shown(report: SiteReport, dimension: str) -> list[tuple[str, Share]]:
    """The rows of a breakdown. Two accounts with the same pseudonym stay two rows."""
    shown = report.shown_account if dimension == "account" else str
    return [(shown(name), share) for name, share in report.totals.parts[dimension].items()]


def _shares(parts: Iterable[tuple[str, Share]], all_hours: float, cost: Cost) -> pa.Table:
    return _table(_SHARE, (_share_row(name, share, all_hours, cost) for name, share in parts))


def _share_row(name: str, share: Share, all_hours: float, cost: Cost) -> tuple[object, ...]:
    return (
        name,
        share.jobs,
        share.hours,
        share.hours / all_hours if all_hours else None,
        share.measured_jobs,
        share.measured_hours,
        share.util_frac,
        share.idle_job_hours,
        share.never_used_hours,
        share.never_used_known_hours,
        share.no_kernel_hours,
        share.unused_hours,
        price(share.unused_hours, cost.per_gpu_hour),
        share.energy_kwh,
        share.energy_hours,
        price(share.energy_kwh, cost.per_kwh),
        share.wasted_kwh,
        share.wasted_kwh_hours,
        price(share.wasted_kwh, cost.per_kwh),
    )


def _packing(report: SiteReport) -> Iterator[tuple[object, ...]]:
    for row in report.packing.rows:
        advice = row.advice
        gain = advice.gain or (None, None)
        families = " + ".join(dict.fromkeys(each.name_key for each in advice.members)) if report.has_names else ""
        yield (report.shown_user(row.user), families, advice.tasks, int(advice.is_with_itself), row.hours,
               row.saved_hours, *gain, advice.runs, advice.needed_mib, advice.usable_mib)  # fmt: skip


def _table(schema: pa.Schema, rows: Iterable[Sequence[object]]) -> pa.Table:
    made = [dict(zip(schema.names, row, strict=True)) for row in rows]
    return pa.Table.from_pylist(made, schema=schema)
