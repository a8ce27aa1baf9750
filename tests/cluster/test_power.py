"""`almanac power` on a running Slurm: nodes really power down and up, and no job is ever hurt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from power_site import PowerSite, is_up, power_site, quick_slurm
from power_walk import log_of_power
from sites import Site

from almanac.errors import CommandError

pytestmark = pytest.mark.cluster

FIRST, SECOND, LAST = "n1", "n2", "n4"


@pytest.fixture(scope="module")
def quick(_running_site: Site) -> Iterator[Site]:
    """With short timeouts in slurm.conf."""
    with quick_slurm(_running_site):
        yield _running_site


@pytest.fixture
def power(quick: Site, site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[PowerSite]:
    with power_site(site, tmp_path, capsys) as made:
        yield made


def assert_unhurt(power: PowerSite, job_id: int) -> None:
    job = power.site.job(job_id)
    assert (job["JobState"], job["Restarts"]) == ("RUNNING", "0")


@pytest.mark.every_release
def test_nodes_sleep_by_the_plan_and_are_back_for_a_job_and_before_the_forecast_needs_them(power: PowerSite) -> None:
    site = power.site
    long = site.sbatch("alice", "-w", FIRST, "-t", "30", script="#!/bin/sh\nsleep 600\n")
    site.wait_for(long, "RUNNING")
    assert power("plan")["applied"] is False
    done = power.apply(2)
    one, other = done["power_down"]
    assert (done["active"], done["powered"], done["unheard"]) == (1, 4, [])
    assert FIRST not in (one, other)
    power.wait_asleep(one, other)
    assert site.bmc("status", one, other).split() == [one, "off", other, "off"]
    assert power.apply(2)["power_down"] == []
    [shown] = power("status")["sets"]
    assert (shown["asleep"], shown["asleep_by_others"]) == (sorted((one, other)), [])

    # A job that needs a sleeping node: Slurm wakes it at once, no run is needed.
    woken = site.sbatch("alice", "-w", one, "-t", "5")
    site.wait_for(woken, "COMPLETED")
    assert is_up(power.nodes()[one])

    # The forecast rises: the node is up before the job that needs it comes.
    assert power.apply(4)["wake"] == [other]
    power.wait_up(other)
    before = log_of_power(site)
    late = site.sbatch("alice", "-w", other, "-t", "5", script="#!/bin/sh\nsleep 5\n")
    site.wait_for(late, "RUNNING")
    assert log_of_power(site) == before, "no program had to wake it"
    assert_unhurt(power, long)
    assert [line["what"] for line in power.lines()] == ["power down", "wake"]


def test_a_busy_node_is_never_chosen_and_one_that_gets_a_job_meanwhile_finishes_it(power: PowerSite) -> None:
    site = power.site
    jobs = [site.sbatch("alice", "-w", name, "-t", "5", script="#!/bin/sh\nsleep 12\n") for name in (FIRST, SECOND)]
    for job in jobs:
        site.wait_for(job, "RUNNING")
    done = power.apply(1)
    assert not {FIRST, SECOND} & set(done["power_down"])
    # The worst case of a race: power_down_asap reaches a node that has a job by now.
    power.backend.set_node_state([FIRST], "power_down_asap", "almanac: power saving")
    assert_unhurt(power, jobs[0])
    for job in jobs:
        site.wait_for(job, "COMPLETED")
        assert site.job(job)["Restarts"] == "0"


@pytest.mark.every_release
def test_a_run_that_is_killed_and_a_slurmctld_that_restarts_or_is_away_are_healed(power: PowerSite) -> None:
    site = power.site
    power.killed_apply(3)
    [line] = power.lines()
    assert (line["what"], line["number"]) == ("power down", 1)
    assert all(is_up(node) for node in power.nodes().values()), "written down, and not told"
    [asleep] = power.apply(3)["power_down"]
    assert asleep == line["nodes"]
    site.stop_server("slurmctld")
    site.start_server("slurmctld")
    power.heal(4, asleep)

    site.stop_server("slurmctld")
    with pytest.raises(CommandError):
        power.apply(1)
    site.start_server("slurmctld")
    site.wait_for_nodes()

    site.stop_server("slurmdbd")
    held = power.apply(1)
    assert held["hold"]
    assert "slurmdbd does not answer" in held["reason"]
    assert held["power_down"] == []
    site.start_server("slurmdbd")

    [asleep] = power.apply(3)["power_down"]
    power.wait_asleep(asleep)
    power.apply(4)
    site.stop_server("slurmctld")
    site.start_server("slurmctld")
    power.heal(4, asleep)
    assert not power.apply(4)["wake"]


@pytest.mark.every_release
def test_a_node_that_never_boots_is_quarantined_and_the_rest_goes_on(power: PowerSite) -> None:
    site = power.site
    dead, alive = power.apply(2)["power_down"]
    power.wait_asleep(dead, alive)
    site.bmc("broken", dead)
    power.apply(4)
    power.wait_up(alive)
    power.wait_for("ResumeTimeout", lambda nodes: "DOWN" in nodes[dead].states)
    assert power.apply(4)["wake_again"] == [dead]
    power.wait_for("the next try", lambda nodes: "POWERING_UP" in nodes[dead].states)
    power.wait_for("ResumeTimeout again", lambda nodes: not {"POWERING_UP", "POWER_UP"} & nodes[dead].states)
    done = power.apply(4)
    assert (done["wake_again"], done["quarantine"]) == ([], [dead])
    node = power.nodes()[dead]
    assert "DRAIN" in node.states
    assert node.reason.startswith("almanac: did not wake")
    done = power.apply(4)
    assert (done["quarantined"], done["wake_again"], done["quarantine"]) == ([dead], [], [])
    assert power("status")["sets"][0]["did_not_wake"][0][0] == dead
    # Repaired: the operator wakes it, and it is one of them again.
    site.bmc("mended", dead)
    site.bmc("off", dead)
    assert power("wake", dead)["undrained"] == [dead]
    power.wait_up(dead)
    assert power.apply(4)["quarantined"] == []


def test_what_an_operator_did_is_left_alone_and_wake_all_undoes_what_almanac_did(power: PowerSite) -> None:
    power.backend.set_node_state([LAST], "drain", "disk, bob")
    [asleep] = power.apply(2)["power_down"]
    power.wait_asleep(asleep)
    (power.folder / "store/power/state.json").write_bytes(b"broken")
    held = power.apply(1)
    assert held["hold"]
    assert held["power_down"] == []
    assert "state.json" in held["reason"]
    assert power("wake", "ALL")["woken"] == [asleep]
    power.wait_up(asleep)
    nodes = power.nodes()
    assert nodes[LAST].reason == "disk, bob"
    assert "DRAIN" in nodes[LAST].states
    assert "hold by root: wake ALL" in power.said("status")
    (power.folder / "store/power/state.json").unlink()
    assert power.apply(1)["power_down"] == [], "ALL holds"


@pytest.mark.every_release
def test_slurm_refuses_users_and_takes_orders_of_an_administrator(power: PowerSite) -> None:
    site = power.site
    done = power.apply(3, user="bob", code=5)
    assert any("Invalid user id" in line or "denied" in line for line in done["said"])
    assert all(is_up(node) for node in power.nodes().values())
    change = ("sacctmgr", "-i", "modify", "user", "where", "name=bob", "set")
    site.run("ctl", "root", *change, "adminlevel=Administrator")
    try:
        [asleep] = power.apply(3, user="bob")["power_down"]
        power.wait_asleep(asleep)
    finally:
        site.run("ctl", "root", *change, "adminlevel=None")
