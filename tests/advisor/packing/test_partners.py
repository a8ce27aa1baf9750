"""The best partner of each family, beside what trying every pair finds."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_site import GIB, family

from advisor.decisions.packing import PackingRules, decide_packing
from advisor.packing.partners import MOST_PARTNERS, best_partners, packing_alone, packing_pairs

RULES = PackingRules()


def test_as_many_tiny_runs_as_bring_the_most_work() -> None:
    assert packing_alone(family(sm=0.05, dram=0.05), RULES).tasks == 4
    assert packing_alone(family(sm=0.3, dram=0.05), RULES).tasks == 2
    assert packing_alone(family(sm=0.05, dram=0.05, bounds_mib={2: 9 * GIB}), RULES).tasks == 2
    assert packing_alone(family(sm=0.05, bound_gib=24), RULES).tasks == 3
    assert packing_alone(family(sm=0.9), RULES).reason == "little gain"


def test_a_family_shares_with_itself_or_with_the_partner_that_brings_the_most() -> None:
    busy, light, other = family("busy", 0.8), family("light", 0.15, 0.15), family("heavy", 1.0, 1.0)
    best = best_partners([busy, light, other], RULES)
    assert [each.name_key for each in best[busy.key].members] == ["busy", "light"]
    assert {each.name_key for each in best[light.key].members} == {"light"}
    assert other.key not in best


def test_itself_comes_first_among_equals() -> None:
    best = best_partners([family(name, 0.4, 0.4) for name in "abc"], RULES)
    assert all(advice.is_with_itself for advice in best.values())


def test_only_families_of_one_user_are_paired() -> None:
    found = packing_pairs([family("a", 0.8), family("b", 0.1, 0.1, user="bob"), family("c", 0.8, user="bob")], RULES)
    assert [{member.user for member in advice.members} for advice in found] == [{"bob"}] * len(found)
    assert {frozenset(member.name_key for member in advice.members) for advice in found} == {
        frozenset({"b"}),
        frozenset({"b", "c"}),
    }


few = st.lists(
    st.builds(
        family,
        sm=st.floats(0, 1),
        dram=st.floats(0, 1),
        bound_gib=st.floats(1, 60),
        gpu_model=st.sampled_from(["A100-80", "H100"]),
        is_on_mig=st.sampled_from([False, False, True]),
        capacity_mib=st.sampled_from([40 * GIB, 80 * GIB]),
    ),
    max_size=MOST_PARTNERS,
)


@given(few)
def test_the_best_partner_is_that_of_trying_every_pair(made: list[Any]) -> None:
    families = [dataclasses.replace(each, name_key=f"f{place}") for place, each in enumerate(made)]
    tried = [packing_alone(each, RULES) for each in families]
    tried += [decide_packing(pair, RULES) for pair in combinations(families, 2)]
    most: dict[str, float] = {}
    for advice in tried:
        for member in advice.members if advice.is_advised and advice.gain else ():
            most[member.name_key] = max(most.get(member.name_key, 0.0), advice.gain.low if advice.gain else 0.0)
    best = best_partners(families, RULES)
    assert {key[1]: each.gain.low for key, each in best.items() if each.gain} == pytest.approx(most)
