"""How many nodes of a node set to keep powered: the controllers behind one interface. Pure.

Every 10 minutes a controller names a target from what is known of the minutes before. Between two targets, when demand
comes near the powered nodes, it names how many to have: Slurm itself powers nodes up for pending jobs, so that
no controller can refuse to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class DemandView(NamedTuple):
    """What a controller knows at a decision. Nodes throughout; None where it is missing.

    active: in use in the last complete minute. recent: highest of the last hour. highs: highest of each of the last
    steps of 10 minutes, the newest last, as far back as none is missing. peaks: highest of the last so many steps,
    without those where one is missing. changes: forecast of the highest demand minus `recent`, by (steps ahead,
    quantile). expected: forecast mean of the highest demand of each step, by steps ahead. powered: up or booting.
    """

    step: int
    total: int
    powered: int
    active: float | None
    recent: float | None
    highs: tuple[float, ...] = ()
    peaks: Mapping[int, float] = {}
    changes: Mapping[tuple[int, float], float] | None = None
    expected: Mapping[int, float] | None = None
    is_stale: bool = False


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

    Steps of 10 minutes; thresholds and buffer in nodes. stable: steps after a wake-up without a power-down.
    """

    history: int = 2
    future: int = 30
    past_threshold: float = 0.1
    future_threshold: float = 0.0
    buffer: int = 20
    stable: int = 10

    @classmethod
    def for_total(cls, total: int) -> PaperConstants:
        """The same buffer relative to the size of the set: 20 of 420 nodes, at least one."""
        return cls(buffer=max(1, round(total * 20 / 420)))


class PaperController:
    """CES, Algorithm 2 of the Helios paper: shrink when demand has fallen and is forecast to fall on.

    It remembers when it last woke nodes, as the authors' code does, so one instance serves one replay.
    """

    def __init__(self, constants: PaperConstants, name: str = "CES (paper)") -> None:
        self.constants, self.name, self.margin = constants, name, 0
        self._stable_until = -1

    def target(self, view: DemandView) -> int | None:
        """PeriodicCheck. The second forecast, over twice the time, must not be above the first (authors' code)."""
        c = self.constants
        if view.is_stale or view.active is None or view.expected is None or len(view.highs) <= c.history:
            return None
        now = view.highs[-1]
        past_trend = sum(view.highs[-1 - c.history : -1]) / c.history - now
        near, far = view.expected[c.future], view.expected[2 * c.future]
        is_falling = past_trend >= c.past_threshold and now - near >= c.future_threshold and near >= far
        if not is_falling or view.step < self._stable_until:
            return None
        level = math.ceil(now) + c.buffer
        return level if level < view.powered else None

    def raised(self, view: DemandView, active: float) -> int:
        """JobArrivalCheck: the gap plus a buffer."""
        self._stable_until = view.step + self.constants.stable
        return math.ceil(active) + self.constants.buffer


@dataclass(frozen=True)
class Settings:
    """Of `ForecastController`; `advisor.backtest.power` finds them for a budget on the site's own record.

    horizon (steps), quantile: forecast that power-downs go by; buffer: nodes on top of it. patience: steps of the past
    whose demand stays covered, since a sudden fall often comes back. margin: idle nodes at which to power up ahead of
    need; wake_horizon, wake_quantile: forecast that says up to where.
    """

    horizon: int
    quantile: float
    buffer: int
    patience: int = 6
    margin: int = 0
    wake_horizon: int = 36
    wake_quantile: float = 0.95


@dataclass(frozen=True)
class ForecastController:
    """Keep the forecast highest demand of the next hours powered; hold without a forecast."""

    settings: Settings
    name: str = "almanac"

    @property
    def margin(self) -> int:
        return self.settings.margin

    def target(self, view: DemandView) -> int | None:
        s = self.settings
        if view.is_stale or view.recent is None or view.active is None or view.changes is None:
            return None
        peak = view.peaks.get(s.patience)
        if peak is None:
            return None
        level = max(view.recent + view.changes[s.horizon, s.quantile], peak)
        level = max(math.ceil(level) + s.buffer, math.ceil(view.active) + s.margin + 1)
        return level if level < view.powered else None  # `raised` powers up

    def raised(self, view: DemandView, active: float) -> int:
        s = self.settings
        least = math.ceil(active) + s.margin + max(1, s.buffer)
        if view.changes is None or view.recent is None or view.is_stale:
            return max(least, view.powered + 1)
        recent = max(view.recent, active)
        return max(least, math.ceil(recent + view.changes[s.wake_horizon, s.wake_quantile]) + s.buffer)
