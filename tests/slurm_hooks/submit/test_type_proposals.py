"""Proposals of another GPU type: Python by hand, and types.lua, which says the same of each case."""

from __future__ import annotations

import random
from typing import Any

import pytest

from advisor.waits.view import TypeWait
from almanac.records import Request
from almanac.submit_config import GpuType
from almanac.units import format_duration
from slurm_hooks.advice.times_file import PublishedTime, render_times, usable_times
from slurm_hooks.advice.waits_file import WaitsFile, parse_waits, render_waits
from slurm_hooks.submit.choices import Choice
from slurm_hooks.submit.proposal import PromptAction, Proposal, action, message, new_choice, question
from slurm_hooks.submit.type_proposal import propose_type
from tests.slurm_hooks.lua_runner import INTERPRETERS, Lua, literal

NOW_S = 1_795_256_100
HOUR_S = 3600.0
BY_GRES = tuple(GpuType(name=name, gres=name) for name in ("a100", "h100", "v100"))
BY_FEATURE = tuple(GpuType(name=name, constraint=name) for name in ("a100", "h100", "v100"))
BY_PARTITION = tuple(GpuType(name=name, partition=f"{name}q") for name in ("a100", "h100", "v100"))
TIMES = (
    PublishedTime("a100", 11_160, 10_000, 12_000, 14_000, 9, "own runs"),
    PublishedTime("h100", 6_120, 5_500, 6_800, 9_000, 2, "own rates"),
)


