"""Quantiles of the highest demand over the next hours, and whether the model earns its place.

Target: highest demand of the next `horizon` steps minus the highest of the last hour, in nodes. Each quantile is fitted
by LightGBM with the pinball loss and averaged with persistence, since a month of one cluster is little to learn from
(on Philly before 16 November the average beat either at most horizons). Beside it stand persistence (the same quantile
of all past changes), seasonal (the change one day before plus the quantile of its past errors), and the model's own
forecast shuffled in time. Where the model does not beat all three on a validation span after the training span,
persistence is used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from advisor.demand.features import DAY, HOUR, Floats, Steps, coming, features_of, seasonal_change

HORIZONS = (3 * HOUR, 6 * HOUR, 12 * HOUR)
QUANTILES = (0.5, 0.8, 0.95)
ROUNDS = 80
SHRINKAGE = 0.5
"""Weight of persistence in the model's forecast."""
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
    is_model_used: bool


@dataclass(frozen=True)
class DemandForecast:
    """Forecast changes by horizon and quantile, (n_steps,) each; NaN where the past is missing: no forecast there.

    used: what to decide by. model: the model's own, skilled or not. persistence: the baseline. expected: mean of
    the highest demand of each of the next steps, by how many (for the paper's controller).
    """

    used: dict[Key, Floats]
    model: dict[Key, Floats]
    persistence: dict[Key, Floats]
    expected: dict[int, Floats]
    skills: list[Skill]


def pinball(actual: Floats, forecast: Floats, quantile: float) -> float:
    """Mean pinball (quantile) loss over rows where both are known; NaN if there is none."""
    error = actual - forecast
    known = error[~np.isnan(error)]
    return float(np.mean(np.maximum(quantile * known, (quantile - 1) * known))) if len(known) else float("nan")


def forecast_demand(
    steps: Steps, train_end: int, valid_end: int, seed: int, *, expected_over: Collection[int] = (),
    holidays: Collection[np.datetime64] = (),
) -> DemandForecast:  # fmt: skip
    """Train on steps before train_end, judge on train_end .. valid_end, forecast every step.

    A training row counts only if its whole target lies before train_end. Raises ValueError if fewer than three days
    of training rows are complete.
    """
    models: dict[Key, Floats] = {}
    persistence: dict[Key, Floats] = {}
    used: dict[Key, Floats] = {}
    skills = []
    for horizon in HORIZONS:
        _, inputs = features_of(steps, horizon, holidays)
        target = coming(steps.highest, horizon, np.max) - steps.recent
        is_train = _training_rows(inputs, target, train_end - horizon)
        for quantile in QUANTILES:
            key = (horizon, quantile)
            raw = _fit_predict(inputs, target, is_train, {"objective": "quantile", "alpha": quantile, "seed": seed})
            constant = float(np.quantile(target[is_train], quantile))
            models[key] = np.where(np.isnan(steps.recent), np.nan, (1 - SHRINKAGE) * raw + SHRINKAGE * constant)
            persistence[key] = np.where(np.isnan(steps.recent), np.nan, constant)
            skills.append(_skill(key, steps, target, is_train, models[key], constant, (train_end, valid_end), seed))
            used[key] = models[key] if skills[-1].is_model_used else persistence[key]
    expected = {size: _expected(steps, size, train_end, seed, holidays) for size in sorted(set(expected_over))}
    return DemandForecast(_ordered(used), _ordered(models), persistence, expected, skills)


def _training_rows(inputs: Floats, target: Floats, end: int) -> Any:
    is_train = ~np.isnan(target) & ~np.isnan(inputs[:, 1])
    is_train[max(0, end + 1) :] = False
    if is_train.sum() < LEAST_ROWS:
        raise ValueError(f"{int(is_train.sum())} complete steps to train on, {LEAST_ROWS} needed")
    return is_train


def _fit_predict(inputs: Floats, target: Floats, is_train: Any, parameters: Mapping[str, Any]) -> Floats:
    import lightgbm  # 0.4 s

    data = lightgbm.Dataset(inputs[is_train], target[is_train], params={"verbosity": -1, "max_bin": 63})
    model = lightgbm.train({**_PARAMETERS, **parameters}, data, num_boost_round=ROUNDS)
    return np.asarray(model.predict(inputs, num_threads=1), dtype=np.float64)


def _skill(
    key: Key, steps: Steps, target: Floats, is_train: Any, model: Floats, constant: float, span: tuple[int, int],
    seed: int,
) -> Skill:  # fmt: skip
    """span: from, to; targets that reach beyond it are left out."""
    horizon, quantile = key
    season = seasonal_change(steps, horizon, DAY)
    errors = (target - season)[is_train]
    known = errors[~np.isnan(errors)]
    shift = float(np.quantile(known, quantile)) if len(known) else 0.0
    rows = slice(span[0], max(span[0], span[1] - horizon + 1))
    actual, own = target[rows], model[rows]
    losses = [
        pinball(actual, forecast, quantile)
        for forecast in (own, np.full(len(own), constant), season[rows] + shift, shuffled(own, seed))
    ]
    is_better = all(losses[0] < other or np.isnan(other) for other in losses[1:])
    return Skill(horizon, quantile, losses[0], losses[1], losses[2], losses[3], is_better)


def shuffled(forecast: Floats, seed: int) -> Floats:
    """The same values in another order; missing ones stay where they are."""
    found = forecast.copy()
    known = np.flatnonzero(~np.isnan(forecast))
    found[known] = np.random.default_rng(seed).permutation(forecast[known])
    return found


def _ordered(forecasts: dict[Key, Floats]) -> dict[Key, Floats]:
    """A higher quantile or a longer horizon is never below a lower or shorter one."""
    found: dict[Key, Floats] = {}
    for horizon in HORIZONS:
        for place, quantile in enumerate(QUANTILES):
            value = forecasts[horizon, quantile]
            if place:
                value = np.maximum(value, found[horizon, QUANTILES[place - 1]])
            shorter = HORIZONS.index(horizon) - 1
            if shorter >= 0:
                value = np.maximum(value, found[HORIZONS[shorter], quantile])
            found[horizon, quantile] = value
    return found


def _expected(steps: Steps, size: int, train_end: int, seed: int, holidays: Collection[np.datetime64]) -> Floats:
    """(n,) forecast mean of the highest demand of each of the next `size` steps, nodes."""
    _, inputs = features_of(steps, min(size, DAY), holidays)
    target = coming(steps.highest, size, np.mean) - steps.recent
    is_train = _training_rows(inputs, target, train_end - size)
    return steps.recent + _fit_predict(inputs, target, is_train, {"objective": "regression", "seed": seed})
