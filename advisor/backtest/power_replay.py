"""One controller against one node series, minute by minute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from advisor.decisions.power import Controller, DemandView
from advisor.demand.features import HOUR, STEP_MIN, Steps, trailing
from advisor.demand.forecast import DemandForecast, Key
from telemetry.node_series import NodeSeries

Floats = NDArray[np.float64]
HIGHS_SEEN = 7
PATIENCES = (HOUR, 3 * HOUR, 6 * HOUR)


@dataclass(frozen=True)
class Views:
    """What every decision of a span sees of the record, prepared once for many controllers. first: step of views[0]."""

    first: int
    views: list[DemandView]


@dataclass
class Replay:
    """What a controller did. Minutes are of the span; unusable ones are neither scored nor counted.

    powered: (n_minutes,) nodes up or booting. short: (n_minutes,) nodes wanted above those up. wakes: nodes of each
    wake-up.
    """

    powered: NDArray[np.int64]
    short: NDArray[np.int64]
    wakes: list[int] = field(default_factory=list)


def views_of(steps: Steps, forecast: DemandForecast, changes: Mapping[Key, Floats], first: int, end: int) -> Views:
    """Views of steps first .. end-1 with those forecast changes; what a step sees ends before it."""
    keys, sizes = list(changes), list(forecast.expected)
    table = np.column_stack([changes[key] for key in keys])
    ahead = np.column_stack([forecast.expected[size] for size in sizes]) if sizes else np.empty((len(steps), 0))
    peaks = {size: trailing(steps.highest, size, np.max).tolist() for size in PATIENCES}
    found = []
    for step in range(first, end):
        seen = slice(max(0, step - HIGHS_SEEN), step)
        highs = steps.highest[seen]
        gap = np.flatnonzero(np.isnan(highs))
        is_known = step > 0 and not np.isnan(steps.last[step - 1])
        recent = float(steps.recent[step])
        has_forecast = is_known and not np.isnan(table[step]).any()
        found.append(
            DemandView(
                step=step, total=0, powered=0,
                active=float(steps.last[step - 1]) if is_known else None,
                recent=None if np.isnan(recent) else recent,
                highs=tuple(highs[gap[-1] + 1 if len(gap) else 0 :].tolist()),
                peaks={size: values[step] for size, values in peaks.items() if values[step] == values[step]},
                changes=dict(zip(keys, table[step].tolist(), strict=True)) if has_forecast else None,
                expected=dict(zip(sizes, ahead[step].tolist(), strict=True)) if has_forecast else None,
                is_stale=not is_known,
            )
        )  # fmt: skip
    return Views(first, found)


def replay(series: NodeSeries, views: Views, controller: Controller, boot_min: int = 5) -> Replay:
    """Run the controller over the span of the views, beginning with every node powered.

    A node that is woken is up boot_min minutes later. Each minute sees the demand of the one before. Nodes in use are
    never powered down. Demand above the total is no shortage. While minutes are unusable nothing changes.
    """
    begin = views.first * STEP_MIN
    size = len(views.views) * STEP_MIN
    rows = slice(begin, begin + size)
    active, total, usable = series.active[rows], series.total[rows], series.is_usable[rows]
    demand = np.where(usable, np.minimum(np.ceil(active), total), -1).astype(np.int64)
    totals = np.where(usable, total, -1).astype(np.int64)
    run = _Run(demand.tolist(), totals.tolist(), controller, boot_min)
    peaks = demand.reshape(-1, STEP_MIN).max(axis=1).tolist()
    whole = np.all(usable.reshape(-1, STEP_MIN), axis=1).tolist()
    for place, view in enumerate(views.views):
        run.decide(place * STEP_MIN, view)
        if whole[place] and not run.booting and peaks[place] + controller.margin <= run.up:
            run.powered[place * STEP_MIN : (place + 1) * STEP_MIN] = [run.up] * STEP_MIN
            continue
        for minute in range(place * STEP_MIN, (place + 1) * STEP_MIN):
            run.minute(minute, view)
    return Replay(np.array(run.powered, dtype=np.int64), np.array(run.short, dtype=np.int64), run.wakes)


class _Run:
    """Nodes up and booting. demand and totals are -1 where the minute is unusable."""

    def __init__(self, demand: list[int], totals: list[int], controller: Controller, boot_min: int) -> None:
        self.demand, self.totals, self.controller, self.boot_min = demand, totals, controller, boot_min
        self.total = self.up = next((total for total in totals if total >= 0), 0)
        self.booting: list[tuple[int, int]] = []  # (minute that they are up, nodes)
        self.on = self.up
        self.powered = [0] * len(demand)
        self.short = [0] * len(demand)
        self.wakes: list[int] = []

    def decide(self, minute: int, view: DemandView) -> None:
        if view.is_stale or view.active is None:
            return
        self._follow_total(minute)
        on = self.on
        target = self.controller.target(self._filled(view, on))
        if target is None:
            return
        target = min(target, self.total)
        if target > on:
            self._wake(minute, target - on)
        elif not self.booting:
            self.up = self.on = min(on, max(target, int(-(-view.active // 1))))

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
        self.short[minute] = max(0, self.demand[minute] - self.up)

    def _filled(self, view: DemandView, on: int) -> DemandView:
        return view._replace(total=self.total, powered=on)

    def _wake(self, minute: int, nodes: int) -> None:
        if self.boot_min:
            self.booting.append((minute + self.boot_min, nodes))
        else:
            self.up += nodes
        self.on += nodes
        self.wakes.append(nodes)

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
