"""How many nodes to keep, and which: rules that no state may break."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.decisions.power import (
    DemandView,
    ForecastController,
    KeepWarm,
    PaperConstants,
    PaperController,
    Settings,
    Vanilla,
)
from advisor.decisions.power_nodes import NodeFlag, PowerLimits, PowerNode, select_nodes

NOW_S = 100_000
NOTHING = NodeFlag(0)
VIEW = DemandView(
    step=100, total=420, powered=400, active=299.0, recent=310.0, highs=(320.0, 310.0, 300.0),
    peaks={6: 310.0, 36: 330.0},
    changes={(18, 0.8): 5.0, (36, 0.95): 20.0}, expected={30: 290.0, 60: 285.0},
)  # fmt: skip


def test_the_paper_shrinks_to_the_running_nodes_plus_a_buffer_only_when_both_trends_fall() -> None:
    paper = PaperController(PaperConstants())
    assert paper.target(VIEW) == 320
    assert paper.target(VIEW._replace(powered=310)) is None  # the periodic check never powers up
    assert paper.target(VIEW._replace(highs=(300.0, 300.0, 300.0))) is None
    assert paper.target(VIEW._replace(expected={30: 301.0, 60: 285.0})) is None
    assert paper.target(VIEW._replace(expected={30: 290.0, 60: 291.0})) is None


def test_the_paper_wakes_the_gap_plus_a_buffer_and_then_holds() -> None:
    paper = PaperController(PaperConstants())
    assert paper.raised(VIEW, 405) == 425
    assert paper.target(VIEW._replace(step=109)) is None
    assert paper.target(VIEW._replace(step=110)) == 320


def test_ours_keeps_the_forecast_highest_demand_the_buffer_and_the_remembered_peak() -> None:
    ours = ForecastController(Settings(18, 0.8, buffer=4, patience=6))
    assert ours.target(VIEW) == 319
    assert ForecastController(Settings(18, 0.8, buffer=4, patience=36)).target(VIEW) == 334
    assert ours.target(VIEW._replace(powered=319)) is None
    assert ours.raised(VIEW, 402) == 426


@pytest.mark.parametrize(
    "missing",
    [
        {"changes": None, "expected": None},
        {"is_stale": True},
        {"active": None},
        {"recent": None, "highs": (), "peaks": {}},
    ],
)
def test_without_a_forecast_or_with_stale_data_nothing_is_powered_down(missing: dict[str, object]) -> None:
    view = VIEW._replace(**missing)  # type: ignore[arg-type]
    assert ForecastController(Settings(18, 0.8, 4)).target(view) is None
    if "active" not in missing and "is_stale" not in missing:
        assert ForecastController(Settings(18, 0.8, 4)).raised(view, 402) > 402
    assert PaperController(PaperConstants()).target(view) is None


def test_vanilla_keeps_all_and_keep_warm_a_fixed_number() -> None:
    assert Vanilla().target(VIEW) == 420
    assert KeepWarm(10).target(VIEW) == 309


def node(name: str, flags: NodeFlag = NOTHING, **values: int | None) -> PowerNode:
    return dataclasses.replace(PowerNode(name, 0, flags, idle_since_s=1000), **values)  # type: ignore[arg-type]


def test_the_least_scarce_tier_and_then_the_longest_idle_goes_first() -> None:
    nodes = [node("a", tier_rank=1, idle_since_s=1), node("b", idle_since_s=900), node("c", idle_since_s=5), node("d")]
    assert select_nodes(nodes, 1, PowerLimits(1), NOW_S).power_down == ("c", "b", "d")


def test_waking_prefers_the_scarcest_tier_and_says_what_it_lacks() -> None:
    nodes = [
        node("a", NodeFlag.ASLEEP),
        node("b", NodeFlag.ASLEEP, tier_rank=2),
        node("c", NodeFlag.ASLEEP | NodeFlag.DOWN),
    ]
    plan = select_nodes(nodes, 5, PowerLimits(), NOW_S)
    assert (plan.wake, plan.short) == (("b", "a"), 3)


def test_hold_wakes_no_more_than_the_warm_minimum() -> None:
    nodes = [node("a", NodeFlag.ASLEEP), node("b", NodeFlag.ASLEEP), node("c", NodeFlag.ASLEEP)]
    plan = select_nodes(nodes, None, PowerLimits(warm_minimum=2), NOW_S)
    assert (plan.wake, plan.power_down, plan.is_hold) == (("a", "b"), (), True)


FLAGS = st.lists(st.sampled_from(list(NodeFlag)), max_size=2).map(lambda some: NodeFlag(sum(set(some))))
TIMES = st.none() | st.integers(0, NOW_S)
NAMES = st.integers(0, 40).map("n{}".format)
NODES = st.lists(
    st.builds(PowerNode, NAMES, st.integers(0, 2), FLAGS, TIMES, TIMES, st.integers(0, 4)),
    max_size=14, unique_by=lambda one: one.name,
)  # fmt: skip
LIMITS = st.builds(PowerLimits, st.integers(0, 4), st.integers(0, 4), st.sampled_from([0, 1800, 60_000]))


@settings(max_examples=400)
@given(NODES, st.none() | st.integers(0, 16), LIMITS, st.randoms(use_true_random=False))
def test_no_state_breaks_a_rule(nodes: list[PowerNode], target: int | None, limits: PowerLimits, rng: object) -> None:
    plan = select_nodes(nodes, target, limits, NOW_S)
    by_name = {one.name: one for one in nodes}
    for name in plan.power_down:
        one = by_name[name]
        assert one.flags == NodeFlag(0)  # neither busy, reserved, drained, down, excluded, nor anything else
        assert one.idle_since_s is not None and NOW_S - one.idle_since_s >= limits.cooldown_s
        assert one.last_change_s is None or NOW_S - one.last_change_s >= limits.cooldown_s
        assert one.cycles_today < limits.cycles_per_day
    unfit = NodeFlag.RESERVED | NodeFlag.DRAINED | NodeFlag.DOWN | NodeFlag.MAINTENANCE
    unfit |= NodeFlag.UNKNOWN | NodeFlag.ASLEEP
    ready = sum(not one.flags & unfit for one in nodes)
    idle = sum(not one.flags & (unfit | NodeFlag.BUSY | NodeFlag.BOOTING) for one in nodes)
    if plan.power_down:
        assert target is not None and not plan.wake
        assert ready - len(plan.power_down) >= target
        assert idle - len(plan.power_down) >= limits.warm_minimum
    if plan.wake:
        assert ready + len(plan.wake) <= max(target or 0, limits.warm_minimum)
        assert all(by_name[name].flags == NodeFlag.ASLEEP for name in plan.wake)
    mixed = list(nodes)
    rng.shuffle(mixed)  # type: ignore[attr-defined]
    assert select_nodes(mixed, target, limits, NOW_S) == plan
