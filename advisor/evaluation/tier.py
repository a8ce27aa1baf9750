"""The tier advice, replayed over a site's record: each submission with what was known then, by the live decision.

A run that was cut off at its capacity exceeds every bound below that capacity; whether it exceeds one above is not
known, and not counted. A failed run is no proof that a bound held: it is judged only where its peak is above.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pandas as pd

from advisor.decisions.memory import MemoryAdvice, decide_memory
from advisor.evaluation.recorded import recorded_requests
from advisor.memory.bound import BoundReplay
from advisor.memory.peak_store import Case, replay_peaks
from almanac.config import Config

DOWN, UP, KEPT, NAMED, SILENT = "down", "up", "kept", "named", ""
USER_GROUPS = (
    (20, "users with fewer than 20 jobs"),
    (200, "users with 20-199 jobs"),
    (None, "users with 200 jobs or more"),
)
RESAMPLES = 1000
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
    for item in replay:
        case, job = item.case, item.case.submission
        request = requests[case.row]
        advice = decide_memory(request, case.evidence, replay.calibration, config)
        array = (job.user, job.name_key, job.submit_s)
        is_first = not (job.is_array and array in seen)
        seen.add(array)
        advised = advice.tier.tier
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
    if advised is None:
        return SILENT
    if asked is None:
        return NAMED
    if advised == asked or sizes[advised] == sizes[asked]:
        return KEPT
    return DOWN if sizes[advised] < sizes[asked] else UP


@dataclass(frozen=True)
class Rate:
    """Share of `jobs` with a 95% interval, by bootstrap over users; NaN without jobs."""

    jobs: int
    share: float
    low: float
    high: float


@dataclass(frozen=True)
class TierScores:
    """Of one group of submissions. An array counts once in the rates, and with all its tasks in the numbers.

    exceeded_bound, exceeded_tier: of the advised jobs whose need is known, those that needed more than the bound, and
    more than the advised tier's usable capacity. freed_gpu_hours: of the tier asked for, by jobs moved down that fit.
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
    """All submissions, then by evidence class, by how many jobs their user has, and by month (UTC)."""
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


def rate_of(is_hit: pd.Series, users: pd.Series, seed: int = 1) -> Rate:
    """Share of true entries. Without a single one the interval ends where 2.5% of such samples would show none."""
    number = len(is_hit)
    if not number:
        return Rate(0, math.nan, math.nan, math.nan)
    by_user = is_hit.groupby(users[is_hit.index]).agg(["sum", "size"]).to_numpy(dtype="float64")
    draws = np.random.default_rng(seed).multinomial(len(by_user), np.full(len(by_user), 1 / len(by_user)), RESAMPLES)
    hits, sizes = (draws @ by_user).T
    shares = hits[sizes > 0] / sizes[sizes > 0]
    low, high = np.quantile(shares, [0.025, 0.975]).tolist()
    none_seen = 1 - 0.025 ** (1 / number)
    return Rate(number, float(is_hit.mean()), low, high if is_hit.any() else none_seen)
