"""tiers.lua finds the tier of a request that Python finds."""

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
from almanac.records import JobRequest
from almanac.tiers import requested_tier, required_features

REWRITES = json.loads((Path(__file__).parents[1] / "vectors" / "rewrites.json").read_text())
KINDS = ("constraint", "gres", "partition")


def as_lua(tier: dict[str, Any]) -> dict[str, Any]:
    """A tier as almanac.lua reads it from an advice file."""
    slices = {"compute_slices": tier["compute_slices"]} if "compute_slices" in tier else {}
    return {"name": tier["name"], "kind": tier["kind"], tier["kind"]: tier["selector"], **slices}


def test_the_shared_vectors(lua: Lua) -> None:
    code = "local function try(request, known) all((tiers.requested_tier(request, known) or {}).name) end"
    for case in REWRITES:
        code += f"\ntry({literal(asking(case))}, {literal([as_lua(tier) for tier in case['tiers']])})"
    assert lua.run(code) == [[case["asked"]] for case in REWRITES]


def asking(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "gpu_count": case.get("gpu_count", 2),
        "may_use_more": case.get("may_use_more", False),
        "constraints": case["constraint"],
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
    CONSTRAINTS, st.sampled_from(["", "a", "b", "x"]), st.sampled_from(["", "a", "b", "a,b", "x", "%a"])
)


@given(cases=st.lists(st.tuples(REQUESTS, TIERS), min_size=1, max_size=20))
@examples(0.4)
def test_the_requested_tier_as_python_finds_it(lua: Lua, cases: list[Any]) -> None:
    rows, expected = [], []
    for (constraints, gpu_type, partition), kinds in cases:
        known = [{"name": f"t{n}", "kind": kind, kind: selector} for n, (kind, selector) in enumerate(kinds)]
        rows.append(({"constraints": constraints, "gpu_type": gpu_type, "partition": partition}, known))
        tiers = [Tier(name=f"t{n}", **{kind: selector}) for n, (kind, selector) in enumerate(kinds)]
        asked = JobRequest("alice", constraints=constraints, gpu_type=gpu_type, partition=partition)
        named = requested_tier(asked, tiers)
        expected.append(named and named.name)
    found = lua.calls("tiers.requested_tier", rows)
    assert [tier and tier["name"] for (tier,) in found] == expected


@pytest.mark.parametrize("text", ["%", "[%", "(" * 5000, "%b()" * 2500, "a&" * 5000, "\x1b[31m", "$(id)", "a\nb"])
def test_hostile_constraints_never_raise(lua: Lua, text: str) -> None:
    tier = {"name": "t", "kind": "constraint", "constraint": "t"}
    asked = asking({"constraint": text, "partition": text, "gpu_type": text})
    assert lua.call("tiers.requested_tier", asked, [tier]) == [None]
