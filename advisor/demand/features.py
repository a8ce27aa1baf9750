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

from telemetry.node_series import NodeSeries

Floats = NDArray[np.float64]

STEP_MIN = 10
HOUR, DAY, WEEK = 6, 144, 1008
"""In steps."""
LAGS = (2, 3, 6, 12, 18, 36, 72, 144)
WINDOWS = (3, HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, DAY, 3 * DAY)
SEASONS = (DAY, WEEK)


@dataclass(frozen=True)
class Steps:
    """A node series by steps of 10 minutes; NaN where a minute of the step is not usable.

    highest, mean, last, total, wanted: (n_steps,) nodes. recent: highest of the six steps before each step, which is
    what "now" means to a forecast at that step; NaN if one of them is missing.
    """

    start: np.datetime64
    highest: Floats
    mean: Floats
    last: Floats
    total: Floats
    wanted: Floats
    recent: Floats

    def __len__(self) -> int:
        return len(self.highest)


def steps_of(series: NodeSeries) -> Steps:
    """The series by steps; minutes after the last whole step are left out."""
    count = len(series) // STEP_MIN
    size = count * STEP_MIN
    clean = np.where(series.is_usable, series.active, np.nan)[:size].reshape(count, STEP_MIN)
    wanted = series.wanted[:size].reshape(count, STEP_MIN)
    highest = clean.max(axis=1)
    return Steps(
        start=series.start, highest=highest, mean=clean.mean(axis=1), last=clean[:, -1],
        total=series.total[:size].reshape(count, STEP_MIN)[:, -1], wanted=wanted[:, -1],
        recent=trailing(highest, HOUR, np.max),
    )  # fmt: skip


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


def features_of(steps: Steps, horizon: int, holidays: Collection[np.datetime64] = ()) -> tuple[list[str], Floats]:
    """Names, and (n_steps, n_features): levels relative to `recent`, in nodes. Nothing of step i or later enters row i.

    horizon: steps ahead that the forecast is for, which the seasonal features look at. NaN where the past is missing.
    """
    newest = lagged(steps.highest, 1)
    columns: dict[str, Floats] = {"level": steps.recent / lagged(steps.total, 1), "now": newest - steps.recent}
    for lag in LAGS:
        columns[f"change_{lag}"] = newest - lagged(steps.highest, 1 + lag)
    for window in WINDOWS:
        columns[f"mean_{window}"] = trailing(steps.mean, window, np.mean) - steps.recent
        columns[f"std_{window}"] = trailing(steps.mean, window, np.std)
        columns[f"max_{window}"] = trailing(steps.highest, window, np.max) - steps.recent
        columns[f"min_{window}"] = trailing(steps.highest, window, np.min) - steps.recent
    for season in SEASONS:
        columns[f"season_{season}"] = seasonal_change(steps, horizon, season)
    if not np.all(np.isnan(steps.wanted)):
        columns["wanted"] = lagged(steps.wanted, 1)
    columns |= _calendar(steps, holidays)
    return list(columns), np.column_stack(list(columns.values()))


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
        "weekday": weekday.astype(float),
        "is_free": (np.isin(days, free) | (weekday >= 5)).astype(float),
        "is_free_tomorrow": (np.isin(days + 1, free) | ((weekday + 1) % 7 >= 5)).astype(float),
    }


def load_holidays(country: str) -> frozenset[np.datetime64]:
    """Days of one country in holidays.csv; empty for a country that it does not list."""
    text = (files("advisor.demand") / "holidays.csv").read_text(encoding="utf-8")
    rows = [line.split(",") for line in text.splitlines() if line and not line.startswith("#")][1:]
    return frozenset(np.datetime64(day, "D") for place, day in rows if place == country)
