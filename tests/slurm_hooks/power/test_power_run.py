"""Runs of the power hook against a slurmctld in memory: what it does over hours, and after what goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import RESUME_TIMEOUT_S, START_S, FakeSlurm, PowerSite, Wanted

from almanac.config import NodeSet
from almanac.errors import CommandError, ConfigError, StoreError
from slurm.backend import Reservation
from slurm_hooks.power.nodes import REASON
from slurm_hooks.power.operators import wake_now
from slurm_hooks.power.run import PowerRun

TEN_MIN = 600
SAYS = ("reason", "the test says so")


@pytest.fixture
def site(tmp_path: Path) -> PowerSite:
    return PowerSite(FakeSlurm([f"n{number}" for number in range(1, 9)]), tmp_path / "power")


@pytest.fixture
def count_site(tmp_path: Path) -> PowerSite:
    slurm = FakeSlurm([f"n{number}" for number in range(1, 9)], suspend_time_s=300, release="24.11.5", exceptions="n8")
    return PowerSite(slurm, tmp_path / "power")


def test_nodes_power_down_to_the_target_and_come_back_for_a_higher_one(site: PowerSite) -> None:
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
    told = [
        {name: value for name, value in line.items() if name not in ("time_s", "almanac")}
        for line in site.folder.rows(1, site.slurm.now_s)
    ]
    same = {"cluster": "lab", "node_set": "gpu", "mode": "apply", "actuator": "names", "active": 0, "wanted": 0}
    assert [line.items() - same.items() for line in told] == [
        {("what", "power down"), ("nodes", "n[1-3]"), ("number", 3), ("target", 5), ("powered", 8), SAYS},
        {("what", "wake"), ("nodes", "n[1-2]"), ("number", 2), ("target", 7), ("powered", 5), SAYS},
    ]


def test_hold_means_hold_and_wakes_what_is_in_use_and_warm(site: PowerSite) -> None:
    site.run(target=2)
    site.slurm.pass_time(TEN_MIN)
    assert len(site.slurm.asleep()) == 6
    for name in sorted(set(site.slurm.names) - site.slurm.asleep()):
        site.slurm.put(name, "ALLOCATED")
    site.folder.hold("ops", "fire drill", site.slurm.now_s)
    outcome = site.run(target=1)
    assert outcome.plan.target is None
    assert outcome.plan.reason == "hold by ops: fire drill"
    assert len(outcome.plan.chosen.wake) == 1, "the warm minimum"
    assert not outcome.plan.chosen.power_down
    assert site.folder.release()
    assert site.run(target=1).plan.target == 1


def test_without_slurmdbd_nothing_powers_down(site: PowerSite) -> None:
    site.slurm.has_accounting = False
    assert "slurmdbd does not answer" in site.run(target=2).plan.reason
    site.slurm.has_accounting = True
    assert len(site.run(target=2).plan.chosen.power_down) == 6


def test_a_store_that_cannot_be_read_holds_and_wakes_what_is_in_use_and_warm(site: PowerSite) -> None:
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
    assert outcome.plan.target is None
    assert outcome.plan.reason == "jobs: part-0.parquet is damaged; run almanac doctor"
    assert len(outcome.plan.chosen.wake) == 1, "the warm minimum"
    assert not outcome.plan.chosen.power_down


def test_the_forecast_of_the_horizon_is_remembered_and_forgotten_with_a_hold(site: PowerSite) -> None:
    site.source.forecast = {(360, 0.3): 2.5, (180, 0.5): 3.5, (180, 0.98): 7.25}
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


def test_slurm_out_of_reach_ends_the_run_and_the_next_one_heals(site: PowerSite) -> None:
    site.slurm.is_away = True
    with pytest.raises(CommandError):
        site.run(target=4)
    assert site.folder.rows(1, site.slurm.now_s) == []
    site.slurm.is_away = False
    assert len(site.run(target=4).plan.chosen.power_down) == 4


def test_a_node_that_never_boots_is_tried_again_then_quarantined_and_the_rest_goes_on(site: PowerSite) -> None:
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
    assert [f"{line['what']} {line['nodes']}: {line['reason']}" for line in site.folder.rows(1, site.slurm.now_s)] == [
        f"{what}: the test says so" for what in ("power down n[1-3]", "wake n[1-3]", "wake again n3", "quarantine n3")
    ]
    assert site.slurm.asleep() == {"n3"}
    # An operator repairs it and takes the drain off.
    site.slurm.dead.clear()
    site.slurm.put("n3", "IDLE", reason="", last_busy_s=site.slurm.now_s, boot_s=site.slurm.now_s)
    assert site.run(target=8).plan.quarantined == ()


def test_a_late_node_that_answers_though_slurm_calls_it_down_is_resumed(site: PowerSite) -> None:
    site.run(target=7)
    site.slurm.pass_time(TEN_MIN)
    site.slurm.put("n1", "DOWN", reason="ResumeTimeout reached")  # ReturnToService=0
    assert site.run(target=7).plan.failures.back == ("n1",)
    assert site.slurm.states("n1") == {"IDLE"}


@pytest.mark.parametrize(("more", "reason"), [((), "Not responding"), ((), REASON), (("DRAIN",), REASON)])
def test_a_power_down_that_slurmctld_forgot_when_it_restarted_is_repeated_and_the_node_comes_back(
    site: PowerSite, more: tuple[str, ...], reason: str
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


def test_what_others_powered_down_or_drained_is_left_alone(site: PowerSite) -> None:
    site.slurm.put("n1", "IDLE", "POWERED_DOWN", reason="")
    site.slurm.put("n2", "IDLE", "POWERED_DOWN", reason="PSU, bob")
    site.slurm.put("n3", "DOWN", "POWERED_DOWN", reason="ResumeTimeout reached")
    site.slurm.put("n4", "IDLE", "DRAIN", reason="disk")
    outcome = site.run(target=8)
    assert not outcome.plan.acts
    assert outcome.plan.chosen.short == 4


def test_a_sleeper_that_an_operator_drains_stays_asleep(site: PowerSite) -> None:
    site.run(target=7)
    site.slurm.pass_time(TEN_MIN)
    site.slurm.put("n1", "IDLE", "POWERED_DOWN", "DRAIN", reason="board swap")
    assert not site.run(target=8).plan.acts
    assert site.slurm.orders == [("power_down_asap", ("n1",))]


def test_sleepers_are_known_by_their_reason_when_the_state_is_lost(site: PowerSite) -> None:
    site.run(target=6)
    site.slurm.pass_time(TEN_MIN)
    (site.folder.root / "state.json").unlink()
    assert site.run(target=8).plan.chosen.wake == ("n1", "n2")


def test_a_node_that_powers_down_is_not_told_to_wake_until_it_is_down(site: PowerSite) -> None:
    site.run(target=6)
    site.slurm.pass_time(10)
    assert site.slurm.states("n1") == {"IDLE", "POWERING_DOWN"}
    outcome = site.run(target=8)
    assert outcome.plan.chosen.wake == ()
    assert outcome.plan.chosen.short == 2
    site.slurm.pass_time(TEN_MIN)
    assert site.run(target=8).plan.chosen.wake == ("n1", "n2")


def test_a_run_powers_down_at_most_so_many_nodes_and_wakes_without_limit(site: PowerSite) -> None:
    site.power(nodes_per_run=2)
    for asleep in (2, 4, 6):
        site.run(target=2)
        site.slurm.pass_time(TEN_MIN)
        assert len(site.slurm.asleep()) == asleep
    assert len(site.run(target=8).plan.chosen.wake) == 6


def test_nodes_of_a_reservation_stay_on_and_wake_before_it(site: PowerSite) -> None:
    site.slurm.reserved = [Reservation(("n1",), START_S + 1800, START_S + 9000)]
    site.run(target=5)
    site.slurm.pass_time(TEN_MIN)
    assert site.slurm.asleep() == {"n2", "n3", "n4"}
    site.slurm.reserved.append(Reservation(("n2",), site.slurm.now_s + 1800, site.slurm.now_s + 9000))
    assert site.run(target=5).plan.chosen.wake == ("n2",)


def test_excluded_nodes_stay_on_and_a_sleeper_that_is_excluded_later_wakes(site: PowerSite) -> None:
    site.slurm.exceptions = "n1"
    site.config = replace(site.config, node_sets=(NodeSet(name="gpu", nodes="n[1-8]", exclude="n2"),))
    site.run(target=4)
    site.slurm.pass_time(TEN_MIN)
    assert site.slurm.asleep() == {"n3", "n4", "n5", "n6"}
    site.config = replace(site.config, node_sets=(NodeSet(name="gpu", nodes="n[1-8]", exclude="n[2-3]"),))
    assert "n3" in site.run(target=4).plan.chosen.wake


def test_the_budget_counts_wake_ups_of_almanac_and_of_slurm(site: PowerSite) -> None:
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


def test_busy_nodes_that_take_no_further_job_count_as_powered(site: PowerSite) -> None:
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
def test_a_slurm_conf_that_does_not_fit_is_refused(site: PowerSite, values: dict[str, Any], said: str) -> None:
    site.power(actuator=values.pop("wanted", "auto"))
    for name, value in values.items():
        setattr(site.slurm, name, value)
    with pytest.raises(ConfigError, match=said):
        site.run(target=4)
    assert site.slurm.orders == []


def test_a_node_of_two_sets_is_refused(site: PowerSite) -> None:
    sets = (NodeSet(name="a", nodes="n[1-4]"), NodeSet(name="b", nodes="n[4-8]"))
    site.config = replace(site.config, node_sets=sets)
    with pytest.raises(ConfigError, match="n4"):
        site.run(target=4)


def test_by_count_slurm_powers_down_what_the_plan_allows(count_site: PowerSite) -> None:
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


def test_by_count_a_hold_keeps_every_node_on(count_site: PowerSite) -> None:
    site = count_site
    site.run(target=None)
    site.slurm.pass_time(3 * 3600)
    assert site.slurm.asleep() == set()


def test_by_count_a_reconfigure_is_noticed_and_the_sites_own_entries_stay(count_site: PowerSite) -> None:
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


def test_by_count_nodes_that_must_stay_on_are_named(count_site: PowerSite) -> None:
    site = count_site
    site.slurm.put("n2", "IDLE", "RESERVED")
    site.slurm.put("n3", "IDLE", last_busy_s=site.slurm.now_s - 60)  # off cool-down not yet
    site.run(target=2)
    site.slurm.pass_time(TEN_MIN)
    assert not site.slurm.asleep() & {"n2", "n3", "n8"}


def test_wake_waits_for_nodes_that_power_down(site: PowerSite) -> None:
    site.run(target=6)
    site.slurm.pass_time(10)
    site.slurm.record = None
    clock: Callable[[], float] = lambda: float(site.slurm.now_s)  # noqa: E731
    woken = wake_now(site.slurm, ("n1", "n2"), clock, lambda _: site.slurm.pass_time(10))  # type: ignore[arg-type]
    assert (woken.woken, woken.late) == (("n1", "n2"), ())
    site.slurm.pass_time(RESUME_TIMEOUT_S)
    assert site.slurm.asleep() == set()


def test_a_node_that_an_operator_drains_is_neither_resumed_nor_quarantined(
    site: PowerSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm_hooks.power.failures.WAKE_RETRIES", 0)
    site.run(target=5)
    site.slurm.pass_time(TEN_MIN)
    site.slurm.dead = {"n1"}
    site.run(target=8)
    site.slurm.pass_time(TEN_MIN)
    plan = replace(site.planner, source=Wanted(target=8)).plan()
    assert plan.sets[0].failures.give_up == ("n1",)
    site.slurm.change_at = site.slurm.looks + 1
    site.slurm.change = lambda: site.slurm.put("n1", *site.slurm.states("n1"), "DRAIN", reason="bad fan")
    site.slurm.orders.clear()
    PowerRun(site.planner).apply(plan)
    assert site.slurm.nodes_["n1"].reason == "bad fan"
    assert not [order for order in site.slurm.orders if order[0] in ("drain", "resume")]


def test_exceptions_that_an_operator_changed_are_kept(count_site: PowerSite) -> None:
    count_site.source.target = 5
    plan = count_site.planner.plan()
    count_site.slurm.exceptions = "n8,n3"
    [outcome] = PowerRun(count_site.planner).apply(plan)
    assert count_site.slurm.exceptions == "n8,n3"
    assert "changed meanwhile" in outcome.said[0]
    [outcome] = PowerRun(count_site.planner).apply(count_site.planner.plan())
    assert outcome.said == () and "n3" in count_site.slurm.exceptions
