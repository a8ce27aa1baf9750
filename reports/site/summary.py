"""The first tables of the site report, for its page and the terminal: totals, faults, advice, and data quality."""

from __future__ import annotations

from almanac.units import counted, format_count, format_moment, printable
from reports.advice_outcomes import FOLLOWED
from reports.site.advice_use import MORE_MEMORY
from reports.site.faults import FAILED_AGAIN, FAULTS, IDLE_JOBS, LOW_USE, NEVER_USED, UNASKED, FaultSum
from reports.site.report import SiteReport
from reports.site.tables import price
from reports.site.totals import Share
from reports.site.words import NOT_KNOWN, PageTable, change, energy, hours, money, percent, points, ratio

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
    """Which span the changes are from, and why some or all are not known."""
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
    """What jobs asked for that had been advised a memory tier; a text if there were none."""
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
