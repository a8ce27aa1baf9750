"""Trained models on disk: data that is read, never code that is run.

<models>/duration/<version>/   meta.json (site means, quantiles, vocabularies, weights, margins, scores), and
                               mean.txt, change.txt, middle.txt (LightGBM)
<models>/hbm/<version>/        meta.json (margins of the memory bound, recent waits)
<models>/services/<version>/   meta.json (what the site's own services learned), where it names any
<models>/duration/current      the version in use of all, one line

A version is written to a temporary folder and renamed; `current` is replaced by rename, so that a reader sees the
old version or the new one, and never parts of both. meta.json names the schema, the program's version, the data's
span and checksums of the models: LightGBM's parser is not made for damaged text.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from advisor.features import NUMBERS
from advisor.models.calibration import Calibration
from advisor.models.duration import TREES, DurationModel, Weights
from advisor.models.rolling import SiteMeans
from advisor.models.trees import CATEGORIES
from advisor.models.waits import Waits
from advisor.scores import Scores
from advisor.service import Trained
from advisor.services.base import Learned
from almanac import __version__
from almanac.errors import SchemaVersionError, StoreError
from telemetry.atomic import hand_over, make_folders, make_inner_folder, opened, write_atomically

SCHEMA = 2
KINDS = ("duration", "hbm", "services")
VERSION = re.compile(r"\d{8}T\d{6}Z(-\d+)?")
_RETRAIN = "run `almanac train`"


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
        version = _new_version(models_dir, trained.trained_s)
        _write(models_dir / "duration" / version, {**meta, **_duration_meta(trained)}, _texts(trained))
        calibration = {"risk": trained.calibration.risk, "margins": dict(trained.calibration.margins)}
        waits = {name: list(values) for name, values in trained.waits.table.items()}
        _write(models_dir / "hbm" / version, {**meta, "calibration": calibration, "waits": waits}, {})
        if own:
            services = {name: asdict(learned) for name, learned in own.items()}
            _write(models_dir / "services" / version, {**meta, "services": services}, {})
        switch(models_dir / "duration", version)
    except OSError as error:
        raise StoreError(f"{models_dir}: cannot write the trained models: {error}", "check space and rights") from error
    return version


def load(models_dir: Path) -> Trained | None:
    """The current version; None where nothing was trained yet. Raises StoreError, SchemaVersionError."""
    version = current_version(models_dir)
    if version is None:
        return None
    folder = models_dir / "duration" / version
    meta = read_meta(folder)
    hbm_meta = read_meta(models_dir / "hbm" / version)
    try:
        return _trained(meta, read_texts(folder, meta), hbm_meta)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise StoreError(f"{folder}: meta.json lacks or garbles a field: {error!r}", _RETRAIN) from error


def load_learned(models_dir: Path) -> dict[str, Learned]:
    """What the site's own services learned in the current version; empty where they did not. Raises StoreError."""
    version = current_version(models_dir)
    folder = models_dir / "services" / (version or "")
    if version is None or not folder.is_dir():
        return {}
    meta = read_meta(folder)
    try:
        return {str(name): Learned(int(each["updated_s"]), each["artefact"]) for name, each in meta["services"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise StoreError(f"{folder}: meta.json lacks or garbles a field: {error!r}", _RETRAIN) from error


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
        "sha256": {name: _checksum(text) for name, text in model.texts.items()},
        "vocabularies": {name: list(values) for name, values in model.vocabularies.items()},
        "habit_s": model.habit_s,
        "weights": asdict(model.weights),
        "rank_weights": asdict(model.rank_weights),
        "coverage": model.coverage,
        "margins": {name: list(pair) for name, pair in model.margins.items()},
    }


def _model(meta: Mapping[str, Any], texts: Mapping[str, str]) -> DurationModel:
    return DurationModel(
        predictor=str(meta["predictor"]),
        texts=texts,
        vocabularies={str(name): tuple(map(str, values)) for name, values in meta["vocabularies"].items()},
        habit_s=float(meta["habit_s"]),
        weights=_weights(meta["weights"]),
        rank_weights=_weights(meta["rank_weights"]),
        coverage=float(meta["coverage"]),
        margins={str(name): (float(low), float(high)) for name, (low, high) in meta["margins"].items()},
    )


def _weights(values: Mapping[str, float]) -> Weights:
    return Weights(**{name: float(value) for name, value in values.items()})


def _without_nan(values: Mapping[str, float]) -> dict[str, float | None]:
    """NaN is not JSON: null stands for it."""
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def _trained(meta: Mapping[str, Any], texts: Mapping[str, str], hbm_meta: Mapping[str, Any]) -> Trained:
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
        waits=Waits({str(name): _wait(values) for name, values in hbm_meta["waits"].items()}),
    )


