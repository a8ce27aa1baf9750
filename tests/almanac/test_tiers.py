from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.config import Tier
from almanac.records import Request
from almanac.tiers import Rewrite, features, names_any_tier, requested_tier, required_features, rewrite

SMALL = Tier("hbm40g", 40960, "A100-40", constraint="hbm40g")
LARGE = Tier("hbm80g", 81920, "A100-80", constraint="hbm80g")
TIERS = (SMALL, LARGE)
BY_GRES = (Tier("40", 40960, gres="a100_40"), Tier("80", 81920, gres="a100_80"))
BY_PARTITION = (Tier("40", 40960, partition="gpu40"), Tier("80", 81920, partition="gpu80"))


def asking(constraints: str = "", gres: str = "", gpu_type: str = "", partition: str = "") -> Request:
    return Request(user="alice", constraints=constraints, gres=gres, gpu_type=gpu_type, partition=partition)


@pytest.mark.parametrize(
    ("constraint", "tier"),
    [
        ("hbm80g", LARGE),
        ("gpu&hbm80g", LARGE),
        ("gpu,hbm40g", SMALL),
        ("gpu&hbm80g&nvlink", LARGE),
        ("hbm80g*2", LARGE),
        ("[hbm80g]", LARGE),
        ("gpu&(hbm80g)", LARGE),
        ("(gpu&hbm80g)|(nvlink&hbm80g)", LARGE),
        ("hbm40g|hbm80g", None),
        ("[hbm40g|hbm80g]", None),
        ("gpu&[hbm40g|hbm80g]", None),
        ("[hbm40g*1&hbm80g*1]", None),
        ("v100|hbm80g", None),
        ("(v100|hbm80g)&gpu", None),
        ("!hbm80g", None),
        ("gpu", None),
        ("hbm80", None),
        ("hbm80gb", None),
        ("", None),
        ("((hbm80g", None),
        ("hbm80g]", None),
    ],
)
def test_a_tier_is_asked_for_only_where_nothing_else_would_do(constraint: str, tier: Tier | None) -> None:
    assert requested_tier(asking(constraint), TIERS) == tier


def test_a_choice_names_tiers_without_asking_for_one() -> None:
    assert names_any_tier(asking("[hbm40g|hbm80g]"), TIERS)
    assert not names_any_tier(asking("gpu"), TIERS)


def test_tiers_by_gres_type_and_by_partition() -> None:
    assert requested_tier(asking(gpu_type="a100_80"), BY_GRES) == BY_GRES[1]
    assert requested_tier(asking(gpu_type="v100"), BY_GRES) is None
    assert requested_tier(asking(partition="gpu40"), BY_PARTITION) == BY_PARTITION[0]
    assert requested_tier(asking(partition="gpu40,gpu80"), BY_PARTITION) is None


def test_features_of_an_expression() -> None:
    assert features("[gpu&(hbm40g|hbm80g)]*4&!old") == ("gpu", "hbm40g", "hbm80g", "old")


@given(st.text(alphabet="ab&|()[]*2,! ", max_size=40))
def test_every_required_feature_is_named(constraint: str) -> None:
    assert required_features(constraint) <= set(features(constraint))


@given(st.lists(st.sampled_from(["gpu", "nvlink", "hbm80g"]), min_size=1, max_size=5))
def test_all_terms_of_a_conjunction_are_required(terms: list[str]) -> None:
    assert required_features("&".join(terms)) == set(terms)


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ("", "hbm40g"),
        ("gpu", "gpu&hbm40g"),
        ("hbm80g", "hbm40g"),
        ("gpu&hbm80g&nvlink", "gpu&hbm40g&nvlink"),
        ("gpu,hbm80g", "gpu&hbm40g"),
        ("hbm40g", "hbm40g"),
    ],
)
def test_the_other_terms_of_a_constraint_stay(constraint: str, expected: str) -> None:
    assert rewrite(asking(constraint), TIERS, SMALL) == Rewrite("--constraint", expected)


@pytest.mark.parametrize(
    "constraint",
    ["[hbm40g|hbm80g]", "hbm80g*2", "gpu&(hbm80g)", "gpu|hbm80g", "hbm40g&hbm80g", "gpu&&hbm80g", "a b", "$(id)", "!x"],
)
def test_a_constraint_that_could_mean_something_else_is_left_alone(constraint: str) -> None:
    made = rewrite(asking(constraint), TIERS, SMALL)
    assert made.option == "" and made.value == "" and constraint in made.why_not


@given(st.text(max_size=30))
def test_a_rewritten_constraint_always_asks_for_the_target(constraint: str) -> None:
    made = rewrite(asking(constraint), TIERS, SMALL)
    assert made.why_not or requested_tier(asking(made.value), TIERS) == SMALL


@pytest.mark.parametrize(
    ("gres", "gpu_type", "expected"),
    [
        ("gpu:a100_80:4", "a100_80", "gpu:a100_40:4"),
        ("nvme:1,gpu:a100_80:2", "a100_80", "nvme:1,gpu:a100_40:2"),
        ("gpu:2", "", "gpu:a100_40:2"),
        ("gpu", "", "gpu:a100_40:1"),
        ("gpu:a100_80", "a100_80", "gpu:a100_40:1"),
    ],
)
def test_a_gres_request_keeps_its_count_and_its_other_terms(gres: str, gpu_type: str, expected: str) -> None:
    made = rewrite(asking(gres=gres, gpu_type=gpu_type), BY_GRES, BY_GRES[0])
    assert made == Rewrite("--gres", expected)


@pytest.mark.parametrize(
    ("gres", "gpu_type"),
    [("", "a100_80"), ("gpu:v100:1", "v100"), ("gpu:a100_80:1,gpu:a100_40:1", ""), ("gpu:a100_80:2(S:0,1)", "a100_80")],
)
def test_a_gres_request_of_another_form_is_left_alone(gres: str, gpu_type: str) -> None:
    assert rewrite(asking(gres=gres, gpu_type=gpu_type), BY_GRES, BY_GRES[0]).why_not


def test_a_partition_is_replaced_unless_there_are_several() -> None:
    assert rewrite(asking(partition="gpu80"), BY_PARTITION, BY_PARTITION[0]) == Rewrite("--partition", "gpu40")
    assert "gpu80,gpu40" in rewrite(asking(partition="gpu80,gpu40"), BY_PARTITION, BY_PARTITION[0]).why_not


def test_a_tier_named_in_another_way_is_not_contradicted() -> None:
    mixed = (SMALL, Tier("80p", 81920, partition="gpu80"))
    made = rewrite(asking("gpu&hbm40g"), mixed, mixed[1])
    assert made.option == "" and made.why_not == "the request names hbm40g by its constraint"
