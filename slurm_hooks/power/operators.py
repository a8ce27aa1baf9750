"""Node power by hand: how the nodes stand, and waking them.

Waking is the way out of whatever almanac did. It needs slurmctld only: no store, model, lock, or state is asked, so
that a broken one keeps no node asleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from almanac.actions_config import PowerMode
from almanac.config import Config
from almanac.errors import RequestError
from almanac.records import Counts
from slurm.backend import NodeState, SlurmBackend
from slurm.hostlist import expand, fold
from slurm.node_sets import LiveDemand, is_asleep, live_demand, members
from slurm.nodes import SlurmNode
from slurm.states import NODE_DOWN, NODE_DRAINED, NODE_OFF, NODE_RESERVED
from slurm_hooks.nodes.engine import NodeEngine
from slurm_hooks.orders import Facts, must_still_hold, node_facts
from slurm_hooks.power.failures import RESUME_FAILED
from slurm_hooks.power.nodes import DID_NOT_WAKE, REASON, PowerState, PowerSurroundings, is_ours
from slurm_hooks.power.settings import KeptOn, joined, others, read_settings, set_exceptions

_OTHERS = NODE_DRAINED | NODE_DOWN
_GOING = "POWERING_DOWN"
SLACK_S = 20
"""slurmctld looks at nodes that power down every 10 s or so."""


def mark_facts(node: SlurmNode) -> Facts:
    """An operator's marks on a node. Its sleep is left out: waking it does no harm."""
    is_marked = bool(node.states & (_OTHERS | NODE_RESERVED))
    return {"is_marked": is_marked, "reason": node.reason, "reservation": node.reservation}


@dataclass(frozen=True)
class Woken:
    """Outcome of an order to wake nodes.

    woken: nodes ordered to power up. undrained: nodes whose quarantine by almanac was lifted. left: nodes drained or
    down by others, or not known to Slurm. late: nodes still powering down, so that Slurm drops the order. said: Slurm's
    errors.
    """

    woken: tuple[str, ...]
    undrained: tuple[str, ...]
    left: tuple[str, ...]
    late: tuple[str, ...]
    said: tuple[str, ...]


def marked(nodes: Sequence[SlurmNode]) -> tuple[str, ...]:
    """Nodes that carry almanac's reason, whatever the configuration says about them."""
    return tuple(node.name for node in nodes if node.reason.startswith((REASON, DID_NOT_WAKE)))


def names_to_wake(asked: str, config: Config, nodes: Sequence[SlurmNode]) -> tuple[str, ...]:
    """The nodes of ALL, of a node set's name, or of a host list. Raises RequestError."""
    by_name = {each.name: each for each in config.node_sets}
    if asked == "ALL":
        own = [name for each in config.node_sets for name in members(each, nodes)]
        return tuple(dict.fromkeys((*own, *marked(nodes))))
    if asked in by_name:
        return members(by_name[asked], nodes)
    try:
        return expand(asked)
    except ValueError as error:
        raise RequestError(str(error), "give ALL, a node set, or a host list such as gpu[001-004]") from error


