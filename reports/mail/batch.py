"""Make the mails about jobs and weeks, in slices of bounded memory, and hand them over."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from almanac.config import Config, Mail
from almanac.errors import ConfigError, NotAllowedError, ServerError, StoreError
from almanac.units import DAY_S, printable
from reports.job.build import build_runs
from reports.job.conclusions import report_of
from reports.job.evidence import JobContext
from reports.job.render import render_email
from reports.job.rules import ALL_IDLE, SOME_IDLE
from reports.mail.cpu_jobs import users_to_tell
from reports.mail.digest import Digest, render_burst, render_weekly
from reports.mail.due import ENDED, RAN_AGAIN, MailOutcome, ReportCandidate, ended_since, is_in_pilot, together
from reports.mail.families import DigestJob, job_of, told_of_job
from reports.mail.handover import MailAgent, MailRefusedError, compose
from reports.mail.recipients import UNKNOWN, USEFUL, WEEKLY, AddressBook, AddressError, read
from reports.mail.record import GIVEN_UP, RETRY_S, TOLD_S, WEEK, WEEK_TRIED, EndedRun, MailRecord, Message, Told
from reports.mail.week import WeekSpan, is_known, last_week
from telemetry.site import Site
from telemetry.store.store import ClusterStore

SLICE = 100
"""Reports rendered together. With samples and pictures they take about 100 MB at most."""
DIGEST_SLICE = 500
RECENT_S = 2 * 3600
GAP_S = 3600
LATEST_S = 2 * DAY_S
"""Seconds after a week until which its digests are tried."""
IDLE_RULES = ALL_IDLE | SOME_IDLE
MOST_REFUSED = 3
"""Recipients in a row, refused by 5xx or by the program, that end a run. One dead mailbox never ends it."""
NOTHING_NEW = "nothing new: in the weekly digest"
_PREVIEW = "send a preview to yourself with --to ADDRESS, or write the report to a file: --html FILE"


def spans_to_summarize(ready: Sequence[ReportCandidate], now_s: int) -> list[tuple[int, int]]:
    """Spans [since_s, until_s) with ends of runs that have no metrics, or metrics that may miss late samples.

    Metrics of a run that ended long ago have all samples. Ends that are far apart make separate spans, because each
    span computes every job that ran within it.
    """
    ends = sorted({each.run.end_s for each in ready if not each.has_metrics or each.run.end_s > now_s - RECENT_S})
    cuts = [place for place, (one, next_s) in enumerate(pairwise(ends), 1) if next_s - one > GAP_S]
    blocks = [ends[low:high] for low, high in pairwise([0, *cuts, len(ends)])]
    return [(block[0] - 1, block[-1] + 1) for block in blocks if block]


@dataclass
class MailBatch:
    """The mails that are due for one cluster. recipient: gives a user's address.

    outcome gets the number of mails, and a fault for each mail that almanac could not make. left: mails that the rate
    limit still allows. refused: recipients that the server has refused for good since the last mail that it took.
    """

    store: ClusterStore
    config: Config
    clock: Callable[[], int]
    recipient: Callable[[str], str | None]
    record: MailRecord
    agent: MailAgent
    outcome: MailOutcome
    left: int
    refused: set[str] = field(default_factory=set)

    @property
    def now_s(self) -> int:
        return self.clock()

    def send(self, mails: Sequence[tuple[EndedRun, ...]]) -> None:
        """Send the mails about these runs, as many as the rate limit allows. The others are due in the next run.

        A mail that cannot be made, or that the server refuses, delays no other. Raises ServerError if the server takes
        no mail now, ConfigError, and StoreError.
        """
        self.outcome.left += max(0, len(mails) - self.left)
        mails = mails[: self.left]
        for first in range(0, len(mails), SLICE):
            part = mails[first : first + SLICE]
            contexts = self._slice([runs[0] for runs in part if len(runs) == 1])
            self.agent.hang_up()  # it could have been idle for too long
            for runs in part:
                self._send_one(runs, contexts if len(runs) == 1 else None)

    def _slice(self, singles: Sequence[EndedRun]) -> dict[EndedRun, JobContext] | None:
        try:
            return self._contexts(singles, has_series=True)
        except Exception:  # read each job by itself
            return None

    def _send_one(self, runs: tuple[EndedRun, ...], contexts: dict[EndedRun, JobContext] | None) -> None:
        is_one = len(runs) == 1
        try:
            known = self._contexts(runs, has_series=is_one) if contexts is None else contexts
            found = [known[run] for run in runs if run in known]
            if not found:
                self.record.skip(runs, RAN_AGAIN, self.now_s)
                return
            digest = self._job_mail(found[0]) if is_one else render_burst(found, self.config)
            address = self.recipient(runs[0].user) or ""
            kind = "job" if is_one else "digest"
            message = compose(digest.rendered, runs, address, self.config, self.now_s, kind=kind)
        except ConfigError:
            raise
        except Exception as error:  # one job's data must not block the mail of all others
            said = f"{type(error).__name__}: {error}"
            self.outcome.faults.append(f"report of job {runs[0].job_id}: {said}")
            self.record.failed(runs, f"could not be made: {said}", self.now_s)
            return
        self.hand_over(replace(message, told=tuple(digest.told)))

    def hand_over(self, message: Message) -> bool:
        """Return True if the server took the mail, False if the mail is due again. Recorded before and after.

        Raises ServerError if the server takes no mail now, and StoreError.
        """
        if not self.left:
            self.outcome.left += 1
            return False
        self.agent.open()
        self.record.trying(message, self.clock())
        try:
            self.agent.hand_over(message)
        except ServerError as error:
            self.record.failed(message.runs, str(error), self.clock())
            if not isinstance(error, MailRefusedError):
                raise
            self.outcome.refused.append(f"{message.recipient}: {error}")
            if error.is_final:
                self.refused.add(message.recipient)
            if len(self.refused) >= MOST_REFUSED:
                raise ServerError(f"{MOST_REFUSED} recipients in a row: {error}", error.hint) from error
            return False
        self.record.taken(message, self.clock())
        self.outcome.sent[message.kind] += 1
        self.refused.clear()
        self.left -= 1
        return True

    def _job_mail(self, context: JobContext) -> Digest:
        return Digest(render_email(report_of(context)), told_of_job(job_of(context)))

    def useful(self, ready: Sequence[ReportCandidate], frequency: Callable[[str], str]) -> list[ReportCandidate]:
        """The runs to report now. The others, of users who chose `useful`, are skipped: the weekly digest has them.

        Runs whose data cannot be read stay, and `send` names the fault.
        """
        jobs = self._jobs([each.run for each in ready if frequency(each.run.user) == USEFUL])
        news = News({*self.record.told_since(self.now_s - TOLD_S, self.store.cluster)})
        wanted: list[ReportCandidate] = []
        others: list[EndedRun] = []
        for group in together(ready):
            runs = [each.run for each in group]
            known = [jobs[run] for run in runs if run in jobs]
            if len(known) < len(runs) or news.has_any(runs[0].user, known):
                wanted += group
            else:
                others += runs
        if others:
            self.record.skip(others, NOTHING_NEW, self.now_s)
            self.outcome.skipped[NOTHING_NEW] += len(others)
        return wanted

    def send_weekly(self, frequency: Callable[[str], str]) -> None:
        """Send the digest of the last whole week to each user who wants it, once the week is known.

        The first digests are about the week in which mail was switched on. What the server does not take, and what
        cannot be made, is tried again until LATEST_S after the week, and so is the digest of a user whom the system
        does not know now, or whose address cannot be looked up. Raises ServerError, ConfigError, StoreError.
        """
        record, store, now_s = self.record, self.store, self.now_s
        week, told_s = last_week(now_s), record.mark(WEEK, store.cluster)
        if told_s is not None and told_s < week.end_s:
            tried_s = record.mark(WEEK_TRIED, store.cluster) or 0
            if tried_s <= now_s < tried_s + RETRY_S or not is_known(store, self.config, week, now_s):
                return
            is_in_pilot = week_pilot(store, self.config.mail, week.start_s, week.end_s)
            ended = {run.user for run in ended_since(store, week.start_s) if run.end_s < week.end_s}
            ended |= users_to_tell(store, self.config, week)
            done = [self._send_week(user, week, frequency(user)) for user in sorted(filter(is_in_pilot, ended))]
            if not all(done) and now_s < week.end_s + LATEST_S:
                if not self.outcome.left:
                    record.set_mark(WEEK_TRIED, store.cluster, now_s)
                return
            self._give_up_weekly()
        record.set_mark(WEEK, store.cluster, week.end_s)

    def _send_week(self, user: str, week: WeekSpan, wanted: str) -> bool:
        """Return False if the user's digest has to be tried again."""
        run = EndedRun(self.store.cluster, 0, week.start_s, user, week.end_s, 0)
        if wanted not in WEEKLY or self.record.is_taken(run):
            return wanted != UNKNOWN
        try:
            if (address := self.recipient(user)) is None:
                return True
            digest = render_weekly(self.store, user, self.config, self.now_s)
            if digest is None:
                return True
            given = {"cluster": run.cluster, "user": user, "kind": "weekly", "key": week.name}
            message = compose(digest.rendered, (), address, self.config, self.now_s, **given)
        except AddressError:
            return False
        except ConfigError:
            raise
        except Exception as error:
            self.outcome.faults.append(f"weekly digest of {user}: {type(error).__name__}: {error}")
            return False
        # It tells advice, but is no reason for later failures to wait as like runs.
        told = tuple(each for each in digest.told if not each.what.startswith(ENDED))
        return self.hand_over(replace(message, runs=(run,), told=told))

    def _give_up_weekly(self) -> None:
        old = {run: said for run, said in self.record.failures(self.store.cluster).items() if not run.job_id}
        if old:
            self.record.skip(list(old), GIVEN_UP, self.now_s)
            said = f"weekly digests that will never be sent: {len(old)}, the last one to {[*old.values()][-1]}"
            self.outcome.faults.append(said)

    def _jobs(self, runs: Sequence[EndedRun]) -> dict[EndedRun, DigestJob]:
        found: dict[EndedRun, DigestJob] = {}
        for first in range(0, len(runs), DIGEST_SLICE):
            with contextlib.suppress(Exception):
                contexts = self._contexts(runs[first : first + DIGEST_SLICE], has_series=False)
                found |= {run: job_of(context) for run, context in contexts.items()}
        return found

    def _contexts(self, runs: Sequence[EndedRun], *, has_series: bool) -> dict[EndedRun, JobContext]:
        """Contexts by run, without runs that accounting has changed since."""
        found: dict[EndedRun, JobContext] = {}
        for first in range(0, len(runs), DIGEST_SLICE):
            part = runs[first : first + DIGEST_SLICE]
            contexts = self._built([(run.job_id, run.submit_s) for run in part], has_series)
            by_key = {(context.job_id, context.job["submit_s"], context.job["end_s"]): context for context in contexts}
            found |= {run: by_key[key] for run in part if (key := (run.job_id, run.submit_s, run.end_s)) in by_key}
        return found

    def _built(self, runs: Sequence[tuple[int, int]], has_series: bool) -> Sequence[JobContext]:
        """Contexts of these runs; without advice and ranks if a file of other jobs is damaged."""
        given = Site.of(self.store, self.config, self.now_s), runs
        try:
            return build_runs(*given, has_series=has_series)
        except StoreError as error:
            contexts = build_runs(*given, has_series=has_series, is_bare=True)
            fault = f"reports are without advice and ranks: {error}"
            if fault not in self.outcome.faults:
                self.outcome.faults.append(fault)
            return contexts


