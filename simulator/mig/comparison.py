"""The planner against everything else on the same jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from advisor.decisions.mig_layout import GpuLayout, LayoutRules, decide_layout
from advisor.mig.sizes import WHOLE, Sizes, sizes_of
from almanac.mig import mig_models
from almanac.units import DAY_S
from simulator.mig.cluster import ClusterRules, ClusterRun, MigCluster
from simulator.mig.demand import SliceRequest, pool_jobs
from simulator.mig.miso import MisoCluster
from simulator.mig.refusals import Refusals, count_refusals
from simulator.mig.static import best_static, best_static_with_raises

FULL, ALONE, STATIC, STATIC_RAISES = "full GPUs", "layout left alone", "best static", "best static, raises"
PLANNER, PLANNER_RAISES, MISO = "planner", "planner, raises", "like MISO"


@dataclass(frozen=True)
class MigSite:
    """The simulated cluster. initial: layout of each GPU at the start, by node; None for full GPUs."""

    model: str = "A100-40"
    nodes: int = 16
    gpus_per_node: int = 1
    change_s: int = 120
    plan_every_s: int = 3600
    initial: tuple[tuple[GpuLayout, ...], ...] | None = None

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def layouts(self) -> tuple[tuple[GpuLayout, ...], ...]:
        """The layouts at the start, by node."""
        return self.initial or (((WHOLE,),) * self.gpus_per_node,) * self.nodes


@dataclass(frozen=True)
class PolicyResult:
    """wait_s: mean, infinite if some job never started. changes: changes of layout; migrations for the one like MISO.

    layout: GPUs by layout, at the end; empty where it makes no sense.
    """

    policy: str
    wait_s: float
    changes: int = 0
    most_changes_in_a_day: int = 0
    layout: str = ""


@dataclass(frozen=True)
class MigComparison:
    """Every policy on one list of jobs, and what two placement rules refuse."""

    jobs: int
    load: float
    results: tuple[PolicyResult, ...]
    refusals: Refusals

    def wait_s(self, policy: str) -> float:
        """Mean wait of a policy."""
        return next(each.wait_s for each in self.results if each.policy == policy)

    def ratio(self, policy: str, other: str) -> float:
        """One policy's mean wait over another's; 1 where both have less than a second."""
        ours, theirs = self.wait_s(policy), self.wait_s(other)
        return 1.0 if max(ours, theirs) < 1.0 else ours / max(theirs, 1e-9)


def compare(
    jobs: Sequence[SliceRequest],
    site: MigSite,
    days: float,
    history: Sequence[SliceRequest] = (),
    rules: LayoutRules | None = None,
    planners: Sequence[str] = (PLANNER, PLANNER_RAISES),
) -> MigComparison:
    """Run all policies. jobs: by submit time. history: earlier jobs that the planner knows, before 0 s.

    planners: the planner takes most of the time, so that a caller can leave one out.
    """
    model = mig_models()[site.model]
    sizes = sizes_of(model)
    pooled = pool_jobs(jobs, sizes)
    static = best_static(pooled, sizes, site.gpus)
    full = ((0,) * (len(sizes.shapes) - 1) + (1,),) * site.gpus
    raised = best_static_with_raises(pooled, sizes, site.gpus, [static.gpus, full])
    miso = MisoCluster(sizes, site.gpus).run(pooled)
    results = (
        _run(FULL, jobs, MigSite(site.model, site.nodes, site.gpus_per_node), sizes, False, None),
        _run(ALONE, jobs, site, sizes, True, None),
        PolicyResult(STATIC, static.wait_s, layout=_text([sizes.gpu_layout(each) for each in static.gpus])),
        PolicyResult(STATIC_RAISES, raised.wait_s, layout=_text([sizes.gpu_layout(each) for each in raised.gpus])),
        *(_run(each, jobs, site, sizes, each == PLANNER_RAISES, rules or LayoutRules(), history) for each in planners),
        PolicyResult(MISO, miso.wait_s, miso.migrations),
    )
    load = sum(job.full_s for job in jobs) / (site.gpus * days * DAY_S)
    return MigComparison(len(jobs), load, results, count_refusals(jobs, model, site.gpus))


def run_planner(
    jobs: Sequence[SliceRequest],
    site: MigSite,
    history: Sequence[SliceRequest] = (),
    *,
    raises: bool = True,
    rules: LayoutRules | None = None,
) -> ClusterRun:
    """The cluster with the planner."""
    sizes = sizes_of(mig_models()[site.model])
    return _cluster(site, sizes, raises, rules or LayoutRules()).run(jobs, history)


def _cluster(site: MigSite, sizes: Sizes, raises: bool, rules: LayoutRules | None) -> MigCluster:
    planner = partial(decide_layout, rules=_with(rules, raises, site.change_s)) if rules else None
    return MigCluster(site.layouts, sizes, ClusterRules(site.model, raises, site.change_s, site.plan_every_s), planner)


def _with(rules: LayoutRules, raises: bool, change_s: int) -> LayoutRules:
    return replace(rules, raises=raises, change_s=change_s)


def _run(
    name: str,
    jobs: Sequence[SliceRequest],
    site: MigSite,
    sizes: Sizes,
    raises: bool,
    rules: LayoutRules | None,
    history: Sequence[SliceRequest] = (),
) -> PolicyResult:
    run = _cluster(site, sizes, raises, rules).run(jobs, history)
    layouts = dict(enumerate(site.layouts))
    layouts.update({change.node: change.new for change in run.changes})
    gpus = [gpu for layout in layouts.values() for gpu in layout]
    return PolicyResult(name, run.wait_s, len(run.changes), changes_in_a_day(run), _text(gpus))


def changes_in_a_day(run: ClusterRun) -> int:
    """The most changes of one node in any 24 hours."""
    times: dict[int, list[float]] = {}
    for change in run.changes:
        times.setdefault(change.node, []).append(change.begin_s)
    return max(
        (sum(begin <= other < begin + DAY_S for other in own) for own in times.values() for begin in own), default=0
    )


def _text(gpus: Sequence[GpuLayout]) -> str:
    """GPUs by layout, most frequent first: "10 gpu, 4 3g+4g"."""
    counted = {"+".join(layout): gpus.count(layout) for layout in sorted(set(gpus))}
    return ", ".join(f"{count} x {name}" for name, count in sorted(counted.items(), key=lambda item: -item[1]))


def split_history(jobs: Sequence[SliceRequest], days: float) -> tuple[list[SliceRequest], list[SliceRequest]]:
    """The jobs of the first days as history, and the others with times from 0 s."""
    moved = [replace(job, submit_s=job.submit_s - days * DAY_S) for job in jobs]
    return [job for job in moved if job.submit_s < 0], [job for job in moved if job.submit_s >= 0]
