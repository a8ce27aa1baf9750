"""Trained models on disk: data that is read, never code that is run.

<models>/duration/<version>/   meta.json (site means, quantiles, vocabularies, weights, margins, scores), and
                               mean.txt, change.txt, middle.txt (LightGBM)
<models>/hbm/<version>/        meta.json (calibration scores)
<models>/duration/current      the version in use of both, one line

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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from advisor.features import NUMBERS
from advisor.models.duration import TREES, DurationModel, Weights
from advisor.models.hbm import Calibration
from advisor.models.rolling import SiteMeans
from advisor.models.trees import CATEGORIES
from advisor.scores import Scores
from advisor.service import Trained
from almanac import __version__
from almanac.errors import SchemaVersionError, StoreError

SCHEMA = 2
_VERSION = re.compile(r"\d{8}T\d{6}Z(-\d+)?")
_RETRAIN = "run `almanac train`"


def save(trained: Trained, models_dir: Path) -> str:
    """Writes both artefacts as a new version and makes it current; the version. Raises StoreError."""
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
        scores = {name: list(values) for name, values in trained.calibration.scores.items()}
        _write(models_dir / "hbm" / version, {**meta, "calibration": scores}, {})
        _switch(models_dir / "duration", version)
    except OSError as error:
        raise StoreError(f"{models_dir}: cannot write the trained models: {error}", "check space and rights") from error
    return version


def load(models_dir: Path) -> Trained | None:
    """The current version; None where nothing was trained yet. Raises StoreError, SchemaVersionError."""
    version = current_version(models_dir)
    if version is None:
        return None
    folder = models_dir / "duration" / version
    meta = _read_meta(folder)
    calibration = _read_meta(models_dir / "hbm" / version).get("calibration", {})
    try:
        return _trained(meta, _read_texts(folder, meta), calibration)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
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


def _trained(meta: Mapping[str, Any], texts: Mapping[str, str], calibration: Mapping[str, Any]) -> Trained:
    return Trained(
        trained_s=int(meta["trained_s"]),
        jobs=int(meta["jobs"]),
        since_s=meta["since_s"],
        until_s=meta["until_s"],
        site=SiteMeans.from_json(meta["site"]),
        model=_model(meta["model"], texts) if texts else None,
        gpu_time_quantiles_s=tuple(map(float, meta["gpu_time_quantiles_s"])),
        calibration=Calibration({str(name): tuple(map(float, values)) for name, values in calibration.items()}),
        scores={str(name): _scores(values) for name, values in meta["scores"].items()},
    )


def _scores(values: Mapping[str, float | None]) -> Scores:
    known = {name: math.nan if value is None else value for name, value in values.items()}
    return Scores(int(known.pop("jobs")), **known)


def _new_version(models_dir: Path, trained_s: int) -> str:
    """The time of training, with a number where that version is there already."""
    base = datetime.fromtimestamp(trained_s, UTC).strftime("%Y%m%dT%H%M%SZ")
    version, number = base, 1
    while any((models_dir / name / version).exists() for name in ("duration", "hbm")):
        number += 1
        version = f"{base}-{number}"
    return version


def _write(folder: Path, meta: Mapping[str, object], texts: Mapping[str, str]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        temporary.chmod(0o750)
        for name, text in texts.items():
            _write_file(temporary / f"{name}.txt", text)
        _write_file(temporary / "meta.json", json.dumps(meta, indent=1, sort_keys=True) + "\n")
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_file(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _switch(folder: Path, version: str) -> None:
    temporary = folder / f".current-{os.getpid()}"
    _write_file(temporary, version + "\n")
    temporary.replace(folder / "current")


def current_version(models_dir: Path) -> str | None:
    """None where nothing was trained yet. Raises StoreError."""
    path = models_dir / "duration" / "current"
    try:
        version = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: cannot be read: {error}", _RETRAIN) from error
    if not _VERSION.fullmatch(version):
        raise StoreError(f"{path}: {version[:40]!r} is not a version", _RETRAIN)
    return version


@dataclass(frozen=True)
class Version:
    """What meta.json says of a trained version. fault: why it cannot be used, else ""; then the rest is unknown."""

    name: str
    is_current: bool
    fault: str = ""
    code_version: str = ""
    jobs: int = 0
    since_s: int | None = None
    until_s: int | None = None
    scores: Mapping[str, Scores] = field(default_factory=dict)


def versions(models_dir: Path) -> list[Version]:
    """Oldest first; empty where nothing was trained yet."""
    current = current_version(models_dir)
    folder = models_dir / "duration"
    names = [path.name for path in folder.iterdir() if _VERSION.fullmatch(path.name)] if folder.is_dir() else []
    return [_version(models_dir, name, name == current) for name in sorted(names, key=_in_order)]


def _in_order(version: str) -> tuple[str, int]:
    base, _, number = version.partition("-")
    return base, int(number or 1)


def _version(models_dir: Path, name: str, is_current: bool) -> Version:
    try:
        meta = _read_meta(models_dir / "duration" / name)
        _read_texts(models_dir / "duration" / name, meta)
        _read_meta(models_dir / "hbm" / name)
        scores = {str(key): _scores(values) for key, values in meta["scores"].items()}
        return Version(
            name, is_current, "", str(meta["code_version"]), int(meta["jobs"]), meta["since_s"], meta["until_s"], scores
        )
    except (StoreError, SchemaVersionError) as error:
        return Version(name, is_current, str(error))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Version(name, is_current, f"meta.json lacks or garbles a field: {error!r}")


def use(models_dir: Path, name: str) -> None:
    """Makes a version current. Raises StoreError where it is not there or cannot be used."""
    found = {version.name: version for version in versions(models_dir)}
    if name not in found:
        raise StoreError(f"{name[:40]!r} is no trained version", f"choose one of: {', '.join(found) or 'none'}")
    if found[name].fault:
        raise StoreError(found[name].fault, "choose another version, or train anew")
    _switch_to(models_dir, name)


def roll_back(models_dir: Path) -> str:
    """Makes the newest usable version before the current one current; its name. Raises StoreError without one."""
    current = current_version(models_dir)
    usable = [each.name for each in versions(models_dir) if not each.fault]
    older = [name for name in usable if current is not None and _in_order(name) < _in_order(current)]
    if not older:
        raise StoreError("there is no version to go back to", "see `almanac models`, or train anew")
    _switch_to(models_dir, older[-1])
    return older[-1]


def prune(models_dir: Path, keep: int) -> list[str]:
    """Removes all but the newest `keep` versions, and never the current one; the names of those removed."""
    current = current_version(models_dir)
    names = [each.name for each in versions(models_dir)]
    removed = [name for name in names[: max(len(names) - keep, 0)] if name != current]
    for name in removed:
        for kind in ("duration", "hbm"):
            shutil.rmtree(models_dir / kind / name, ignore_errors=True)
    return removed


def _switch_to(models_dir: Path, version: str) -> None:
    try:
        _switch(models_dir / "duration", version)
    except OSError as error:
        raise StoreError(f"{models_dir}: cannot switch versions: {error}", "check space and rights") from error


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}", _RETRAIN) from error
    if not isinstance(meta, dict) or "schema" not in meta:
        raise StoreError(f"{path}: not the description of a trained model", _RETRAIN)
    if meta["schema"] != SCHEMA:
        raise SchemaVersionError(f"{path}: schema {meta['schema']}, this almanac reads {SCHEMA}", _RETRAIN)
    if meta.get("features", [*NUMBERS, *CATEGORIES]) != [*NUMBERS, *CATEGORIES]:
        raise SchemaVersionError(f"{path}: trained on other features than this almanac computes", _RETRAIN)
    return meta


def _read_texts(folder: Path, meta: Mapping[str, Any]) -> dict[str, str]:
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
