"""What the nodes are now, what the demand asks for, and which changes may begin: read-only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from advisor.decisions.mig_layout import LayoutChange, LayoutPlan, MigNode, SliceJob
from almanac.errors import AlmanacError
from almanac.units import printable
from slurm_hooks.mig.demand import Demand
from slurm_hooks.mig.folder import MigState
from slurm_hooks.mig.gate import HAS_A_JOB, Surroundings, is_open, refusal
from slurm_hooks.mig.layouts import Layout, gpu_types
from slurm_hooks.mig.node_side import NodeSide
from slurm_hooks.mig.settings import MigSettings
from slurm_hooks.mig.slurm_side import SlurmSide, SlurmView
from slurm_hooks.mig.stuck import StuckJobs, stuck_jobs
from telemetry.slurm.gpu_queue import QueuedGpuJob

AT_ONCE = 16
"""Nodes that are asked at the same time."""
Decide = Callable[[Sequence[MigNode], Sequence[SliceJob], int], LayoutPlan]


@dataclass(frozen=True)
class NodeRow:
    """A managed node. layout: as the node itself says; None where it does not answer. refusal: why not now."""

    name: str
    model: str
    layout: Layout | None
    gres: str
    refusal: str


@dataclass(frozen=True)
class MigPlan:
    """The plan and what it is made from. in_service: GPU types of nodes that take jobs, or will when they answer.

    unwanted: nodes that wait for their jobs to end before a change which no longer pays.
    """

    now_s: int
    nodes: tuple[NodeRow, ...]
    demand: Demand
    plan: LayoutPlan
    stuck: StuckJobs
    in_service: frozenset[str]
    unwanted: tuple[str, ...] = ()

    @property
    def changes(self) -> tuple[LayoutChange, ...]:
        return self.plan.changes


@dataclass(frozen=True)
class MigPlanner:
    """Everything that a plan needs. decide: advisor.decisions.mig_layout.decide_layout."""

    settings: MigSettings
    slurm: SlurmSide
    node_side: NodeSide
    decide: Decide
    demand_of: Callable[[Sequence[QueuedGpuJob]], Demand]

    def plan(self, state: MigState, now_s: int) -> MigPlan:
        """Raises CommandError, ConfigError, StoreError. Changes nothing."""
        view, queue = self.slurm.view(now_s), self.slurm.queue()
        demand = self.demand_of(queue)
        around = self._around(view, state, demand)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            rows = tuple(pool.map(lambda name: self._row(name, view, around, now_s), self.settings.names))
        nodes = [node for row in rows if (node := _mig_node(row, state))]
        in_service = frozenset(name for node in view.nodes.values() if is_open(node) for name in gpu_types(node.gres))
        own_types = {name for each in self.settings.names.values() for name in each.all_types()}
        return MigPlan(
            now_s=now_s,
            nodes=rows,
            demand=demand,
            plan=self.decide(nodes, demand.jobs, now_s) if nodes else LayoutPlan((), "no node says its layout"),
            stuck=stuck_jobs(queue, own_types, in_service, state, now_s),
            in_service=in_service,
            unwanted=self._unwanted(nodes, demand, now_s),
        )

    def _unwanted(self, nodes: Sequence[MigNode], demand: Demand, now_s: int) -> tuple[str, ...]:
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

    def _around(self, view: SlurmView, state: MigState, demand: Demand) -> Surroundings:
        return Surroundings(
            managed=self.settings.names.keys(),
            busy=view.busy,
            reserved=view.reserved,
            under_change=state.changes.keys(),
            changed_s=state.changed_s,
            wanted=demand.types,
        )

    def _row(self, name: str, view: SlurmView, around: Surroundings, now_s: int) -> NodeRow:
        names, node = self.settings.names[name], view.nodes.get(name)
        if node is None:
            return NodeRow(name, names.model.name, None, "", "Slurm does not list it")
        why = refusal(node, list(view.nodes.values()), around, now_s)
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
