"""Suggestions of the site report: the to-do list on waste and requests, and families that could share a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from advisor.packing.text import named
from almanac.units import counted, format_count, printable
from reports.job.host_faults import LIMIT_FAR, HostFault
from reports.site.faults import (
    FAILED_AGAIN,
    IDLE_JOBS,
    LOW_USE,
    NEVER_USED,
    UNASKED,
    FaultItem,
    LimitItem,
)
from reports.site.packing import SharingFamilies, SitePacking
from reports.site.report import SiteReport
from reports.site.totals import LargeUser
from reports.site.words import PageTable, hours, percent


@dataclass(frozen=True)
class ToDo:
    """A task for operators. why: the GPU-hours, what was seen, and the GPU-hours of the span before if known."""

    action: str
    why: str


def waste_tasks(report: SiteReport, most: int) -> list[ToDo]:
    """The items that waste most. They win GPU-hours."""
    return [_waste_task(report, item) for item in report.faults.items[:most]]


def request_tasks(report: SiteReport, most: int) -> list[ToDo]:
    """Requests for more than was needed: memory tiers; CPUs, host memory, and nodes; time limits, of GPUs last.

    They win no GPU-hours, but shorten queues. most: of each kind; twice as many of the second, which has nine rules.
    """
    tiers = [_tier_task(report, user) for user in report.totals.largest.users[:most]]
    hosts = [_host_task(report, item) for item in report.host_faults[: 2 * most]]
    return [*tiers, *hosts, *(_limit_task(report, item) for item in report.faults.limits[:most])]


def _waste_task(report: SiteReport, item: FaultItem) -> ToDo:
    act, see = _WORDS[item.fault]
    notes = [f"{counted_hours(item.hours)}: {counted(item.jobs, 'job')} {see(item)}.", _before(report, item)]
    if report.has_names:
        notes.append(f"Largest: job {item.example}.")
    return ToDo(act(_who(report, item.user), item), " ".join(filter(None, notes)))


def counted_hours(amount: float) -> str:
    return f"{hours(amount)} GPU-hours"


def _who(report: SiteReport, user: str) -> str:
    return printable(report.shown_user(user), 40)


def _before(report: SiteReport, item: FaultItem) -> str:
    if not report.before.knows(item.fault):
        return ""
    amount = report.before.items.get(item.key, 0.0)
    return f"Before: {hours(amount) if amount else 'none'}."


def _ask_idle(who: str, item: FaultItem) -> str:
    gpus = "the GPU" if item.gpus == 1 else "the GPUs"
    return f"Ask {who} to check that their program finds {gpus}, or to request none."


def _see_idle(item: FaultItem) -> str:
    return f"on {counted(item.gpus, 'GPU')} did nothing"


def _ask_never_used(who: str, item: FaultItem) -> str:
    # With a job that used all its GPUs but one sample, or none, the fewest that a job can ask for is 1.
    fewer = "fewer GPUs" if item.used_most is None else counted(max(item.used_most, 1), "GPU")
    return f"Ask {who} to request {fewer} instead of {item.gpus}, or to use all {item.gpus}."


def _see_never_used(item: FaultItem) -> str:
    if item.used_most is None:
        return f"never used some of {item.gpus} GPUs"
    least = "" if item.used_least == item.used_most else f"{item.used_least} to "
    return f"used {least}{item.used_most} of {item.gpus} GPUs"


def _ask_unasked(who: str, item: FaultItem) -> str:
    instead = f"use all {item.gpus}" if item.used_most else "use a partition without GPUs"
    return f"Ask {who} to leave out --exclusive, or to {instead}."


def _see_unasked(item: FaultItem) -> str:
    return f"on {counted(item.gpus, 'GPU')} left GPUs unused that nobody asked for"


def _ask_low_use(who: str, item: FaultItem) -> str:
    return f"Ask {who} what the GPUs wait for: data, the CPU, or small batches."


def _see_low_use(item: FaultItem) -> str:
    return f"kept {counted(item.gpus, 'GPU')} busy {percent(item.busy_frac)} of the time"


def _ask_failed_again(who: str, item: FaultItem) -> str:
    return f"Help {who} find why the jobs fail, with one short test job."


def _see_failed_again(item: FaultItem) -> str:
    return f"on {counted(item.gpus, 'GPU')} failed after the same job had failed before"


_Words = tuple[Callable[[str, FaultItem], str], Callable[[FaultItem], str]]
_WORDS: dict[str, _Words] = {
    IDLE_JOBS: (_ask_idle, _see_idle),
    NEVER_USED: (_ask_never_used, _see_never_used),
    UNASKED: (_ask_unasked, _see_unasked),
    LOW_USE: (_ask_low_use, _see_low_use),
    FAILED_AGAIN: (_ask_failed_again, _see_failed_again),
}


def _tier_task(report: SiteReport, user: LargeUser) -> ToDo:
    tier = report.totals.largest
    asked, smaller = printable(" or ".join(tier.names), 60), printable(tier.smaller, 40)
    which = f"instead of {asked}" if user.fit_jobs == user.known_jobs else "for the jobs that fit in it"
    fit = f"{format_count(user.fit_jobs)} of {counted(user.known_jobs, 'job')} with a known peak fit in {smaller}"
    return ToDo(
        f"Ask {_who(report, user.user)} to request {smaller} {which}.",
        f"{counted_hours(user.fit_hours)} on {asked}: {fit}.",
    )


_HOST_WORDS = {
    "cpus_idle": "Ask {who} what their jobs wait for: the CPUs did nothing.",
    "serial_program": "Ask {who} to request 1 CPU for a serial program, or to run it in parallel.",
    "low_cpu_use": "Ask {who} for fewer CPUs, or what the CPUs wait for.",
    "cpus_per_gpu": "Ask {who} for fewer CPUs per GPU.",
    "memory_per_gpu": "Ask {who} for less host memory per GPU.",
    "host_memory_spare": "Ask {who} for less host memory.",
    "spread_gpus": "Ask {who} for fewer nodes with more GPUs on each.",
    "spread_cpus": "Ask {who} for fewer nodes.",
    LIMIT_FAR: "Ask {who} for shorter time limits.",
}
"""By rule of the job report."""


def _host_task(report: SiteReport, item: HostFault) -> ToDo:
    example = f" Largest: job {item.example[0]}." if report.has_names else ""
    return ToDo(
        _HOST_WORDS[item.rule].format(who=_who(report, item.user)),
        f"{hours(item.amount)} {item.lost}: {counted(item.jobs, 'job')} ({item.rule}).{example}",
    )


def _limit_task(report: SiteReport, item: LimitItem) -> ToDo:
    why = (
        f"{counted_hours(item.hours)} requested and not used: {counted(item.jobs, 'job')} on "
        f"{counted(item.gpus, 'GPU')} ran for {percent(item.used_frac)} of the time limit (median)."
    )
    return ToDo(f"Ask {_who(report, item.user)} for shorter time limits.", why)


MOST_SHARING = 10
"""Rows shown; the CSV file has all."""


def packing_table(report: SiteReport) -> PageTable | str:
    """The families that could share; a text if there are none."""
    packing = report.packing
    if packing.why_none:
        return f"Not available: {packing.why_none}."
    if not packing.rows:
        return (
            f"Of {counted(packing.users, 'user')} with jobs on one GPU, none has job families that surely gain by "
            "sharing one."
        )
    cells = [
        [
            _families(report, row), printable(report.shown_user(row.user), 13), hours(row.hours), _gain(row),
            hours(row.saved_hours), format_count(row.advice.runs),
        ]
        for row in packing.rows[:MOST_SHARING]
    ]  # fmt: skip
    head = ("Could share a GPU", "User", "GPU-hours", "Work/GPU-h", "Saved", "Runs")
    return PageTable(head, cells, _note(packing))


def _families(report: SiteReport, row: SharingFamilies) -> str:
    """Names of jobs can tell who their user is, so only a report with names has them."""
    advice = row.advice
    if not report.has_names:
        return f"{advice.tasks} runs of one family" if advice.is_with_itself else "runs of two families"
    if advice.is_with_itself:
        return f"{advice.tasks} runs of {named(advice.members[0], 15)}"
    return " and ".join(named(member, 9) for member in advice.members)


def _gain(row: SharingFamilies) -> str:
    return f"x {row.advice.gain.low:.2f}" if row.advice.gain else ""


def _note(packing: SitePacking) -> str:
    shown = packing.rows[:MOST_SHARING]
    more = len(packing.rows) - len(shown)
    notes = [
        f"Saved are at least {hours(packing.saved_hours)} of {hours(packing.hours)} GPU-hours on one GPU, "
        "if all of them run together.",
        f"{format_count(more)} more in packing.csv." if more else "",
        f"{format_count(packing.left_out)} users with fewer GPU-hours were not looked at." if packing.left_out else "",
        "Work/GPU-h: work per GPU-hour, at least, times one job alone. Runs: fewest measured runs of a family. "
        "Users share a GPU only with themselves (almanac-pack).",
    ]
    return " ".join(filter(None, notes))
