"""Render the mails that are due, in slices of bounded memory, and put them into the outbox."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from almanac.config import Config
from almanac.errors import ConfigError, StoreError
from reports.job.context import JobContext, build
from reports.job.report import Rendered, render_email
from reports.mail.digest import render_burst
from reports.mail.due import RAN_AGAIN, Parcel
from reports.mail.ended import ReportCandidate
from reports.mail.message import compose
from reports.mail.outbox import EndedRun, Outbox
from telemetry.store.cluster_store import ClusterStore

SLICE = 100
"""Reports rendered together. With samples and pictures they take about 100 MB at most."""
DIGEST_SLICE = 500
RECENT_S = 2 * 3600
GAP_S = 3600
RETRY_S = 3600


@dataclass
class BatchCounts:
    """put: queued mails, by kind. faults: mails that could not be made, and why. They are tried again in an hour."""

    put: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def leave_out(self, error: StoreError) -> None:
        fault = f"reports are without advice and ranks: {error}"
        if fault not in self.faults:
            self.faults.append(fault)


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
    """The mails that are due for one cluster. recipient: gives a user's address."""

    store: ClusterStore
    config: Config
    now_s: int
    recipient: Callable[[str], str | None]

    def put(self, outbox: Outbox, parcels: Sequence[Parcel], counts: BatchCounts) -> Iterator[None]:
        """Render and queue every parcel. Yields after each slice, so that mail can be sent meanwhile.

        A parcel that cannot be made is left for later and delays no other. Raises ConfigError. Raises StoreError if
        the outbox cannot be written: queued mails stay, and the rest waits for the next run.
        """
        singles = [parcel for parcel in parcels if not parcel.is_digest]
        for first in range(0, len(singles), SLICE):
            part = singles[first : first + SLICE]
            found = self._found_together(part, counts)
            for parcel in part:
                self._put_one(outbox, parcel, counts, found)
            yield
        for parcel in parcels:
            if parcel.is_digest:
                self._put_one(outbox, parcel, counts, None)
                yield

    def _found_together(self, parcels: Sequence[Parcel], counts: BatchCounts) -> dict[EndedRun, JobContext] | None:
        """Contexts of these jobs, read together. None if that fails; then each job is read by itself."""
        try:
            return self._contexts([run for parcel in parcels for run in parcel.runs], counts, has_series=True)
        except Exception:
            return None

    def _put_one(
        self, outbox: Outbox, parcel: Parcel, counts: BatchCounts, found: dict[EndedRun, JobContext] | None
    ) -> None:
        kind = "digest" if parcel.is_digest else "job"
        try:
            rendered = self._rendered(parcel, found, counts)
            address = self.recipient(parcel.user) or ""
            message = (
                None
                if rendered is None
                else compose(rendered, parcel.runs, address, self.config, self.now_s, kind=kind)
            )
        except ConfigError:
            raise
        except Exception as error:  # one job's data must not block the mail of all others
            counts.faults.append(f"report of job {parcel.runs[0].job_id}: {type(error).__name__}: {error}")
            outbox.delay(parcel.runs, self.now_s + RETRY_S, "could not be made")
            return
        if message is None:
            outbox.skip(parcel.runs, RAN_AGAIN, self.now_s)
            return
        outbox.put(message, self.now_s)
        counts.put[kind] += 1

    def _rendered(
        self, parcel: Parcel, found: dict[EndedRun, JobContext] | None, counts: BatchCounts
    ) -> Rendered | None:
        """The mail of a parcel. None if all its jobs have run again since."""
        if parcel.is_digest:
            contexts = list(self._of_many(parcel.runs, counts))
            return render_burst(contexts, self.config) if contexts else None
        known = self._contexts(parcel.runs, counts, has_series=True) if found is None else found
        context = known.get(parcel.runs[0])
        return None if context is None else render_email(context, self.config)

    def _of_many(self, runs: Sequence[EndedRun], counts: BatchCounts) -> Iterator[JobContext]:
        for first in range(0, len(runs), DIGEST_SLICE):
            yield from self._contexts(runs[first : first + DIGEST_SLICE], counts, has_series=False).values()

    def _contexts(
        self, runs: Sequence[EndedRun], counts: BatchCounts, *, has_series: bool
    ) -> dict[EndedRun, JobContext]:
        """Contexts by run, without runs whose job has run again: a report is about a job's last run.

        If a file of other jobs is damaged, reports go out without advice and ranks.
        """
        ids = [run.job_id for run in runs]
        given = self.store, ids, self.config, self.now_s
        try:
            built = build(*given, has_series=has_series)
        except StoreError as error:
            built = build(*given, has_series=has_series, is_bare=True)
            counts.leave_out(error)
        by_key = {(context.job_id, context.job["submit_s"], context.job["end_s"]): context for context in built}
        return {run: by_key[key] for run in runs if (key := (run.job_id, run.submit_s, run.end_s)) in by_key}
