"""One run of the mail timer: notice jobs that have ended, wait for their telemetry, and mail their reports.

`almanac report --due` calls this.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from almanac.config import Config
from almanac.errors import AlmanacError, BusyError, ConfigError, SourceError, StoreError
from almanac.units import HOUR_S
from reports.job.site_choices import choices_of
from reports.mail.last_read import mark_read
from reports.mail.mail_site import MailSite, spool_of
from reports.mail.marks import ASKED, DAILY, SEEN, STARTED, MarkedSource, start_now, take_from_store
from reports.mail.outbox import DOUBTED_RUNS
from reports.mail.outcome import LEFT, Outcome
from reports.mail.preferences import folder_of

if TYPE_CHECKING:
    from reports.mail.due import DuePlan
    from reports.mail.ended import ReportCandidate
    from reports.mail.outbox import Outbox
    from telemetry.slurm.spool import Notice
    from telemetry.sources.base import Source
    from telemetry.store.cluster_store import ClusterStore

LATE_S = 600
"""slurmdbd can learn of an end this much later than the queried span; later ends come with `almanac ingest`."""
CLOCKS_S = 600
"""The hook's clock can be this far behind the end that accounting has."""
MOST_AHEAD_S = 12 * HOUR_S
"""A run this long after the last one does nothing yet: its clock may be wrong, and old mail would be given up."""
MOST_RUNS = 20_000
"""Runs that one run of the timer reports at most; the next one reports the others."""
KEEP_DAYS = 90
"""Days that the outbox keeps sent mails: as long as operators ask after one."""
SOURCE = "report-sacct"
"""The name of the accounting query of a run in Outcome.looks."""


