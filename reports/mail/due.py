"""Decide, as pure functions, which runs are skipped, which wait, and which make one mail."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from almanac.config import Mail
from almanac.units import format_count
from reports.mail.ended import ReportCandidate
from reports.mail.outbox import EndedRun
from reports.mail.preferences import NOT_KNOWN, NOT_WANTED, UNKNOWN
from reports.mail.rate_limit import UserRateLimit

NO_TELEMETRY = "telemetry has not arrived"
NO_COMMENT = "its comment is not known yet"
RAN_AGAIN = "the job ran again"
TOO_OLD = "too long ago"
ENOUGH_MAIL = "their user got enough mail for now"
ARRAY_RUNS = "the array still runs"
LATER_S = 20
"""Delay of a run that waits: the next run of the timer looks at it again."""
LATEST_S = 600
"""Longest delay of an array. It can be over without another task that ends."""


@dataclass(frozen=True)
class Parcel:
    """Runs of one user that make one mail: a job report, or a digest of several jobs."""

    user: str
    runs: tuple[EndedRun, ...]

    @property
    def is_digest(self) -> bool:
        return len(self.runs) > 1


@dataclass
class DuePlan:
    """skipped: runs by reason. delayed: runs by reason and time of the next look (s). ready: runs to report now."""

    skipped: dict[str, list[EndedRun]] = field(default_factory=lambda: defaultdict(list))
    delayed: dict[tuple[str, int], list[EndedRun]] = field(default_factory=lambda: defaultdict(list))
    ready: list[ReportCandidate] = field(default_factory=list)


@dataclass(frozen=True)
class Moment:
    """The time now, and the time up to which telemetry was read (s since 1970). None: do not wait for telemetry."""

    now_s: int
    telemetry_s: int | None = None


def plan_runs(
    found: Iterable[ReportCandidate], frequency: Callable[[str], str], recipient: Callable[[str], str | None],
    config: Mail, moment: Moment,
) -> DuePlan:  # fmt: skip
    """frequency: gives every, digest, off, or unknown for a user. recipient: gives the user's address, or None."""
    plan = DuePlan()
    for group in _together(found):
        wanted = []
        for each in group:
            if reason := _why_not(each, moment.now_s - each.run.end_s, frequency, recipient, config):
                plan.skipped[reason].append(each.run)
            else:
                wanted.append(each)
        waits = {each.run: reason for each in wanted if (reason := _waits_for(each, frequency, config, moment))}
        _plan_group(plan, wanted, waits, config, moment)
    return plan


def _together(found: Iterable[ReportCandidate]) -> list[list[ReportCandidate]]:
    """Groups of runs that are decided together: the tasks of an array, or a single run."""
    groups: dict[object, list[ReportCandidate]] = defaultdict(list)
    for each in found:
        run = each.run
        groups[run if run.array_job_id is None else (run.cluster, run.array_job_id)].append(each)
    return list(groups.values())


