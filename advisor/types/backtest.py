"""Run times per GPU type and the advice on types, replayed over a site's record: each job with what was known then.

Only jobs of families that ran on at least two types are scored. Nothing that ended at a job's submission or later
enters, apart from the site's names and numbers of GPUs. Memory: a type smaller than all that the family completed runs
on is left out. The choice is decide_type's, as at submission; the record has no interval of a wait, so that each wait
counts as exact.

Queues are those of the record. It does not have priorities, so each type serves its jobs in order of submission,
without backfill. A job's run time is what was predicted at its submission. A type has as many GPUs as the record ever
shows in use at once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import pandas as pd

from advisor.backtest import MethodComparison, compare_methods
from advisor.duration.blend import COVERAGE
from advisor.duration.features import Event, in_order
from advisor.events import StrictPool
from advisor.trial import TooShortError, TrialResult, gains_by_week, lacking, losers_of, record_span, size_classes
from advisor.types.decide import GpuTypeRules, TypeWait, decide_type
from advisor.types.learning import Floats, SpeedTable, learn_speeds
from advisor.types.runs import FamilyKey, FamilyRuns, SpeedRun, learn_types, runs_of
from advisor.types.times import Source, TypeTime, family_times
from almanac.config import Config
from almanac.units import DAY_S

RELEARN_S = 7 * DAY_S
"""Time after which a replay learns the speed table again; live, each training does."""
SILENT, KEPT, OTHER = "silent", "kept", "other"
_OVERRUN = 0.1
"""A job past its prediction is taken to run on for this share of what it ran (own choice)."""


@dataclass(frozen=True)
class TypeOutcome:
    """One scored job. run_s: its run time, NaN unless it completed. told: of the type that it used, None if unknown.

    family: with user. waits: expected wait by type, of those that can hold it. chosen: the type advised, or that used.
    usual_s: the family's usual run time on any type, known without speeds. held: whether the interval for one run held
    run_s. advice: OTHER if decide_type names another type, KEPT if others were known and it names none, SILENT if
    no other type was known. won_s: of OTHER, estimated. wait_s, expected_wait_s: on the type used.
    """

    submit_s: int
    gpu_type: str
    run_s: float
    usual_s: float
    told: TypeTime | None
    held: bool
    advice: str
    wait_s: float
    expected_wait_s: float | None
    won_s: float = 0.0
    family: FamilyKey | None = None
    chosen: str = ""
    waits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TypedJob:
    """One job of the record: its type, GPUs, and predicted run time in s."""

    gpu_type: str
    gpus: int
    run_s: float


@dataclass
class TypeQueues:
    """Jobs that wait and run now, by type. capacity: GPUs of each type."""

    capacity: dict[str, int]
    waiting: defaultdict[str, dict[int, TypedJob]] = field(default_factory=lambda: defaultdict(dict))
    running: defaultdict[str, dict[int, tuple[TypedJob, float]]] = field(default_factory=lambda: defaultdict(dict))

    def submit(self, row: int, job: TypedJob) -> None:
        self.waiting[job.gpu_type][row] = job

    def start(self, row: int, gpu_type: str, now_s: float) -> None:
        job = self.waiting[gpu_type].pop(row, None)
        if job is not None:
            self.running[gpu_type][row] = (job, now_s)

    def end(self, row: int, gpu_type: str) -> None:
        self.running[gpu_type].pop(row, None)

    def wait_s(self, gpu_type: str, gpus: int, now_s: float) -> float | None:
        """Return the wait of a job submitted now, seconds; None if the type never had so many GPUs."""
        total = self.capacity.get(gpu_type, 0)
        if gpus > total:
            return None
        ends = [(_end_s(job, start_s, now_s), job.gpus) for job, start_s in self.running[gpu_type].values()]
        pool = StrictPool(total, now_s, ends)
        for job in self.waiting[gpu_type].values():
            pool.start(min(job.gpus, total), job.run_s)
        return pool.next_start_s(gpus) - now_s


def _end_s(job: TypedJob, start_s: float, now_s: float) -> float:
    expected_s = start_s + job.run_s
    return expected_s if expected_s > now_s else now_s + _OVERRUN * (now_s - start_s)


def peak_use(jobs: Iterable[tuple[str, int, float, float]]) -> dict[str, int]:
    """Return the most GPUs in use at once, by type. jobs: (type, GPUs, start, end)."""
    used, most = Counter[str](), Counter[str]()
    changes = [(at_s, gpus, name) for name, held, *span in jobs for at_s, gpus in zip(span, (held, -held), strict=True)]
    for _, change, name in sorted(changes):  # an end comes before a start of the same second
        used[name] += change
        most[name] = max(most[name], used[name])
    return dict(most)


@dataclass
class _Site:
    """The knowledge at one time of a replay."""

    table: SpeedTable = field(default_factory=SpeedTable)
    learned_s: float = -math.inf
    families: defaultdict[str, dict[FamilyKey, FamilyRuns]] = field(default_factory=lambda: defaultdict(dict))
    log_times: list[float] = field(default_factory=list)

    def add(self, run: SpeedRun) -> None:
        self.families[run.family.user].setdefault(run.family, FamilyRuns()).add(run)
        if run.log_s == run.log_s:
            self.log_times.append(run.log_s)

    def learn(self, types: SpeedTable, now_s: float) -> None:
        if now_s - self.learned_s >= RELEARN_S:
            everybody = {key: runs for families in self.families.values() for key, runs in families.items()}
            self.table, self.learned_s = learn_speeds(everybody, types.types, types.names), now_s

    def usual_s(self, key: FamilyKey, limit_s: float) -> float:
        """The median of the family's run times, else of the site's newest, at most the time limit."""
        runs = self.families[key.user].get(key)
        own = [value for values in runs.log_times().values() for value in values] if runs else []
        usual_s = math.exp(float(np.median(own or self.log_times[-1000:]))) if own or self.log_times else math.inf
        least_s = min(usual_s, limit_s if limit_s > 0 else math.inf)
        return least_s if math.isfinite(least_s) else 3600.0


def replay_types(jobs: pd.DataFrame, config: Config, limit: int) -> list[TypeOutcome]:
    """The newest `limit` jobs that can be scored, in order of submission. jobs: `load_speed_runs` of everybody."""
    types = learn_types(jobs, config.tiers)
    runs = runs_of(jobs, types)
    names = [
        types.name(*(str(value) if isinstance(value, str) else "" for value in row))
        for row in zip(jobs["gpu_type"], jobs["constraints"], jobs["gpu_model"], strict=True)
    ]
    times = jobs[["submit_s", "start_s", "end_s", "gpu_count", "time_limit_s"]].astype("float64").to_numpy()
    is_known = np.array([bool(name) for name in names], dtype=bool) & ~np.isnan(times[:, :4]).any(axis=1)
    known = np.flatnonzero(is_known & (times[:, 3] >= 1)).tolist()
    keys = {row: _key(jobs, row) for row in known}
    scored = _scored(runs, known, times, limit)
    capacity = peak_use((names[row], keys[row].gpu_count, times[row, 1], times[row, 2]) for row in known)
    queues, site = TypeQueues(capacity), _Site()
    whole = SpeedTable(types, tuple(sorted(set(names) - {""})))
    event_s = np.full((len(Event), len(jobs)), math.nan)
    event_s[Event.SUBMIT, known] = times[known, 0]
    event_s[Event.START, known] = np.maximum(times[known, 1], times[known, 0])
    event_s[Event.END, known] = np.maximum(times[known, 2], event_s[Event.START, known] + 1)
    found = []
    for row, event in in_order(jobs, event_s):
        now_s = float(event_s[event, row])
        if event is Event.END:
            queues.end(row, names[row])
            if (run := runs[row]) is not None:
                site.add(run)
        elif event is Event.START:
            queues.start(row, names[row], now_s)
        else:
            usual_s = site.usual_s(keys[row], times[row, 4])
            if row in scored:
                site.learn(whole, now_s)
                found.append(_outcome(runs[row], keys[row], names[row], times[row], usual_s, site, queues))
            queues.submit(row, TypedJob(names[row], keys[row].gpu_count, usual_s))
    return found


def _key(jobs: pd.DataFrame, row: int) -> FamilyKey:
    user, name = (str(jobs[column].iloc[row]) for column in ("user", "name_key"))
    return FamilyKey(user, name, int(jobs["gpu_count"].to_numpy(dtype="float64")[row]))


def _scored(runs: Sequence[SpeedRun | None], known: Sequence[int], times: Floats, limit: int) -> set[int]:
    seen: defaultdict[FamilyKey, set[str]] = defaultdict(set)
    told = [(row, run) for row in known if (run := runs[row]) is not None]
    for _, run in told:
        seen[run.family].add(run.gpu_type)
    rows = [row for row, run in told if len(seen[run.family]) > 1]
    return set(sorted(rows, key=lambda row: (times[row, 0], row))[-limit:])


def _outcome(
    run: SpeedRun | None, key: FamilyKey, used: str, times: Floats, usual_s: float, site: _Site, queues: TypeQueues
) -> TypeOutcome:
    submit_s, start_s = float(times[0]), float(times[1])
    told = family_times(key, site.families[key.user], site.table, coverage=COVERAGE)
    own = next((each for each in told if each.gpu_type == used), None)
    run_s = math.exp(run.log_s) if run is not None and run.log_s == run.log_s else math.nan
    waits = {each.gpu_type: queues.wait_s(each.gpu_type, key.gpu_count, submit_s) for each in told}
    low_s, high_s = own.next_run(COVERAGE) if own else (math.nan, math.nan)
    rules = GpuTypeRules(int(submit_s))
    advice, won_s, chosen = _advice(told, waits, used, rules, float(times[4]) if times[4] > 0 else None)
    return TypeOutcome(
        submit_s=int(submit_s), gpu_type=used, run_s=run_s, usual_s=usual_s, told=own, held=low_s <= run_s <= high_s,
        advice=advice, wait_s=max(start_s - submit_s, 0.0), expected_wait_s=waits.get(used), won_s=won_s,
        family=key, chosen=chosen, waits={name: wait for name, wait in waits.items() if wait is not None},
    )  # fmt: skip


def _advice(
    told: Sequence[TypeTime],
    waits: Mapping[str, float | None],
    used: str,
    rules: GpuTypeRules,
    limit_s: float | None,
) -> tuple[str, float, str]:
    """(advice, seconds won as estimated, the type to use) for a request that names the type that the job used."""
    known = [TypeWait(name, wait, wait, wait, rules.now_s) for name, wait in waits.items() if wait is not None]
    if len(known) < 2 or used not in {each.gpu_type for each in known}:
        return SILENT, 0.0, used
    found = decide_type(told, known, [used], rules, limit_s)
    return (OTHER, found.gain_s, found.best.gpu_type) if found else (KEPT, 0.0, used)


@dataclass(frozen=True)
class TypeScores:
    """Scores of a group of jobs. completed: with a run time; predicted: of these, with a time for the type used.

    error: median of |ln(predicted / run time)|. coverage: share of run times in their interval. None without jobs.
    """

    group: str
    jobs: int
    completed: int
    predicted: int
    error: float | None
    coverage: float | None


@dataclass(frozen=True)
class AdviceScores:
    """Scores of the advice on GPU types over past jobs.

    jobs: scored. other, kept, silent: jobs for which the advice would have named another type, the one used, or none.
    won_hours: estimated hours won, summed over `other`. wait_error_s: median of |expected wait - wait| on the type
    used; None without jobs.
    """

    jobs: int
    other: int
    kept: int
    silent: int
    won_hours: float
    median_won_hours: float | None
    wait_error_s: float | None


def score_types(outcomes: Sequence[TypeOutcome]) -> list[TypeScores]:
    """Score all jobs, then by the source of the time, then by the type used."""
    groups: dict[str, list[TypeOutcome]] = {"all": list(outcomes)}
    for source in get_args(Source):
        groups[f"from {source}"] = [each for each in outcomes if each.told and each.told.source == source]
    for name in sorted({each.gpu_type for each in outcomes}):
        groups[f"on {name}"] = [each for each in outcomes if each.gpu_type == name]
    return [_scores(name, group) for name, group in groups.items() if group or name == "all"]


def _scores(name: str, outcomes: Sequence[TypeOutcome]) -> TypeScores:
    completed = [each for each in outcomes if not math.isnan(each.run_s)]
    told = [(each.told, each) for each in completed if each.told]
    errors = [abs(math.log(time.run_s / max(each.run_s, 1.0))) for time, each in told]
    coverage = float(np.mean([each.held for _, each in told])) if told else None
    return TypeScores(name, len(outcomes), len(completed), len(told), _median(errors), coverage)


def score_advice(outcomes: Sequence[TypeOutcome]) -> AdviceScores:
    said = Counter(each.advice for each in outcomes)
    won = [each.won_s / 3600 for each in outcomes if each.advice == OTHER]
    waits = [abs(each.expected_wait_s - each.wait_s) for each in outcomes if each.expected_wait_s is not None]
    counts = (said[OTHER], said[KEPT], said[SILENT])
    return AdviceScores(len(outcomes), *counts, sum(won), _median(won), _median(waits))


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def compare_times(outcomes: Sequence[TypeOutcome]) -> MethodComparison:
    """Compare |ln(predicted / run time)| on the type used: by type, without types, and for another job."""
    known = [each for each in outcomes if each.told and not math.isnan(each.run_s)]
    log_s = np.log(np.maximum([each.run_s for each in known], 1.0))
    told = np.log([each.told.run_s for each in known if each.told])
    usual = np.log([each.usual_s for each in known])
    predicted = {"almanac": told, "family median": usual, "shuffled": np.random.default_rng(1).permutation(told)}
    errors = {name: np.abs(values - log_s) for name, values in predicted.items()}
    return compare_methods(
        "|log error|", "almanac", errors, [each.submit_s for each in known], ("shuffled",), is_cost=True
    )


AS_ASKED, FIRST_FREE, ONE_TYPE, SHUFFLED = "as asked", "the type that is free first", "one type for all", "shuffled"


def trial_types(jobs: pd.DataFrame, config: Config) -> TrialResult:
    """Replay the advice on GPU types, and judge when the jobs would have ended: hours from submission to end.

    The wait is that of the record's queue, and the run time the family's median on that type over the whole record, for
    every method alike. Jobs are left out if a method's type has no run of their family.
    """
    try:
        outcomes = replay_types(jobs, config, len(jobs))
        if not any(not math.isnan(each.run_s) for each in outcomes):
            raise TooShortError("no job family has runs on two GPU types")
        submit_s = np.array([each.submit_s for each in outcomes], dtype="float64")
        span = record_span(submit_s, config.trial)
        usual_s = _usual_s(outcomes)
        chosen = _chosen_types(outcomes, usual_s)
        hours = {name: _end_hours(outcomes, types, usual_s) for name, types in chosen.items()}
        gains = gains_by_week(
            "h from submission to end", "almanac", AS_ASKED, hours, submit_s, span, config.trial, is_cost=True
        )
    except TooShortError as error:
        return lacking("types", error)
    gained = np.where(submit_s >= span.start_s, hours[AS_ASKED] - hours["almanac"], np.nan)
    families = [each.family for each in outcomes]
    sizes = size_classes([family.gpu_count if family else math.nan for family in families])
    losers = losers_of(gained, [family.user if family else "" for family in families], sizes, "h")
    return TrialResult("types", gains, losers, settings=("[hooks]", 'prompt = "ask"'), notes=span.notes)


_UsualTimes = Mapping[tuple[FamilyKey | None, str], float]


def _usual_s(outcomes: Sequence[TypeOutcome]) -> _UsualTimes:
    """Median run time by family and type over the whole record."""
    runs: defaultdict[tuple[FamilyKey | None, str], list[float]] = defaultdict(list)
    for each in outcomes:
        if not math.isnan(each.run_s):
            runs[each.family, each.gpu_type].append(each.run_s)
    return {key: float(np.median(values)) for key, values in runs.items()}


def _chosen_types(outcomes: Sequence[TypeOutcome], usual_s: _UsualTimes) -> dict[str, list[str]]:
    """The type of each job by method. ONE_TYPE: the type on which families run shortest, for all."""
    log_s = pd.DataFrame([(family, name, math.log(max(each_s, 1.0))) for (family, name), each_s in usual_s.items()])
    fastest = str((log_s[2] - log_s.groupby(0)[2].transform("mean")).groupby(log_s[1]).mean().idxmin())
    used, chosen = np.array([each.gpu_type for each in outcomes]), np.array([each.chosen for each in outcomes])
    shuffled, rng = chosen.copy(), np.random.default_rng(1)
    for name in np.unique(used):
        rows = np.flatnonzero(used == name)
        shuffled[rows] = chosen[rng.permutation(rows)]
    free = [min(each.waits, key=lambda name: (each.waits[name], name != each.gpu_type), default=each.gpu_type)
            for each in outcomes]  # fmt: skip
    one = [fastest if fastest in each.waits and (each.family, fastest) in usual_s else each.gpu_type
           for each in outcomes]  # fmt: skip
    return {
        "almanac": chosen.tolist(), AS_ASKED: used.tolist(), FIRST_FREE: free, ONE_TYPE: one,
        SHUFFLED: shuffled.tolist(),
    }  # fmt: skip


def _end_hours(outcomes: Sequence[TypeOutcome], types: Sequence[str], usual_s: _UsualTimes) -> Floats:
    """Hours from submission to end of each job on a type; NaN if its family never ran there."""
    return np.array([
        (each.waits.get(name, math.nan) + usual_s.get((each.family, name), math.nan)) / 3600
        for each, name in zip(outcomes, types, strict=True)
    ])  # fmt: skip
