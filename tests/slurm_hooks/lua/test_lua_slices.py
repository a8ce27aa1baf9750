"""Requests that may use a MIG slice: Lua reads cli_filter's options and slurmctld's fields as Python reads sbatch's."""

from __future__ import annotations

from typing import Any

import pytest
from lua_runner import Lua

from slurm_hooks.submit.offer import MAX_AGE_S, SLICE_AGE_S, kept, to_keep
from telemetry.slurm.sbatch import parse_submission

ONE: list[dict[str, str]] = [
    {"gpus": "1"}, {"gpus": "gpu:1"}, {"gpus": "a100:1", "ntasks": "4"}, {"gres": "gpu:1"}, {"gpus-per-task": "1"},
    {"gpus-per-node": "1", "nodes": "1-1", "ntasks": "8"}, {"gres": "gpu:1", "nodes": "1"},
    {"gres": "gpu:1", "exclusive": "user"},
]  # fmt: skip
MORE: list[dict[str, str]] = [
    {"gpus": "2"}, {"gres": "gpu:1", "nodes": "2"}, {"gres": "gpu:1", "nodes": "1-2"}, {"gres": "gpu:1", "ntasks": "2"},
    {"gpus-per-node": "1", "ntasks": "2"}, {"gpus-per-task": "1", "ntasks": "2"}, {"gpus": "1", "nodes": "1-4"},
    {"gpus": "1", "nodes": "2"}, {"gres": "gpu:1", "exclusive": "exclusive"}, {"gres": "gpu:1", "nodes": "1,2"},
]  # fmt: skip


def in_python(options: dict[str, str]) -> Any:
    argv = [f"--{name}={value}" for name, value in options.items()]
    return parse_submission([*argv, "x.sh"], {}, lambda name: "").request("ann", 0)


@pytest.mark.parametrize("options", [*ONE, *MORE], ids=str)
def test_the_same_request_in_both_languages(lua: Lua, options: dict[str, str]) -> None:
    (found,) = lua.call("almanac.request_of_options", {"nodes": "1-0", "ntasks": "1", **options})
    expected = in_python(options)
    assert expected.is_one_gpu == (options in ONE)
    assert lua.call("tiers.is_one_gpu", {k: found.get(k) for k in ("gpu_count", "may_use_more")}) == [options in ONE]
    asks = [(ask["option"], ask["text"]) for ask in (found["gpu_options"] or {}).values()]
    assert asks == list(expected.gpu_options)


def test_a_later_component_of_a_het_job_may_use_more(lua: Lua) -> None:
    (found,) = lua.call("almanac.request_of_options", {"gpus": "1"}, 1)
    assert found["may_use_more"] is True


@pytest.mark.parametrize(
    ("job", "is_one"),
    [
        ({"tres_per_job": "gres:gpu:1"}, True),
        ({"tres_per_node": "gres:gpu:1", "min_nodes": 1, "max_nodes": 1}, True),
        ({"tres_per_node": "gres:gpu:1", "min_nodes": 1, "max_nodes": 4}, False),
        ({"tres_per_node": "gres:gpu:1", "min_nodes": 2, "max_nodes": 2}, False),
        ({"tres_per_node": "gres:gpu:1", "num_tasks": 2}, False),
        ({"tres_per_job": "gres:gpu:1", "num_tasks": 2}, True),
        ({"tres_per_job": "gres:gpu:1", "shared": 0}, False),
        ({"tres_per_job": "gres:gpu:1", "shared": 65534, "max_nodes": 4294967294}, True),
        ({"tres_per_job": "gres:gpu:2"}, False),
    ],
)
def test_what_job_submit_sees(lua: Lua, job: dict[str, Any], is_one: bool) -> None:
    (found,) = lua.call("almanac.request_of_job", job)
    assert lua.call("tiers.is_one_gpu", {k: found.get(k) for k in ("gpu_count", "may_use_more")}) == [is_one]


@pytest.mark.parametrize("age_s", [0, SLICE_AGE_S - 1, SLICE_AGE_S, MAX_AGE_S - 1, MAX_AGE_S])
def test_a_listing_is_kept_for_a_shorter_time_before_a_change_to_a_slice(lua: Lua, age_s: int) -> None:
    text = to_keep("x", 1000, "here")
    code = f"""local offer = dofile(dir .. "offer.lua")
    local text = "almanac-nodes\\t1\\t1000\\there\\nx"
    all(offer.kept(text, {1000 + age_s}, "here"), offer.kept(text, {1000 + age_s}, "here", offer.SLICE_AGE_S))"""
    ages = [kept(text, 1000 + age_s, "here"), kept(text, 1000 + age_s, "here", SLICE_AGE_S)]
    assert ages == ["x" if age_s < MAX_AGE_S else None, "x" if age_s < SLICE_AGE_S else None]
    assert lua.run(code) == [ages]
