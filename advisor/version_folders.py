"""Folders of trained versions: data that is read, never code that is run.

<folder>/<version>/   meta.json, and the texts that it names
<folder>/current      the version in use, one line

A version is written to a temporary folder and renamed; `current` is replaced by rename. So a reader sees the old
version or the new one, and never parts of both. Checksums guard the texts and meta.json: LightGBM's parser is not made
for damaged ones. Where the current version is damaged, readers take the newest whole one.

LightGBM's text of a model is checked before LightGBM parses it: a bad child index ends or hangs its process.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from almanac.atomic import hand_over, make_folders, make_inner_folder, opened, write_atomically
from almanac.errors import DamageWarning, SchemaVersionError, StoreError
from almanac.files import read_json, read_plain, with_checksum

VERSION = re.compile(r"\d{8}T\d{6}Z(-\d+)?")
RETRAIN = "run `almanac train`"
GARBLED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, msgspec.ValidationError)
"""Errors from reading the fields of a damaged meta.json."""
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
    """Return the version in use; None if nothing was trained yet. Raises StoreError."""
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
    """Read a version's meta.json. Raises StoreError, SchemaVersionError."""
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
    """Check that a version can be used. faults: by version, "" for a usable one. Raises StoreError if not usable."""
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


_END = "end of trees\n"
_MOST_LEAVES = 4096
_MOST_VALUE = 1e9
"""No leaf of a logarithm, or of a demand in units of its volatility, comes near it, and no sum of them overflows."""
_INTEGER = r"-?\d{1,19}"
_FLOAT = r"-?(?:inf|(?:0|[1-9]\d{0,39})(?:\.\d{1,40})?(?:e[+-]?\d{1,3})?)"
_INFO = rf"(?:none|\[{_FLOAT}:{_FLOAT}\]|{_INTEGER}(?::{_INTEGER})*)"
_INTEGERS, _FLOATS = (re.compile(rf"(?:{each}(?: {each})*)?", re.ASCII) for each in (_INTEGER, _FLOAT))
"""LightGBM ends its process at anything else in the place of a number."""
_HEADER = {
    "version": "v4",
    "num_class": "1",
    "num_tree_per_iteration": "1",
    "label_index": "0",
    "max_feature_idx": r"\d{1,5}",
    "objective": "regression|huber|quantile",  # those that almanac trains: a prediction is the sum of the leaves
    "feature_names": r"\w{1,99}(?: \w{1,99})*",
    "feature_infos": rf"{_INFO}(?: {_INFO})*",
    "tree_sizes": r"[1-9]\d{0,8}(?: [1-9]\d{0,8})*",
}
"""Fields in order, and their form."""
_PER_NODE: Mapping[str, Callable[[str], float]] = {
    "split_feature": int, "split_gain": float, "threshold": float, "decision_type": int, "left_child": int,
    "right_child": int,
}  # fmt: skip
_PER_LEAF: Mapping[str, Callable[[str], float]] = {"leaf_value": float, "leaf_weight": float, "leaf_count": int}
_UNUSED: Mapping[str, Callable[[str], float]] = {"internal_value": float, "internal_weight": float,
                                                 "internal_count": int}  # fmt: skip
_CATEGORIES = ("cat_boundaries", "cat_threshold")


def booster(text: str, features: Sequence[str] | None = None) -> Any:
    """Return the LightGBM model of a text. features: its names in order, where they are known.

    Raises ValueError for a text that LightGBM did not write.
    """
    import lightgbm  # 0.4 s, and not needed by what only reads advice

    require_whole(text, features)
    try:
        # Without the training's parameters, which no prediction needs: LightGBM ends its process at a garbled one.
        return lightgbm.Booster(model_str=text[: text.index(_END) + len(_END)])
    except lightgbm.basic.LightGBMError as error:
        raise ValueError(f"a LightGBM model cannot be read: {error}") from error


def require_whole(text: str, features: Sequence[str] | None = None) -> None:
    """Raise ValueError unless every tree is one: its children in range, each reached once, its features known."""
    try:
        _require_whole(text, features)
    except (KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"a LightGBM model lacks or garbles a field: {error!r}") from error


def _require_whole(text: str, features: Sequence[str] | None) -> None:
    if not text.isascii() or not text.startswith("tree\n") or "\nend of parameters\n" not in text:
        raise ValueError("a LightGBM model is cut off or is something else")
    head, _, rest = text.partition("\n\n")
    fields = _fields(head.removeprefix("tree\n"))
    if list(fields) != list(_HEADER) or not all(re.fullmatch(_HEADER[name], fields[name], re.ASCII) for name in fields):
        raise ValueError("a LightGBM model has a strange header")
    names, infos = (fields[name].split(" ") for name in ("feature_names", "feature_infos"))
    if (features is not None and names != list(features)) or not (
        len(set(names)) == len(names) == len(infos) == int(fields["max_feature_idx"]) + 1
    ):
        raise ValueError("a LightGBM model has other features than this almanac computes")
    place = 0
    for number, size in enumerate(map(int, fields["tree_sizes"].split(" "))):
        first, _, body = rest[place : place + size].partition("\n")
        if first != f"Tree={number}" or not body.endswith("\n\n\n"):
            raise ValueError(f"a LightGBM model has no tree {number} where its size says so")
        _require_tree(_fields(body[:-3]), len(names))
        place += size
    if not rest.startswith(_END, place):
        raise ValueError("a LightGBM model has more or fewer trees than it says")