def _calibration(data: Mapping[str, Any]) -> Calibration:
    margins = {str(name): float(margin) for name, margin in data["margins"].items()}
    return Calibration(float(data["risk"]), margins)


def _wait(values: Sequence[Any]) -> tuple[int, float, float, float]:
    jobs, median_s, low_s, high_s = values
    return int(jobs), float(median_s), float(low_s), float(high_s)


def read_scores(values: Mapping[str, float | None]) -> Scores:
    known = {name: math.nan if value is None else value for name, value in values.items()}
    return Scores(int(known.pop("jobs")), **known)


def _new_version(models_dir: Path, trained_s: int) -> str:
    """The time of training, with a number where that version is there already."""
    base = datetime.fromtimestamp(trained_s, UTC).strftime("%Y%m%dT%H%M%SZ")
    version, number = base, 1
    while any((models_dir / name / version).exists() for name in KINDS):
        number += 1
        version = f"{base}-{number}"
    return version


def _write(folder: Path, meta: Mapping[str, object], texts: Mapping[str, str]) -> None:
    make_folders(folder.parents[2])
    for inner in (folder.parents[1], folder.parent):
        make_inner_folder(inner)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        with opened(temporary) as handle:
            os.fchmod(handle, 0o750)
            hand_over(handle, folder.parent)
        for name, text in texts.items():
            _write_file(temporary / f"{name}.txt", text)
        _write_file(temporary / "meta.json", json.dumps(meta, indent=1, sort_keys=True) + "\n")
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_file(path: Path, text: str) -> None:
    write_atomically(path, text.encode("utf-8"), is_handed_over=True)


def switch(folder: Path, version: str) -> None:
    """Make a version the current one. Raises OSError."""
    _write_file(folder / "current", version + "\n")


def current_version(models_dir: Path) -> str | None:
    """None where nothing was trained yet. Raises StoreError."""
    path = models_dir / "duration" / "current"
    try:
        version = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: cannot be read: {error}", _RETRAIN) from error
    if not VERSION.fullmatch(version):
        raise StoreError(f"{path}: {version[:40]!r} is not a version", _RETRAIN)
    return version


def read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path}: cannot be read: {error}", _RETRAIN) from error
    if not isinstance(meta, dict) or "schema" not in meta:
        raise StoreError(f"{path}: not the description of a trained model", _RETRAIN)
    if meta["schema"] != SCHEMA:
        raise SchemaVersionError(f"{path}: schema {meta['schema']}, this almanac reads {SCHEMA}", _RETRAIN)
    if meta.get("features", [*NUMBERS, *CATEGORIES]) != [*NUMBERS, *CATEGORIES]:
        raise SchemaVersionError(f"{path}: trained on other features than this almanac computes", _RETRAIN)
    return meta


def read_texts(folder: Path, meta: Mapping[str, Any]) -> dict[str, str]:
    """Empty where no model was trained."""
    if meta.get("model") is None:
        return {}
    texts = {}
    for name in TREES:
        path = folder / f"{name}.txt"
        try:
            texts[name] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"{path}: cannot be read: {error}", _RETRAIN) from error
        if _checksum(texts[name]) != meta["model"]["sha256"].get(name):
            raise StoreError(f"{path}: damaged: it is not the text that was written", _RETRAIN)
    return texts


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
