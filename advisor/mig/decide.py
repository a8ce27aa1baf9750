"""Choose the layout of each node's MIG slices from recent demand, and the pending jobs that get a larger slice. Pure.

A GPU's layout is a sorted tuple of shapes (see almanac.hardware), such as ("3g", "4g"); a GPU without MIG is (WHOLE,).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from advisor.mig.outlook import FIRST_S, MigClusterState, Outlook, PoolJob, RunningSlice, homes_of
from advisor.mig.search import Layouts, LayoutSearch, NodeCounts, proportional
from advisor.mig.states import WHOLE as WHOLE
from advisor.mig.states import sizes_of
from almanac.hardware import mig_models
from almanac.units import DAY_S, HOUR_S

GpuLayout = tuple[str, ...]


@dataclass(frozen=True)
class MigNode:
    """A node whose layout can be changed. model: key of almanac.hardware.mig_models().

    is_free: no job, no reservation, and in service. changed_s: time of its last change; None if unknown. target: the
    layout that the node is drained for; None if it takes jobs. can_change: False if it must stay, as under a
    reservation, a failure, or an operator's drain.
    """

    name: str
    model: str
    gpus: tuple[GpuLayout, ...]
    is_free: bool
    changed_s: int | None = None
    target: tuple[GpuLayout, ...] | None = None
    can_change: bool = True


@dataclass(frozen=True)
class SliceJob:
    """A recent or waiting job of one GPU or slice. shape: the smallest that holds it.

    run_s: measured, or predicted while it waits or runs. start_s: None while it waits. A job runs at now_s if start_s
    + run_s is later than now_s. ran_on: the shape that it was given; None if that is `shape`. node: its node if it
    runs. compute: compute slices that it keeps busy, such as 4.65; None if unknown, which counts as the shape's own.
    model: key of almanac.hardware.mig_models(); None on a site with one model.
    """

    shape: str
    submit_s: int
    run_s: float
    start_s: int | None = None
    ran_on: str | None = None
    node: str | None = None
    compute: float | None = None
    model: str | None = None


@dataclass(frozen=True)
class LayoutChange:
    """The new layout of one node, and why, in one line."""

    node: str
    old: tuple[GpuLayout, ...]
    new: tuple[GpuLayout, ...]
    reason: str


@dataclass(frozen=True)
class LayoutPlan:
    """The changes to make now. why_none: the reason for none; empty if there are some.

    drains: changes of busy nodes that are worth waiting for: drain each node (it takes no more jobs), and change it
    when its last job has ended. A node in `drains` keeps its target in `MigNode.target` until then.
    wait_now_s, wait_then_s: the expected mean wait; None if it could not be estimated.
    """

    changes: tuple[LayoutChange, ...]
    why_none: str = ""
    wait_now_s: float | None = None
    wait_then_s: float | None = None
    drains: tuple[LayoutChange, ...] = ()


@dataclass(frozen=True)
class LayoutRules:
    """The least worth of a change, in seconds of expected mean wait.

    raises: whether pending jobs get idle larger instances. change_s: a node's time out of service. node_rest_s: a node
    changes again after this time at the earliest. window_s: how much of the past is expected again. least_wait_s: mean
    wait below which nothing is changed. least_gain, least_gain_s: part of the mean wait, and seconds, that each
    changed node must save. least_total_gain: part of the mean wait that all changes of a plan must save together.
    most_nodes: share of the nodes that one plan changes, most_drained: that are drained at a time.
    """

    raises: bool = True
    change_s: int = 120
    node_rest_s: int = DAY_S
    window_s: int = 7 * DAY_S
    least_wait_s: float = 20.0
    least_gain: float = 0.02
    least_gain_s: float = 1.0
    least_total_gain: float = 0.1
    most_nodes: float = 0.5
    most_drained: float = 0.25


DEFAULT_RULES = LayoutRules()
FIRST_DAYS_CAUTION = 5.0
FIRST_DAY_WAIT_S = 60.0
WHOLE_GPUS, SEARCHED_GPUS = 72, 24
"""A site of more GPUs than the first is planned as one of about the second number, in the same proportions."""
FEW, MANY = 8_000, 16_000
"""Jobs that a search replays for each layout: a quick search first, then one that begins at its result. A site that is
planned as a smaller one gets the quick search only."""
DAYS = 1
"""Days that a replay looks ahead: as long as a node that changes now has to keep its layout."""
MOST_FUTURES = 40


def decide_layout(
    nodes: Sequence[MigNode], jobs: Sequence[SliceJob], now_s: int, rules: LayoutRules = DEFAULT_RULES
) -> LayoutPlan:
    """The layouts that the demand asks for: no change unless it is expected to shorten the mean wait.

    Each GPU model is planned apart. Nodes that changed within node_rest_s, that are drained or in trouble, or that have
    other profiles than the five usual ones stay as they are. Each size that recent jobs ask for stays somewhere.
    The order of nodes and jobs does not matter.
    """
    models = sorted({node.model for node in nodes})
    plans = []
    for model in models:
        own = sorted((node for node in nodes if node.model == model), key=lambda node: node.name)
        wanted = [job for job in jobs if (job.model or models[0]) == model] if len(models) > 1 else list(jobs)
        plans.append(_ModelPlan(model, own, wanted, now_s, rules).decide())
    return _joined(plans)


def _joined(plans: Sequence[LayoutPlan]) -> LayoutPlan:
    if len(plans) == 1:
        return plans[0]
    changes = tuple(change for plan in plans for change in plan.changes)
    drains = tuple(change for plan in plans for change in plan.drains)
    reasons = "; ".join(dict.fromkeys(plan.why_none for plan in plans if plan.why_none)) or "there are no MIG nodes"
    return LayoutPlan(changes, "" if changes else reasons, drains=drains)


class _ModelPlan:
    """One decision about the nodes of one model."""

    def __init__(
        self, model: str, nodes: Sequence[MigNode], jobs: Sequence[SliceJob], now_s: int, rules: LayoutRules
    ) -> None:
        self._sizes = sizes_of(mig_models()[model])
        self._now_s, self._rules = now_s, rules
        self._nodes = {node: counts for node in nodes if (counts := self._node_counts(node)) is not None}
        self._jobs = [job for job in jobs if job.submit_s <= now_s and 0 < job.run_s < math.inf]
        self._live = self._live_jobs()
        self._free_s: dict[str, float] = {}
        for job in self._jobs:
            if job.start_s is not None and job.node is not None and job.start_s + job.run_s > now_s:
                self._free_s[job.node] = max(self._free_s.get(job.node, 0.0), job.start_s + job.run_s)

    def decide(self) -> LayoutPlan:
        movable = [node for node in self._nodes if self._can_change(node)]
        if not any(self._sizes.index(job.shape) is not None for job in self._jobs):
            return LayoutPlan((), "no recent job of a slice or GPU is known")
        if not movable:
            return LayoutPlan((), "no node may change now: each changed within a day, is drained, or is out of service")
        return self._improve(movable)

    def _improve(self, movable: Sequence[MigNode]) -> LayoutPlan:
        """Plan the changes from which shorter waits are expected in the coming day."""
        rules = self._rules
        # One day may mislead: before two days are known, a change must be worth more.
        caution = 1.0 if self._known_s() >= 2 * DAY_S - HOUR_S else FIRST_DAYS_CAUTION
        if self._known_s() < DAY_S - HOUR_S and self._recent_wait_s() < FIRST_DAY_WAIT_S:
            return LayoutPlan((), "less than a day of jobs is known, and they hardly waited")
        gpus = sum(len(counts) for counts in self._nodes.values())
        scale = round(gpus / SEARCHED_GPUS) if gpus > WHOLE_GPUS else 1
        nodes = self._sampled(movable, scale)
        site = self._site(nodes, scale)
        outlook = self._outlook(site, FEW, 1)
        now_s = outlook.wait_s(site.layouts)
        if now_s < caution * rules.least_wait_s:
            return LayoutPlan((), f"the expected mean wait is {now_s:.0f} s already", now_s, now_s)
        chosen = [place for place, node in enumerate(nodes) if node in set(movable)]
        present = tuple(site.layouts[place] for place in chosen)
        starts: list[Sequence[NodeCounts]] = [self._proportional(outlook, present)]
        for jobs, seed in ((FEW, 1), (MANY, 2))[: 2 if scale == 1 else 1]:
            outlook = self._outlook(site, jobs, seed)
            found = self._search(outlook, nodes, chosen, caution, scale).run(starts)[2]
            then = site.with_layouts(chosen, found)
            wait_s, then_s = outlook.wait_s(site.layouts), outlook.wait_s(then)
            if found == present or wait_s - then_s < caution * rules.least_total_gain * wait_s:
                return LayoutPlan((), "no change is expected to shorten the mean wait enough", wait_s, then_s)
            starts = [found]
        steps = [(nodes[place], new) for place, new in zip(chosen, found, strict=True) if new != site.layouts[place]]
        return self._assign(movable, steps, scale, wait_s, then_s)

    def _outlook(self, site: MigClusterState, jobs: int, seed: int) -> Outlook:
        """Draw as many futures as replay about this number of jobs."""
        known_s = max(HOUR_S, min(self._known_s(), self._rules.window_s))
        mean = len(site.past) * DAYS * DAY_S / known_s + len(site.waiting)
        return Outlook(site, DAYS, min(MOST_FUTURES, max(2, round(jobs / max(1.0, mean)))), seed)

    def _search(
        self, outlook: Outlook, nodes: Sequence[MigNode], chosen: Sequence[int], caution: float, scale: int
    ) -> LayoutSearch:
        rules, site = self._rules, outlook.site

        def cost(layouts: Layouts, limit_s: float) -> float:
            return outlook.wait_s(site.with_layouts(chosen, layouts), limit_s)

        draining = sum(node.target is not None for node in self._nodes)
        most_busy = max(1, round(rules.most_drained * len(self._nodes))) - draining
        return LayoutSearch(
            sizes=self._sizes,
            present=tuple(site.layouts[place] for place in chosen),
            is_free=[nodes[place].is_free for place in chosen],
            cost=cost,
            least_gain=lambda wait_s: caution * max(rules.least_gain * wait_s, rules.least_gain_s),
            most_nodes=max(1, round((rules.most_nodes if caution > 1 else 1.0) * len(nodes))),
            most_busy=max(0, -(-most_busy // scale)),
        )

    def _sampled(self, movable: Sequence[MigNode], step: int) -> list[MigNode]:
        """Every step-th node, those in front that should change first: free ones, then those that are free first."""
        movables = set(movable)
        nodes = sorted(
            self._nodes,
            key=lambda node: (
                node not in movables, self._nodes[node], not node.is_free, self._free_s.get(node.name, 0.0), node.name
            ),
        )[::step]  # fmt: skip
        nodes.sort(key=lambda node: (not node.is_free, self._free_s.get(node.name, 0.0), node.name))
        return nodes

    def _site(self, nodes: Sequence[MigNode], step: int) -> MigClusterState:
        """The state of these nodes, with every step-th job."""
        layouts = tuple(self._nodes[node] for node in nodes)
        homes = self._homes(layouts)
        past = [job for job in self._past(step) if homes[job.size] is not None]
        runs: dict[int, list[PoolJob]] = {}
        for job in past:
            runs.setdefault(job.size, []).append(job)
        places = {node.name: place for place, node in enumerate(nodes)}
        running, waiting = [], []
        for live, pooled in self._live:
            if live.start_s is None and homes[pooled.size] is not None:
                waiting.append(tuple(runs.get(pooled.size, [pooled])))
            elif live.start_s is not None and live.node in places:
                size = self._sizes.index(live.ran_on or live.shape) or 0
                elapsed_s = self._now_s - live.start_s
                left = [each.runs_s[size] - elapsed_s for each in runs.get(pooled.size, ())]
                left = [each for each in left if each > 0] or [live.start_s + live.run_s - self._now_s]
                running.append(RunningSlice(places[live.node], size, tuple(left)))
        return MigClusterState(
            now_s=self._now_s,
            layouts=layouts,
            is_drained=tuple(node.target is not None for node in nodes),
            running=tuple(running),
            waiting=tuple(waiting[::step]),
            past=tuple(past),
            window_s=self._rules.window_s,
            change_s=self._rules.change_s,
            raises=self._rules.raises,
            needed=self._needed(homes),
        )

    def _proportional(self, outlook: Outlook, present: Layouts) -> list[NodeCounts]:
        """Layouts in proportion to the demand, for all nodes that may change."""
        busy = outlook.busy_instances(homes_of((1,) * len(self._sizes.shapes)))
        gpus = iter(proportional(self._sizes, [each / max(busy) for each in busy], sum(map(len, present))))
        return [tuple(sorted(next(gpus) for _ in node)) for node in present]

    def _assign(
        self, movable: Sequence[MigNode], steps: Sequence[tuple[MigNode, NodeCounts]], scale: int, wait_s: float,
        then_s: float,
    ) -> LayoutPlan:  # fmt: skip
        """Name the nodes: free ones first, then those that will be free first."""
        left = sorted(movable, key=lambda node: (not node.is_free, self._free_s.get(node.name, 0.0), node.name))
        draining = sum(node.target is not None for node in self._nodes)
        most = max(1, round(self._rules.most_drained * len(self._nodes)))
        changes, drains = [], []
        reason = f"expected mean wait {then_s:.0f} s instead of {wait_s:.0f} s"
        for one, new in steps:
            gpus = tuple(self._sizes.gpu_layout(counts) for counts in new)
            for node in [node for node in left if self._nodes[node] == self._nodes[one]][:scale]:
                left.remove(node)
                change = LayoutChange(node.name, node.gpus, gpus, reason)
                if node.is_free:
                    changes.append(change)
                elif draining < most:
                    draining += 1
                    drains.append(change)
        why = "" if changes else "no free node whose change is expected to shorten the mean wait enough"
        return LayoutPlan(tuple(changes), why, wait_s, then_s, tuple(drains))

    def _can_change(self, node: MigNode) -> bool:
        rested = node.changed_s is None or self._now_s - node.changed_s >= self._rules.node_rest_s
        return node.can_change and node.target is None and rested

    def _node_counts(self, node: MigNode) -> NodeCounts | None:
        gpus = [self._sizes.counts([layout]) for layout in (node.target or node.gpus)]
        return tuple(sorted(counts for counts in gpus if counts is not None)) if gpus and None not in gpus else None

    def _homes(self, layouts: Layouts) -> list[int | None]:
        places = range(len(self._sizes.shapes))
        return homes_of([sum(gpu[size] for node in layouts for gpu in node) for size in places])

    def _needed(self, homes: Sequence[int | None]) -> frozenset[int]:
        """Sizes that recent jobs ask for, and the whole GPU where there is one."""
        shapes = {job.shape for job in self._jobs} | {WHOLE}
        sizes = [size for shape in shapes if (size := self._sizes.index(shape)) is not None]
        return frozenset(home for size in sizes if (home := homes[size]) is not None)

    def _live_jobs(self) -> list[tuple[SliceJob, PoolJob]]:
        """Jobs that wait or run, by submit time."""
        live = [job for job in self._jobs if job.start_s is None or job.start_s + job.run_s > self._now_s]
        live.sort(key=_order)
        return [(job, pooled) for job in live if (pooled := self._pooled(job)) is not None]

    def _known_s(self) -> float:
        return self._now_s - min(job.submit_s for job in self._jobs)

    def _recent_wait_s(self) -> float:
        """Mean wait so far of the jobs of the last hours."""
        recent = [job for job in self._jobs if job.submit_s >= self._now_s - FIRST_S]
        ends = [self._now_s if job.start_s is None else job.start_s for job in recent]
        return sum(max(0, end_s - job.submit_s) for job, end_s in zip(recent, ends, strict=True)) / max(1, len(recent))

    def _past(self, step: int) -> list[PoolJob]:
        """Every step-th job of the window, by submit time."""
        begin_s = self._now_s - self._rules.window_s - HOUR_S
        recent = [job for job in self._jobs if job.submit_s >= begin_s]
        recent.sort(key=_order)
        return [pooled for job in recent[::step] if (pooled := self._pooled(job)) is not None]

    def _pooled(self, job: SliceJob) -> PoolJob | None:
        size, ran_on = self._sizes.index(job.shape), self._sizes.index(job.ran_on or job.shape)
        if size is None or ran_on is None:
            return None
        compute = job.compute if job.compute is not None and job.compute >= 0 else self._sizes.compute[size]
        compute = min(compute, self._sizes.compute[-1])
        full_s = job.run_s / max(1.0, compute / self._sizes.compute[ran_on])
        return PoolJob(job.submit_s, size, self._sizes.run_times(full_s, compute))


def _order(job: SliceJob) -> tuple[float | str, ...]:
    start_s = -1 if job.start_s is None else job.start_s
    return (job.submit_s, job.shape, job.run_s, job.compute or 0.0, job.ran_on or "", start_s, job.node or "")


@dataclass(frozen=True)
class PendingSlice:
    """A pending job of one slice. shape: the one asked for. can_rise: its owner, site, and release allow a change."""

    job_id: int
    shape: str
    can_rise: bool = True


@dataclass(frozen=True)
class Raise:
    """A pending job's new shape."""

    job_id: int
    old: str
    new: str


def decide_raises(pending: Sequence[PendingSlice], idle: Mapping[str, int], sizes: Sequence[str]) -> tuple[Raise, ...]:
    """Return the jobs to raise, in the queue's order, each to the smallest larger shape that is idle.

    pending: every pending job of a slice or GPU, first to start first. idle: free instances by shape. sizes: shapes in
    service from the smallest up, comparable ones only (a larger one holds every job of a smaller one).
    A shape that any pending job asks for is left to those jobs. A job that finds its own shape idle is not raised.
    """
    wanted = {job.shape for job in pending}
    order = {shape: place for place, shape in enumerate(sizes)}
    free = {shape: count for shape in sizes if shape not in wanted and (count := idle.get(shape, 0)) > 0}
    own = dict(idle)
    raises = []
    for job in pending:
        if not free:
            break
        if own.get(job.shape, 0) > 0:
            own[job.shape] -= 1
        elif job.can_rise and job.shape in order:
            new = next((shape for shape in free if order[shape] > order[job.shape]), None)
            if new is not None:
                raises.append(Raise(job.job_id, job.shape, new))
                free[new] -= 1
                if not free[new]:
                    del free[new]
    return tuple(raises)
