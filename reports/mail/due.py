"""Decide, as pure functions, which runs are skipped, which wait, and which make one mail."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from almanac.config import Mail
from almanac.units import format_count
from reports.mail.address_book import AddressError
from reports.mail.ended import ReportCandidate
from reports.mail.outbox import EndedRun, Told
from reports.mail.pilot import OUTSIDE, is_in_pilot
from reports.mail.preferences import NOT_KNOWN, NOT_WANTED, UNKNOWN

WAIT_S = 1800
"""Most seconds that a report waits for telemetry after the job ends: Prometheus is read every few minutes."""
ARRAY_WAIT_S = 24 * 3600
"""Time that a task of an array waits for the others after it ends: a user gets at most one such mail a day."""
GIVE_UP_S = 72 * 3600
"""Time after which almanac drops a mail that the server does not accept: longer than a weekend."""
NO_TELEMETRY = "telemetry has not arrived"
NO_COMMENT = "its comment is not known yet"
NO_ADDRESS_YET = "the address of their user cannot be looked up"
RAN_AGAIN = "the job ran again"
TOO_OLD = "too long ago"
ENOUGH_MAIL = "their user got enough mail for now"
ARRAY_RUNS = "the array still runs"
FAMILY_TOLD = "their job family had a mail just now"


@dataclass
class DuePlan:
    """skipped, delayed: runs by reason. A delayed run stays in the outbox for the next run of the timer.

    ready: runs to report now.
    """

    skipped: dict[str, list[EndedRun]] = field(default_factory=lambda: defaultdict(list))
    delayed: dict[str, list[EndedRun]] = field(default_factory=lambda: defaultdict(list))
    ready: list[ReportCandidate] = field(default_factory=list)


@dataclass(frozen=True)
class Planner:
    """frequency: gives every, digest, off, or unknown for a user. recipient: gives the user's address, or None, or
    raises AddressError.

    telemetry_s: the time up to which telemetry was read (s since 1970). None: do not wait for telemetry.
    """

    frequency: Callable[[str], str]
    recipient: Callable[[str], str | None]
    config: Mail
    now_s: int
    telemetry_s: int | None = None

    def plan(self, found: Iterable[ReportCandidate]) -> DuePlan:
        plan = DuePlan()
        for group in together(found):
            wanted = []
            for each in group:
                if reason := self._why_not(each):
                    plan.skipped[reason].append(each.run)
                else:
                    wanted.append(each)
            if wanted:
                self._plan_group(plan, wanted)
        return plan

    def _plan_group(self, plan: DuePlan, group: Sequence[ReportCandidate]) -> None:
        """Plan a single run, or the tasks of an array.

        An array that still runs waits until its oldest task has waited long enough. Then one mail reports its ready
        tasks. Tasks without telemetry wait for the next mail: if a task ends every minute, there is always such a task.

        When an array is over, all its tasks wait for the telemetry of the last one.
        """
        is_open = group[0].is_array_open
        if is_open and max(map(self._age_s, group)) < ARRAY_WAIT_S:
            plan.delayed[ARRAY_RUNS] += [each.run for each in group]
            return
        waits = [self._waits_for(each) for each in group]
        # The wait for an unknown comment is long; other tasks wait only for a while.
        early = (why for each, why in zip(group, waits, strict=True) if why and self._is_early(each))
        for_all = "" if is_open else next(early, "")
        for each, why in zip(group, waits, strict=True):
            if reason := why or for_all:
                plan.delayed[reason].append(each.run)
            else:
                plan.ready.append(each)

    def _age_s(self, each: ReportCandidate) -> int:
        return self.now_s - each.run.end_s

    def _is_early(self, each: ReportCandidate) -> bool:
        return self._age_s(each) < WAIT_S

    def _waits_for(self, each: ReportCandidate) -> str:
        """Why a run has to wait: the user's choice or the telemetry is unknown. "" if it need not wait.

        While the choice is unknown, a run waits until it is too old for a mail, because no answer is not consent. If
        accounting keeps no comments, almanac cannot see almanac:nomail.
        """
        if reason := self._unknown_wish(each):
            return reason
        if not self._is_early(each):
            return ""
        if each.refuses_mail is None:
            return NO_COMMENT
        return NO_TELEMETRY if self.telemetry_s is not None and self.telemetry_s < each.run.end_s else ""

    def _unknown_wish(self, each: ReportCandidate) -> str:
        """The reason why the user's wish is unknown; "" if it is known, or if nobody can know it."""
        if self.frequency(each.run.user) == UNKNOWN:
            return NOT_KNOWN
        if self._has_unknown_address(each):
            return NO_ADDRESS_YET
        return NO_COMMENT if each.refuses_mail is None and each.has_comments else ""

    def _has_unknown_address(self, each: ReportCandidate) -> bool:
        try:
            self.recipient(each.run.user)
        except AddressError:
            return True
        return False

    def _why_not(self, each: ReportCandidate) -> str:
        """Why a run gets no mail of its own; "" if it gets one."""
        if not each.is_last:
            return RAN_AGAIN
        if not is_in_pilot(self.config, each.run.user, each.account):
            return OUTSIDE
        if self._age_s(each) > GIVE_UP_S:
            return self._unknown_wish(each) or TOO_OLD
        if each.elapsed_s < self.config.min_elapsed_s:
            return "too short"
        if each.refuses_mail:
            return "the job wants none"
        if reason := NOT_WANTED.get(self.frequency(each.run.user)):
            return reason
        return "" if self._has_unknown_address(each) or self.recipient(each.run.user) else "no address"


