"""The ended runs in the store, and the decision which are skipped, which wait, and which make one mail."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from almanac.config import Mail
from almanac.errors import StoreError
from almanac.units import format_count, printable
from reports.mail.recipients import NOT_KNOWN, NOT_WANTED, UNKNOWN, AddressError
from reports.mail.record import GIVEN_UP, EndedRun, Told
from slurm.states import JOB_FAILED
from telemetry.store.schema import schema_of, table_of
from telemetry.store.store import ClusterStore

_COLUMNS = (
    "job_id", "submit_s", "start_s", "end_s", "elapsed_s", "user", "gpu_count", "array_job_id", "state",
    "refuses_mail", "account", "name_key",
)  # fmt: skip
_ENDED = """
SELECT job_id, submit_s, "user", end_s, gpu_count, array_job_id FROM jobs
WHERE end_s >= $since_s AND start_s IS NOT NULL AND gpu_count > 0 AND coalesce("user", '') != ''
  AND coalesce(state, '') NOT IN ('REQUEUED', 'RESIZING')
ORDER BY end_s, job_id, submit_s
"""
_FACTS = """
WITH known AS (
  -- Slurm gives numbers again: a later job of another user is no later run.
  SELECT *, submit_s = max(submit_s) OVER (PARTITION BY job_id, "user") AS is_last
  FROM jobs WHERE job_id IN (SELECT job_id FROM wanted)),
unended AS (SELECT array_job_id FROM jobs WHERE end_s IS NULL AND array_job_id IN (SELECT array_job_id FROM wanted))
SELECT coalesce(j.elapsed_s, j.end_s - j.start_s, 0), coalesce(j.is_last, false),
       CASE WHEN j.job_id IS NULL THEN false ELSE j.refuses_mail END,
       coalesce(w.array_job_id IN (FROM unended), false),
       (SELECT count(refuses_mail) > 0 FROM jobs WHERE end_s >= $comments_s),
       coalesce(j.account, ''), coalesce(j.name_key, ''), coalesce(j.state, '')
FROM wanted w LEFT JOIN known j USING (job_id, submit_s, end_s) ORDER BY w.place
"""
_WANTED = schema_of("place int64, job_id int64, submit_s int64, end_s int64, array_job_id int64")
WAIT_S = 1800
"""Most seconds that a report waits for telemetry after the job ends: Prometheus is read every few minutes."""
ARRAY_WAIT_S = 24 * 3600
"""Time that a task of an array waits for the others after it ends: a user gets at most one such mail a day."""
GIVE_UP_S = 72 * 3600
"""Time after which almanac drops a report that the server does not take: longer than a weekend."""
NO_TELEMETRY = "telemetry has not arrived"
NO_COMMENT = "its comment is not known yet"
NO_ADDRESS_YET = "the address of their user cannot be looked up"
RAN_AGAIN = "the job ran again"
TOO_OLD = "too long ago"
OUTSIDE = "outside the pilot of mail.users and mail.accounts"
ENOUGH_MAIL = "their user got enough mail for now"
ARRAY_RUNS = "the array still runs"
MOST_SHOWN = 5
"""Most refused mails that a run names."""
FAMILY_TOLD = "their job family had a mail just now"
ENDED = "ended"


@dataclass(frozen=True)
class ReportCandidate:
    """A run that waits for its report. is_last: no later run of the job is known, so the job is over.

    refuses_mail: its comment has almanac:nomail; None: unknown. is_array_open: tasks of its array still run or pend.
    has_metrics: it has a row in job_metrics. has_comments: accounting has comments of other jobs that ended lately.
    name_key: the masked name. state: of the job in accounting, such as COMPLETED.
    """

    run: EndedRun
    elapsed_s: int
    is_last: bool = True
    refuses_mail: bool | None = False
    is_array_open: bool = False
    has_comments: bool = True
    account: str = ""
    name_key: str = ""
    state: str = ""
    has_metrics: bool = False

    def tells(self) -> Told:
        """Return the news of a mail about this run: the outcome of its job family."""
        return Told(self.run.cluster, self.name_key, self.run.gpu_count, outcome_of(self.state))


def outcome_of(state: str) -> str:
    """Name the end of a job for a mail: "ended FAILED"; "ended" for all states that are no failure."""
    return f"{ENDED} {state}" if state in JOB_FAILED else ENDED


def ended_since(store: ClusterStore, since_s: int) -> list[EndedRun]:
    """GPU runs that started, and ended at since_s or later, oldest end first. Raises StoreError.

    Leaves out runs that were requeued, and parts of jobs that were resized.
    """
    with store.connect() as db:
        store.view(db, "jobs", _COLUMNS)
        rows = db.execute(_ENDED, {"since_s": since_s}).fetchall()
    return [EndedRun(store.cluster, *row) for row in rows]


def known_ends(store: ClusterStore, job_ids: Collection[int]) -> dict[int, int]:
    """Return the latest end of each job's runs, by job id, unix seconds. Leaves out jobs that have not ended."""
    rows = store.read("jobs", ["job_id", "end_s"], among={"job_id": pa.array(sorted(job_ids), pa.int64())})
    ended = rows.filter(~pc.field("end_s").is_null()).group_by("job_id").aggregate([("end_s", "max")])
    return dict(zip(*(ended[name].to_numpy().tolist() for name in ("job_id", "end_s_max")), strict=True))


