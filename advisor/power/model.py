"""The trained demand model of one node set, its decision, and its versions on disk.

The back-test and the live hook run the same code: `DemandModel.decide` builds the view of the newest step as the
back-test builds that of every step.

<models>/demand/node_set=<name>/<version>/   meta.json, and the texts of the model (JSON and LightGBM)
<models>/demand/node_set=<name>/current      the version in use

One process at a time writes the versions of a node set; readers take no lock.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from advisor import version_folders as folders
from advisor.power.decide import Budget, ForecastController, ForecastSettings, credit_of, views_of
from advisor.power.decide import Spent as Spent
from advisor.power.forecast import (
    DAY,
    HOUR,
    KEYS,
    MODEL,
    PAST,
    PERSISTENCE,
    SEASONAL,
    SHUFFLED,
    STEP_MIN,
    Forecaster,
    Key,
    QuantileFit,
    Skill,
    Steps,
    features_of,
    fit_forecaster,
    rolling_forecasts,
    skills_of,
    steps_of,
)
from advisor.power.replay import Plant, tuned_settings
from almanac import __version__
from almanac.atomic import locked
from almanac.config import NodeSet
from almanac.errors import SchemaVersionError, StoreError
from almanac.files import parse_json
from telemetry.power.series import NodeSeries

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
    """A controller's decision for one step, and its reason.

    target: nodes to keep powered; None leaves all as they are. forecast: highest demand, nodes, by (minutes ahead,
    quantile).
    """

    target: int | None
    reason: str
    forecast: Mapping[tuple[int, float], float] = field(default_factory=dict)


@dataclass(frozen=True)
class DemandModel:
    """Forecaster and settings of one node set."""

    forecaster: Forecaster
    settings: ForecastSettings
    budget: Budget
    notes: tuple[str, ...] = ()

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
        """Read the files of `to_files`. Raises ValueError, with the fault, for any other files."""
        try:
            return _model_of(files)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the demand model cannot be read: {type(error).__name__} {error}") from error


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


def _model_of(files: Mapping[str, str]) -> DemandModel:
    content = parse_json(files[MODEL_FILE].encode())
    if content["format"] != FORMAT:
        raise ValueError(f"the demand model has format {content['format']!r}, expected {FORMAT}")
    fits: dict[Key, QuantileFit] = {}
    for fit in content["fits"]:
        key = (int(fit["horizon"]), _number(fit["quantile"]))
        folders.require_whole(files[_text_name(*key)])
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
    settings = ForecastSettings(**content["settings"])
    if sorted(fits) != sorted(KEYS):
        raise ValueError(f"the demand model has forecasts {sorted(fits)}")
    if not 0 < _number(settings.tail) < 1 or settings.margin < 0 or settings.extra < 0:
        raise ValueError(f"the demand model has {settings}")
    return DemandModel(
        Forecaster(fits, skills, holidays), settings, Budget(**content["budget"]), tuple(content["notes"])
    )


def train_demand(
    series: NodeSeries,
    budget: Budget,
    *,
    seed: int = 0,
    plant: Plant | None = None,
    holidays: Iterable[np.datetime64] = (),
) -> DemandModel:
    """Train on the whole series. Raises ValueError: too little data."""
    return trained_demand(series, steps_of(series), budget, plant or Plant(), seed, frozenset(holidays))[0]


def trained_demand(
    series: NodeSeries, steps: Steps, budget: Budget, plant: Plant, seed: int, holidays: frozenset[np.datetime64],
    first: int | None = None, end: int | None = None,
) -> tuple[DemandModel, list[tuple[int, Forecaster]]]:  # fmt: skip
    """Train on the steps before `end`. Returns the model, and the forecasters of its origins with their first steps.

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
    return DemandModel(final, settings, budget, tuple(notes)), origins


SCHEMA = 1
_PREFIX = "node_set="
"""A node set can be called "..": the name alone names no folder."""
_SET_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FILE_NAME = re.compile(r"(?!meta\.json)[A-Za-z0-9_-]{1,64}\.(json|txt)")


@dataclass(frozen=True)
class TrainedDemand:
    """A demand model, and what it was trained on. since_s, until_s: span of the record, s since 1970.

    selection: what selected the nodes of the set at the training (`selection_of`). drift: alarms found then about the
    versions before.
    """

    version: str
    code_version: str
    trained_s: int
    since_s: int
    until_s: int
    selection: str
    drift: tuple[str, ...]
    model: DemandModel


@dataclass(frozen=True)
class DemandVersion:
    """A version on disk. fault: the reason that it cannot be used, and trained is None then; else ""."""

    name: str
    is_current: bool
    fault: str = ""
    trained: TrainedDemand | None = None


def selection_of(node_set: NodeSet) -> str:
    """Describe the nodes of a set, such as "feature a100, without gpu7"."""
    selector = next((f"{key} {value}" for key, value in asdict(node_set).items()
                     if key in ("nodes", "feature", "partition") and value), "")  # fmt: skip
    return f"{selector}, without {node_set.exclude}" if node_set.exclude else selector


