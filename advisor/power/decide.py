"""Decide how many nodes of a node set to keep powered, and which ones to power up and down. Pure.

Every 10 minutes a controller names a target from the minutes before, the same in the back-test and live. Between two
targets, when demand comes near the powered nodes, it names how many to have: Slurm itself powers nodes up for pending
jobs, so that no controller can refuse to.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from advisor.power.forecast import Floats, Steps
from almanac.units import DAY_S

BUDGET_DAYS, MOST_USE = 7, 2.0
"""Nothing powers down while the last 7 days used more than twice their budget."""
LEAST_RATE = 1e-9
"""Stands in for a budget of zero: the first boot uses it up."""


@dataclass(frozen=True)
class Budget:
    """Limits that an operator accepts, each per day: nodes booted, minutes of shortage, and wake-ups.

    boots_per_day: of the whole node set. A wake-up boots one node or more at once; None: any number of wake-ups.
    """

    boots_per_day: float = 40.0
    short_min_per_day: float = 2.0
    wakes_per_day: float | None = None

    def use(self, boots: float, short_min: float, wakes: float) -> float:
        """Largest used share of what a day may cost, from boots, short minutes, and wake-ups per day."""
        found = max(boots / max(self.boots_per_day, LEAST_RATE), short_min / max(self.short_min_per_day, LEAST_RATE))
        return found if self.wakes_per_day is None else max(found, wakes / max(self.wakes_per_day, LEAST_RATE))


@dataclass(frozen=True)
class Spent:
    """The part of its budget that the node set has used. Times in unix seconds, in order.

    wake_times_s: each time that nodes were woken, one a decision. boots: nodes of each wake-up, as many values.
    short_times_s: each minute with more nodes wanted than up.
    """

    wake_times_s: Sequence[int] = ()
    boots: Sequence[int] = ()
    short_times_s: Sequence[int] = ()


def is_overspent(budget: Budget, spent: Spent, now_s: int) -> bool:
    """Return True if the last 7 days used more than twice their budget."""
    begin_s = now_s - BUDGET_DAYS * DAY_S
    wakes = slice(bisect_left(spent.wake_times_s, begin_s), bisect_left(spent.wake_times_s, now_s))
    short = bisect_left(spent.short_times_s, now_s) - bisect_left(spent.short_times_s, begin_s)
    a_day = (each / BUDGET_DAYS for each in (sum(spent.boots[wakes]), short, wakes.stop - wakes.start))
    return budget.use(*a_day) > MOST_USE


class DemandView(NamedTuple):
    """The state that a controller knows at a decision. Nodes throughout; None if missing.

    active: in use in the last complete minute. recent: highest of the last hour. highs: highest of each of the last
    steps of 10 minutes, the newest last, as far back as none is missing. levels: highest forecast of the last steps,
    by their number (HOLDS). expected: forecast mean of the highest demand of each step, by steps ahead. powered: up or
    booting. is_overspent: the budget is used up.
    """

    step: int
    total: int
    powered: int
    active: float | None
    recent: float | None
    highs: tuple[float, ...] = ()
    levels: Mapping[int, float] | None = None
    expected: Mapping[int, float] | None = None
    is_stale: bool = False
    is_overspent: bool = False


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


HOLDS = (6, 9, 12, 18, 24, 36, 54, 81, 120)
"""Steps for which a controller can keep nodes on after a forecast asked for them."""


@dataclass(frozen=True)
class ForecastSettings:
    """Settings of `ForecastController`; `advisor.power.replay` finds those for a budget on the site's own record.

    hold: steps for which nodes stay on after a forecast asked for them, one of HOLDS. margin: idle nodes at which nodes
    are woken ahead of need. extra: nodes woken on top of that, and kept on above the forecast.
    """

    hold: int = 24
    margin: int = 1
    extra: int = 1


@dataclass(frozen=True)
class ForecastController:
    """Keep the highest forecast of the last steps powered, plus idle nodes. Hold without a forecast or a budget."""

    settings: ForecastSettings
    name: str = "almanac"

    @property
    def margin(self) -> int:
        return self.settings.margin

    def target(self, view: DemandView) -> int | None:
        if view.is_stale or view.is_overspent or view.recent is None or view.active is None or view.levels is None:
            return None
        idle = self.margin + self.settings.extra
        level = max(math.ceil(view.levels[self.settings.hold]) + idle, math.ceil(view.active) + self.margin)
        return level if level < view.powered else None  # `raised` powers up

    def raised(self, view: DemandView, active: float) -> int:
        return math.ceil(active) + self.margin + 1 + self.settings.extra


HIGHS_SEEN = 36
"""A longer cool-down is replayed as one of so many steps."""


@dataclass(frozen=True)
class Views:
    """The record as every decision of a span sees it, prepared once for many controllers. first: step of views[0]."""

    first: int
    views: list[DemandView]


def views_of(steps: Steps, moves: Floats, first: int, end: int, expected: Mapping[int, Floats] | None = None) -> Views:
    """Return what the controllers see at each step from `first` up to, but not including, `end`.

    A step sees the record of earlier steps only. moves: (n_steps,) nodes by which the forecast differs from the last
    hour's highest demand; 0 throughout is persistence. expected: forecast demand by steps ahead, nodes, one value a
    step; None if no controller needs it.
    """
    expected = expected or {}
    levels = {hold: highest_of_last(steps.recent + moves, hold)[first:end].tolist() for hold in HOLDS}
    has_forecast = ~np.isnan(steps.recent + moves)
    found = []
    for step in range(first, end):
        highs = steps.highest[max(0, step - HIGHS_SEEN) : step]
        gap = np.flatnonzero(np.isnan(highs))
        is_known = step > 0 and not np.isnan(steps.last[step - 1])
        is_forecast = is_known and bool(has_forecast[step])
        recent = float(steps.recent[step])
        found.append(
            DemandView(
                step=step, total=0, powered=0,
                active=float(steps.last[step - 1]) if is_known else None,
                recent=None if np.isnan(recent) else recent,
                highs=tuple(highs[gap[-1] + 1 if len(gap) else 0 :].tolist()),
                levels={hold: values[step - first] for hold, values in levels.items()} if is_forecast else None,
                expected={size: float(ahead[step]) for size, ahead in expected.items()} if is_forecast else None,
                is_stale=not is_known or bool(steps.is_suspect[step]),
            )
        )  # fmt: skip
    return Views(first, found)


def highest_of_last(values: Floats, window: int) -> Floats:
    """(n,) highest of the last `window` values up to each, of those that are known; NaN without any."""
    found, width = values.copy(), 1
    while width < window:  # doubles the window with each pass
        lag = min(width, window - width)
        found[lag:] = np.fmax(found[lag:], found[:-lag].copy())
        width += lag
    return found


class NodeFlag(enum.IntFlag):
    """State of a node as a set of flags. ASLEEP: powered down or powering down. BOOTING: powering up.

    POWERING_DOWN: not down yet; Slurm drops an order to wake it. EXCLUDED: stays as it is, on or asleep.
    UNKNOWN: Slurm's answer could not be read or understood.
    """

    BUSY = enum.auto()
    RESERVED = enum.auto()
    DRAINED = enum.auto()
    DOWN = enum.auto()
    MAINTENANCE = enum.auto()
    EXCLUDED = enum.auto()
    ASLEEP = enum.auto()
    BOOTING = enum.auto()
    UNKNOWN = enum.auto()
    POWERING_DOWN = enum.auto()


_UNFIT = int(
    NodeFlag.RESERVED | NodeFlag.DRAINED | NodeFlag.DOWN | NodeFlag.MAINTENANCE | NodeFlag.UNKNOWN
    | NodeFlag.POWERING_DOWN
)  # fmt: skip
_NOT_POWERED_DOWN = _UNFIT | int(NodeFlag.BUSY | NodeFlag.EXCLUDED | NodeFlag.ASLEEP | NodeFlag.BOOTING)
_ASLEEP, _BUSY, _BOOTING = int(NodeFlag.ASLEEP), int(NodeFlag.BUSY), int(NodeFlag.BOOTING)


@dataclass(frozen=True, slots=True)
class PowerNode:
    """A node as power decisions see it. Times are unix seconds, None if unknown.

    tier_rank: 0 for the least scarce tier, and for a node whose tier is unknown. last_change_s: last power-up or
    power-down. cycles_today: power-downs of the last 24 hours.
    """

    name: str
    tier_rank: int
    flags: NodeFlag
    idle_since_s: int | None = None
    last_change_s: int | None = None
    cycles_today: int = 0


@dataclass(frozen=True)
class PowerLimits:
    """Limits on powering nodes down.

    warm_minimum: powered nodes, fit for jobs, that are always kept, and idle nodes that power-downs leave. cooldown_s:
    a node stays as it is for so long after a change and after it became idle, seconds. nodes_per_run: most nodes to
    power down at once.
    """

    warm_minimum: int = 1
    cycles_per_day: int = 2
    cooldown_s: int = 1800
    nodes_per_run: int = 20


@dataclass(frozen=True)
class NodePlan:
    """Names in the order to act. short: nodes that the target lacks though every fit one is woken."""

    wake: tuple[str, ...] = ()
    power_down: tuple[str, ...] = ()
    short: int = 0


def select_nodes(nodes: Sequence[PowerNode], target: int | None, limits: PowerLimits, now_s: int) -> NodePlan:
    """Nodes to wake and to power down, so that `target` nodes fit for jobs are powered.

    target: None holds: nothing is powered down, and only the warm minimum is woken. Only nodes that are idle, known for
    how long, and off cool-down are powered down: least scarce tier first, then the longest idle, then by name. The
    scarcest tier is woken first, then the node with the fewest power cycles. Waking heeds no cool-down or cycle cap:
    jobs come first. Raises ValueError if a name occurs twice.
    """
    if len({node.name for node in nodes}) != len(nodes):
        raise ValueError("a node name occurs twice in the node set")
    ready = [node for node in nodes if not int(node.flags) & (_UNFIT | _ASLEEP)]
    gap = max(target or 0, limits.warm_minimum) - len(ready)
    if gap > 0:
        asleep = _wakeable(nodes)
        return NodePlan(tuple(asleep[:gap]), (), max(0, gap - len(asleep)))
    if target is None:
        return NodePlan()
    idle = sum(1 for node in ready if not int(node.flags) & (_BUSY | _BOOTING))
    most = max(0, min(-gap, idle - limits.warm_minimum, limits.nodes_per_run))
    return NodePlan(power_down=tuple(_restable(nodes, limits, now_s)[:most]))


def _wakeable(nodes: Iterable[PowerNode]) -> list[str]:
    """Asleep and nothing else: one that is busy or booting as well is being woken by Slurm already."""
    fit = [node for node in nodes if int(node.flags) == _ASLEEP]
    return [node.name for node in sorted(fit, key=lambda n: (-n.tier_rank, n.cycles_today, n.name))]


def _restable(nodes: Iterable[PowerNode], limits: PowerLimits, now_s: int) -> list[str]:
    fit = [node for node in nodes if may_power_down(node, limits, now_s)]
    return [node.name for node in sorted(fit, key=lambda n: (n.tier_rank, n.idle_since_s, n.name))]


def may_power_down(node: PowerNode, limits: PowerLimits, now_s: int) -> bool:
    """Return True if a node is idle, not spared, off cool-down, and has a power cycle of the day left."""
    if int(node.flags) & _NOT_POWERED_DOWN or node.idle_since_s is None:
        return False
    latest = max(node.idle_since_s, node.last_change_s or node.idle_since_s)
    return node.cycles_today < limits.cycles_per_day and now_s - latest >= limits.cooldown_s
