"""A slurmctld in memory for the power hook: nodes with Slurm's states, its timeouts, and its silent refusals.

It raises AssertionError for any order that would hurt: powering down a node that is not idle and free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from watched import Watched

from advisor.power.model import PowerDecision, Spent
from almanac.config import Config, NodeSet, Power
from almanac.errors import CommandError
from almanac.records import Counts
from slurm.backend import NodeState, Reservation
from slurm.commands import Settings, parse_settings
from slurm.hostlist import expand
from slurm.node_sets import LiveDemand
from slurm.nodes import SlurmNode
from slurm.queued_job import QueuedJob
from slurm_hooks.nodes.engine import NodeEngine, NodeFolder
from slurm_hooks.power.nodes import PowerState
from slurm_hooks.power.planning import PowerPlanner
from slurm_hooks.power.run import PowerRun, SetOutcome
from slurm_hooks.power.settings import parse_exceptions

START_S = 1_800_000_000
GOES_DOWN_S, BOOTS_S, RESUME_TIMEOUT_S = 30, 60, 300


WORDS = {
    "power_down_asap": ("power down", "power down again"), "power_up": ("wake", "wake again"),
    "drain": ("quarantine",), "resume": ("resume",),
}  # fmt: skip


@dataclass
class FakeSlurm(Watched):
    """names: its nodes. dead: never boot. cloud: of a cloud. is_away: slurmctld does not answer.

    Each call is a point to be killed at.
    """

    names: Sequence[str]
    now_s: int = START_S
    suspend_time_s: int = 31_536_000
    release: str = "22.05.8"
    exceptions: str = ""
    in_file: str = ""
    nodes_: dict[str, SlurmNode] = field(default_factory=dict)
    changed_s: dict[str, int] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    cloud: set[str] = field(default_factory=set)
    forgotten: set[str] = field(default_factory=set)
    reserved: list[Reservation] = field(default_factory=list)
    is_away: bool = False
    has_hold: bool = False
    has_accounting: bool = True
    orders: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    told_exceptions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.in_file = self.exceptions
        for name in self.names:
            self.nodes_[name] = SlurmNode(
                name, frozenset({"IDLE"}), ("gpu",), "gpu:a100:4", ("all",), last_busy_s=self.now_s - 86_400,
                boot_s=self.now_s - 10 * 86_400,
            )  # fmt: skip

    # What a test does.

    def put(self, name: str, *states: str, **values: Any) -> None:
        self.nodes_[name] = replace(self.nodes_[name], states=frozenset(states), **values)
        self.changed_s[name] = self.now_s

    def states(self, name: str) -> set[str]:
        return set(self.nodes_[name].states)

    def asleep(self) -> set[str]:
        off = {"POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN"}
        return {name for name, node in self.nodes_.items() if node.states & off and "POWER_UP" not in node.states}

    def pass_time(self, seconds: int) -> None:
        """Slurm's own clockwork, in steps of 10 s."""
        for _ in range(0, seconds, 10):
            self.now_s += 10
            for name in self.names:
                self._tick(name)
            self._suspend_by_count()

    def _tick(self, name: str) -> None:
        node, since_s = self.nodes_[name], self.now_s - self.changed_s.get(name, self.now_s)
        base = set(node.states) & {"IDLE", "MIXED", "ALLOCATED", "DOWN"}
        keeps = set(node.states) & {"DRAIN"}
        if "POWER_DOWN" in node.states and base <= {"IDLE", "DOWN"}:
            self.put(name, *base, "POWERING_DOWN")
        elif "POWERING_DOWN" in node.states and since_s >= GOES_DOWN_S:
            self.put(name, *base, "POWERED_DOWN", last_busy_s=None)
        elif "POWER_UP" in node.states:
            self.put(
                name, *(base - {"DOWN"}), *keeps, "POWERING_UP", "NOT_RESPONDING", reason=node.reason * bool(keeps)
            )
            if "DOWN" in base:
                self.put(name, "IDLE", *keeps, "POWERING_UP", "NOT_RESPONDING", reason="")
        elif "POWERING_UP" in node.states and name not in self.dead and since_s >= BOOTS_S:
            self.put(name, *base, *keeps, last_busy_s=self.now_s, boot_s=self.now_s)
        elif "POWERING_UP" in node.states and since_s >= RESUME_TIMEOUT_S:
            cloud = ("CLOUD",) if name in self.cloud else ()
            self.put(name, "DOWN", *cloud, *keeps, "POWERED_DOWN", "NOT_RESPONDING", reason="ResumeTimeout reached")

    def _suspend_by_count(self) -> None:
        """Idle nodes beyond the counts power down after SuspendTime, as from 24.11 on."""
        if self.suspend_time_s > 30 * 86_400:
            return
        free = {
            name: node for name, node in self.nodes_.items()
            if node.states == {"IDLE"} and node.last_busy_s and self.now_s - node.last_busy_s >= self.suspend_time_s
        }  # fmt: skip
        off = {"POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN"}
        for entry in parse_exceptions(self.exceptions):
            hosts = set(expand(entry.hosts))
            if entry.count is None:
                free = {name: node for name, node in free.items() if name not in hosts}
                continue
            up = sum(not self.nodes_[name].states & off for name in hosts)
            spare = max(0, up - entry.count)
            for name in sorted(hosts & set(free))[spare:]:
                del free[name]
        for name in free:
            self.put(name, "IDLE", "POWERING_DOWN")

    def forget(self) -> None:
        """slurmctld 22.05 restarts: a node that was powering down is off, and believed to be up."""
        for name, node in self.nodes_.items():
            if "POWERING_DOWN" in node.states:
                self.put(name, "DOWN", "NOT_RESPONDING", reason="Not responding")
                self.forgotten.add(name)

    def reconfigure(self) -> None:
        self.exceptions = self.in_file

    # What a backend does.

    def _call(self) -> None:
        if self.is_away:
            raise CommandError("Unable to contact slurm controller", "check that slurmctld answers")
        self.point()

    def cluster(self) -> str:
        return "lab"

    def _look(self) -> None:
        self._call()
        self.look()

    def settings(self) -> Settings:
        self._look()
        return parse_settings(
            f"SLURM_VERSION = {self.release}\nSuspendTime = {self.suspend_time_s} sec\nSuspendTimeout = 30 sec\n"
            f"ResumeTimeout = {RESUME_TIMEOUT_S} sec\nSuspendProgram = /x\nResumeProgram = /y\n"
            f"SuspendExcNodes = {self.exceptions or '(null)'}\nSuspendExcParts = (null)\n"
        )

    def nodes(self, names: Collection[str] = ()) -> list[SlurmNode]:
        self._look()
        return [self.nodes_[name] for name in sorted(self.nodes_)]

    def pending(self, counts: Counts, job_ids: Collection[int] = ()) -> list[QueuedJob]:
        self._look()
        return []

    def reservations(self) -> list[Reservation]:
        self._look()
        return list(self.reserved)

    def require_accounting(self) -> None:
        if not self.has_accounting:
            raise CommandError("sacctmgr ended with 1", "check slurmdbd")

    def suspend_exceptions(self) -> str:
        self._look()
        return self.exceptions

    def set_suspend_exceptions(self, value: str) -> list[str]:
        self._call()
        self.exceptions = value
        self.told_exceptions.append(value)
        return []

    def set_node_state(self, names: Sequence[str], state: NodeState, reason: str = "") -> list[str]:
        self._call()
        self.ordered(names, *WORDS[state])
        self.orders.append((state, tuple(names)))
        for name in names:
            self._order(name, state, reason)
        return []

    def _order(self, name: str, state: str, reason: str) -> None:
        node = self.nodes_[name]
        states = set(node.states)
        if state == "power_down_asap":
            is_lost = states - {"DRAIN"} == {"DOWN", "NOT_RESPONDING"} and name in self.forgotten
            assert states == {"IDLE"} or is_lost, f"{name} is {sorted(states)}: it must not be powered down"
            assert not node.reservation
            self.forgotten.discard(name)
            self.put(name, *(states & {"IDLE", "DOWN"}), "DRAIN", "POWER_DOWN", reason=reason)
        elif state == "power_up" and "POWERED_DOWN" in states:
            self.put(name, *states, "POWER_UP")
        elif state == "drain":
            self.put(name, *states, "DRAIN", reason=reason)
        elif state == "resume":
            assert not states & {"POWER_DOWN"}, "22.05 would give the node to a job and power it down all the same"
            self.put(name, *((states - {"DRAIN", "DOWN"}) | {"IDLE"}), reason="")


