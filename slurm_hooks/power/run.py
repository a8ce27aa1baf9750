"""One run: plan, record the orders, tell Slurm, and look again.

A run that is killed leaves nothing half done that the next one would not see in Slurm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from advisor.power.decide import NodeFlag, may_power_down
from almanac.actions_config import PowerMode
from almanac.errors import StoreError
from almanac.records import Counts
from slurm.backend import NodeState
from slurm.node_sets import live_demand, members
from slurm.nodes import SlurmNode
from slurm_hooks.nodes.engine import NodeEngine
from slurm_hooks.orders import Facts, node_facts
from slurm_hooks.power.failures import WAKE_RETRIES
from slurm_hooks.power.nodes import DID_NOT_WAKE, REASON, PowerState, confirmed, power_nodes
from slurm_hooks.power.operators import mark_facts
from slurm_hooks.power.planning import PowerPlan, PowerPlanner, SetPlan
from slurm_hooks.power.settings import joined, set_exceptions

_IS_POWERED_OFF = NodeFlag.ASLEEP | NodeFlag.BOOTING


@dataclass(frozen=True)
class SetOutcome:
    """The outcome of a plan. said: Slurm's objections. changed: nodes that were no longer idle when it came to
    it, and were left on. unheard: orders that Slurm took without a word and dropped; the next run repeats them.
    """

    plan: SetPlan
    said: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    unheard: tuple[str, ...] = ()


@dataclass(frozen=True)
class PowerRun:
    """Acts on the plans of a planner."""

    planner: PowerPlanner

    @property
    def _engine(self) -> NodeEngine[PowerState]:
        return self.planner.engine

    def note_demand(self) -> list[str]:
        """Record the demand of this minute, which the plan then uses. Returns what the store refused: the run goes on,
        and holds without fresh demand. Raises CommandError.
        """
        planner, nodes, faults = self.planner, self.planner.backend.nodes(), list[str]()
        pending, now_s = self.planner.backend.pending(Counts()), self._engine.now_s()
        run_s: Mapping[int, float] | None = None
        try:
            run_s = planner.source.run_times_s(pending, now_s)
        except StoreError as error:
            faults.append(f"run times of pending jobs are unknown: {error}; {error.hint}")
        for each in planner.config.node_sets:
            try:
                planner.source.note(each, live_demand(members(each, nodes), nodes, pending, run_s), now_s)
            except StoreError as error:
                faults.append(f"the demand of {each.name} is not recorded: {error}; {error.hint}")
        return faults

    def observe(self, plan: PowerPlan) -> None:
        """Record what would be done; Slurm is told nothing. Raises StoreError."""
        self._record(plan, "observe")

    def apply(self, plan: PowerPlan) -> list[SetOutcome]:
        """Do it. Raises StoreError if it cannot be recorded (Slurm is told nothing then), CommandError if
        slurmctld is lost: what was done until then stays, and the next run goes on from there.
        """
        self._record(plan, "apply", None if plan.fault else plan.memory)
        outcomes = [self._wake(each, plan) for each in plan.sets]
        said = self._tell_exceptions(plan)
        outcomes = [self._power_down(each, plan) for each in outcomes]
        if any(each.acts for each in plan.sets):
            nodes = {node.name: node for node in self._engine.backend.nodes()}
            outcomes = [replace(each, unheard=self._unheard(each, nodes, plan)) for each in outcomes]
            self._confirm(outcomes, plan)
        return [replace(each, said=(*each.said, *said)) for each in outcomes]

    def _record(self, plan: PowerPlan, mode: PowerMode, state: PowerState | None = None) -> None:
        rows = [
            self._engine.row(
                what, names, each.reason, mode, node_set=each.node_set, actuator=plan.actuator, target=each.target,
                powered=each.powered, active=each.demand.active, wanted=each.demand.wanted,
            )
            for each in plan.sets for what, names in each.orders().items()
        ]  # fmt: skip
        self._engine.record(rows, state)

    def _wake(self, each: SetPlan, plan: PowerPlan) -> SetOutcome:
        def order(
            state: NodeState,
            names: Sequence[str],
            facts_of: Callable[[SlurmNode], Facts] = node_facts,
            reason: str = "",
        ) -> list[str]:
            before = {name: facts_of(plan.nodes[name]) for name in names if name in plan.nodes}
            return self._engine.order(state, before, self._engine.look(facts_of), reason, node_set=each.node_set)[1]

        failed = each.failures
        said = order("power_up", (*each.chosen.wake, *failed.again), mark_facts)
        said += order("resume", failed.back)
        why = f"{DID_NOT_WAKE} within ResumeTimeout ({WAKE_RETRIES + 1} tries)"
        said += order("drain", failed.give_up, reason=why)
        said += order("power_down_asap", failed.lost, reason=REASON)
        return SetOutcome(each, tuple(said))

    def _tell_exceptions(self, plan: PowerPlan) -> list[str]:
        """Set SuspendExcNodes if it differs: Slurm forgets the value when it reads slurm.conf again."""
        before = joined(plan.settings.exceptions)
        if plan.exceptions is None or before == plan.exceptions:
            return []
        if self._engine.folder.hold_reason() != plan.held:
            return ["SuspendExcNodes is left: `almanac power hold` changed meanwhile"]
        return set_exceptions(self._engine.backend, before, plan.exceptions)

    def _power_down(self, outcome: SetOutcome, plan: PowerPlan) -> SetOutcome:
        """Power down those of the chosen nodes that still may.

        A job that started meanwhile runs to its end, and the node powers down after it. A sleeping node is not drained,
        so that Slurm itself wakes it for a job that needs it.
        """
        wanted = outcome.plan.chosen.power_down
        if not wanted or plan.actuator == "count":
            return outcome

        def read(names: Collection[str]) -> dict[str, Facts]:
            around = self.planner.surroundings_now(plan)
            nodes = {node.name: node for node in self._engine.backend.nodes(names)}
            held = self._engine.folder.hold_reason()
            return {
                each.name: {
                    "hold": held,
                    "is fit": may_power_down(each, outcome.plan.limits, plan.now_s),
                    "reason": nodes[each.name].reason,
                }
                for each in power_nodes(sorted(nodes), nodes, around, plan.now_s)
            }

        relied_on = {name: {"hold": "", "is fit": True, "reason": plan.nodes[name].reason} for name in wanted}
        kept, said = self._engine.order("power_down_asap", relied_on, read, REASON, node_set=outcome.plan.node_set)
        changed = tuple(name for name in wanted if name not in kept)
        return replace(outcome, said=(*outcome.said, *said), changed=changed)

    def _confirm(self, outcomes: Sequence[SetOutcome], plan: PowerPlan) -> None:
        """Remember which nodes Slurm powers down by almanac's order. A run that is killed before remembers less."""
        heard = [
            name for each in outcomes for name in (*each.plan.chosen.power_down, *each.plan.failures.lost)
            if name not in each.changed and name not in each.unheard
        ]  # fmt: skip
        if heard and not plan.fault and plan.actuator == "names":
            self._engine.folder.save(confirmed(plan.memory, heard))

    def _unheard(self, outcome: SetOutcome, nodes: Mapping[str, SlurmNode], plan: PowerPlan) -> tuple[str, ...]:
        """Slurm drops an order to wake a node that is still powering down without a word."""
        chosen, failed = outcome.plan.chosen, outcome.plan.failures
        told_up = (*chosen.wake, *failed.again)
        told_down = () if plan.actuator == "count" else {*chosen.power_down, *failed.lost} - set(outcome.changed)
        power = {each.name: each.flags for each in power_nodes((*told_up, *told_down), nodes, plan.around, plan.now_s)}
        slept_on = [n for n in told_up if power[n] & NodeFlag.ASLEEP and not power[n] & NodeFlag.BOOTING]
        stayed_on = [n for n in told_down if not power[n] & (_IS_POWERED_OFF | NodeFlag.BUSY | NodeFlag.UNKNOWN)]
        return tuple(sorted((*slept_on, *stayed_on)))
