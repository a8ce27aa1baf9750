"""Constraints, tiers, and TRES texts that name GPUs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.config import Tier
from almanac.records import JobRequest
from almanac.tiers import Rewrite, features, names_any_tier, requested_tier, required_features, rewrite
from almanac.tres import Gpus, parse_gpu_indices, parse_gpus, parse_index_list, parse_tres

SMALL = Tier("hbm40g", 40960, "A100-40", constraint="hbm40g")
LARGE = Tier("hbm80g", 81920, "A100-80", constraint="hbm80g")
TIERS = (SMALL, LARGE)
BY_GRES = (Tier("40", 40960, gres="a100_40"), Tier("80", 81920, gres="a100_80"))
BY_PARTITION = (Tier("40", 40960, partition="gpu40"), Tier("80", 81920, partition="gpu80"))


def asking(constraints: str = "", gres: str = "", gpu_type: str = "", partition: str = "") -> JobRequest:
    return JobRequest(user="alice", constraints=constraints, gres=gres, gpu_type=gpu_type, partition=partition)


def test_a_tier_is_asked_for_only_where_nothing_else_would_do() -> None:
    for constraint, tier in [
        ("hbm80g", LARGE), ("gpu&hbm80g", LARGE), ("gpu,hbm40g", SMALL), ("gpu&hbm80g&nvlink", LARGE),
        ("hbm80g*2", LARGE), ("[hbm80g]", LARGE), ("gpu&(hbm80g)", LARGE), ("(gpu&hbm80g)|(nvlink&hbm80g)", LARGE),
        ("hbm40g|hbm80g", None), ("[hbm40g|hbm80g]", None), ("gpu&[hbm40g|hbm80g]", None),
        ("[hbm40g*1&hbm80g*1]", None), ("v100|hbm80g", None), ("(v100|hbm80g)&gpu", None), ("!hbm80g", None),
        ("gpu", None), ("hbm80", None), ("hbm80gb", None), ("", None), ("((hbm80g", None), ("hbm80g]", None),
    ]:  # fmt: skip
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
    [("", "hbm40g"), ("gpu", "gpu&hbm40g"), ("hbm80g", "hbm40g"), ("gpu&hbm80g&nvlink", "gpu&hbm40g&nvlink"),
     ("gpu,hbm80g", "gpu&hbm40g"), ("hbm40g", "hbm40g")],
)  # fmt: skip
def test_the_other_terms_of_a_constraint_stay(constraint: str, expected: str) -> None:
    assert rewrite(asking(constraint), TIERS, SMALL) == Rewrite("--constraint", expected)


def test_a_constraint_that_could_mean_something_else_is_left_alone() -> None:
    for constraint in [
        "[hbm40g|hbm80g]", "hbm80g*2", "gpu&(hbm80g)", "gpu|hbm80g", "hbm40g&hbm80g", "gpu&&hbm80g", "a b", "$(id)",
        "!x",
    ]:  # fmt: skip
        made = rewrite(asking(constraint), TIERS, SMALL)
        assert made.option == "" and made.value == "" and constraint in made.why_not


@given(st.text(max_size=30))
def test_a_rewritten_constraint_always_asks_for_the_target(constraint: str) -> None:
    made = rewrite(asking(constraint), TIERS, SMALL)
    assert made.why_not or requested_tier(asking(made.value), TIERS) == SMALL


@pytest.mark.parametrize(
    ("gres", "gpu_type", "expected"),
    [("gpu:a100_80:4", "a100_80", "gpu:a100_40:4"), ("nvme:1,gpu:a100_80:2", "a100_80", "nvme:1,gpu:a100_40:2"),
     ("gpu:2", "", "gpu:a100_40:2"), ("gpu", "", "gpu:a100_40:1"), ("gpu:a100_80", "a100_80", "gpu:a100_40:1")],
)  # fmt: skip
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


def test_gpus_of_every_form_that_slurm_writes() -> None:
    for text, expected in [
        ("gpu", Gpus(1)), ("gpu:2", Gpus(2)), ("gpu:a100", Gpus(1, "a100")), ("gpu:a100:2", Gpus(2, "a100")),
        ("gres:gpu:2", Gpus(2)), ("gres/gpu:2", Gpus(2)), ("gres/gpu:a100=2", Gpus(2, "a100")),
        ("gres/gpu=8", Gpus(8)), ("billing=32,cpu=32,gres/gpu:a100=4,gres/gpu=4,mem=32000M,node=1", Gpus(4, "a100")),
        ("gres/gpu:a100=1,gres/gpu:v100=2,gres/gpu=3", Gpus(3)), ("gpu:a100:1,gpu:v100:2", Gpus(3)),
        ("gpu:2(S:0-1),nvme:1", Gpus(2)), ("gpu:2080ti:3", Gpus(3, "2080ti")), ("gpu:3090:3", Gpus(3, "3090")),
        ("gres/gpu:3090=3", Gpus(3, "3090")), ("gpu:3090", Gpus(3090)), ("gpu:1g.5gb:7", Gpus(7, "1g.5gb")),
        ("gpu:nvidia_a100-sxm4-80gb:1", Gpus(1, "nvidia_a100-sxm4-80gb")), ("gpu:0", Gpus(0)), ("none", Gpus(0)),
        ("", Gpus(0)), ("cpu=4,mem=1000M,gres/gpumem=80G,gres/gpuutil=100", Gpus(0)),
        ("gres/shard=4,gres/mps=100", Gpus(0)), ("mygpu:4,xgpu=2", Gpus(0)), ("gpu:" + "9" * 5000, Gpus(0)),
    ]:  # fmt: skip
        assert parse_gpus(text) == expected


@given(st.text())
def test_no_text_breaks_the_parser(text: str) -> None:
    assert parse_gpus(text).count >= 0
    assert isinstance(parse_tres(text), dict)


@given(st.integers(0, 10**9 - 1), st.sampled_from(["a100", "3090", "1g.10gb", "h100-80"]))
def test_a_typed_count_reads_the_same_from_every_spelling(count: int, kind: str) -> None:
    for text in (f"gpu:{kind}:{count}", f"gres:gpu:{kind}:{count}", f"gres/gpu:{kind}={count}"):
        assert parse_gpus(text) == Gpus(count, kind)


def test_tres_terms_by_name() -> None:
    assert parse_tres("cpu=32,mem=32000M,gres/gpu:a100=4,odd") == {"cpu": "32", "mem": "32000M", "gres/gpu:a100": "4"}


def test_indices_of_one_node() -> None:
    for detail, expected in [
        ("gpu:a100:3(IDX:0-1,3)", (0, 1, 3)), ("gpu:2(IDX:0,2)", (0, 2)),
        ("gpu:a100:1(IDX:3),gpu:v100:1(IDX:0)", (0, 3)), ("gpu:1g.5gb:2(IDX:4-5)", (4, 5)),
        ("nic:1(IDX:7),gpu:1(IDX:2)", (2,)), ("mygpu:1(IDX:7)", ()), ("gpu:0(IDX:)", ()), ("gpu:a100:0(IDX:N/A)", ()),
        ("gpu:a100:2(CNT:2)", ()), ("", ()), ("shard:2(0/4,0/4,2/4,0/4)", (2,)), ("shard:a100:5(4/4,1/4)", (0, 1)),
        ("shard:2(IDX:1)", (1,)),
        ("shard:a100:2(IDX:0-1)", (0, 1)), ("mps:50(0/100,50/100)", (1,)),
        ("shard:0(0/4)", ()), ("shard:2", ()), ("shard:2(x/4)", ()),
    ]:  # fmt: skip
        assert parse_gpu_indices(detail) == expected


@pytest.mark.parametrize("text", ["x", "1-", "-1", "3-1", "1,,2", "0-99999", "1 2", "٣", "1\n"])
def test_a_malformed_index_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="GPU indices"):
        parse_index_list(text)


@given(st.sets(st.integers(0, 9999), min_size=1, max_size=20))
def test_an_index_list_reads_back(indices: set[int]) -> None:
    assert parse_index_list(",".join(map(str, indices))) == tuple(sorted(indices))
