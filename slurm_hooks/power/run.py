"""One run: plan, write down what is about to happen, tell Slurm, and look again.

A run that is killed leaves nothing half done that the next one would not see in Slurm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from advisor.decisions.power_nodes import NodeFlag, may_power_down
from almanac import __version__
from almanac.actions_config import PowerMode
from almanac.errors import StoreError
from almanac.records import Counts
from slurm_hooks.last_look import Facts, must_still_hold, node_facts
from slurm_hooks.power.actuators import mark_facts, power_down, quarantine, resume, set_exceptions, unchanged, wake
from slurm_hooks.power.nodes import power_nodes
from slurm_hooks.power.plan import WAKE_RETRIES, confirmed
from slurm_hooks.power.planning import Planner, PowerPlan, SetPlan
from slurm_hooks.power.settings import joined
from telemetry.slurm.backend import Node, SlurmBackend
from telemetry.slurm.hostlist import fold
from telemetry.slurm.node_sets import live_demand, members

_IS_POWERED_OFF = NodeFlag.ASLEEP | NodeFlag.BOOTING


@dataclass(frozen=True)
class SetOutcome:
    """What became of a plan. said: what Slurm said against it. changed: nodes that were no longer idle when it came to
    it, and were left on. unheard: orders that Slurm took without a word and dropped; the next run repeats them.
    """

    plan: SetPlan
    said: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    unheard: tuple[str, ...] = ()


@dataclass(frozen=True)
class PowerRun:
    """Acts on the plans of a planner."""

    planner: Planner

    @property
    def _backend(self) -> SlurmBackend:
        return self.planner.backend

    def note_demand(self) -> list[str]:
        """Record the demand of this minute, which the plan then uses. Returns what the store refused: the run goes on,
        and holds without fresh demand. Raises CommandError.
        """
        planner, nodes, faults = self.planner, self._backend.nodes(), list[str]()
        pending, now_s = self._backend.pending(Counts()), int(planner.clock())
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
        """Write down what would be done; Slurm is told nothing. Raises StoreError."""
        self._write_down(plan, "observe")

    def apply(self, plan: PowerPlan) -> list[SetOutcome]:
        """Do it. Raises StoreError where it cannot be written down (Slurm is told nothing then), CommandError where
        slurmctld is lost: what was done until then stays, and the next run goes on from there.
        """
        self._write_down(plan, "apply")
        if not plan.fault:
            self.planner.folder.save(plan.memory)
        outcomes = [self._wake(each, plan) for each in plan.sets]
        said = self._tell_exceptions(plan)
        outcomes = [self._power_down(each, plan) for each in outcomes]
        if any(each.acts for each in plan.sets):
            outcomes = self._look_again(outcomes, plan)
            self._confirm(outcomes, plan)
        return [replace(each, said=(*each.said, *said)) for each in outcomes]

    def _write_down(self, plan: PowerPlan, mode: PowerMode) -> None:
        rows = [row for each in plan.sets for row in self._rows(each, plan, mode)]
        self.planner.folder.log.append(rows, plan.now_s)

    def _rows(self, each: SetPlan, plan: PowerPlan, mode: PowerMode) -> list[dict[str, Any]]:
        orders = {
            "wake": each.chosen.wake,
            "wake again": each.failures.again,
            "resume": each.failures.back,
            "quarantine": each.failures.give_up,
            "power down again": each.failures.lost,
            "power down": each.chosen.power_down,
        }
        return [
            {
                "time_s": plan.now_s, "cluster": self.planner.cluster, "node_set": each.node_set, "what": what,
                "nodes": fold(names), "number": len(names), "mode": mode, "actuator": plan.actuator,
                "target": each.target, "powered": each.powered, "active": each.demand.active,
                "wanted": each.demand.wanted, "reason": each.reason, "almanac": __version__,
            }
            for what, names in orders.items() if names
        ]  # fmt: skip

    def _wake(self, each: SetPlan, plan: PowerPlan) -> SetOutcome:
        failed, backend = each.failures, self._backend

        def still(names: Sequence[str], facts_of: Callable[[Node], Facts] = node_facts) -> tuple[str, ...]:
            return unchanged(backend, names, plan.nodes, facts_of, lambda name, why: self._drop(each, plan, name, why))

        said = wake(backend, still((*each.chosen.wake, *failed.again), mark_facts))
        said += resume(backend, still(failed.back))
        said += quarantine(backend, still(failed.give_up), WAKE_RETRIES)
        said += power_down(backend, still(failed.lost))
        return SetOutcome(each, tuple(said))

    def _drop(self, each: SetPlan, plan: PowerPlan, name: str, why: str) -> None:
        row = {
            "time_s": plan.now_s, "cluster": self.planner.cluster, "node_set": each.node_set, "what": "dropped",
            "nodes": name, "number": 1, "mode": "apply", "reason": why, "almanac": __version__,
        }  # fmt: skip
        self.planner.folder.log.append([row], plan.now_s)

    def _tell_exceptions(self, plan: PowerPlan) -> list[str]:
        """Set SuspendExcNodes where it differs: Slurm forgets the value when it reads slurm.conf again."""
        before = joined(plan.settings.exceptions)
        if plan.exceptions is None or before == plan.exceptions:
            return []
        if self.planner.folder.hold_reason() != plan.held:
            return ["SuspendExcNodes is left: `almanac power hold` changed meanwhile"]
        return set_exceptions(self._backend, before, plan.exceptions)

    def _power_down(self, outcome: SetOutcome, plan: PowerPlan) -> SetOutcome:
        """Of the nodes chosen, those that may still power down."""
        wanted = outcome.plan.chosen.power_down
        if not wanted or plan.actuator == "count":
            return outcome

        def read(names: Collection[str]) -> dict[str, Facts]:
            around = self.planner.surroundings_now(plan)
            nodes = {node.name: node for node in self._backend.nodes(names)}
            held = self.planner.folder.hold_reason()
            return {
                each.name: {
                    "hold": held,
                    "is fit": may_power_down(each, outcome.plan.limits, plan.now_s),
                    "reason": nodes[each.name].reason,
                }
                for each in power_nodes(sorted(nodes), nodes, around, plan.now_s)
            }

        relied_on = {name: {"hold": "", "is fit": True, "reason": plan.nodes[name].reason} for name in wanted}
        changed = must_still_hold(relied_on, read)
        said = power_down(self._backend, [name for name in wanted if name not in changed])
        for name, why in changed.items():
            self._drop(outcome.plan, plan, name, why)
        return replace(outcome, said=(*outcome.said, *said), changed=tuple(changed))

    def _look_again(self, outcomes: Sequence[SetOutcome], plan: PowerPlan) -> list[SetOutcome]:
        nodes = {node.name: node for node in self._backend.nodes()}
        return [replace(each, unheard=self._unheard(each, nodes, plan)) for each in outcomes]

    def _confirm(self, outcomes: Sequence[SetOutcome], plan: PowerPlan) -> None:
        """Remember which nodes Slurm powers down by almanac's order. A run that is killed before remembers less."""
        heard = [
            name for each in outcomes for name in (*each.plan.chosen.power_down, *each.plan.failures.lost)
            if name not in each.changed and name not in each.unheard
        ]  # fmt: skip
        if heard and not plan.fault and plan.actuator == "names":
            self.planner.folder.save(confirmed(plan.memory, heard))

    def _unheard(self, outcome: SetOutcome, nodes: Mapping[str, Node], plan: PowerPlan) -> tuple[str, ...]:
        chosen, failed = outcome.plan.chosen, outcome.plan.failures
        told_up = (*chosen.wake, *failed.again)
        told_down = () if plan.actuator == "count" else {*chosen.power_down, *failed.lost} - set(outcome.changed)
        power = {each.name: each.flags for each in power_nodes((*told_up, *told_down), nodes, plan.around, plan.now_s)}
        slept_on = [n for n in told_up if power[n] & NodeFlag.ASLEEP and not power[n] & NodeFlag.BOOTING]
        stayed_on = [n for n in told_down if not power[n] & (_IS_POWERED_OFF | NodeFlag.BUSY | NodeFlag.UNKNOWN)]
        return tuple(sorted((*slept_on, *stayed_on)))
