"""Versions of the demand models on disk.

<models>/demand/node_set=<name>/<version>/   meta.json, and the texts of the model (JSON, and LightGBM if it is used)
<models>/demand/node_set=<name>/current      the version in use

One process at a time writes the versions of a node set; readers take no lock.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from advisor import version_folders as folders
from advisor.power.forecast import STEP_MIN, features_of, steps_of
from advisor.power.model import DemandModel
from almanac import __version__
from almanac.atomic import locked
from almanac.config import NodeSet
from almanac.errors import SchemaVersionError, StoreError
from telemetry.power.series import NodeSeries

SCHEMA = 2
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