def _plan_group(
    plan: DuePlan, group: Sequence[ReportCandidate], waits: Mapping[EndedRun, str], config: Mail, moment: Moment
) -> None:
    """waits: by run, the reason why it waits by itself.

    An array that still runs waits until its oldest task has waited long enough. Then its ready tasks go together.

    When an array is over, all its tasks wait for the telemetry of the last one. While it runs, tasks without telemetry
    are left to its next mail: if a task ends every minute, there is always one.
    """
    if not group:
        return
    ages_s = [moment.now_s - each.run.end_s for each in group]
    if group[0].is_array_open and max(ages_s) < config.array_wait_hours * 3600:
        # The longer no task has ended, the longer the delay.
        until_s = moment.now_s + min(max(LATER_S, min(ages_s) // 10), LATEST_S)
        plan.delayed[ARRAY_RUNS, until_s] += [each.run for each in group]
        return
    # The wait for an unknown comment is long; other tasks wait only for a while.
    for_all = next((why for run, why in waits.items() if moment.now_s - run.end_s < config.wait_s), "")
    for each in group:
        if each.run in waits:
            plan.delayed[waits[each.run], moment.now_s + LATER_S].append(each.run)
        elif for_all and not each.is_array_open:
            plan.delayed[for_all, moment.now_s + LATER_S].append(each.run)
        else:
            plan.ready.append(each)


def _waits_for(each: ReportCandidate, frequency: Callable[[str], str], config: Mail, moment: Moment) -> str:
    """Why a run has to wait: the user's choice or the telemetry is unknown. "" if it need not wait.

    While the choice is unknown, a run waits until it is too old for a mail: unknown is not consent. If accounting keeps
    no comments, almanac:nomail cannot be seen.
    """
    is_early = moment.now_s - each.run.end_s < config.wait_s
    if reason := _unknown_wish(each, frequency):
        return reason
    if is_early and each.refuses_mail is None:
        return NO_COMMENT
    return NO_TELEMETRY if is_early and _lacks_telemetry(each, moment) else ""


def leave_for_later(
    ready: Sequence[ReportCandidate], limit: UserRateLimit
) -> tuple[list[ReportCandidate], dict[int, list[EndedRun]]]:
    """Runs to report now, and runs that wait for their user's rate limit, by the time of the next mail (s).

    The latter wait as runs, not as queued mails, so that one mail reports all that end until then.
    """
    now, later = list[ReportCandidate](), defaultdict[int, list[EndedRun]](list)
    for each in ready:
        if limit.left(each.run.user):
            now.append(each)
        else:
            later[limit.next_s(each.run.user)].append(each.run)
    return now, later


def _unknown_wish(each: ReportCandidate, frequency: Callable[[str], str]) -> str:
    """Why it is unknown whether the user wants this mail; "" if it is known, or cannot be known."""
    if frequency(each.run.user) == UNKNOWN:
        return NOT_KNOWN
    return NO_COMMENT if each.refuses_mail is None and each.has_comments else ""


def first_of(ready: Sequence[ReportCandidate], most: int) -> list[ReportCandidate]:
    """About `most` runs, with tasks of an array together. The next run gets the others.

    Users take turns, so that one user's many jobs do not delay the jobs of others.
    """
    turns, before = list[tuple[int, list[ReportCandidate]]](), Counter[str]()
    for group in _together(ready):
        user = group[0].run.user
        turns.append((before[user], group))
        before[user] += len(group)
    found = list[ReportCandidate]()
    for _, group in sorted(turns, key=itemgetter(0)):
        if len(found) >= most:
            break
        found += group
    return found


def hold_back(ready: Sequence[ReportCandidate], since_s: int) -> tuple[list[ReportCandidate], list[ReportCandidate]]:
    """Split off the runs that ended after since_s, with all tasks of their arrays."""
    held, rest = list[ReportCandidate](), list[ReportCandidate]()
    for group in _together(ready):
        (held if max(each.run.end_s for each in group) > since_s else rest).extend(group)
    return held, rest


def _why_not(
    each: ReportCandidate,
    age_s: int,
    frequency: Callable[[str], str],
    recipient: Callable[[str], str | None],
    config: Mail,
) -> str:
    """Why a run gets no mail of its own; "" if it gets one."""
    if not each.is_last:
        return RAN_AGAIN
    if age_s > config.give_up_hours * 3600:
        return _unknown_wish(each, frequency) or TOO_OLD
    if each.elapsed_s < config.min_elapsed_s:
        return "too short"
    if each.refuses_mail:
        return "the job wants none"
    wanted = frequency(each.run.user)
    if reason := NOT_WANTED.get(wanted):
        return reason
    return "" if recipient(each.run.user) else "no address"


def _lacks_telemetry(each: ReportCandidate, moment: Moment) -> bool:
    return moment.telemetry_s is not None and moment.telemetry_s < each.run.end_s


def stuck(plan: DuePlan, until_s: int) -> Iterator[str]:
    """Name faults of the site that keep runs waiting that ended before until_s."""
    waiting = {why: [run for run in runs if run.end_s < until_s] for (why, _), runs in plan.delayed.items()}
    if runs := waiting.get(NO_COMMENT):
        yield f"reports that wait for their job's comment: {format_count(len(runs))}; see what `sacct --json` says"
    is_anybody_known = bool(plan.ready or plan.skipped or set(waiting) - {NOT_KNOWN})
    if (runs := waiting.get(NOT_KNOWN)) and not is_anybody_known:
        number = format_count(len(runs))
        yield f"reports that wait, as this host knows none of their users: {number}; see `getent passwd`"


def parcels(ready: Sequence[ReportCandidate], most: Callable[[str], int]) -> list[Parcel]:
    """One for each job or array, but only one for a user who would get more than `most`. Oldest end first."""
    by_user: dict[str, dict[tuple[bool, int], list[EndedRun]]] = defaultdict(lambda: defaultdict(list))
    for each in ready:
        run = each.run
        is_task = run.array_job_id is not None
        by_user[run.user][is_task, run.array_job_id if is_task else run.job_id].append(run)  # type: ignore[index]
    found = []
    for user, groups in by_user.items():
        together = (
            [[run for group in groups.values() for run in group]] if len(groups) > most(user) else groups.values()
        )
        found += [Parcel(user, tuple(runs)) for runs in together]
    return sorted(found, key=lambda parcel: (parcel.runs[0].end_s, parcel.user, parcel.runs[0].job_id))
