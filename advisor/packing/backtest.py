"""The packing advice, replayed over a site's record: pairs of one user's jobs that could have shared a GPU.

A pair is two jobs of one user on one GPU each that ran at the same time. Nobody measured them together: both are taken
to run at the low end of the stated speeds, from the activity that telemetry really saw. A pair that exceeds the GPU's
memory with its real peaks loses the GPU-hours of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from advisor.backtest import Floats
from advisor.memory.decide import BoundReplay
from advisor.memory.peak_store import replay_peaks
from advisor.packing.decide import FamilyKey, PackingDemand, PackingRules, decide_packing, speed_ranges
from advisor.packing.evidence import packing_families, rules_of
from advisor.trial import (
    WEEK_S,
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
from almanac.units import HOUR_S

ALONE, FIRST_FIT, SHUFFLED = "one job a GPU", "whatever runs at the same time", "shuffled"
MOST_PAIRS = 200_000


@dataclass(frozen=True)
class JobPair:
    """Two jobs that ran at the same time. saved_gpu_h: by sharing; NaN if unknown, negative if memory runs out."""

    start_s: float
    user: str
    families: tuple[FamilyKey, FamilyKey]
    saved_gpu_h: float


def trial_packing(history: pd.DataFrame, config: Config) -> TrialResult:
    """Judge the GPU-hours that the advised pairs would have saved. history: of load_history(..., running=True)."""
    rules = rules_of(config)
    try:
        pairs = list(_pairs(history, rules))
        if not any(math.isfinite(pair.saved_gpu_h) for pair in pairs):
            raise TooShortError(
                "no two jobs of one user with measured activity and memory ran on one GPU each at a time"
            )
        span = record_span(history["submit_s"], config.trial)
        saved = np.array([pair.saved_gpu_h for pair in pairs])
        start_s = np.array([pair.start_s for pair in pairs])
        is_advised = _advised(pairs, history, span, config, rules)
        shuffled = np.random.default_rng(1).permutation(is_advised)
        measured = {
            "almanac": np.where(is_advised, saved, 0.0), ALONE: np.zeros(len(pairs)), FIRST_FIT: saved,
            SHUFFLED: np.where(shuffled, saved, 0.0),
        }  # fmt: skip
        gains = gains_by_week("GPU-h saved a pair", "almanac", ALONE, measured, start_s, span, config.trial)
    except TooShortError as error:
        return lacking("packing", error)
    lost = np.where(start_s >= span.start_s, np.minimum(measured["almanac"], 0.0), np.nan)
    losers = losers_of(
        lost, np.array([pair.user for pair in pairs], dtype=object), size_classes(np.ones(len(pairs))), "GPU-h",
        who="of the users have pairs that lose GPU-hours",
    )  # fmt: skip
    notes = (
        *span.notes,
        "speeds are the low end of the stated ones: nothing in the record ran packed",
    )
    return TrialResult("packing", gains, losers, settings=("[packing]", "advise = true"), notes=notes)


def _pairs(history: pd.DataFrame, rules: PackingRules) -> Iterator[JobPair]:
    """Each job with the next one of its user that starts before it ends, no job twice."""
    is_one = history["gpu_count"].eq(1) & history["end_s"].notna() & history["start_s"].notna()
    jobs = history[is_one & history["user"].fillna("").ne("")].sort_values(["user", "start_s"], kind="stable")
    names = (
        "start_s", "end_s", "mean_sm_active_frac", "mean_dram_active_frac", "hbm_peak_mib", "hbm_capacity_mib",
    )  # fmt: skip
    columns = [pd.to_numeric(jobs[name], errors="coerce").to_numpy("float64", na_value=np.nan) for name in names]
    users, keys = jobs["user"].astype(str).tolist(), jobs["name_key"].fillna("").astype(str).tolist()
    rows, place, found = np.column_stack(columns), 0, 0
    while place + 1 < len(jobs) and found < MOST_PAIRS:
        one, other = rows[place], rows[place + 1]
        if users[place] != users[place + 1] or not other[0] < one[1]:
            place += 1
            continue
        families = (users[place], keys[place], 1), (users[place], keys[place + 1], 1)
        yield JobPair(float(one[0]), users[place], families, _saved(one, other, rules))
        place, found = place + 2, found + 1


def _saved(one: Floats, other: Floats, rules: PackingRules) -> float:
    """GPU-hours that two jobs save on one GPU; NaN if telemetry lacks something. Rows: see _pairs."""
    hours = [max(float(each[1] - each[0]), 0.0) / HOUR_S for each in (one, other)]
    levels, needed_mib = [*one[2:4], *other[2:4]], one[4] + other[4] + 2 * rules.context_mib
    usable_mib = min(one[5], other[5]) - rules.headroom_mib
    if not all(0 <= level <= 1 for level in levels) or not math.isfinite(needed_mib + usable_mib):
        return math.nan
    if needed_mib > usable_mib:
        return -sum(hours)
    speeds = speed_ranges([PackingDemand(*map(float, each[2:4])) for each in (one, other)])
    first, last = sorted(zip(hours, (each.low for each in speeds), strict=True), key=lambda each: each[0] / each[1])
    together_h = first[0] / first[1]
    return sum(hours) - together_h - max(last[0] - together_h * last[1], 0.0)


def _advised(
    pairs: list[JobPair], history: pd.DataFrame, span: TrialSpan, config: Config, rules: PackingRules
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """The pairs that the advice names, with what was known when their week began."""
    found = np.zeros(len(pairs), dtype=bool)
    ended = history[history["end_s"].to_numpy("float64", na_value=np.nan) < span.end_s]
    replay = BoundReplay(
        replay_peaks(ended, config.advice, config.tiers), config.advice, config.tiers, with_shared=True
    )
    weeks = [span.start_s + week * WEEK_S for week in range(span.weeks)]

    def judge_week(now_s: int) -> None:
        families = {each.key: each for each in packing_families(history, replay.calibration, config, now_s)}
        for place, pair in enumerate(pairs):
            if now_s <= pair.start_s < now_s + WEEK_S and all(key in families for key in pair.families):
                one, other = (families[key] for key in pair.families)
                found[place] = decide_packing((one, other), rules).is_advised

    for case in replay:
        while weeks and case.submission.submit_s >= weeks[0]:
            judge_week(weeks.pop(0))
    for now_s in weeks:
        judge_week(now_s)
    return found
