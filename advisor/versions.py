"""The trained versions on disk: which there are, which one is used, going back, and clearing away old ones."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from advisor.artefacts import KINDS, VERSION, current_version, read_meta, read_scores, read_texts, switch
from advisor.scores import Scores
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
    folder = models_dir / "duration"
    names = [path.name for path in folder.iterdir() if VERSION.fullmatch(path.name)] if folder.is_dir() else []
    return [_version(models_dir, name, name == current) for name in sorted(names, key=_in_order)]


def _in_order(version: str) -> tuple[str, int]:
    base, _, number = version.partition("-")
    return base, int(number or 1)


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


def prune(models_dir: Path, keep: int, trained: str | None = None) -> list[str]:
    """Removes all but the newest `keep` versions, and never the current one; the names of those removed.

    trained: the version that was trained just now. A later one is of a clock that was ahead, and counts as the oldest.
    """
    current = current_version(models_dir)
    names = [each.name for each in versions(models_dir)]
    if trained is not None:
        names.sort(key=lambda name: _in_order(name) <= _in_order(trained))
    removed = [name for name in names[: max(len(names) - keep, 0)] if name != current]
    for name in removed:
        for kind in KINDS:
            shutil.rmtree(models_dir / kind / name, ignore_errors=True)
    return removed


def _switch_to(models_dir: Path, version: str) -> None:
    try:
        switch(models_dir / "duration", version)
    except OSError as error:
        raise StoreError(f"{models_dir}: cannot switch versions: {error}", "check space and rights") from error
