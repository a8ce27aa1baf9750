"""The best partner of each family; pairs that are advised exceed a GPU no more often than stated."""

from __future__ import annotations

import dataclasses
import math
from itertools import combinations
from typing import Any

import pandas as pd
import pytest
from hostile_site import proof_shape, record_of
from hypothesis import given
from hypothesis import strategies as st
from packing_advice import replay_pairs
from packing_site import GIB, family

from advisor.packing.decide import (
    MOST_PARTNERS,
    PackingRules,
    best_partners,
    decide_packing,
    packing_alone,
    packing_pairs,
)
from almanac.config import AdviceSection, Tier

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

    best = best_partners([family(name, 0.4, 0.4) for name in "abc"], RULES)
    assert all(advice.is_with_itself for advice in best.values()), "itself comes first among equals"


def test_only_families_of_one_user_are_paired() -> None:
    found = packing_pairs([family("a", 0.8), family("b", 0.1, 0.1, user="bob"), family("c", 0.8, user="bob")], RULES)
    assert [{member.user for member in advice.members} for advice in found] == [{"bob"}] * len(found)
    assert {"".join(sorted({member.name_key for member in advice.members})) for advice in found} == {"b", "bc"}


few = st.lists(
    st.builds(
        family, sm=st.floats(0, 1), dram=st.floats(0, 1), bound_gib=st.floats(1, 60),
        gpu_model=st.sampled_from(["A100-80", "H100"]), is_on_mig=st.sampled_from([False, False, True]),
        capacity_mib=st.sampled_from([40 * GIB, 80 * GIB]),
    ), max_size=MOST_PARTNERS,
)  # fmt: skip


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


TIERS = (Tier("hbm40g", 40960, "A100-40", constraint="hbm40g"), Tier("hbm80g", 81920, "A100-80", constraint="hbm80g"))
CONTEXT_MIB = 500
WARM_UP_S = 30 * 86_400


@pytest.mark.parametrize("risk", [0.01, 0.05])
@pytest.mark.parametrize("is_hostile", [True, False])
def test_later_runs_of_advised_pairs_exceed_a_gpu_no_more_often_than_stated(risk: float, is_hostile: bool) -> None:
    shape = dataclasses.replace(proof_shape(502), days=60.0, users=60)
    history, truth = record_of(shape, is_hostile=is_hostile)
    advice = dataclasses.replace(AdviceSection(), risk=risk)
    pairs = pd.DataFrame(list(replay_pairs(history, advice, TIERS, CONTEXT_MIB, shape.start_s + WARM_UP_S)))
    need = truth["need_mib"].to_numpy()
    exceeds = pd.Series([need[first] + need[second] for first, second in pairs["rows"]]) > pairs["usable_mib"]
    for kind in (pairs["is_one_family"], ~pairs["is_one_family"]):
        number = int(kind.sum())
        assert number > 200
        allowance = 2 * math.sqrt(risk * (1 - risk) / number)
        assert exceeds[kind].mean() <= risk + allowance
