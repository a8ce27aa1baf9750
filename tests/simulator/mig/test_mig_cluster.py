"""The online MIG cluster: hand-computed courses, and laws that hold on every trace."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from advisor.mig.decide import LayoutChange, LayoutPlan, LayoutRules, MigNode, SliceJob
from advisor.mig.outlook import total_wait_s
from advisor.mig.states import is_placeable, sizes_of
from almanac.hardware import mig_models
from almanac.units import DAY_S
from simulator.policies.mig.comparison import (
    MIGRATION_S,
    POLICIES,
    MisoCluster,
    best_static,
    reachable_counts,
    run_cluster,
    run_mig,
)
from simulator.policies.mig.layouts import LayoutPlanner, MigCluster, MigSite, changes_in_a_day
from simulator.policies.mig.schemes import count_refusals
from simulator.traces.mig import DEMANDS, SliceRequest, generate, pool_jobs, shape_of

MODEL = mig_models()["A100-40"]
SIZES = sizes_of(MODEL)
FULL = ("gpu",)
HALVES = ("3g", "4g")


def job(submit_s: float, full_s: float, shape: str, compute: float | None = None) -> SliceRequest:
    own = SIZES.compute[SIZES.shapes.index(shape)]
    return SliceRequest(submit_s, full_s, shape, float(own) if compute is None else compute)


def run_on(
    layouts: Sequence[tuple[tuple[str, ...], ...]],
    jobs: Sequence[SliceRequest],
    planner: LayoutPlanner | None = None,
    *,
    raises: bool = False,
) -> MigCluster:
    site = MigSite(nodes=len(layouts), plan_every_s=60, initial=tuple(layouts))
    cluster = MigCluster(site, jobs, raises, planner)
    cluster.run()
    return cluster


def starts(run: MigCluster) -> list[float | None]:
    return [each.start_s for each in run.jobs]


def test_jobs_of_one_size_wait_and_others_pass() -> None:
    jobs = [job(0, 100, "3g"), job(10, 100, "3g"), job(20, 50, "4g")]
    run = run_on([(HALVES,)], jobs)
    assert starts(run) == [0, 100, 20]


def test_a_raise_takes_the_idle_larger_instance() -> None:
    jobs = [job(0, 100, "3g"), job(10, 100, "3g"), job(20, 50, "4g")]
    run = run_on([(HALVES,)], jobs, raises=True)
    assert starts(run) == [0, 10, 110]
    assert [SIZES.shapes[each.size or 0] for each in run.jobs] == ["3g", "4g", "4g"]


def test_a_small_slice_slows_a_job_down() -> None:
    run = run_on([(HALVES,)], [job(0, 100, "3g", compute=4.5)])
    assert run.jobs[0].end_s == pytest.approx(150)


def plan_once(at_s: int, node: str, new: tuple[tuple[str, ...], ...], drain: bool) -> LayoutPlanner:
    done: list[int] = []

    def plan(nodes: Sequence[MigNode], jobs: Sequence[SliceJob], now_s: int) -> LayoutPlan:
        if done or now_s < at_s:
            return LayoutPlan(())
        done.append(now_s)
        change = LayoutChange(node, nodes[int(node)].gpus, new, "test")
        return LayoutPlan((), drains=(change,)) if drain else LayoutPlan((change,))

    return plan


def test_a_drained_node_takes_no_job_and_changes_when_its_last_job_ended() -> None:
    jobs = [job(0, 100, "gpu"), job(90, 50, "gpu"), job(91, 50, "3g"), job(300, 10, "3g")]
    run = run_on([(FULL,), (FULL,)], jobs, plan_once(60, "00000", (HALVES,), True))
    assert [(each.begin_s, each.end_s) for each in run.changes] == [(100, 220)]
    assert starts(run) == [0, 90, 140, 300]
    assert [each.node for each in run.jobs] == [0, 1, 1, 0]


def test_changing_a_busy_node_is_an_error() -> None:
    plan = plan_once(60, "00000", (HALVES,), False)
    with pytest.raises(ValueError, match="runs 1 jobs"):
        run_on([(FULL,)], [job(0, 100, "gpu")], plan)


def test_jobs_whose_size_vanished_ask_for_another() -> None:
    jobs = [job(0, 200, "3g"), job(1, 200, "4g"), job(2, 10, "3g"), job(400, 10, "gpu")]
    plan = plan_once(60, "00000", (FULL,), True)
    run = run_on([(HALVES,)], jobs, plan)
    assert starts(run) == [0, 1, 321, 400]


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("demand", ["daynight", "bursts"])
def test_a_static_cluster_equals_the_replay(demand: str, raises: bool) -> None:
    jobs = generate(DEMANDS[demand], MODEL, 4, 1.2, 2, seed=5)
    layouts = [(FULL,), (FULL,), (("1g", "2g", "4g"),), (HALVES,)]
    counts = SIZES.counts([gpu for node in layouts for gpu in node])
    assert counts is not None
    expected = total_wait_s(counts, pool_jobs(jobs, SIZES), raises=raises)
    run = run_on(layouts, jobs, raises=raises)
    assert sum(run.start_s) - sum(run.submit_s) == pytest.approx(expected)


def checked(run: MigCluster, layouts: Sequence[tuple[tuple[str, ...], ...]], jobs: Sequence[SliceRequest]) -> None:
    """No slice twice, legal layouts, no job on a node that changes, every job once."""
    assert sorted(each.request.submit_s for each in run.jobs) == sorted(each.submit_s for each in jobs)
    held = {node: [(0.0, gpus)] for node, gpus in enumerate(layouts)}
    for change in run.changes:
        assert all(gpu == FULL or is_placeable(MODEL, {each: gpu.count(each) for each in gpu}) for gpu in change.new)
        assert change.old == held[change.node][-1][1]
        held[change.node].append((change.begin_s, change.new))
        on_node = [each for each in run.jobs if each.node == change.node]
        assert not any(
            each.start_s < change.end_s and each.end_s > change.begin_s  # type: ignore[operator]
            for each in on_node
        )
    for node, spans in held.items():
        on_node = [each for each in run.jobs if each.node == node]
        for each in on_node:
            assert each.start_s is not None and each.size is not None and each.size >= each.shape
            gpus = [gpus for begin_s, gpus in spans if begin_s <= each.start_s][-1]
            counts = SIZES.counts(gpus)
            same = [o for o in on_node if o.size == each.size and o.start_s <= each.start_s < o.end_s]  # type: ignore[operator]
            assert counts is not None and len(same) <= counts[each.size]


@pytest.mark.parametrize(("nodes", "per_node", "demand"), [(6, 1, "flat"), (2, 3, "daynight"), (6, 1, "bursts")])
def test_laws_hold_with_the_planner(nodes: int, per_node: int, demand: str) -> None:
    jobs = generate(DEMANDS[demand], MODEL, nodes * per_node, 1.3, 1.5, seed=3)
    site = MigSite(nodes=nodes, gpus_per_node=per_node, plan_every_s=3600)
    run = run_cluster(jobs, site, True, LayoutRules())
    assert run.changes
    checked(run, site.layouts, jobs)
    assert changes_in_a_day(run.changes) <= 1


def test_the_best_static_layout_is_exact_on_two_gpus() -> None:
    jobs = generate(DEMANDS["flat"], MODEL, 2, 1.1, 2, seed=2)
    pooled = pool_jobs(jobs, SIZES)
    found = best_static(pooled, SIZES, 2)
    every = [total_wait_s(counts, pooled, raises=False) for counts in reachable_counts(SIZES, 2)[-1]]
    assert found.wait_s * len(jobs) == pytest.approx(min(every))
    assert total_wait_s(tuple(map(sum, zip(*found.gpus, strict=True))), pooled, raises=False) == pytest.approx(
        min(every)
    )


def test_the_policy_like_miso_pauses_the_jobs_of_a_gpu_that_it_cuts_anew() -> None:
    jobs = pool_jobs([job(0, 100, "3g", compute=3.0), job(50, 100, "3g", compute=3.0)], SIZES)
    run = MisoCluster(SIZES, 1, [*jobs, *pool_jobs([job(60, 10, "gpu")], SIZES)])
    run.run()
    assert run.migrations == 1
    assert run.start_s == pytest.approx([0, 50 + MIGRATION_S, 50 + MIGRATION_S + 100])


def test_nothing_is_refused_while_a_gpu_is_empty() -> None:
    refused = count_refusals([job(0, 10, "gpu"), job(0, 10, "1g"), job(1, 10, "gpu")], MODEL, 2)
    assert (refused.first_fit, refused.reachability) == pytest.approx((1 / 3, 1 / 3))


def test_the_generator_keeps_the_load_and_repeats() -> None:
    for name, demand in DEMANDS.items():
        jobs = generate(demand, MODEL, 64, 1.0, 12, seed=1)
        assert jobs == generate(demand, MODEL, 64, 1.0, 12, seed=1)
        assert sum(each.full_s for each in jobs) == pytest.approx(64 * 12 * DAY_S, rel=0.1), name


def test_shapes_hold_the_memory_and_bound_the_slow_down() -> None:
    assert shape_of(MODEL, 4.0, 1.5) == "1g"
    assert shape_of(MODEL, 4.0, 1.6) == "2g"
    assert shape_of(MODEL, 4.8, 0.5) == "2g"
    assert shape_of(MODEL, 12.0, 4.6) == "4g"
    assert shape_of(MODEL, 25.0, 0.5) == "gpu"


def test_every_policy_runs_the_same_jobs_and_static_layouts_wait_as_the_replay_says() -> None:
    jobs = generate(DEMANDS["flat"], MODEL, 3, 1.2, 1, seed=4)
    runs = {run.policy: run for run in run_mig(jobs, MigSite(nodes=3))}
    assert list(runs) == list(POLICIES)
    wait_s = {name: float(run.jobs.delay_s.mean()) for name, run in runs.items()}
    assert wait_s["static"] == pytest.approx(best_static(pool_jobs(jobs, SIZES), SIZES, 3).wait_s)
    assert wait_s["static-raises"] <= wait_s["static"]
    busy = {name: run.busy_gpu_s for name, run in runs.items()}
    assert busy["full"] == pytest.approx(sum(job.full_s for job in jobs))
    assert all(0 < run.utilization <= 1 for run in runs.values())
    assert runs["full"].details == {"changes": 0, "most_changes_of_a_node_in_a_day": 0, "layout": "3 x gpu"}


def test_slices_in_use_are_counted_while_jobs_of_the_policy_like_miso_run() -> None:
    run = MisoCluster(SIZES, 1, pool_jobs([job(0, 70, "3g", compute=3.0)], SIZES))
    run.run()
    assert run.outcome("miso").busy_gpu_s == pytest.approx(70 * run._sizes.compute[run._size[0]] / 7)
