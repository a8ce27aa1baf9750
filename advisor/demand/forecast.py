"""Quantiles of the highest demand over the next hours, and whether the model earns its place.

Target: highest demand of the next `horizon` steps minus the highest of the last hour, in nodes. Each quantile is fitted
by LightGBM with the pinball loss, and averaged with persistence where that serves better on a validation span after the
training span: a month of one cluster is little to learn from. Beside it stand persistence (the same quantile of all
past changes), seasonal (the change one day before plus the quantile of its past errors), and the model's own forecast
shuffled in time. Where the model does not beat all three on the validation span, the better of persistence and seasonal
is used.
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
SHRINKAGES = (0.0, 0.5)
"""Weights of persistence in the forecast; the validation span chooses one."""
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
            baselines = _baselines(steps, target, is_train, key)
            rows = slice(train_end, max(train_end, valid_end - horizon + 1))
            models[key] = _shrunk(raw, baselines[PERSISTENCE], target, rows, quantile)
            skills.append(_skill(key, target, models[key], baselines, rows, seed))
            persistence[key] = baselines[PERSISTENCE]
            used[key] = models[key] if skills[-1].is_model_used else baselines[skills[-1].used]
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


def _baselines(steps: Steps, target: Floats, is_train: Any, key: Key) -> dict[str, Floats]:
    """Persistence, and seasonal where the day before is known; NaN where `recent` is missing."""
    horizon, quantile = key
    constant = np.where(np.isnan(steps.recent), np.nan, float(np.quantile(target[is_train], quantile)))
    season = seasonal_change(steps, horizon, DAY)
    errors = (target - season)[is_train]
    errors = errors[~np.isnan(errors)]
    moved = season + (float(np.quantile(errors, quantile)) if len(errors) else np.nan)
    return {PERSISTENCE: constant, SEASONAL: np.where(np.isnan(moved), constant, moved + 0 * constant)}


def _shrunk(raw: Floats, constant: Floats, target: Floats, rows: slice, quantile: float) -> Floats:
    """LightGBM's forecast, averaged with persistence by the weight that serves best on the validation rows."""
    tried = [(1 - share) * raw + share * constant for share in SHRINKAGES]
    losses = [pinball(target[rows], one[rows], quantile) for one in tried]
    return tried[int(np.argmin(losses))] if not np.isnan(losses).any() else tried[-1]


def _skill(key: Key, target: Floats, model: Floats, baselines: Mapping[str, Floats], rows: slice, seed: int) -> Skill:
    """rows: decisions whose targets end within the validation span."""
    actual, own = target[rows], model[rows]
    losses = {
        name: pinball(actual, forecast, key[1])
        for name, forecast in (
            (MODEL, own), (PERSISTENCE, baselines[PERSISTENCE][rows]), (SEASONAL, baselines[SEASONAL][rows]),
            (SHUFFLED, shuffled(own, seed)),
        )
    }  # fmt: skip
    is_better = all(losses[MODEL] < loss for name, loss in losses.items() if name != MODEL)
    plain = SEASONAL if losses[SEASONAL] < losses[PERSISTENCE] else PERSISTENCE
    return Skill(key[0], key[1], **losses, used=MODEL if is_better else plain)


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
