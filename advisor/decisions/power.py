"""How many nodes of a node set to keep powered: the controllers behind one interface. Pure.

Every 10 minutes a controller names a target from what is known of the minutes before. Between two targets, when demand
comes near the powered nodes, it names how many to have: Slurm itself powers nodes up for pending jobs, so that
no controller can refuse to.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from almanac.units import DAY_S

CREDIT_DAYS, RESERVE_DAYS = 20, 1.0
LEAST_RATE = 1e-9
"""Stands in for a budget of zero: the first wake-up takes all credit."""


@dataclass(frozen=True)
class Budget:
    """What an operator accepts: wake-ups (times, not nodes) and minutes of shortage, each per day."""

    wakes_per_day: float = 1.0
    short_min_per_day: float = 2.0


@dataclass(frozen=True)
class Spent:
    """What the node set has used of its budget. Times in unix seconds, in order.

    since_s: what lies before is not known. wake_times_s: each time that nodes were woken, one a decision, not a node.
    short_times_s: each minute with more nodes wanted than up. unknown_s: seconds since then without a record.
    """

    since_s: int = 0
    wake_times_s: Sequence[int] = ()
    short_times_s: Sequence[int] = ()
    unknown_s: int = 0


def credit_of(budget: Budget, spent: Spent, now_s: int) -> float:
    """Days' worth of the budget in hand: the days of the record, at most 20, less those paid for, less one in reserve.

    Wake-ups and short minutes are each divided by what a day may cost; the larger of the two counts.
    """
    begin_s = max(spent.since_s, now_s - CREDIT_DAYS * DAY_S)
    wakes, short = (
        bisect_left(times_s, now_s) - bisect_left(times_s, begin_s)
        for times_s in (spent.wake_times_s, spent.short_times_s)
    )
    paid = max(wakes / max(budget.wakes_per_day, LEAST_RATE), short / max(budget.short_min_per_day, LEAST_RATE))
    return max(0, now_s - begin_s - spent.unknown_s) / DAY_S - paid - RESERVE_DAYS


class DemandView(NamedTuple):
    """What a controller knows at a decision. Nodes throughout; None where it is missing.

    active: in use in the last complete minute. recent: highest of the last hour. highs: highest of each of the last
    steps of 10 minutes, the newest last, as far back as none is missing. levels: highest demand ahead, the largest of
    the forecasts of the last hour, by (steps ahead, quantile). soon: demand that will likely be reached soon.
    expected: forecast mean of the highest demand of each step, by steps ahead. powered: up or booting.
    credit: days' worth of the budget in hand, see `credit_of`.
    """

    step: int
    total: int
    powered: int
    active: float | None
    recent: float | None
    highs: tuple[float, ...] = ()
    levels: Mapping[tuple[int, float], float] | None = None
    soon: float | None = None
    expected: Mapping[int, float] | None = None
    is_stale: bool = False
    credit: float = 0.0


class Controller(Protocol):
    """One way to decide. Targets above the total mean all nodes."""

    @property
    def name(self) -> str: ...

    @property
    def margin(self) -> int:
        """Idle powered nodes at which `raised` is asked: 0 asks when demand exceeds the powered nodes."""
        ...

    def target(self, view: DemandView) -> int | None:
        """Nodes to keep powered. None holds: nothing is powered down."""
        ...

    def raised(self, view: DemandView, active: float) -> int:
        """Nodes to have powered, now that `active` is within the margin of the powered nodes."""
        ...


@dataclass(frozen=True)
class Vanilla:
    """Everything stays on."""

    name: str = "vanilla"
    margin: int = 0

    def target(self, view: DemandView) -> int | None:
        return view.total

    def raised(self, view: DemandView, active: float) -> int:
        return view.total


@dataclass(frozen=True)
class KeepWarm:
    """Slurm's way: a fixed number of nodes above those in use."""

    warm: int
    name: str = "keep warm"
    margin: int = 0

    def target(self, view: DemandView) -> int | None:
        if view.active is None or view.is_stale:
            return None
        return math.ceil(view.active) + self.warm

    def raised(self, view: DemandView, active: float) -> int:
        return math.ceil(active) + self.warm


@dataclass(frozen=True)
class PaperConstants:
    """What Algorithm 2 leaves open, as in the authors' code for Philly (HeliosArtifact, MIT: CES_Philly.py).

    Steps of 10 minutes; thresholds and buffer in nodes. stable: steps after a wake-up without a power-down. checks_far:
    the forecast over twice the time must not be above that over `future`.
    """

    history: int = 2
    future: int = 30
    past_threshold: float = 0.1
    future_threshold: float = 0.0
    buffer: int = 20
    stable: int = 10
    checks_far: bool = True

    @classmethod
    def for_total(cls, total: int) -> PaperConstants:
        """The same buffer relative to the size of the set: 20 of 420 nodes, at least one."""
        return cls(buffer=max(1, round(total * 20 / 420)))

    @classmethod
    def as_written(cls, total: int) -> PaperConstants:
        """The periods of the paper's text: the past hour and the next 3 hours, and no second forecast."""
        return cls(history=6, future=18, buffer=max(1, round(total * 20 / 420)), checks_far=False)


