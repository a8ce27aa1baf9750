"""Trained models on disk: data that is read, never code that is run.

<models>/duration/<version>/   meta.json (site means, quantiles, vocabularies, weights, margins, scores), and
                               mean.txt, change.txt, middle.txt (LightGBM)
<models>/hbm/<version>/        meta.json (margins of the memory bound, recent waits)
<models>/speed/<version>/      meta.json (speeds of the GPU types), where it has any
<models>/services/<version>/   meta.json (what the site's own services learned), where it names any
<models>/duration/current      the version in use of all, one line

advisor.version_folders says how they are written. meta.json names the schema, the program's version, the data's
span and checksums of the models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, cast

from advisor.duration.blend import Weights
from advisor.duration.features import NUMBERS
from advisor.duration.model import TREES, DurationModel, Unseen
from advisor.duration.rank_scale import PREDICTED_AS_IT_IS, RankScale
from advisor.duration.rolling import SiteMeans
from advisor.duration.trees import CATEGORIES
from advisor.duration.waits import WaitQuartiles
from advisor.evaluation.scores import Scores
from advisor.memory.calibration import Calibration, Margins
from advisor.service import Trained
from advisor.services.base import Learned
from advisor.speed.learning import SpeedTable
from advisor.tree_text import require_whole
from advisor.version_folders import (
    GARBLED,
    RETRAIN,
    checksum,
    garbled,
    make_version_folder,
    new_version,
    newest_whole,
    read_current,
    read_description,
    read_text,
    switch,
    version_names,
    write_version,
)
from almanac import __version__
from almanac.config import Predictor
from almanac.errors import SchemaVersionError, StoreError

SCHEMA = 4
KINDS = ("duration", "hbm", "speed", "services")


def save(trained: Trained, models_dir: Path, own: Mapping[str, Learned] | None = None) -> str:
    """Writes all artefacts as a new version and makes it current; the version. Raises StoreError.

    own: what the site's own services learned.
    """
    meta = {
        "schema": SCHEMA,
        "code_version": __version__,
        "trained_s": trained.trained_s,
        "jobs": trained.jobs,
        "since_s": trained.since_s,
        "until_s": trained.until_s,
    }
    try:
        taken = {name for kind in KINDS for name in version_names(models_dir / kind)}
        version = new_version(trained.trained_s, taken)
        _write(models_dir / "duration" / version, {**meta, **_duration_meta(trained)}, _texts(trained))
        calibration = {
            "risk": trained.calibration.risk,
            "margins": {name: list(pair) for name, pair in trained.calibration.margins.items()},
            "shared": {str(jobs): dict(margins) for jobs, margins in trained.calibration.shared.items()},
        }
        waits = {name: list(values) for name, values in trained.waits.table.items()}
        _write(models_dir / "hbm" / version, {**meta, "calibration": calibration, "waits": waits}, {})
        if trained.speeds.names:
            _write(models_dir / "speed" / version, {**meta, "speeds": trained.speeds.to_json()}, {})
        if own:
            services = {name: asdict(learned) for name, learned in own.items()}
            _write(models_dir / "services" / version, {**meta, "services": services}, {})
        switch(models_dir / "duration", version)
    except OSError as error:
        raise StoreError(
            f"{models_dir}: cannot write the trained models: {error}", "check disk space and permissions"
        ) from error
    return version


def load(models_dir: Path) -> Trained | None:
    """The current version; None where nothing was trained yet. Raises StoreError, SchemaVersionError.

    If it is damaged, the newest whole one, with a warning.
    """
    return newest_whole(models_dir / "duration", lambda version: _load(models_dir, version))


def _load(models_dir: Path, version: str) -> Trained:
    folder = models_dir / "duration" / version
    meta = read_meta(folder)
    hbm_meta = read_meta(models_dir / "hbm" / version)
    speed_folder = models_dir / "speed" / version
    speed_meta = read_meta(speed_folder) if speed_folder.is_dir() else None
    try:
        return _trained(meta, read_texts(folder, meta), hbm_meta, speed_meta)
    except GARBLED as error:
        raise garbled(folder, error) from error


def load_speeds(models_dir: Path) -> SpeedTable | None:
    """The speeds of the GPU types of the current version, empty if it has none; None where nothing was trained yet.

    Raises StoreError, SchemaVersionError.
    """
    return newest_whole(models_dir / "duration", lambda version: _load_speeds(models_dir / "speed" / version))


def _load_speeds(folder: Path) -> SpeedTable:
    if not folder.is_dir():
        return SpeedTable()
    meta = read_meta(folder)
    try:
        return SpeedTable.from_json(meta["speeds"])
    except GARBLED as error:
        raise garbled(folder, error) from error


def load_learned(models_dir: Path) -> dict[str, Learned]:
    """What the site's own services learned in the current version; empty where they did not. Raises StoreError."""
    folders = models_dir / "services"
    return newest_whole(models_dir / "duration", lambda version: _load_learned(folders / version)) or {}


def _load_learned(folder: Path) -> dict[str, Learned]:
    if not folder.is_dir():
        return {}
    meta = read_meta(folder)
    try:
        return {str(name): Learned(int(each["updated_s"]), each["artefact"]) for name, each in meta["services"].items()}
    except GARBLED as error:
        raise garbled(folder, error) from error


def _texts(trained: Trained) -> Mapping[str, str]:
    return trained.model.texts if trained.model else {}


