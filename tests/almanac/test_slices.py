"""What a slice holds: never its nominal name; and which names are slices."""

from __future__ import annotations

import dataclasses

import pytest

from almanac.config import Tier
from almanac.config_file import parse_config
from almanac.errors import ConfigError
from almanac.slices import is_known_slice, real_capacities


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
