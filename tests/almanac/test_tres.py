from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.tres import Gpus, parse_gpu_indices, parse_gpus, parse_index_list, parse_tres


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu", Gpus(1)),
        ("gpu:2", Gpus(2)),
        ("gpu:a100", Gpus(1, "a100")),
        ("gpu:a100:2", Gpus(2, "a100")),
        ("gres:gpu:2", Gpus(2)),
        ("gres/gpu:2", Gpus(2)),
        ("gres/gpu:a100=2", Gpus(2, "a100")),
        ("gres/gpu=8", Gpus(8)),
        ("billing=32,cpu=32,gres/gpu:a100=4,gres/gpu=4,mem=32000M,node=1", Gpus(4, "a100")),
        ("gres/gpu:a100=1,gres/gpu:v100=2,gres/gpu=3", Gpus(3)),
        ("gpu:a100:1,gpu:v100:2", Gpus(3)),
        ("gpu:2(S:0-1),nvme:1", Gpus(2)),
        ("gpu:2080ti:3", Gpus(3, "2080ti")),
        ("gpu:3090:3", Gpus(3, "3090")),
        ("gres/gpu:3090=3", Gpus(3, "3090")),
        ("gpu:3090", Gpus(3090)),
        ("gpu:1g.5gb:7", Gpus(7, "1g.5gb")),
        ("gpu:nvidia_a100-sxm4-80gb:1", Gpus(1, "nvidia_a100-sxm4-80gb")),
        ("gpu:0", Gpus(0)),
        ("none", Gpus(0)),
        ("", Gpus(0)),
        ("cpu=4,mem=1000M,gres/gpumem=80G,gres/gpuutil=100", Gpus(0)),
        ("gres/shard=4,gres/mps=100", Gpus(0)),
        ("mygpu:4,xgpu=2", Gpus(0)),
        ("gpu:" + "9" * 5000, Gpus(0)),
    ],
)
def test_gpus_of_every_form_that_slurm_writes(text: str, expected: Gpus) -> None:
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
    assert parse_tres("cpu=32,mem=32000M,gres/gpu:a100=4,odd") == {
        "cpu": "32",
        "mem": "32000M",
        "gres/gpu:a100": "4",
    }


@pytest.mark.parametrize(
    ("detail", "expected"),
    [
        ("gpu:a100:3(IDX:0-1,3)", (0, 1, 3)),
        ("gpu:2(IDX:0,2)", (0, 2)),
        ("gpu:a100:1(IDX:3),gpu:v100:1(IDX:0)", (0, 3)),
        ("gpu:1g.5gb:2(IDX:4-5)", (4, 5)),
        ("nic:1(IDX:7),gpu:1(IDX:2)", (2,)),
        ("mygpu:1(IDX:7)", ()),
        ("gpu:0(IDX:)", ()),
        ("gpu:a100:0(IDX:N/A)", ()),
        ("gpu:a100:2(CNT:2)", ()),
        ("", ()),
    ],
)
def test_indices_of_one_node(detail: str, expected: tuple[int, ...]) -> None:
    assert parse_gpu_indices(detail) == expected


@pytest.mark.parametrize("text", ["x", "1-", "-1", "3-1", "1,,2", "0-99999", "1 2", "٣", "1\n"])
def test_a_malformed_index_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="GPU indices"):
        parse_index_list(text)


@given(st.sets(st.integers(0, 9999), min_size=1, max_size=20))
def test_an_index_list_reads_back(indices: set[int]) -> None:
    assert parse_index_list(",".join(map(str, indices))) == tuple(sorted(indices))
