"""MIG profiles: sizes as NVIDIA's listings give them, and the names that GRES types and exporters use."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from importlib import resources

import pytest

from almanac.hardware import gpu_models
from almanac.mig import MigModel, compute_slices, is_same_profile, mig_models, profile_name, real_profile

SHAPES = ("1g", "1g+me", "1g double memory", "2g", "3g", "4g", "7g")
MODELS = mig_models()
SEVENS = [name for name in MODELS if name != "A30"]


def sizes(model: str) -> list[tuple[float, float] | None]:
    return [profile_of(model, shape) for shape in SHAPES]


def profile_of(model: str, shape: str) -> tuple[float, float] | None:
    profile = MODELS[model].profile(shape)
    assert profile is not None
    return profile.memory_gib


@pytest.mark.parametrize("model", SEVENS)
def test_the_geometry_is_that_of_the_placement_table(model: str) -> None:
    rows = {each.shape: (each.compute, each.memory, each.starts, each.most) for each in MODELS[model].profiles}
    assert rows == {
        "1g": (1, 1, (0, 1, 2, 3, 4, 5, 6), 7),
        "1g+me": (1, 1, (0, 1, 2, 3, 4, 5, 6), 1),
        "1g double memory": (1, 2, (0, 2, 4, 6), 4),
        "2g": (2, 2, (0, 2, 4), 3),
        "3g": (3, 4, (0, 4), 2),
        "4g": (4, 4, (0,), 1),
        "7g": (7, 8, (0,), 1),
    }
    assert [each.shape for each in MODELS[model].profiles if each.has_media] == ["1g+me"]
    assert (MODELS[model].compute_slices, MODELS[model].memory_slices) == (7, 8)


def test_the_geometry_of_the_a30_has_four_slices() -> None:
    rows = {each.shape: (each.compute, each.memory, each.starts, each.most) for each in MODELS["A30"].profiles}
    assert rows == {
        "1g": (1, 1, (0, 1, 2, 3), 4),
        "1g+me": (1, 1, (0, 1, 2, 3), 1),
        "2g": (2, 2, (0, 2), 2),
        "2g+me": (2, 2, (0, 2), 1),
        "4g": (4, 4, (0,), 1),
    }
    assert (MODELS["A30"].compute_slices, MODELS["A30"].memory_slices) == (4, 4)


A100_40 = [(4.75, 4.75), (4.75, 4.75), (9.62, 9.75), (9.62, 9.75), (19.5, 19.62), (19.5, 19.62), (39.25, 39.5)]
A100_80 = [(9.5, 9.5), (9.5, 9.5), (19.5, 19.5), (19.5, 19.5), (39.25, 39.25), (39.25, 39.25), (79.0, 79.0)]
H100_80 = [(9.5, 9.75), (9.75, 9.75), (19.5, 19.62), (19.5, 19.62), (39.25, 39.5), (39.25, 39.5), (79.0, 79.25)]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("A100-40", A100_40),
        ("A100-80", A100_80),
        ("A100-80-PCIE", A100_80),
        ("H100-80", H100_80),
        ("H100-80-PCIE", H100_80),
        ("H100-94-NVL", [(10.62, 10.62), (10.62, 10.62), None, None, None, None, None]),
        ("H200-141", [(16.0, 16.0), (16.0, 16.0), None, (32.5, 32.5), None, None, (140.0, 140.0)]),
        ("B200-180", [None] * 7),
    ],
)
def test_memory_is_what_listings_give_and_missing_where_none_was_found(
    model: str, expected: list[tuple[float, float] | None]
) -> None:
    assert sizes(model) == expected


A100_SMS, H100_SMS = [14, 14, 14, 28, 42, 56, 98], [16, 16, 26, 32, 60, 64, 132]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("A100-40", A100_SMS),
        ("A100-80", A100_SMS),
        ("A100-80-PCIE", A100_SMS),
        ("H100-80", H100_SMS),
        ("H100-80-PCIE", [14, 14, 14, 30, 46, 62, 114]),
        ("H200-141", H100_SMS),
        ("H100-94-NVL", [None] * 7),
        ("B200-180", [None] * 7),
    ],
)
def test_streaming_multiprocessors_are_not_proportional(model: str, expected: list[int | None]) -> None:
    assert [profile.sms if (profile := MODELS[model].profile(shape)) else 0 for shape in SHAPES] == expected


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_every_model_is_complete_and_its_names_are_unique(model: MigModel) -> None:
    names = [each.name for each in model.profiles]
    assert len(set(names)) == len(names)
    assert model.source
    assert model.whole.compute == model.compute_slices
    assert list(model.profiles) == sorted(model.profiles, key=lambda each: (each.memory, each.compute, each.has_media))
    for each in model.profiles:
        assert each.memory_gib is None or 0 < each.memory_gib[0] <= each.memory_gib[1]
        assert model.profile(each.shape) is model.profile(each.name) is model.profile(f"some_gpu_{each.name}") is each
        assert compute_slices(each.name) == each.compute
        nominal_gb = int(re.fullmatch(r"[1-7]g\.(\d+)gb(?:\+me)?", each.name)[1])  # type: ignore[index]
        # A nominal name rounds up, and a gibibyte is larger than a gigabyte.
        assert each.memory_gib is None or each.memory_gib[1] <= nominal_gb


def test_keys_are_those_of_the_hardware_table_where_it_has_the_model() -> None:
    for name in set(MODELS) & set(gpu_models()):
        whole_gib = MODELS[name].whole.memory_gib
        assert whole_gib is None or whole_gib[1] * 1024 <= gpu_models()[name].hbm_mib
    assert {"A100-40", "A100-80", "A100-80-PCIE", "H100-80", "H100-94-NVL", "H200-141"} <= set(gpu_models())


def test_every_geometry_and_model_says_its_source() -> None:
    tables = tomllib.loads((resources.files("almanac") / "mig.toml").read_text(encoding="utf-8"))
    for row in (*tables["geometry"].values(), *tables["model"].values()):
        assert len(row["source"]) > 20


@pytest.mark.parametrize(
    ("gres_type", "name", "slices"),
    [
        ("1g.5gb", "1g.5gb", 1),
        ("a100_1g.5gb", "1g.5gb", 1),
        ("nvidia_a100-sxm4-40gb_3g.20gb", "3g.20gb", 3),
        ("NVIDIA A100-SXM4-80GB MIG 2g.20gb", "2g.20gb", 2),
        ("h200:1g.18gb+me", "1g.18gb+me", 1),
        ("1G.10GB+ME", "1g.10gb+me", 1),
        ("1g.12gb+me.all", "1g.12gb+me.all", 1),
        ("4g.47gb-me", "4g.47gb-me", 4),
        ("h200_7g.141gb", "7g.141gb", 7),
        ("1c.3g.20gb", "3g.20gb", 1),
        ("a100_2c.4g.20gb", "4g.20gb", 2),
    ],
)
def test_the_name_of_a_slice_is_found_at_the_end_of_a_type(gres_type: str, name: str, slices: int) -> None:
    assert (profile_name(gres_type), compute_slices(gres_type)) == (name, slices)


@pytest.mark.parametrize(
    "gres_type",
    [
        "", " ", "a100", "gpu", "mig-1g", "1g.5gb\n", "\n1g.5gb", "a100\n_1g.5gb", "1g.5gb ", "1g.5gb\x00",
        "1g.5gb\x1b[31m", "９g.5gb", "1g.５gb", "١g.5gb", "8g.40gb", "0g.5gb", "9g.5gb", "11g.5gb", "1g.0gb", "1g.05gb",
        "1g.1000gb", "1g.-5gb", "1g.5.5gb", "1g.5gb+", "1g.5gb+m", "1g.5gb+\u212akk", "1g.5gb+me\u017f",
        "1g.5gb+" + "m" * 13, "1g.5gb:1", "1g.5gb,gpu", "x1g.5gb", "1g.5gbx", "1g5gb", "../1g.5gb/..",
        "1g.5gb'; drop table jobs; --", "1g.5gb\u202e", "1c.3g", "1c.",
    ],
)  # fmt: skip
def test_other_names_are_no_slices(gres_type: str) -> None:
    assert profile_name(gres_type) is None
    assert compute_slices(gres_type) is None
    assert all(model.profile(gres_type) is None for model in MODELS.values())


@pytest.mark.parametrize("text", ["_", "1g.5gb_", "1c.", "1g.", "a100_1g.5gb+m", " "])
def test_a_very_long_name_is_read(text: str) -> None:
    """Backtracking would take hours."""
    assert profile_name(text * 100_000 + "!") is None
    assert profile_name(text * 100_000 + "_2g.10gb") == "2g.10gb"


def test_a_slice_of_another_model_is_not_found() -> None:
    assert MODELS["A100-80"].profile("1g.5gb") is None
    assert MODELS["A30"].profile("7g") is None
    # One name, two shapes: the reason to know the model first.
    double, single = MODELS["A100-40"].profile("1g.10gb"), MODELS["A100-80"].profile("1g.10gb")
    assert double is not None and single is not None
    assert (double.shape, single.shape) == ("1g double memory", "1g")


def test_models_are_read_once_and_can_be_keys() -> None:
    assert mig_models() is MODELS
    assert len({*MODELS.values(), replace(MODELS["A30"], source="x")}) == len(MODELS) + 1


@pytest.mark.parametrize(
    ("named", "model", "gres", "expected"),
    [
        ("1g.11gb", "H100-94-NVL", "", "1g.12gb"),
        ("7g.79gb", "A100-80-PCIE", "", "7g.80gb"),
        ("1g.16gb", "H200-141", "", "1g.18gb"),
        ("1g.11gb+me", "H100-94-NVL", "", "1g.12gb+me"),
        ("1g.11gb", None, "nvidia_h100_nvl_1g.12gb", "1g.12gb"),
        ("1g.11gb", "H100-94-NVL", "3g.47gb", "1g.12gb"),
        ("1g.20gb", "A100-80", "1g.10gb", "1g.20gb"),
        ("1g.21gb", "NVIDIA B300", "", "1g.21gb"),
        (None, "A100-80", "a100_1g.10gb", "1g.10gb"),
        (None, "A100-80", "a100", None),
        ("nonsense", "A100-80", "", "nonsense"),
    ],
)
def test_the_name_of_a_profile_is_the_models_own(
    named: str | None, model: str | None, gres: str, expected: str | None
) -> None:
    assert real_profile(named, model, gres) == expected


@pytest.mark.parametrize(("one", "other"), [("1g.10gb", "1g.20gb"), ("1g.10gb", "1g.10gb+me"), ("3g.40gb", "4g.40gb")])
def test_profiles_that_differ_are_not_taken_for_one(one: str, other: str) -> None:
    assert not is_same_profile(one, other)
    assert is_same_profile("1g.11gb", "1g.12gb")