@dataclass
class MailRun:
    """One run for one cluster."""

    site: MailSite
    outbox: Outbox
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def store(self) -> ClusterStore:
        return self.site.store

    @property
    def cluster(self) -> str:
        return self.site.store.cluster

    @property
    def config(self) -> Config:
        return self.site.config

    def run(self) -> Outcome:
        """Notice, decide, and send. Queued mail is tried even if the rest fails. Raises StoreError."""
        take_from_store(self.outbox, self.store)
        most_s = max(HOUR_S, min(MOST_AHEAD_S, self.site.give_up_s // 2))
        if not self.outbox.believes(self.site.clock(), self.cluster, most_s):
            self.outcome.faults.append(
                "the clock was set, or this host was off for long: no mail is sent or given up before the time is "
                f"right, or {DOUBTED_RUNS} runs of the timer have passed"
            )
            return self.outcome
        self.outbox.set_back_times(self.site.clock())
        self._deliver()
        try:
            self._decide()
        except Exception:
            self._deliver()
            raise
        self._deliver()
        owner_uid = self.store.root.stat().st_uid
        mark_read(folder_of(self.config), self.site.clock(), socket.gethostname(), owner_uid)
        self.outcome.faults += self.site.addresses.faults
        if fault := choices_of(self.config).rules_fault:
            self._fault(fault)
        return self.outcome

    def _decide(self) -> None:
        self._start()
        notices = self._spooled()
        if notices:
            self._ask_accounting()
        self._notice(is_asked=bool(notices))
        self._settle(notices)
        if found := self.site.look_up_waiting(self.outbox, self.site.clock()):
            self._put(self._decided(self._planned(found)))
        self._put_weekly()
        self._daily()

    def _start(self) -> None:
        """The first run mails no job that ended before it."""
        if self._mark(STARTED) is None:
            start_now(self.outbox, self.cluster, self.site.clock())

    def _spooled(self) -> list[Notice]:
        spool = spool_of(self.config, self.store.root, self.cluster)
        if not spool.is_there:
            return []
        try:
            notices, counts = spool.read(self.site.clock())
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

        config, now_s = self.config, self.site.clock()
        ingested_s = self.store.watermark("sacct")
        if ingested_s is None:
            self.outcome.faults.append("accounting has never been read: run `almanac ingest` first, or its timer")
            return
        asked_s, started_s = (self._mark(name) or 0 for name in (ASKED, STARTED))
        # A clock that was ahead can have left a mark in the future.
        since_s = min(now_s, max(asked_s, ingested_s, started_s, now_s - self.site.give_up_s))
        self.outbox.set_mark(ASKED, self.cluster, since_s)
        slurm = replace(config.slurm, overlap_hours=0)
        source = SacctSource(self.site.commands, self.cluster, config.tiers, slurm, self.site.clock, name=SOURCE)
        if config.bindings.prolog_dir:
            self._read("prolog", lambda: self.site.read_source("prolog"))
        self._read(SOURCE, lambda: self._ingest(source, since_s - LATE_S, now_s))

    def _ingest(self, source: Source, since_s: int, until_s: int) -> None:
        from telemetry.ingest import IngestResult, ingest

        marked = MarkedSource(source, lambda time_s: self.outbox.set_mark(ASKED, self.cluster, time_s))
        result = IngestResult(source.name, since_s, until_s)
        ingest(marked, self.store, since_s, until_s, result, lambda rows, reached_s: None)

    def _read(self, name: str, read: Callable[[], None]) -> None:
        self.outcome.looks[name] += 1
        try:
            read()
        except AlmanacError as error:
            self._fault(error)

    def _notice(self, *, is_asked: bool) -> None:
        """Put runs that have ended into the outbox, unless accounting was not read since the last time.

        This looks at all runs that can still get mail, because accounting can learn of an end hours late.
        """
        from reports.mail.ended import ended_since

        reached_s = self.store.watermark("sacct")
        seen_s, started_s = (self._mark(name) or 0 for name in (SEEN, STARTED))
        if reached_s is None or (reached_s <= seen_s <= self.site.clock() and not is_asked):
            return
        ended = ended_since(self.store, self.site.earliest_end_s(started_s))
        self.outcome.noticed = self.outbox.notice(ended)
        self.outbox.set_mark(SEEN, self.cluster, min(reached_s, self.site.clock()))

    def _settle(self, notices: Sequence[Notice]) -> None:
        """Remove the files of jobs whose end accounting knows, and old files whose jobs it does not know."""
        from reports.mail.due import WAIT_S
        from reports.mail.ended import known_ends

        if not notices:
            return
        ends = known_ends(self.store, {notice.job_id for notice in notices})
        ahead_s = self.site.clock() + CLOCKS_S  # the time of a later file is wrong; accounting was asked just now
        done = [
            notice
            for notice in notices
            if notice.seen_s > ahead_s or ends.get(notice.job_id, 0) >= notice.seen_s - CLOCKS_S
        ]
        known = set(done)
        asked_s = max(self.store.watermark("sacct") or 0, self._mark(ASKED) or 0)
        old_s = min(self.site.clock() - WAIT_S, asked_s)
        lost = [notice for notice in notices if notice not in known and notice.seen_s < old_s]
        spool_of(self.config, self.store.root, self.cluster).remove([*done, *lost])
        self.outcome.spool["not in accounting"] = len(lost)

    def _planned(self, found: Sequence[ReportCandidate]) -> DuePlan:
        plan = self.site.plan(found)
        if not self._needs_telemetry(plan):
            return plan
        self._read("prometheus", lambda: self.site.read_source("prometheus"))
        return self.site.plan(found)

    def _needs_telemetry(self, plan: DuePlan) -> bool:
        """Whether Prometheus now has the telemetry that a run waits for. `almanac ingest` reads it the first time."""
        from reports.mail.due import NO_TELEMETRY

        prometheus, mark_s = self.config.prometheus, self.store.watermark("prometheus")
        until_s = self.site.clock() - prometheus.delay_s
        return mark_s is not None and any(run.end_s <= until_s for run in plan.delayed[NO_TELEMETRY])

    def _decided(self, plan: DuePlan) -> list[ReportCandidate]:
        """Runs that are ready, with their metrics computed. The others are skipped in the outbox, or wait in it."""
        from reports.mail.due import WAIT_S, first_of, leave_for_later, stuck, wait_for_family

        now_s, old_s = self.site.clock(), self.site.clock() - WAIT_S
        self.outcome.faults += stuck(plan, old_s)
        wait_for_family(plan, self.site.told(self.outbox), self.config.mail, now_s)
        leave_for_later(plan, self.site.mails_left(self.outbox))
        plan.ready = first_of(plan.ready, MOST_RUNS)
        if not self._summarize(plan.ready):
            plan.delayed["another run computes job metrics"] = [e.run for e in plan.ready if e.run.end_s > old_s]
            plan.ready = [each for each in plan.ready if each.run.end_s <= old_s]
        for reason, runs in plan.skipped.items():
            self.outbox.skip(runs, reason, now_s)
            self.outcome.skipped[reason] += len(runs)
        self.outcome.delayed.update({reason: len(runs) for reason, runs in plan.delayed.items() if runs})
        return plan.ready

    def _summarize(self, ready: Sequence[ReportCandidate]) -> bool:
        """Compute metrics of these runs. False if another process computes metrics now."""
        from reports.mail.batch import spans_to_summarize
        from telemetry.metrics.summary import summarize

        for since_s, until_s in spans_to_summarize(ready, self.site.clock()):
            try:
                summarize(self.store, self.config, since_s, until_s)
            except BusyError:
                return False
            except StoreError as error:
                self._fault(error)  # a damaged file: reports of this span go out without metrics
        return True

    def _put(self, ready: Sequence[ReportCandidate]) -> None:
        if not ready:
            return
        from reports.mail.batch import MailBatch
        from reports.mail.due import group_into_mails

        site = self.site
        batch = MailBatch(self.store, self.config, site.clock(), site.recipient, self.outbox, self.outcome)
        useful = batch.useful(ready, site.frequencies())
        mails = group_into_mails(useful, self.config.mail, site.mails_left(self.outbox))
        for _ in batch.put(mails):
            self._deliver()

    def _put_weekly(self) -> None:
        from reports.mail.week import is_told

        if is_told(self.outbox, self.cluster, self.site.clock()):
            return
        from reports.mail.weekly import put_weekly

        site, faults = self.site, self.outcome.faults
        given = (self.store, self.outbox, self.config, site.clock(), site.frequencies(), site.recipient)
        for _ in put_weekly(*given, faults):
            self.outcome.put["weekly"] += 1

    def _deliver(self) -> None:
        """Send queued mail. After a failure of the server, the next run tries again."""
        delivered, clock = self.outcome.delivered, self.site.clock
        if delivered["fault"] or delivered[LEFT] or not self.outbox.ready(clock(), 1):
            return
        from reports.mail.delivery import deliver

        try:
            deliver(self.outbox, self.config.mail, clock, time.sleep, self.site.frequencies(), self.outcome)
        except ConfigError as error:  # jobs that end must still be noticed
            delivered["fault"] = 1
            self._fault(error)

    def _daily(self) -> None:
        """Forget old decisions in the first run of a day."""
        today_s = self.site.clock() // 86400 * 86400
        if (self._mark(DAILY) or 0) < today_s:
            self.outbox.forget(today_s - KEEP_DAYS * 86400)
            self.outbox.set_mark(DAILY, self.cluster, today_s)

    def _mark(self, name: str) -> int | None:
        return self.outbox.mark(name, self.cluster)

    def _fault(self, error: AlmanacError) -> None:
        self.outcome.faults.append(f"{error}" + (f"; try: {error.hint}" if error.hint else ""))


def skip_until_now(site: MailSite, outbox: Outbox) -> None:
    """What a run does while mail is off: jobs that end before now get no mail. Raises StoreError."""
    take_from_store(outbox, site.store)
    outbox.set_back_times(site.clock())
    start_now(outbox, site.store.cluster, site.clock())
