"""The number of nodes to keep, and the nodes to power: rules that no state may break."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from advisor.power.decide import (
    HOLDS,
    Budget,
    DemandView,
    ForecastController,
    ForecastSettings,
    NodeFlag,
    PowerLimits,
    PowerNode,
    Spent,
    highest_of_last,
    is_overspent,
    select_nodes,
    views_of,
)
from advisor.power.forecast import Steps
from advisor.power.replay import KeepWarm, PaperConstants, PaperController, Vanilla

NOW_S = 100_000
NOTHING = NodeFlag(0)
VIEW = DemandView(
    step=100, total=420, powered=400, active=299.0, recent=310.0, highs=(320.0, 310.0, 300.0),
    levels=dict.fromkeys(HOLDS, 311.0) | {36: 315.0}, expected={30: 290.0, 60: 285.0},
)  # fmt: skip


def test_the_paper_shrinks_to_the_running_nodes_plus_a_buffer_only_when_both_trends_fall() -> None:
    paper = PaperController(PaperConstants())
    assert paper.target(VIEW) == 320
    assert paper.target(VIEW._replace(powered=310)) is None  # the periodic check never powers up
    for rising in ({"highs": (300.0, 300.0, 300.0)}, {"expected": {30: 301.0, 60: 285.0}}):
        assert PaperController(PaperConstants()).target(VIEW._replace(**rising)) is None
    far = VIEW._replace(expected={18: 290.0, 30: 290.0, 60: 291.0}, highs=(330.0,) * 6 + (300.0,))
    assert PaperController(PaperConstants()).target(far) is None
    assert PaperController(PaperConstants.as_written(420)).target(far) == 320


def test_the_paper_goes_on_to_where_it_shrinks_when_a_run_stops_short_of_it() -> None:
    paper = PaperController(PaperConstants())
    assert paper.target(VIEW) == 320
    later = VIEW._replace(highs=(300.0, 300.0, 300.0), powered=380)
    assert paper.target(later) == 320
    paper.raised(later, 381)
    assert paper.target(later) is None


def test_the_paper_wakes_the_gap_plus_a_buffer_and_then_holds() -> None:
    paper = PaperController(PaperConstants())
    assert paper.raised(VIEW, 405) == 425
    assert paper.target(VIEW._replace(step=109)) is None
    assert paper.target(VIEW._replace(step=110)) == 320


def test_ours_keeps_the_highest_forecast_of_the_steps_it_holds_and_idle_nodes() -> None:
    ours = ForecastController(ForecastSettings(24, margin=4, extra=2))
    assert ours.target(VIEW) == 317
    assert ForecastController(ForecastSettings(36, 4, 2)).target(VIEW) == 321
    assert ours.target(VIEW._replace(powered=317)) is None
    assert ours.target(VIEW._replace(active=318.0)) == 322, "never closer to demand than what would wake nodes"
    assert ours.raised(VIEW, 402) == 402 + 4 + 1 + 2


DAY = 86400


def test_the_budget_is_overspent_by_more_than_twice_a_week_of_it() -> None:
    budget, now = Budget(10, 2), 100 * DAY
    days = [now - day * DAY for day in (6, 4, 2)]
    assert not is_overspent(budget, Spent(), now)
    assert not is_overspent(budget, Spent(days, [70, 70, 0]), now)
    assert is_overspent(budget, Spent(days, [70, 70, 1]), now)
    assert not is_overspent(budget, Spent([now - 8 * DAY, *days], [500, 70, 70, 0]), now), "7 days count"
    assert not is_overspent(budget, Spent(short_times_s=range(now - 28, now)), now)
    assert is_overspent(budget, Spent(short_times_s=range(now - 29, now)), now)
    assert not is_overspent(Budget(10, 2, wakes_per_day=0.2), Spent(days[:2], [1, 1]), now)
    assert is_overspent(Budget(10, 2, wakes_per_day=0.2), Spent(days, [1, 1, 1]), now), "wake-ups, if a site wants"
    assert is_overspent(Budget(0, 2), Spent(days[:1], [1]), now)


@given(st.lists(st.none() | st.integers(0, 9), max_size=40), st.integers(1, 50))
def test_the_highest_of_the_last_values(values: list[int | None], window: int) -> None:
    known = np.array([np.nan if value is None else value for value in values], dtype=float)
    for place, found in enumerate(highest_of_last(known, window).tolist()):
        seen = [value for value in values[max(0, place + 1 - window) : place + 1] if value is not None]
        assert found == max(seen) if seen else np.isnan(found)


@pytest.mark.parametrize(
    "missing",
    [{"levels": None, "expected": None}, {"is_overspent": True}, {"is_stale": True}, {"active": None},
     {"recent": None, "highs": (), "levels": None}],
)  # fmt: skip
def test_without_a_forecast_or_with_stale_data_nothing_is_powered_down(missing: dict[str, object]) -> None:
    view = VIEW._replace(**missing)  # type: ignore[arg-type]
    assert ForecastController(ForecastSettings(24, 4)).target(view) is None
    if "active" not in missing and "is_stale" not in missing:
        assert ForecastController(ForecastSettings(24, 4)).raised(view, 402) > 402
    if "is_overspent" not in missing:
        assert PaperController(PaperConstants()).target(view) is None


def test_vanilla_keeps_all_and_keep_warm_a_fixed_number() -> None:
    assert Vanilla().target(VIEW) == 420
    assert (KeepWarm(10).target(VIEW), KeepWarm(10).raised(VIEW, 402)) == (309, 412)


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
    assert (plan.wake, plan.power_down) == (("a", "b"), ())


FLAGS = st.lists(st.sampled_from(list(NodeFlag)), max_size=2).map(lambda some: NodeFlag(sum(set(some))))
TIMES = st.none() | st.integers(0, NOW_S)
NAMES = st.integers(0, 40).map("n{}".format)
NODES = st.lists(
    st.builds(PowerNode, NAMES, st.integers(0, 2), FLAGS, TIMES, TIMES, st.integers(0, 4)),
    max_size=14, unique_by=lambda one: one.name,
)  # fmt: skip
LIMITS = st.builds(PowerLimits, st.integers(0, 4), st.integers(0, 4), st.sampled_from([0, 1800, 60_000]))


@examples(4)
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
    unfit |= NodeFlag.UNKNOWN | NodeFlag.ASLEEP | NodeFlag.POWERING_DOWN
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


@given(
    st.floats(0, 420), st.floats(0, 420), st.integers(0, 420), st.sampled_from(HOLDS), st.integers(0, 20),
    st.integers(0, 20),
)  # fmt: skip
def test_nothing_powers_down_below_the_forecast_or_the_margin(
    level: float, active: float, powered: int, hold: int, margin: int, extra: int
) -> None:
    controller = ForecastController(ForecastSettings(hold, margin, extra))
    view = VIEW._replace(powered=powered, active=active, levels=dict.fromkeys(HOLDS, level))
    target = controller.target(view)
    assert target is None or powered > target >= max(level + margin + extra, active + margin)
    assert controller.raised(view, active) > active + margin


def test_what_a_controller_sees_of_a_record() -> None:
    """The highest forecasts, and the highs since the newest gap; at step 47 the present is not known."""
    count = np.arange(50.0)
    highest = np.where(count == 10, np.nan, 100 + count)
    recent = np.where(count == 47, np.nan, 200 + count)
    steps = Steps(np.datetime64("2025-03-01"), highest, highest, 50 + count, count, count, recent, count == 48)
    views = views_of(steps, -2 * count, 45, 50, {30: 300 + count}).views
    seen = {"total": 0, "powered": 0, "highs": tuple(highest[11:45].tolist())}
    levels = {hold: 200.0 - max(0, 45 - hold + 1) for hold in HOLDS}
    assert views[0] == DemandView(step=45, active=94.0, recent=245.0, levels=levels, expected={30: 345.0}, **seen)
    assert [(each.step, each.active, each.recent, each.is_stale) for each in views[2:4]] == [
        (47, 96.0, None, False), (48, 97.0, 248.0, True)
    ]  # fmt: skip
    assert views[2].levels is None and views[3].levels is not None
    assert (len(views[4].highs), views[4].highs[0]) == (36, 113.0)
    begun = views_of(steps, 0 * recent, 0, 2).views
    assert [(each.active, each.highs, each.is_stale) for each in begun] == [(None, (), True), (50.0, (100.0,), False)]
