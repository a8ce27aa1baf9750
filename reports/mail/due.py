"""Which reports are due, as a pure decision: what is skipped, what waits, and which runs make one mail."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from almanac.config import Mail
from reports.mail.ended import Ended
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
"""A run that has to wait is looked at again by the next run of the timer."""
LATEST_S = 600
"""An array is looked at so often, at least: that it is over may be said by no task's end."""


@dataclass(frozen=True)
class Parcel:
    """Runs of one user that make one mail: of one job, or a digest of several."""

    user: str
    runs: tuple[EndedRun, ...]

    @property
    def is_digest(self) -> bool:
        return len(self.runs) > 1


@dataclass
class Plan:
    """skipped: runs by reason. delayed: runs by reason and by when to look again (s). ready: what can be told now."""

    skipped: dict[str, list[EndedRun]] = field(default_factory=lambda: defaultdict(list))
    delayed: dict[tuple[str, int], list[EndedRun]] = field(default_factory=lambda: defaultdict(list))
    ready: list[Ended] = field(default_factory=list)


@dataclass(frozen=True)
class Moment:
    """Now, and up to when telemetry has been read (s since 1970); None: nothing is to be waited for."""

    now_s: int
    telemetry_s: int | None = None


def plan_runs(
    found: Iterable[Ended], frequency: Callable[[str], str], recipient: Callable[[str], str | None],
    config: Mail, moment: Moment,
) -> Plan:  # fmt: skip
    """frequency: of a user: every, digest or off. recipient: a user's address, None where there is none."""
    plan = Plan()
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


def _together(found: Iterable[Ended]) -> list[list[Ended]]:
    """The tasks of an array, which are decided as one; every other run by itself."""
    groups: dict[object, list[Ended]] = defaultdict(list)
    for each in found:
        run = each.run
        groups[run if run.array_job_id is None else (run.cluster, run.array_job_id)].append(each)
    return list(groups.values())


def _plan_group(
    plan: Plan, group: Sequence[Ended], waits: Mapping[EndedRun, str], config: Mail, moment: Moment
) -> None:
    """waits: by run, what it waits for by itself.

    An open array waits until its oldest task has waited long enough; then what can be told of it goes together.

    Of an array that is over, all tasks wait for the last one's telemetry. Where a task ends every minute, the latest
    always lacks it: an open array leaves such tasks to its next mail.
    """
    if not group:
        return
    ages_s = [moment.now_s - each.run.end_s for each in group]
    if group[0].is_array_open and max(ages_s) < config.array_wait_hours * 3600:
        # The longer no task has ended, the more rarely it is looked at.
        until_s = moment.now_s + min(max(LATER_S, min(ages_s) // 10), LATEST_S)
        plan.delayed[ARRAY_RUNS, until_s] += [each.run for each in group]
        return
    # A comment that stays unknown is waited for long, and keeps no other task waiting so long.
    for_all = next((why for run, why in waits.items() if moment.now_s - run.end_s < config.wait_s), "")
    for each in group:
        if each.run in waits:
            plan.delayed[waits[each.run], moment.now_s + LATER_S].append(each.run)
        elif for_all and not each.is_array_open:
            plan.delayed[for_all, moment.now_s + LATER_S].append(each.run)
        else:
            plan.ready.append(each)


def _waits_for(each: Ended, frequency: Callable[[str], str], config: Mail, moment: Moment) -> str:
    """What is not known yet, of a user's wish or the telemetry; "" where a report waits for nothing.

    For a wish it waits until the job is too old for a mail: not known is no consent. Where accounting never tells
    comments, almanac:nomail cannot be heard.
    """
    is_early = moment.now_s - each.run.end_s < config.wait_s
    if reason := _unknown_wish(each, frequency):
        return reason
    if is_early and each.refuses_mail is None:
        return NO_COMMENT
    return NO_TELEMETRY if is_early and _lacks_telemetry(each, moment) else ""


def leave_for_later(ready: Sequence[Ended], limit: UserRateLimit) -> tuple[list[Ended], dict[int, list[EndedRun]]]:
    """What can be told now; and, by when to look again (s), the runs of users who have got enough mail for now.

    They wait here, not as mails in the queue, so that all that ends until then is told in one.
    """
    now, later = list[Ended](), defaultdict[int, list[EndedRun]](list)
    for each in ready:
        if limit.left(each.run.user):
            now.append(each)
        else:
            later[limit.next_s(each.run.user)].append(each.run)
    return now, later


def _unknown_wish(each: Ended, frequency: Callable[[str], str]) -> str:
    """What of the user's wish is not known, though it could be; "" where nothing is."""
    if frequency(each.run.user) == UNKNOWN:
        return NOT_KNOWN
    return NO_COMMENT if each.refuses_mail is None and each.has_comments else ""


def first_of(ready: Sequence[Ended], most: int) -> list[Ended]:
    """Not many more than so many, tasks of an array together; the others are for the next run.

    Users take turns, so that one user's many jobs keep nobody else's waiting.
    """
    turns, before = list[tuple[int, list[Ended]]](), Counter[str]()
    for group in _together(ready):
        user = group[0].run.user
        turns.append((before[user], group))
        before[user] += len(group)
    found = list[Ended]()
    for _, group in sorted(turns, key=itemgetter(0)):
        if len(found) >= most:
            break
        found += group
    return found


def hold_back(ready: Sequence[Ended], since_s: int) -> tuple[list[Ended], list[Ended]]:
    """Apart from the others, the runs that ended after since_s, with all tasks of their arrays."""
    held, rest = list[Ended](), list[Ended]()
    for group in _together(ready):
        (held if max(each.run.end_s for each in group) > since_s else rest).extend(group)
    return held, rest


def _why_not(
    each: Ended, age_s: int, frequency: Callable[[str], str], recipient: Callable[[str], str | None], config: Mail
) -> str:
    """Why a run gets no mail of its own; "" where it gets one."""
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


def _lacks_telemetry(each: Ended, moment: Moment) -> bool:
    return moment.telemetry_s is not None and moment.telemetry_s < each.run.end_s


def parcels(ready: Sequence[Ended], most: Callable[[str], int]) -> list[Parcel]:
    """One for each job, one for each array; one alone for a user who would get more than `most`. Oldest end first."""
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
