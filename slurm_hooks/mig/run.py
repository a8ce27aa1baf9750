"""One run: take up the changes under way, begin those of the plan, and go on until each node is resumed or given up.

Before each order: a line of the record, then the state on disk, then a look. A run that is killed is taken up there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from advisor.mig.decide import LayoutChange
from almanac.errors import AlmanacError, CommandError
from almanac.tres import gpu_types
from almanac.units import printable
from slurm.backend import NodeState
from slurm.states import NODE_DRAINED
from slurm_hooks.mig.layouts import MigSettings, shown
from slurm_hooks.mig.planning import ChangeGate, new_change
from slurm_hooks.mig.sides import IncludeFile, NodeSide, SlurmSide, SlurmView, gres_of_nodes, with_node_gres
from slurm_hooks.mig.steps import (
    VERIFY_S,
    Action,
    MigState,
    NodeChange,
    Stage,
    Step,
    is_own_drain,
    next_step,
    parameters,
    unlike,
    with_new_gpus,
)
from slurm_hooks.nodes.engine import NodeEngine
from slurm_hooks.orders import Facts, node_facts

POLL_S = 0.5
RUN_S = 900
"""Seconds after which a run stops waiting; the next run goes on."""
MOST_FAULT = 200
MOST_LOOKS = 5
"""Looks at a node that changes all the time, until its failed change is left to the next run."""
WAITS = ("register", "settle", "verify", "resume")
"""Stages that wait for Slurm, for a limited time."""
REGISTER_S = 20.0
"""Seconds until slurmd is restarted once more, if slurmctld has not heard of a dynamic node."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run for one node. what: "done", "undone", "failed", "left", "dropped", "draining", "under way",
    or "refused".
    """

    node: str
    what: str
    why: str = ""
    change: NodeChange | None = None


@dataclass
class MigRun:
    """Holds the lock's work. state: as on disk. wanted: GPU types that jobs ask for."""

    settings: MigSettings
    engine: NodeEngine[MigState]
    slurm: SlurmSide
    node_side: NodeSide
    include: IncludeFile
    sleep: Callable[[float], None]
    wanted: Collection[str] = ()
    state: MigState = field(default_factory=MigState)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def load(self) -> None:
        """Read what earlier runs left; the wait for Slurm begins again. Raises StoreError."""
        found, now_s = self.engine.folder.load(self.engine.cluster), self.engine.now_s()
        changes = {
            name: replace(each, stage_s=now_s) if each.stage in WAITS else each for name, each in found.changes.items()
        }
        self.state = replace(found, changes=changes)

    def observe(self, changes: Sequence[LayoutChange], what: str) -> None:
        """Record what would be done. Raises StoreError."""
        self.engine.record([
            self.engine.row(what, [each.node], f"{shown(each.old)} -> {shown(each.new)}: {each.reason}", "observe")
            for each in changes
        ])  # fmt: skip

    def begin(self, changes: Sequence[LayoutChange], is_patient: bool = False) -> None:
        """Take up the changes that are allowed now; nothing is ordered yet. Raises CommandError, StoreError.

        is_patient: of busy nodes, which are drained now and changed when their last job has ended.
        """
        if failed := sorted(name for name, each in self.state.changes.items() if each.fault):
            why = f"{failed[0]} failed and is still drained; no other node is changed before it is repaired"
            self._refuse(changes, why)
            return
        view = self._view()
        for each in changes:
            if not is_patient and self._is_one_under_change():
                self._refuse([each], "another node is under change")
            elif why := self._gate(view).why_not(each, self.node_side, self.include, is_patient):
                self._refuse([each], why)
            else:
                self._put(new_change(each, self._gate(view), is_patient))

    def give_back(self, nodes: Collection[str], why: str) -> None:
        """Undo the drain of nodes that still wait for their jobs; `drive` resumes them. Raises StoreError."""
        for name in nodes:
            change = self.state.changes.get(name)
            if change is not None and change.waits_for_jobs and change.stage == "wait":
                self.outcomes.pop(name, None)
                self._undo(change, why)

    def drive(self) -> None:
        """Go on with every change until none can go on, or RUN_S is over. Raises CommandError, StoreError."""
        clock = self.engine.clock
        until_s, answered_s = clock() + RUN_S, clock()
        while self._active() and clock() < until_s:
            try:
                moved = [self._advance(node) for node in list(self._active())]
                answered_s = clock()
            except CommandError:
                # slurmctld restarts. What was ordered is on disk, and is looked at again.
                if clock() - answered_s > VERIFY_S:
                    raise
                moved = []
            if not any(moved) and self._active():
                self.sleep(POLL_S)
        for node, each in self.state.changes.items():
            what = "failed" if each.fault else "under way"
            self.outcomes.setdefault(node, Outcome(node, what, each.fault or f"at stage {each.stage}", each))

    def take_again(self, node: str, to_old: bool) -> None:
        """Go on with a failed change, or back to the old layout; `drive` does it. Raises AlmanacError."""
        change = self.state.changes.get(node)
        if change is None or not change.fault:
            raise CommandError(f"{node} has no failed change", "see `almanac mig status`")
        if to_old:
            change = replace(change, old=change.new, new=change.old, old_gpus=change.new_gpus, new_gpus=change.old_gpus)
        now_s = self.engine.now_s()
        is_gone = bool(change.dynamic_gres) and node not in self.slurm.view(now_s).nodes
        again = replace(change, fault="", is_undone=False, begun_s=now_s)
        self._put(again.at("apply" if is_gone else "drain", now_s))

    def _active(self) -> list[str]:
        """Nodes to go on with. A failed one is looked at once, for an operator may have resumed it; a busy one, too."""
        return [
            name
            for name, each in self.state.changes.items()
            if not ((each.fault or each.waits_for_jobs) and name in self.outcomes)
        ]

    def _is_one_under_change(self, other_than: str = "") -> bool:
        """Return True if a node does more than wait for its jobs."""
        return any(name != other_than and not each.waits_for_jobs for name, each in self.state.changes.items())

    def _advance(self, node: str) -> bool:
        """One step of a node. Returns whether anything was done."""
        view = self._view()
        change = self.state.changes[node]
        step = next_step(change, view.sight(node, self._refusal(change, view)), self.engine.now_s())
        if (
            step.action is Action.APPLY
            and change.waits_for_jobs
            and (self._is_one_under_change(node) or any(each.fault for each in self.state.changes.values()))
        ):
            step = Step(Action.WAIT, "another node is under change, or failed")
        return self._act(change, step, view)

    def _refusal(self, change: NodeChange, view: SlurmView) -> str:
        """Return the reason not to begin the change now, or to let a busy node wait no longer; "" without one."""
        node, gate = view.nodes.get(change.node), self._gate(view, change.node)
        if node is None:
            return ""
        if change.is_patient and node.states & NODE_DRAINED:
            return gate.lost_types(node)
        return gate.refusal(node, may_be_busy=change.is_patient)

    def _act(self, change: NodeChange, step: Step, view: SlurmView) -> bool:
        if step.action is Action.WAIT:
            return self._wait(change, step.why)
        if step.action is Action.KEEP:
            self.outcomes[change.node] = Outcome(change.node, "failed", step.why, change)
            return True
        if step.action in (Action.DONE, Action.DROP, Action.LEAVE):
            self._end(change, step)
            return True
        if step.action is Action.FAIL:
            self._fail(change, step.why)
            return True
        if step.action is Action.UNDO:
            self._undo(change, step.why)
            return True
        return self._order(change, step.action, view)

    def _undo(self, change: NodeChange, why: str) -> None:
        self._log("undo", change.node, why)
        self._put(replace(change, is_undone=True).at("verify", self.engine.now_s()))

    def _wait(self, change: NodeChange, why: str) -> bool:
        """The wait for jobs is counted from the drain on. A busy node is left to the next run."""
        if change.stage == "drain":
            self._put(change.at("wait", self.engine.now_s()))
            return True
        if change.waits_for_jobs:
            self.outcomes[change.node] = Outcome(change.node, "draining", why, change)
        return False

    def _order(self, change: NodeChange, action: Action, view: SlurmView) -> bool:
        """Give an order. Returns False where Slurm refused one that the next step repeats."""
        orders: dict[Action, Callable[[NodeChange, SlurmView], bool | None]] = {
            Action.DRAIN: self._drain,
            Action.APPLY: self._apply,
            Action.WRITE_GRES: self._prepare if change.dynamic_gres else self._write_gres,
            Action.RECONFIGURE: self._reconfigure,
            Action.DELETE: self._delete,
            Action.REGISTER: self._register,
            Action.MARK: self._mark,
            Action.SETTLE: self._settle,
            Action.VERIFY: self._verify,
        }
        return orders[action](change, view) is not False

    def _is_allowed(self, change: NodeChange, view: SlurmView, what: str, why: str, stage: Stage | None = None) -> bool:
        """Record an order and the stage that it begins, and look again. False: the node changed since the view.

        Send no order then: the next step looks again. A node that the view lacks must still be gone: one that came back
        may have jobs.
        """
        self._log(what, change.node, why)
        if stage:
            self._put(change.at(stage, self.engine.now_s()))
        return self._is_as_in(view, change.node)

    def _is_as_in(self, view: SlurmView, node: str, others: Collection[str] = ()) -> bool:
        """Look at a node once more. others: nodes that must have the same Gres."""
        relied_on: dict[str, Facts | None] = {n: {"gres": view.nodes[n].gres} for n in others if n in view.nodes}
        relied_on[node] = node_facts(view.nodes[node]) if node in view.nodes else None
        return self.engine.is_unchanged(relied_on)

    @contextlib.contextmanager
    def _failing(self, change: NodeChange, what: str) -> Iterator[None]:
        """The change has failed if an order in here does."""
        try:
            yield
        except AlmanacError as error:
            self._fail(self.state.changes[change.node], f"{what}: {error}")

    def _drain(self, change: NodeChange, view: SlurmView) -> None:
        if not self._is_allowed(change, view, "drain", change.reason, "drain"):
            return
        if said := self._tell("drain", change.node, change.reason):
            self._end(change, Step(Action.DROP, f"Slurm refused the drain: {'; '.join(said)}"))
        else:
            self._put(change.at("wait", self.engine.now_s()))  # who resumes the node from now on means it

    def _apply(self, change: NodeChange, view: SlurmView) -> None:
        node, model = change.node, self.settings.names[change.node].model
        self.state = replace(self.state, changed_s={**self.state.changed_s, node: self.engine.now_s()})
        if self._is_allowed(change, view, "apply", f"{shown(change.new)} through mig-parted", "apply"):
            with self._failing(change, "apply"):
                self.node_side.apply(node, model, change.new)
                self.node_side.require(node, model, change.new)  # Slurm must not hear of a layout that is not there
                self._put(change.at("gres", self.engine.now_s()))

    def _prepare(self, change: NodeChange, view: SlurmView) -> None:
        """From here on a dynamic node's slurmd registers drained, however it is restarted."""
        with self._failing(change, "registration"):
            if self._is_allowed(change, view, "write gres", f"slurmd --conf: {parameters(change)}"):
                self.node_side.write_gres(change.node)
                self.node_side.register(change.node, parameters(change))
                self._put(change.at("register", self.engine.now_s()))

    def _delete(self, change: NodeChange, view: SlurmView) -> bool:
        why = f"a dynamic node, to register again with {with_new_gpus(change)}"
        return not self._is_allowed(change, view, "delete", why) or not self.slurm.delete(change.node)

    def _register(self, change: NodeChange, view: SlurmView) -> None:
        if not self._is_allowed(change, view, "register", parameters(change)):
            return
        with self._failing(change, "registration"):
            self.node_side.register(change.node, parameters(change))
            until_s = self.engine.clock() + REGISTER_S
            while change.node not in self._view().nodes and self.engine.clock() < until_s:
                self.sleep(POLL_S)

    def _mark(self, change: NodeChange, view: SlurmView) -> bool:
        is_allowed = self._is_allowed(change, view, "drain", f"again: {change.reason}", "settle")
        return not is_allowed or not self._tell("drain", change.node, change.reason)

    def _settle(self, change: NodeChange, view: SlurmView) -> None:
        if self._is_allowed(change, view, "settle", f"slurmd --conf: {parameters(change, is_drained=False)}"):
            with self._failing(change, "registration"):
                self.node_side.register(change.node, parameters(change, is_drained=False))
                self._put(change.at("verify", self.engine.now_s()))

    def _write_gres(self, change: NodeChange, view: SlurmView) -> None:
        with self._failing(change, "write of Gres"):
            text = self.include.read()
            self._require_no_other_change(gres_of_nodes(text), view)
            new = with_node_gres(text, change.node, change.new_gpus)
            self._log("write gres", change.node, f"{self.include.path}: {gres_of_nodes(new)[change.node]}")
            if new != text:
                self.include.write(new)
            self.node_side.distribute(change.node)
            self.node_side.write_gres(change.node)
            self._put(change.at("reconfigure", self.engine.now_s()))

    def _require_no_other_change(self, written: dict[str, str], view: SlurmView) -> None:
        """A reconfigure with another Gres of a busy node would end its jobs. Raises CommandError."""
        for name, gres in written.items():
            node = view.nodes.get(name)
            own = self.state.changes.get(name)
            is_ours = own is not None and own.stage not in ("drain", "wait")
            if node and not is_ours and gpu_types(gres) != gpu_types(node.gres):
                raise CommandError(
                    f"{name} has Gres={gres} in {self.include.path}, and Slurm has {node.gres}: "
                    "a reconfigure would change it, too",
                    "correct that line first",
                )

    def _reconfigure(self, change: NodeChange, view: SlurmView) -> None:
        self._log("reconfigure", change.node, "Slurm reads the new Gres")
        with self._failing(change, "reconfigure"):
            written = gres_of_nodes(self.include.read())
            self._require_no_other_change(written, view)
            if self._is_as_in(view, change.node, written.keys()):
                self.slurm.reconfigure(self.node_side)
                self._put(change.at("verify", self.engine.now_s()))

    def _verify(self, change: NodeChange, _: SlurmView) -> bool:
        """Ask the node itself, look at Slurm once more, and only then resume."""
        node = change.node
        self._log("verify", node, f"{shown(change.goal)} on the node")
        with self._failing(change, "assert"):
            self.node_side.require(node, self.settings.names[node].model, change.goal)
        if self.state.changes[node].fault:
            return True
        view = self._view()
        seen = view.sight(node)
        if seen is None or not seen.reason.startswith(change.reason) or unlike(change, seen):
            return True  # the next step says what is wrong
        if change.stage != "resume":
            change = change.at("resume", self.engine.now_s())
        self._log("resume", node, "verified")
        self._put(change)
        return not self._is_as_in(view, node) or not self._tell("resume", node)

    def _fail(self, change: NodeChange, why: str) -> None:
        failed = replace(change, fault=printable(why, MOST_FAULT))
        self._log("fail", change.node, printable(why, 500))
        self._put(failed)
        for _ in range(MOST_LOOKS):
            view = self._view()
            seen = view.sight(change.node)
            came_back_open = seen is not None and not seen.is_drained and change.stage in ("register", "settle")
            if not seen or not (is_own_drain(change, seen) or came_back_open):
                break
            if self._is_as_in(view, change.node):
                self._tell("drain", change.node, failed.failed_reason)
                break
            self._log("fail", change.node, printable(why, 500))
        self.outcomes[change.node] = Outcome(change.node, "failed", printable(why, 500), failed)

    def _end(self, change: NodeChange, step: Step) -> None:
        words = {Action.DONE: "undone" if change.is_undone else "done", Action.DROP: "dropped", Action.LEAVE: "left"}
        self._log(words[step.action], change.node, step.why or shown(change.goal))
        self.state = self.state.without(change.node)
        self.engine.folder.save(self.state)
        self.outcomes[change.node] = Outcome(change.node, words[step.action], step.why, change)

    def _refuse(self, changes: Sequence[LayoutChange], why: str) -> None:
        for each in changes:
            self.outcomes.setdefault(each.node, Outcome(each.node, "refused", why))

    def _gate(self, view: SlurmView, own: str = "") -> ChangeGate:
        """own: the node whose own change does not stand in its way."""
        return ChangeGate(self.settings, view, self.state.without(own), self.wanted, self.engine.now_s())

    def _view(self) -> SlurmView:
        return self.slurm.view(self.engine.now_s())

    def _put(self, change: NodeChange) -> None:
        self.state = self.state.with_change(change)
        self.engine.folder.save(self.state)

    def _tell(self, state: NodeState, node: str, reason: str = "") -> list[str]:
        """Tell Slurm. Returns what it said against it."""
        return self.engine.backend.set_node_state([node], state, reason)

    def _log(self, what: str, node: str, why: str) -> None:
        self.engine.record([self.engine.row(what, [node], why)])
