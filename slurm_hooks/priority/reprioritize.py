"""Sets the site factor of pending jobs again, with a newer model and the runs known now.

At submission, the job's owner, name, and number of GPUs are all that is known. This is a planner of
slurm_hooks/jobs/engine.py. Jobs keep a site factor that almanac did not set. A user can change a job's name while it
waits or runs; the prediction in the record stays, and users whose jobs take longer than predicted are corrected.
"""

from __future__ import annotations

import bisect
import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pandas as pd

from advisor.duration.features import without_parts
from advisor.duration.past import NEWEST
from advisor.priority import MIN_RUNS, Overrun, overrun_of, relieved_users
from almanac.errors import CommandError, NotAllowedError
from almanac.records import Counts, JobRequest, PriorityAdvice
from almanac.units import format_duration
from slurm.backend import SlurmBackend
from slurm.queued_job import QueuedJob
from slurm_hooks.advice.file import USER, AdviceFile, AdviceRow, site_factor_of
from slurm_hooks.advice.publication_log import EVERYBODY, TABLE, file_at
from slurm_hooks.jobs.engine import JobChange, JobEngine, JobPlan, change, settle
from slurm_hooks.jobs.log import ChangeHistory, JobLine, Kind
from telemetry.store.store import ClusterStore

BATCH = 200
"""Changes that one look and one command are for: each is a request of its own to slurmctld, of 1 to 2 ms. So the last
one is told about 0.3 s after its look.
"""
LEAST_CHANGE = 0.2
"""Change of ln(GPU-time) below which a job keeps what almanac set: each end of a run changes the predictions of all
jobs of its user. On Mason, looked at every 30 minutes, a third of the changes gives the same rank correlation: .764
instead of .765.
"""
_DENIED = re.compile(r"(?:[0-9_,%:\[\]-]+: )?(?:Access/permission denied|Invalid user id)(?: for job \S+)?")
"""Slurm's words to an owner, and to a user who is neither owner nor operator (22.05 and 26.05)."""

Predict = Callable[[Sequence[JobRequest]], Sequence[PriorityAdvice | None]]
"""The site factors of many submissions, as advisor.duration.service.priorities_of gives them."""
Published = Callable[[QueuedJob, int], bool]
"""Return True if job_submit may have given a job this site factor, from the advice published for its user."""


def pending_jobs(backend: SlurmBackend, counts: Counts, job_ids: Collection[int] = ()) -> list[QueuedJob]:
    """The pending jobs, or at least those of some numbers, with the site factor of each that Slurm ranks now.

    counts: gets the records that cannot be read. Raises CommandError if none of several jobs can be read:
    that is a fault of the release, not of a job.
    """
    read = Counts()
    jobs, factors = backend.pending(read, job_ids), backend.site_factors()
    if read.seen > 1 and not jobs:
        why = ", ".join(sorted(read.dropped))
        raise CommandError(f"none of {read.seen} pending jobs can be read: {why}", "run `almanac doctor`")
    counts.add(Counts(seen=read.seen, dropped=read.dropped, examples=read.examples))
    return [
        replace(job, site_factor=factor.value, has_own_priority=factor.is_explicit)
        if (factor := factors.get(job.job_id))
        else job
        for job in jobs
    ]


