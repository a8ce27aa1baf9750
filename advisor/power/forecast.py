"""Features of a node series, quantiles of the highest demand over the next hours, and their skill against baselines.

Time is cut into steps of 10 minutes. A decision at step i sees steps 0 .. i-1, never the minutes of step i itself.

Target: highest demand of the next `horizon` steps minus the highest of the last hour, in units of the volatility of the
last hours: restless hours need more room than calm ones. Each quantile is fitted by LightGBM with the pinball loss and
averaged with the same quantile of all past targets, since a month of one cluster is little to learn from. Baselines
are persistence (the quantile of past changes in nodes), seasonal (the change one day before plus the quantile of its
past errors), and the model's own forecast shuffled in time. All are compared on rolling origins: each forecast is made
by a model trained strictly before it. If the model does not beat all three, the better of persistence and seasonal is
used.
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


def seasonal_change(steps: Steps, horizon: int, season: int) -> Floats:
    """(n,) highest demand minus `recent`, one season before. NaN where that is not over yet."""
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
    text = (files("advisor.power") / "holidays.csv").read_text(encoding="utf-8")
    rows = [line.split(",") for line in text.splitlines() if line and not line.startswith("#")][1:]
    return frozenset(np.datetime64(day, "D") for place, day in rows if place == country)


SOON, HORIZON = 3 * HOUR, 6 * HOUR
LIKELY = 0.3
QUANTILES = (0.5, 0.8, 0.9, 0.95, 0.98)
KEYS = ((SOON, LIKELY), *((HORIZON, quantile) for quantile in QUANTILES))
HORIZONS = (SOON, HORIZON)
"""Nodes power down by the quantiles of the highest demand within HORIZON. They wake for demand that is reached within
SOON with a probability of 1 - LIKELY.
"""
ROUNDS = 80
SHRINKAGE = 0.25
"""Weight of the quantile of all past targets; LightGBM has the rest."""
LEAST_ROWS = 3 * DAY
"""Fewer training rows than three days of decisions: no forecast."""
MODEL, PERSISTENCE, SEASONAL, SHUFFLED = "model", "persistence", "seasonal", "shuffled"

_PARAMETERS: Mapping[str, Any] = {
    "learning_rate": 0.06, "num_leaves": 7, "min_data_in_leaf": 72, "feature_fraction": 0.5, "bagging_fraction": 0.7,
    "bagging_freq": 1, "lambda_l2": 5.0, "max_bin": 63, "deterministic": True, "force_row_wise": True,
    "num_threads": 1, "verbosity": -1,
}  # fmt: skip

Key = tuple[int, float]
"""Horizon in steps, quantile."""


@dataclass(frozen=True)
class Skill:
    """Mean pinball loss of one horizon and quantile on the validation span, in nodes; and what is used."""

    horizon: int
    quantile: float
    model: float
    persistence: float
    seasonal: float
    shuffled: float
    used: str

    @property
    def is_model_used(self) -> bool:
        return self.used == MODEL


@dataclass(frozen=True)
class QuantileFit:
    """One horizon and quantile. text: LightGBM model of the target in units of volatility. scaled: the same quantile of
    all past targets. persistence: that of past changes, nodes. season_shift: that of the errors of the day before; NaN
    if unknown. used: what to decide by.
    """

    text: str
    scaled: float
    persistence: float
    season_shift: float
    used: str = MODEL


Forecasts = dict[Key, Floats]
"""Forecast changes by horizon and quantile, (n_steps,) each; NaN where the past is missing: no forecast there."""


@dataclass(frozen=True)
class Forecaster:
    """Fits by horizon and quantile, and how well such fits did on rolling origins. Pure data."""

    fits: dict[Key, QuantileFit]
    skills: list[Skill]
    holidays: frozenset[np.datetime64] = frozenset()

    def changes(self, steps: Steps, what: str = "") -> Forecasts:
        """Forecast changes. what: MODEL, PERSISTENCE or SEASONAL, or "" for the choice of each fit."""
        wanted = {what or fit.used for fit in self.fits.values()}
        inputs = features_of(steps, self.holidays) if MODEL in wanted else {}
        volatility = volatility_of(steps)
        return _ordered(
            {key: _changes(steps, fit, key[0], inputs, volatility, what or fit.used) for key, fit in self.fits.items()}
        )

    def with_skills(self, skills: list[Skill]) -> Forecaster:
        used = {(skill.horizon, skill.quantile): skill.used for skill in skills}
        fits = {key: dataclasses.replace(fit, used=used[key]) for key, fit in self.fits.items()}
        return Forecaster(fits, skills, self.holidays)


def _changes(
    steps: Steps, fit: QuantileFit, horizon: int, inputs: Mapping[str, Floats], volatility: Floats, what: str
) -> Floats:
    constant = np.where(np.isnan(steps.recent), np.nan, fit.persistence)
    if what == PERSISTENCE:
        return constant
    if what == SEASONAL:
        moved = seasonal_change(steps, horizon, DAY) + fit.season_shift
        return np.where(np.isnan(moved), constant, moved + 0 * constant)
    found = (1 - SHRINKAGE) * _predicted(fit.text, inputs, len(steps)) + SHRINKAGE * fit.scaled
    return np.asarray(np.where(np.isnan(steps.recent), np.nan, found * volatility), dtype=np.float64)


def pinball(actual: Floats, forecast: Floats, quantile: float) -> float:
    """Mean pinball (quantile) loss over rows where both are known; NaN if there is none."""
    error = actual - forecast
    known = error[~np.isnan(error)]
    return float(np.mean(np.maximum(quantile * known, (quantile - 1) * known))) if len(known) else float("nan")


def fit_forecaster(steps: Steps, train_end: int, seed: int, holidays: Collection[np.datetime64] = ()) -> Forecaster:
    """Train on steps before train_end.

    A training row counts only if its whole target lies before train_end. Raises ValueError if fewer than three days
    of training rows are complete.
    """
    inputs = features_of(steps, holidays)
    volatility = volatility_of(steps)
    fits: dict[Key, QuantileFit] = {}
    for horizon in HORIZONS:
        target = coming(steps.highest, horizon, np.max) - steps.recent
        is_train = _training_rows(target / volatility, train_end - horizon)
        errors = (target - seasonal_change(steps, horizon, DAY))[is_train]
        errors = errors[~np.isnan(errors)]
        scaled = target / volatility
        for quantile in (each for size, each in KEYS if size == horizon):
            parameters = {"objective": "quantile", "alpha": quantile, "seed": seed}
            fits[horizon, quantile] = QuantileFit(
                text=_fitted(inputs, scaled, is_train, parameters),
                scaled=float(np.quantile(scaled[is_train], quantile)),
                persistence=float(np.quantile(target[is_train], quantile)),
                season_shift=float(np.quantile(errors, quantile)) if len(errors) else float("nan"),
            )  # fmt: skip
    return Forecaster(fits, [], frozenset(holidays))


def rolling_forecasts(
    steps: Steps, forecasters: Sequence[tuple[int, Forecaster]], what: str = "", end: int | None = None
) -> Forecasts:
    """Each forecaster's forecasts from its own first step to that of the next; NaN before the first."""
    found = {key: np.full(len(steps), np.nan) for key in KEYS}
    bounds = [first for first, _ in forecasters[1:]] + [len(steps) if end is None else end]
    for (first, forecaster), last in zip(forecasters, bounds, strict=True):
        begin = max(0, first - PAST)
        for key, values in forecaster.changes(steps.part(begin, last), what).items():
            found[key][first:last] = values[first - begin :]
    return found


