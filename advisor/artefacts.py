"""Trained models on disk: data that is read, never code that is run.

<models>/duration/<version>/   meta.json (site means, quantiles, vocabularies, weights, margins, scores), and
                               mean.txt, change.txt, ... (LightGBM's trees, by advisor.duration.model.TREES)
<models>/hbm/<version>/        meta.json (margins of the bounds of GPU memory, host memory, and CPUs; recent waits)
<models>/speed/<version>/      meta.json (speeds of the GPU types), if it has any
<models>/services/<version>/   meta.json (state of the site's own services), if there are any
<models>/duration/current      the version in use of all, one line

advisor.version_folders says how they are written. meta.json names the schema, the program's version, the data's
span and checksums of the models.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from advisor import version_folders as folders
from advisor.backtest import Scores
from advisor.duration.features import NUMBERS
from advisor.duration.model import CATEGORIES, TREES, DurationModel
from advisor.duration.rank import RankChoice
from advisor.duration.rolling import SiteMeans
from advisor.memory.calibration import Calibration
from advisor.service import Learned, Trained
from advisor.types.learning import SpeedTable
from advisor.waits.record import WaitGains
from almanac import __version__
from almanac.errors import SchemaVersionError, StoreError
from almanac.units import json_value

SCHEMA = 5
KINDS = ("duration", "hbm", "speed", "services")


def save(
    trained: Trained, models_dir: Path, own: Mapping[str, Learned] | None = None, speeds: SpeedTable | None = None
) -> str:
    """Write all artefacts as a new version and make it current; the version. Raises StoreError.

    own: the state of the site's own services. speeds: of the site's GPU types.
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
        taken = {name for kind in KINDS for name in folders.version_names(models_dir / kind)}
        version, texts = folders.new_version(trained.trained_s, taken), trained.model.texts if trained.model else {}
        _write(models_dir / "duration" / version, {**meta, **_duration_meta(trained)}, texts)
        calibration = msgspec.to_builtins(trained.calibration, str_keys=True)
        waits = {"calibration": calibration, "recent_waits": msgspec.to_builtins(trained.waits)}
        waits["host"] = msgspec.to_builtins(trained.host, str_keys=True)
        _write(models_dir / "hbm" / version, {**meta, **waits}, {})
        if speeds and speeds.names:
            _write(models_dir / "speed" / version, {**meta, "speeds": speeds.to_json()}, {})
        if own:
            _write(models_dir / "services" / version, {**meta, "services": msgspec.to_builtins(own)}, {})
        folders.switch(models_dir / "duration", version)
    except OSError as error:
        raise StoreError(
            f"{models_dir}: cannot write the trained models: {error}", "check disk space and permissions"
        ) from error
    return version


def load(models_dir: Path) -> Trained | None:
    """The current version; None if nothing was trained yet. Raises StoreError, SchemaVersionError.

    If it is damaged, the newest whole one, with a warning.
    """
    return folders.newest_whole(models_dir / "duration", lambda version: _load(models_dir, version))


def _load(models_dir: Path, version: str) -> Trained:
    folder = models_dir / "duration" / version
    meta = read_meta(folder)
    hbm_meta = read_meta(models_dir / "hbm" / version)
    try:
        return _trained(meta, read_texts(folder, meta), hbm_meta)
    except folders.GARBLED as error:
        raise folders.garbled(folder, error) from error


def load_speeds(models_dir: Path) -> SpeedTable | None:
    """The speeds of the GPU types of the current version, empty if it has none; None if nothing was trained yet.

    Raises StoreError, SchemaVersionError.
    """
    return folders.newest_whole(models_dir / "duration", lambda version: _load_speeds(models_dir / "speed" / version))


def _load_speeds(folder: Path) -> SpeedTable:
    if not folder.is_dir():
        return SpeedTable()
    meta = read_meta(folder)
    try:
        return SpeedTable.from_json(meta["speeds"])
    except folders.GARBLED as error:
        raise folders.garbled(folder, error) from error


def load_learned(models_dir: Path) -> dict[str, Learned]:
    """Return what the site's own services learned in the current version; empty if they did not. Raises StoreError."""
    loaded = folders.newest_whole(models_dir / "duration", lambda name: _load_learned(models_dir / "services" / name))
    return loaded or {}


def _load_learned(folder: Path) -> dict[str, Learned]:
    if not folder.is_dir():
        return {}
    meta = read_meta(folder)
    try:
        return msgspec.convert(meta["services"], dict[str, Learned])
    except folders.GARBLED as error:
        raise folders.garbled(folder, error) from error


def _duration_meta(trained: Trained) -> dict[str, object]:
    return {
        "features": [*NUMBERS, *CATEGORIES],
        "site": trained.site.to_json(),
        "gpu_time_quantiles_s": list(trained.gpu_time_quantiles_s),
        "model": _model_meta(trained.model) if trained.model else None,
        "rank": msgspec.to_builtins(trained.rank),
        "scores": json_value(trained.scores),
    }


def _model_meta(model: DurationModel) -> dict[str, object]:
    meta: dict[str, Any] = msgspec.to_builtins(model)
    texts = meta.pop("texts")
    return {**meta, "sha256": {name: folders.checksum(text) for name, text in texts.items()}}


