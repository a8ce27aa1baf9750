"""The decisions about MIG layouts and raises: known answers and properties."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from advisor.mig.decide import (
    LayoutPlan,
    LayoutRules,
    MigNode,
    PendingSlice,
    Raise,
    SliceJob,
    decide_layout,
    decide_raises,
)
from slurm_hooks.mig.layouts import shown

CUTS = ("1g", "2g", "3g", "4g", "gpu")
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


@pytest.mark.parametrize(
    ("pending", "idle", "raises"),
    [
        ([PendingSlice(7, "1g")], {"3g": 1, "gpu": 2}, (Raise(7, "1g", "3g"),)),  # the smallest larger shape
        ([PendingSlice(1, "1g"), PendingSlice(2, "gpu")], {"gpu": 1}, ()),  # somebody waits for it
        ([PendingSlice(1, "1g"), PendingSlice(2, "1g")], {"1g": 1, "2g": 5}, (Raise(2, "1g", "2g"),)),  # own is idle
        ([PendingSlice(1, "1g", can_rise=False), PendingSlice(2, "1g"), PendingSlice(3, "1g+me")], {"2g": 3},
         (Raise(2, "1g", "2g"),)),
    ],
)  # fmt: skip
def test_raises_by_hand(pending: list[PendingSlice], idle: dict[str, int], raises: tuple[Raise, ...]) -> None:
    assert decide_raises(pending, idle, CUTS) == raises


@given(
    st.lists(st.tuples(st.sampled_from(CUTS), st.booleans()), max_size=12),
    st.dictionaries(st.sampled_from(CUTS), st.integers(0, 3)),
)
def test_raises_go_up_never_beyond_what_is_idle_and_never_past_who_waits(
    jobs: list[tuple[str, bool]], idle: dict[str, int]
) -> None:
    pending = [PendingSlice(number, shape, can_rise) for number, (shape, can_rise) in enumerate(jobs)]
    found = decide_raises(pending, idle, CUTS)
    waiting = {shape for shape, _ in jobs}
    for each in found:
        assert CUTS.index(each.new) > CUTS.index(each.old) and each.new not in waiting
    for shape in CUTS:
        assert sum(each.new == shape for each in found) <= idle.get(shape, 0)
    assert [each.job_id for each in found] == sorted({each.job_id for each in found})


def test_without_demand_nothing_changes() -> None:
    plan = decide_layout([node(0), node(1)], [], NOW_S)
    assert plan == LayoutPlan((), "no recent job of a slice or GPU is known")


def test_short_waits_change_nothing() -> None:
    plan = decide_layout([node(number) for number in range(8)], small_jobs(2), NOW_S)
    assert plan.changes == () and plan.drains == () and plan.wait_now_s == 0


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


def test_no_node_changes_twice_within_a_day() -> None:
    fresh = [node(number, changed_s=NOW_S - DAY_S + 1) for number in range(4)]
    why = "no node may change now: each changed within a day, is drained, or is out of service"
    assert decide_layout(fresh, small_jobs(9), NOW_S) == LayoutPlan((), why)
    new = [SliceJob("1g", NOW_S - 59, 60.0) for _ in range(500)]
    few = "less than a day of jobs is known, and they hardly waited"
    assert decide_layout([node(0)], new, NOW_S) == LayoutPlan((), few)
    assert decide_layout([node(0)], [replace(new[0], submit_s=NOW_S - 60)], NOW_S).why_none != few
    rested = [replace(each, changed_s=NOW_S - DAY_S) for each in fresh]
    assert decide_layout(rested, small_jobs(9), NOW_S).changes


def test_other_profiles_troubled_and_drained_nodes_stay() -> None:
    draining = replace(node(2), target=(("1g",) * 7,), is_free=False)
    nodes = [node(0, (("1g+me",),)), replace(node(1), can_change=False), draining]
    plan = decide_layout(nodes, small_jobs(20), NOW_S)
    assert plan.changes == () and plan.drains == ()


def test_hostile_values_are_left_out() -> None:
    odd = [SliceJob("1g", NOW_S - 5, run_s) for run_s in (float("nan"), -1.0, float("inf"))]
    odd += [SliceJob("9z", NOW_S - 5, 10.0), SliceJob("", NOW_S - 5, 5.0, ran_on="9z"), SliceJob("1g", NOW_S + 500, 10)]
    assert decide_layout([node(0)], odd, NOW_S).changes == ()
    four = [node(number) for number in range(4)]
    assert decide_layout(four, [*odd, *small_jobs(9)], NOW_S) == decide_layout(four, small_jobs(9), NOW_S)


def random_site(
    seed: int, nodes: int, gpus: int, hours: int = 48, jobs: int = 120
) -> tuple[list[MigNode], list[SliceJob]]:
    """The first node drains."""
    rng = random.Random(seed)
    layouts = [("gpu",), ("3g", "4g"), ("1g",) * 7, ("2g", "2g", "3g")]
    site = [
        node(
            number, tuple(rng.choice(layouts) for _ in range(gpus)), rng.random() < 0.6, rng.choice([None, NOW_S - 60])
        )
        for number in range(nodes)
    ]
    site[0] = replace(site[0], target=(("1g",) * 7,) * gpus, is_free=False)
    made = []
    for _ in range(jobs):
        submit_s, run_s = NOW_S - rng.randrange(hours * 3600), rng.uniform(60, 20_000)
        begin_s = rng.choice([None, submit_s + rng.randrange(3000)])
        start_s = begin_s if begin_s and begin_s < NOW_S else None
        place = rng.choice(site).name if start_s and start_s + run_s > NOW_S else None
        more = {"ran_on": rng.choice([None, "gpu"]), "compute": rng.choice([None, 0.5, 2.5, -1.0])}
        made.append(SliceJob(rng.choice(CUTS), submit_s, run_s, start_s, node=place, **more))  # type: ignore[arg-type]
    return site, made


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        ((1, 6, 1), " | 95911.04 | 36496.35 | n005 3g+4g | n002 gpu"),
        ((5, 5, 1, 14, 80), " | 117428.01 | 45667.51 | n003 3g+4g | n004 3g+4g"),
        ((6, 5, 1, 30, 20), " | 17521.07 | 1235.59 | n002 gpu | n003 3g+4g"),
        ((3, 20, 4, 48, 200), "no free node whose change is expected to shorten the mean wait enough | "
                              "802.12 | 64.65 | n008 gpu, 3x 3g+4g | n019 4x gpu"),
    ],
)  # fmt: skip
def test_what_is_expected_of_a_busy_site_to_the_second(site: tuple[int, int, int, int, int], expected: str) -> None:
    plan = decide_layout(*random_site(*site), NOW_S)
    changes = [f"{each.node} {shown(each.new)}" for part in (plan.changes, plan.drains) for each in part]
    waits = [f"{wait_s:.2f}" for wait_s in (plan.wait_now_s, plan.wait_then_s) if wait_s is not None]
    assert " | ".join([plan.why_none, *waits, *changes]) == expected


@examples(0.12)
@given(st.integers(0, 2**16), st.integers(2, 6), st.integers(1, 2))
def test_order_does_not_matter_and_each_size_in_demand_stays(seed: int, nodes: int, gpus: int) -> None:
    (site, jobs), rng = random_site(seed, nodes, gpus), random.Random(seed)
    rules = LayoutRules(least_gain=0.01)
    plan = decide_layout(site, jobs, NOW_S, rules)
    assert decide_layout(rng.sample(site, nodes), rng.sample(jobs, len(jobs)), NOW_S, rules) == plan
    after = {each.name: each.target or each.gpus for each in site}
    had = {shape for gpus_of in after.values() for gpu in gpus_of for shape in gpu}
    named = [change.node for change in (*plan.changes, *plan.drains)]
    assert len(named) == len(set(named))
    for change in (*plan.changes, *plan.drains):
        before = next(each for each in site if each.name == change.node)
        assert before.changed_s is None and before.gpus == change.old and len(change.new) == gpus
        after[change.node] = change.new
    held = {shape for gpus_of in after.values() for gpu in gpus_of for shape in gpu}
    homes = {next((size for size in CUTS[CUTS.index(job.shape) :] if size in had), None) for job in jobs} - {None}
    assert homes <= held
