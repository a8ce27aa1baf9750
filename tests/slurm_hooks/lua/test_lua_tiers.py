"""tiers.lua: a rewrite is offered exactly where Python offers it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lua_runner import Lua, literal
from profiles import examples

from almanac.config import Tier
from almanac.records import Request
from almanac.tiers import requested_tier, required_features, rewrite

REWRITES = json.loads((Path(__file__).parents[1] / "vectors" / "rewrites.json").read_text())
KINDS = ("constraint", "gres", "partition")


def as_lua(tier: dict[str, Any]) -> dict[str, Any]:
    """A tier as almanac.lua reads it from an advice file."""
    slices = {"compute_slices": tier["compute_slices"]} if "compute_slices" in tier else {}
    return {"name": tier["name"], "kind": tier["kind"], tier["kind"]: tier["selector"], **slices}


def test_the_shared_vectors(lua: Lua) -> None:
    code = """local function try(request, known, target)
      local asked = tiers.requested_tier(request, known)
      all(asked and asked.name, tiers.rewrite(request, known, known[target]))
    end"""
    for case in REWRITES:
        known = [as_lua(tier) for tier in case["tiers"]]
        target = [tier["name"] for tier in case["tiers"]].index(case["advised"]) + 1
        code += f"\ntry({literal(asking(case))}, {literal(known)}, {target})"
    for case, (asked, option, value) in zip(REWRITES, lua.run(code), strict=True):
        assert asked == case["asked"], case
        if case["offer"]:
            assert (option, value) == (case["option"], case["value"]), case
        elif asked != case["advised"]:
            assert option is None, case


def asking(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "gpu_options": [{"option": option, "text": text} for option, text in case.get("gpu_options", [])],
        "gpu_count": case.get("gpu_count", 2),
        "may_use_more": case.get("may_use_more", False),
        "constraints": case["constraint"],
        "gres": case["gres"],
        "partition": case["partition"],
        "gpu_type": case["gpu_type"],
    }


CONSTRAINTS = st.text(alphabet="abg&|()[]*2,! .%\n$-", max_size=30)


@given(constraints=st.lists(CONSTRAINTS, min_size=1, max_size=30))
@examples(0.4)
def test_required_features_as_python_finds_them(lua: Lua, constraints: list[str]) -> None:
    found = lua.calls("tiers.required_features", [(text,) for text in constraints])
    assert [set(features) for (features,) in found] == [required_features(text) for text in constraints]


SELECTORS = st.sampled_from(["a", "b", "ab", "g"])
TIERS = st.lists(st.tuples(st.sampled_from(KINDS), SELECTORS), min_size=1, max_size=3, unique=True)
REQUESTS = st.tuples(
    CONSTRAINTS,
    st.sampled_from(["", "gpu", "gpu:2", "gpu:a:2", "gpu:b", "nvme:1,gpu:a:2", "gpu:a:2,gpu:b:1", "gpu:2(S:0)"]),
    st.sampled_from(["", "a", "b", "x"]),
    st.sampled_from(["", "a", "b", "a,b", "x", "%a", ","]),
)


@given(cases=st.lists(st.tuples(REQUESTS, TIERS), min_size=1, max_size=20))
@examples(0.6)
def test_rewrites_as_python_makes_them(lua: Lua, cases: list[Any]) -> None:
    rows, expected = [], []
    for (constraints, gres, gpu_type, partition), kinds in cases:
        known = [{"name": f"t{n}", "kind": kind, kind: selector} for n, (kind, selector) in enumerate(kinds)]
        tiers = [Tier(name=f"t{n}", **{kind: selector}) for n, (kind, selector) in enumerate(kinds)]
        request = {"constraints": constraints, "gres": gres, "gpu_type": gpu_type, "partition": partition}
        asked = Request("alice", constraints=constraints, gres=gres, gpu_type=gpu_type, partition=partition)
        for place, target in enumerate(tiers):
            rows.append((request, known, known[place]))
            made = rewrite(asked, tiers, target)
            expected.append([None, made.why_not] if made.why_not else [made.option, made.value])
        found = lua.call("tiers.requested_tier", request, known)[0]
        named = requested_tier(asked, tiers)
        assert (found and found["name"]) == (named and named.name)
    assert lua.calls("tiers.rewrite", rows) == expected


@pytest.mark.parametrize("text", ["%", "[%", "(" * 5000, "%b()" * 2500, "a&" * 5000, "\x1b[31m", "$(id)", "a\nb"])
def test_hostile_constraints_never_raise(lua: Lua, text: str) -> None:
    tier = {"name": "t", "kind": "constraint", "constraint": "t"}
    for request in (asking({"constraint": text, "gres": text, "partition": text, "gpu_type": text}),):
        assert lua.call("tiers.requested_tier", request, [tier]) == [None]
        lua.call("tiers.rewrite", request, [tier], tier)
