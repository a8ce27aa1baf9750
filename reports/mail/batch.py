"""Render the mails that are due, in slices of bounded memory, and put them into the outbox."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from almanac.config import Config
from almanac.errors import ConfigError, StoreError
from reports.job.context import JobContext, build_runs
from reports.job.report import render_email
from reports.mail.digest import Digest, render_burst
from reports.mail.due import RAN_AGAIN, together
from reports.mail.ended import ReportCandidate
from reports.mail.families import DigestJob, job_of, told_of_job
from reports.mail.message import compose
from reports.mail.outbox import EndedRun, Outbox
from reports.mail.outbox_file import TOLD_S
from reports.mail.outcome import Outcome
from reports.mail.preferences import USEFUL
from reports.mail.useful import NOTHING_NEW, News
from telemetry.store.cluster_store import ClusterStore

SLICE = 100
"""Reports rendered together. With samples and pictures they take about 100 MB at most."""
DIGEST_SLICE = 500
RECENT_S = 2 * 3600
GAP_S = 3600
RETRY_S = 3600


def spans_to_summarize(ready: Sequence[ReportCandidate], now_s: int) -> list[tuple[int, int]]:
    """Spans [since_s, until_s) with ends of runs that have no metrics, or metrics that may miss late samples.

    Metrics of a run that ended long ago have all samples. Ends that are far apart make separate spans, because each
    span computes every job that ran within it.
    """
    ends = sorted({each.run.end_s for each in ready if not each.has_metrics or each.run.end_s > now_s - RECENT_S})
    cuts = [place for place, (one, next_s) in enumerate(pairwise(ends), 1) if next_s - one > GAP_S]
    blocks = [ends[low:high] for low, high in pairwise([0, *cuts, len(ends)])]
    return [(block[0] - 1, block[-1] + 1) for block in blocks if block]


@dataclass(frozen=True)
class MailBatch:
    """The mails that are due for one cluster. recipient: gives a user's address.

    outcome gets the number of queued mails, and a fault for each mail that almanac could not make.
    """

    store: ClusterStore
    config: Config
    now_s: int
    recipient: Callable[[str], str | None]
    outbox: Outbox
    outcome: Outcome

    def put(self, mails: Sequence[tuple[EndedRun, ...]]) -> Iterator[None]:
        """Render and queue the mails about these runs. Yields after each slice, so that mail can be sent meanwhile.

        A mail that cannot be made is left for later and delays no other. Raises ConfigError. Raises StoreError if the
        outbox cannot be written: queued mails stay, and the rest waits for the next run.
        """
        singles = [runs[0] for runs in mails if len(runs) == 1]
        for first in range(0, len(singles), SLICE):
            part = singles[first : first + SLICE]
            try:
                contexts = self._contexts(part, has_series=True)
            except Exception:  # read each job by itself
                contexts = None
            for run in part:
                self._put_one((run,), contexts)
            yield
        for runs in mails:
            if len(runs) > 1:
                self._put_one(runs)
                yield

    def _put_one(self, runs: tuple[EndedRun, ...], contexts: dict[EndedRun, JobContext] | None = None) -> None:
        is_one = len(runs) == 1
        kind = "job" if is_one else "digest"
        try:
            known = self._contexts(runs, has_series=is_one) if contexts is None else contexts
            found = [known[run] for run in runs if run in known]
            if not found:
                self.outbox.skip(runs, RAN_AGAIN, self.now_s)
                return
            digest = self._job_mail(found[0]) if is_one else render_burst(found, self.config)
            address = self.recipient(runs[0].user) or ""
            message = compose(digest.rendered, runs, address, self.config, self.now_s, kind=kind)
        except ConfigError:
            raise
        except Exception as error:  # one job's data must not block the mail of all others
            self.outcome.faults.append(f"report of job {runs[0].job_id}: {type(error).__name__}: {error}")
            self.outbox.delay(runs, self.now_s + RETRY_S, "could not be made")
            return
        self.outbox.put(replace(message, told=tuple(digest.told)), self.now_s)
        self.outcome.put[kind] += 1

    def _job_mail(self, context: JobContext) -> Digest:
        return Digest(render_email(context, self.config), told_of_job(job_of(context)))

    def useful(self, ready: Sequence[ReportCandidate], frequency: Callable[[str], str]) -> list[ReportCandidate]:
        """The runs to report now. The others, of users who chose `useful`, are skipped: the weekly digest has them.

        Runs whose data cannot be read stay, and `put` names the fault.
        """
        jobs = self._jobs([each.run for each in ready if frequency(each.run.user) == USEFUL])
        news = News({*self.outbox.told_since(self.now_s - TOLD_S, self.store.cluster)})
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
            self.outbox.skip(others, NOTHING_NEW, self.now_s)
            self.outcome.skipped[NOTHING_NEW] += len(others)
        return wanted

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
        """If a file of other jobs is damaged, reports go out without advice and ranks."""
        given = self.store, runs, self.config, self.now_s
        try:
            return build_runs(*given, has_series=has_series)
        except StoreError as error:
            contexts = build_runs(*given, has_series=has_series, is_bare=True)
            fault = f"reports are without advice and ranks: {error}"
            if fault not in self.outcome.faults:
                self.outcome.faults.append(fault)
            return contexts
