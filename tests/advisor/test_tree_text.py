"""A text that LightGBM did not write is refused before LightGBM parses it."""

from __future__ import annotations

import functools
import random
import re

import lightgbm
import numpy as np
import pytest

from advisor.duration.model import MEAN, MIDDLE
from advisor.version_folders import booster, require_whole

NAMES = ["a", "b", "kind"]


@functools.cache
def model_text() -> str:
    """Five small trees of three features, one of them categorical."""
    rng = np.random.default_rng(1)
    rows = np.column_stack([rng.random((600, 2)), rng.integers(0, 40, 600)])
    data = lightgbm.Dataset(
        rows, rows[:, 0] + (rows[:, 2] % 3), feature_name=NAMES, categorical_feature=["kind"], params={"verbosity": -1}
    )
    text: str = lightgbm.train({"num_leaves": 5, "verbosity": -1}, data, num_boost_round=5).model_to_string()
    return text


def spoiled(field: str, old: str, new: str) -> str:
    """The text with the first occurrence of old replaced in the first line of the field; sizes are made to fit."""
    text = model_text()
    line = re.search(rf"^{field}=.*$", text, re.MULTILINE)
    changed = re.sub(old, new, line[0], count=1)
    assert changed != line[0]
    return fitted(text.replace(line[0], changed, 1))


def fitted(text: str) -> str:
    """The text with the sizes that its trees have."""
    sizes = [len(tree) for tree in re.findall(r"Tree=\d+\n.*?\n\n\n", text, re.DOTALL)]
    return re.sub(r"tree_sizes=.*", f"tree_sizes={' '.join(map(str, sizes))}", text)


def test_a_whole_text_is_taken() -> None:
    assert "num_cat=0" not in model_text()
    rows = np.array([[0.5, 0.5, 3.0]])
    found = booster(model_text(), NAMES).predict(rows)
    assert found == lightgbm.Booster(model_str=model_text()).predict(rows)


def test_a_tree_of_one_leaf_and_an_endless_threshold_are_whole() -> None:
    data = lightgbm.Dataset(np.zeros((50, 1)), np.ones(50), params={"verbosity": -1})
    require_whole(lightgbm.train({"verbosity": -1}, data, num_boost_round=1).model_to_string())
    require_whole(spoiled("threshold", r"\d\.\d+", "inf"))


@pytest.mark.parametrize(
    ("field", "old", "new"),
    [
        ("left_child", r"=-?\d+", "=0"),  # a circle
        ("left_child", r"=-?\d+", "=99999999"),
        ("right_child", r"-?\d+$", "-2147483648"),
        ("right_child", r" \S+$", ""),
        ("split_feature", r"=\d+", "=3"),
        ("split_feature", r"=\d+", "=-1"),
        ("num_leaves", r"=\d+", "=2000000000"),
        ("num_leaves", r"=\d+", "=0"),
        ("num_cat", r"=\d+", "=1000000"),
        ("cat_boundaries", r" \d+", " 4000000"),
        ("cat_threshold", r"=\d+", "=-1"),
        ("decision_type", r"=\d+", "=255"),
        ("leaf_value", r"=\S+", "=nan"),
        ("is_linear", "0", "1"),
        ("max_feature_idx", "2", "70000"),
        ("feature_names", "kind", "kind x"),
        ("feature_names", "a b", "a a"),
        ("num_class", "1", "3"),
        ("num_class", "=1", "=1000000000"),
        ("num_tree_per_iteration", "=1", "=2"),
        ("objective", "=.*", "="),
        ("objective", "=.*", "=multiclass num_class:1000000000"),
        ("objective", "=.*", "=poisson"),
        ("objective", "$", " sqrt"),
        ("objective", "=", "=regression\naverage_output="),
        ("feature_infos", r"=\S+", "=[0:x]"),
        ("feature_infos", r" \S+$", ""),
        ("shrinkage", "=", "=1\nnum_leaves="),
        ("shrinkage", "=.*", "=1 1"),
        ("is_linear", "=0", "=0\nleaf_coeff=1"),
        ("num_leaves", "=5", "=5 5"),
        ("leaf_value", r"=\S+", "=1e308"),
        ("leaf_weight", "=.*", "="),
        ("leaf_weight", r" \S+$", ""),
        ("leaf_weight", ".*", ""),  # an empty line within a tree
        ("leaf_count", r"=\d+", "=9999999999"),
        ("split_gain", r"=\S+", "=nan"),
        ("internal_value", "=.*", "="),
        ("decision_type", r"=\d+", "=12"),
        ("cat_boundaries", ".*", "surplus=1"),
    ],
)
def test_a_spoiled_field_is_refused(field: str, old: str, new: str) -> None:
    with pytest.raises(ValueError):
        require_whole(spoiled(field, old, new), NAMES)


@pytest.mark.parametrize(
    "parameters", [{"objective": MEAN}, {"objective": MIDDLE}, {"objective": "quantile", "alpha": 0.98}]
)
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e6])
def test_all_that_almanac_trains_is_whole(parameters: dict[str, object], scale: float) -> None:
    rows = np.random.default_rng(2).random((200, 2))
    rows[:, 1] = np.nan
    data = lightgbm.Dataset(rows, rows[:, 0] * scale, feature_name=NAMES[:2], params={"verbosity": -1})
    text = lightgbm.train({"verbosity": -1, **parameters}, data, num_boost_round=3).model_to_string()
    assert np.isfinite(booster(text, NAMES[:2]).predict(rows)).all()


@pytest.mark.parametrize("size", ["1", "-5", "99999999", "9" * 30, "nan"])
def test_sizes_that_are_not_those_of_the_trees_are_refused(size: str) -> None:
    with pytest.raises(ValueError):
        require_whole(re.sub(r"tree_sizes=\d+", f"tree_sizes={size}", model_text()))


def test_other_features_are_refused() -> None:
    with pytest.raises(ValueError, match="other features"):
        require_whole(model_text(), ["b", "a", "kind"])


def with_other_line(at: random.Random) -> str:
    """The text with a line dropped, doubled, emptied, moved, or with another value; sizes are made to fit."""
    head, end, tail = model_text().partition("end of trees")
    lines = head.split("\n")
    place, other = at.randrange(1, len(lines)), at.randrange(1, len(lines))
    name, _, value = lines[place].partition("=")
    word = at.choice(value.split() or [""])
    surprise = at.choice(["", "0", "-1", "2147483648", "1e308", "-0", "inf", "1e-320", "00", "1000000000"])
    kinds = [[], [lines[place]] * 2, [f"{name}="], [""], [lines[other]], [f"{name}={surprise}"]]
    lines[place : place + 1] = at.choice([*kinds, [f"{name}={value.replace(word, surprise, 1)}"]])
    return fitted("\n".join(lines) + end + tail)


def test_any_cut_flipped_bit_and_other_line_is_refused_or_harmless() -> None:
    """Texts that pass are parsed and asked by LightGBM, which must neither crash nor hang."""
    text, at = model_text(), random.Random(4)
    places = [at.randrange(len(text)) for _ in range(400)]
    texts = [text[:place] for place in places[:50]]
    texts += [text[:place] + chr(ord(text[place]) ^ 1 << at.randrange(7)) + text[place + 1 :] for place in places]
    texts += [with_other_line(at) for _ in range(400)]
    rows = np.array([[0.5, np.nan, 3.0], [0.1, 2.0, 1e9]])
    for each in texts:
        try:
            model = booster(each, NAMES)
        except ValueError:
            continue
        assert np.isfinite(model.predict(rows, num_threads=1)).all()
