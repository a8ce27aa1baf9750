"""Folders of trained versions: data that is read, never code that is run.

<folder>/<version>/   meta.json, and the texts that it names
<folder>/current      the version in use, one line

A version is written to a temporary folder and renamed; `current` is replaced by rename. So a reader sees the old
version or the new one, and never parts of both. Checksums guard the texts and meta.json: LightGBM's parser is not made
for damaged ones. Where the current version is damaged, readers take the newest whole one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from almanac.errors import DamageWarning, SchemaVersionError, StoreError
from almanac.plain_file import read_json, read_plain, with_checksum
from telemetry.store.atomic import hand_over, make_folders, make_inner_folder, opened, write_atomically

VERSION = re.compile(r"\d{8}T\d{6}Z(-\d+)?")
RETRAIN = "run `almanac train`"
GARBLED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading the fields of a damaged meta.json raises."""
_TEMPORARY = ".new-"
_MOST_BYTES = 2**26
_Loaded = TypeVar("_Loaded")

KEEP_VERSIONS = 10
"""Trained versions that a training keeps, for a rollback: ten days of daily training."""


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def new_version(trained_s: int, taken: Iterable[str]) -> str:
    """The time of training as a name, with the next number if a version of that second is taken."""
    base = datetime.fromtimestamp(trained_s, UTC).strftime("%Y%m%dT%H%M%SZ")
    numbers = [in_order(name)[1] for name in taken if in_order(name)[0] == base]
    return f"{base}-{max(numbers) + 1}" if numbers else base


def in_order(version: str) -> tuple[str, int]:
    """Sorts versions by age."""
    base, _, number = version.partition("-")
    return base, int(number or 1)


def version_names(folder: Path) -> list[str]:
    """Oldest first; empty if the folder is not there."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path.name for path in found if VERSION.fullmatch(path.name)), key=in_order)


def make_version_folder(folder: Path, levels: int) -> None:
    """Make a folder of versions and, inside the folder of models, `levels` folders above it. Raises OSError."""
    inner = [folder, *folder.parents][: levels + 1][::-1]
    make_folders(inner[0].parent)
    for each in inner:
        make_inner_folder(each)


def write_version(folder: Path, meta: Mapping[str, object], texts: Mapping[str, str]) -> None:
    """Write one version, a folder that is not there yet; its parent is. texts: by file name. Raises OSError."""
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=folder.parent))
    try:
        with opened(temporary) as handle:
            os.fchmod(handle, 0o750)
            hand_over(handle, folder.parent)
        for name, text in texts.items():
            _write_file(temporary / name, text)
        _write_file(temporary / "meta.json", description(meta))
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove what killed writers left. Only for the one process that holds the folder's lock."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def description(meta: Mapping[str, object]) -> str:
    """Return the text of a meta.json."""
    return with_checksum(json.dumps(meta, indent=1, sort_keys=True)).decode("utf-8")


def _write_file(path: Path, text: str) -> None:
    write_atomically(path, text.encode("utf-8"), is_handed_over=True)


def switch(folder: Path, version: str) -> None:
    """Make a version the current one. Raises StoreError."""
    try:
        _write_file(folder / "current", version + "\n")
    except OSError as error:
        raise StoreError(f"{folder}: cannot switch versions: {error}", "check disk space and permissions") from error


def read_current(folder: Path) -> str | None:
    """None if nothing was trained yet. Raises StoreError."""
    path = folder / "current"
    try:
        version = read_plain(path, _MOST_BYTES).decode("utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}", RETRAIN) from error
    if not VERSION.fullmatch(version):
        raise StoreError(f"{path}: {version[:40]!r} is not a version", RETRAIN)
    return version


def newest_whole(folder: Path, load: Callable[[str], _Loaded]) -> _Loaded | None:
    """Load the current version; None if nothing was trained yet.

    If it is damaged, load the newest whole one and warn. Raises StoreError if there is none, and SchemaVersionError.
    load: of a version by its name; raises StoreError for a damaged one.
    """
    try:
        version = read_current(folder)
        return None if version is None else load(version)
    except SchemaVersionError:
        raise
    except StoreError as error:
        for name in reversed(version_names(folder)):
            try:
                found = load(name)
            except StoreError:
                continue
            warnings.warn(DamageWarning(f"{error}; version {name} is used, {RETRAIN}"), stacklevel=2)
            return found
        raise


def read_description(folder: Path, schema: int) -> dict[str, Any]:
    """meta.json of a version. Raises StoreError, SchemaVersionError."""
    path = folder / "meta.json"
    try:
        meta = read_json(path, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}", RETRAIN) from error
    if not isinstance(meta, dict) or "schema" not in meta:
        raise StoreError(f"{path}: not the description of a trained model", RETRAIN)
    if meta["schema"] != schema:
        raise SchemaVersionError(f"{path}: schema {meta['schema']}, this almanac reads {schema}", RETRAIN)
    return meta


def read_text(path: Path, expected: str | None) -> str:
    """A text of a version, whose checksum is the expected one. Raises StoreError."""
    try:
        text = read_plain(path, _MOST_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}", RETRAIN) from error
    if checksum(text) != expected:
        raise StoreError(f"{path}: damaged: its checksum differs", RETRAIN)
    return text


def garbled(folder: Path, error: Exception) -> StoreError:
    return StoreError(f"{folder}: meta.json has a missing or bad field: {error!r}", RETRAIN)


def require_usable(faults: Mapping[str, str], version: str) -> None:
    """faults: of each version, "" if it can be used. Raises StoreError if this one is not there or cannot be used."""
    if version not in faults:
        known = ", ".join(faults) or "none"
        raise StoreError(f"{version[:40]!r} is not a trained version", f"choose one of: {known}")
    if faults[version]:
        raise StoreError(faults[version], "choose another version, or train again")


def version_before(faults: Mapping[str, str], current: str | None) -> str:
    """The newest usable version before the current one. Raises StoreError if there is none."""
    older = [name for name in faults if not faults[name] and current is not None and in_order(name) < in_order(current)]
    if not older:
        raise StoreError("there is no version to go back to", "see `almanac models`, or train again")
    return max(older, key=in_order)


def outdated(names: Sequence[str], keep: int, current: str | None, trained: str | None) -> list[str]:
    """All but the newest `keep` versions, and never the current one.

    trained: the version that was trained just now. A later one is of a clock that was ahead, and counts as the oldest.
    """
    ordered = sorted(names, key=in_order)
    if trained is not None:
        ordered.sort(key=lambda name: in_order(name) <= in_order(trained))
    return [name for name in ordered[: max(len(ordered) - keep, 0)] if name != current]
