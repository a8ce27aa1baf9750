"""Replay power controllers and baselines on a node series, minute by minute."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from advisor.power.decide import HIGHS_SEEN, Budget, Controller, DemandView, Spent, Views, is_overspent
from advisor.power.forecast import STEP_MIN
from almanac.actions_config import Power
from telemetry.power.series import MINUTE_S, NodeSeries

DAY_MIN = 1440
UNLIMITED = Budget(math.inf, math.inf)


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
    """Constants that Algorithm 2 leaves open, as in the authors' code for Philly (HeliosArtifact, MIT: CES_Philly.py).

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
        """Return constants with the buffer relative to the size of the set: 20 of 420 nodes, at least one."""
        return cls(buffer=max(1, round(total * 20 / 420)))

    @classmethod
    def as_written(cls, total: int) -> PaperConstants:
        """The periods of the paper's text: the past hour and the next 3 hours, and no second forecast."""
        return cls(history=6, future=18, buffer=max(1, round(total * 20 / 420)), checks_far=False)


class PaperController:
    """CES, Algorithm 2 of the Helios paper: shrink when demand has fallen and is forecast to fall on.

    It remembers its last wake-up, as the authors' code does, and the level that it last shrank to, since a run powers
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
        """Return the level after a shortage, nodes: those in use plus a buffer (JobArrivalCheck of Algorithm 2)."""
        self._stable_until = view.step + self.constants.stable
        self._level = None
        return math.ceil(active) + self.constants.buffer


@dataclass(frozen=True)
class Plant:
    """Limits of a controller. boot_min: minutes until a woken node is up. nodes_per_run: most nodes that a decision
    powers down. cooldown_steps: steps for which nodes stay on after a wake-up, and after they were last in use.
    """

    boot_min: int = 5
    nodes_per_run: int = 20
    cooldown_steps: int = 3

    @classmethod
    def configured(cls, power: Power) -> Plant:
        """The limits of a section [power]; a cool-down counts in whole steps, and at most HIGHS_SEEN of them."""
        steps = -(-power.cooldown_s // (STEP_MIN * MINUTE_S))
        return cls(power.boot_min, power.nodes_per_run, min(steps, HIGHS_SEEN))


@dataclass
class PowerReplay:
    """The actions of a controller. Minutes are of the span; unusable ones are neither scored nor counted.

    powered: (n_minutes,) nodes up or booting. short: (n_minutes,) nodes wanted above those up. wakes: nodes of each
    wake-up.
    """

    powered: NDArray[np.int64]
    short: NDArray[np.int64]
    wakes: list[int] = field(default_factory=list)


def span_of(views: Views) -> slice:
    """The minutes of a series that the views decide over."""
    return slice(views.first * STEP_MIN, (views.first + len(views.views)) * STEP_MIN)


def replay(
    series: NodeSeries, views: Views, controller: Controller, budget: Budget | None = None, plant: Plant | None = None,
    spare: int | None = None,
) -> PowerReplay:  # fmt: skip
    """Run the controller over the span of the views.

    It begins with every node powered, or, with `spare`, with so many above those in use. Each minute sees the demand of
    the one before. Nodes in use are never powered down. Demand above the total is no shortage. While minutes are
    unusable nothing changes. The controller is told when it has used up the budget.
    """
    rows = span_of(views)
    active, total, usable = series.active[rows], series.total[rows], series.is_usable[rows]
    demand = np.where(usable, np.minimum(np.ceil(active), total), -1).astype(np.int64)
    totals = np.where(usable, total, -1).astype(np.int64)
    run = _NodeMinutes(demand.tolist(), totals.tolist(), controller, budget or UNLIMITED, plant or Plant())
    if spare is not None:
        first = next((nodes for nodes in run.demand if nodes >= 0), 0)
        run.up = run.on = min(run.total, first + spare)
    peaks = demand.reshape(-1, STEP_MIN).max(axis=1).tolist()
    whole = np.all(usable.reshape(-1, STEP_MIN), axis=1).tolist()
    for place, view in enumerate(views.views):
        view = run.decide(place * STEP_MIN, view)
        if whole[place] and not run.booting and peaks[place] + controller.margin <= run.up:
            run.powered[place * STEP_MIN : (place + 1) * STEP_MIN] = [run.up] * STEP_MIN
            continue
        for minute in range(place * STEP_MIN, (place + 1) * STEP_MIN):
            run.minute(minute, view)
    return PowerReplay(np.array(run.powered, dtype=np.int64), np.array(run.short, dtype=np.int64), run.wakes)


class _NodeMinutes:
    """Nodes up and booting. demand and totals are -1 where the minute is unusable."""

    def __init__(
        self, demand: list[int], totals: list[int], controller: Controller, budget: Budget, plant: Plant
    ) -> None:
        self.demand, self.totals, self.controller, self.plant = demand, totals, controller, plant
        self.total = self.up = next((total for total in totals if total >= 0), 0)
        self.booting: list[tuple[int, int]] = []  # (minute that they are up, nodes)
        self.on = self.up
        self.powered = [0] * len(demand)
        self.short = [0] * len(demand)
        self.wakes: list[int] = []
        self.wake_times_s: list[int] = []
        self.short_times_s: list[int] = []
        self.budget, self.is_limited = budget, budget != UNLIMITED

    def decide(self, minute: int, view: DemandView) -> DemandView:
        """Power down to the controller's target. Returns the view with what a controller knows of itself."""
        active = view.active
        if view.is_stale or active is None:
            return view
        self._follow_total(minute)
        is_over = self.is_limited and is_overspent(
            self.budget, Spent(self.wake_times_s, self.wakes, self.short_times_s), minute * MINUTE_S
        )
        view = view._replace(total=self.total, powered=self.on, is_overspent=is_over)
        target = self.controller.target(view)
        if target is None:
            return view
        target = min(target, self.total)
        if target > self.on:
            self._wake(minute, target - self.on)
        elif not self.booting and not self._is_cooling(minute):
            cooling = view.highs[max(0, len(view.highs) - self.plant.cooldown_steps) :]
            in_use = max(active, *cooling, 0)
            self.up = self.on = min(self.on, max(target, math.ceil(in_use), self.on - self.plant.nodes_per_run))
        return view

    def _is_cooling(self, minute: int) -> bool:
        """Return True if nodes were woken in one of the last steps."""
        if not self.wake_times_s:
            return False
        return minute // STEP_MIN < self.wake_times_s[-1] // (STEP_MIN * MINUTE_S) + self.plant.cooldown_steps

    def minute(self, minute: int, view: DemandView) -> None:
        if self.booting:
            self._finish_boots(minute)
        before = self.demand[minute - 1] if minute else -1
        if before >= 0:
            self._follow_total(minute)
            on = self.on
            if before + self.controller.margin > on and on < self.total:
                wanted = self.controller.raised(self._filled(view, on), before)
                if min(wanted, self.total) > on:
                    self._wake(minute, min(wanted, self.total) - on)
        self.powered[minute] = self.on
        if self.demand[minute] > self.up:
            self.short[minute] = self.demand[minute] - self.up
            self.short_times_s.append(minute * MINUTE_S)

    def _filled(self, view: DemandView, on: int) -> DemandView:
        return view._replace(total=self.total, powered=on)

    def _wake(self, minute: int, nodes: int) -> None:
        if self.plant.boot_min:
            self.booting.append((minute + self.plant.boot_min, nodes))
        else:
            self.up += nodes
        self.on += nodes
        self.wakes.append(nodes)
        self.wake_times_s.append(minute * MINUTE_S)

    def _finish_boots(self, minute: int) -> None:
        while self.booting and self.booting[0][0] <= minute:
            self.up += self.booting.pop(0)[1]

    def _follow_total(self, minute: int) -> None:
        """Nodes that are added arrive powered; of nodes that are removed, sleeping ones go first."""
        total = self.totals[minute - 1] if minute else self.total
        if total >= 0 and total != self.total:
            booting = self.on - self.up
            self.up = max(0, min(self.up + max(0, total - self.total), total - booting))
            self.on = self.up + booting
            self.total = total