def save_demand(
    models_dir: Path, node_set: NodeSet, model: DemandModel, now_s: int, span_s: tuple[int, int],
    drift: Sequence[str], keep: int,
) -> str:  # fmt: skip
    """Write a new version, make it current, and remove all but the newest `keep`; the version. Raises StoreError.

    span_s: begin and end of the record that it was trained on, s since 1970. drift: alarms about earlier forecasts.
    """
    folder = _folder(models_dir, node_set.name)
    texts = model.to_files()
    meta = {
        "schema": SCHEMA, "code_version": __version__, "trained_s": now_s, "since_s": span_s[0], "until_s": span_s[1],
        "features": feature_names(), "selection": selection_of(node_set), "drift": list(drift),
        "sha256": {name: folders.checksum(text) for name, text in texts.items()},
    }  # fmt: skip
    with _writing(folder):
        version = folders.new_version(now_s, folders.version_names(folder))
        folders.write_version(folder / version, meta, texts)
        folders.switch(folder, version)
        for name in folders.outdated(folders.version_names(folder), keep, version, version):
            shutil.rmtree(folder / name, ignore_errors=True)
    return version


@cache
def feature_names() -> tuple[str, ...]:
    """Return the features that this almanac's forecasts use if pending jobs are known."""
    known = np.zeros(STEP_MIN)
    usable = np.ones(STEP_MIN, dtype=bool)
    series = NodeSeries(np.datetime64("2026-01-01", "m"), known, known + 1, known, usable, queued=known)
    return tuple(features_of(steps_of(series)))


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """The folder of a node set, made if it is not there, with nobody else writing. Raises StoreError."""
    try:
        folders.make_version_folder(folder, 2)
        with locked(folder / ".lock"):
            folders.remove_unfinished(folder)
            yield
    except OSError as error:
        raise StoreError(
            f"{folder}: cannot write the demand model: {error}", "check disk space and permissions"
        ) from error


def load_demand(models_dir: Path, node_set: str) -> TrainedDemand | None:
    """The current version; None if nothing was trained yet. Raises StoreError, SchemaVersionError.

    If it is damaged, the newest whole one, with a warning. `advisor.power.lifecycle.usable_demand` also judges its age.
    """
    folder = _folder(models_dir, node_set)
    return folders.newest_whole(folder, lambda version: _read(folder / version))


def trained_sets(models_dir: Path) -> list[str]:
    """Return the names of the node sets that have versions, also of sets that are no longer configured."""
    found = [path.name.removeprefix(_PREFIX) for path in (models_dir / "demand").glob(f"{_PREFIX}*") if path.is_dir()]
    return sorted(name for name in found if _SET_NAME.fullmatch(name))


def demand_versions(models_dir: Path, node_set: str) -> list[DemandVersion]:
    """List the versions, oldest first. A damaged one is listed with its fault."""
    folder = _folder(models_dir, node_set)
    current = folders.read_current(folder)
    return [_listed(folder / name, name == current) for name in folders.version_names(folder)]


def use_demand(models_dir: Path, node_set: str, version: str) -> None:
    """Make a version current. Raises StoreError if it is not there or cannot be used."""
    folders.require_usable({each.name: each.fault for each in demand_versions(models_dir, node_set)}, version)
    _switch(_folder(models_dir, node_set), version)


def roll_back_demand(models_dir: Path, node_set: str) -> str:
    """Make the newest usable version before the current one current; its name. Raises StoreError if there is none."""
    faults = {each.name: each.fault for each in demand_versions(models_dir, node_set)}
    folder = _folder(models_dir, node_set)
    version = folders.version_before(faults, folders.read_current(folder))
    _switch(folder, version)
    return version


def _switch(folder: Path, version: str) -> None:
    with _writing(folder):
        folders.switch(folder, version)


def _folder(models_dir: Path, node_set: str) -> Path:
    if not _SET_NAME.fullmatch(node_set):
        raise StoreError(f"{node_set[:80]!r} cannot name a node set", "use letters, digits, ., _, and -")
    return models_dir / "demand" / f"{_PREFIX}{node_set}"


def _listed(folder: Path, is_current: bool) -> DemandVersion:
    try:
        return DemandVersion(folder.name, is_current, "", _read(folder))
    except (StoreError, SchemaVersionError) as error:
        return DemandVersion(folder.name, is_current, str(error))


def _read(folder: Path) -> TrainedDemand:
    meta = folders.read_description(folder, SCHEMA)
    try:
        return _trained(folder, meta)
    except folders.GARBLED as error:
        raise folders.garbled(folder, error) from error


def _trained(folder: Path, meta: dict[str, Any]) -> TrainedDemand:
    for name in meta["sha256"]:
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"{name[:40]!r} is not a file of a model")
    if tuple(meta["features"]) != feature_names():
        raise SchemaVersionError(f"{folder}: trained on other features than this almanac computes", folders.RETRAIN)
    texts = {name: folders.read_text(folder / name, expected) for name, expected in meta["sha256"].items()}
    return TrainedDemand(
        version=folder.name,
        code_version=str(meta["code_version"]),
        trained_s=int(meta["trained_s"]),
        since_s=int(meta["since_s"]),
        until_s=int(meta["until_s"]),
        selection=str(meta["selection"]),
        drift=tuple(map(str, meta["drift"])),
        model=DemandModel.from_files(texts),
    )
