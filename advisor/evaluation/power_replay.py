"""One controller against one node series, minute by minute."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from advisor.decisions.power import CREDIT_DAYS, Budget, Controller, DemandView, Spent, credit_of
from advisor.decisions.power_views import HIGHS_SEEN, Views
from advisor.demand.features import STEP_MIN
from almanac.actions_config import Power
from almanac.units import DAY_S
from telemetry.nodes.series import NodeSeries

Floats = NDArray[np.float64]


MINUTE_S = 60


@dataclass(frozen=True)
class Plant:
    """What limits a controller. boot_min: minutes until a woken node is up. nodes_per_run: most nodes that a decision
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
    """What a controller did. Minutes are of the span; unusable ones are neither scored nor counted.

    powered: (n_minutes,) nodes up or booting. short: (n_minutes,) nodes wanted above those up. wakes: nodes of each
    wake-up. spent: when, in seconds of the span.
    """

    powered: NDArray[np.int64]
    short: NDArray[np.int64]
    wakes: list[int] = field(default_factory=list)
    spent: Spent = field(default_factory=Spent)


def span_of(views: Views) -> slice:
    """The minutes of a series that the views decide over."""
    return slice(views.first * STEP_MIN, (views.first + len(views.views)) * STEP_MIN)


def replay(
    series: NodeSeries, views: Views, controller: Controller, budget: Budget | None = None, plant: Plant | None = None
) -> PowerReplay:
    """Run the controller over the span of the views, beginning with every node powered.

    Each minute sees the demand of the one before. Nodes in use are never powered down. Demand above the total is no
    shortage. While minutes are unusable nothing changes. The controller is told what it has in hand of the budget.
    """
    rows = span_of(views)
    active, total, usable = series.active[rows], series.total[rows], series.is_usable[rows]
    demand = np.where(usable, np.minimum(np.ceil(active), total), -1).astype(np.int64)
    totals = np.where(usable, total, -1).astype(np.int64)
    run = _NodeMinutes(demand.tolist(), totals.tolist(), controller, budget or Budget(), plant or Plant())
    peaks = demand.reshape(-1, STEP_MIN).max(axis=1).tolist()
    whole = np.all(usable.reshape(-1, STEP_MIN), axis=1).tolist()
    for place, view in enumerate(views.views):
        view = run.decide(place * STEP_MIN, view)
        if whole[place] and not run.booting and peaks[place] + controller.margin <= run.up:
            run.powered[place * STEP_MIN : (place + 1) * STEP_MIN] = [run.up] * STEP_MIN
            continue
        for minute in range(place * STEP_MIN, (place + 1) * STEP_MIN):
            run.minute(minute, view)
    return PowerReplay(
        np.array(run.powered, dtype=np.int64), np.array(run.short, dtype=np.int64), run.wakes, run.spent(len(demand))
    )


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
        self.unknown_s = list(itertools.accumulate((MINUTE_S * (total < 0) for total in totals), initial=0))
        self.budget = budget

    def decide(self, minute: int, view: DemandView) -> DemandView:
        """Power down to the controller's target. Returns the view with what a controller knows of itself."""
        view = view._replace(credit=credit_of(self.budget, self.spent(minute), minute * MINUTE_S))
        active = view.active
        if view.is_stale or active is None:
            return view
        self._follow_total(minute)
        view = self._filled(view, self.on)
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

    def spent(self, minute: int) -> Spent:
        unknown_s = self.unknown_s[minute] - self.unknown_s[max(0, minute - CREDIT_DAYS * DAY_S // MINUTE_S)]
        return Spent(0, self.wake_times_s, self.short_times_s, unknown_s)

    def _is_cooling(self, minute: int) -> bool:
        """Whether nodes were woken in one of the last steps."""
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
