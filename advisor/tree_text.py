"""LightGBM's text of a model, checked before LightGBM parses it: a bad child index ends or hangs its process."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_END = "end of trees\n"
_MOST_LEAVES = 4096
_INTEGERS = re.compile(r"(?:-?\d{1,19}(?: -?\d{1,19})*)?", re.ASCII)
_FLOAT = r"-?(?:inf|nan|\d{1,40}(?:\.\d{1,40})?(?:e[+-]?\d{1,3})?)"
_FLOATS = re.compile(rf"(?:{_FLOAT}(?: {_FLOAT})*)?", re.ASCII)
"""LightGBM ends its process at anything else in the place of a number."""
_PER_NODE: Mapping[str, Callable[[str], float]] = {
    "split_feature": int, "threshold": float, "decision_type": int, "left_child": int, "right_child": int,
}  # fmt: skip
_UNUSED = {
    "leaf_weight": (0, _FLOATS), "leaf_count": (0, _INTEGERS), "split_gain": (1, _FLOATS),
    "internal_value": (1, _FLOATS), "internal_weight": (1, _FLOATS), "internal_count": (1, _INTEGERS),
}  # fmt: skip
"""Fields that no prediction uses: by how many values they have fewer than the tree has leaves, and their form."""
_SINGLE = {"num_leaves", "num_cat", "is_linear", "shrinkage", "leaf_value", "cat_boundaries", "cat_threshold"}
_HEADER = {"objective", "feature_names", "feature_infos", "max_feature_idx", "tree_sizes", "version", "num_class",
           "num_tree_per_iteration", "label_index"}  # fmt: skip
_FIXED = {"version": "v4", "num_class": "1", "num_tree_per_iteration": "1", "label_index": "0"}


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
    names = fields["feature_names"].split(" ")
    if (
        fields.keys() != _HEADER
        or {name: fields[name] for name in _FIXED} != _FIXED
        or len(names) != int(fields["max_feature_idx"]) + 1
    ):
        raise ValueError("a LightGBM model has a strange header")
    if (features is not None and names != list(features)) or len(fields["feature_infos"].split(" ")) != len(names):
        raise ValueError("a LightGBM model has other features than this almanac computes")
    rest = rest.lstrip("\n")
    place = 0
    for number, size in enumerate(_numbers(fields["tree_sizes"], int)):
        tree = rest[place : place + int(size)]
        first, _, body = tree.partition("\n")
        if first != f"Tree={number}" or not tree.endswith("\n") or size <= 0:
            raise ValueError(f"a LightGBM model has no tree {number} where its size says so")
        _require_tree(_fields(body), len(names))
        place += int(size)
    if not rest.startswith(_END, place) or not place:
        raise ValueError("a LightGBM model has more or fewer trees than it says")


def _fields(text: str) -> dict[str, str]:
    """Lines of name=value; a name occurs once."""
    lines = [line.partition("=") for line in text.split("\n") if line]
    found = {name: value for name, _, value in lines}
    if len(found) != len(lines):
        raise ValueError("a LightGBM model has a field twice")
    return found


def _numbers(text: str, kind: Callable[[str], float]) -> list[float]:
    if not (_INTEGERS if kind is int else _FLOATS).fullmatch(text):
        raise ValueError(f"a LightGBM model has no numbers in {text[:40]!r}")
    found = [kind(word) for word in text.split()]
    if any(map(math.isnan, found)):
        raise ValueError("a LightGBM model has a number that is none")
    return found


def _require_tree(fields: Mapping[str, str], features: int) -> None:
    leaves, categorical = (int(_numbers(fields[name], int)[0]) for name in ("num_leaves", "num_cat"))
    if not 1 <= leaves <= _MOST_LEAVES or fields["is_linear"] != "0":
        raise ValueError(f"a tree has {leaves} leaves, or linear ones")
    if unknown := fields.keys() - _SINGLE - _UNUSED.keys() - _PER_NODE.keys():
        raise ValueError(f"a tree has unknown fields: {sorted(unknown)[0][:40]!r}")
    _numbers(fields["shrinkage"], float)
    unused = (
        form.fullmatch(fields.get(name, "")) and len(fields.get(name, "").split()) in (0, leaves - fewer)
        for name, (fewer, form) in _UNUSED.items()
    )
    values = _numbers(fields["leaf_value"], float)
    if not all(map(math.isfinite, values)):
        raise ValueError("a tree has a value that is not finite")
    if len(values) != leaves or not all(unused):
        raise ValueError("a tree has another number of values than leaves")
    nodes = {name: _numbers(fields.get(name, ""), kind) for name, kind in _PER_NODE.items()}
    if any(len(values) != leaves - 1 for values in nodes.values()):
        raise ValueError("a tree has another number of nodes than its leaves need")
    if not all(0 <= feature < features for feature in nodes["split_feature"]):
        raise ValueError("a tree splits by a feature that there is not")
    if not all(0 <= kind < 16 for kind in nodes["decision_type"]):
        raise ValueError("a tree has an unknown kind of decision")
    _require_one_root(nodes, leaves)
    _require_categories(fields, nodes, categorical)


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
    is_empty = not categorical and not bounds and not words
    if not is_empty and (len(bounds) != categorical + 1 or bounds[0] or bounds[-1] != len(words)):
        raise ValueError("a tree has another number of categories than it says")
    if bounds != sorted(bounds) or not all(0 <= word < 2**32 for word in words):
        raise ValueError("a tree has categories out of order or out of range")
    used = [at for at, kind in zip(nodes["threshold"], nodes["decision_type"], strict=True) if int(kind) & 1]
    if not all(at == int(at) and 0 <= at < categorical for at in used):
        raise ValueError("a tree splits by categories that there are not")
