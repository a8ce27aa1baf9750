"""What a forecast of node demand may look at: the past of a node series, and the calendar.

Time is cut into steps of 10 minutes. A decision at step i sees steps 0 .. i-1, never the minutes of step i itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from telemetry.nodes.series import NodeSeries

Floats = NDArray[np.float64]

STEP_MIN = 10
HOUR, DAY = 6, 144
"""In steps."""
LAGS = (HOUR, 3 * HOUR, 6 * HOUR, DAY)
MAXIMA, MINIMA, DEVIATIONS = (3 * HOUR, 6 * HOUR, 12 * HOUR, DAY), (3 * HOUR, DAY), (3 * HOUR, 12 * HOUR)
NOISE = (3 * HOUR, DAY)
CALM, CALM_KNOWN, LEAST_VOLATILITY = 6 * HOUR, HOUR, 0.5
SUSPECT_FRACTION, SUSPECT_LEAST = 0.1, 20.0
PAST = 2 * DAY + CALM
"""Steps of the past that a forecast can look at."""


@dataclass(frozen=True)
class Steps:
    """A node series by steps of 10 minutes; NaN where a minute of the step is not usable.

    highest, mean, last, total, wanted: (n_steps,) nodes. queued: (n_steps,) node-minutes, None where the series has
    none. recent: highest of the six steps before each step, which is
    what "now" means to a forecast at that step; NaN if one of them is missing. is_suspect: demand of the hour before
    fell to at most 10% of the median of the day before, as in an outage that nobody knows of yet.
    """

    start: np.datetime64
    highest: Floats
    mean: Floats
    last: Floats
    total: Floats
    wanted: Floats
    recent: Floats
    is_suspect: NDArray[np.bool_]
    queued: Floats | None = None

    def __len__(self) -> int:
        return len(self.highest)

    def part(self, begin: int, end: int) -> Steps:
        """Steps begin .. end-1."""
        rows = slice(begin, end)
        return Steps(
            self.start + np.timedelta64(begin * STEP_MIN, "m"), self.highest[rows], self.mean[rows], self.last[rows],
            self.total[rows], self.wanted[rows], self.recent[rows], self.is_suspect[rows],
            None if self.queued is None else self.queued[rows],
        )  # fmt: skip


def steps_of(series: NodeSeries, ahead: int = 0) -> Steps:
    """The series by steps; minutes after the last whole step are left out. ahead: unknown steps (NaN) to append."""
    count = len(series) // STEP_MIN + ahead

    def by_step(values: Floats) -> Floats:
        padded = np.full(count * STEP_MIN, np.nan)
        known = (count - ahead) * STEP_MIN
        padded[:known] = values[:known]
        return padded.reshape(count, STEP_MIN)

    clean = by_step(np.where(series.is_usable, series.active, np.nan))
    highest = clean.max(axis=1)
    return Steps(
        start=series.start, highest=highest, mean=clean.mean(axis=1), last=clean[:, -1],
        total=by_step(series.total)[:, -1], wanted=by_step(series.wanted)[:, -1],
        recent=trailing(highest, HOUR, np.max), is_suspect=_suspect(highest),
        queued=None if series.queued is None else by_step(series.queued)[:, -1],
    )  # fmt: skip


def _suspect(highest: Floats) -> NDArray[np.bool_]:
    typical = trailing(highest, DAY, np.median)
    lowest = trailing(highest, HOUR, np.min)
    return (typical >= SUSPECT_LEAST) & (lowest <= SUSPECT_FRACTION * typical)


def volatility_of(steps: Steps) -> Floats:
    """(n_steps,) nodes by which the highest demand of an hour exceeds its mean, averaged over the last 6 hours.

    At least 0.5. NaN where less than an hour of them is known.
    """
    above = np.maximum(steps.recent - trailing(steps.mean, HOUR, np.mean), LEAST_VOLATILITY)
    padded = np.concatenate([np.full(CALM - 1, np.nan), above])
    windows = sliding_window_view(padded, CALM)
    known = ~np.isnan(windows)
    count = known.sum(axis=1)
    total = np.where(known, windows, 0.0).sum(axis=1)
    return np.where(count >= CALM_KNOWN, total / np.maximum(count, 1), np.nan)


def trailing(values: Floats, window: int, what: object) -> Floats:
    """(n,) statistic of the `window` values before each; NaN where one is missing. `what` is np.max and the like."""
    found = np.full(len(values), np.nan)
    if len(values) > window:
        found[window:] = what(sliding_window_view(values, window)[:-1], axis=1)  # type: ignore[operator]
    return found


def coming(values: Floats, window: int, what: object) -> Floats:
    """(n,) statistic of the `window` values from each on; NaN where one is missing or the record ends."""
    found = np.full(len(values), np.nan)
    if len(values) >= window:
        found[: len(values) - window + 1] = what(sliding_window_view(values, window), axis=1)  # type: ignore[operator]
    return found


def lagged(values: Floats, lag: int) -> Floats:
    """(n,) each the value `lag` steps before."""
    found = np.full(len(values), np.nan)
    if lag < len(values):
        found[lag:] = values[:-lag] if lag else values
    return found


def features_of(steps: Steps, holidays: Collection[np.datetime64] = ()) -> dict[str, Floats]:
    """(n_steps,) by name: levels relative to `recent`, in nodes. Nothing of step i or later enters row i.

    NaN where the past is missing. A series without the queue's node-minutes has no such feature.
    """
    newest = lagged(steps.highest, 1)
    columns: dict[str, Floats] = {"level": steps.recent / lagged(steps.total, 1), "now": newest - steps.recent}
    for lag in LAGS:
        columns[f"change_{lag}"] = newest - lagged(steps.highest, 1 + lag)
    for window in MAXIMA:
        columns[f"max_{window}"] = trailing(steps.highest, window, np.max) - steps.recent
    for window in MINIMA:
        columns[f"min_{window}"] = trailing(steps.highest, window, np.min) - steps.recent
    for window in DEVIATIONS:
        columns[f"std_{window}"] = trailing(steps.mean, window, np.std)
    for window in NOISE:
        columns[f"noise_{window}"] = trailing(steps.highest - steps.mean, window, np.mean)
    columns["mean"] = trailing(steps.mean, CALM, np.mean) - steps.recent
    columns["moves"] = trailing(np.abs(steps.highest - lagged(steps.highest, 1)), CALM, np.mean)
    columns["volatility"] = volatility_of(steps)
    columns["wanted"] = lagged(steps.wanted, 1)
    if steps.queued is not None:
        columns |= _queue(steps.queued)
    return columns | _calendar(steps, holidays)


def _queue(queued: Floats) -> dict[str, Floats]:
    return {"queued_node_h": lagged(queued, 1) / 60}


def seasonal_change(steps: Steps, horizon: int, season: int) -> Floats:
    """(n,) what the highest demand minus `recent` came to one season before. NaN where that is not over yet."""
    if horizon > season:
        return np.full(len(steps), np.nan)
    return lagged(coming(steps.highest, horizon, np.max) - steps.recent, season)


def _calendar(steps: Steps, holidays: Collection[np.datetime64]) -> dict[str, Floats]:
    times = steps.start + (np.arange(len(steps)) * STEP_MIN).astype("timedelta64[m]")
    days = times.astype("datetime64[D]")
    hour = (times - days) / np.timedelta64(1, "h")
    weekday = (days.astype(int) + 3) % 7  # 1970-01-01 was a Thursday; Monday is 0
    free = np.array(sorted(holidays), dtype="datetime64[D]")
    return {
        "hour_sin": np.sin(hour * 2 * np.pi / 24),
        "hour_cos": np.cos(hour * 2 * np.pi / 24),
        "is_free": (np.isin(days, free) | (weekday >= 5)).astype(float),
    }


def load_holidays(country: str) -> frozenset[np.datetime64]:
    """Days of one country in holidays.csv; empty for a country that it does not list."""
    text = (files("advisor.demand") / "holidays.csv").read_text(encoding="utf-8")
    rows = [line.split(",") for line in text.splitlines() if line and not line.startswith("#")][1:]
    return frozenset(np.datetime64(day, "D") for place, day in rows if place == country)
