"""Who is whose kin: a user's ended runs by name family, and the evidence they are for a next submission."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pandas as pd

from advisor.duration.features import Submission, submissions, sweep
from advisor.memory.evidence import FAMILY, SIMILAR, Evidence, Oom
from advisor.memory.peaks import FAILED_SHARE, MAYBE_PREALLOCATED, PACKED, PREALLOCATED, Run, runs_of
from advisor.memory.user_peaks import MAX_FAMILIES, PeakFamily, ReadPeaks, UserPeaks
from advisor.mig.compute_need import NEWEST_RUNS
from almanac.config import AdviceSection, Tier
from almanac.names import is_family

RETRY_S = 14 * 86_400
MAX_RUNS = 60
"""Newest runs that show growth: older ones say little of the next."""


class PeakStore:
    """Absorbs ended runs in the order of their ends; gives the evidence for a next one."""

    def __init__(self, config: AdviceSection) -> None:
        self._config = config
        self._users: defaultdict[tuple[str, int], UserPeaks] = defaultdict(UserPeaks)

    def submit(self, job: Submission) -> None:
        user = self._users[job.user, job.gpu_count]
        user.open[job.name_key].add(job)
        if job.script_key:
            user.open_scripts[job.script_key].add(job)

    def absorb(self, job: Submission, run: Run) -> None:
        """Of a job that was submitted."""
        user = self._users[job.user, job.gpu_count]
        user.open.end(job.name_key, job)
        user.open_scripts.end(job.script_key, job)
        family = user.family(job.name_key)
        user.absorb(job.name_key, job.script_key, run)
        if run.why_not == PACKED:
            return  # neither its tier nor its end says anything of one task
        if run.why_not == PREALLOCATED:
            if family.has_reserved and family.reserved_s is None:
                family.void_s = run.end_s
                family.known_s.clear()
            family.reserved_s, family.has_reserved, family.oom = run.end_s, True, None
        elif run.why_not == MAYBE_PREALLOCATED:
            family.reserved_s = run.end_s
        elif run.is_known:
            family.reserved_s = None
            family.known_s.append(run.end_s)
            if len(family.known_s) > self._config.min_runs:
                family.known_s.popleft()
        oom_mib = self._out_of_memory(family, run)
        if oom_mib is not None:
            family.oom = Oom(oom_mib, run.end_s, is_after_move=oom_mib < family.largest_mib)
        if math.isfinite(run.capacity_mib):
            family.largest_mib = max(family.largest_mib, run.capacity_mib)

    def _out_of_memory(self, family: PeakFamily, run: Run) -> float | None:
        """The capacity that a run seems to have run out of, if this run says so: its own, or that of one before it.

        A run that failed and then succeeded on a larger tier needed more than the smaller one has, unless its peak
        says that the smaller one would have held it.
        """
        failed, family.failed = family.failed, None
        if run.is_oom:
            return run.capacity_mib
        if run.is_failed:
            family.failed = run
            return None
        if failed is None or run.submit_s < failed.end_s or run.end_s - failed.end_s > RETRY_S:
            return None
        if not failed.capacity_mib < run.capacity_mib or run.need_mib < failed.capacity_mib * FAILED_SHARE:
            return None
        return failed.capacity_mib

    def evidence(self, job: Submission, now_s: int) -> Evidence:
        """Of the user's runs of this name and of names like it; where these are too few, of the same script, too.

        A family whose framework reserves memory is no kin of the user's others: its own runs alone speak for it.
        """
        user = self._users.get((job.user, job.gpu_count))
        if user is None:
            return Evidence(FAMILY, now_s)
        evidence = self._of_name(user, job, now_s)
        if evidence.runs >= self._config.min_runs or not job.script_key:
            return evidence
        of_script = self._of_script(user, job, now_s)
        return evidence if of_script is None or of_script.runs < self._config.min_runs else of_script

    def _of_name(self, user: UserPeaks, job: Submission, now_s: int) -> Evidence:
        if not is_family(job.name_key):
            return Evidence(FAMILY, now_s)
        since_s = now_s - self._config.history_days * 86_400
        known = user.read if job.name_key in user.families else user.read_of_new
        read = known.get(job.name_key)
        if read is None or not read.since_s <= since_s <= read.until_s:
            if len(known) >= MAX_FAMILIES:
                known.clear()
            read = known[job.name_key] = self._read(user, job.name_key, since_s)
        open_jobs = sum([user.open.number(name, job) for name in read.names])
        return Evidence(now_s=now_s, open_jobs=open_jobs, **read.fields)

    def _of_script(self, user: UserPeaks, job: Submission, now_s: int) -> Evidence | None:
        """Of the runs of this script under names that were submitted once; None where they are too few.

        A launcher runs everything: its runs under names that come again are evidence for these names alone.
        """
        own = user.families.get(job.name_key)
        if own is not None and own.reserved_s is not None:
            return None
        names = user.scripts.get(job.script_key)
        if names is None or len(names) < self._config.min_runs:
            return None
        runs = sorted([run for own_runs in names.values() for run in own_runs], key=lambda run: run.end_s)
        ooms = [family.oom for name in names if (family := user.families.get(name)) and family.oom]
        oom = max(ooms, key=lambda each: each.end_s, default=None)
        fields = self._fields(_since(runs, now_s - self._config.history_days * 86_400))
        open_jobs = user.open_scripts.number(job.script_key, job)
        return Evidence(SIMILAR, now_s, oom=oom, open_jobs=open_jobs, is_of_script=True, **fields)

    def _read(self, user: UserPeaks, name: str, since_s: int) -> ReadPeaks:
        own = user.families.get(name)
        if own is None:
            names = user.like(name)
            runs, ends = _since(user.runs_of(names), since_s), list[int]()
            fields = {"scope": SIMILAR, **self._fields(runs)}
        else:
            names, runs = user.kin_of[name], _since(own.kin, since_s)
            ends = [end_s for end_s in (own.reserved_s, *islice(own.known_s, 1)) if end_s is not None]
            is_known = len(own.known_s) == self._config.min_runs and own.known_s[0] >= since_s
            is_reserved = not is_known and own.reserved_s is not None and own.reserved_s >= since_s
            if is_reserved:
                runs = _since(user.runs_of({name}), since_s)
            if own.reserved_s is not None:
                # A flat peak before the reservation was known was one, too: no death of memory.
                runs = [run for run in runs if not run.is_flat]
            runs = [run for run in runs if run.end_s > own.void_s or not run.is_known]
            scope = FAMILY if is_known or is_reserved else SIMILAR
            fields = {"scope": scope, "oom": own.oom, **self._fields(runs)}
        until_s = min(
            [end_s for end_s in (*ends, *(run.end_s for run in runs[:1])) if end_s >= since_s], default=math.inf
        )
        return ReadPeaks(since_s, until_s, names, fields)

    def _fields(self, runs: Sequence[Run]) -> dict[str, Any]:
        known = [run for run in runs if run.is_known]
        newest = known[-MAX_RUNS:]
        cut_off_mib = max((run.capacity_mib for run in known if run.is_censored), default=0.0)
        shown_mib = max((run.need_mib for run in known if not run.is_censored), default=0.0)
        return {
            "runs": len(known),
            "newest": tuple([math.log(run.need_mib) for run in newest]),
            "newest_s": tuple([run.submit_s for run in newest]),
            "highest_mib": max([run.peak_mib for run in known], default=math.nan),
            "least_mib": max([run.need_mib for run in runs if run.need_mib > 0], default=math.nan),
            "censored_mib": cut_off_mib if cut_off_mib > shown_mib else None,
            "since_s": known[0].end_s if known else None,
            "until_s": known[-1].end_s if known else None,
            "activities": tuple([run.activity for run in runs if run.activity is not None][-NEWEST_RUNS:]),
            "excluded": dict(Counter([run.why_not for run in runs if run.why_not])),
        }


def _since(runs: Iterable[Run], since_s: int) -> list[Run]:
    """Of runs, oldest end first, those that ended at since_s or later."""
    found = list(runs)
    if not found or found[0].end_s >= since_s:
        return found
    return found[bisect_left(found, since_s, key=lambda run: run.end_s) :]


def remember_peaks(
    users: Collection[str], history: pd.DataFrame, until_s: int, config: AdviceSection, tiers: Sequence[Tier] = ()
) -> PeakStore:
    """What these users' jobs that ended before until_s were."""
    own = history[history["user"].isin(users)]
    jobs, runs = submissions(own), runs_of(own, config, tiers)
    store = PeakStore(config)
    for row, is_end in sweep(own):
        run = runs[row]
        if is_end and run is not None and run.end_s < until_s:
            store.absorb(jobs[row], run)
        elif not is_end and jobs[row].submit_s < until_s:
            store.submit(jobs[row])
    return store


@dataclass(frozen=True)
class Case:
    """A submission of the past with the evidence it had then, and the run that it came to (None: not ended)."""

    row: int
    submission: Submission
    evidence: Evidence
    run: Run | None


def replay_peaks(history: pd.DataFrame, config: AdviceSection, tiers: Sequence[Tier] = ()) -> Iterator[Case]:
    """Every submission in order of time, each with the evidence of runs that had ended before it."""
    jobs, runs = submissions(history), runs_of(history, config, tiers)
    store = PeakStore(config)
    for row, is_end in sweep(history):
        run = runs[row]
        if not is_end:
            yield Case(row, jobs[row], store.evidence(jobs[row], jobs[row].submit_s), run)
            store.submit(jobs[row])
        elif run is not None:
            store.absorb(jobs[row], run)