def plan_site_factors(
    backend: SlurmBackend,
    history: ChangeHistory,
    predict: Predict,
    published: Published,
    now_s: int,
    model: str = "",
    is_clearing: bool = False,
    least_change: float = 0.0,
    relief_points: int = 0,
) -> JobPlan:
    """The site factors that the pending jobs need now. is_clearing: only reset to 0 those that almanac set.
    least_change: a site factor of almanac's that is off by less stays. relief_points: for the users who wait most.

    Only jobs that can be changed are predicted. The record gets a line for a job with the right site factor and no line
    yet: it needs the predicted GPU-time. Raises CommandError.
    """
    counts = Counts()
    jobs = pending_jobs(backend, counts)
    ranked = [job for job in jobs if job.site_factor is not None]
    undos, settled = settle(ranked, history, now_s, lambda *_: "", is_clearing)
    notes = list(settled.values())
    if is_clearing:
        counts.drop("has no site factor that almanac set", len(jobs) - len(undos))
        counts.kept = len(undos)
        return JobPlan(undos, notes, counts)
    asked = [job for job in ranked if job.gpu_count and not job.is_held and not job.has_own_priority]
    advice_of = dict(zip((job.job_id for job in asked), predict([job.request() for job in asked]), strict=True))
    relieved = relieved_users(((job.user, job.eligible_s or job.submit_s) for job in asked), now_s)
    changes = []
    for job in jobs:
        advice, last = advice_of.get(job.job_id), history.line_of(job)
        if advice and job.user in relieved:
            factor = advice.site_factor + relief_points
            advice = replace(advice, site_factor=factor, extra=advice.extra + relief_points)
        if advice is None:
            counts.drop(_why_not_asked(job))
        elif why_not := _why_not(job, advice, last, published, least_change):
            counts.drop(why_not)
            if job.site_factor == advice.site_factor and (last is None or last.submit_s != job.submit_s):
                is_set = last is not None and last.what == "set"
                notes.append(_change("set" if is_set else "agreed", job, advice, model))
        else:
            changes.append(_change("set", job, advice, model))
    counts.kept = len(changes)
    return JobPlan(changes, notes, counts)


def _why_not_asked(job: QueuedJob) -> str:
    """Return why no site factor is known for a job."""
    if not job.gpu_count:
        return "asks for no GPU"
    if job.is_held:
        return "held: it keeps its site factor until it is released"
    if job.site_factor is None:
        return "not ranked by Slurm yet (begin time, dependency, array limit)"
    if job.has_own_priority:
        return "has a priority that somebody set: a site factor does not count"
    return "nothing is known to predict it from"


def _why_not(
    job: QueuedJob, advice: PriorityAdvice, last: JobLine | None, published: Published, least_change: float
) -> str:
    """Return why a job keeps its site factor; "" if it changes. Only almanac's own is ever changed: the one that the
    record says was to be set, or, if that failed (a run was killed, Slurm was away), the one before.
    """
    if job.site_factor == advice.site_factor:
        return "has its site factor already"
    is_ours = last is not None and last.what != "owner" and str(job.site_factor) in last.texts
    if is_ours and job.site_factor and abs(job.site_factor - advice.site_factor) < least_change:
        return "has nearly its site factor"
    if job.site_factor and not is_ours and not published(job, job.site_factor):
        return "has a site factor that almanac did not set"
    if last and last.what == "ignored" and (last.was, last.new) == (str(job.site_factor), str(advice.site_factor)):
        return "Slurm took this site factor before and did not count it"
    return ""


def _change(what: Kind, job: QueuedJob, advice: PriorityAdvice, model: str) -> JobChange:
    reason = f"GPU-time {format_duration(advice.gpu_time_s)}"
    if advice.is_cautious:
        reason += ", more than predicted: the user's newest runs took far longer than expected"
    if advice.extra:
        reason += f"; options of this site add {advice.extra}"
    new = str(advice.site_factor)
    return change(what, job, "SiteFactor", "0", new, reason, gpu_time_s=advice.gpu_time_s, model=model)


@dataclass(kw_only=True)
class SiteFactorEngine(JobEngine):
    """Sets site factors, through commands or pyslurm. Slurm shows them at once."""

    backend: SlurmBackend
    look_s: float = 0.0
    batch: int = BATCH

    def jobs(self, job_ids: Collection[int]) -> dict[int, QueuedJob]:
        """Return those of the jobs that Slurm ranks now. Raises CommandError."""
        jobs = pending_jobs(self.backend, Counts(), job_ids)
        return {job.job_id: job for job in jobs if job.job_id in job_ids and job.site_factor is not None}

    def look(self, job_ids: Collection[int]) -> dict[int, QueuedJob]:
        """Return the jobs that still wait, with their site factors.

        sprio suffices: it leaves out jobs that no longer wait.
        """
        factors = self.backend.site_factors()
        return {
            number: replace(self.sent[number].job, site_factor=factors[number].value)
            for number in job_ids
            if number in factors
        }

    def order(self, changes: Sequence[JobChange]) -> list[str]:
        """Send site factors, and return Slurm's objections.

        Raises NotAllowedError if Slurm refuses all of them; changes that were made earlier stay.
        """
        said = self.backend.set_site_factors([replace(each.job, site_factor=int(each.line.text)) for each in changes])
        denials = [line for line in said if _DENIED.fullmatch(line.strip())]
        if denials and len(said) >= len(changes):
            raise NotAllowedError(
                f"Slurm refused {len(changes)} changes: {denials[0]}",
                "run this as root or SlurmUser, or give its user AdminLevel=Operator",
            )
        return said