def _duration_meta(trained: Trained) -> dict[str, object]:
    return {
        "features": [*NUMBERS, *CATEGORIES],
        "site": trained.site.to_json(),
        "gpu_time_quantiles_s": list(trained.gpu_time_quantiles_s),
        "model": _model_meta(trained.model) if trained.model else None,
        "scores": {name: _without_nan(asdict(scores)) for name, scores in trained.scores.items()},
    }


def _model_meta(model: DurationModel) -> dict[str, object]:
    return {
        "predictor": model.predictor,
        "sha256": {name: checksum(text) for name, text in model.texts.items()},
        "vocabularies": {name: list(values) for name, values in model.vocabularies.items()},
        "habit_s": model.habit_s,
        "weights": asdict(model.weights),
        "rank_weights": asdict(model.rank_weights),
        "rank_scale": asdict(model.rank_scale),
        "coverage": model.coverage,
        "margins": {name: list(pair) for name, pair in model.margins.items()},
        "trained_s": model.trained_s,
        "unseen": [astuple(each) for each in model.unseen],
    }


def _model(meta: Mapping[str, Any], texts: Mapping[str, str]) -> DurationModel:
    return DurationModel(
        predictor=cast(Predictor, str(meta["predictor"])),
        texts=texts,
        vocabularies={str(name): tuple(map(str, values)) for name, values in meta["vocabularies"].items()},
        habit_s=float(meta["habit_s"]),
        weights=_weights(meta["weights"]),
        rank_weights=_weights(meta["rank_weights"]),
        # A version of an older almanac ranked by the predicted run time as it is.
        rank_scale=_rank_scale(meta["rank_scale"]) if "rank_scale" in meta else PREDICTED_AS_IT_IS,
        coverage=float(meta["coverage"]),
        margins={str(name): (float(low), float(high)) for name, (low, high) in meta["margins"].items()},
        # A version of an older almanac has neither: the next training is then as the first one.
        trained_s=int(meta.get("trained_s", 0)),
        unseen=tuple(Unseen(int(a), int(b), float(c), float(d)) for a, b, c, d in meta.get("unseen", ())),
    )


def _weights(values: Mapping[str, float]) -> Weights:
    return Weights(**{name: float(value) for name, value in values.items()})


def _rank_scale(values: Mapping[str, float]) -> RankScale:
    return RankScale(**{name: float(value) for name, value in values.items()})


def _without_nan(values: Mapping[str, float]) -> dict[str, float | None]:
    """NaN is not JSON: null stands for it."""
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def _trained(
    meta: Mapping[str, Any],
    texts: Mapping[str, str],
    hbm_meta: Mapping[str, Any],
    speed_meta: Mapping[str, Any] | None,
) -> Trained:
    """speed_meta: None of a version without speeds, such as one of an older almanac."""
    return Trained(
        trained_s=int(meta["trained_s"]),
        jobs=int(meta["jobs"]),
        since_s=meta["since_s"],
        until_s=meta["until_s"],
        site=SiteMeans.from_json(meta["site"]),
        model=_model(meta["model"], texts) if texts else None,
        gpu_time_quantiles_s=tuple(map(float, meta["gpu_time_quantiles_s"])),
        calibration=_calibration(hbm_meta["calibration"]),
        scores={str(name): read_scores(values) for name, values in meta["scores"].items()},
        waits=WaitQuartiles({str(name): _wait(values) for name, values in hbm_meta["waits"].items()}),
        speeds=SpeedTable.from_json(speed_meta["speeds"]) if speed_meta else SpeedTable(),
    )


def _calibration(data: Mapping[str, Any]) -> Calibration:
    margins = {str(name): Margins(*map(_number, pair)) for name, pair in data["margins"].items()}
    # A version of an older almanac has no bounds for jobs that share a GPU.
    shared = {
        int(jobs): {str(name): float(margin) for name, margin in each.items()}
        for jobs, each in data.get("shared", {}).items()
    }
    return Calibration(float(data["risk"]), margins, shared)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _wait(values: Sequence[Any]) -> tuple[int, float, float, float]:
    jobs, median_s, low_s, high_s = values
    return int(jobs), float(median_s), float(low_s), float(high_s)


def read_scores(values: Mapping[str, float | None]) -> Scores:
    known = {name: math.nan if value is None else value for name, value in values.items()}
    return Scores(int(known.pop("jobs")), **known)


def _write(folder: Path, meta: Mapping[str, object], texts: Mapping[str, str]) -> None:
    make_version_folder(folder.parent, 1)
    write_version(folder, meta, {f"{name}.txt": text for name, text in texts.items()})


def current_version(models_dir: Path) -> str | None:
    """None where nothing was trained yet. Raises StoreError."""
    return read_current(models_dir / "duration")


def read_meta(folder: Path) -> dict[str, Any]:
    meta = read_description(folder, SCHEMA)
    if meta.get("features", [*NUMBERS, *CATEGORIES]) != [*NUMBERS, *CATEGORIES]:
        raise SchemaVersionError(f"{folder}: trained on other features than this almanac computes", RETRAIN)
    return meta


def read_texts(folder: Path, meta: Mapping[str, Any]) -> dict[str, str]:
    """Empty where no model was trained. Raises StoreError for texts that LightGBM cannot take."""
    if meta.get("model") is None:
        return {}
    texts = {name: read_text(folder / f"{name}.txt", meta["model"]["sha256"].get(name)) for name in TREES}
    for name, text in texts.items():
        try:
            require_whole(text, [*NUMBERS, *CATEGORIES])
        except ValueError as error:
            raise StoreError(f"{folder}/{name}.txt: {error}", RETRAIN) from error
    return texts