def wake_now(
    backend: SlurmBackend,
    names: Collection[str],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Woken:
    """Power nodes up and take off almanac's quarantine. Raises CommandError where slurmctld does not answer.

    Waits for nodes that are still powering down, for at most SuspendTimeout and SLACK_S.
    """
    settings = read_settings(backend)
    until_s = clock() + settings.suspend_timeout_s + SLACK_S
    nodes = {node.name: node for node in backend.nodes()}
    first = _sorted_out(nodes, names)
    said = _order(backend, "resume", first.undrained, nodes, node_facts)
    said += _order(
        backend, "power_up", first.woken, nodes, lambda node: {} if node.name in first.undrained else mark_facts(node)
    )
    late = first.late
    while late and clock() < until_s:
        sleep(2.0)
        nodes = {node.name: node for node in backend.nodes()}
        again = _sorted_out(nodes, late)
        said += _order(backend, "power_up", again.woken, nodes, mark_facts)
        late = again.late
    woken = tuple(name for name in (*first.woken, *first.late) if name not in late)
    return Woken(woken, first.undrained, first.left, late, tuple(said))


def _order(
    backend: SlurmBackend,
    state: NodeState,
    names: Sequence[str],
    before: Mapping[str, SlurmNode],
    facts_of: Callable[[SlurmNode], Facts],
) -> list[str]:
    """Tell Slurm of the nodes that are still as before. Returns what it said against it."""
    relied_on = {name: facts_of(before[name]) for name in names}
    changed = must_still_hold(relied_on, lambda asked: {each.name: facts_of(each) for each in backend.nodes(asked)})
    kept = [name for name in names if name not in changed]
    return backend.set_node_state(kept, state) if kept else []


def _sorted_out(nodes: Mapping[str, SlurmNode], names: Collection[str]) -> Woken:
    woken, undrained, left, late = [], [], [], []
    for name in names:
        node = nodes.get(name)
        if node is None:
            left.append(name)
            continue
        is_given_up = node.reason.startswith((DID_NOT_WAKE, RESUME_FAILED, REASON))
        if node.states & _OTHERS and "POWER_DOWN" not in node.states and not is_given_up:
            left.append(name)
            continue
        if node.reason.startswith(DID_NOT_WAKE) and node.states & _OTHERS:
            undrained.append(name)
        if _GOING in node.states or "POWER_DOWN" in node.states:
            late.append(name)
        elif node.states & NODE_OFF and "POWER_UP" not in node.states:
            woken.append(name)
    return Woken(tuple(woken), tuple(undrained), tuple(left), tuple(late), ())


def keep_on(backend: SlurmBackend, names: Collection[str]) -> list[str]:
    """Name nodes in SuspendExcNodes if Slurm powers idle ones down itself: they stay on. Returns its objections."""
    settings = read_settings(backend)
    if settings.suspend_time_s is None or not names:
        return []
    wanted = joined((*others(settings.exceptions, names), KeptOn(fold(sorted(set(names))))))
    return set_exceptions(backend, joined(settings.exceptions), wanted)


@dataclass(frozen=True)
class SetStatus:
    """Power status of a node set.

    asleep: powered down by almanac. asleep_by_others: powered down, but not by almanac. did_not_wake: quarantined, with
    Slurm's reason. cycles: power-downs of the last day. wakes: wake-ups of the last day. boots: nodes
    that these woke.
    """

    node_set: str
    demand: LiveDemand
    asleep: tuple[str, ...]
    asleep_by_others: tuple[str, ...]
    did_not_wake: tuple[tuple[str, str], ...]
    cycles: int
    wakes: int
    boots: int
    target: int | None


@dataclass(frozen=True)
class Status:
    """State of node power. hold: why nothing powers down, or "". fault: of the state file. run_s: last run, or 0."""

    mode: PowerMode
    hold: str
    fault: str
    run_s: int
    sets: tuple[SetStatus, ...]


def status_of(engine: NodeEngine[PowerState], config: Config) -> Status:
    """Return the state of node power, from Slurm and the state file. Raises CommandError if Slurm does not answer."""
    memory, fault = engine.folder.load_or_fault(engine.cluster)
    nodes, pending, now_s = engine.backend.nodes(), engine.backend.pending(Counts()), engine.now_s()
    around = PowerSurroundings(memory=memory.nodes, takes_any=memory.exceptions is not None)
    sets = []
    for node_set in config.node_sets:
        names = frozenset(members(node_set, nodes))
        own = [node for node in nodes if node.name in names]
        asleep = [node for node in own if is_asleep(node)]
        known = memory.set_of(node_set.name)
        sets.append(
            SetStatus(
                node_set=node_set.name,
                demand=live_demand(names, nodes, pending),
                asleep=tuple(node.name for node in asleep if is_ours(node, around)),
                asleep_by_others=tuple(node.name for node in asleep if not is_ours(node, around)),
                did_not_wake=tuple((node.name, node.reason) for node in own if node.reason.startswith(DID_NOT_WAKE)),
                cycles=sum(memory.of(name).cycles(now_s) for name in names),
                wakes=sum(now_s - 86_400 < time_s for time_s in known.wakes_s),
                boots=sum(
                    nodes
                    for time_s, nodes in zip(known.wakes_s, known.all_boots(), strict=True)
                    if now_s - 86_400 < time_s
                ),
                target=known.target,
            )
        )
    return Status(config.power.mode, engine.folder.hold_reason(), fault, memory.run_s, tuple(sets))
