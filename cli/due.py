"""What `almanac report --due` does: hear of jobs that have ended, wait for their telemetry, and send their reports."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from almanac.errors import AlmanacError, BusyError, ConfigError, SourceError, StoreError
from almanac.units import format_count
from cli.app import App
from cli.due_outcome import Outcome

if TYPE_CHECKING:
    from cli.ingest import Job
    from reports.mail.allowance import Allowance
    from reports.mail.due import Plan
    from reports.mail.ended import Ended
    from reports.mail.outbox import Outbox
    from telemetry.slurm.spool import Notice, Spool
    from telemetry.store.store import Store

STARTED, SEEN, ASKED, DAILY = "report-start", "report", "report-sacct", "report-daily"
"""Marks in the store: when mail was switched on, up to when what `almanac ingest` read was looked at, up to when
accounting was asked from here, the last day that was begun."""
LATE_S = 600
"""How much later than the span before slurmdbd may learn of an end; what is later still comes with `almanac ingest`."""
CLOCKS_S = 600
"""By which the hook may run later than the end that accounting has."""
MOST_RUNS = 20_000
LEFT = "left to the next run"


def move_marks(store: Store, cluster: str, now_s: int) -> None:
    """Jobs that end before now get no mail."""
    for mark in (STARTED, SEEN):
        store.set_watermark(mark, cluster, now_s)


def pull_back_marks(store: Store, cluster: str, now_s: int) -> None:
    """Mail goes on after a clock that was ahead: its marks in the future are set to an hour ago."""
    from reports.mail.week import TOLD, TRIED

    for mark in (STARTED, SEEN, ASKED, DAILY, TOLD, TRIED):
        store.pull_back_watermark(mark, cluster, now_s, now_s - 3600)


@dataclass
class Due:
    """One run for one cluster. What it could not do is in outcome.faults; the next run goes on from there."""

    app: App
    store: Store
    cluster: str
    outbox: Outbox
    outcome: Outcome = field(default_factory=Outcome)

    def run(self) -> Outcome:
        """What is queued is tried whatever becomes of the rest. Raises StoreError."""
        pull_back_marks(self.store, self.cluster, self.app.now_s())
        self.outbox.set_back_times(self.app.now_s())
        self._deliver()
        try:
            self._decide()
        except Exception:
            self._deliver()
            raise
        self._deliver()
        return self.outcome

    def _decide(self) -> None:
        self._start()
        notices = self._spooled()
        if notices:
            self._ask_accounting()
        self._notice(is_asked=bool(notices))
        self._settle(notices)
        if found := self._waiting():
            self._put(self._decided(self._planned(found)))
        self._put_weekly()
        self._daily()

    def _start(self) -> None:
        """The first run tells of no job that ended before it."""
        if self.store.watermark(STARTED, self.cluster) is None:
            move_marks(self.store, self.cluster, self.app.now_s())

    def _spooled(self) -> list[Notice]:
        spool = spool_of(self.app, self.cluster)
        if not spool.is_there:
            return []
        try:
            notices, counts = spool.read(self.app.now_s())
        except SourceError as error:
            self._fault(error)
            return []
        self.outcome.spool = {"read": counts.kept, **counts.dropped}
        self.outcome.faults += [
            f"spool: {number} set aside in {spool.folder}/bad: {reason}, such as {counts.examples[reason]}"
            for reason, number in counts.dropped.items()
        ]
        return notices

    def _ask_accounting(self) -> None:
        """The jobs that may be told since the last look, without their steps, by a mark of its own.

        That of `almanac ingest` stays: it has to read all jobs, with their steps.
        """
        from cli.ingest import Job
        from telemetry.sources.sacct import SacctSource

        config, now_s = self.app.config, self.app.now_s()
        ingested_s = self.store.watermark("sacct", self.cluster)
        if ingested_s is None:
            self.outcome.faults.append("accounting has never been read: run `almanac ingest` first, or its timer")
            return
        asked_s, started_s = (self.store.watermark(mark, self.cluster) or 0 for mark in (ASKED, STARTED))
        # A mark that a clock left in the future must not keep this from asking.
        since_s = min(now_s, max(asked_s, ingested_s, started_s, now_s - give_up_s(self.app)))
        self.store.set_watermark(ASKED, self.cluster, since_s)
        slurm = replace(config.slurm, overlap_hours=0, read_steps=False)
        source = SacctSource(self.app.commands, self.cluster, config.tiers, slurm, self.app.now_s, name=ASKED)
        names = ("prolog",) if config.bindings.prolog_dir else ()
        self._ask([*self._jobs_of(names), Job(source, since_s - LATE_S, now_s)])

    def _jobs_of(self, names: tuple[str, ...]) -> list[Job]:
        from cli.ingest import live_jobs

        return list(live_jobs(self.app, self.store, self.cluster, names, None, None)) if names else []

    def _ask(self, jobs: list[Job]) -> None:
        from cli.ingest import run as ingest

        for name, item in ingest(self.store, self.cluster, jobs).items():
            self.outcome.looks[name] += 1
            if item["error"]:
                self._fault(item["error"])

    def _notice(self, *, is_asked: bool) -> None:
        """What accounting has said since the last time; nothing where nobody has asked it since.

        Looked at is all that could still be told: accounting may learn of an end hours late.
        """
        from reports.mail.ended import ended_since

        reached_s = self.store.watermark("sacct", self.cluster)
        seen_s, started_s = (self.store.watermark(mark, self.cluster) or 0 for mark in (SEEN, STARTED))
        if reached_s is None or (reached_s <= seen_s <= self.app.now_s() and not is_asked):
            return
        ended = ended_since(self.store, self.cluster, told_since(self.app, started_s))
        self.outcome.noticed = self.outbox.notice(ended, self.app.now_s())
        self.store.set_watermark(SEEN, self.cluster, min(reached_s, self.app.now_s()))

    def _settle(self, notices: Sequence[Notice]) -> None:
        """Take away the files of jobs whose end accounting has, and those that it does not come to know."""
        from reports.mail.ended import known_ends

        if not notices:
            return
        ends = known_ends(self.store, self.cluster, {notice.job_id for notice in notices})
        ahead_s = self.app.now_s() + CLOCKS_S  # of a later file the time says nothing: accounting was asked just now
        done = [
            notice
            for notice in notices
            if notice.seen_s > ahead_s or ends.get(notice.job_id, 0) >= notice.seen_s - CLOCKS_S
        ]
        known = set(done)
        asked_s = max(self.store.watermark(mark, self.cluster) or 0 for mark in ("sacct", ASKED))
        old_s = min(self.app.now_s() - self.app.config.mail.wait_s, asked_s)
        lost = [notice for notice in notices if notice not in known and notice.seen_s < old_s]
        spool_of(self.app, self.cluster).remove([*done, *lost])
        self.outcome.spool["not in accounting"] = len(lost)

    def _waiting(self) -> list[Ended]:
        from reports.mail.ended import look_up

        now_s = self.app.now_s()
        return look_up(self.store, self.cluster, self.outbox.waiting(now_s, self.cluster), comments_since(self.app))

    def _planned(self, found: Sequence[Ended]) -> Plan:
        plan = plan_of(self.app, self.store, self.cluster, found)
        if not self._needs_telemetry(plan):
            return plan
        self._ask(self._jobs_of(("prometheus",)))
        return plan_of(self.app, self.store, self.cluster, found)

    def _needs_telemetry(self, plan: Plan) -> bool:
        """Whether asking now brings the end of a run that waits for it; the first time is `almanac ingest`'s."""
        from reports.mail.due import NO_TELEMETRY

        prometheus, mark_s = self.app.config.prometheus, self.store.watermark("prometheus", self.cluster)
        waiting = [run for (reason, _), runs in plan.delayed.items() if reason == NO_TELEMETRY for run in runs]
        until_s = self.app.now_s() - prometheus.delay_s
        return mark_s is not None and any(run.end_s <= until_s for run in waiting)

    def _decided(self, plan: Plan) -> list[Ended]:
        """What is ready, with its metrics computed; the rest is skipped or delayed in the outbox."""
        from reports.mail.due import ENOUGH_MAIL, first_of, hold_back, leave_for_later

        now_s = self.app.now_s()
        self.outcome.faults += stuck(plan, now_s - self.app.config.mail.wait_s)
        plan.ready, later = leave_for_later(plan.ready, self._allowance())
        plan.ready = first_of(plan.ready, MOST_RUNS)
        for until_s, runs in later.items():
            plan.delayed[ENOUGH_MAIL, until_s] += runs
        if not self._summarise(plan.ready):
            early, plan.ready = hold_back(plan.ready, now_s - self.app.config.mail.wait_s)
            plan.delayed["another run computes job metrics", now_s] += [each.run for each in early]
        for reason, runs in plan.skipped.items():
            self.outbox.skip(runs, reason, now_s)
            self.outcome.skipped[reason] += len(runs)
        for (reason, until_s), runs in plan.delayed.items():
            self.outbox.delay(runs, until_s, reason)
            self.outcome.delayed[reason] += len(runs)
        return plan.ready

    def _allowance(self) -> Allowance:
        from reports.mail.allowance import allowance_of

        return allowance_of(self.outbox, self.app.config.mail, self.app.now_s())

    def _summarise(self, ready: Sequence[Ended]) -> bool:
        """False where another process computes metrics now."""
        from reports.mail.batch import spans_to_summarise
        from telemetry.metrics.summary import summarize

        for since_s, until_s in spans_to_summarise(ready, self.app.now_s()):
            try:
                summarize(self.store, self.cluster, self.app.config, since_s, until_s)
            except BusyError:
                return False
            except StoreError as error:
                self._fault(error)  # a damaged file: reports of this span go out without, all others as ever
        return True

    def _put(self, ready: Sequence[Ended]) -> None:
        if not ready:
            return
        from reports.mail.batch import Batch, BatchCounts
        from reports.mail.due import parcels

        counts = BatchCounts()
        batch = Batch(self.store, self.cluster, self.app.config, self.app.now_s(), recipient_in(self.app))
        for _ in batch.put(self.outbox, parcels(ready, self._allowance().most), counts):
            self._deliver()
        self.outcome.put += counts.put
        self.outcome.faults += counts.faults

    def _put_weekly(self) -> None:
        from reports.mail.week import is_told

        if is_told(self.store, self.cluster, self.app.now_s()):
            return
        from reports.mail.weekly import put_weekly

        app, faults = self.app, self.outcome.faults
        for _ in put_weekly(
            self.store, self.cluster, self.outbox, app.config, app.now_s(), frequency_in(app), recipient_in(app), faults
        ):
            self.outcome.put["weekly"] += 1

    def _deliver(self) -> None:
        """Send what is queued; a server that has failed is left alone until the next run."""
        if (
            self.outcome.delivered["fault"]
            or self.outcome.delivered[LEFT]
            or not self.outbox.ready(self.app.now_s(), 1)
        ):
            return
        from reports.mail.delivery import deliver

        try:
            counts = deliver(self.outbox, self.app.config.mail, self.app.now_s, time.sleep, frequency_in(self.app))
        except ConfigError as error:  # jobs that end are noticed all the same
            self.outcome.delivered["fault"] = 1
            self._fault(error)
            return
        self.outcome.delivered.update(sent=counts.sent, failed=counts.failed, given_up=counts.given_up)
        self.outcome.delivered["held"] = counts.held
        self.outcome.delivered[LEFT] = counts.left
        if counts.fault:
            self.outcome.delivered["fault"] = 1
            self.outcome.faults.append(f"mail server: {counts.fault}")
        if counts.given_up:
            said = f"mails that will never be sent: {counts.given_up}, the last one to {counts.last_error}"
            self.outcome.faults.append(said)

    def _daily(self) -> None:
        """Forgetting, with a day's first run."""
        today_s = self.app.now_s() // 86400 * 86400
        if (self.store.watermark(DAILY, self.cluster) or 0) < today_s:
            self.outbox.forget(today_s - self.app.config.mail.keep_days * 86400)
            self.store.set_watermark(DAILY, self.cluster, today_s)

    def _fault(self, error: AlmanacError) -> None:
        self.outcome.faults.append(f"{error}" + (f"; to do: {error.hint}" if error.hint else ""))