def waits(types: tuple[GpuType, ...], a100_s: float = 300, h100_s: float = 15_600, v100_s: float = 90_000) -> WaitsFile:
    each = {"a100": a100_s, "h100": h100_s, "v100": v100_s}
    rows = [(8, TypeWait(name, wait, wait // 2, wait + 600, NOW_S)) for name, wait in each.items()]
    return WaitsFile(NOW_S, types, tuple(rows))


def request(**other: Any) -> Request:
    fields: dict[str, Any] = {"gpu_count": 2} | other
    return Request("alice", "train", **fields)


def proposed(asked: Request, types: tuple[GpuType, ...], times: tuple[PublishedTime, ...] = TIMES) -> Proposal:
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
    types: tuple[GpuType, ...], asked: Request, option: str, value: str
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
    more = (*TIMES, PublishedTime("v100", 11_300, 11_000, 12_000, 12_000, 3, "own runs"))
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


def test_a_users_file_of_times_comes_back_and_breaks_on_anything_else(tmp_path: Any) -> None:
    path = tmp_path / "times"
    path.write_bytes(render_times(NOW_S + 10, {("train", 2): TIMES, ("x" * 70, 1): TIMES, ("y", 1): ()}))
    file = usable_times(path, NOW_S)
    assert file is not None
    assert file.times == {("train", 2): TIMES}
    assert usable_times(path, NOW_S + 10) is None
    good = path.read_bytes()
    for bad in (
        good[:-1],
        good + b"R\n",
        good.replace(b"own rates", b"rumour"),
        good.replace(b"\t9\t", b"\t-9\t"),
        b"\xff",
    ):
        assert bad != good
        path.write_bytes(bad)
        assert usable_times(path, NOW_S) is None
    many = render_times(NOW_S + 10, {(f"k{number}", 1): TIMES for number in range(5000)})
    assert len(many) <= 65_536
    path.write_bytes(many)
    assert usable_times(path, NOW_S) is not None


CONSTRAINTS = (
    "", "h100", "a100", "ib&h100", "h100&ib", "[a100|h100]", "a100|h100", "a100|ib", "!h100", "h100*2", "a100,ib",
    "h1O0", "(a100|h100)&ib", "%d+|a100", "a100|", "v100|h100|a100",
)  # fmt: skip


def random_case(rng: random.Random) -> tuple[Request, list[PublishedTime], WaitsFile]:
    types = rng.choice((BY_GRES, BY_FEATURE, BY_PARTITION, (*BY_GRES[:2], *BY_FEATURE[2:])))
    gpu_type = rng.choice(("", "", "h100", "a100", "1g.10gb"))
    gres = f"gpu:{gpu_type}:2" if gpu_type else rng.choice(("", "gpu:2", "nvme:1"))
    options = rng.choice(((), (), (("--gpus", "h100:2"),)))
    asked = request(
        constraints=rng.choice(CONSTRAINTS), partition=rng.choice(("", "h100q", "a100q,h100q", "all")), gres=gres,
        gpu_type=gpu_type or ("h100" if options else ""), gpu_options=options, node_count=rng.choice((1, 1, 2)),
        gpu_count=rng.choice((1, 2, 4, 9)), time_limit_s=rng.choice((None, None, 60, 7200, 86_400)),
    )  # fmt: skip
    times, rows = [], []
    for name in rng.sample(("a100", "h100", "v100", "zz"), rng.randint(0, 4)):
        run_s = float(rng.choice((30, 600, 5000, 11_160, 11_300, 200_000)))
        spread = rng.choice((1.0, 1.02, 1.5))
        source = rng.choice(("own runs", "own rates", "specifications"))
        low_s, high_s = float(round(run_s / spread)), float(round(run_s * spread))
        longest_s = round(high_s * rng.choice((1, 1.5)))
        times.append(PublishedTime(name, run_s, low_s, high_s, longest_s, rng.choice((0, 1, 7)), source))
    for name in ("a100", "h100", "v100"):
        for size in rng.sample((1, 2, 4, 8), rng.randint(0, 3)):
            wait_s = float(rng.choice((0, 0, 300, 15_600, 90_000)))
            rows.append((size, TypeWait(name, wait_s, wait_s // 2, wait_s + rng.choice((0, 600)), NOW_S)))
    return asked, times, WaitsFile(NOW_S, types, tuple(rows), rng.choice((0.15, 0.05)))


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_lua_proposes_the_same(interpreter: str) -> None:
    rng = random.Random(21)
    cases = [random_case(rng) for _ in range(2000)]
    code = [
        'local types, proposal = dofile(dir .. "types.lua"), dofile(dir .. "proposal.lua")',
        "local function propose(request, times, waits)",
        "  local told = types.parse_times(times, 1795256100, 'train', request.gpu_count)",
        "  local found = types.propose(tiers, request, told, types.parse_waits(waits, 1795256100), 'train')",
        "  if not found then all(nil) return end",
        "  all(found.said, found.option, found.value, found.check_value, proposal.message(found), found.choice_key)",
        "end",
    ]
    expected = []
    for asked, times, file in cases:
        told = {
            "constraints": asked.constraints, "gres": asked.gres, "partition": asked.partition,
            "gpu_count": asked.gpu_count, "gpu_type": asked.gpu_type, "node_count": asked.node_count,
            "may_use_more": False, "time_limit_s": asked.time_limit_s,
            "gpu_options": [{"option": option, "text": text} for option, text in asked.gpu_options],
        }  # fmt: skip
        content = render_times(NOW_S + 1, {("train", asked.gpu_count): times})
        code.append(f"propose({literal(told)}, {literal(content)}, {literal(render_waits(file))})")
        found = propose_type(asked, times, parse_waits(render_waits(file)), NOW_S)  # in steps of 5 minutes
        if found is None:
            expected.append([None])
            continue
        check = found.check.value if found.check else ""
        values = (found.change.value and found.change.option, found.change.value, check)
        expected.append([found.said, *(value or None for value in values), message(found), "?train"])
    actual = Lua(interpreter).run("\n".join(code))
    kept = [row if len(row) == 1 else [row[0], row[1] if row[2] else None, row[2], *row[3:]] for row in actual]
    assert len(kept) == len(cases)
    for case, one, other in zip(cases, kept, expected, strict=True):
        assert one == other, case
    said = [row[0] for row in expected if row[0]]
    assert len(said) > 50
    assert any(row[1] is None for row in expected if row[0])


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_lua_refuses_the_same_files_and_writes_durations_alike(interpreter: str) -> None:
    good = render_waits(waits(BY_FEATURE))
    bad = [
        good.replace(b"waits\t1", b"waits\t2"), good[:-1], good.replace(b"end\t6", b"end\t5"), b"", b"\xff\n" * 9,
        good.replace(b"T\ta100\tconstraint\ta100\n", b""), good.replace(b"constraint", b"nodelist"),
        good.replace(b"\t300\t0\t", b"\t300\t600\t"), good.replace(b"W\ta100\t8", b"W\ta100\t0"),
    ]  # fmt: skip
    assert all(each != good for each in bad)
    lua = Lua(interpreter)
    code = ['local types = dofile(dir .. "types.lua")']
    code += [f"all(types.parse_waits({literal(each)}, {NOW_S}) ~= nil)" for each in (good, *bad)]
    code += [f"all(types.parse_waits({literal(good)}, {now}) ~= nil)" for now in (NOW_S - 1, NOW_S + 600, NOW_S + 601)]
    seconds = [0, 1, 59, 60, 89, 90, 150, 3599, 3600, 5400, 86_370, 86_399, 86_400, 90_000, 200_000, 10**9]
    code += [f"all(types.duration({each}))" for each in seconds]
    found = [row[0] for row in lua.run("\n".join(code))]
    assert found[: 1 + len(bad)] == [True, *[False] * len(bad)]
    assert found[1 + len(bad) :][:3] == [False, True, False]
    assert found[4 + len(bad) :] == [format_duration(each) for each in seconds]
