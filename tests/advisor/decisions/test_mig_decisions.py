"""The decisions about MIG layouts and raises: known answers and properties."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from advisor.decisions.mig_layout import LayoutRules, MigNode, SliceJob, decide_layout
from advisor.decisions.mig_raise import PendingSlice, Raise, decide_raises

SIZES = ("1g", "2g", "3g", "4g", "gpu")
FULL = (("gpu",),)
DAY_S = 86400
NOW_S = 10 * DAY_S


def node(
    number: int, gpus: tuple[tuple[str, ...], ...] = FULL, is_free: bool = True, changed_s: int | None = None
) -> MigNode:
    return MigNode(f"n{number:03d}", "A100-40", gpus, is_free, changed_s)


def small_jobs(per_hour: int, hours: int = 24, shape: str = "1g", run_s: float = 3600) -> list[SliceJob]:
    times = [NOW_S - hours * 3600 + number * 3600 // per_hour for number in range(hours * per_hour)]
    return [SliceJob(shape, time_s, run_s, start_s=time_s - DAY_S) for time_s in times]


def test_a_pending_job_gets_the_smallest_idle_larger_shape() -> None:
    assert decide_raises([PendingSlice(7, "1g")], {"3g": 1, "gpu": 2}, SIZES) == (Raise(7, "1g", "3g"),)


def test_no_shape_is_taken_that_somebody_waits_for() -> None:
    pending = [PendingSlice(1, "1g"), PendingSlice(2, "gpu")]
    assert decide_raises(pending, {"gpu": 1}, SIZES) == ()


def test_a_job_that_finds_its_own_shape_idle_is_not_raised() -> None:
    pending = [PendingSlice(1, "1g"), PendingSlice(2, "1g")]
    assert decide_raises(pending, {"1g": 1, "2g": 5}, SIZES) == (Raise(2, "1g", "2g"),)


def test_only_jobs_that_can_rise_do() -> None:
    pending = [PendingSlice(1, "1g", can_rise=False), PendingSlice(2, "1g"), PendingSlice(3, "1g+me")]
    assert decide_raises(pending, {"2g": 3}, SIZES) == (Raise(2, "1g", "2g"),)


@given(
    st.lists(st.tuples(st.sampled_from(SIZES), st.booleans()), max_size=12),
    st.dictionaries(st.sampled_from(SIZES), st.integers(0, 3)),
)
def test_raises_go_up_never_beyond_what_is_idle_and_never_past_who_waits(
    jobs: list[tuple[str, bool]], idle: dict[str, int]
) -> None:
    pending = [PendingSlice(number, shape, can_rise) for number, (shape, can_rise) in enumerate(jobs)]
    found = decide_raises(pending, idle, SIZES)
    waiting = {shape for shape, _ in jobs}
    for each in found:
        assert SIZES.index(each.new) > SIZES.index(each.old) and each.new not in waiting
    for shape in SIZES:
        assert sum(each.new == shape for each in found) <= idle.get(shape, 0)
    assert [each.job_id for each in found] == sorted({each.job_id for each in found})


def test_without_demand_nothing_changes() -> None:
    plan = decide_layout([node(0), node(1)], [], NOW_S)
    assert plan.changes == () and plan.drains == () and plan.why_none


def test_short_waits_change_nothing() -> None:
    plan = decide_layout([node(number) for number in range(8)], small_jobs(2), NOW_S)
    assert plan.changes == () and plan.drains == () and plan.wait_now_s == 0


def test_many_small_jobs_get_slices_and_the_whole_gpu_stays() -> None:
    plan = decide_layout([node(number) for number in range(4)], small_jobs(9), NOW_S)
    assert plan.changes and plan.wait_then_s is not None and plan.wait_now_s is not None
    assert plan.wait_then_s < plan.wait_now_s
    assert len(plan.changes) < 4
    assert all("1g" in gpu for change in plan.changes for gpu in change.new)


def test_a_backlog_changes_a_layout_that_serves_the_demand_without_it() -> None:
    cut = (("1g",) * 7,)
    nodes = [node(number, FULL if number < 3 else cut) for number in range(6)]
    demand = small_jobs(8, hours=72) + small_jobs(1, hours=72, shape="gpu", run_s=4000)
    assert decide_layout(nodes, demand, NOW_S).changes == ()
    backlog = [SliceJob("gpu", NOW_S - 60, 4000) for _ in range(8)]
    plan = decide_layout(nodes, demand + backlog, NOW_S)
    assert [(change.old, change.new) for change in plan.changes] == [(cut, FULL)]


def test_before_two_days_are_known_a_change_must_be_worth_more() -> None:
    nodes = [node(number) for number in range(4)]
    rules = LayoutRules(least_total_gain=0.25)
    assert decide_layout(nodes, small_jobs(9, hours=48), NOW_S, rules).changes
    assert decide_layout(nodes, small_jobs(9, hours=30), NOW_S, rules).changes == ()


def test_busy_nodes_are_drained_and_never_changed() -> None:
    nodes = [node(number, is_free=False) for number in range(4)]
    plan = decide_layout(nodes, small_jobs(9), NOW_S)
    assert plan.changes == () and plan.drains and plan.why_none


def test_no_node_changes_twice_within_a_day() -> None:
    fresh = [node(number, changed_s=NOW_S - DAY_S + 1) for number in range(4)]
    assert decide_layout(fresh, small_jobs(9), NOW_S).changes == ()
    rested = [replace(each, changed_s=NOW_S - DAY_S) for each in fresh]
    assert decide_layout(rested, small_jobs(9), NOW_S).changes


def test_other_profiles_troubled_and_drained_nodes_stay() -> None:
    nodes = [
        node(0, (("1g+me",),)),
        replace(node(1), can_change=False),
        replace(node(2), target=(("1g",) * 7,), is_free=False),
    ]
    plan = decide_layout(nodes, small_jobs(20), NOW_S)
    assert plan.changes == () and plan.drains == ()


def test_hostile_values_are_left_out() -> None:
    odd = [
        SliceJob("9z", NOW_S - 5, 10.0),
        SliceJob("1g", NOW_S - 5, float("nan")),
        SliceJob("1g", NOW_S - 5, -1.0),
        SliceJob("1g", NOW_S - 5, float("inf")),
        SliceJob("", NOW_S - 5, 5.0, ran_on="9z"),
        SliceJob("1g", NOW_S + 500, 10.0),
    ]
    assert decide_layout([node(0)], odd, NOW_S).changes == ()
    assert decide_layout([node(number) for number in range(4)], [*odd, *small_jobs(9)], NOW_S) == decide_layout(
        [node(number) for number in range(4)], small_jobs(9), NOW_S
    )


@examples(0.12)
@given(st.integers(0, 2**16), st.integers(2, 6), st.integers(1, 2))
def test_order_does_not_matter_and_each_size_in_demand_stays(seed: int, nodes: int, gpus: int) -> None:
    rng = random.Random(seed)
    layouts = [("gpu",), ("3g", "4g"), ("1g",) * 7, ("2g", "2g", "3g")]
    site = [
        node(
            number, tuple(rng.choice(layouts) for _ in range(gpus)), rng.random() < 0.6, rng.choice([None, NOW_S - 60])
        )
        for number in range(nodes)
    ]
    jobs = [
        SliceJob(
            rng.choice(SIZES), NOW_S - rng.randrange(2 * DAY_S), rng.uniform(60, 20000), start_s=rng.choice([None, 0])
        )
        for _ in range(120)
    ]
    plan = decide_layout(site, jobs, NOW_S, LayoutRules(least_gain=0.01))
    assert (
        decide_layout(rng.sample(site, nodes), rng.sample(jobs, len(jobs)), NOW_S, LayoutRules(least_gain=0.01)) == plan
    )
    after = {each.name: each.gpus for each in site}
    named = [change.node for change in (*plan.changes, *plan.drains)]
    assert len(named) == len(set(named))
    for change in (*plan.changes, *plan.drains):
        before = next(each for each in site if each.name == change.node)
        assert before.changed_s is None and before.gpus == change.old and len(change.new) == gpus
        after[change.node] = change.new
    held = {shape for gpus_of in after.values() for gpu in gpus_of for shape in gpu}
    had = {shape for each in site for gpu in each.gpus for shape in gpu}
    homes = {next((size for size in SIZES[SIZES.index(job.shape) :] if size in had), None) for job in jobs} - {None}
    assert homes <= held
