"""The layouts that nodes should have: their present ones, the demand, and the changes that may begin. Read-only.

The demand is recent jobs of one GPU or slice from the store, and the jobs that Slurm has now.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from advisor.memory.runs import SPIKE_MARGIN
from advisor.mig.compute_need import Activity, activity_of, slow_down
from advisor.mig.decide import WHOLE, LayoutChange, LayoutPlan, MigNode, SliceJob
from advisor.mig.states import DEFAULT_SHAPES
from almanac.config import AdviceSection
from almanac.errors import AlmanacError
from almanac.hardware import MigModel, MigProfile
from almanac.submit_config import Tier
from almanac.tiers import SliceShare, slice_share
from almanac.tres import gpu_types
from almanac.units import printable
from slurm import states
from slurm.nodes import SlurmNode
from slurm.queued_job import QueuedJob
from slurm_hooks.mig.layouts import GresNames, Layout, MigSettings, check_layout, shown
from slurm_hooks.mig.sides import (
    DYNAMIC,
    IncludeFile,
    NodeSide,
    SlurmSide,
    SlurmView,
    StuckJobs,
    stuck_jobs,
    with_node_gres,
)
from slurm_hooks.mig.steps import NO_COMMAND, MigState, NodeChange
from slurm_hooks.power.nodes import flags_of
from telemetry.history import load_history_table
from telemetry.store.store import ClusterStore

COLUMNS = (
    "submit_s", "start_s", "elapsed_s", "gpu_count", "gpu_type", "gpu_type_req", "hbm_peak_mib", "hbm_evidence",
    "mean_gpu_util_pct",
    "mean_gr_engine_active_frac", "mean_sm_active_frac", "mean_dram_active_frac", "has_profiling_fault",
)  # fmt: skip
MOST_SLOW_DOWN = 1.5
"""Most slow-down that a slice is expected to bring (almanac's own choice)."""
UNKNOWN_RUN_S = 3600.0
"""Run time of a waiting job without a time limit, on a site without history."""
SHAPES = tuple(shape for shape in DEFAULT_SHAPES if shape != "7g")
"""Shapes that nodes are cut into: a 7g slice is a whole GPU, less what MIG takes."""


@dataclass(frozen=True)
class LayoutDemand:
    """The jobs for which MIG layouts are planned.

    jobs: past and live jobs of one GPU. types: GPU types that jobs ask for or held lately. past, waiting: numbers of
    jobs. unknown: past jobs whose memory was not measured; the shape that they had stands for them.
    """

    jobs: tuple[SliceJob, ...]
    types: frozenset[str]
    past: int = 0
    waiting: int = 0
    unknown: int = 0


def read_demand(
    store: ClusterStore,
    queue: Sequence[QueuedJob],
    names: Collection[GresNames],
    advice: AdviceSection,
    days: float,
    now_s: int,
) -> LayoutDemand:
    """Return the jobs to plan for: ended ones submitted in the last `days`, and the queue. Raises StoreError."""
    since_s = int(now_s - days * 86_400)
    rows = load_history_table(store, COLUMNS, since_s=since_s).to_pylist()
    return demand_of(rows, queue, names, advice, now_s)


def demand_of(
    rows: Sequence[Mapping[str, Any]], queue: Sequence[QueuedJob], names: Collection[GresNames],
    advice: AdviceSection, now_s: int,
) -> LayoutDemand:  # fmt: skip
    """Return the demand of ended and queued jobs. All jobs count for its types; only jobs of one GPU are planned for.

    rows: of ended jobs, with COLUMNS.
    """
    types = {str(row["gpu_type"] or row["gpu_type_req"] or "") for row in rows} | {job.gpu_type for job in queue}
    past = [(row, job) for row in rows if (job := _past(row, names, advice))]
    typical_s = statistics.median_high([job.run_s for _, job in past] or [UNKNOWN_RUN_S])
    live = [each for job in queue if job.gpu_count == 1 for each in _queued(job, names, typical_s, now_s)]
    return LayoutDemand(
        jobs=(*(job for _, job in past), *live),
        types=frozenset(types - {""}),
        past=len(past),
        waiting=sum(job.start_s is None for job in live),
        unknown=sum(row["hbm_peak_mib"] is None for row, _ in past),
    )


def _past(row: Mapping[str, Any], names: Collection[GresNames], advice: AdviceSection) -> SliceJob | None:
    """None for a job that no managed node could have run as one slice or GPU."""
    if row["gpu_count"] != 1 or not row["elapsed_s"] or row["start_s"] is None:
        return None
    found = _given(str(row["gpu_type"] or row["gpu_type_req"] or ""), names)
    if found is None:
        return None
    own, ran_on = found
    activity = row_activity(row, own.model, ran_on)
    peak_mib = None if row.get("hbm_evidence") == "unclear" else row["hbm_peak_mib"]
    shape = smallest_shape(own.model, ran_on, peak_mib, activity, advice)
    return SliceJob(
        shape, row["submit_s"], float(row["elapsed_s"]), int(row["start_s"]), ran_on=ran_on,
        compute=busy_slices(own.model, shape, activity), model=own.model.name,
    )  # fmt: skip


def _given(gres_type: str, names: Collection[GresNames]) -> tuple[GresNames, str] | None:
    """The model and the shape of a GRES type; None if it is not of the managed nodes, or not known."""
    for each in names:
        if shape := each.shape_of(gres_type):
            return each, shape
    return None


def row_activity(row: Mapping[str, Any], model: MigModel, ran_on: str) -> Activity | None:
    """Return a past job's use of its GPU, as shares of a whole one; None if unknown."""
    sm, dram, engine = (_number(row.get(f"mean_{name}_active_frac")) for name in ("sm", "dram", "gr_engine"))
    busy = _number(row.get("mean_gpu_util_pct")) / 100 if math.isnan(engine) else engine
    profile = None if ran_on == WHOLE else model.profile(ran_on)
    tier = None if profile is None else _tier(model, profile)
    return activity_of(sm, dram, busy, model.name, tier, bool(row.get("has_profiling_fault")))


def busy_slices(model: MigModel, shape: str, activity: Activity | None) -> float | None:
    """Compute slices that a job keeps busy: it runs as much longer on its shape as the work is more than that has."""
    if activity is None:
        return None
    profile = None if shape == WHOLE else model.profile(shape)
    if profile is None:
        return max(activity.sm, activity.dram) * model.compute_slices
    return slow_down(activity, _share(model, profile)) * profile.compute


def smallest_shape(
    model: MigModel, ran_on: str, peak_mib: float | None, activity: Activity | None, advice: AdviceSection
) -> str:
    """The smallest shape that holds a peak and slows the job down by at most MOST_SLOW_DOWN; else the one it had."""
    if peak_mib is None or activity is None or math.isnan(peak_mib):
        return ran_on
    most = model.whole if ran_on == WHOLE else model.profile(ran_on)
    for profile in model.profiles:
        if profile.shape not in SHAPES or profile.memory_gib is None or most is None:
            continue
        holds = peak_mib * (1 + SPIKE_MARGIN) + advice.headroom_mib <= profile.memory_gib[0] * 1024
        if not holds or profile.compute > most.compute:
            continue
        if slow_down(activity, _share(model, profile)) <= MOST_SLOW_DOWN:
            return profile.shape
    return ran_on


def _number(value: object) -> float:
    """NaN for what is missing."""
    return float(value) if isinstance(value, int | float) else math.nan


@cache
def _share(model: MigModel, profile: MigProfile) -> SliceShare:
    share = slice_share(_tier(model, profile), model.name)
    assert share is not None, "a profile of the model"
    return share


@cache
def _tier(model: MigModel, profile: MigProfile) -> Tier:
    return Tier(gres=profile.name, gpu_model=model.name)


def _queued(job: QueuedJob, names: Collection[GresNames], typical_s: float, now_s: int) -> list[SliceJob]:
    """A job without a type is a whole GPU's: that is the careful guess."""
    found = _given(job.gpu_type, names) if job.gpu_type else next(((each, WHOLE) for each in names), None)
    if found is None or (job.is_waiting and job.is_held and job.reason_key != "BADCONSTRAINTS"):
        return []
    run_s, start_s, node = min(typical_s, job.time_limit_s or math.inf), None, None
    if not job.is_waiting:
        start_s, node = job.start_s or now_s, job.node_list
        run_s = max(run_s, now_s - start_s + 60.0)
    one = SliceJob(found[1], job.submit_s, run_s, start_s, node=node, model=found[0].model.name)
    return [one] * min(job.task_count, 10_000)


HAS_A_JOB = "it has a job"
PAUSE_S = 86_400
"""Least time between two changes of one node: demand differs by the hour, and each change drains the node."""
AT_ONCE = 16
"""Nodes that are asked at the same time."""
Decide = Callable[[Sequence[MigNode], Sequence[SliceJob], int], LayoutPlan]


@dataclass(frozen=True)
class NodeRow:
    """A managed node. layout: as the node itself says; None without an answer. refusal: why not now."""

    name: str
    model: str
    layout: Layout | None
    gres: str
    refusal: str


@dataclass(frozen=True)
class MigPlan:
    """A plan of MIG layouts, and what it rests on.

    unwanted: nodes that wait for their jobs to end before a change which no longer pays.
    """

    nodes: tuple[NodeRow, ...]
    demand: LayoutDemand
    plan: LayoutPlan
    stuck: StuckJobs
    unwanted: tuple[str, ...] = ()


@dataclass(frozen=True)
class MigPlanner:
    """Everything that a plan needs. decide: advisor.mig.decide.decide_layout."""

    settings: MigSettings
    slurm: SlurmSide
    node_side: NodeSide
    decide: Decide
    demand_of: Callable[[Sequence[QueuedJob]], LayoutDemand]

    def plan(self, state: MigState, now_s: int) -> MigPlan:
        """Plan layouts and job releases without changing anything. Raises CommandError, ConfigError, StoreError."""
        view, queue = self.slurm.view(now_s), self.slurm.queue()
        demand = self.demand_of(queue)
        gate = ChangeGate(self.settings, view, state, demand.types, now_s)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            rows = tuple(pool.map(lambda name: self._row(name, gate), self.settings.names))
        nodes = [node for row in rows if (node := _mig_node(row, state))]
        in_service = frozenset(name for node in view.nodes.values() if is_open(node) for name in gpu_types(node.gres))
        own_types = {name for each in self.settings.names.values() for name in each.all_types()}
        return MigPlan(
            nodes=rows,
            demand=demand,
            plan=self.decide(nodes, demand.jobs, now_s) if nodes else LayoutPlan((), "no node says its layout"),
            stuck=stuck_jobs(queue, own_types, in_service, state, now_s),
            unwanted=self._unwanted(nodes, demand, now_s),
        )

    def _unwanted(self, nodes: Sequence[MigNode], demand: LayoutDemand, now_s: int) -> tuple[str, ...]:
        """Draining nodes of models that the plan would leave alone, did it not find them drained.

        Not by node and layout: of two equal plans now one is found and now the other, and no node shall be drained and
        resumed in turn for that.
        """
        draining = [node for node in nodes if node.target is not None]
        if not draining:
            return ()
        plan = self.decide([replace(node, target=None) for node in nodes], demand.jobs, now_s)
        changed = {self.settings.names[each.node].model.name for each in (*plan.changes, *plan.drains)}
        return tuple(node.name for node in draining if node.model not in changed)

    def _row(self, name: str, gate: ChangeGate) -> NodeRow:
        names, node = self.settings.names[name], gate.view.nodes.get(name)
        if node is None:
            return NodeRow(name, names.model.name, None, "", "Slurm does not list it")
        why = gate.refusal(node)
        layout: Layout | None = None
        try:
            layout = self.node_side.export(name, names.model, node.gres)
            if names.types(layout) != gpu_types(node.gres):
                why = why or "the node and Slurm have different layouts"
        except AlmanacError as error:
            why = why or printable(f"{error}; {error.hint}", 200)
        return NodeRow(name, names.model.name, layout, node.gres, why)


def _mig_node(row: NodeRow, state: MigState) -> MigNode | None:
    if row.layout is None:
        return None
    change = state.changes.get(row.name)
    if change is not None and change.waits_for_jobs:
        return MigNode(row.name, row.model, row.layout, False, state.changed_s.get(row.name), change.new)
    can_change = row.refusal in ("", HAS_A_JOB)
    return MigNode(
        row.name, row.model, row.layout, not row.refusal, state.changed_s.get(row.name), can_change=can_change
    )


@dataclass(frozen=True)
class ChangeGate:
    """Says why a node must not begin a change now. wanted: GPU types that jobs ask for, or asked for lately."""

    settings: MigSettings
    view: SlurmView
    state: MigState
    wanted: Collection[str]
    now_s: int

    def refusal(self, node: SlurmNode, may_be_busy: bool = False) -> str:
        """Return "" where the change may begin. may_be_busy: its jobs will be waited for."""
        name, changed_s, is_free = node.name, self.state.changed_s.get(node.name), not flags_of(node.states)
        checks = (
            (name not in self.settings.names, "it is not in mig.nodes, or it is excluded"),
            (name in self.state.changes, "it is under change already"),
            (changed_s is not None and self.now_s - changed_s < PAUSE_S, "it was changed within a day"),
            (name in self.view.busy and not may_be_busy, HAS_A_JOB),
            (name in self.view.reserved or bool(node.reservation), "it is reserved, or soon will be"),
            (not is_free and not (may_be_busy and is_in_service(node)), f"it is {'+'.join(sorted(node.states))}"),
        )
        return next((why for applies, why in checks if applies), "") or self.lost_types(node)

    def lost_types(self, node: SlurmNode) -> str:
        """Return "" where every type in demand stays in service while this node is out of it."""
        others = {
            name for other in self.view.nodes.values()
            if other.name != node.name and other.name not in self.state.changes and is_in_service(other)
            for name in gpu_types(other.gres)
        }  # fmt: skip
        gone = sorted((gpu_types(node.gres).keys() & set(self.wanted)) - others)
        return f"no other node in service has {', '.join(gone)}, which jobs ask for" if gone else ""

    def why_not(self, change: LayoutChange, node_side: NodeSide, include: IncludeFile, is_patient: bool) -> str:
        """Return why a change must not begin. Asks the node itself, and reads the include file."""
        node, names = self.view.nodes.get(change.node), self.settings.names.get(change.node)
        if node is None or names is None:
            return "Slurm does not list it" if names else "it is not in mig.nodes, or it is excluded"
        if why := self.refusal(node, is_patient) or check_layout(names.model, change.new):
            return why
        if names.types(change.old) != gpu_types(node.gres):
            return f"Slurm has Gres={node.gres}, and the plan begins at {shown(change.old)}"
        if change.new == change.old:
            return "the layout is the same"
        try:
            if node_side.export(change.node, names.model, node.gres) != change.old:
                return "the node itself has another layout than the plan begins at"
            if DYNAMIC in node.states:
                return "" if self.settings.config.register_command else NO_COMMAND
            with_node_gres(include.read(), change.node, names.types(change.new))
        except AlmanacError as error:
            return printable(f"{error}; {error.hint}", 300)
        return ""


def new_change(each: LayoutChange, gate: ChangeGate, is_patient: bool) -> NodeChange:
    """Return what is remembered of a change that begins now."""
    names, node = gate.settings.names[each.node], gate.view.nodes[each.node]
    return NodeChange(
        node=each.node,
        model=names.model.name,
        old=each.old,
        new=each.new,
        old_gpus=dict(names.types(each.old)),
        new_gpus=dict(names.types(each.new)),
        begun_s=gate.now_s,
        stage_s=gate.now_s,
        is_patient=is_patient,
        dynamic_gres=node.gres if DYNAMIC in node.states else "",
    )


def is_in_service(node: SlurmNode) -> bool:
    """Return True if the node takes jobs, if not right now: a job of an exclusive topology can block it for a while."""
    return states.is_in_service(node.states - {"BLOCKED"})


def is_open(node: SlurmNode) -> bool:
    """Return True if Slurm means to start jobs there: for seconds after its restart (22.05) it waits for an answer."""
    return is_in_service(replace(node, states=node.states - {"NOT_RESPONDING"}))
