"""LightGBM's text of a model, checked before LightGBM parses it: a bad child index ends or hangs its process."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
