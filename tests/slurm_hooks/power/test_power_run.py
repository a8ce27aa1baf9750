"""Runs of the power hook against a slurmctld in memory: what it does over hours, and after what goes wrong."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import RESUME_TIMEOUT_S, START_S, FakeSlurm, Killed, Wanted

from almanac.config import Config, NodeSet, Power
from almanac.errors import BusyError, CommandError, ConfigError, StoreError
from slurm_hooks.power.folder import PowerFolder
from slurm_hooks.power.nodes import REASON
from slurm_hooks.power.planning import Planner
from slurm_hooks.power.run import PowerRun, SetOutcome
from slurm_hooks.power.waking import names_to_wake, wake_now
from telemetry.slurm.backend import Reservation

TEN_MIN = 600


@dataclass
class Site:
    """One run after another, as the timer does it."""

    slurm: FakeSlurm
    folder: PowerFolder
    source: Wanted = field(default_factory=Wanted)
    config: Config = field(
        default_factory=lambda: Config(power=Power(mode="apply"), node_sets=(NodeSet(name="gpu", nodes="n[1-8]"),))
    )

    @property
    def planner(self) -> Planner:
        return Planner(self.slurm, self.config, self.folder, "lab", self.source, lambda: self.slurm.now_s)  # type: ignore[arg-type]

    def run(self, target: int | None = None) -> SetOutcome:
        self.source.target = target
        with self.folder.lock():
            [outcome] = PowerRun(self.planner).apply(self.planner.plan())
        return outcome

    def lines(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for path in sorted(self.folder.root.glob("*.jsonl"))
            for line in path.read_text().splitlines()
        ]

    def power(self, **values: Any) -> None:
        self.config = replace(self.config, power=replace(self.config.power, **values))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(FakeSlurm([f"n{number}" for number in range(1, 9)]), PowerFolder(tmp_path / "power"))


@pytest.fixture
def count_site(tmp_path: Path) -> Site:
    slurm = FakeSlurm([f"n{number}" for number in range(1, 9)], suspend_time_s=300, release="24.11.5", exceptions="n8")
    return Site(slurm, PowerFolder(tmp_path / "power"))


def test_nodes_power_down_to_the_target_and_come_back_for_a_higher_one(site: Site) -> None:
    outcome = site.run(target=5)
    assert outcome.plan.chosen.power_down == ("n1", "n2", "n3")
    assert not outcome.unheard
    assert not outcome.said
    site.slurm.pass_time(TEN_MIN)
    assert site.slurm.asleep() == {"n1", "n2", "n3"}
    assert all(node.reason == REASON for name, node in site.slurm.nodes_.items() if name in site.slurm.asleep())
    assert not site.run(target=5).plan.acts
    site.run(target=7)
    site.slurm.pass_time(TEN_MIN)
    assert len(site.slurm.asleep()) == 1


def test_each_order_is_written_down_before_slurm_hears_it(site: Site) -> None:
    planned = site.planner
    site.source.target = 6
    site.slurm.kill_at = 20
    plan = planned.plan()
    site.slurm.kill_at = 0
    with pytest.raises(Killed):
        PowerRun(planned).apply(plan)
    assert site.slurm.orders == []
    [line] = site.lines()
    assert (line["what"], line["nodes"], line["number"]) == ("power down", "n[1-2]", 2)
    assert line["reason"] == "the test says so"
    assert (line["target"], line["powered"], line["active"]) == (6, 8, 0)


def test_a_run_killed_anywhere_is_finished_by_the_next(tmp_path: Path) -> None:
    for calls in range(12):
        site = Site(FakeSlurm(["n1", "n2", "n3", "n4"]), PowerFolder(tmp_path / f"p{calls}"))
        site.config = replace(site.config, node_sets=(NodeSet(name="gpu", nodes="n[1-4]"),))
        site.slurm.kill_at = calls
        with contextlib.suppress(Killed):
            site.run(target=2)
        site.slurm.kill_at = None
        site.slurm.pass_time(TEN_MIN)
        for _ in range(4):
            site.run(target=2)
            site.slurm.pass_time(TEN_MIN)
        assert len(site.slurm.asleep()) == 2, f"killed at call {calls}"


def test_two_runs_never_overlap(site: Site) -> None:
    with site.folder.lock(), pytest.raises(BusyError):
        site.run(target=4)


def test_hold_means_hold_and_wakes_what_is_in_use_and_warm(site: Site) -> None:
    site.run(target=2)
    site.slurm.pass_time(TEN_MIN)
    assert len(site.slurm.asleep()) == 6
    for name in sorted(set(site.slurm.names) - site.slurm.asleep()):
        site.slurm.put(name, "ALLOCATED")
    site.folder.hold("ops", "fire drill", site.slurm.now_s)
    outcome = site.run(target=1)
    assert outcome.plan.is_hold
    assert outcome.plan.reason == "hold by ops: fire drill"
    assert len(outcome.plan.chosen.wake) == 1, "the warm minimum"
    assert not outcome.plan.chosen.power_down
    assert site.folder.release()
    assert not site.run(target=1).plan.is_hold


@pytest.mark.parametrize("planted", ["fifo", "folder", "link", "garbage"])
def test_whatever_lies_where_the_hold_file_belongs_holds(site: Site, planted: str, tmp_path: Path) -> None:
    site.folder.root.mkdir()
    path = site.folder.root / "hold"
    if planted == "fifo":
        os.mkfifo(path)
    elif planted == "folder":
        path.mkdir()
    elif planted == "link":
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.write_bytes(b"\xff{")
    assert site.run(target=2).plan.is_hold
    assert site.slurm.orders == []


def test_a_hold_that_comes_in_the_middle_of_a_run_counts(site: Site) -> None:
    site.source.target = 4
    plan = site.planner.plan()
    site.folder.hold("ops", "now", site.slurm.now_s)
    [outcome] = PowerRun(site.planner).apply(plan)
    assert len(outcome.changed) == 4
    assert site.slurm.orders == []


def test_what_became_busy_reserved_or_drained_since_the_plan_stays_on(site: Site) -> None:
    site.source.target = 3
    plan = site.planner.plan()
    assert plan.sets[0].chosen.power_down == ("n1", "n2", "n3", "n4", "n5")
    site.slurm.put("n1", "ALLOCATED")
    site.slurm.put("n2", "IDLE", "DRAIN", reason="disk")
    site.slurm.put("n3", "IDLE", "RESERVED")
    [outcome] = PowerRun(site.planner).apply(plan)
    assert outcome.changed == ("n1", "n2", "n3")
    assert site.slurm.orders == [("power_down_asap", ("n4", "n5"))]
    assert site.slurm.nodes_["n2"].reason == "disk"


def test_without_slurmdbd_or_with_a_state_nobody_can_read_nothing_powers_down(site: Site) -> None:
    site.slurm.has_accounting = False
    assert "slurmdbd does not answer" in site.run(target=2).plan.reason
    site.slurm.has_accounting = True
    state = site.folder.root / "state.json"
    for broken in (b"{", b"[]", b'{"version": 9}', b"[" * 100_000, b'{"version": 1, "cluster": "other"}'):
        state.write_bytes(broken)
        outcome = site.run(target=2)
        assert outcome.plan.is_hold
        assert state.read_bytes() == broken, "what is not understood is not overwritten"
    state.unlink()
    assert len(site.run(target=2).plan.chosen.power_down) == 6


def test_a_store_that_cannot_be_read_holds_and_wakes_what_is_in_use_and_warm(site: Site) -> None:
    site.run(target=2)
    site.slurm.pass_time(TEN_MIN)
    for name in sorted(set(site.slurm.names) - site.slurm.asleep()):
        site.slurm.put(name, "ALLOCATED")
    broken = StoreError("jobs: part-0.parquet is damaged", "run almanac doctor")

    class Broken(Wanted):
        def fail(self, *_: Any) -> Any:
            raise broken

        run_times_s = note = decide = fail

    site.source = Broken()
    run_times, demand = PowerRun(site.planner).note_demand()
    assert "run times of pending jobs" in run_times
    assert "the demand of gpu is not recorded: jobs: part-0.parquet is damaged" in demand
    outcome = site.run(target=1)
    assert outcome.plan.is_hold
    assert outcome.plan.reason == "jobs: part-0.parquet is damaged; run almanac doctor"
    assert len(outcome.plan.chosen.wake) == 1, "the warm minimum"
    assert not outcome.plan.chosen.power_down


def test_the_forecast_of_the_horizon_is_remembered_and_forgotten_with_a_hold(site: Site) -> None:
    site.source.forecast = {(180, 0.3): 2.5, (360, 0.5): 3.5, (360, 0.98): 7.25}
    site.run(target=4)
    assert site.folder.load("lab").set_of("gpu").forecast == ((0.5, 3.5), (0.98, 7.25))
    state = site.folder.root / "state.json"
    content = json.loads(state.read_text())
    for bad in ([[0.5]], [[0.5, None]], [[True, 1]], "x", [["0.5", 1]], None):
        content["sets"]["gpu"]["forecast"] = bad
        state.write_text(json.dumps(content))
        with pytest.raises(StoreError):
            site.folder.load("lab")
    del content["sets"]["gpu"]["forecast"]
    state.write_text(json.dumps(content))
    assert site.folder.load("lab").set_of("gpu").forecast == (), "of an earlier almanac"
    site.folder.hold("ops", "now", site.slurm.now_s)
    site.run(target=4)
    assert site.folder.load("lab").set_of("gpu").forecast == ()


def test_a_state_that_others_can_write_is_not_believed(site: Site) -> None:
    site.run(target=6)
    (site.folder.root / "state.json").chmod(0o664)
    site.slurm.pass_time(TEN_MIN)
    outcome = site.run(target=4)
    assert outcome.plan.is_hold
    assert "state.json" in outcome.plan.reason


def test_slurm_out_of_reach_ends_the_run_and_the_next_one_heals(site: Site) -> None:
    site.slurm.is_away = True
    with pytest.raises(CommandError):
        site.run(target=4)
    assert site.lines() == []
    site.slurm.is_away = False
    assert len(site.run(target=4).plan.chosen.power_down) == 4


def test_a_node_that_never_boots_is_tried_again_then_quarantined_and_the_rest_goes_on(site: Site) -> None:
    site.run(target=5)
    site.slurm.pass_time(TEN_MIN)
    site.slurm.dead = {"n3"}
    site.run(target=8)
    site.slurm.pass_time(TEN_MIN)
    assert site.slurm.states("n3") == {"DOWN", "POWERED_DOWN", "NOT_RESPONDING"}
    assert site.run(target=8).plan.failures.again == ("n3",)
    site.slurm.pass_time(TEN_MIN)
    assert site.run(target=8).plan.failures.give_up == ("n3",)
    assert "DRAIN" in site.slurm.states("n3")
    assert site.slurm.nodes_["n3"].reason == "almanac: did not wake within ResumeTimeout (2 tries)"
    before = len(site.slurm.orders)
    for _ in range(5):
        site.slurm.pass_time(TEN_MIN)
        outcome = site.run(target=8)
        assert outcome.plan.quarantined == ("n3",)
    assert len(site.slurm.orders) == before, "it never loops"
    assert site.slurm.asleep() == {"n3"}
    # An operator repairs it and takes the drain off.
    site.slurm.dead.clear()
    site.slurm.put("n3", "IDLE", reason="", last_busy_s=site.slurm.now_s, boot_s=site.slurm.now_s)
    assert site.run(target=8).plan.quarantined == ()


def test_a_late_node_that_answers_though_slurm_calls_it_down_is_resumed(site: Site) -> None:
    site.run(target=7)
    site.slurm.pass_time(TEN_MIN)
    site.slurm.put("n1", "DOWN", reason="ResumeTimeout reached")  # ReturnToService=0
    assert site.run(target=7).plan.failures.back == ("n1",)
    assert site.slurm.states("n1") == {"IDLE"}


@pytest.mark.parametrize(("more", "reason"), [((), "Not responding"), ((), REASON), (("DRAIN",), REASON)])
def test_a_power_down_that_slurmctld_forgot_when_it_restarted_is_repeated_and_the_node_comes_back(
    site: Site, more: tuple[str, ...], reason: str
) -> None:
    site.run(target=7)
    site.slurm.pass_time(10)
    site.slurm.put("n1", "IDLE")  # as slurmctld shows it right after its restart
    assert not site.run(target=8).plan.acts
    site.slurm.put("n1", "IDLE", "POWERING_DOWN")
    site.slurm.forget()
    site.slurm.put("n1", "DOWN", "NOT_RESPONDING", *more, reason=reason)
    assert site.run(target=7).plan.failures.lost == ("n1",)
    site.slurm.pass_time(TEN_MIN)
    assert site.slurm.states("n1") == {"DOWN", "POWERED_DOWN"}
    assert site.run(target=7).plan.failures.again == ("n1",)
    site.slurm.pass_time(TEN_MIN)
    assert site.slurm.states("n1") == {"IDLE"}
    # A node that fails by itself is not almanac's to power.
    site.slurm.put("n1", "DOWN", "NOT_RESPONDING", reason="Not responding")
    assert not site.run(target=8).plan.acts


def test_what_others_powered_down_or_drained_is_left_alone(site: Site) -> None:
    site.slurm.put("n1", "IDLE", "POWERED_DOWN", reason="")
    site.slurm.put("n2", "IDLE", "POWERED_DOWN", reason="PSU, bob")
    site.slurm.put("n3", "DOWN", "POWERED_DOWN", reason="ResumeTimeout reached")
    site.slurm.put("n4", "IDLE", "DRAIN", reason="disk")
    outcome = site.run(target=8)
    assert not outcome.plan.acts
    assert outcome.plan.chosen.short == 4


def test_a_sleeper_that_an_operator_drains_stays_asleep(site: Site) -> None:
    site.run(target=7)
    site.slurm.pass_time(TEN_MIN)
    site.slurm.put("n1", "IDLE", "POWERED_DOWN", "DRAIN", reason="board swap")
    assert not site.run(target=8).plan.acts
    assert site.slurm.orders == [("power_down_asap", ("n1",))]


def test_sleepers_are_known_by_their_reason_when_the_state_is_lost(site: Site) -> None:
    site.run(target=6)
    site.slurm.pass_time(TEN_MIN)
    (site.folder.root / "state.json").unlink()
    assert site.run(target=8).plan.chosen.wake == ("n1", "n2")


def test_a_node_that_powers_down_is_not_told_to_wake_until_it_is_down(site: Site) -> None:
    site.run(target=6)
    site.slurm.pass_time(10)
    assert site.slurm.states("n1") == {"IDLE", "POWERING_DOWN"}
    outcome = site.run(target=8)
    assert outcome.plan.chosen.wake == ()
    assert outcome.plan.chosen.short == 2
    site.slurm.pass_time(TEN_MIN)
    assert site.run(target=8).plan.chosen.wake == ("n1", "n2")


def test_cycles_of_a_day_are_capped_across_runs_and_kills(site: Site) -> None:
    site.power(cooldown_s=0)
    for round_ in range(4):
        site.slurm.kill_at = 7 if round_ == 1 else None
        with contextlib.suppress(Killed):
            site.run(target=4)
        site.slurm.kill_at = None
        site.slurm.pass_time(TEN_MIN)
        site.run(target=8)
        site.slurm.pass_time(TEN_MIN)
    told = [name for state, names in site.slurm.orders if state == "power_down_asap" for name in names]
    assert max(told.count(name) for name in told) <= 2
    site.slurm.pass_time(86_400)
    assert len(site.run(target=4).plan.chosen.power_down) == 4


def test_a_run_powers_down_at_most_so_many_nodes_and_wakes_without_limit(site: Site) -> None:
    site.power(nodes_per_run=2)
    for asleep in (2, 4, 6):
        site.run(target=2)
        site.slurm.pass_time(TEN_MIN)
        assert len(site.slurm.asleep()) == asleep
    assert len(site.run(target=8).plan.chosen.wake) == 6


def test_nodes_of_a_reservation_stay_on_and_wake_before_it(site: Site) -> None:
    site.slurm.reserved = [Reservation(("n1",), START_S + 1800, START_S + 9000)]
    site.run(target=5)
    site.slurm.pass_time(TEN_MIN)
    assert site.slurm.asleep() == {"n2", "n3", "n4"}
    site.slurm.reserved.append(Reservation(("n2",), site.slurm.now_s + 1800, site.slurm.now_s + 9000))
    assert site.run(target=5).plan.chosen.wake == ("n2",)


def test_excluded_nodes_stay_on_and_a_sleeper_that_is_excluded_later_wakes(site: Site) -> None:
    site.slurm.exceptions = "n1"
    site.config = replace(site.config, node_sets=(NodeSet(name="gpu", nodes="n[1-8]", exclude="n2"),))
    site.run(target=4)
    site.slurm.pass_time(TEN_MIN)
    assert site.slurm.asleep() == {"n3", "n4", "n5", "n6"}
    site.config = replace(site.config, node_sets=(NodeSet(name="gpu", nodes="n[1-8]", exclude="n[2-3]"),))
    assert "n3" in site.run(target=4).plan.chosen.wake


def test_the_budget_counts_wake_ups_of_almanac_and_of_slurm(site: Site) -> None:
    site.run(target=5)
    site.slurm.pass_time(TEN_MIN)
    site.run(target=6)
    site.slurm.pass_time(TEN_MIN)
    site.run(target=6)
    assert len(site.source.seen[-1][1].wake_times_s) == 1
    site.slurm.put("n1", "ALLOCATED", "POWERING_UP", reason="")
    site.slurm.put("n2", "ALLOCATED", "POWERING_UP", reason="")
    site.run(target=6)
    assert len(site.source.seen[-1][1].wake_times_s) == 2


def test_busy_nodes_that_take_no_further_job_count_as_powered(site: Site) -> None:
    site.slurm.put("n1", "ALLOCATED", "DRAIN", reason="soon")
    outcome = site.run(target=8)
    assert site.source.seen[-1][0] == 8
    assert not outcome.plan.acts
    assert outcome.plan.chosen.short == 0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"suspend_time_s": 600}, "has no count"),
        ({"suspend_time_s": 600, "release": "24.11.5", "wanted": "names"}, "SuspendTime=600"),
        ({"release": "24.11.5", "wanted": "count"}, "longer than 30 days"),
        ({"wanted": "count", "suspend_time_s": 600}, "has no count"),
        ({"exceptions": "gpuset"}, "which is not a node"),
    ],
)
def test_a_slurm_conf_that_does_not_fit_is_refused(site: Site, values: dict[str, Any], said: str) -> None:
    site.power(actuator=values.pop("wanted", "auto"))
    for name, value in values.items():
        setattr(site.slurm, name, value)
    with pytest.raises(ConfigError, match=said):
        site.run(target=4)
    assert site.slurm.orders == []


def test_a_node_of_two_sets_is_refused(site: Site) -> None:
    sets = (NodeSet(name="a", nodes="n[1-4]"), NodeSet(name="b", nodes="n[4-8]"))
    site.config = replace(site.config, node_sets=sets)
    with pytest.raises(ConfigError, match="n4"):
        site.run(target=4)


def test_by_count_slurm_powers_down_what_the_plan_allows(count_site: Site) -> None:
    site = count_site
    outcome = site.run(target=5)
    assert site.slurm.exceptions == "n8,n[1-7]:4"
    assert not outcome.said
    site.slurm.pass_time(TEN_MIN)
    assert len(site.slurm.asleep()) == 3
    assert "n8" not in site.slurm.asleep()
    site.run(target=7)
    site.slurm.pass_time(TEN_MIN)
    assert len(site.slurm.asleep()) == 1, "woken by name, and kept on by the count"


def test_by_count_a_hold_keeps_every_node_on(count_site: Site) -> None:
    site = count_site
    site.run(target=None)
    site.slurm.pass_time(3 * 3600)
    assert site.slurm.asleep() == set()


def test_by_count_a_reconfigure_is_noticed_and_the_sites_own_entries_stay(count_site: Site) -> None:
    site = count_site
    site.run(target=6)
    site.slurm.reconfigure()
    assert site.slurm.exceptions == "n8"
    site.run(target=6)
    assert site.slurm.exceptions.startswith("n8,n[1-7]:")
    # An operator adds a node of his own: it is kept, too.
    site.slurm.exceptions = "n8,n5"
    site.run(target=6)
    assert "n5" in site.slurm.exceptions.split(":")[0].split(",")


def test_by_count_nodes_that_must_stay_on_are_named(count_site: Site) -> None:
    site = count_site
    site.slurm.put("n2", "IDLE", "RESERVED")
    site.slurm.put("n3", "IDLE", last_busy_s=site.slurm.now_s - 60)  # off cool-down not yet
    site.run(target=2)
    site.slurm.pass_time(TEN_MIN)
    assert not site.slurm.asleep() & {"n2", "n3", "n8"}


def test_wake_all_needs_slurm_only(site: Site) -> None:
    site.run(target=4)
    site.slurm.pass_time(TEN_MIN)
    (site.folder.root / "state.json").write_bytes(b"broken")
    site.slurm.put("n1", "DOWN", "POWERED_DOWN", "DRAIN", "NOT_RESPONDING", reason="almanac: did not wake ...")
    site.slurm.put("n7", "IDLE", "DRAIN", reason="disk")
    names = names_to_wake("ALL", Config(), site.slurm.nodes())
    assert set(names) == {"n1", "n2", "n3", "n4"}, "marked in Slurm, whatever the configuration says"
    woken = wake_now(site.slurm, names, lambda: 0.0, lambda _: None)  # type: ignore[arg-type]
    assert (woken.woken, woken.undrained) == (("n1", "n2", "n3", "n4"), ("n1",))
    site.slurm.pass_time(TEN_MIN)
    assert site.slurm.asleep() == set()
    assert site.slurm.states("n7") == {"IDLE", "DRAIN"}


def test_wake_waits_for_nodes_that_power_down(site: Site) -> None:
    site.run(target=6)
    site.slurm.pass_time(10)
    clock: Callable[[], float] = lambda: float(site.slurm.now_s)  # noqa: E731
    woken = wake_now(site.slurm, ("n1", "n2"), clock, lambda _: site.slurm.pass_time(10))  # type: ignore[arg-type]
    assert (woken.woken, woken.late) == (("n1", "n2"), ())
    site.slurm.pass_time(RESUME_TIMEOUT_S)
    assert site.slurm.asleep() == set()


def test_a_folder_that_cannot_be_written_tells_slurm_nothing(site: Site, tmp_path: Path) -> None:
    (tmp_path / "power").write_text("a file")
    site.source.target = 4
    with pytest.raises(StoreError):
        PowerRun(site.planner).apply(site.planner.plan())
    assert site.slurm.orders == []


CHANGES: dict[str, Callable[[FakeSlurm], object]] = {
    "drained": lambda slurm: slurm.put("n1", "IDLE", "DRAIN", reason="bad fan"),
    "with a reason": lambda slurm: slurm.put("n1", *slurm.states("n1"), reason="bad fan"),
    "reserved": lambda slurm: slurm.put("n1", *slurm.states("n1"), "RESERVED", reservation="maintenance"),
    "soon reserved": lambda slurm: slurm.reserved.append(Reservation(("n1",), slurm.now_s + 60, slurm.now_s + 900)),
    "excluded": lambda slurm: setattr(slurm, "exceptions", "n1"),
    "busy": lambda slurm: slurm.put("n1", "ALLOCATED"),
}


def _at_look(slurm: FakeSlurm, look: int, change: Callable[[FakeSlurm], object]) -> Callable[[], int]:
    """Change the cluster before a look: a call that is no order. Returns the number of looks and orders so far."""
    calls, looks, kept = slurm._call, 0, slurm.orders

    def call() -> None:
        nonlocal looks
        calls()
        caller = inspect.stack()[1].function
        if not caller.startswith("set_"):
            looks += 1
            if looks == look:
                kept.clear()
                change(slurm)

    slurm._call = call  # type: ignore[method-assign]
    return lambda: looks


@pytest.mark.parametrize("name", CHANGES)
def test_no_node_is_powered_down_over_a_change(tmp_path: Path, name: str) -> None:
    """Before the look at the nodes, which is the last one; exceptions and reservations are read just before that."""
    for look in range(1, 4):
        slurm = FakeSlurm([f"n{number}" for number in range(1, 9)])
        site = Site(slurm, PowerFolder(tmp_path / str(look)), Wanted(target=5))
        plan = site.planner.plan()
        _at_look(slurm, look, CHANGES[name])
        if look == 3 and name in ("soon reserved", "excluded"):
            break
        if look >= 2 and name == "excluded":
            break
        [outcome] = PowerRun(site.planner).apply(plan)
        assert slurm.orders == [("power_down_asap", ("n2", "n3"))]
        assert outcome.changed == ("n1",)
        assert [line["nodes"] for line in site.lines() if line["what"] == "dropped"] == ["n1"]


def test_a_hold_between_plan_and_order_keeps_all_nodes_on(site: Site) -> None:
    site.source.target = 5
    plan = site.planner.plan()
    _at_look(site.slurm, 3, lambda slurm: site.folder.hold("root", "a power cut", START_S))
    [outcome] = PowerRun(site.planner).apply(plan)
    assert (site.slurm.orders, outcome.changed) == ([], ("n1", "n2", "n3"))


def test_a_node_that_an_operator_drains_is_neither_resumed_nor_quarantined(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm_hooks.power.plan.WAKE_RETRIES", 0)
    site.run(target=5)
    site.slurm.pass_time(TEN_MIN)
    site.slurm.dead = {"n1"}
    site.run(target=8)
    site.slurm.pass_time(TEN_MIN)
    plan = replace(site.planner, source=Wanted(target=8)).plan()
    assert plan.sets[0].failures.give_up == ("n1",)
    _at_look(site.slurm, 1, lambda slurm: slurm.put("n1", *slurm.states("n1"), "DRAIN", reason="bad fan"))
    PowerRun(site.planner).apply(plan)
    assert site.slurm.nodes_["n1"].reason == "bad fan"
    assert not [order for order in site.slurm.orders if order[0] in ("drain", "resume")]


def test_exceptions_that_an_operator_changed_are_kept(count_site: Site) -> None:
    count_site.source.target = 5
    plan = count_site.planner.plan()
    count_site.slurm.exceptions = "n8,n3"
    [outcome] = PowerRun(count_site.planner).apply(plan)
    assert count_site.slurm.exceptions == "n8,n3"
    assert "changed meanwhile" in outcome.said[0]
    [outcome] = PowerRun(count_site.planner).apply(count_site.planner.plan())
    assert outcome.said == () and "n3" in count_site.slurm.exceptions
