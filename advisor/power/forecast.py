"""Features of a node series, and forecasts of the highest demand over the next hours.

Time is cut into steps of 10 minutes. A decision at step i sees steps 0 .. i-1, never the minutes of step i itself.

A forecast is a quantile of the change from the highest demand of the last hour to the highest of the next HORIZON
steps. Three kinds make it: persistence (the quantile of all past changes), hour of day (the quantile of the past
changes around the same hour), and model (LightGBM, several seeds averaged). The model's target is the change in units
of the volatility of the last hours, and its forecast is averaged with the same quantile of all past targets, since a
month of one cluster is little to learn from. `advisor.power.choice` finds the kind that pays on a site's own record.
Each forecast is made by what lies strictly before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from advisor.version_folders import booster
from telemetry.power.series import NodeSeries

Floats = NDArray[np.float64]

STEP_MIN = 10
HOUR, DAY = 6, 144
"""Lengths of an hour and of a day, in steps."""
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

    highest, mean, last, total, wanted: (n_steps,) nodes. queued: (n_steps,) node-minutes; None if the series lacks it.
    recent: highest of the six steps before each step, the "now" of a forecast at that step; NaN if one of them is
    missing. is_suspect: demand of the hour before fell to at most 10% of the median of the day before, as in an outage.
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
        cut = {name: values[begin:end] for name, values in vars(self).items() if isinstance(values, np.ndarray)}
        return dataclasses.replace(self, start=self.start + np.timedelta64(begin * STEP_MIN, "m"), **cut)


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
    typical, lowest = trailing(highest, DAY, np.median), trailing(highest, HOUR, np.min)
    return Steps(
        start=series.start, highest=highest, mean=clean.mean(axis=1), last=clean[:, -1],
        total=by_step(series.total)[:, -1], wanted=by_step(series.wanted)[:, -1],
        recent=trailing(highest, HOUR, np.max),
        is_suspect=(typical >= SUSPECT_LEAST) & (lowest <= SUSPECT_FRACTION * typical),
        queued=None if series.queued is None else by_step(series.queued)[:, -1],
    )  # fmt: skip


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
    """(n_steps,) inputs by name: levels relative to `recent`, in nodes. Nothing of step i or later enters row i.

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
        columns["queued_node_h"] = lagged(steps.queued, 1) / 60
    return columns | _calendar(steps, holidays)


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
    text = (files("advisor.power") / "holidays.csv").read_text(encoding="utf-8")
    rows = [line.split(",") for line in text.splitlines() if line and not line.startswith("#")][1:]
    return frozenset(np.datetime64(day, "D") for place, day in rows if place == country)


HORIZON, QUANTILE = 3 * HOUR, 0.6
"""Forecast: the highest demand of so many steps, which 60% of the times stay at or below."""
ROUNDS, SEEDS = 80, 3
SHRINKAGE = 0.25
"""Weight of the quantile of all past targets; LightGBM has the rest."""
LEAST_ROWS = 3 * DAY
"""Fewer training rows than three days of decisions: no forecast."""
RECENT_STEPS = 30 * DAY
"""The hour of day is learned from the last 30 days: habits change."""
AROUND_H, LEAST_AROUND = 1, HOUR
"""Hours before and after an hour that count for it, and the fewest past changes of an hour with its own quantile."""
PERSISTENCE, HOURLY, MODEL, SHUFFLED = "persistence", "hour of day", "model", "shuffled"
KINDS = (PERSISTENCE, HOURLY, MODEL)

_PARAMETERS: Mapping[str, Any] = {
    "learning_rate": 0.06, "num_leaves": 7, "min_data_in_leaf": 72, "feature_fraction": 0.5, "bagging_fraction": 0.7,
    "bagging_freq": 1, "lambda_l2": 5.0, "max_bin": 63, "deterministic": True, "force_row_wise": True,
    "num_threads": 1, "verbosity": -1,
}  # fmt: skip


@dataclass(frozen=True)
class Forecaster:
    """One kind of forecast, fitted. Pure data.

    usual: quantile of all past changes, nodes. by_hour: that around each hour of the day (UTC), nodes; empty for the
    other kinds. texts: LightGBM models of the change in units of volatility, one a seed; scaled: the quantile of that.
    """

    kind: str
    usual: float
    by_hour: tuple[float, ...] = ()
    texts: tuple[str, ...] = ()
    scaled: float = 0.0
    holidays: frozenset[np.datetime64] = frozenset()

    def changes(self, steps: Steps) -> Floats:
        """(n_steps,) forecast changes, nodes; NaN where the past is missing."""
        found = np.full(len(steps), self.usual)
        if self.kind == HOURLY:
            found = np.array(self.by_hour)[hours_of(steps)]
        if self.kind == MODEL:
            inputs = features_of(steps, self.holidays)
            mean = np.mean([_predicted(text, inputs, len(steps)) for text in self.texts], axis=0)
            found = ((1 - SHRINKAGE) * mean + SHRINKAGE * self.scaled) * volatility_of(steps)
        return np.asarray(np.where(np.isnan(steps.recent), np.nan, found), dtype=np.float64)


def hours_of(steps: Steps) -> NDArray[np.int64]:
    """(n_steps,) hour of the day at the begin of each step, UTC."""
    minute = int((steps.start - steps.start.astype("datetime64[D]")) / np.timedelta64(1, "m"))
    return (minute + np.arange(len(steps)) * STEP_MIN) // 60 % 24


