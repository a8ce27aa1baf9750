"""The tables of the site report: all of them for CSV and JSON, the first ones as texts for page and terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from almanac.config import Cost
from almanac.units import counted, format_count, format_moment, printable
from reports.advice_outcomes import FOLLOWED
from reports.site.faults import FAILED_AGAIN, FAULTS, IDLE_JOBS, LOW_USE, NEVER_USED, UNASKED, FaultSum
from reports.site.power import power_rows
from reports.site.report import MORE_MEMORY, SiteReport
from reports.site.totals import DIMENSIONS, Share
from reports.site.words import NOT_KNOWN, PageTable, change, energy, hours, money, percent, points, ratio
from telemetry.characterize.table import CONTENTS_NAME, columns, contents, csv_content, write_files

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
    ("mean_mfu_frac", "real", "share of the main pipe's peak, weighted by mfu_gpu_hours"),
    ("mfu_gpu_hours", "real", "measured, of jobs whose MFU is known"),
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
_HOST_FAULTS = columns(
    ("rule", "text", "of the job report"),
    ("user", "text"),
    ("jobs", "count"),
    ("amount", "real", "not used, more than needed, or kept from other jobs, at most"),
    ("unit", "text"),
    ("example_job", "count", "the job with the largest amount; null: without --names"),
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
        "host_faults": _table(
            _HOST_FAULTS,
            (
                (
                    each.rule,
                    report.shown_user(each.user),
                    each.jobs,
                    each.amount,
                    each.unit,
                    each.example[0] if report.has_names else None,
                )
                for each in report.host_faults
            ),
        ),
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
    tables = site_tables(report) | (dict(report.use.tables) if report.use else {})
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
        share.mfu_frac,
        share.mfu_hours,
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


FAULT_WORDS = {
    IDLE_JOBS: "Jobs that did nothing",
    NEVER_USED: "GPUs never used",
    UNASKED: "Unused GPUs that nobody asked for",
    LOW_USE: "GPUs busy less than 30% of the time",
    FAILED_AGAIN: "Jobs that failed again",
}


def summary_boxes(report: SiteReport) -> list[tuple[str, str, str]]:
    """The boxes at the top: a figure, its name, and a note on it (may be empty)."""
    total, cost = report.totals.total, report.config.cost
    before, used = report.before.total, report.before.used
    grown = change(total.hours, before.hours if before else None)
    busier = points(total.util_frac, used.util_frac if used else None)
    more_unused = points(_unused_share(total), _unused_share(used) if used else None)
    measured = f"{percent(ratio(total.measured_hours, total.hours))} measured" if total.hours else ""
    unused = f"{percent(_unused_share(total))} of measured GPU-hours" if total.unused_hours is not None else ""
    boxes = [
        (format_count(total.jobs), "GPU jobs", f"from {counted(report.totals.users, 'user')}"),
        (hours(total.hours), "GPU-hours", _joined(measured, grown)),
        (percent(total.util_frac), "average utilization", busier),
        (hours(total.unused_hours), "unused GPU-hours", _joined(unused, more_unused)),
    ]
    if total.energy_kwh is not None:
        boxes.append((energy(total.energy_kwh), "GPU energy", _known_of(total.energy_hours, total.hours)))
    if cost.per_gpu_hour >= 0:
        boxes.append((money(price(total.unused_hours, cost.per_gpu_hour), cost), "cost of unused GPU-hours", ""))
    return boxes


def _unused_share(total: Share) -> float | None:
    return ratio(total.unused_hours, total.measured_hours)


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def compared_with(report: SiteReport) -> str:
    """Name the span that changes are measured from, and say why some or all are not known."""
    before = report.before
    span = f"{format_moment(before.since_s)} to {format_moment(before.until_s)}"
    if before.why_none:
        return f"Change since the span before ({span}): not known, because {before.why_none}."
    only = f" Only GPU-hours and failed jobs are compared, because {before.why_no_use}." if before.why_no_use else ""
    return f"Compared with {span}.{only}"


def faults_table(report: SiteReport) -> PageTable:
    """GPU-hours that could be won, by fault, and how they relate to the unused GPU-hours."""
    before = ("Before",) if report.before.total else ()
    rows = [_fault_row(report, name) for name in FAULTS]
    return PageTable(("Fault", "Jobs", "Users", "GPU-hours", *before), rows, _faults_note(report))


def _fault_row(report: SiteReport, name: str) -> list[str]:
    """Without any measured job, only accounting is known: failed jobs."""
    if name != FAILED_AGAIN and not report.totals.total.measured_jobs:
        cells = [NOT_KNOWN] * 3
    else:
        found = next((each for each in report.faults.sums if each.fault == name), FaultSum(name, 0, 0, 0.0, 0.0))
        cells = [format_count(found.jobs), format_count(found.users), hours(found.hours)]
    before = report.before
    earlier = hours(before.faults.get(name, 0.0)) if before.knows(name) else NOT_KNOWN
    return [FAULT_WORDS[name], *cells, *((earlier,) if before.total else ())]


def _faults_note(report: SiteReport) -> str:
    faults, unused = report.faults, report.totals.total.unused_hours
    if not faults.sums:
        return ""
    if unused is None:
        return f"Together {hours(faults.hours)} GPU-hours. How many of these were unused is not known."
    others = faults.hours - faults.unused_hours
    used = f", and {hours(others)} of failed jobs that used their GPUs or were not measured" if others > 0 else ""
    known = f"{hours(faults.unused_hours)} of {hours(unused)} unused GPU-hours"
    return f"Together {hours(faults.hours)} GPU-hours: {known}{used}."


def advice_table(report: SiteReport) -> PageTable | str:
    """Requests of the jobs that had been advised a memory tier; a text if there were none."""
    advice = report.advice
    if not advice.jobs:
        return "No job of this span had published advice on its memory tier (almanac publish)."
    rows = [
        [each.name, format_count(each.jobs), percent(each.jobs / advice.jobs), hours(each.hours)]
        for each in advice.outcomes
    ]
    return PageTable(("Advised a memory tier, and", "Jobs", "Share", "GPU-hours"), rows, _advice_note(report))


def _advice_note(report: SiteReport) -> str:
    advice, more = report.advice, report.advice.of(MORE_MEMORY)
    largest = printable(" or ".join(report.totals.largest.names), 60) or "the largest tier"
    freed = (
        f"Jobs that followed the advice ran {hours(advice.smaller_hours)} GPU-hours on smaller tiers than {largest}. "
        "At most these were freed: how many users would have chosen the smaller tier anyway is not known. "
    )
    missed = f"{counted(more.jobs, 'job')} ({hours(more.hours)} GPU-hours) asked for more memory than advised. "
    return ((freed if advice.of(FOLLOWED).jobs else "") + (missed if more.jobs else "")).rstrip()


def _known_of(part: float, whole: float, which: str = "") -> str:
    return f"known for {percent(ratio(part, whole))} of {which}GPU-hours"


def coverage_table(report: SiteReport) -> PageTable:
    total = report.totals.total
    rows = [
        [printable(row.name, 120), format_count(row.jobs), hours(row.hours), percent(ratio(row.hours, total.hours))]
        for row in report.totals.standings
    ]
    running, sharing = report.totals.still_running, report.totals.sharing
    parts = f", and {counted(sharing, 'job')} on parts of GPUs (shard, mps)" if sharing else ""
    note = (
        "Only jobs with ok or idle are measured. The other jobs count in this table, and never as idle. "
        f"Excluded from all figures: {format_count(running)} jobs that had not ended{parts}."
    )
    return PageTable(("Data quality", "Jobs", "GPU-hours", "Share"), rows, note)


def waste_table(report: SiteReport) -> PageTable:
    """Unused GPU-hours by cause. The pauses of a GPU that also worked have no energy: its counter is one sum."""
    total, cost = report.totals.total, report.config.cost
    is_priced = cost.per_gpu_hour >= 0
    lines = (
        ("Jobs that did nothing", total.idle_job_hours),
        ("GPUs never used in other jobs", total.never_used_hours),
        ("Other GPUs, while no kernel ran", total.no_kernel_hours),
        ("Total", total.unused_hours),
    )
    rows = [
        [words, hours(amount), percent(ratio(amount, total.measured_hours)),
         *([money(price(amount, cost.per_gpu_hour), cost)] if is_priced else ())]
        for words, amount in lines
    ]  # fmt: skip
    columns = ("Unused", "GPU-hours", "Of measured", *(("Cost",) if is_priced else ()))
    return PageTable(columns, rows, _waste_note(report))


def _waste_note(report: SiteReport) -> str:
    total, cost = report.totals.total, report.config.cost
    known = percent(ratio(total.never_used_known_hours, total.measured_hours))
    priced = f"Electricity cost: {money(price(total.wasted_kwh, cost.per_kwh), cost)}. " if cost.per_kwh >= 0 else ""
    return (
        f"GPUs never used: known for {known} of measured GPU-hours. "
        "For the rest, all time without a kernel is in the line below. "
        f"Energy of the first two lines: {energy(total.wasted_kwh)}, "
        f"{_known_of(total.wasted_kwh_hours, total.idle_hours or 0.0, 'their ')}. {priced}"
        "The energy of pauses is not known for GPUs that worked at other times."
    )
