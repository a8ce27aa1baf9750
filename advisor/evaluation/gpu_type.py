"""Run times per GPU type and the advice on types, replayed over a site's record: each job with what was known then.

Only jobs of families that ran on at least two types are scored. Nothing that ended at a job's submission or later
enters, apart from the site's names and numbers of GPUs. Queues are those of the record (advisor.evaluation.type_queue).
Memory: a type smaller than all that the family completed runs on is left out. The choice is decide_type's, as at
submission; the record has no interval of a wait, so that each wait counts as exact.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from advisor.decisions.gpu_type import GpuTypeRules, decide_type
from advisor.duration.intervals import COVERAGE
from advisor.evaluation.type_queue import QueuedJob, TypeQueues, peak_use
from advisor.speed.gpu_types import learn_types
from advisor.speed.learning import SpeedTable, learn_speeds
from advisor.speed.posterior import Floats
from advisor.speed.runs import FamilyKey, FamilyRuns, SpeedRun, runs_of
from advisor.speed.times import TypeTime, family_times
from advisor.waits.view import TypeWait
from almanac.config import Config
from almanac.units import DAY_S

RELEARN_S = 7 * DAY_S
"""How often a replay learns the speed table again; live, each training does."""
SILENT, KEPT, OTHER = "silent", "kept", "other"
_SUBMIT, _END, _START = 0, 1, 2


@dataclass(frozen=True)
class TypeOutcome:
    """One scored job. run_s: its run time, NaN unless it completed. told: of the type that it used, None if unknown.

    held: whether the interval for one run held run_s. advice: OTHER if decide_type names another type, KEPT if others
    were known and it names none, SILENT if nothing was known of another. won_s: of OTHER, estimated.
    wait_s, expected_wait_s: on the type used.
    """

    submit_s: int
    user: str
    gpu_type: str
    run_s: float
    told: TypeTime | None
    held: bool
    advice: str
    wait_s: float
    expected_wait_s: float | None
    won_s: float = 0.0


@dataclass
class _Site:
    """What is known at one time of a replay."""

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
    known = [
        row for row, name in enumerate(names) if name and not np.isnan(times[row, :4]).any() and times[row, 3] >= 1
    ]
    keys = {row: _key(jobs, row) for row in known}
    scored = _scored(runs, known, times, limit)
    capacity = peak_use((names[row], keys[row].gpu_count, times[row, 1], times[row, 2]) for row in known)
    queues, site = TypeQueues(capacity), _Site()
    whole = SpeedTable(types, tuple(sorted(set(names) - {""})))
    found = []
    for now_s, kind, row in _events(known, times):
        if kind == _END:
            queues.end(row, names[row])
            if (run := runs[row]) is not None:
                site.add(run)
        elif kind == _START:
            queues.start(row, names[row], now_s)
        else:
            if row in scored:
                site.learn(whole, now_s)
                found.append(_outcome(runs[row], keys[row], names[row], times[row], site, queues, config))
            queues.submit(row, QueuedJob(names[row], keys[row].gpu_count, site.usual_s(keys[row], times[row, 4])))
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


def _events(known: Sequence[int], times: Floats) -> list[tuple[float, int, int]]:
    """(time, kind, row) in order. In one second jobs are submitted, then others end, then others start."""
    events = []
    for row in known:
        submit_s, start_s, end_s = times[row, :3]
        start_s = max(start_s, submit_s)
        events += [(submit_s, _SUBMIT, row), (start_s, _START, row), (max(end_s, start_s + 1), _END, row)]
    return sorted(events)


def _outcome(
    run: SpeedRun | None, key: FamilyKey, used: str, times: Floats, site: _Site, queues: TypeQueues, config: Config
) -> TypeOutcome:
    submit_s, start_s = float(times[0]), float(times[1])
    coverage = COVERAGE
    told = family_times(key, site.families[key.user], site.table, coverage=coverage)
    own = next((each for each in told if each.gpu_type == used), None)
    run_s = math.exp(run.log_s) if run is not None and run.log_s == run.log_s else math.nan
    waits = {each.gpu_type: queues.wait_s(each.gpu_type, key.gpu_count, submit_s) for each in told}
    low_s, high_s = own.next_run(coverage) if own else (math.nan, math.nan)
    rules = GpuTypeRules(int(submit_s))
    advice, won_s = _advice(told, waits, used, rules, float(times[4]) if times[4] > 0 else None)
    return TypeOutcome(
        submit_s=int(submit_s),
        user=key.user,
        gpu_type=used,
        run_s=run_s,
        told=own,
        held=low_s <= run_s <= high_s,
        advice=advice,
        wait_s=max(start_s - submit_s, 0.0),
        expected_wait_s=waits.get(used),
        won_s=won_s,
    )


def _advice(
    told: Sequence[TypeTime],
    waits: Mapping[str, float | None],
    used: str,
    rules: GpuTypeRules,
    limit_s: float | None,
) -> tuple[str, float]:
    """(advice, seconds won as estimated) for a request that names the type that the job used."""
    known = [TypeWait(name, wait, wait, wait, rules.now_s) for name, wait in waits.items() if wait is not None]
    if len(known) < 2 or used not in {each.gpu_type for each in known}:
        return SILENT, 0.0
    found = decide_type(told, known, [used], rules, limit_s)
    return (OTHER, found.gain_s) if found else (KEPT, 0.0)


@dataclass(frozen=True)
class TypeScores:
    """Of one group of jobs. completed: with a run time; predicted: of these, with a time for the type used.

    error: median of |ln(predicted / run time)|; coverage: share of run times in their interval; None without jobs.
    """

    group: str
    jobs: int
    completed: int
    predicted: int
    error: float | None
    coverage: float | None


@dataclass(frozen=True)
class AdviceScores:
    """jobs: scored. other, kept, silent: what the advice would have said. won_hours: sum over OTHER, estimated.

    wait_error_s: median of |expected wait - wait| on the type used; None without jobs.
    """

    jobs: int
    other: int
    kept: int
    silent: int
    won_hours: float
    median_won_hours: float | None
    wait_error_s: float | None


def score_types(outcomes: Sequence[TypeOutcome]) -> list[TypeScores]:
    """All jobs, then by the source of the time, then by the type used."""
    groups = [("all", list(outcomes))]
    for source in ("own runs", "own rates", "other families", "specifications"):
        groups.append((f"from {source}", [each for each in outcomes if each.told and each.told.source == source]))
    for name in sorted({each.gpu_type for each in outcomes}):
        groups.append((f"on {name}", [each for each in outcomes if each.gpu_type == name]))
    return [_scores(name, group) for name, group in groups if group or name == "all"]


def _scores(name: str, outcomes: Sequence[TypeOutcome]) -> TypeScores:
    completed = [each for each in outcomes if not math.isnan(each.run_s)]
    pairs = [(each.told.run_s, each.run_s, each.held) for each in completed if each.told]
    errors = [abs(math.log(told_s / max(run_s, 1.0))) for told_s, run_s, _ in pairs]
    return TypeScores(
        group=name,
        jobs=len(outcomes),
        completed=len(completed),
        predicted=len(pairs),
        error=float(np.median(errors)) if errors else None,
        coverage=float(np.mean([held for *_, held in pairs])) if pairs else None,
    )


def score_advice(outcomes: Sequence[TypeOutcome]) -> AdviceScores:
    counts = {name: sum(each.advice == name for each in outcomes) for name in (OTHER, KEPT, SILENT)}
    won = [each.won_s / 3600 for each in outcomes if each.advice == OTHER]
    waits = [abs(each.expected_wait_s - each.wait_s) for each in outcomes if each.expected_wait_s is not None]
    return AdviceScores(
        jobs=len(outcomes),
        other=counts[OTHER],
        kept=counts[KEPT],
        silent=counts[SILENT],
        won_hours=sum(won),
        median_won_hours=float(np.median(won)) if won else None,
        wait_error_s=float(np.median(waits)) if waits else None,
    )
