"""The trained versions on disk: which there are, which one is used, going back, and clearing away old ones."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from advisor.artefacts import KINDS, current_version, read_meta, read_scores, read_texts
from advisor.evaluation.scores import Scores
from advisor.version_folders import outdated, require_usable, switch, version_before, version_names
from almanac.errors import SchemaVersionError, StoreError


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
    return [_version(models_dir, name, name == current) for name in version_names(models_dir / "duration")]


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
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Version(name, is_current, f"meta.json lacks or garbles a field: {error!r}")


def use(models_dir: Path, name: str) -> None:
    """Makes a version current. Raises StoreError where it is not there or cannot be used."""
    require_usable(_faults(models_dir), name)
    switch(models_dir / "duration", name)


def roll_back(models_dir: Path) -> str:
    """Makes the newest usable version before the current one current; its name. Raises StoreError without one."""
    version = version_before(_faults(models_dir), current_version(models_dir))
    switch(models_dir / "duration", version)
    return version


def _faults(models_dir: Path) -> dict[str, str]:
    return {version.name: version.fault for version in versions(models_dir)}


def prune(models_dir: Path, keep: int, trained: str | None = None) -> list[str]:
    """Removes all but the newest `keep` versions, and never the current one; the names of those removed.

    trained: the version that was trained just now.
    """
    names = version_names(models_dir / "duration")
    removed = outdated(names, keep, current_version(models_dir), trained)
    for name in removed:
        for kind in KINDS:
            shutil.rmtree(models_dir / kind / name, ignore_errors=True)
    return removed