def skills_of(steps: Steps, forecasters: Sequence[tuple[int, Forecaster]], end: int, seed: int) -> list[Skill]:
    """Losses over the decisions whose targets end before `end`, each forecast by the forecaster of its time."""
    forecasts = {what: rolling_forecasts(steps, forecasters, what, end) for what in (MODEL, PERSISTENCE, SEASONAL)}
    found = []
    for horizon in HORIZONS:
        target = coming(steps.highest, horizon, np.max) - steps.recent
        rows = slice(forecasters[0][0], max(forecasters[0][0], end - horizon + 1))
        for key in (each for each in KEYS if each[0] == horizon):
            own = {what: values[key][rows] for what, values in forecasts.items()}
            found.append(_skill(key, target[rows], own, seed))
    return found


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


def _skill(key: Key, actual: Floats, forecasts: Mapping[str, Floats], seed: int) -> Skill:
    every = {**forecasts, SHUFFLED: shuffled({key: forecasts[MODEL]}, seed)[key]}
    losses = {what: pinball(actual, forecast, key[1]) for what, forecast in every.items()}
    is_better = all(losses[MODEL] < loss for what, loss in losses.items() if what != MODEL)
    plain = SEASONAL if losses[SEASONAL] < losses[PERSISTENCE] else PERSISTENCE
    return Skill(key[0], key[1], **losses, used=MODEL if is_better else plain)


def shuffled(forecasts: Forecasts, seed: int) -> Forecasts:
    """Return the forecasts at shuffled times, all quantiles of a time together; missing ones stay in place."""
    known = np.flatnonzero(~np.any([np.isnan(values) for values in forecasts.values()], axis=0))
    order = np.random.default_rng(seed).permutation(known)
    found = {key: values.copy() for key, values in forecasts.items()}
    for key, values in forecasts.items():
        found[key][known] = values[order]
    return found


def _ordered(forecasts: dict[Key, Floats]) -> dict[Key, Floats]:
    """A higher quantile of a horizon is never below a lower one."""
    found: dict[Key, Floats] = {}
    for before, key in zip((None, *KEYS), KEYS, strict=False):
        is_higher = before is not None and before[0] == key[0]
        found[key] = np.maximum(forecasts[key], found[before]) if before and is_higher else forecasts[key]
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
