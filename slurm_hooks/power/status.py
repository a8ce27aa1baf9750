"""How the nodes stand now: for people, and for metrics."""

from __future__ import annotations

from dataclasses import dataclass

from almanac.actions_config import PowerMode
from almanac.config import Config
from almanac.records import Counts
from slurm_hooks.power.folder import PowerFolder
from slurm_hooks.power.nodes import DID_NOT_WAKE, Surroundings, is_ours
from telemetry.slurm.backend import SlurmBackend
from telemetry.slurm.node_sets import LiveDemand, is_asleep, live_demand, members


@dataclass(frozen=True)
class SetStatus:
    """Of a node set. asleep: powered down by almanac; asleep_by_others: not. did_not_wake: quarantined, with Slurm's
    reason. cycles: power-downs of the last day. wakes: wake-ups of the last day.
    """

    node_set: str
    demand: LiveDemand
    asleep: tuple[str, ...]
    asleep_by_others: tuple[str, ...]
    did_not_wake: tuple[tuple[str, str], ...]
    cycles: int
    wakes: int
    target: int | None


@dataclass(frozen=True)
class Status:
    """hold: why nothing powers down, or "". fault: what is wrong with the state file. run_s: last run, or 0."""

    mode: PowerMode
    hold: str
    fault: str
    run_s: int
    sets: tuple[SetStatus, ...]


def status_of(backend: SlurmBackend, config: Config, folder: PowerFolder, cluster: str, now_s: int) -> Status:
    """Raises CommandError where slurmctld does not answer."""
    memory, fault = folder.load_or_fault(cluster)
    nodes, pending = backend.nodes(), backend.pending(Counts())
    around = Surroundings(memory=memory.nodes, takes_any=memory.exceptions is not None)
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
                target=known.target,
            )
        )
    return Status(config.power.mode, folder.hold_reason(), fault, memory.run_s, tuple(sets))
