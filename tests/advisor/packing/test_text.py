"""Packing advice in words: lines of at most 80 columns, whatever the names, and a command that packs."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_site import family

from advisor.packing.decide import PackingRules, Range, decide_packing, packing_alone
from advisor.packing.text import (
    packing_command,
    packing_evidence,
    packing_lines,
    packing_table,
    packing_time,
    why_silent,
)  # fmt: skip
from slurm_hooks.packing.options import items_of, parse_options

RULES = PackingRules()


def test_two_runs_of_one_family() -> None:
    advice = decide_packing((family(sm=0.5),) * 2, RULES)
    assert packing_lines(advice, indent="  ") == [
        "  Pack two on one GPU: each likely 0.59 to 1.00 of its speed, 1.18 to 2.00 times",
        "    the work per GPU-hour (8 runs).",
        "    Use: --array=A-B:2 and almanac-pack -- CMD {}",
        "    With MPS, each may need up to 1.7 times its run time: raise --time.",
    ]
    assert packing_lines(advice, is_array=False)[-2] == "  Use: almanac-pack --items A-B -- CMD {}"
    assert why_silent(advice) == ""
    assert packing_evidence(advice) == (
        "Together they need about 100% of a GPU's multiprocessors and 20% of its memory bandwidth. "
        "About 1 in 100 such pairs needs more than 21.0 GiB of its memory; 79.0 GiB can be used. "
        "With MPS, each may need up to 1.7 times its run time: raise --time."
    )


def test_a_low_end_of_six_tenths_takes_five_thirds_of_the_time() -> None:
    advice = decide_packing((family(),) * 2, RULES)
    slow = dataclasses.replace(advice, speeds=(Range(0.8, 1.0), Range(0.6, 1.0)))
    half = dataclasses.replace(advice, speeds=(Range(0.5, 1.0),) * 2)
    assert "up to 1.7 times its run time" in packing_time(slow)
    assert "up to 2.0 times its run time" in packing_time(half)
    assert packing_time(decide_packing((family(sm=0.9),) * 2, RULES)) == ""


def test_two_families() -> None:
    advice = decide_packing((family("train", 0.6), family("eval", 0.2)), RULES)
    assert packing_lines(advice) == [
        'Share a GPU with "eval": speeds 0.68 to 1.00 and 0.56 to 1.00, 1.25 to 2.00',
        "  times the work per GPU-hour (8 runs).",
        "  Use: almanac-pack a.sh b.sh",
        "  With MPS, each may need up to 1.8 times its run time: raise --time.",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [({"bound_gib": 60}, "Packing: two runs may need 121.0 GiB of the 79.0 GiB of a GPU that can be used."),
     ({"sm": 0.9}, "Packing: two runs may do only 0.75 times the work per GPU-hour; 1.15 are needed."),
     ({"coverage": 0.1}, "Packing: less than 70% of the activity samples are known."),
     ({"is_preallocated": True}, "Packing: your runs reserve the GPU's memory at their start."),
     ({"bounds_mib": {}}, "Packing: no memory bound for two runs together yet."),
     ({"gpu_model": "K80-12"}, "Packing: no advice for GPUs older than Volta (compute capability below 7.0)."),
     ({"is_on_mig": True}, "Packing: MIG slices are not shared further.")],
)  # fmt: skip
def test_why_nothing_is_advised(change: dict[str, Any], said: str) -> None:
    advice = packing_alone(family(**change), RULES)
    assert why_silent(advice) == said
    assert (packing_lines(advice), packing_command(advice)) == ([], "")


@given(st.text(max_size=60), st.sampled_from(["", "  "]), st.floats(0, 0.5))
def test_four_lines_of_80_columns_without_control_characters(name: str, indent: str, sm: float) -> None:
    for advice in (decide_packing((family(), family(name, sm)), RULES), packing_alone(family(name, sm), RULES)):
        lines = packing_lines(advice, 80, indent)
        assert len(lines) == (4 if advice.is_advised else 0)
        assert all(len(line) <= 80 and line.isprintable() for line in lines)
        json.dumps(packing_table(advice), allow_nan=False)


def test_a_name_cannot_steer_a_terminal_or_break_a_line() -> None:
    advice = decide_packing((family(), family('\x1b[31mred\n"; rm -rf ~\u202e', 0.2)), RULES)
    assert 'Share a GPU with "?[31mred?' in packing_lines(advice)[0]
    assert json.loads(json.dumps(packing_table(advice)))["members"][1]["name_key"].startswith("\x1b[31m")


@pytest.mark.parametrize(("sm", "tasks"), [(0.4, 2), (0.05, 4)])
def test_the_command_packs_as_it_stands(sm: float, tasks: int) -> None:
    """almanac-pack's own reading of the command: so many tasks at a time, and as many items in each array task."""
    advice = packing_alone(family(sm=sm, bound_gib=2), RULES)
    option, said = packing_command(advice).split(" and ")
    assert option == f"--array=A-B:{tasks}"
    options = parse_options(shlex.split(said)[1:])
    array = {"SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": f"{5 * tasks}", "SLURM_ARRAY_TASK_COUNT": "6"}
    environ = {**array, "SLURM_ARRAY_TASK_STEP": f"{tasks}", "SLURM_ARRAY_TASK_ID": f"{tasks}"}
    items = items_of(options, environ)
    assert (options.tasks_per_gpu, [item.argv for item in items]) == (
        tasks, [("CMD", str(index)) for index in range(tasks, 2 * tasks)],
    )  # fmt: skip


def test_the_command_without_an_array_names_its_items() -> None:
    advice = packing_alone(family(sm=0.4), RULES)
    said = packing_command(advice, is_array=False).replace("A-B", "0-3")
    assert [item.index for item in items_of(parse_options(shlex.split(said)[1:]), {})] == [0, 1, 2, 3]