def look_up(store: ClusterStore, runs: Sequence[EndedRun], comments_s: int = 0) -> list[ReportCandidate]:
    """The facts about these runs, in their order. A run that is gone from the store counts as not the last one.

    comments_s: a known comment of a job that ended at this time or later shows that accounting keeps comments.
    Raises StoreError.
    """
    if not runs:
        return []
    wanted = [(place, run.job_id, run.submit_s, run.end_s, run.array_job_id) for place, run in enumerate(runs)]
    with store.connect() as db:
        store.view(db, "jobs", _COLUMNS)
        db.register("wanted", table_of(_WANTED, wanted))
        facts = db.execute(_FACTS, {"comments_s": comments_s}).fetchall()
    measured = _with_metrics(store, runs)
    return [
        ReportCandidate(run, *(*fact, (run.job_id, run.submit_s) in measured))
        for run, fact in zip(runs, facts, strict=True)
    ]


def _with_metrics(store: ClusterStore, runs: Sequence[EndedRun]) -> set[tuple[int, int]]:
    """Runs (job_id, submit_s) that have metrics. None of them if the metrics cannot be read.

    Then the metrics are computed again, which names the fault.
    """
    submits = [run.submit_s for run in runs]
    ids = {"job_id": pa.array(sorted({run.job_id for run in runs}), pa.int64())}
    try:
        rows = store.read("job_metrics", ("job_id", "submit_s"), min(submits), max(submits) + 1, ids)
    except StoreError:
        return set()
    return set(zip(rows["job_id"].to_numpy().tolist(), rows["submit_s"].to_numpy().tolist(), strict=True))


@dataclass
class MailOutcome:
    """Counts of one run. looks: how often each source was read. faults: what failed; the next run tries it again.

    sent: mails that the server took, by kind. refused: recipient and answer of each that it did not take, which is due
    again. left: mails that the rate limit leaves to the next run.
    """

    noticed: int = 0
    looks: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)
    left: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    delayed: Counter[str] = field(default_factory=Counter)
    spool: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield the lines to print; none if there was nothing to do, because a timer runs this every minute."""
        decisions = list(self.decisions())
        if self.noticed or self.sent or decisions:
            yield f"{format_count(self.noticed)} jobs have ended; mails sent: {said(self.sent) or 'none'}"
        yield from decisions

    def decisions(self) -> Iterator[str]:
        for title, counts in (
            ("no mail of", self.skipped), ("later", self.delayed), ("spool", Counter(self.spool)),
            ("mails left to the next run", Counter({"by mail.per_minute": self.left})),
        ):  # fmt: skip
            if words := said(counts):
                yield f"  {title}: {words}"
        for refused in self.refused[:MOST_SHOWN]:
            yield f"  not taken: {printable(refused, 500)}"
        if len(self.refused) > MOST_SHOWN:
            yield f"  not taken: {format_count(len(self.refused) - MOST_SHOWN)} more"


def said(counts: Counter[str]) -> str:
    return ", ".join(f"{format_count(number)} {what}" for what, number in counts.most_common() if number)


@dataclass
class DuePlan:
    """Runs sorted by whether a report is due.

    ready: runs to report now. skipped, delayed: runs by reason. A delayed run stays in the record for the next run of
    the timer.
    """

    skipped: dict[str, list[EndedRun]] = field(default_factory=lambda: defaultdict(list))
    delayed: dict[str, list[EndedRun]] = field(default_factory=lambda: defaultdict(list))
    ready: list[ReportCandidate] = field(default_factory=list)


@dataclass(frozen=True)
class MailPlanner:
    """Decide which ended runs get a report now.

    frequency: gives every, digest, off, or unknown for a user. recipient: gives the user's address, or None, or raises
    AddressError. telemetry_s: time up to which telemetry was read (unix seconds); None: do not wait for telemetry.
    failures: runs whose mail the server did not take.
    """

    frequency: Callable[[str], str]
    recipient: Callable[[str], str | None]
    config: Mail
    now_s: int
    telemetry_s: int | None = None
    failures: Collection[EndedRun] = ()

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
        """The reason why a run has to wait: the user's choice or the telemetry is unknown. "" if it need not wait.

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
        """The reason why a run gets no mail of its own; "" if it gets one."""
        if not each.is_last:
            return RAN_AGAIN
        if not is_in_pilot(self.config, each.run.user, each.account):
            return OUTSIDE
        if self._age_s(each) > GIVE_UP_S:
            return self._unknown_wish(each) or (GIVEN_UP if each.run in self.failures else TOO_OLD)
        if each.elapsed_s < self.config.min_elapsed_s:
            return "too short"
        if each.refuses_mail:
            return "the job wants none"
        if reason := NOT_WANTED.get(self.frequency(each.run.user)):
            return reason
        return "" if self._has_unknown_address(each) or self.recipient(each.run.user) else "no address"


def is_in_pilot(config: Mail, user: str, account: str) -> bool:
    """Return True if the user gets mail about jobs of the account: always without mail.users and mail.accounts."""
    is_open = not config.users and not config.accounts
    return is_open or user in config.users or account in config.accounts


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
    turns = Counter[str]()

    def turn(each: ReportCandidate) -> int:
        turns[each.run.user] += 1
        return turns[each.run.user]

    return sorted(ready, key=turn)[:most]


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
    ready: Sequence[ReportCandidate], config: Mail, left: Callable[[str], int], failures: Collection[EndedRun] = ()
) -> list[tuple[EndedRun, ...]]:
    """The runs of each mail: one mail for each job family, or, without mail.family_wait_min, for each job or array.

    The mails that the server did not refuse before come first, oldest end first: dead mailboxes delay no other.

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
    known = set(failures)
    return sorted(mails, key=lambda runs: (not known.isdisjoint(runs), runs[0].end_s, runs[0].user, runs[0].job_id))
