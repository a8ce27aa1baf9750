"""MIG profiles: sizes as NVIDIA's listings give them, and the names that GRES types and exporters use."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from importlib import resources

import pytest

from almanac.config import Tier
from almanac.config_file import parse_config
from almanac.errors import ConfigError
from almanac.hardware import (
    MigModel,
    compute_slices,
    gpu_models,
    is_same_profile,
    mig_models,
    profile_name,
    real_profile,
)
from almanac.tiers import is_known_slice, real_capacities

SHAPES = ("1g", "1g+me", "1g double memory", "2g", "3g", "4g", "7g")
MODELS = mig_models()
SEVENS = [name for name in MODELS if name != "A30"]


def sizes(model: str) -> list[tuple[float, float] | None]:
    return [profile_of(model, shape) for shape in SHAPES]


def profile_of(model: str, shape: str) -> tuple[float, float] | None:
    profile = MODELS[model].profile(shape)
    return profile.memory_gib


@pytest.mark.parametrize("model", SEVENS)
def test_the_geometry_is_that_of_the_placement_table(model: str) -> None:
    rows = {each.shape: (each.compute, each.memory, each.starts, each.most) for each in MODELS[model].profiles}
    assert rows == {
        "1g": (1, 1, (0, 1, 2, 3, 4, 5, 6), 7), "1g+me": (1, 1, (0, 1, 2, 3, 4, 5, 6), 1),
        "1g double memory": (1, 2, (0, 2, 4, 6), 4), "2g": (2, 2, (0, 2, 4), 3), "3g": (3, 4, (0, 4), 2),
        "4g": (4, 4, (0,), 1), "7g": (7, 8, (0,), 1),
    }  # fmt: skip
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
    [("A100-40", A100_40), ("A100-80", A100_80), ("A100-80-PCIE", A100_80), ("H100-80", H100_80),
     ("H100-80-PCIE", H100_80), ("H100-94-NVL", [(10.62, 10.62), (10.62, 10.62), None, None, None, None, None]),
     ("H200-141", [(16.0, 16.0), (16.0, 16.0), None, (32.5, 32.5), None, None, (140.0, 140.0)]),
     ("B200-180", [None] * 7)],
)  # fmt: skip
def test_memory_is_what_listings_give_and_missing_where_none_was_found(
    model: str, expected: list[tuple[float, float] | None]
) -> None:
    assert sizes(model) == expected


A100_SMS, H100_SMS = [14, 14, 14, 28, 42, 56, 98], [16, 16, 26, 32, 60, 64, 132]


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


def test_the_name_of_a_slice_is_found_at_the_end_of_a_type() -> None:
    for gres_type, name, slices in [
        ("1g.5gb", "1g.5gb", 1), ("a100_1g.5gb", "1g.5gb", 1), ("nvidia_a100-sxm4-40gb_3g.20gb", "3g.20gb", 3),
        ("NVIDIA A100-SXM4-80GB MIG 2g.20gb", "2g.20gb", 2), ("h200:1g.18gb+me", "1g.18gb+me", 1),
        ("1G.10GB+ME", "1g.10gb+me", 1), ("1g.12gb+me.all", "1g.12gb+me.all", 1), ("4g.47gb-me", "4g.47gb-me", 4),
        ("h200_7g.141gb", "7g.141gb", 7), ("1c.3g.20gb", "3g.20gb", 1), ("a100_2c.4g.20gb", "4g.20gb", 2),
    ]:  # fmt: skip
        assert (profile_name(gres_type), compute_slices(gres_type)) == (name, slices)


def test_other_names_are_no_slices() -> None:
    for gres_type in [
        "", " ", "a100", "gpu", "mig-1g", "1g.5gb\n", "\n1g.5gb", "a100\n_1g.5gb", "1g.5gb ", "1g.5gb\x00",
        "1g.5gb\x1b[31m", "９g.5gb", "1g.５gb", "١g.5gb", "8g.40gb", "0g.5gb", "9g.5gb", "11g.5gb", "1g.0gb", "1g.05gb",
        "1g.1000gb", "1g.-5gb", "1g.5.5gb", "1g.5gb+", "1g.5gb+m", "1g.5gb+\u212akk", "1g.5gb+me\u017f",
        "1g.5gb+" + "m" * 13, "1g.5gb:1", "1g.5gb,gpu", "x1g.5gb", "1g.5gbx", "1g5gb", "../1g.5gb/..",
        "1g.5gb'; drop table jobs; --", "1g.5gb\u202e", "1c.3g", "1c.",
    ]:  # fmt: skip
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
    assert (double.shape, single.shape) == ("1g double memory", "1g")


def test_the_name_of_a_profile_is_the_models_own() -> None:
    for named, model, gres, expected in [
        ("1g.11gb", "H100-94-NVL", "", "1g.12gb"), ("7g.79gb", "A100-80-PCIE", "", "7g.80gb"),
        ("1g.16gb", "H200-141", "", "1g.18gb"), ("1g.11gb+me", "H100-94-NVL", "", "1g.12gb+me"),
        ("1g.11gb", None, "nvidia_h100_nvl_1g.12gb", "1g.12gb"), ("1g.11gb", "H100-94-NVL", "3g.47gb", "1g.12gb"),
        ("1g.20gb", "A100-80", "1g.10gb", "1g.20gb"), ("1g.21gb", "NVIDIA B300", "", "1g.21gb"),
        (None, "A100-80", "a100_1g.10gb", "1g.10gb"), (None, "A100-80", "a100", None),
        ("nonsense", "A100-80", "", "nonsense"),
    ]:  # fmt: skip
        assert real_profile(named, model, gres) == expected


@pytest.mark.parametrize(("one", "other"), [("1g.10gb", "1g.20gb"), ("1g.10gb", "1g.10gb+me"), ("3g.40gb", "4g.40gb")])
def test_profiles_that_differ_are_not_taken_for_one(one: str, other: str) -> None:
    assert not is_same_profile(one, other)
    assert is_same_profile("1g.11gb", "1g.12gb")


def capacity(**tier: object) -> int:
    return parse_config({"tiers": [{"name": "t", **tier}]}).tiers[0].capacity_mib


@pytest.mark.parametrize(
    ("gres", "model", "configured", "expected"),
    [
        ("1g.10gb", "A100-80", 10240, 9728),
        ("1g.10gb", "A100-40", 10240, 9850),  # double memory: 9.62 GiB
        ("1g.10gb", "", 10240, 9728),  # of all models that have it
        ("nvidia_a100_1g.10gb", "A100-80", 10240, 9728),
        ("1g.18gb", "H200-141", 18432, 16384),
        ("1g.10gb", "A100-80", 8000, 8000),  # the site knows better
        ("3g.90gb", "B200-180", 90000, 90000),  # not published
        ("a100", "A100-80", 81920, 81920),
    ],
)
def test_the_least_published_size_wins_over_a_larger_one(gres: str, model: str, configured: int, expected: int) -> None:
    assert capacity(gres=gres, gpu_model=model, capacity_mib=configured) == expected


def test_what_was_measured_wins_if_it_is_less() -> None:
    tiers = (Tier("s", 9728, "A100-80", gres="1g.10gb"), Tier("w", 81920, gres="a100"))
    measured = real_capacities(tiers, {"1g.10gb": 9216.0, "a100": 1.0})
    assert [tier.capacity_mib for tier in measured] == [9216, 81920]
    assert real_capacities(tiers, {"1g.10gb": 9800.0}) == tiers


def test_slices_by_name_and_by_key() -> None:
    assert Tier(gres="1g.5gb").compute_slices == 1
    assert Tier(gres="A100_3G.20GB").compute_slices == 3
    assert Tier(gres="1g.10gb+me").is_slice
    assert not Tier(gres="a100").is_slice
    assert not Tier(gres="big.gpu").is_slice
    assert Tier(gres="small", compute_slices=2).is_slice
    assert dataclasses.replace(Tier(gres="1g.5gb"), gres="a100", compute_slices=0).compute_slices == 0


@pytest.mark.parametrize("slices", [8, -1])
def test_impossible_slices_are_refused(slices: int) -> None:
    with pytest.raises(ConfigError, match="compute_slices"):
        capacity(gres="small", capacity_mib=1, compute_slices=slices)


def test_slices_that_the_name_contradicts_are_refused() -> None:
    with pytest.raises(ConfigError, match="5gb has 1"):
        capacity(gres="1g.5gb", capacity_mib=1, compute_slices=2)


def test_profiles_that_a_model_lacks() -> None:
    assert is_known_slice(Tier(gres="1g.5gb", gpu_model="A100-40"))
    assert not is_known_slice(Tier(gres="1g.5gb", gpu_model="A100-80"))
    assert is_known_slice(Tier(gres="a100", gpu_model="A100-80"))