@dataclass
class News:
    """Advice that recent mails gave, by user. It grows with each job that is judged, so that advice is news once."""

    told: set[tuple[str, Told]]

    def has_any(self, user: str, jobs: Iterable[DigestJob]) -> bool:
        """Return True if a mail about these jobs, such as the tasks of an array, is useful now."""
        news = [self._is_news(user, job) for job in jobs]  # of all jobs: each adds what it tells
        return any(news)

    def _is_news(self, user: str, job: DigestJob) -> bool:
        if job.conclusions.is_fine and not job.has_failed:
            return False  # how it could run faster is in the weekly digest
        advice = {(user, job.told(each.rule)) for each in job.conclusions.suggestions}
        new = advice - self.told
        self.told |= new
        return bool(job.has_failed or new or not IDLE_RULES.isdisjoint(job.conclusions.rules))


def week_pilot(store: ClusterStore, config: Mail, since_s: int, until_s: int) -> Callable[[str], bool]:
    """Return a test for the users who get the digest of the jobs that ended in [since_s, until_s).

    The pilot names such a user, or the account of one of these jobs. Raises StoreError.
    """
    if not config.accounts:
        return lambda user: is_in_pilot(config, user, "")
    accounts = pa.array(config.accounts, pa.string())
    rows = store.read("jobs", ["user", "end_s"], among={"account": accounts})
    rows = rows.filter((pc.field("end_s") >= since_s) & (pc.field("end_s") < until_s))
    users = {*config.users, *rows["user"].to_pylist()}
    return users.__contains__