def told_since(app: App, started_s: int | None) -> int:
    """What ended before gets no mail; started_s: when mail was switched on, None: not yet.

    A clock that was ahead can have left that in the future: then the last hour is looked at, in each run.
    """
    now_s = app.now_s()
    if started_s is None:
        return now_s - 86_400
    return max(now_s - 3600 if started_s > now_s else started_s, now_s - give_up_s(app))


def comments_since(app: App) -> int:
    """From when on a known comment shows that accounting tells them: where it stops to, mail goes on in time."""
    return app.now_s() - give_up_s(app) // 2


def give_up_s(app: App) -> int:
    return app.config.mail.give_up_hours * 3600


def stuck(plan: Plan, until_s: int) -> Iterator[str]:
    """What keeps runs waiting that ended before until_s, where it is the site's to mend."""
    from reports.mail.due import NO_COMMENT
    from reports.mail.preferences import NOT_KNOWN

    waiting = {why: [run for run in runs if run.end_s < until_s] for (why, _), runs in plan.delayed.items()}
    if runs := waiting.get(NO_COMMENT):
        yield f"reports that wait for their job's comment: {format_count(len(runs))}; see what `sacct --json` says"
    is_anybody_known = bool(plan.ready or plan.skipped or set(waiting) - {NOT_KNOWN})
    if (runs := waiting.get(NOT_KNOWN)) and not is_anybody_known:
        number = format_count(len(runs))
        yield f"reports that wait, as this host knows none of their users: {number}; see `getent passwd`"


def spool_of(app: App, cluster: str) -> Spool:
    """Whoever belongs to the store's group may take files away."""
    from telemetry.slurm.spool import Spool

    gids = {os.getegid(), *os.getgroups(), app.store_root.stat().st_gid}
    return Spool(Path(app.config.mail.spool_dir or os.devnull), cluster, gids)


def plan_of(app: App, store: Store, cluster: str, found: Sequence[Ended]) -> Plan:
    from reports.mail.due import Moment, plan_runs

    telemetry_s = (store.watermark("prometheus", cluster) or 0) if app.config.prometheus.url else None
    return plan_runs(found, frequency_in(app), recipient_in(app), app.config.mail, Moment(app.now_s(), telemetry_s))


def frequency_in(app: App) -> Callable[[str], str]:
    """A user's frequency, looked up once a run."""
    from reports.mail.preferences import read

    return cache(lambda user: read(user, app.config).frequency)


def recipient_in(app: App) -> Callable[[str], str | None]:
    from reports.mail.message import recipient_of

    return lambda user: recipient_of(user, app.config)
