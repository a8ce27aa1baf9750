"""One run: take up the changes under way, begin those of the plan, and go on until each node is resumed or given up.

Before each order: a line of the log, then the state on disk, then the order. A run that is killed is taken up there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from advisor.decisions.mig_layout import LayoutChange
from almanac import __version__
from almanac.actions_config import MigMode
from almanac.errors import AlmanacError, CommandError
from almanac.units import printable
from slurm_hooks.last_look import Facts, must_still_hold, node_facts
from slurm_hooks.mig.dynamic import NO_COMMAND, parameters, with_new_gpus
from slurm_hooks.mig.folder import MigFolder, MigState
from slurm_hooks.mig.gate import Surroundings, lost_types_text, refusal
from slurm_hooks.mig.include import IncludeFile, gres_of_nodes, with_node_gres
from slurm_hooks.mig.layouts import check_layout, gpu_types, shown
from slurm_hooks.mig.node_side import NodeSide
from slurm_hooks.mig.settings import MigSettings
from slurm_hooks.mig.slurm_side import DYNAMIC, SlurmSide, SlurmView
from slurm_hooks.mig.steps import Action, NodeChange, Step, StepLimits, is_own_drain, next_step, unlike

POLL_S = 0.5
RUN_S = 900
"""Seconds after which a run stops waiting; the next run goes on."""
JOB_WAIT_S = 300
"""Seconds to wait for a job that reached the node before the drain; then the node is resumed."""
VERIFY_S = 180
"""Seconds until Slurm must show the new layout: slurmd restarts and registers within one."""
MOST_FAULT = 200
MOST_LOOKS = 5
"""Looks at a node that changes all the time, until its failed change is left to the next run."""
WAITS = ("register", "settle", "verify", "resume")
"""Stages that wait for Slurm, for a limited time."""
REGISTER_S = 20.0
"""Seconds until slurmd is restarted once more, if slurmctld has not heard of a dynamic node."""


@dataclass(frozen=True)
class Outcome:
    """What became of a node in a run. what: "done", "undone", "failed", "left", "dropped", "draining", "under way",
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
    folder: MigFolder
    slurm: SlurmSide
    node_side: NodeSide
    include: IncludeFile
    cluster: str
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    wanted: Collection[str] = ()
    state: MigState = field(default_factory=MigState)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def load(self) -> None:
        """Read what earlier runs left; the wait for Slurm begins again. Raises StoreError."""
        found, now_s = self.folder.load(self.cluster), self._now_s()
        changes = {
            name: replace(each, stage_s=now_s) if each.stage in WAITS else each for name, each in found.changes.items()
        }
        self.state = replace(found, changes=changes)

    def observe(self, changes: Sequence[LayoutChange], what: str = "plan") -> None:
        """Write down what would be done. Raises StoreError."""
        rows = [self._row(what, each.node, f"{shown(each.old)} -> {shown(each.new)}: {each.reason}", "observe")
                for each in changes]  # fmt: skip
        self.folder.log.append(rows, self._now_s())

    def begin(self, changes: Sequence[LayoutChange], is_patient: bool = False) -> None:
        """Take up the changes that are allowed now; nothing is ordered yet. Raises CommandError, StoreError.

        is_patient: of busy nodes, which are drained now and changed when their last job has ended.
        """
        if failed := sorted(name for name, each in self.state.changes.items() if each.fault):
            why = f"{failed[0]} failed and is still drained; no other node is changed before it is repaired"
            self._refuse(changes, why)
            return
        view = self.slurm.view(self._now_s())
        for each in changes:
            if not is_patient and self._is_one_under_change():
                self._refuse([each], "another node is under change")
            elif why := self._why_not(each, view, is_patient):
                self._refuse([each], why)
            else:
                self._put(replace(self._new_change(each, view), is_patient=is_patient))

    def give_back(self, nodes: Collection[str], why: str) -> None:
        """Undo the drain of nodes that still wait for their jobs; `drive` resumes them. Raises StoreError."""
        for name in nodes:
            change = self.state.changes.get(name)
            if change is not None and change.waits_for_jobs and change.stage == "wait":
                self.outcomes.pop(name, None)
                self._undo(change, why)

    def drive(self) -> None:
        """Go on with every change until none can go on, or RUN_S is over. Raises CommandError, StoreError."""
        until_s, answered_s = self.clock() + RUN_S, self.clock()
        while self._active() and self.clock() < until_s:
            try:
                moved = [self._advance(node) for node in list(self._active())]
                answered_s = self.clock()
            except CommandError:
                # slurmctld restarts. What was ordered is on disk, and is looked at again.
                if self.clock() - answered_s > VERIFY_S:
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
        now_s = self._now_s()
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
        """Whether a node does more than to wait for its jobs."""
        return any(name != other_than and not each.waits_for_jobs for name, each in self.state.changes.items())

    def _advance(self, node: str) -> bool:
        """One step of a node. Returns whether anything was done."""
        view = self.slurm.view(self._now_s())
        change = self.state.changes[node]
        limits = StepLimits(JOB_WAIT_S, VERIFY_S)
        step = next_step(change, view.sight(node, self._refusal(change, view)), self._now_s(), limits)
        if step.action is Action.APPLY and change.waits_for_jobs and self._must_wait(node):
            step = Step(Action.WAIT, "another node is under change, or failed")
        return self._act(change, step, view)

    def _refusal(self, change: NodeChange, view: SlurmView) -> str:
        """Why the change must not begin now, or why a busy node need not wait any longer."""
        node, nodes, around = view.nodes.get(change.node), list(view.nodes.values()), self._around(view, change.node)
        if node is None:
            return ""
        if not change.is_patient:
            return refusal(node, nodes, around, self._now_s())
        if node.states & {"DRAIN", "DRAINING", "DRAINED"}:
            return lost_types_text(node, nodes, around)
        return refusal(node, nodes, around, self._now_s(), may_be_busy=True)

    def _must_wait(self, node: str) -> bool:
        has_failed = any(each.fault for each in self.state.changes.values())
        return has_failed or self._is_one_under_change(node)

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
        self._put(replace(change, is_undone=True).at("verify", self._now_s()))

    def _wait(self, change: NodeChange, why: str) -> bool:
        """The wait for jobs is counted from the drain on. A busy node is left to the next run."""
        if change.stage == "drain":
            self._put(change.at("wait", self._now_s()))
            return True
        if change.waits_for_jobs:
            self.outcomes[change.node] = Outcome(change.node, "draining", why, change)
        return False

    def _order(self, change: NodeChange, action: Action, view: SlurmView) -> bool:
        orders = {
            Action.DRAIN: lambda each: self._drain(each, view),
            Action.APPLY: lambda each: self._apply(each, view),
            Action.WRITE_GRES: lambda each: self._write_gres(each, view),
            Action.RECONFIGURE: lambda each: self._reconfigure(each, view),
            Action.DELETE: lambda each: self._delete(each, view),
            Action.REGISTER: lambda each: self._register(each, view),
            Action.MARK: lambda each: self._mark(each, view),
            Action.SETTLE: lambda each: self._settle(each, view),
            Action.VERIFY: self._verify,
        }
        return orders[action](change)

    def _is_changed(self, node: str, view: SlurmView, others: Collection[str] = ()) -> bool:
        """Return True if the node is not what it was in the view: send no order then. The next step looks again.

        A node that the view lacks must still be gone: one that came back may have jobs. others: nodes that must have
        the same Gres.
        """
        relied_on: dict[str, Facts] = {name: {"gres": view.nodes[name].gres} for name in others if name in view.nodes}
        if node in view.nodes:
            relied_on[node] = node_facts(view.nodes[node])
        changed = must_still_hold(relied_on, self.slurm.node_facts)
        if node not in view.nodes and node in self.slurm.node_facts([node]):
            changed[node] = "it came back meanwhile"
        for name, why in changed.items():
            self._log("dropped", node, why if name == node else f"{name}: {why}")
        return bool(changed)

    def _drain(self, change: NodeChange, view: SlurmView) -> bool:
        self._log("drain", change.node, change.reason)
        self._put(change.at("drain", self._now_s()))
        if self._is_changed(change.node, view):
            return True
        if said := self.slurm.drain(change.node, change.reason):
            self._end(change, Step(Action.DROP, f"Slurm refused the drain: {'; '.join(said)}"))
        else:
            self._put(change.at("wait", self._now_s()))  # who resumes the node from now on means it
        return True

    def _apply(self, change: NodeChange, view: SlurmView) -> bool:
        now_s = self._now_s()
        self._log("apply", change.node, f"{shown(change.new)} through mig-parted")
        self.state = replace(self.state, changed_s={**self.state.changed_s, change.node: now_s})
        self._put(change.at("apply", now_s))
        return self._is_changed(change.node, view) or self._try(change, "apply", lambda: self._apply_on_node(change))

    def _apply_on_node(self, change: NodeChange) -> None:
        model = self.settings.names[change.node].model
        self.node_side.apply(change.node, model, change.new)
        self.node_side.require(change.node, model, change.new)  # Slurm must not hear of a layout that is not there
        self._put(change.at("gres", self._now_s()))

    def _write_gres(self, change: NodeChange, view: SlurmView) -> bool:
        if change.dynamic_gres:
            return self._try(change, "registration", lambda: self._prepare(change, view))
        return self._try(change, "write of Gres", lambda: self._write_gres_now(change, view))

    def _prepare(self, change: NodeChange, view: SlurmView) -> None:
        """From here on a dynamic node's slurmd registers drained, however it is restarted."""
        self._log("write gres", change.node, f"slurmd --conf: {parameters(change)}")
        if self._is_changed(change.node, view):
            return
        self.node_side.write_gres(change.node)
        self.node_side.register(change.node, parameters(change))
        self._put(change.at("register", self._now_s()))

    def _delete(self, change: NodeChange, view: SlurmView) -> bool:
        self._log("delete", change.node, f"a dynamic node, to register again with {with_new_gpus(change)}")
        return self._is_changed(change.node, view) or not self.slurm.delete(change.node)

    def _register(self, change: NodeChange, view: SlurmView) -> bool:
        self._log("register", change.node, parameters(change))
        if self._is_changed(change.node, view):
            return True
        if self._try(change, "registration", lambda: self.node_side.register(change.node, parameters(change))):
            until_s = self.clock() + REGISTER_S
            while change.node not in self.slurm.view(self._now_s()).nodes and self.clock() < until_s:
                self.sleep(POLL_S)
        return True

    def _mark(self, change: NodeChange, view: SlurmView) -> bool:
        self._log("drain", change.node, f"again: {change.reason}")
        self._put(change.at("settle", self._now_s()))
        return self._is_changed(change.node, view) or not self.slurm.drain(change.node, change.reason)

    def _settle(self, change: NodeChange, view: SlurmView) -> bool:
        self._log("settle", change.node, f"slurmd --conf: {parameters(change, is_drained=False)}")
        return self._is_changed(change.node, view) or self._try(
            change, "registration", lambda: self._settle_now(change)
        )

    def _settle_now(self, change: NodeChange) -> None:
        self.node_side.register(change.node, parameters(change, is_drained=False))
        self._put(change.at("verify", self._now_s()))

    def _write_gres_now(self, change: NodeChange, view: SlurmView) -> None:
        text = self.include.read()
        self._require_no_other_change(gres_of_nodes(text), view)
        new = with_node_gres(text, change.node, change.new_gpus)
        self._log("write gres", change.node, f"{self.include.path}: {gres_of_nodes(new)[change.node]}")
        if new != text:
            self.include.write(new)
        self.node_side.distribute(change.node)
        self.node_side.write_gres(change.node)
        self._put(change.at("reconfigure", self._now_s()))

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

    def _reconfigure(self, change: NodeChange, view: SlurmView) -> bool:
        self._log("reconfigure", change.node, "Slurm reads the new Gres")
        return self._try(change, "reconfigure", lambda: self._reconfigure_now(change, view))

    def _reconfigure_now(self, change: NodeChange, view: SlurmView) -> None:
        written = gres_of_nodes(self.include.read())
        self._require_no_other_change(written, view)
        if self._is_changed(change.node, view, written.keys()):
            return
        self.slurm.reconfigure(self.node_side)
        self._put(change.at("verify", self._now_s()))

    def _verify(self, change: NodeChange) -> bool:
        """Ask the node itself, look at Slurm once more, and only then resume."""
        self._log("verify", change.node, f"{shown(change.goal)} on the node")
        model = self.settings.names[change.node].model
        if not self._try(change, "assert", lambda: self.node_side.require(change.node, model, change.goal)):
            return True
        view = self.slurm.view(self._now_s())
        seen = view.sight(change.node)
        if seen is None or not seen.reason.startswith(change.reason) or unlike(change, seen):
            return True  # the next step says what is wrong
        if change.stage != "resume":
            change = change.at("resume", self._now_s())
        self._log("resume", change.node, "verified")
        self._put(change)
        return self._is_changed(change.node, view) or not self.slurm.resume(change.node)

    def _try(self, change: NodeChange, what: str, order: Callable[[], None]) -> bool:
        """Whether an order succeeded; the change has failed where not."""
        try:
            order()
        except AlmanacError as error:
            self._fail(self.state.changes[change.node], f"{what}: {error}")
            return False
        return True

    def _fail(self, change: NodeChange, why: str) -> None:
        failed = replace(change, fault=printable(why, MOST_FAULT))
        self._log("fail", change.node, printable(why, 500))
        self._put(failed)
        for _ in range(MOST_LOOKS):
            view = self.slurm.view(self._now_s())
            seen = view.sight(change.node)
            came_back_open = seen is not None and not seen.is_drained and change.stage in ("register", "settle")
            if not seen or not (is_own_drain(change, seen) or came_back_open):
                break
            if not self._is_changed(change.node, view):
                self.slurm.drain(change.node, failed.failed_reason)
                break
            self._log("fail", change.node, printable(why, 500))
        self.outcomes[change.node] = Outcome(change.node, "failed", printable(why, 500), failed)

    def _end(self, change: NodeChange, step: Step) -> None:
        words = {Action.DONE: "undone" if change.is_undone else "done", Action.DROP: "dropped", Action.LEAVE: "left"}
        self._log(words[step.action], change.node, step.why or shown(change.goal))
        self.state = self.state.without(change.node)
        self.folder.save(self.state)
        self.outcomes[change.node] = Outcome(change.node, words[step.action], step.why, change)

    def _refuse(self, changes: Sequence[LayoutChange], why: str) -> None:
        for each in changes:
            self.outcomes.setdefault(each.node, Outcome(each.node, "refused", why))

    def _why_not(self, change: LayoutChange, view: SlurmView, is_patient: bool) -> str:
        node, names = view.nodes.get(change.node), self.settings.names.get(change.node)
        if node is None or names is None:
            return "Slurm does not list it" if names else "it is not in mig.nodes, or it is excluded"
        if why := refusal(node, list(view.nodes.values()), self._around(view), self._now_s(), is_patient):
            return why
        if why := check_layout(names.model, change.new):
            return why
        if names.types(change.old) != gpu_types(node.gres):
            return f"Slurm has Gres={node.gres}, and the plan begins at {shown(change.old)}"
        if change.new == change.old:
            return "the layout is the same"
        try:
            if self.node_side.export(change.node, names.model, node.gres) != change.old:
                return "the node itself has another layout than the plan begins at"
            if DYNAMIC in node.states:
                return "" if self.settings.config.register_command else NO_COMMAND
            with_node_gres(self.include.read(), change.node, names.types(change.new))
        except AlmanacError as error:
            return printable(f"{error}; {error.hint}", 300)
        return ""

    def _new_change(self, each: LayoutChange, view: SlurmView) -> NodeChange:
        names, now_s, node = self.settings.names[each.node], self._now_s(), view.nodes[each.node]
        return NodeChange(
            node=each.node,
            model=names.model.name,
            old=each.old,
            new=each.new,
            old_gpus=dict(names.types(each.old)),
            new_gpus=dict(names.types(each.new)),
            begun_s=now_s,
            stage_s=now_s,
            dynamic_gres=node.gres if DYNAMIC in node.states else "",
        )

    def _around(self, view: SlurmView, own: str = "") -> Surroundings:
        """own: the node whose own change does not stand in its way."""
        return Surroundings(
            managed=self.settings.names.keys(),
            busy=view.busy,
            reserved=view.reserved,
            under_change={name for name in self.state.changes if name != own},
            changed_s=self.state.changed_s,
            wanted=self.wanted,
        )

    def _put(self, change: NodeChange) -> None:
        self.state = self.state.with_change(change)
        self.folder.save(self.state)

    def _log(self, what: str, node: str, why: str) -> None:
        self.folder.log.append([self._row(what, node, why, "apply")], self._now_s())

    def _row(self, what: str, node: str, why: str, mode: MigMode) -> dict[str, object]:
        return {
            "time_s": self._now_s(), "cluster": self.cluster, "what": what, "node": node, "why": why, "mode": mode,
            "almanac": __version__,
        }  # fmt: skip

    def _now_s(self) -> int:
        return int(self.clock())
