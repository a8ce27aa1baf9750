"""One run of the mail timer: notice jobs that have ended, wait for their telemetry, and mail their reports.

`almanac mail run` calls this.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from almanac.config import Config
from almanac.errors import AlmanacError, BusyError, ConfigError, ServerError, SourceError, StoreError
from almanac.units import HOUR_S, counted, format_count
from reports.job.rules import choices_of
from reports.mail.due import (
    GIVE_UP_S,
    NO_TELEMETRY,
    WAIT_S,
    DuePlan,
    MailOutcome,
    MailPlanner,
    ReportCandidate,
    ended_since,
    first_of,
    group_into_mails,
    known_ends,
    leave_for_later,
    look_up,
    stuck,
    wait_for_family,
)
from reports.mail.recipients import USEFUL, AddressBook, folder_of, mark_read, read
from reports.mail.record import ASKED, DAILY, DOUBTED_RUNS, GIVEN_UP, SEEN, STARTED, TOLD_S, WEEK, EndedRun, MailRecord
from reports.mail.week import last_week

if TYPE_CHECKING:
    from reports.mail.batch import MailBatch
    from reports.mail.handover import MailAgent
    from slurm.commands import SlurmCommands
    from telemetry.ingest import SourceName
    from telemetry.sources.hook_records import Notice, Spool
    from telemetry.sources.source import RowBatch, Source
    from telemetry.store.store import ClusterStore

LATE_S = 600
"""slurmdbd can learn of an end this much later than the queried span; later ends come with `almanac ingest`."""
CLOCKS_S = 600
"""The hook's clock can be this far behind the end that accounting has."""
MOST_AHEAD_S = 12 * HOUR_S
"""A run this long after the last one does nothing yet: its clock may be wrong, and old mail would be given up."""
MOST_RUNS = 20_000
"""Runs that one run of the timer reports at most; the next one reports the others."""
KEEP_DAYS = 90
"""Days that the record keeps decisions: as long as operators ask after a mail."""
SOURCE = "report-sacct"
"""The name of the accounting query of a run in MailOutcome.looks."""
PER_USER_HOUR = 20
"""More mails in an hour tell a user nothing that one digest does not."""
TO_JUDGE = "their user wants useful mail only; a run decides when it has their metrics"


