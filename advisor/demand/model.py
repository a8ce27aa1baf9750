"""The trained demand model of one node set: forecasts and settings, and the decision that both give. Pure.

The back-test and the live hook run the same code: `DemandModel.decide` builds the view of the newest step as the
back-test builds that of every step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from advisor.decisions.power import Budget, ForecastController, Settings, credit_of
from advisor.decisions.power import Spent as Spent
from advisor.decisions.power_views import views_of
from advisor.demand.features import DAY, HOUR, PAST, STEP_MIN, Steps, steps_of
from advisor.demand.forecast import (
    KEYS,
    MODEL,
    PERSISTENCE,
    SEASONAL,
    SHUFFLED,
    Forecaster,
    Key,
    QuantileFit,
    Skill,
    fit_forecaster,
    rolling_forecasts,
    skills_of,
)
from advisor.evaluation.power_replay import Plant
from advisor.evaluation.power_tune import tuned_settings
from advisor.tree_text import require_whole
from almanac.plain_file import parse_json
from telemetry.nodes.series import NodeSeries

FORMAT = 2
TAIL_MIN = (PAST + 2 * HOUR) * STEP_MIN
"""Minutes of the past that a decision can look at; a longer series changes nothing."""
LEAST_DAYS = 8
FIRST_SHARE, FIRST_DAYS = 3, (4, 7)
"""The first forecast is made after a third of the record, but after 4 days at the earliest and 7 at the latest."""
RETRAIN_STEPS = 3 * DAY
MODEL_FILE = "model.json"


@dataclass(frozen=True)
class PowerDecision:
    """target: nodes to keep powered; None holds. forecast: highest demand, nodes, by (minutes ahead, quantile)."""

    target: int | None
    reason: str
    forecast: Mapping[tuple[int, float], float] = field(default_factory=dict)


@dataclass(frozen=True)
class DemandModel:
    """Forecaster and settings of one node set."""

    forecaster: Forecaster
    settings: Settings
    budget: Budget
    notes: tuple[str, ...] = ()

    def decide(self, recent: NodeSeries, powered: int, spent: Spent) -> PowerDecision:
        """Nodes to keep powered from now on, the minute after the last of `recent`. TAIL_MIN minutes of it are enough.

        powered: nodes up or booting now. It holds where a minute of the last hour is missing or not usable.
        """
        tail = _whole_tail(recent)
        if not len(tail):
            return PowerDecision(None, "no demand is known")
        steps = steps_of(tail, ahead=1)
        changes = self.forecaster.changes(steps)
        last = len(steps) - 1
        view = views_of(steps, changes, last, last + 1).views[0]
        total = tail.total[-1]
        if view.is_stale or view.recent is None or math.isnan(total):
            return PowerDecision(None, "the demand of the last hour is not complete")
        forecast = {(h * STEP_MIN, q): view.recent + float(values[last]) for (h, q), values in changes.items()}
        if view.levels is None:
            return PowerDecision(None, "no forecast can be made")
        controller = ForecastController(self.settings)
        now_s = int(tail.start.astype("datetime64[s]").astype(np.int64)) + len(tail) * 60
        credit = credit_of(self.budget, spent, now_s)
        view = view._replace(total=int(total), powered=powered, credit=credit)
        assert view.active is not None
        if view.active + controller.margin > powered:
            wanted = min(controller.raised(view, view.active), int(total))
            return PowerDecision(max(wanted, powered), "demand is near the powered nodes", forecast)
        target = controller.target(view)
        if target is None:
            return PowerDecision(None, "the forecast asks for the powered nodes", forecast)
        why = "more nodes will likely be needed soon" if target > powered else "the forecast is below the powered nodes"
        return PowerDecision(min(target, int(total)), why, forecast)

    def to_files(self) -> dict[str, str]:
        """Content by file name: JSON, and a LightGBM model as text for each forecast."""
        fits = [
            {
                "horizon": horizon, "quantile": quantile, "scaled": fit.scaled, "persistence": fit.persistence,
                "season_shift": _or_none(fit.season_shift), "used": fit.used,
            }
            for (horizon, quantile), fit in self.forecaster.fits.items()
        ]  # fmt: skip
        content = {
            "format": FORMAT, "fits": fits, "settings": asdict(self.settings), "budget": asdict(self.budget),
            "skills": [{k: _or_none(v) for k, v in asdict(skill).items()} for skill in self.forecaster.skills],
            "holidays": sorted(str(day) for day in self.forecaster.holidays), "notes": list(self.notes),
        }  # fmt: skip
        texts = {_text_name(*key): fit.text for key, fit in self.forecaster.fits.items()}
        return {MODEL_FILE: json.dumps(content, indent=1, allow_nan=False), **texts}

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> DemandModel:
        """Raises ValueError, with what is wrong, for files that `to_files` did not write."""
        try:
            return _read(files)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the demand model cannot be read: {type(error).__name__} {error}") from error


def _whole_tail(series: NodeSeries) -> NodeSeries:
    """The newest whole steps, cut from the end."""
    size = min(len(series), TAIL_MIN) // STEP_MIN * STEP_MIN
    return series.part(len(series) - size, len(series))


def _text_name(horizon: int, quantile: float) -> str:
    return f"h{horizon}_q{round(quantile * 1000)}.txt"


def _or_none(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _number(value: Any) -> float:
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"the demand model holds {value!r} where a number belongs")
    return float(value)


def _read(files: Mapping[str, str]) -> DemandModel:
    content = parse_json(files[MODEL_FILE].encode())
    if content["format"] != FORMAT:
        raise ValueError(f"the demand model has format {content['format']!r}, expected {FORMAT}")
    fits: dict[Key, QuantileFit] = {}
    for fit in content["fits"]:
        key = (int(fit["horizon"]), _number(fit["quantile"]))
        require_whole(files[_text_name(*key)])
        fits[key] = QuantileFit(
            files[_text_name(*key)], _number(fit["scaled"]), _number(fit["persistence"]),
            _number(fit["season_shift"]), str(fit["used"]),
        )  # fmt: skip
    losses = (MODEL, PERSISTENCE, SEASONAL, SHUFFLED)
    skills = [
        Skill(
            horizon=int(skill["horizon"]), quantile=_number(skill["quantile"]), used=str(skill["used"]),
            **{name: _number(skill[name]) for name in losses},
        )
        for skill in content["skills"]
    ]  # fmt: skip
    holidays = frozenset(np.datetime64(day, "D") for day in content["holidays"])
    settings = Settings(**content["settings"])
    if sorted(fits) != sorted(KEYS):
        raise ValueError(f"the demand model has forecasts {sorted(fits)}")
    if not 0 < _number(settings.tail) < 1 or settings.margin < 0 or settings.extra < 0:
        raise ValueError(f"the demand model has {settings}")
    return DemandModel(
        Forecaster(fits, skills, holidays), settings, Budget(**content["budget"]), tuple(content["notes"])
    )


@dataclass(frozen=True)
class DemandFit:
    """A model, and the forecasters that its settings were chosen with: each with the first step that it forecasts."""

    model: DemandModel
    origins: list[tuple[int, Forecaster]]


def train_demand(
    series: NodeSeries,
    budget: Budget,
    *,
    seed: int = 0,
    plant: Plant | None = None,
    holidays: Iterable[np.datetime64] = (),
) -> DemandModel:
    """Train on the whole series. Raises ValueError: too little data."""
    return trained_demand(series, steps_of(series), budget, plant or Plant(), seed, frozenset(holidays)).model


def trained_demand(
    series: NodeSeries, steps: Steps, budget: Budget, plant: Plant, seed: int, holidays: frozenset[np.datetime64],
    first: int | None = None, end: int | None = None,
) -> DemandFit:  # fmt: skip
    """Train on the steps before `end`.

    Skill and settings come from rolling origins: from step `first` on, every three days are forecast by a model of what
    lies before them, and the controller is replayed on these forecasts. Raises ValueError: too little data.
    """
    end = len(steps) if end is None else end
    if end < LEAST_DAYS * DAY:
        raise ValueError(f"the record has {end / DAY:.1f} days of demand, at least {LEAST_DAYS} are needed")
    if first is None:
        first = min(max(end // FIRST_SHARE, FIRST_DAYS[0] * DAY), FIRST_DAYS[1] * DAY)
    origins = [(step, fit_forecaster(steps, step, seed, holidays)) for step in range(first, end - DAY, RETRAIN_STEPS)]
    skills = skills_of(steps, origins, end, seed)
    origins = [(step, forecaster.with_skills(skills)) for step, forecaster in origins]
    views = views_of(steps, rolling_forecasts(steps, origins, end=end), first, end)
    settings, notes = tuned_settings(series, views, budget, plant)
    final = fit_forecaster(steps, end, seed, holidays).with_skills(skills)
    return DemandFit(DemandModel(final, settings, budget, tuple(notes)), origins)
