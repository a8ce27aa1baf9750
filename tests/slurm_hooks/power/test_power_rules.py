"""Rules that no state of Slurm, no kill and nobody else's command may break: hypothesis plays hours of a cluster.

The stand-in itself raises AssertionError where a node that is not idle and free is told to power down.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm, PowerSite
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from profiles import examples
from watched import KilledError

from advisor.power.decide import NodeFlag, NodePlan, PowerLimits
from almanac.config import Config, NodeSet, Power
from almanac.errors import CommandError
from slurm.backend import Reservation
from slurm.nodes import SlurmNode, nodes_of, parse_states
from slurm.states import is_in_service
from slurm_hooks.power.bmc_switch import why_not_on
from slurm_hooks.power.failures import failures_of
from slurm_hooks.power.nodes import (
    REASON,
    NodeState,
    PowerState,
    PowerSurroundings,
    flags_of,
    kept_on,
    power_nodes,
    select,
)
from slurm_hooks.power.run import PowerRun

NAMES = tuple(f"n{number}" for number in range(1, 7))
POWERED_OFF = {"POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN"}
CYCLES, WARM, COOLDOWN_S = 2, 1, 1200
DAY_S = 86_400
nodes_of_set = st.sampled_from(NAMES)


class PowerMachine(RuleBasedStateMachine):
    """A cluster with jobs, operators and faults; almanac runs in between, and is killed anywhere."""

    by_count = False

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.downs: list[tuple[int, str]] = []

    @initialize()
    def begin(self) -> None:
        more: dict[str, Any] = {"suspend_time_s": 600, "release": "26.05.5"} if self.by_count else {}
        power = Power(mode="apply", cooldown_s=COOLDOWN_S, cycles_per_day=CYCLES, nodes_per_run=3)
        config = Config(power=power, node_sets=(NodeSet(name="gpu", nodes="n[1-6]", warm_minimum=WARM),))
        self.slurm = FakeSlurm(NAMES, exceptions=NAMES[-1], **more)
        self.site = PowerSite(self.slurm, Path(self._folder.name) / "power", config=config)
        self.folder, self.source = self.site.folder, self.site.source

    def teardown(self) -> None:
        self._folder.cleanup()

    @rule(wanted=st.one_of(st.none(), st.integers(0, 8)), kill_at=st.one_of(st.none(), st.integers(0, 14)))
    def almanac_runs(self, wanted: int | None, kill_at: int | None) -> None:
        self.source.target = wanted
        before, told = len(self.slurm.orders), len(self.slurm.told_exceptions)
        idle = {name for name, node in self.slurm.nodes_.items() if node.states == {"IDLE"}}
        self.slurm.kill_after(kill_at)
        with contextlib.suppress(KilledError, CommandError), self.folder.lock():
            run = PowerRun(self.site.planner)
            run.note_demand()
            run.apply(run.planner.plan())
        self.slurm.kill_at = None
        assert all(each.queued_node_min is not None for each in self.source.noted), "run times are told of"
        downs = [name for what, names in self.slurm.orders[before:] if what == "power_down_asap" for name in names]
        self.downs += [(self.slurm.now_s, name) for name in downs]
        assert NAMES[-1] not in downs, "excluded in slurm.conf"
        assert len(downs) <= 3, "rate limit"
        if downs:
            assert len(idle - set(downs)) >= WARM, "warm minimum"
            assert wanted is not None
            assert not self.slurm.has_hold
        if self.slurm.has_hold or wanted is None or not self.slurm.has_accounting:
            assert not downs, "hold means hold"
            for each in self.slurm.told_exceptions[told:]:
                assert self._spared(each) >= len(idle), "hold means hold"

    def _spared(self, exceptions: str) -> int:
        from slurm_hooks.power.settings import parse_exceptions

        found = parse_exceptions(exceptions)
        named = frozenset().union(*(each.nodes() for each in found if each.count is None))
        return len(named) + sum(each.count or 0 for each in found)

    @rule(seconds=st.sampled_from([60, 600, 3600, 6 * 3600]))
    def time_passes(self, seconds: int) -> None:
        self.slurm.pass_time(seconds)

    @rule(name=nodes_of_set)
    def a_job_starts(self, name: str) -> None:
        node = self.slurm.nodes_[name]
        if node.states == {"IDLE"}:
            self.slurm.put(name, "ALLOCATED")
        elif node.states == {"IDLE", "POWERED_DOWN"}:
            self.slurm.put(name, "ALLOCATED", "POWERING_UP", "NOT_RESPONDING", reason="")

    @rule(name=nodes_of_set)
    def a_job_ends(self, name: str) -> None:
        if self.slurm.states(name) == {"ALLOCATED"}:
            self.slurm.put(name, "IDLE", last_busy_s=self.slurm.now_s)

    @rule(name=nodes_of_set, flag=st.sampled_from(["DRAIN", "RESERVED", "PLANNED", "MAINTENANCE", "DOWN", "STRANGE"]))
    def somebody_else_acts(self, name: str, flag: str) -> None:
        states = self.slurm.states(name)
        self.slurm.put(name, *((states - {"IDLE"} if flag == "DOWN" else states) | {flag}), reason="bob")

    @rule(name=nodes_of_set)
    def and_undoes_it(self, name: str) -> None:
        if not self.slurm.states(name) & POWERED_OFF:
            self.slurm.put(name, "IDLE", reason="", last_busy_s=self.slurm.now_s)

    @rule(name=nodes_of_set)
    def an_operator_powers_down(self, name: str) -> None:
        if self.slurm.states(name) == {"IDLE"}:
            self.slurm.put(name, "IDLE", "POWERED_DOWN", reason="PSU, bob", last_busy_s=None)

    @rule(name=nodes_of_set, broken=st.booleans())
    def hardware(self, name: str, broken: bool) -> None:
        (self.slurm.dead.add if broken else self.slurm.dead.discard)(name)

    @rule(is_away=st.booleans(), has_accounting=st.booleans())
    def servers(self, is_away: bool, has_accounting: bool) -> None:
        self.slurm.is_away, self.slurm.has_accounting = is_away, has_accounting

    @rule(is_held=st.booleans())
    def hold(self, is_held: bool) -> None:
        self.slurm.has_hold = is_held
        if is_held:
            self.folder.hold("bob", "x", self.slurm.now_s)
        else:
            self.folder.release()

    @rule(name=nodes_of_set, in_s=st.sampled_from([0, 1800, 7200]))
    def a_reservation_is_made(self, name: str, in_s: int) -> None:
        start_s = self.slurm.now_s + in_s
        self.slurm.reserved = [*self.slurm.reserved[-2:], Reservation((name,), start_s, start_s + 3600)]

    @precondition(lambda self: not self.by_count)
    @rule()
    def slurmctld_forgets(self) -> None:
        self.slurm.forget()

    @rule()
    def slurm_conf_is_read_again(self) -> None:
        self.slurm.reconfigure()

    @precondition(lambda self: not self.by_count)
    @invariant()
    def no_node_cycles_more_often_than_it_may(self) -> None:
        recent = Counter(name for time_s, name in self.downs if self.slurm.now_s - DAY_S < time_s)
        assert all(number <= CYCLES for number in recent.values())

    @invariant()
    def what_others_powered_down_is_not_woken(self) -> None:
        for name, node in self.slurm.nodes_.items():
            if node.reason == "PSU, bob":
                assert "POWER_UP" not in node.states, name


class CountMachine(PowerMachine):
    """The same by SuspendExcNodes: Slurm picks the nodes, and takes none that almanac would not."""

    by_count = True


TestByName = PowerMachine.TestCase
TestByName.settings = examples(1.5, stateful_step_count=40)
TestByCount = CountMachine.TestCase
TestByCount.settings = examples(1, stateful_step_count=30)

STATES = (
    "IDLE", "ALLOCATED", "MIXED", "DOWN", "DRAIN", "RESERVED", "MAINTENANCE", "PLANNED", "COMPLETING", "POWERED_DOWN",
    "POWERING_DOWN", "POWER_DOWN", "POWERING_UP", "POWER_UP", "NOT_RESPONDING", "FAIL", "REBOOT_ISSUED", "INVALID_REG",
    "FUTURE", "UNKNOWN", "BLOCKED", "SOMETHING_NEW",
)  # fmt: skip
IDLE = ({"IDLE"}, {"IDLE", "POWER_UP"})
any_node = st.builds(
    SlurmNode,
    name=st.just("n"),
    states=st.frozensets(st.sampled_from(STATES), min_size=1, max_size=4),
    reason=st.sampled_from(["", "almanac: power saving", "bob", "ResumeTimeout reached"]),
    last_busy_s=st.one_of(st.none(), st.integers(0, 20_000)),
    boot_s=st.one_of(st.none(), st.integers(0, 20_000)),
    reservation=st.sampled_from(["", "", "maint"]),
)


@given(st.lists(any_node, max_size=12), st.one_of(st.none(), st.integers(0, 15)), st.integers(0, 3))
@examples(20)
def test_only_idle_nodes_power_down_and_only_own_sleepers_wake(
    found: list[SlurmNode], target: int | None, warm: int
) -> None:
    nodes = {f"n{place}": replace(node, name=f"n{place}") for place, node in enumerate(found)}
    memory = {"n0": NodeState((9000, 19_000), 19_000, is_ours=True), "n1": NodeState(is_ours=True)}
    around = PowerSurroundings(frozenset({"n2"}), frozenset({"n3"}), memory)
    power = power_nodes(tuple(nodes), nodes, around, 20_000)
    limits = PowerLimits(warm, 2, 1800, nodes_per_run=4)
    chosen = select(power, target, 0, limits, 20_000)
    for name in chosen.power_down:
        node = nodes[name]
        assert node.states in IDLE
        assert not node.reservation
        assert name not in {"n0", "n2", "n3"}
        assert node.last_busy_s is not None
        assert node.last_busy_s <= 20_000 - 1800
    for name in chosen.wake:
        assert "POWERED_DOWN" in nodes[name].states
        assert nodes[name].reason.startswith("almanac") or name in {"n0", "n1"}
    if target is None:
        assert not chosen.power_down
    assert len(chosen.power_down) <= 4
    if chosen.power_down:
        assert sum(node.states in IDLE for node in nodes.values()) - len(chosen.power_down) >= warm
    assert chosen == select(list(reversed(power)), target, 0, limits, 20_000), "deterministic"


@given(st.lists(any_node, max_size=12), st.integers(0, 15))
@examples(5)
def test_the_count_lets_slurm_pick_only_nodes_that_could_go_by_name(found: list[SlurmNode], target: int) -> None:
    nodes = {f"n{place}": replace(node, name=f"n{place}") for place, node in enumerate(found)}
    power = power_nodes(tuple(nodes), nodes, PowerSurroundings(takes_any=True), 20_000)
    limits = PowerLimits(1, 2, 1800)
    chosen = select(power, target, 0, limits, 20_000)
    kept = kept_on(power, chosen, limits, 20_000)
    assert set(kept.always) | set(kept.counted) == set(nodes)
    assert not set(kept.always) & set(kept.counted)
    flags = {each.name: each.flags for each in power}
    up = sum(not flags[name] & NodeFlag.ASLEEP for name in kept.counted)
    assert up - kept.count + len(chosen.wake) == len(chosen.power_down)
    idle = {name for name in kept.counted if nodes[name].states == {"IDLE"}}
    everything = select(power, 0, 0, PowerLimits(0, 2, 1800, nodes_per_run=100), 20_000)
    assert idle <= set(everything.power_down)


@given(st.frozensets(st.sampled_from(STATES), max_size=5))
def test_a_state_that_is_not_known_is_never_free(states: frozenset[str]) -> None:
    if flags_of(states) == NodeFlag(0):
        assert states in IDLE


def test_a_power_up_that_nothing_follows_is_stale() -> None:
    assert flags_of(frozenset({"IDLE", "POWER_UP"})) == NodeFlag(0)
    assert flags_of(frozenset({"ALLOCATED", "POWER_UP"})) == NodeFlag.BUSY
    for more in ("POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "NOT_RESPONDING"):
        assert flags_of(frozenset({"IDLE", "POWER_UP", more})) & NodeFlag.BOOTING


@pytest.mark.parametrize(
    ("request_flags", "wakes"),
    [
        (("POWER_DOWN",), True), (("POWER_DRAIN",), True), (("POWER_DOWN", "POWER_DRAIN", "NOT_RESPONDING"), True),
        (("POWER_DOWN", "POWERING_DOWN"), False), (("POWER_DOWN", "DRAIN"), False), (("POWER_DOWN", "POWER_UP"), False),
    ],
)  # fmt: skip
def test_a_request_to_power_down_beside_its_fulfillment_is_done(request_flags: tuple[str, ...], wakes: bool) -> None:
    """power_down_force leaves POWER_DOWN on a node that sleeps."""
    record = {"state": ["IDLE", "CLOUD", "POWERED_DOWN", *request_flags], "reason": REASON, "partitions": ["gpu"]}
    nodes = {node.name: node for node in nodes_of([{"name": f"n{number}", **record} for number in range(4)])}
    limits = PowerLimits(warm_minimum=0, cycles_per_day=4, cooldown_s=0)
    chosen = select(power_nodes([*nodes], nodes, PowerSurroundings(), 0), 2, 0, limits, 0)
    assert (chosen.wake, chosen.short) == ((("n0", "n1"), 0) if wakes else ((), 2))
    shown = "+".join(record["state"])
    assert (why_not_on(parse_states(f"NodeName=n0 Arch=x State={shown} X=1")["n0"]) == "") is (
        wakes or "POWERING_DOWN" not in request_flags
    )


def test_a_stale_request_to_power_up_keeps_no_node_out_of_service() -> None:
    [node] = nodes_of([{"name": "n1", "state": ["IDLE", "POWER_UP"]}])
    assert is_in_service(node.states)
    assert not is_in_service(nodes_of([{"name": "n1", "state": ["IDLE", "POWER_UP", "POWERED_DOWN"]}])[0].states)


def test_a_selection_of_nothing_is_empty() -> None:
    assert select([], 5, 0, PowerLimits(), 0) == NodePlan(short=5)


@pytest.mark.parametrize(
    ("states", "reason", "is_resumed"),
    [
        ({"IDLE", "DRAIN"}, REASON, True),
        ({"MIXED", "DRAIN"}, REASON, True),
        ({"IDLE", "DRAIN"}, "disk, bob", False),
        ({"UNKNOWN", "DRAIN"}, REASON, False),
        ({"IDLE", "DRAIN", "POWER_DOWN"}, REASON, False),
        ({"IDLE", "POWERED_DOWN"}, REASON, False),
    ],
)
def test_a_drain_that_is_left_of_our_power_down_is_taken_off(states: set[str], reason: str, is_resumed: bool) -> None:
    """slurmctld restarted before it saved the rest; whether almanac remembers the order does not matter."""
    node = SlurmNode("n1", frozenset(states), reason=reason)
    assert failures_of(["n1"], {"n1": node}, PowerState(), 0).back == (("n1",) if is_resumed else ())