@dataclass
class MailRun:
    """One run for one cluster. clock: seconds since 1970, now.

    read_source: reads a configured source into the store, from the point reached last. Raises AlmanacError.
    """

    store: ClusterStore
    config: Config
    commands: SlurmCommands
    read_source: Callable[[SourceName], None]
    clock: Callable[[], int]
    record: MailRecord
    outcome: MailOutcome = field(default_factory=MailOutcome)

    @property
    def cluster(self) -> str:
        return self.store.cluster

    @cached_property
    def addresses(self) -> AddressBook:
        """Users' addresses, each looked up once in a run."""
        return AddressBook(self.config.mail)

    @cached_property
    def frequency(self) -> Callable[[str], str]:
        """A user's chosen frequency, looked up once."""
        return cache(lambda user: read(user, self.config).frequency)

    def recipient(self, user: str) -> str | None:
        """Return the user's address. None without one. Raises AddressError if it cannot be looked up now."""
        return self.addresses.address(user)

    def preview(self) -> tuple[list[tuple[EndedRun, ...]], bool]:
        """Return the runs of each mail that `run` would send of what the store knows. Asks, and sends, nothing.

        Changes the record: give it a copy. Also returns True if an earlier run had mail switched on. Raises StoreError.
        """
        started_s = self._mark(STARTED) if self.config.mail.server else None
        self.record.notice(ended_since(self.store, self._earliest_end_s(started_s)))
        plan = self._plan() or DuePlan()
        self._hold_back(plan)
        judged = [each.run for each in plan.ready if self.frequency(each.run.user) == USEFUL]
        plan.delayed[TO_JUDGE] += judged
        plan.ready = [each for each in plan.ready if self.frequency(each.run.user) != USEFUL]
        self.outcome.skipped.update({reason: len(runs) for reason, runs in plan.skipped.items()})
        self.outcome.delayed.update({reason: len(runs) for reason, runs in plan.delayed.items()})
        return group_into_mails(plan.ready, self.config.mail, self._mails_left()), started_s is not None

    def run(self) -> MailOutcome:
        """Notice, decide, and send. Raises StoreError."""
        most_s = max(HOUR_S, min(MOST_AHEAD_S, GIVE_UP_S // 2))
        if not self.record.believes(self.clock(), self.cluster, most_s):
            self.outcome.faults.append(
                "the clock was set, or this host was off for long: no mail is sent or given up before the time is "
                f"right, or {DOUBTED_RUNS} runs of the timer have passed"
            )
            return self.outcome
        if killed := self.record.killed():
            number = counted(len(killed), "mail")
            said = f"a run was killed while it handed over {number}, the last one to {killed[-1]}"
            self.outcome.faults.append(f"{said}: it is sent once more, and may come twice")
        self._look()
        try:
            self._send()
        except (ServerError, ConfigError) as error:
            self._fault(error, "mail server: ")
        self._daily()
        owner_uid = self.store.root.stat().st_uid
        mark_read(folder_of(self.config), self.clock(), socket.gethostname(), owner_uid)
        self.outcome.faults += self.addresses.faults
        if fault := choices_of(self.config).rules_fault:
            self._fault(fault)
        return self.outcome

    def _look(self) -> None:
        """Notice the jobs that have ended."""
        self._start()
        notices = self._spooled()
        if notices:
            self._ask_accounting()
        self._notice(is_asked=bool(notices))
        self._settle(notices)

    def _send(self) -> None:
        """Send the mails that are due. Raises ServerError if the mail server takes none, ConfigError, StoreError."""
        plan = self._planned()
        is_week_due = not self._is_week_told()
        if plan is None and not is_week_due:
            return
        from reports.mail.batch import MailBatch
        from reports.mail.handover import MailAgent

        config, clock = self.config, self.clock
        left = max(0, config.mail.per_minute - self.record.taken_since(clock() - 59).total())
        with MailAgent(config.mail) as agent:
            batch = MailBatch(self.store, config, clock, self.recipient, self.record, agent, self.outcome, left)
            if plan is not None:
                self._send_reports(plan, batch)
            if is_week_due:
                batch.send_weekly(self.frequency)

    def _send_reports(self, plan: DuePlan, batch: MailBatch) -> None:
        ready = self._decided(plan, batch.agent)
        wanted, failures = batch.useful(ready, self.frequency), self.record.failures(self.cluster)
        batch.send(group_into_mails(wanted, self.config.mail, self._mails_left(), failures))

    def _is_week_told(self) -> bool:
        return (self._mark(WEEK) or 0) >= last_week(self.clock()).end_s

    def _start(self) -> None:
        """The first run mails no job that ended before it."""
        if self._mark(STARTED) is None:
            self.record.start_now(self.cluster, self.clock())

    def _spooled(self) -> list[Notice]:
        spool = spool_of(self.config, self.store.root, self.cluster)
        if not spool.is_there:
            return []
        try:
            notices, counts = spool.read(self.clock())
        except SourceError as error:
            self._fault(error)
            return []
        self.outcome.spool = {"read": counts.kept, **counts.dropped}
        self.outcome.faults += [
            f"spool: {number} moved to {spool.folder}/bad: {reason}, such as {counts.examples[reason]}"
            for reason, number in counts.dropped.items()
        ]
        return notices

    def _ask_accounting(self) -> None:
        """Read the jobs that may need mail, without their steps, and move a mark of our own.

        The mark of `almanac ingest` stays, because it has to read all jobs with their steps.
        """
        from telemetry.sources.sacct import SacctSource

        config, now_s = self.config, self.clock()
        ingested_s = self.store.watermark("sacct")
        if ingested_s is None:
            self.outcome.faults.append("accounting has never been read: run `almanac ingest` first, or its timer")
            return
        asked_s, started_s = (self._mark(name) or 0 for name in (ASKED, STARTED))
        # A clock that was ahead can have left a mark in the future.
        since_s = min(now_s, max(asked_s, ingested_s, started_s, now_s - GIVE_UP_S))
        self.record.set_mark(ASKED, self.cluster, since_s)
        slurm = replace(config.slurm, overlap_hours=0)
        source = SacctSource(self.commands, self.cluster, config.tiers, slurm, self.clock, name=SOURCE)
        if config.bindings.prolog_dir:
            self._read("prolog", lambda: self.read_source("prolog"))
        self._read(SOURCE, lambda: self._ingest(source, since_s - LATE_S, now_s))

    def _ingest(self, source: Source, since_s: int, until_s: int) -> None:
        from telemetry.ingest import IngestResult, ingest

        marked = MarkedSource(source, lambda time_s: self.record.set_mark(ASKED, self.cluster, time_s))
        result = IngestResult(source.name, since_s, until_s)
        ingest(marked, self.store, since_s, until_s, result, lambda rows, reached_s: None)

    def _read(self, name: str, read: Callable[[], None]) -> None:
        self.outcome.looks[name] += 1
        try:
            read()
        except AlmanacError as error:
            self._fault(error)

    def _notice(self, *, is_asked: bool) -> None:
        """Add runs that have ended to the record, unless accounting was not read since the last time.

        This looks at all runs that can still get mail, because accounting can learn of an end hours late.
        """
        reached_s = self.store.watermark("sacct")
        seen_s, started_s = (self._mark(name) or 0 for name in (SEEN, STARTED))
        if reached_s is None or (reached_s <= seen_s <= self.clock() and not is_asked):
            return
        ended = ended_since(self.store, self._earliest_end_s(started_s))
        self.outcome.noticed = self.record.notice(ended)
        self.record.set_mark(SEEN, self.cluster, min(reached_s, self.clock()))

    def _settle(self, notices: Sequence[Notice]) -> None:
        """Remove the files of jobs whose end accounting knows, and old files whose jobs it does not know."""
        if not notices:
            return
        ends = known_ends(self.store, {notice.job_id for notice in notices})
        ahead_s = self.clock() + CLOCKS_S  # the time of a later file is wrong; accounting was asked just now
        done = [
            notice
            for notice in notices
            if notice.seen_s > ahead_s or ends.get(notice.job_id, 0) >= notice.seen_s - CLOCKS_S
        ]
        known = set(done)
        asked_s = max(self.store.watermark("sacct") or 0, self._mark(ASKED) or 0)
        old_s = min(self.clock() - WAIT_S, asked_s)
        lost = [notice for notice in notices if notice not in known and notice.seen_s < old_s]
        spool_of(self.config, self.store.root, self.cluster).remove([*done, *lost])
        self.outcome.spool["not in accounting"] = len(lost)

    def _earliest_end_s(self, started_s: int | None) -> int:
        """Jobs that ended before get no mail. started_s: when mail was switched on; None: not yet.

        If a clock that was ahead left started_s in the future, each run looks at the last hour.
        """
        now_s = self.clock()
        if started_s is None:
            return now_s - 86_400
        return max(now_s - HOUR_S if started_s > now_s else started_s, now_s - GIVE_UP_S)

    def _plan(self) -> DuePlan | None:
        """Plan the runs of the record that wait for a decision; None if there are none.

        Comments of the last half of GIVE_UP_S show whether accounting keeps comments. If it stops, mail goes
        on in time.
        """
        now_s = self.clock()
        found = look_up(self.store, self.record.due(now_s, self.cluster), now_s - GIVE_UP_S // 2)
        if not found:
            return None
        servers = self.config.prometheus.source_names
        telemetry_s = (self.store.telemetry_mark(servers) or 0) if servers else None
        failures = self.record.failures(self.cluster)
        return MailPlanner(self.frequency, self.recipient, self.config.mail, now_s, telemetry_s, failures).plan(found)

    def _hold_back(self, plan: DuePlan) -> None:
        """Delay what waits for its job family, and what is too much for its user now."""
        told = self.record.told_since(self.clock() - TOLD_S, self.cluster)
        wait_for_family(plan, told, self.config.mail, self.clock())
        leave_for_later(plan, self._mails_left())

    def _mails_left(self) -> Callable[[str], int]:
        """Return how many mails each user may still get within an hour. A weekly digest comes on top, and counts."""
        used = self.record.taken_since(self.clock() - HOUR_S + 1)
        return lambda user: PER_USER_HOUR - used[user]

    def _planned(self) -> DuePlan | None:
        plan = self._plan()
        if plan is None or not self._needs_telemetry(plan):
            return plan
        self._read("prometheus", lambda: self.read_source("prometheus"))
        return self._plan()

    def _needs_telemetry(self, plan: DuePlan) -> bool:
        """Return True if Prometheus has telemetry that a run waits for. The first time, `almanac ingest` reads it."""
        prometheus = self.config.prometheus
        mark_s = self.store.telemetry_mark(prometheus.source_names)
        until_s = self.clock() - prometheus.delay_s
        return mark_s is not None and any(run.end_s <= until_s for run in plan.delayed[NO_TELEMETRY])

    def _decided(self, plan: DuePlan, agent: MailAgent) -> list[ReportCandidate]:
        """Runs that are ready, with their metrics computed. The others are skipped in the record, or wait in it.

        Raises ServerError, before anything is computed, if the mail server takes no mail.
        """
        old_s = self.clock() - WAIT_S
        self.outcome.faults += stuck(plan, old_s)
        self._hold_back(plan)
        self._skip(plan)
        plan.ready = first_of(plan.ready, MOST_RUNS)
        if plan.ready:
            agent.open()
            agent.hang_up()
        if not self._summarize(plan.ready):
            plan.delayed["another run computes job metrics"] = [e.run for e in plan.ready if e.run.end_s > old_s]
            plan.ready = [each for each in plan.ready if each.run.end_s <= old_s]
        self.outcome.delayed.update({reason: len(runs) for reason, runs in plan.delayed.items() if runs})
        return plan.ready

    def _skip(self, plan: DuePlan) -> None:
        given_up, failures = plan.skipped.get(GIVEN_UP), self.record.failures(self.cluster)
        for reason, runs in plan.skipped.items():
            self.record.skip(runs, reason, self.clock())
            self.outcome.skipped[reason] += len(runs)
        if given_up:
            number = format_count(len(given_up))
            said = f"jobs whose mail will never be sent: {number}, the last one to {failures[given_up[-1]]}"
            self.outcome.faults.append(said)

    def _summarize(self, ready: Sequence[ReportCandidate]) -> bool:
        """Compute metrics of these runs. False if another process computes metrics now."""
        from reports.mail.batch import spans_to_summarize
        from telemetry.metrics.summary import summarize

        for since_s, until_s in spans_to_summarize(ready, self.clock()):
            try:
                summarize(self.store, self.config, since_s, until_s)
            except BusyError:
                return False
            except StoreError as error:
                self._fault(error)  # a damaged file: reports of this span go out without metrics
        return True

    def _daily(self) -> None:
        """Forget old decisions in the first run of a day."""
        today_s = self.clock() // 86400 * 86400
        if (self._mark(DAILY) or 0) < today_s:
            self.record.forget(today_s - KEEP_DAYS * 86400)
            self.record.set_mark(DAILY, self.cluster, today_s)

    def _mark(self, name: str) -> int | None:
        return self.record.mark(name, self.cluster)

    def _fault(self, error: AlmanacError, where: str = "") -> None:
        self.outcome.faults.append(f"{where}{error}" + (f"; try: {error.hint}" if error.hint else ""))


def spool_of(config: Config, store_root: Path, cluster: str) -> Spool:
    """The spool of the hook. Members of the store's group may remove files from it."""
    from telemetry.sources.hook_records import Spool

    gids = {os.getegid(), *os.getgroups(), store_root.stat().st_gid}
    return Spool(Path(config.mail.spool_dir or os.devnull), cluster, gids)


@dataclass(frozen=True)
class MarkedSource:
    """A source whose mark is kept outside of the store. set_mark: gets each watermark once its batch is stored."""

    source: Source
    set_mark: Callable[[int], None]

    @property
    def name(self) -> str:
        return self.source.name

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        for batch in self.source.read(since_s, until_s):
            yield replace(batch, watermark_s=None)
            if batch.watermark_s is not None:
                self.set_mark(batch.watermark_s)
