"""The trained demand model of one node set, its decision, and its files.

The back-test and the live hook run the same code: `DemandModel.decide` builds the view of the newest step as the
back-test builds that of every step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from advisor import version_folders as folders
from advisor.power.choice import ForecastTrial, choose, try_forecasts
from advisor.power.decide import HOLDS, Budget, ForecastController, ForecastSettings, is_overspent, views_of
from advisor.power.decide import Spent as Spent
from advisor.power.forecast import (
    DAY,
    HORIZON,
    HOUR,
    HOURLY,
    KINDS,
    MODEL,
    PAST,
    QUANTILE,
    STEP_MIN,
    Forecaster,
    Steps,
    fit_forecaster,
    steps_of,
)
from advisor.power.replay import Plant
from almanac.files import parse_json
from almanac.units import DAY_S
from telemetry.power.series import NodeSeries

FORMAT = 3
TAIL_MIN = (PAST + HOLDS[-1] + HOUR) * STEP_MIN
"""Minutes of the past that a decision can look at; a longer series changes nothing."""
LEAST_DAYS = 8
FIRST_SHARE, FIRST_DAYS = 3, (4, 7)
"""The first forecast is made after a third of the record, but after 4 days at the earliest and 7 at the latest."""
MODEL_FILE = "model.json"
MODEL_DAYS = 30
"""A LightGBM model that did not pay is tried again after so many days."""


@dataclass(frozen=True)
class PowerDecision:
    """A controller's decision for one step, and its reason.

    target: nodes to keep powered; None leaves all as they are. forecast: highest demand, nodes, by (minutes ahead,
    quantile). used: the forecast in use and why, in one line; "" without a model.
    """

    target: int | None
    reason: str
    forecast: Mapping[tuple[int, float], float] = field(default_factory=dict)
    used: str = ""


@dataclass(frozen=True)
class DemandModel:
    """Forecaster and settings of one node set.

    trials: the kinds of forecast on the last 30 days, the used one among them. model_tried_s: when the LightGBM model
    was last tried, by the record's time, s since 1970; None: never.
    """

    forecaster: Forecaster
    settings: ForecastSettings
    budget: Budget
    trials: tuple[ForecastTrial, ...] = ()
    model_tried_s: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def used(self) -> ForecastTrial:
        """The trial of the kind in use."""
        return next(each for each in self.trials if each.kind == self.forecaster.kind)

    def reason(self) -> str:
        """One line: the forecast in use, and why."""
        own = self.used
        rest = ", ".join(f"{each.kind} {each.asleep:.1f}" for each in self.trials if each is not own)
        said = f"{own.kind}, {own.asleep:.1f} nodes asleep in the last {own.days:.0f} days of the training"
        return f"{said}; {rest}" if rest else said

    def decide(self, recent: NodeSeries, powered: int, spent: Spent) -> PowerDecision:
        """Nodes to keep powered from now on, the minute after the last of `recent`. TAIL_MIN minutes of it are enough.

        powered: nodes up or booting now. It holds if a minute of the last hour is missing or not usable.
        """
        size = min(len(recent), TAIL_MIN) // STEP_MIN * STEP_MIN
        tail = recent.part(len(recent) - size, len(recent))
        if not len(tail):
            return PowerDecision(None, "no demand is known")
        steps = steps_of(tail, ahead=1)
        changes = self.forecaster.changes(steps)
        last = len(steps) - 1
        view = views_of(steps, changes - self.forecaster.usual, last, last + 1).views[0]
        total = tail.total[-1]
        if view.is_stale or view.recent is None or math.isnan(total):
            return PowerDecision(None, "the demand of the last hour is not complete")
        if view.levels is None:
            return PowerDecision(None, "no forecast can be made")
        forecast = {(HORIZON * STEP_MIN, QUANTILE): view.recent + float(changes[last])}
        controller = ForecastController(self.settings)
        now_s = int(tail.start.astype("datetime64[s]").astype(np.int64)) + len(tail) * 60
        view = view._replace(total=int(total), powered=powered, is_overspent=is_overspent(self.budget, spent, now_s))
        assert view.active is not None
        if view.active + controller.margin > powered:
            wanted = min(controller.raised(view, view.active), int(total))
            return PowerDecision(max(wanted, powered), "demand is near the powered nodes", forecast)
        if view.is_overspent:
            return PowerDecision(None, "the last 7 days used more than twice the budget", forecast)
        target = controller.target(view)
        if target is None:
            return PowerDecision(None, "the forecast asks for the powered nodes", forecast)
        return PowerDecision(min(target, int(total)), "the forecast is below the powered nodes", forecast)

    def to_files(self) -> dict[str, str]:
        """Content by file name: JSON, and, only where the model is used, its LightGBM texts."""
        own = self.forecaster
        content = {
            "format": FORMAT, "kind": own.kind, "usual": own.usual, "by_hour": own.by_hour, "scaled": own.scaled,
            "texts": len(own.texts), "holidays": sorted(str(day) for day in own.holidays),
            "settings": asdict(self.settings), "budget": asdict(self.budget), "model_tried_s": self.model_tried_s,
            "trials": [{name: _or_none(value) for name, value in asdict(each).items()} for each in self.trials],
            "notes": list(self.notes),
        }  # fmt: skip
        texts = {_text_name(place): text for place, text in enumerate(own.texts)}
        return {MODEL_FILE: json.dumps(content, indent=1, allow_nan=False), **texts}

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> DemandModel:
        """Read the files of `to_files`. Raises ValueError, with the fault, for any other files."""
        try:
            return _model_of(files)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the demand model cannot be read: {type(error).__name__} {error}") from error


def _text_name(place: int) -> str:
    return f"seed{place}.txt"


def _or_none(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _number(value: Any) -> float:
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"the demand model holds {value!r} where a number belongs")
    return float(value)


def _settings_of(content: Mapping[str, Any]) -> ForecastSettings:
    settings = ForecastSettings(**content)
    if settings.hold not in HOLDS or not min(_number(settings.margin), _number(settings.extra)) >= 0:
        raise ValueError(f"the demand model has {settings}")
    return settings


def _model_of(files: Mapping[str, str]) -> DemandModel:
    content = parse_json(files[MODEL_FILE].encode())
    if content["format"] != FORMAT:
        raise ValueError(f"the demand model has format {content['format']!r}, expected {FORMAT}")
    texts = tuple(files[_text_name(place)] for place in range(content["texts"]))
    for text in texts:
        folders.require_whole(text)
    forecaster = Forecaster(
        str(content["kind"]), _number(content["usual"]), tuple(map(_number, content["by_hour"])), texts,
        _number(content["scaled"]), frozenset(np.datetime64(day, "D") for day in content["holidays"]),
    )  # fmt: skip
    has_all = {HOURLY: len(forecaster.by_hour) == 24, MODEL: bool(texts)}.get(forecaster.kind, True)
    if forecaster.kind not in KINDS or not has_all or math.isnan(forecaster.usual):
        raise ValueError(f"the demand model has a forecast of kind {forecaster.kind[:40]!r}")
    trials = tuple(
        ForecastTrial(
            str(each["kind"]), _settings_of(each["settings"]),
            *(_number(each[name]) for name in ("days", "asleep", "use", "loss")),
        )
        for each in content["trials"]
    )  # fmt: skip
    if forecaster.kind not in [each.kind for each in trials]:
        raise ValueError("the demand model has no trial of its own forecast")
    tried_s = content["model_tried_s"]
    return DemandModel(
        forecaster, _settings_of(content["settings"]), Budget(**content["budget"]), trials,
        None if tried_s is None else int(_number(tried_s)), tuple(map(str, content["notes"])),
    )  # fmt: skip


def train_demand(
    series: NodeSeries,
    budget: Budget,
    *,
    seed: int = 0,
    plant: Plant | None = None,
    holidays: Iterable[np.datetime64] = (),
    before: DemandModel | None = None,
) -> DemandModel:
    """Train on the whole series. before: the model until now. Raises ValueError: too little data.

    The LightGBM model is tried at the first training and then every 30 days, and in between only while it is used.
    """
    steps, end_s = steps_of(series), int(series.start.astype("datetime64[s]").astype(np.int64)) + 60 * len(series)
    tried_s = None if before is None else before.model_tried_s
    is_fresh = before is not None and tried_s is not None and 0 <= end_s - tried_s < MODEL_DAYS * DAY_S
    kinds = KINDS if before is None or not is_fresh or before.forecaster.kind == MODEL else KINDS[:-1]
    trials = trained_trials(series, steps, budget, plant or Plant(), seed, frozenset(holidays), kinds)
    return fitted_model(
        steps, len(steps), budget, trials, seed, frozenset(holidays), end_s if MODEL in kinds else tried_s
    )


def trained_trials(
    series: NodeSeries, steps: Steps, budget: Budget, plant: Plant, seed: int, holidays: frozenset[np.datetime64],
    kinds: Sequence[str] = KINDS, first: int | None = None, end: int | None = None,
) -> tuple[ForecastTrial, ...]:  # fmt: skip
    """Try kinds of forecast on the last 30 days before `end`, but from step `first` on.

    Raises ValueError: too little data.
    """
    end = len(steps) if end is None else end
    if end < LEAST_DAYS * DAY:
        raise ValueError(f"the record has {end / DAY:.1f} days of demand, at least {LEAST_DAYS} are needed")
    if first is None:
        first = min(max(end // FIRST_SHARE, FIRST_DAYS[0] * DAY), FIRST_DAYS[1] * DAY)
    return tuple(try_forecasts(series, steps, budget, plant, first, end, kinds, seed, holidays))


def fitted_model(
    steps: Steps, end: int, budget: Budget, trials: tuple[ForecastTrial, ...], seed: int,
    holidays: frozenset[np.datetime64], model_tried_s: int | None = None,
) -> DemandModel:  # fmt: skip
    """Fit the chosen kind on the steps before `end`. Raises ValueError: too little data."""
    own = choose(trials)
    notes = () if own.use <= 1 else (
        f"no setting kept the budget while tuning; the closest used {own.use:.1f} times it",
    )  # fmt: skip
    forecaster = fit_forecaster(steps, end, seed, own.kind, holidays)
    return DemandModel(forecaster, own.settings, budget, trials, model_tried_s, notes)
