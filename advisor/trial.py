"""The verdict of a trial: whether a subject is worth switching on at this site, from its gains week by week.

A back-test gives what almanac, the site's own way, and trivial controls each earned on the same units (jobs, minutes).
Each whole week gives one mean per method. almanac must beat every other method, each at the level of TrialRules: so
several controls make a false verdict rarer, not likelier. Subjects are judged apart, each at that level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student

from advisor.backtest import Floats, Interval
from almanac.config import TrialRules
from almanac.units import DAY_S, HOUR_S, format_duration

SWITCH_ON: Final = "switch on"
DO_NOT: Final = "do not"
NO_DATA: Final = "not enough data"
Answer = Literal["switch on", "do not", "not enough data"]
WEEK_DAYS = 7
WEEK_S = WEEK_DAYS * DAY_S


class TooShortError(Exception):
    """A record is too short to judge. days: more days that it needs; None where time alone does not help."""

    def __init__(self, why: str, days: int | None = None) -> None:
        super().__init__(why)
        self.days = days


@dataclass(frozen=True)
class TrialSpan:
    """Training from first_s, then whole weeks from start_s up to end_s. notes: what of the record does not count."""

    start_s: int
    end_s: int
    first_s: int = 0
    notes: tuple[str, ...] = ()

    @property
    def weeks(self) -> int:
        return (self.end_s - self.start_s) // WEEK_S


def trial_span(first_s: float, last_s: float, rules: TrialRules) -> TrialSpan:
    """The newest whole weeks of a record, at most half of it, or else the least that can be judged.

    Raises TooShortError.
    """
    days = (last_s - first_s) / DAY_S if last_s > first_s else 0.0
    least = rules.train_days + rules.least_weeks * WEEK_DAYS
    if days < least:
        raise TooShortError(f"the record has {days:.0f} days of the {least} needed", math.ceil(least - days))
    weeks = max(rules.least_weeks, int(days / 2 / WEEK_DAYS))
    return TrialSpan(math.floor(last_s) - weeks * WEEK_S, math.floor(last_s), math.floor(first_s))


MOST_PAUSE_DAYS = 60
"""Longer than a maintenance: what lies beyond is another record, or from a clock that jumped."""


def record_span(times_s: npt.ArrayLike, rules: TrialRules) -> TrialSpan:
    """The trial_span of a record by its times; most of it counts if pauses cut it. Raises TooShortError."""
    at_s = np.asarray(times_s, dtype="float64")
    at_s = np.sort(at_s[np.isfinite(at_s)])
    parts = np.split(at_s, np.flatnonzero(np.diff(at_s) > MOST_PAUSE_DAYS * DAY_S) + 1)
    most = max(parts, key=len)
    if not len(most):
        raise TooShortError("the record is empty")
    stray = len(at_s) - len(most)
    said = f"{stray:,} jobs lie over {MOST_PAUSE_DAYS} days before or after the others, and do not count"
    return replace(trial_span(float(most[0]), float(most[-1]) + 1, rules), notes=(said,) if stray else ())


@dataclass(frozen=True)
class Gain(Interval):
    """Mean gain of almanac over one method, with its 95% interval over weeks; above 0 is better.

    share: of that method's own mean; NaN where that is 0. by_week: one value for each counted week.
    """

    over: str
    share: float
    by_week: tuple[float, ...] = ()


@dataclass(frozen=True)
class WeeklyGains:
    """Gains of almanac by week. measure: with its unit. starts_s: of the weeks that count. lost_weeks: of the others.

    site: the first gain is over what the site has; the others are over baselines and controls.
    """

    measure: str
    starts_s: tuple[int, ...]
    lost_weeks: int
    site: Gain
    controls: tuple[Gain, ...]

    @property
    def best_control(self) -> Gain:
        """The one that almanac beats by least, surely."""
        return min(self.controls, key=lambda each: each.low if not math.isnan(each.low) else -math.inf)


@dataclass(frozen=True)
class Affected:
    """Jobs of one user or size. gain: almanac's mean over the site for each, below 0 if they lose. is_worse: by more
    than the least that counts."""

    name: str
    jobs: int
    gain: float
    is_worse: bool


@dataclass(frozen=True)
class Losers:
    """People or jobs that a subject leaves worse off. share: of them; how_much: of the typical one, in words.

    who: the sentence after the share. by_user, by_size: the worst first, gains in `unit`.
    """

    share: float
    how_much: str = ""
    who: str = "of the users are worse off"
    unit: str = ""
    by_user: tuple[Affected, ...] = ()
    by_size: tuple[Affected, ...] = ()


@dataclass(frozen=True)
class TrialResult:
    """Evidence on one subject. gains: None where nothing could be compared, for the reason `lacking`.

    needed_days: more days of record, None where they would not help. settings: lines to paste if it is switched on.
    """

    subject: str
    gains: WeeklyGains | None = None
    losers: Losers = Losers(0.0)
    lacking: str = ""
    needed_days: int | None = None
    settings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The answer on one subject, and why in one sentence."""

    answer: Answer
    reason: str
    result: TrialResult
    needed_days: int | None = field(default=None)


