"""Proposals of another GPU type: Python by hand, and types.lua, which says the same of each case."""

from __future__ import annotations

from typing import Any

import pytest

from advisor.types.decide import TypeRunTime, TypeWait
from almanac.records import JobRequest
from almanac.submit_config import GpuType
from slurm_hooks.advice.kinds import TIMES as TIMES_KIND
from slurm_hooks.advice.kinds import WaitsFile, times_file
from slurm_hooks.submit.choices import Choice
from slurm_hooks.submit.late_proposals import propose_type
from slurm_hooks.submit.proposal import PromptAction, Proposal, action, message, new_choice, question

NOW_S = 1_795_256_100
HOUR_S = 3600.0
BY_GRES = tuple(GpuType(name=name, gres=name) for name in ("a100", "h100", "v100"))
BY_FEATURE = tuple(GpuType(name=name, constraint=name) for name in ("a100", "h100", "v100"))
BY_PARTITION = tuple(GpuType(name=name, partition=f"{name}q") for name in ("a100", "h100", "v100"))
TIMES = (
    TypeRunTime("a100", 11_160, 10_000, 12_000, 14_000, 9, "own runs"),
    TypeRunTime("h100", 6_120, 5_500, 6_800, 9_000, 2, "own rates"),
)


def waits(types: tuple[GpuType, ...], a100_s: float = 300, h100_s: float = 15_600, v100_s: float = 90_000) -> WaitsFile:
    each = {"a100": a100_s, "h100": h100_s, "v100": v100_s}
    rows = tuple(TypeWait(name, wait, wait // 2, wait + 600, NOW_S) for name, wait in each.items())
    return WaitsFile(NOW_S, types, tuple((8, row) for row in rows), tuple((2, row) for row in rows))


def request(**other: Any) -> JobRequest:
    fields: dict[str, Any] = {"gpu_count": 2} | other
    return JobRequest("alice", "train", **fields)


def proposed(asked: JobRequest, types: tuple[GpuType, ...], times: tuple[TypeRunTime, ...] = TIMES) -> Proposal:
    found = propose_type(asked, times, waits(types), NOW_S)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("types", "asked", "option", "value"),
    [
        (BY_GRES, request(gres="gpu:h100:2", gpu_type="h100"), "--gres", "gpu:a100:2"),
        (BY_GRES, request(gres="gpu:h100:2,nvme:1", gpu_type="h100"), "--gres", "gpu:a100:2,nvme:1"),
        (BY_GRES, request(gpu_options=(("--gpus", "h100:2"),), gpu_type="h100"), "--gpus", "a100:2"),
        (BY_GRES, request(gpu_options=(("--gpus-per-node", "h100:2"),), gpu_type="h100"), "--gpus-per-node", "a100:2"),
        (BY_FEATURE, request(constraints="h100"), "--constraint", "a100"),
        (BY_FEATURE, request(constraints="ib&h100"), "--constraint", "ib&a100"),
        (BY_PARTITION, request(partition="h100q"), "--partition", "a100q"),
    ],
)
def test_the_request_is_rewritten_by_what_names_its_type(
    types: tuple[GpuType, ...], asked: JobRequest, option: str, value: str
) -> None:
    found = proposed(asked, types)
    assert (found.change.option, found.change.value) == (option, value)
    text = message(found).replace("\n         ", " ")
    assert "Wait now: 5 min and 4 h 20 min. a100 ends 2 h 51 min earlier." in text


def test_two_gpu_options_a_slice_or_an_unknown_type_are_not_rewritten() -> None:
    two = request(gres="gpu:h100:2", gpu_options=(("--gpus", "h100:2"),), gpu_type="h100")
    assert proposed(two, BY_GRES).change.value == ""
    for name in ("1g.10gb", "b200"):
        assert propose_type(request(gpu_type=name, gres=f"gpu:{name}:1"), TIMES, waits(BY_GRES), NOW_S) is None


def test_several_types_that_end_as_soon_are_asked_for_in_brackets() -> None:
    more = (*TIMES, TypeRunTime("v100", 11_300, 11_000, 12_000, 12_000, 3, "own runs"))
    kinds = {"constraint": BY_FEATURE, "partition": BY_PARTITION, "gres": BY_GRES}
    asked = {
        "constraint": request(constraints="h100"),
        "partition": request(partition="h100q"),
        "gres": request(gpu_type="h100", gres="gpu:h100:2"),
    }
    values = {}
    for kind, types in kinds.items():
        found = propose_type(asked[kind], more, waits(types, v100_s=300), NOW_S)
        assert found is not None
        assert found.check is not None
        values[kind] = (found.change.value, found.check.value)
    assert values == {
        "constraint": ("[a100|v100]", "a100"),
        "partition": ("a100q,v100q", "a100q"),
        "gres": ("gpu:a100:2", "gpu:a100:2"),
    }
    both = propose_type(request(constraints="ib&h100"), more, waits(BY_FEATURE, v100_s=300), NOW_S)
    assert both is not None
    assert both.change.value == "ib&a100"


def test_several_nodes_of_a_plain_alternative_get_a_warning_without_any_run() -> None:
    asked = request(constraints="a100|h100", node_count=3, gpu_count=12)
    found = propose_type(asked, (), waits(BY_FEATURE), NOW_S)
    assert found is not None
    assert message(found) == (
        'almanac: -C "a100|h100" with 3 nodes can give one job nodes of both a100 and\n'
        "         h100; in brackets, all nodes are of one type.\n"
    )
    assert question(found).startswith("         Submit with -C '[a100|h100]' instead?\n")
    for constraint, nodes in (("[a100|h100]", 3), ("a100|h100", 1), ("a100|ib", 3), ("a100&h100", 3)):
        other = propose_type(request(constraints=constraint, node_count=nodes), (), waits(BY_FEATURE), NOW_S)
        assert other is None, constraint


def test_answers_on_types_are_kept_apart_from_answers_on_memory() -> None:
    found = proposed(request(constraints="h100"), BY_FEATURE)
    choice = new_choice(found, None, "always", NOW_S)
    assert (choice.key, choice.tier) == ("?train", "a100")
    assert action("ask", found, choice, NOW_S + 9999) is PromptAction.CHANGE_AND_SAY
    assert action("ask", found, Choice("?train", 2, "asked", "a100", NOW_S), NOW_S + 60) is PromptAction.NOTHING
    assert action("ask", found, None, NOW_S) is PromptAction.ASK


def test_times_of_many_families_are_cut_and_hostile_names_are_left_out() -> None:
    many = {("ü", 1): TIMES, ("y", 1): (), **{(f"k{number}", 2): TIMES for number in range(5000)}}
    file = times_file(NOW_S, NOW_S + 10, many)
    assert TIMES_KIND.parse(TIMES_KIND.render(file)).value == file
    assert 100 < len(file.families) < 5000
    assert file.families[0].key == "k0"
    assert file.of_family(("k1", 2)) == TIMES
    assert file.of_family(("y", 1)) == ()