class PaperController:
    """CES, Algorithm 2 of the Helios paper: shrink when demand has fallen and is forecast to fall on.

    It remembers when it last woke nodes, as the authors' code does, and where it last shrank to, since a run powers
    down only so many nodes. So one instance serves one replay.
    """

    def __init__(self, constants: PaperConstants, name: str = "CES (paper)") -> None:
        self.constants, self.name, self.margin = constants, name, 0
        self._stable_until = -1
        self._level: int | None = None

    def target(self, view: DemandView) -> int | None:
        """PeriodicCheck."""
        c = self.constants
        if view.is_stale or view.active is None or view.expected is None or len(view.highs) <= c.history:
            return None
        now = view.highs[-1]
        past_trend = sum(view.highs[-1 - c.history : -1]) / c.history - now
        near = view.expected[c.future]
        is_falling = past_trend >= c.past_threshold and now - near >= c.future_threshold
        is_falling = is_falling and (not c.checks_far or near >= view.expected[2 * c.future])
        if is_falling and view.step >= self._stable_until:
            self._level = math.ceil(now) + c.buffer
        return self._level if self._level is not None and self._level < view.powered else None

    def raised(self, view: DemandView, active: float) -> int:
        """JobArrivalCheck: the gap plus a buffer."""
        self._stable_until = view.step + self.constants.stable
        self._level = None
        return math.ceil(active) + self.constants.buffer


TAILS = (0.005, 0.7)
"""Bounds of the accepted probability of a wake-up within the horizon."""
BOLDER, CAREFUL = 2.0, 4.0
LEAST_CREDIT = -2.0
"""With less in hand, nodes wake only when they are needed."""


@dataclass(frozen=True)
class Settings:
    """Of `ForecastController`; `advisor.evaluation.power_tune` finds the tail for a budget on the site's own record.

    tail: accepted probability that demand exceeds the level within the forecast's horizon, without credit or debt.
    margin: idle nodes at which nodes are woken ahead of need. extra: nodes woken on top of the level.
    """

    tail: float
    margin: int = 1
    extra: int = 1


@dataclass(frozen=True)
class ForecastController:
    """Keep the forecast highest demand of the next hours powered, and wake for likely demand; hold without a forecast.

    The accepted tail doubles with each day of budget in hand, and falls to a quarter with each day overspent.
    """

    settings: Settings
    name: str = "almanac"

    @property
    def margin(self) -> int:
        return self.settings.margin

    def tail(self, credit: float) -> float:
        credit = max(-8.0, min(credit, 8.0))
        factor = math.pow(BOLDER if credit > 0 else CAREFUL, credit)
        return min(max(self.settings.tail * factor, TAILS[0]), TAILS[1])

    def target(self, view: DemandView) -> int | None:
        if view.is_stale or view.recent is None or view.active is None or view.levels is None:
            return None
        if view.soon is not None and view.credit > LEAST_CREDIT:
            early = math.ceil(view.soon) + self.margin
            if early > view.powered:
                return max(early, self.raised(view, view.active))
        level = max(self.level(view), math.ceil(view.active) + self.margin)
        return level if level < view.powered else None  # `raised` powers up

    def raised(self, view: DemandView, active: float) -> int:
        least = math.ceil(active) + self.margin + 1 + self.settings.extra
        if view.levels is None or view.is_stale:
            return max(least, view.powered + 1)
        return max(least, self.level(view) + self.settings.extra)

    def level(self, view: DemandView) -> int:
        """Nodes to keep for the forecast. Raises ValueError without one."""
        if view.levels is None:
            raise ValueError("no forecast")
        return math.ceil(level_at(view.levels, self.tail(view.credit))) + self.margin


def level_at(levels: Mapping[tuple[int, float], float], tail: float) -> float:
    """Level that is exceeded with probability `tail`: linear in log(tail) between the quantiles, and beyond them.

    levels: of one horizon, with at least two quantiles, in rising order.
    """
    known = [(quantile, level) for (_, quantile), level in levels.items()]
    place = 1
    while place < len(known) - 1 and 1 - known[place][0] > tail:
        place += 1
    (low, below), (high, above) = known[place - 1], known[place]
    share = math.log((1 - low) / tail) / math.log((1 - low) / (1 - high))
    return below + share * (above - below)