def together(found: Iterable[ReportCandidate]) -> list[list[ReportCandidate]]:
    """Groups of runs that are decided together: the tasks of an array, or a single run."""
    groups: dict[object, list[ReportCandidate]] = defaultdict(list)
    for each in found:
        run = each.run
        groups[run if run.array_job_id is None else (run.cluster, run.user, run.array_job_id)].append(each)
    return list(groups.values())


def wait_for_family(plan: DuePlan, told: Mapping[tuple[str, Told], int], config: Mail, now_s: int) -> None:
    """Delay ready runs whose job family had a mail within mail.family_wait_min: they come together when it is over.

    told: when each user was told each thing last. A family goes on at once with a failure of a kind that was not told,
    and so that no report becomes too old. Then all its ready runs go with it.
    """
    since_s, old_s = now_s - config.family_wait_min * 60, now_s - GIVE_UP_S // 2
    ready: list[ReportCandidate] = []
    for family in _families(plan.ready):
        last_s = [told.get((each.run.user, each.tells()), since_s) for each in family]
        if min(last_s) > since_s and min(each.run.end_s for each in family) >= old_s:
            plan.delayed[FAMILY_TOLD] += [each.run for each in family]
        else:
            ready += family
    plan.ready = ready


def _families(ready: Iterable[ReportCandidate]) -> list[list[ReportCandidate]]:
    """Groups of runs of one user, masked name, and GPU count. The tasks of an array stay together."""
    families: dict[object, list[ReportCandidate]] = defaultdict(list)
    for group in together(ready):
        run = group[0].run
        families[run.cluster, run.user, group[0].name_key, run.gpu_count] += group
    return list(families.values())


def leave_for_later(plan: DuePlan, left: Callable[[str], int]) -> None:
    """Delay ready runs of users who got enough mail. left: how many mails a user may still get now.

    They wait as runs, not as queued mails. So the next mail that is allowed reports all runs that ended until then.
    """
    plan.delayed[ENOUGH_MAIL] += [each.run for each in plan.ready if left(each.run.user) <= 0]
    plan.ready = [each for each in plan.ready if left(each.run.user) > 0]


def first_of(ready: Sequence[ReportCandidate], most: int) -> list[ReportCandidate]:
    """The runs to report now; the next run of the timer gets the others.

    Users take turns, so that one user's many jobs do not delay the jobs of others.
    """
    turns, before = list[tuple[int, ReportCandidate]](), Counter[str]()
    for each in ready:
        turns.append((before[each.run.user], each))
        before[each.run.user] += 1
    return [each for _, each in sorted(turns, key=itemgetter(0))[:most]]


def stuck(plan: DuePlan, until_s: int) -> Iterator[str]:
    """Name faults of the site that keep runs waiting that ended before until_s."""
    waiting = {why: [run for run in runs if run.end_s < until_s] for why, runs in plan.delayed.items() if runs}
    if runs := waiting.get(NO_COMMENT):
        yield f"reports that wait for their job's comment: {format_count(len(runs))}; see what `sacct --json` says"
    is_anybody_known = bool(plan.ready or plan.skipped or set(waiting) - {NOT_KNOWN})
    if (runs := waiting.get(NOT_KNOWN)) and not is_anybody_known:
        number = format_count(len(runs))
        yield f"reports that wait, as this host knows none of their users: {number}; see `getent passwd`"


def group_into_mails(
    ready: Sequence[ReportCandidate], config: Mail, left: Callable[[str], int]
) -> list[tuple[EndedRun, ...]]:
    """The runs of each mail, oldest end first: one mail for each job family, or, without mail.family_wait_min, for each
    job or array.

    A user gets only one mail if there would be more than mail.storm, or more than are left for the user.
    """
    by_user: dict[str, list[list[ReportCandidate]]] = defaultdict(list)
    for group in _families(ready) if config.family_wait_min else together(ready):
        by_user[group[0].run.user].append(group)
    mails = []
    for user, groups in by_user.items():
        is_one = len(groups) > min(config.storm, max(1, left(user)))
        parts = [[each for group in groups for each in group]] if is_one else groups
        mails += [tuple(each.run for each in group) for group in parts]
    return sorted(mails, key=lambda runs: (runs[0].end_s, runs[0].user, runs[0].job_id))