@dataclass
class Wanted:
    """A DemandSource that says what the test says. target: None holds."""

    target: int | None = None
    noted: list[LiveDemand] = field(default_factory=list)
    seen: list[tuple[int, Spent]] = field(default_factory=list)
    forecast: dict[tuple[int, float], float] = field(default_factory=dict)

    def run_times_s(self, pending: Sequence[QueuedJob], now_s: int) -> Mapping[int, float]:
        return {job.job_id: 3600.0 for job in pending}

    def note(self, node_set: NodeSet, demand: LiveDemand, now_s: int) -> None:
        self.noted.append(demand)

    def decide(self, node_set: NodeSet, names: Sequence[str], powered: int, spent: Spent, now_s: int) -> PowerDecision:
        self.seen.append((powered, spent))
        return PowerDecision(self.target, "the test says so", self.forecast)


@dataclass
class PowerSite:
    """Power control of a Slurm in memory: one run after another, as the timer makes them."""

    slurm: FakeSlurm
    root: Path
    source: Wanted = field(default_factory=Wanted)
    config: Config = field(
        default_factory=lambda: Config(power=Power(mode="apply"), node_sets=(NodeSet(name="gpu", nodes="n[1-8]"),))
    )

    def __post_init__(self) -> None:
        self.folder = NodeFolder(self.root, PowerState)
        self.slurm.record = self.folder.log

    @property
    def planner(self) -> PowerPlanner:
        engine = NodeEngine(self.folder, self.slurm, "lab", lambda: self.slurm.now_s)  # type: ignore[arg-type]
        return PowerPlanner(engine, self.config, self.source)

    def run(self, target: int | None = None) -> SetOutcome:
        self.source.target = target
        with self.folder.lock():
            [outcome] = PowerRun(self.planner).apply(self.planner.plan())
        return outcome

    def power(self, **values: Any) -> None:
        self.config = replace(self.config, power=replace(self.config.power, **values))
