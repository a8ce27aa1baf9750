"""Waking nodes because somebody says so: the way out of whatever almanac did, with as little as possible in the way.

It needs slurmctld only. No store, model, lock or state is asked, so that a broken one keeps no node asleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from almanac.config import Config
from almanac.errors import RequestError
from slurm_hooks.last_look import node_facts
from slurm_hooks.power.actuators import mark_facts, resume, set_exceptions, unchanged, wake
from slurm_hooks.power.nodes import DID_NOT_WAKE, REASON, RESUME_FAILED
from slurm_hooks.power.settings import KeptOn, joined, others, read_settings
from telemetry.slurm.backend import Node, SlurmBackend
from telemetry.slurm.hostlist import expand, fold
from telemetry.slurm.node_sets import members

_OFF = frozenset({"POWERED_DOWN", "POWERING_DOWN"})
_OTHERS = frozenset({"DRAIN", "DRAINED", "DRAINING", "DOWN", "FAIL"})
_GOING = "POWERING_DOWN"
SLACK_S = 20
"""slurmctld looks at nodes that power down every 10 s or so."""


@dataclass(frozen=True)
class Woken:
    """woken: told to power up. undrained: almanac's quarantine taken off. left: drained or down by others, or not known
    to Slurm. late: still powering down, so that Slurm drops the order. said: what Slurm said against it.
    """

    woken: tuple[str, ...]
    undrained: tuple[str, ...]
    left: tuple[str, ...]
    late: tuple[str, ...]
    said: tuple[str, ...]


def marked(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Nodes that carry almanac's reason, whatever the configuration says of them."""
    return tuple(node.name for node in nodes if node.reason.startswith((REASON, DID_NOT_WAKE)))


def names_to_wake(asked: str, config: Config, nodes: Sequence[Node]) -> tuple[str, ...]:
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
    said = resume(backend, unchanged(backend, first.undrained, nodes, node_facts))
    said += wake(
        backend,
        unchanged(backend, first.woken, nodes, lambda node: {} if node.name in first.undrained else mark_facts(node)),
    )
    late = first.late
    while late and clock() < until_s:
        sleep(2.0)
        nodes = {node.name: node for node in backend.nodes()}
        again = _sorted_out(nodes, late)
        said += wake(backend, unchanged(backend, again.woken, nodes, mark_facts))
        late = again.late
    woken = tuple(name for name in (*first.woken, *first.late) if name not in late)
    return Woken(woken, first.undrained, first.left, late, tuple(said))


def _sorted_out(nodes: Mapping[str, Node], names: Collection[str]) -> Woken:
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
        elif node.states & _OFF and "POWER_UP" not in node.states:
            woken.append(name)
    return Woken(tuple(woken), tuple(undrained), tuple(left), tuple(late), ())


def keep_on(backend: SlurmBackend, names: Collection[str]) -> list[str]:
    """Where Slurm powers idle nodes down itself: name these in SuspendExcNodes, so that they stay on. What it said."""
    settings = read_settings(backend)
    if settings.suspend_time_s is None or not names:
        return []
    wanted = joined((*others(settings.exceptions, names), KeptOn(fold(sorted(set(names))))))
    return set_exceptions(backend, joined(settings.exceptions), wanted)