def _fields(text: str) -> dict[str, str]:
    """Lines of name=value; a name occurs once, and no line is empty: LightGBM ends a tree there, and its process."""
    lines = [line.partition("=") for line in text.split("\n")]
    found = {name: value for name, _, value in lines}
    if len(found) != len(lines) or not all(sign for _, sign, _ in lines):
        raise ValueError("a LightGBM model has a field twice, or a line that is none")
    return found


def _numbers(text: str, kind: Callable[[str], float]) -> list[float]:
    if not (_INTEGERS if kind is int else _FLOATS).fullmatch(text):
        raise ValueError(f"a LightGBM model has no numbers in {text[:40]!r}")
    return [kind(word) for word in text.split()]


def _require_tree(fields: Mapping[str, str], features: int) -> None:
    [leaves], [categorical] = (map(int, _numbers(fields[name], int)) for name in ("num_leaves", "num_cat"))
    if not 1 <= leaves <= _MOST_LEAVES or fields["is_linear"] != "0":
        raise ValueError(f"a tree has {leaves} leaves, or linear ones")
    of_categories = _CATEGORIES if categorical else ()
    expected = ("num_leaves", "num_cat", *_PER_NODE, *_PER_LEAF, *_UNUSED, *of_categories, "is_linear", "shrinkage")
    if tuple(fields) != expected:
        raise ValueError("a tree has other fields than LightGBM writes")
    nodes = {name: _numbers(fields[name], kind) for name, kind in {**_PER_NODE, **_UNUSED}.items()}
    if any(len(values) != leaves - 1 for values in nodes.values()):
        raise ValueError("a tree has another number of nodes than its leaves need")
    in_leaves = {name: _numbers(fields[name], kind) for name, kind in _PER_LEAF.items()}
    if leaves == 1 and not in_leaves["leaf_weight"]:  # so LightGBM writes a tree that splits nothing
        del in_leaves["leaf_weight"]
    if any(len(values) != leaves for values in in_leaves.values()):
        raise ValueError("a tree has another number of values than leaves")
    _require_finite({**nodes, **in_leaves, "shrinkage": _numbers(fields["shrinkage"], float)})
    if not all(0 <= feature < features for feature in nodes["split_feature"]):
        raise ValueError("a tree splits by a feature that there is not")
    if not all(0 <= kind < 12 for kind in nodes["decision_type"]):
        raise ValueError("a tree has an unknown kind of decision")
    _require_one_root(nodes, leaves)
    _require_categories(fields, nodes, categorical)


def _require_finite(values: Mapping[str, Sequence[float]]) -> None:
    """A threshold may be endless: it is compared only."""
    most = {"threshold": math.inf, "leaf_value": _MOST_VALUE, "leaf_count": 2**31 - 1, "internal_count": 2**31 - 1}
    for name, numbers in values.items():
        if not all(abs(number) <= most.get(name, sys.float_info.max) for number in numbers):
            raise ValueError(f"a tree has a {name} that is out of range")
    if len(values["shrinkage"]) != 1:
        raise ValueError("a tree has no shrinkage, or several")


def _require_one_root(nodes: Mapping[str, Sequence[float]], leaves: int) -> None:
    """Every node and every leaf is reached from the root, and once: so no path is a circle."""
    left, seen = [0.0 if leaves > 1 else -1.0], set[float]()
    while left:
        at = left.pop()
        if at in seen or not -leaves <= at < leaves - 1:
            raise ValueError(f"a tree has the child {at:g}, which is out of range or of two nodes")
        seen.add(at)
        if at >= 0:
            left += [nodes["left_child"][int(at)], nodes["right_child"][int(at)]]
    if len(seen) != 2 * leaves - 1:
        raise ValueError("a tree has nodes that nothing leads to")


def _require_categories(fields: Mapping[str, str], nodes: Mapping[str, Sequence[float]], categorical: int) -> None:
    bounds, words = (_numbers(fields.get(name, ""), int) for name in ("cat_boundaries", "cat_threshold"))
    if categorical and (len(bounds) != categorical + 1 or bounds[0] or bounds[-1] != len(words)):
        raise ValueError("a tree has another number of categories than it says")
    if bounds != sorted(set(bounds)) or not all(0 <= word < 2**32 for word in words):
        raise ValueError("a tree has categories out of order or out of range")
    used = [at for at, kind in zip(nodes["threshold"], nodes["decision_type"], strict=True) if int(kind) & 1]
    if not all(at == int(at) and 0 <= at < categorical for at in used):
        raise ValueError("a tree splits by categories that there are not")
