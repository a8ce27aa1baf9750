"""Group a user's finished runs by job family and script, and collect the memory evidence for the next submission."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import pandas as pd
from rapidfuzz import process
from rapidfuzz.distance import Levenshtein

from advisor.duration.features import SubmittedJob, submissions, sweep
from advisor.memory.evidence import FAMILY, RUNS_BY_RISK, SIMILAR, Evidence, Oom
from advisor.memory.open_jobs import OpenBy
from advisor.memory.runs import (
    FAILED_SHARE,
    MAYBE_PREALLOCATED,
    PACKED,
    PREALLOCATED,
    MeasuredRun,
    heights_of,
    runs_of,
)
from advisor.mig.compute_need import NEWEST_RUNS
from almanac.config import AdviceSection, Tier
from almanac.names import is_family

SIMILARITY = 0.8
MIN_PREFIX = 4
MAX_FAMILY_RUNS = 256
MAX_USER_RUNS = 1024
MAX_FAMILIES = 256
"""Families remembered per user and GPU count; a new one takes the place of the one whose last end is oldest.

Each new name is compared with them all. In the Mason trace (two months), no user has more than 71 with one GPU count.
"""


@dataclass
class PeakFamily:
    """The state of one user's family, of one GPU count.

    kin: all runs of names like this, oldest first. known_s: ends of its own newest min_runs runs with a known need, s
    since 1970. reserved_s: end of its newest run, if the framework reserved memory; has_reserved: an earlier run did.
    void_s: end of the newest run that reserved memory again; known needs up to it do not count. submit_s: of its newest
    run. comes_again: it was submitted more than once.
    """

    kin: deque[MeasuredRun]
    known_s: deque[int] = field(default_factory=deque)
    reserved_s: int | None = None
    has_reserved: bool = False
    void_s: float = -math.inf
    submit_s: int | None = None
    comes_again: bool = False
    largest_mib: float = 0.0
    oom: Oom | None = None
    failed: MeasuredRun | None = None


class ReadPeaks(NamedTuple):
    """The evidence for a name from runs that ended at since_s or later: fields of Evidence. names: whose runs.

    It is the same for each later time up to until_s, as long as no run is added.
    """

    since_s: int
    until_s: float
    names: Collection[str]
    fields: Mapping[str, Any]


@dataclass
class UserPeaks:
    """One user's families of one GPU count, all their runs with names, oldest first, and what is open, by name.

    scripts: of each script the runs under names that were submitted once, by name; open_scripts: what of it is open.
    read, read_of_new: what was read last for families, and for names that are none yet. A burst is read once.
    """

    families: OrderedDict[str, PeakFamily] = field(default_factory=OrderedDict)
    kin_of: dict[str, set[str]] = field(default_factory=dict)
    runs: deque[tuple[str, MeasuredRun]] = field(default_factory=lambda: deque(maxlen=MAX_USER_RUNS))
    scripts: OrderedDict[str, OrderedDict[str, deque[MeasuredRun]]] = field(default_factory=OrderedDict)
    open: OpenBy = field(default_factory=OpenBy)
    open_scripts: OpenBy = field(default_factory=OpenBy)
    read: dict[str, ReadPeaks] = field(default_factory=dict)
    read_of_new: dict[str, ReadPeaks] = field(default_factory=dict)

    def family(self, key: str) -> PeakFamily:
        """The family of this key, from now on the newest; a new one starts with the runs of names like it."""
        if key not in self.families:
            kin = similar_names(key, self.families) | {key}
            self.families[key] = PeakFamily(deque(self.runs_of(kin), maxlen=MAX_FAMILY_RUNS))
            self.kin_of[key] = kin
            for other in kin - {key}:
                self.kin_of[other].add(key)
            if len(self.families) > MAX_FAMILIES:
                oldest, _ = self.families.popitem(last=False)
                self.read.pop(oldest, None)
                for other in self.kin_of.pop(oldest) - {oldest}:
                    self.kin_of[other].remove(oldest)
        self.families.move_to_end(key)
        return self.families[key]

    def runs_of(self, names: Collection[str]) -> list[MeasuredRun]:
        """The newest, oldest first."""
        return [run for name, run in self.runs if name in names]

    def absorb(self, key: str, script: str, run: MeasuredRun) -> None:
        """Add a run of a family that family() has given."""
        self.runs.append((key, run))
        for other in self.kin_of[key]:
            self.families[other].kin.append(run)
            self.read.pop(other, None)
        self.read_of_new.clear()
        self._absorb_script(key, script, run)

    def _absorb_script(self, key: str, script: str, run: MeasuredRun) -> None:
        family, before = self.families[key], self.scripts.get(script)
        first_s = before[key][0].submit_s if before and key in before else family.submit_s
        family.submit_s = run.submit_s
        if not family.comes_again and first_s not in (None, run.submit_s):
            family.comes_again = True
            for other in self.scripts.values():
                other.pop(key, None)
        if family.comes_again or not script:
            return
        names = self.scripts.setdefault(script, OrderedDict())
        names.setdefault(key, deque(maxlen=MAX_FAMILY_RUNS)).append(run)
        self.scripts.move_to_end(script)
        if len(names) > MAX_FAMILIES:
            names.popitem(last=False)
        if len(self.scripts) > MAX_FAMILIES:
            self.scripts.popitem(last=False)


def similar_names(name: str, others: Iterable[str]) -> set[str]:
    """The others that begin with the name, that it begins with, or that differ from it in at most a fifth of letters.

    Fewer than MIN_PREFIX letters are no beginning.
    """
    names, scorer = list(others), Levenshtein.normalized_similarity
    alike = process.extract_iter(name, names, scorer=scorer, processor=None, score_cutoff=SIMILARITY)
    found = {other for other, _, _ in alike}
    if len(name) >= MIN_PREFIX:
        long = (other for other in names if len(other) >= MIN_PREFIX)
        found.update(other for other in long if other.startswith(name) or name.startswith(other))
    return found


RETRY_S = 14 * 86_400
MAX_RUNS = 60
"""Newest runs that show growth: older ones tell little about the next."""


class PeakStore:
    """Absorbs ended runs in the order of their ends; gives the evidence for a next one."""

    def __init__(self, config: AdviceSection) -> None:
        self._config = config
        self._most_runs = math.ceil(RUNS_BY_RISK / config.risk)
        self._users: defaultdict[tuple[str, int], UserPeaks] = defaultdict(UserPeaks)

    def submit(self, job: SubmittedJob) -> None:
        user = self._users[job.user, job.gpu_count]
        user.open[job.name_key].add(job)
        if job.script_key:
            user.open_scripts[job.script_key].add(job)

    def absorb(self, job: SubmittedJob, run: MeasuredRun) -> None:
        """Add the run of a job that was submitted."""
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

    def _out_of_memory(self, family: PeakFamily, run: MeasuredRun) -> float | None:
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

    def evidence(self, job: SubmittedJob, now_s: int) -> Evidence:
        """Return the evidence of the user's runs of this name and names like it; of its script if these are too few.

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

    def _of_name(self, user: UserPeaks, job: SubmittedJob, now_s: int) -> Evidence:
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

    def _of_script(self, user: UserPeaks, job: SubmittedJob, now_s: int) -> Evidence | None:
        """Return the evidence of this script's runs under names that were submitted once; None if they are too few.

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
            names = similar_names(name, user.families) | {name}
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

    def _fields(self, runs: Sequence[MeasuredRun]) -> dict[str, Any]:
        every, places = heights_of(runs), [place for place, run in enumerate(runs) if run.is_known]
        runs = runs[places[-self._most_runs] :] if len(places) > self._most_runs else runs
        known = [run for run in runs if run.is_known]
        newest, of_newest = known[-MAX_RUNS:], heights_of(runs)
        return {
            "runs": len(known),
            "newest": tuple([math.log(run.need_mib) for run in newest]),
            "newest_s": tuple([run.submit_s for run in newest]),
            "highest_mib": max([run.peak_mib for run in known], default=math.nan),
            "least_mib": of_newest.least_mib,
            "censored_mib": of_newest.censored_mib,
            "seen_mib": every.least_mib if every.censored_mib is None else math.inf,
            "since_s": known[0].end_s if known else None,
            "until_s": known[-1].end_s if known else None,
            "activities": tuple([run.activity for run in runs if run.activity is not None][-NEWEST_RUNS:]),
            "excluded": dict(Counter([run.why_not for run in runs if run.why_not])),
        }


def _since(runs: Iterable[MeasuredRun], since_s: int) -> list[MeasuredRun]:
    """Return the runs that ended at since_s or later. runs: oldest end first."""
    found = list(runs)
    if not found or found[0].end_s >= since_s:
        return found
    return found[bisect_left(found, since_s, key=lambda run: run.end_s) :]


def remember_peaks(
    users: Collection[str], history: pd.DataFrame, until_s: int, config: AdviceSection, tiers: Sequence[Tier] = ()
) -> PeakStore:
    """Return a store of these users' jobs that ended before until_s."""
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
    submission: SubmittedJob
    evidence: Evidence
    run: MeasuredRun | None


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