def gains_by_week(
    measure: str, ours: str, site: str, measured: Mapping[str, Floats], times_s: npt.ArrayLike, span: TrialSpan,
    rules: TrialRules, *, is_cost: bool = False,
) -> WeeklyGains:  # fmt: skip
    """Compare the methods on units inside the span; a unit that lacks a value of one of them is left out.

    measured: value of each unit by method, of equal length with times_s. is_cost: less is better. A week counts with
    units on at least rules.week_days of its days. Raises TooShortError if too few weeks count, and ValueError without a
    control.
    """
    others = [name for name in measured if name not in (ours, site)]
    if not others:
        raise ValueError(f"{measure}: a trial needs a control beside {ours} and {site}")
    values = {name: np.asarray(each, dtype="float64") for name, each in measured.items()}
    at_s = np.asarray(times_s, dtype="float64")
    is_known = np.isfinite(at_s) & np.isfinite(np.array(list(values.values()))).all(axis=0)
    is_known &= (at_s >= span.start_s) & (at_s < span.start_s + span.weeks * WEEK_S)
    days = ((at_s[is_known] - span.start_s) // DAY_S).astype("int64")
    in_week = np.bincount(np.unique(days) // WEEK_DAYS, minlength=span.weeks)
    counted = np.flatnonzero(in_week >= rules.week_days)
    if len(counted) < rules.least_weeks:
        lacking = rules.least_weeks - len(counted)
        said = f"{len(counted)} of the {rules.least_weeks} weeks needed have data on {rules.week_days} days or more"
        raise TooShortError(said, lacking * WEEK_DAYS)
    sizes = np.maximum(np.bincount(days // WEEK_DAYS, minlength=span.weeks), 1)
    means = {
        name: (np.bincount(days // WEEK_DAYS, each[is_known], span.weeks) / sizes)[counted]
        for name, each in values.items()
    }

    def gain(name: str) -> Gain:
        weekly = (means[ours] - means[name]) * (-1 if is_cost else 1)
        return mean_gain(name, weekly, float(means[name].mean()), rules.confidence)

    starts = tuple(int(span.start_s + week * WEEK_S) for week in counted.tolist())
    return WeeklyGains(measure, starts, span.weeks - len(counted), gain(site), tuple(map(gain, others)))


def mean_gain(over: str, weekly: Floats, mean: float, confidence: float) -> Gain:
    """The mean of the weeks, with Student's interval. mean: of the other method. Raises ValueError for NaN.

    Drawing so few weeks again and again (a bootstrap) makes the interval too short: of sites where nothing pays, three
    weeks would switch on one in five. benchmarks/trial.py measures both.
    """
    if not np.isfinite(weekly).all():
        raise ValueError(f"gain over {over}: a week without a value is not zero")
    found = float(weekly.mean())
    share = found / abs(mean) if mean else math.nan
    if len(weekly) < 2:
        return Gain(found, math.nan, math.nan, over, share, tuple(weekly.tolist()))
    deviation = float(weekly.std(ddof=1)) / math.sqrt(len(weekly))
    half = float(student.ppf(0.5 + confidence / 2, len(weekly) - 1)) * deviation
    return Gain(found, found - half, found + half, over, share, tuple(weekly.tolist()))


def judge(result: TrialResult, rules: TrialRules) -> Verdict:
    """The verdict by the rules of the site; nothing is switched on without evidence."""
    gains = result.gains
    if gains is None:
        return Verdict(NO_DATA, result.lacking, result, result.needed_days)
    every = (gains.site, *gains.controls)
    beaten = [each for each in every if not each.low > 0]
    if beaten:
        worst = min(beaten, key=lambda each: each.share if not math.isnan(each.share) else each.mean)
        said = "loses to" if worst.high < 0 else "no gain shown over"
        return Verdict(DO_NOT, f"{said} {', '.join(each.over for each in _sorted(beaten))}", result)
    if not result.losers.share <= rules.worse_users:
        said = f"{result.losers.share:.0%} {result.losers.who}, and the site's limit is {rules.worse_users:.0%}"
        return Verdict(DO_NOT, said, result)
    return Verdict(SWITCH_ON, f"beats {', '.join(each.over for each in every)}", result)


def _sorted(gains: Sequence[Gain]) -> list[Gain]:
    return sorted(gains, key=lambda each: each.mean)


def lacking(subject: str, error: TooShortError) -> TrialResult:
    """Return the result of a subject with too little data: the reason, and the days of data that it needs."""
    return TrialResult(subject, lacking=str(error), needed_days=error.days)


SIZES = ((1, "1 GPU"), (7, "2 to 7 GPUs"), (8, "8 GPUs"), (math.inf, "more than 8 GPUs"))


def size_classes(gpus: npt.ArrayLike) -> npt.NDArray[np.object_]:
    """The name of each job's size; "" if its number of GPUs is not known."""
    counts = np.nan_to_num(np.asarray(gpus, dtype="float64"))
    names = np.array([name for _, name in SIZES], dtype=object)
    return np.where(counts > 0, names[np.searchsorted([most for most, _ in SIZES], counts)], "")


def losers_of(
    gain: Floats, users: npt.ArrayLike, sizes: npt.ArrayLike, unit: str, least: Floats | None = None,
    who: str = Losers.who,
) -> Losers:  # fmt: skip
    """Users who lose on average, and sizes of jobs.

    gain: of each job, in unit; NaN is left out. sizes: names of classes; so is a user or size "". least: a smaller loss
    does not count, for each job; None for any.
    """
    bound = np.zeros(len(gain)) if least is None else least
    by_user, by_size = (_affected(gain, np.asarray(each, dtype=object), bound) for each in (users, sizes))
    lost = [-each.gain for each in by_user if each.is_worse]
    share = len(lost) / len(by_user) if by_user else 0.0
    how_much = amount_text(float(np.median(lost)), unit) if lost else ""
    return Losers(share, how_much, who, unit, by_user, by_size)


def _affected(gain: Floats, names: npt.NDArray[np.object_], bound: Floats) -> tuple[Affected, ...]:
    is_known = np.isfinite(gain) & (names != "")
    found, codes = np.unique(names[is_known].astype(str), return_inverse=True)
    sizes = np.bincount(codes, minlength=len(found))
    means, bounds = (np.bincount(codes, each[is_known], len(found)) / sizes for each in (gain, bound))
    rows = zip(found.tolist(), sizes.tolist(), means.tolist(), (means < -bounds).tolist(), strict=True)
    return tuple(sorted((Affected(*row) for row in rows), key=lambda each: each.gain))


def amount_text(amount: float, unit: str) -> str:
    """An amount of a job: hours as a duration."""
    return format_duration(amount * HOUR_S) if unit == "h" else f"{amount:.2g} {unit}"


def with_users(result: TrialResult, shown: Callable[[str], str]) -> TrialResult:
    """The result with other names of users."""
    renamed = tuple(replace(each, name=shown(each.name)) for each in result.losers.by_user)
    return replace(result, losers=replace(result.losers, by_user=renamed))