LATE_S = 120
"""`almanac publish` records a file before it writes it. The file may reach the controller's disk this much later."""


@dataclass
class PublishedSiteFactors:
    """Call it with a job and its site factor. It reads the table once, at the first call.

    most_gpus: gives the number of GPUs that one job can ask for; called at most once.
    """

    store: ClusterStore
    most_gpus: Callable[[], int]
    _files: dict[tuple[str, int], AdviceFile | None] = field(default_factory=dict)

    def __call__(self, job: QueuedJob, site_factor: int) -> bool:
        """Return True if a file in force at the submission, or LATE_S before, could have given this site factor.

        Any row counts: the owner may have changed name and GPU count since. Only files of mode apply count.
        """
        files = (
            self._file(user, at_s) for user in (job.user, EVERYBODY) for at_s in (job.submit_s, job.submit_s - LATE_S)
        )
        return any(file.mode == "apply" and self._could_give(file, site_factor) for file in files if file is not None)

    def _could_give(self, file: AdviceFile, site_factor: int) -> bool:
        return any(row.site_factor == site_factor for row in file.rows if row.kind != USER) or any(
            self._is_of_some_count(row, file, site_factor) for row in file.rows if row.kind == USER
        )

    def _is_of_some_count(self, row: AdviceRow, file: AdviceFile, site_factor: int) -> bool:
        """Return True if the row gives this site factor for some number of GPUs; more GPUs get a smaller one."""
        counts = range(1, self._most + 1)
        place = bisect.bisect_left(counts, -site_factor, key=lambda gpus: -site_factor_of(row, gpus, file.priority))
        return place < len(counts) and site_factor_of(row, counts[place], file.priority) == site_factor

    @cached_property
    def _most(self) -> int:
        return self.most_gpus()

    @cached_property
    def _rows(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """By user, oldest first."""
        rows: dict[str, list[Mapping[str, Any]]] = {}
        for row in self.store.read(TABLE).sort_by("published_s").to_pylist():
            rows.setdefault(row["user"], []).append(row)
        return rows

    def _file(self, user: str, at_s: int) -> AdviceFile | None:
        """Between two changes the file is the same, but for its end."""
        rows = self._rows.get(user, ())
        known = bisect.bisect_right(rows, at_s, key=lambda row: row["published_s"])
        if (user, known) not in self._files:
            self._files[user, known] = file_at(rows[:known], rows[known - 1]["published_s"]) if known else None
        file = self._files[user, known]
        return None if file is None or file.expires_s <= at_s else file


def overruns(lines: Mapping[int, JobLine], history: pd.DataFrame, least_gpu_time_s: float) -> dict[str, Overrun]:
    """Compare each user's ended jobs with the GPU-times behind their site factors.

    The newest NEWEST jobs on record of each user count. Users with fewer than MIN_RUNS of them are left out. lines: of
    JobHistory.newest. history: of telemetry.history.load_history. least_gpu_time_s: shorter GPU-times have the same
    site factor as this one.
    """
    newest: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=NEWEST))
    told = {
        (line.job_id, line.submit_s): line.gpu_time_s
        for line in lines.values()
        if line.what in ("set", "agreed") and line.gpu_time_s is not None
    }
    ended = without_parts(history)
    ended = ended[ended["job_id"].isin(lines) & ended["end_s"].notna() & ended["elapsed_s"].notna()]
    columns = ended.sort_values(["end_s", "job_id"])[["job_id", "submit_s", "user", "elapsed_s", "gpu_count"]]
    for job_id, submit_s, user, elapsed_s, gpus in columns.itertuples(index=False, name=None):
        believed_s = told.get((job_id, submit_s))
        if believed_s is not None and pd.notna(gpus):
            taken_s = max(elapsed_s * gpus, least_gpu_time_s)
            newest[user].append(math.log(taken_s / max(believed_s, least_gpu_time_s)))
    return {user: overrun_of(each) for user, each in newest.items() if len(each) >= MIN_RUNS}