def _model(meta: Mapping[str, Any], texts: Mapping[str, str]) -> DurationModel:
    return msgspec.convert({**meta, "texts": texts}, DurationModel)


def _trained(meta: Mapping[str, Any], texts: Mapping[str, str], hbm_meta: Mapping[str, Any]) -> Trained:
    return Trained(
        trained_s=int(meta["trained_s"]),
        jobs=int(meta["jobs"]),
        since_s=meta["since_s"],
        until_s=meta["until_s"],
        site=SiteMeans.from_json(meta["site"]),
        model=_model(meta["model"], texts) if texts else None,
        gpu_time_quantiles_s=tuple(map(float, meta["gpu_time_quantiles_s"])),
        calibration=msgspec.convert(hbm_meta["calibration"], Calibration, str_keys=True),
        scores={str(name): read_scores(values) for name, values in meta["scores"].items()},
        waits=msgspec.convert(hbm_meta.get("recent_waits", {}), WaitGains),
        host=msgspec.convert(hbm_meta.get("host", {}), dict[str, Calibration], str_keys=True),
        rank=msgspec.convert(meta.get("rank"), RankChoice | None),
    )


def read_scores(values: Mapping[str, float | None]) -> Scores:
    known = {name: math.nan if value is None else value for name, value in values.items()}
    return Scores(int(known.pop("jobs")), **known)


def _write(folder: Path, meta: Mapping[str, object], texts: Mapping[str, str]) -> None:
    folders.make_version_folder(folder.parent, 1)
    folders.write_version(folder, meta, {f"{name}.txt": text for name, text in texts.items()})


def current_version(models_dir: Path) -> str | None:
    """The name of the version in use; None if nothing was trained yet. Raises StoreError."""
    return folders.read_current(models_dir / "duration")


def read_meta(folder: Path) -> dict[str, Any]:
    meta = folders.read_description(folder, SCHEMA)
    if meta.get("features", [*NUMBERS, *CATEGORIES]) != [*NUMBERS, *CATEGORIES]:
        raise SchemaVersionError(f"{folder}: trained on other features than this almanac computes", folders.RETRAIN)
    return meta


def read_texts(folder: Path, meta: Mapping[str, Any]) -> dict[str, str]:
    """Read the texts of the model; none if no model was trained. Raises StoreError for texts unfit for LightGBM."""
    if meta.get("model") is None:
        return {}
    texts = {name: folders.read_text(folder / f"{name}.txt", meta["model"]["sha256"].get(name)) for name in TREES}
    for name, text in texts.items():
        try:
            folders.require_whole(text, [*NUMBERS, *CATEGORIES])
        except ValueError as error:
            raise StoreError(f"{folder}/{name}.txt: {error}", folders.RETRAIN) from error
    return texts


@dataclass(frozen=True)
class Version:
    """The content of a trained version's meta.json. fault: the reason why the rest is unknown, else ""."""

    name: str
    is_current: bool
    fault: str = ""
    code_version: str = ""
    jobs: int = 0
    since_s: int | None = None
    until_s: int | None = None
    scores: Mapping[str, Scores] = field(default_factory=dict)


def versions(models_dir: Path) -> list[Version]:
    """List the trained versions, oldest first."""
    current = current_version(models_dir)
    return [_version(models_dir, name, name == current) for name in folders.version_names(models_dir / "duration")]


def _version(models_dir: Path, name: str, is_current: bool) -> Version:
    try:
        meta = read_meta(models_dir / "duration" / name)
        read_texts(models_dir / "duration" / name, meta)
        read_meta(models_dir / "hbm" / name)
        scores = {str(key): read_scores(values) for key, values in meta["scores"].items()}
        return Version(
            name, is_current, "", str(meta["code_version"]), int(meta["jobs"]), meta["since_s"], meta["until_s"], scores
        )
    except (StoreError, SchemaVersionError) as error:
        return Version(name, is_current, str(error))
    except folders.GARBLED as error:
        return Version(name, is_current, f"meta.json lacks or garbles a field: {error!r}")


def use(models_dir: Path, name: str) -> None:
    """Make a version current. Raises StoreError if it is not there or cannot be used."""
    folders.require_usable(_faults(models_dir), name)
    folders.switch(models_dir / "duration", name)


def roll_back(models_dir: Path) -> str:
    """Make the newest usable version before the current one current; its name. Raises StoreError without one."""
    version = folders.version_before(_faults(models_dir), current_version(models_dir))
    folders.switch(models_dir / "duration", version)
    return version


def _faults(models_dir: Path) -> dict[str, str]:
    return {version.name: version.fault for version in versions(models_dir)}


def prune(models_dir: Path, keep: int, trained: str | None = None) -> list[str]:
    """Remove all but the newest `keep` versions, and never the current one; the names of those removed.

    trained: the version that was trained just now.
    """
    names = folders.version_names(models_dir / "duration")
    removed = folders.outdated(names, keep, current_version(models_dir), trained)
    for name in removed:
        for kind in KINDS:
            shutil.rmtree(models_dir / kind / name, ignore_errors=True)
    return removed
