"""The tier advice, replayed over a site's record: each submission with what was known then, by the live decision.

A run that was cut off at its capacity exceeds every bound below that capacity; whether it exceeds one above is not
known, and not counted. A failed run is no proof that a bound held: it is judged only where its peak is above.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np
import pandas as pd

from advisor.backtest import Floats, MethodComparison, Rate, compare_methods, rate_of
from advisor.duration.replay import recorded_requests
from advisor.memory.decide import BoundReplay, MemoryAdvice, decide_memory
from advisor.memory.peak_store import Case, replay_peaks
from advisor.trial import (
    TooShortError,
    TrialResult,
    TrialSpan,
    gains_by_week,
    lacking,
    losers_of,
    record_span,
    size_classes,
)
from almanac.config import Config

DOWN, UP, KEPT, NAMED, SILENT = "down", "up", "kept", "named", ""
USER_GROUPS = (
    (20, "users with fewer than 20 jobs"),
    (200, "users with 20-199 jobs"),
    (None, "users with 200 jobs or more"),
)
OUTCOMES = (
    "row", "user", "submit_s", "is_first", "scope", "asked", "advised", "move", "bound_mib", "usable_mib", "need_mib",
    "is_known", "gpu_hours",
)  # fmt: skip


def replay_tiers(history: pd.DataFrame, config: Config, cases: Iterable[Case] | None = None) -> pd.DataFrame:
    """One row per submission, in order of time, columns OUTCOMES; `row` is its place in the history frame.

    is_first: no task of its array came before. move: DOWN, UP, KEPT, NAMED (no tier was asked for) or SILENT.
    bound_mib, usable_mib: of the advice, NaN without; need_mib: the least need, NaN where unknown;
    is_known: it is more than that.
    cases: those of replay_peaks, where they are at hand.
    """
    if cases is None:
        cases = replay_peaks(history, config.advice, config.tiers)
    requests = recorded_requests(history, config.tiers)
    gpu_hours = (history["elapsed_s"].astype("float64") * history["gpu_count"] / 3600).tolist()
    usable = {tier.name: tier.capacity_mib - config.advice.headroom_mib for tier in config.tiers}
    sizes = {tier.name: tier.size for tier in config.tiers}
    seen: set[tuple[str, str, int]] = set()
    replay = BoundReplay(cases, config.advice, config.tiers)
    rows = []
    for case in replay:
        job = case.submission
        request = requests[case.row]
        advice = decide_memory(request, case.evidence, replay.calibration, config)
        array = (job.user, job.name_key, job.submit_s)
        is_first = not (job.is_array and array in seen)
        seen.add(array)
        advised = None if advice.tier.is_held else advice.tier.tier
        rows.append(
            (
                case.row, job.user, job.submit_s, is_first, case.evidence.scope, advice.tier.requested_tier, advised,
                _move(advice, sizes), _stated_mib(advice) if advised else math.nan,
                usable.get(advised or "", math.nan), case.run.need_mib if case.run else math.nan,
                bool(case.run and case.run.is_known), gpu_hours[case.row],
            )
        )  # fmt: skip
    return pd.DataFrame(rows, columns=list(OUTCOMES))


def _stated_mib(advice: MemoryAdvice) -> float:
    bound_mib = advice.bound.bound_mib if advice.bound else None
    return math.nan if bound_mib is None else bound_mib


def _move(advice: MemoryAdvice, sizes: Mapping[str, tuple[int, int]]) -> str:
    advised, asked = advice.tier.tier, advice.tier.requested_tier
    if advised is None or advice.tier.is_held:
        return SILENT
    if asked is None:
        return NAMED
    if advised == asked or sizes[advised] == sizes[asked]:
        return KEPT
    return DOWN if sizes[advised] < sizes[asked] else UP


@dataclass(frozen=True)
class TierScores:
    """Scores of a group of submissions. An array counts once in the rates, and with all its tasks in the numbers.

    exceeded_bound, exceeded_tier: of the advised jobs whose need is known, those that needed more than the bound, and
    more than the advised tier's usable capacity. freed_gpu_hours: on the tier asked for, by jobs moved down that fit.
    """

    group: str
    jobs: int
    advised: int
    moved_down: int
    moved_up: int
    exceeded_bound: Rate
    exceeded_tier: Rate
    freed_gpu_hours: float


def score_tiers(outcomes: pd.DataFrame, seed: int = 1) -> list[TierScores]:
    """Score all submissions, then by evidence class, by how many jobs their user has, and by month (UTC)."""
    scores = [score_group("all", outcomes, seed)]
    return scores + [score_group(name, outcomes[rows], seed) for name, rows in _groups(outcomes)]


def _groups(outcomes: pd.DataFrame) -> Iterator[tuple[str, pd.Series]]:
    for scope in sorted(outcomes["scope"].unique()):
        yield f"evidence: {scope}", outcomes["scope"] == scope
    number = outcomes.groupby("user")["row"].transform("size")
    least = 0
    for most, name in USER_GROUPS:
        yield name, (number >= least) & (number < (math.inf if most is None else most))
        least = most or 0
    months = pd.Series(
        [datetime.fromtimestamp(submit_s, UTC).strftime("%Y-%m") for submit_s in outcomes["submit_s"].tolist()],
        index=outcomes.index,
        dtype="object",
    )
    for month in sorted(months.unique()):
        yield month, months == month


def score_group(name: str, outcomes: pd.DataFrame, seed: int = 1) -> TierScores:
    advised = outcomes["move"] != SILENT
    over_bound = outcomes["need_mib"] > outcomes["bound_mib"]
    over_tier = outcomes["need_mib"] > outcomes["usable_mib"]
    counted = outcomes["is_first"] & advised
    fits = (outcomes["move"] == DOWN) & (outcomes["need_mib"] <= outcomes["usable_mib"])
    bounded = counted & outcomes["bound_mib"].notna() & (outcomes["is_known"] | over_bound)
    return TierScores(
        group=name,
        jobs=len(outcomes),
        advised=int(advised.sum()),
        moved_down=int((outcomes["move"] == DOWN).sum()),
        moved_up=int((outcomes["move"] == UP).sum()),
        exceeded_bound=rate_of(over_bound[bounded], outcomes["user"][bounded], seed),
        exceeded_tier=rate_of(over_tier[counted & (outcomes["is_known"] | over_tier)], outcomes["user"], seed),
        freed_gpu_hours=float(outcomes.loc[fits, "gpu_hours"].sum()),
    )


RISKY = 2.0
"""A rule whose moved jobs run out of memory more often than this many times the accepted risk is no choice for a site:
by chance, a rule that holds the risk comes this far."""
MARGINS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, math.inf)
AS_ASKED, SMALLEST, LAST_RUN, SHUFFLED = "as asked", "the smallest tier", "the last run's peak", "shuffled"


def freed_hours(known: pd.DataFrame) -> dict[str, Floats]:
    """GPU-hours that each job frees on the tier asked for: as asked, with its advice, and with a random job's.

    A job that runs out of memory on the advised tier costs as many. known: outcomes of known need. The control gives
    each job the advice of a random one that asked for the same tier.
    """
    number, rng = np.arange(len(known)), np.random.default_rng(1)
    other = number.copy()
    for rows in known.groupby("asked", dropna=False).indices.values():
        other[rows] = rng.permutation(rows)
    need, usable, hours = (known[name].to_numpy("float64") for name in ("need_mib", "usable_mib", "gpu_hours"))
    is_down = (known["move"] == DOWN).to_numpy()
    freed = {
        name: np.where(is_down[rows], np.where(need <= usable[rows], hours, -hours), 0.0)
        for name, rows in (("almanac", number), (SHUFFLED, other))
    }
    return {"almanac": freed["almanac"], AS_ASKED: np.zeros(len(known)), SHUFFLED: freed[SHUFFLED]}


def compare_freed(outcomes: pd.DataFrame) -> MethodComparison:
    """Compare `freed_hours`. Jobs of unknown need are left out."""
    known = outcomes[outcomes["need_mib"].notna()]
    return compare_methods("GPU-h freed a job", "almanac", freed_hours(known), known["submit_s"], (SHUFFLED,))


def trial_tiers(history: pd.DataFrame, config: Config) -> TrialResult:
    """Replay the advice on memory tiers, and judge the GPU-hours that it frees on the tiers asked for."""
    settings = ("[hooks]", 'prompt = "ask"')
    try:
        if not config.tiers:
            raise TooShortError("the configuration names no memory tier")
        outcomes = replay_tiers(history, config)
        known = outcomes[outcomes["need_mib"].notna()]
        if known.empty:
            raise TooShortError("the record has no job with a measured peak of GPU memory")
        span = record_span(outcomes["submit_s"], config.trial)
        submit_s = known["submit_s"].to_numpy("float64")
        every = freed_hours(known) | _trivial_hours(known, history, span, config)
        dead = {name: _dead_share(hours[submit_s >= span.start_s]) for name, hours in every.items()}
        risky = {name for name in (SHUFFLED, SMALLEST) if dead[name] > max(RISKY * config.advice.risk, dead["almanac"])}
        freed = {name: hours for name, hours in every.items() if name not in risky}
        gains = gains_by_week("GPU-h freed a job", "almanac", AS_ASKED, freed, submit_s, span, config.trial)
    except TooShortError as error:
        return lacking("tiers", error)
    gained = np.where(submit_s >= span.start_s, np.minimum(freed["almanac"], 0.0), np.nan)
    sizes = size_classes(history["gpu_count"].to_numpy("float64")[known["row"].to_numpy()])
    who = "of the users have jobs that run out of memory"
    losers = losers_of(gained, known["user"].to_numpy(dtype=object), sizes, "GPU-h", who=who)
    notes = [f"{name} is no choice: {dead[name]:.0%} of the moved jobs run out of memory" for name in sorted(risky)]
    if dead["almanac"] > RISKY * config.advice.risk:
        notes.append(f"above the accepted risk of {config.advice.risk:.1%}: the memory bound fails here")
        who = f"of the users are at risk: {dead['almanac']:.1%} of the moved jobs run out of memory"
        losers = replace(losers, share=1.0, how_much="", who=who)
    return TrialResult("tiers", gains, losers, settings=settings, notes=(*span.notes, *notes))


def _dead_share(freed: Floats) -> float:
    """Of the moved jobs, the share that runs out of memory; 0 without any."""
    return float((freed < 0).sum() / max(1, (freed != 0).sum()))


def _trivial_hours(known: pd.DataFrame, history: pd.DataFrame, span: TrialSpan, config: Config) -> dict[str, Floats]:
    """GPU-hours freed by rules that need no model: always the smallest tier, or what the family's last run needed.

    The latter with the least margin that kept the accepted risk before the scored weeks.
    """
    usable = {tier.name: tier.capacity_mib - config.advice.headroom_mib for tier in config.tiers if not tier.is_slice}
    sizes = np.array(sorted(usable.values()), dtype="float64")
    asked = known["asked"].map(usable).to_numpy("float64")
    need, hours = known["need_mib"].to_numpy("float64"), known["gpu_hours"].to_numpy("float64")

    def freed(given: Floats) -> Floats:
        return np.where(given < asked, np.where(need <= given, hours, -hours), 0.0)

    last, before = np.nan_to_num(_last_needs(known, history), nan=np.inf), known["submit_s"].to_numpy() < span.start_s
    given = np.full(len(known), np.inf)
    for margin in MARGINS:
        given = np.append(sizes, np.inf)[np.searchsorted(sizes, margin * last)]
        is_down = before & (given < asked)
        if (need > given)[is_down].sum() <= config.advice.risk * is_down.sum():
            break
    return {SMALLEST: freed(np.full(len(known), sizes.min(initial=np.inf))), LAST_RUN: freed(given)}


def _last_needs(known: pd.DataFrame, history: pd.DataFrame) -> Floats:
    """Peak of the newest run of the same user, name, and GPU count that had ended at the submission; NaN without."""
    rows = history.iloc[known["row"].to_numpy()]
    keys = pd.MultiIndex.from_arrays([rows[name].astype(str).to_numpy() for name in ("user", "name_key", "gpu_count")])
    end_s = rows["end_s"].to_numpy("float64")
    submit_s, need = known["submit_s"].to_numpy("float64"), known["need_mib"].to_numpy("float64")
    found = np.full(len(known), np.nan)
    codes = pd.factorize(keys)[0]
    for members in np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1]):
        order = members[np.argsort(end_s[members], kind="stable")]
        place = np.searchsorted(end_s[order], submit_s[members]) - 1
        found[members] = np.where(place >= 0, need[order[np.maximum(place, 0)]], np.nan)
    return found
