"""Quantiles of the highest demand over the next hours, and whether the model earns its place.

Target: highest demand of the next `horizon` steps minus the highest of the last hour, in units of the volatility of the
last hours: restless hours need more room than calm ones. Each quantile is fitted by LightGBM with the pinball loss and
averaged with the same quantile of all past targets, since a month of one cluster is little to learn from. Beside it
stand persistence (the quantile of past changes in nodes), seasonal (the change one day before plus the quantile of its
past errors), and the model's own forecast shuffled in time. All are compared on rolling origins: each forecast is made
by a model trained strictly before it. Where the model does not beat all three, the better of persistence and seasonal
is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from advisor.demand.features import (
    DAY,
    HOUR,
    PAST,
    Floats,
    Steps,
    coming,
    features_of,
    seasonal_change,
    volatility_of,
)
from advisor.tree_text import booster

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
"""Weight of the quantile of all past targets beside LightGBM."""
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
        """what: MODEL, PERSISTENCE or SEASONAL, or "" to use what each fit chose."""
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
    """Each forecaster's forecasts from its first step, given beside it, to that of the next; NaN before the first."""
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
    """The same forecasts at other times, all quantiles of a time together; missing ones stay where they are."""
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