def owner_mails(
    contexts: Sequence[JobContext], config: Config, caller: str, now_s: int, preview_to: str = ""
) -> list[Message]:
    """One mail for each job, or for each user with more than mail.storm jobs.

    preview_to: where all mails go, instead of to the jobs' owners. The Message-ID differs from the one of the mail
    after the job, because mail clients would hide the second mail. Raises NotAllowedError for another user who
    wants no mail, perhaps, or is outside the pilot, ConfigError without an address, and AddressError.
    """
    by_user: dict[str, list[JobContext]] = defaultdict(list)
    for context in contexts:
        by_user[context.user].append(context)
    addresses, messages = AddressBook(config.mail), []
    for user, own in by_user.items():
        if not preview_to and user != caller:
            _refuse_unwanted(user, own, config)
        recipient = preview_to or _recipient(user, addresses)
        parts = [own] if len(own) > config.mail.storm else [[each] for each in own]
        messages += [_message(part, recipient, config, now_s) for part in parts]
    return messages


def _refuse_unwanted(user: str, own: Sequence[JobContext], config: Config) -> None:
    """Raises NotAllowedError for a user to whom an operator must not send mail."""
    wanted = read(user, config).frequency
    if wanted == UNKNOWN:
        said = f"the system does not know {printable(user)}, so whether they want mail is unknown"
        raise NotAllowedError(said, f"look up `getent passwd`, or {_PREVIEW}")
    if wanted == "off":
        raise NotAllowedError(f"{printable(user)} wants no mail", _PREVIEW)
    if not all(is_in_pilot(config.mail, user, each.job["account"] or "") for each in own):
        raise NotAllowedError(f"{printable(user)} is outside the pilot of mail.users and mail.accounts", _PREVIEW)


def _recipient(user: str, addresses: AddressBook) -> str:
    recipient = addresses.address(user)
    if recipient is None:
        said = f"{printable(user)} has no address by mail.address_map, mail.address_command, or mail.recipient"
        raise ConfigError(said, f"see `Who gets mail` in docs/mail.md, or {_PREVIEW}")
    return recipient


def _message(contexts: Sequence[JobContext], recipient: str, config: Config, now_s: int) -> Message:
    runs = [
        EndedRun(
            cluster=context.cluster,
            job_id=context.job_id,
            submit_s=context.job["submit_s"],
            user=context.user,
            end_s=context.job["end_s"] or now_s,
            gpu_count=context.gpu_count,
            array_job_id=context.job["array_job_id"],
        )
        for context in contexts
    ]
    is_one = len(contexts) == 1
    rendered = render_email(report_of(contexts[0])) if is_one else render_burst(contexts, config).rendered
    kind = "job" if is_one else "digest"
    return compose(rendered, runs, recipient, config, now_s, kind=kind, key=f"asked for at {now_s}")