def changes_of(steps: Steps) -> Floats:
    """(n_steps,) nodes by which the highest demand of the next HORIZON steps exceeds that of the last hour."""
    return coming(steps.highest, HORIZON, np.max) - steps.recent


def pinball(actual: Floats, forecast: Floats, quantile: float = QUANTILE) -> float:
    """Mean pinball (quantile) loss over rows where both are known; NaN if there is none."""
    error = actual - forecast
    known = error[~np.isnan(error)]
    return float(np.mean(np.maximum(quantile * known, (quantile - 1) * known))) if len(known) else float("nan")


def fit_forecaster(
    steps: Steps, train_end: int, seed: int, kind: str, holidays: Collection[np.datetime64] = ()
) -> Forecaster:
    """Train one kind on steps before train_end.

    A training row counts only if its whole target lies before train_end. Raises ValueError if fewer than three days
    of training rows are complete.
    """
    target = changes_of(steps)
    is_train = _training_rows(target, train_end - HORIZON)
    usual = float(np.quantile(target[is_train], QUANTILE))
    if kind == HOURLY:
        return Forecaster(kind, usual, by_hour=_by_hour(steps, target, is_train, train_end, usual))
    if kind != MODEL:
        return Forecaster(kind, usual)
    scaled = target / volatility_of(steps)
    is_train = _training_rows(scaled, train_end - HORIZON)
    inputs = features_of(steps, holidays)
    texts = tuple(
        _fitted(inputs, scaled, is_train, {"objective": "quantile", "alpha": QUANTILE, "seed": seed * SEEDS + each})
        for each in range(SEEDS)
    )
    return Forecaster(kind, usual, (), texts, float(np.quantile(scaled[is_train], QUANTILE)), frozenset(holidays))


def _by_hour(steps: Steps, target: Floats, is_train: Any, end: int, usual: float) -> tuple[float, ...]:
    rows = np.flatnonzero(is_train[max(0, end - RECENT_STEPS) :]) + max(0, end - RECENT_STEPS)
    hours, values = hours_of(steps)[rows], target[rows]
    apart = [np.minimum((hours - hour) % 24, (hour - hours) % 24) for hour in range(24)]
    near = [values[each <= AROUND_H] for each in apart]
    return tuple(float(np.quantile(each, QUANTILE)) if len(each) >= LEAST_AROUND else usual for each in near)


def rolling_forecasts(
    steps: Steps, forecasters: Sequence[tuple[int, Forecaster]], end: int | None = None
) -> tuple[Floats, Floats]:
    """Forecast changes, and how far they are from the usual change: each forecaster's from its own first step to that
    of the next; NaN before the first.
    """
    found, moves = np.full(len(steps), np.nan), np.full(len(steps), np.nan)
    bounds = [first for first, _ in forecasters[1:]] + [len(steps) if end is None else end]
    for (first, forecaster), last in zip(forecasters, bounds, strict=True):
        begin = max(0, first - PAST)
        found[first:last] = forecaster.changes(steps.part(begin, last))[first - begin :]
        moves[first:last] = found[first:last] - forecaster.usual
    return found, moves


def _training_rows(target: Floats, end: int) -> Any:
    is_train = ~np.isnan(target)
    is_train[max(0, end + 1) :] = False
    if is_train.sum() < LEAST_ROWS:
        raise ValueError(f"{int(is_train.sum())} complete steps to train on, {LEAST_ROWS} needed")
    return is_train


def _predicted(text: str, inputs: Mapping[str, Floats], size: int) -> Floats:
    """(size,) by the features that the model was trained on; one that these steps lack is missing throughout."""
    model = booster(text)
    columns = [inputs.get(name, np.full(size, np.nan)) for name in model.feature_name()]
    return np.asarray(model.predict(np.column_stack(columns), num_threads=1), dtype=np.float64)


def _fitted(inputs: Mapping[str, Floats], target: Floats, is_train: Any, parameters: Mapping[str, Any]) -> str:
    """A LightGBM model as text."""
    import lightgbm  # 0.4 s

    rows = np.column_stack([values[is_train] for values in inputs.values()])
    data = lightgbm.Dataset(rows, target[is_train], feature_name=list(inputs), params={"verbosity": -1, "max_bin": 63})
    text: str = lightgbm.train({**_PARAMETERS, **parameters}, data, num_boost_round=ROUNDS).model_to_string()
    return text


def shuffled(values: Floats, seed: int) -> Floats:
    """Return the values at shuffled times; missing ones stay in place."""
    known = np.flatnonzero(~np.isnan(values))
    found = values.copy()
    found[known] = values[np.random.default_rng(seed).permutation(known)]
    return found


def expected_demand(
    steps: Steps, size: int, train_end: int, seed: int, holidays: Collection[np.datetime64] = ()
) -> Floats:
    """(n_steps,) forecast mean of the highest demand of each of the next `size` steps, nodes; for the paper's CES."""
    inputs = features_of(steps, holidays)
    target = coming(steps.highest, size, np.mean) - steps.recent
    is_train = _training_rows(target, train_end - size)
    text = _fitted(inputs, target, is_train, {"objective": "regression", "seed": seed})
    return np.asarray(steps.recent + _predicted(text, inputs, len(steps)), dtype=np.float64)
