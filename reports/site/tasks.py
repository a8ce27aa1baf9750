"""The to-do list of the site report as sentences: what to ask of whom, and why. For the page and the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from almanac.units import counted, format_count, printable
from reports.site.faults import FAILED_AGAIN, IDLE_JOBS, LOW_USE, NEVER_USED, UNASKED, FaultItem, LimitItem
from reports.site.report import SiteReport
from reports.site.totals import LargeUser
from reports.site.words import hours, percent


@dataclass(frozen=True)
class Task:
    """action: what to do. why: the GPU-hours, what was seen, and the GPU-hours of the span before if known."""

    action: str
    why: str


def waste_tasks(report: SiteReport, most: int) -> list[Task]:
    """The items that waste most. They win GPU-hours."""
    return [_waste_task(report, item) for item in report.faults.items[:most]]


def request_tasks(report: SiteReport, most: int) -> list[Task]:
    """Requests for more than was needed: memory tiers, then time limits. They win no GPU-hours, but shorten queues."""
    tiers = [_tier_task(report, user) for user in report.totals.largest.users[:most]]
    return [*tiers, *(_limit_task(report, item) for item in report.faults.limits[:most])]


def _waste_task(report: SiteReport, item: FaultItem) -> Task:
    act, see = _WORDS[item.fault]
    notes = [f"{counted_hours(item.hours)}: {counted(item.jobs, 'job')} {see(item)}.", _before(report, item)]
    if report.has_names:
        notes.append(f"Largest: job {item.example}.")
    return Task(act(_who(report, item.user), item), " ".join(filter(None, notes)))


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


def _tier_task(report: SiteReport, user: LargeUser) -> Task:
    tier = report.totals.largest
    asked, smaller = printable(" or ".join(tier.names), 60), printable(tier.smaller, 40)
    which = f"instead of {asked}" if user.fit_jobs == user.known_jobs else "for the jobs that fit in it"
    fit = f"{format_count(user.fit_jobs)} of {counted(user.known_jobs, 'job')} with a known peak fit in {smaller}"
    return Task(
        f"Ask {_who(report, user.user)} to request {smaller} {which}.",
        f"{counted_hours(user.fit_hours)} on {asked}: {fit}.",
    )


def _limit_task(report: SiteReport, item: LimitItem) -> Task:
    why = (
        f"{counted_hours(item.hours)} requested and not used: {counted(item.jobs, 'job')} on "
        f"{counted(item.gpus, 'GPU')} ran for {percent(item.used_frac)} of the time limit (median)."
    )
    return Task(f"Ask {_who(report, item.user)} for shorter time limits.", why)
