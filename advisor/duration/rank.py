"""The order of the queue: GPUs x a time^exponent, the rule that replays of the site's newest jobs choose.

Training replays them with backfill (simulator.rank_choice) in several orders, "no order" included. Ranks of all
trainings have one scale: a rule is kept for weeks, and no constant of it depends on the jobs of one training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from advisor.backtest import Floats
from advisor.duration.blend import clip_to_limit
from advisor.duration.features import Features, Rows
from almanac.units import format_count, format_duration

RankBy = Literal["none", "gpus", "limit", "mean", "quantile"]
MIDDLE_S = 3600.0
"""A job of one GPU with this time keeps its GPU-time in every rule: so all trainings have one scale."""
UNRANKED_S = 1e9
"""GPU-time of every job if no order pays: above the greatest that counts, so that the site factor is 0."""


@dataclass(frozen=True)
class RankRule:
    """The GPU-times by which jobs are ranked: GPUs x time^exponent, in GPU-seconds.

    by: the time that counts. gpus: none; limit: the time limit; mean: the expected run time; quantile: the upper end of
    its interval. stretch: exponent of the whole: age counts for less, the greater it is. A job with e times the
    GPUs x time^exponent waits stretch x tau longer.
    """

    by: RankBy = "mean"
    exponent: float = 0.5
    stretch: float = 1.0

    def ranked(self, gpu_count: Floats | float, run_s: Floats | float) -> Floats:
        """Return GPU-seconds. gpu_count: above 0. run_s: the times that count."""
        gpus, ratio = np.asarray(gpu_count, dtype="float64"), np.asarray(run_s, dtype="float64") / MIDDLE_S
        if self.by == "none":
            return np.full(np.broadcast(gpus, ratio).shape, UNRANKED_S)
        ranked: Floats = MIDDLE_S * (gpus * ratio ** (0.0 if self.by == "gpus" else self.exponent)) ** self.stretch
        return ranked

    def __str__(self) -> str:
        power = "" if self.exponent == 1 else f"^{self.exponent:g}"
        times = {"limit": "time limit", "mean": f"expected time{power}", "quantile": f"upper end of the time{power}"}
        named = {"none": "no order", "gpus": "GPU count", **{by: f"GPUs x {time}" for by, time in times.items()}}
        return named[self.by]


def mean_rule(exponent: float) -> RankRule:
    """GPUs x expected time^exponent, stretched so that it spreads about as widely as GPU-time."""
    return RankRule("mean", exponent, 1.0 / max(exponent, 0.25))


NO_RANK, DEFAULT_RANK = RankRule("none"), mean_rule(0.5)
"""The second is used until a replay has chosen another."""


class RankOutcome(NamedTuple):
    """A replay of an order, as multiples of first in, first out with the same backfill.

    jct, longest: mean time from submission to end, and the longest wait. worse_users: share of the users whose mean
    time grew by more than 5%; median_loss_s: of these users, None without one.
    """

    jct: float
    longest: float
    worse_users: float
    median_loss_s: float | None


@dataclass(frozen=True)
class RankChoice:
    """The order chosen at chosen_s on `jobs` of the newest jobs. outcomes: by order, of the stretch that suits it."""

    rule: RankRule
    chosen_s: int
    jobs: int = 0
    nodes: tuple[int, ...] = ()
    outcomes: tuple[tuple[RankRule, RankOutcome], ...] = ()

    @property
    def outcome(self) -> RankOutcome | None:
        return next((outcome for rule, outcome in self.outcomes if rule == self.rule), None)


def rank_words(choice: RankChoice | None) -> str:
    """The order, and what a replay of it gave, for people."""
    if choice is None:
        return f"{DEFAULT_RANK}, until there are enough jobs to replay"
    if not choice.outcomes:
        return "none pays: jobs hardly wait"
    said = f"replayed {format_count(choice.jobs)} jobs on about {choice.nodes[len(choice.nodes) // 2]} nodes"
    if (found := choice.outcome) is None:
        rule, best = min(choice.outcomes, key=lambda each: each[1].jct)
        return f"none pays ({said}: the best, {rule}, has {best.jct:.2f} of the mean time of first in, first out)"
    loss = f", median loss {format_duration(found.median_loss_s)}" if found.median_loss_s is not None else ""
    times = f"mean time {found.jct:.2f} and longest wait {found.longest:.1f} of first in, first out"
    return f"{choice.rule} ({said}: {times}; {found.worse_users:.0%} of the users worse off{loss})"


class ReplayedJobs(NamedTuple):
    """Jobs that ended, with the times that were known before they ran. Arrays of equal length; seconds.

    limit_s, high_s: NaN if not known.
    """

    submit_s: Floats
    gpu_count: Floats
    run_s: Floats
    wait_s: Floats
    limit_s: Floats
    mean_s: Floats
    high_s: Floats
    user: npt.NDArray[np.str_]

    def select(self, rows: Rows) -> ReplayedJobs:
        return self._replace(**{name: getattr(self, name)[rows] for name in self._fields})

    def time_s(self, by: RankBy) -> Floats:
        """The times that count for a rule."""
        return counted_time_s(by, self.limit_s, self.mean_s, self.high_s)


ChooseRank = Callable[[ReplayedJobs], RankChoice | None]


def counted_time_s(by: RankBy, limit_s: Floats, mean_s: Floats, high_s: Floats) -> Floats:
    """The times that count for a rule; the mean where they are not known."""
    times_s = {"limit": limit_s, "quantile": high_s}.get(by, mean_s)
    return np.where(np.isfinite(times_s), times_s, mean_s)


SPREAD_COLUMNS, NEW_SPREAD, MOST_SPREAD = ("shape_spread", "user_spread"), 1.0, 2.0
"""Standard deviations of the logarithms of a user's run times; that of a new user, about the median of three records
(0.7 to 1.6); greater ones than the last are those of few runs."""


def expected_s(features: Features, rank_s: Floats) -> Floats:
    """The expected run times, seconds: the mean of log-normal times with the geometric mean rank_s.

    The ranking value is a mean of logarithms. It ranks too early what is now short and now long.
    """
    spread = np.clip(np.nan_to_num(features.first_known(*SPREAD_COLUMNS), nan=NEW_SPREAD), 0.0, MOST_SPREAD)
    return clip_to_limit(rank_s * np.exp(spread**2 / 2), features)


def queue_s(by: RankBy, features: Features, rank_s: Floats, high_s: Floats, is_modeled: bool = True) -> Floats:
    """The times that count in the queue, seconds. rank_s, high_s: ranking values, and the upper ends of intervals.

    is_modeled: False for rolling estimates, which are means already.
    """
    mean_s = expected_s(features, rank_s) if is_modeled else rank_s
    return counted_time_s(by, np.exp(features.number("log_time_limit")), mean_s, high_s)
