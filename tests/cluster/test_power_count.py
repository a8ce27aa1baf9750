"""The count actuator on Slurm 24.11 and later: Slurm powers idle nodes down itself, and leaves as many on as told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from docker_site import SUITES
from power_site import PowerSite, is_up, power_site, quick_slurm
from sites import Site

COUNTING = [name for name in SUITES if name >= "24"]
"""SuspendExcNodes counts powered nodes from Slurm 24.05 on."""
pytestmark = [pytest.mark.cluster, pytest.mark.every_release, pytest.mark.sites(*COUNTING)]


@pytest.fixture(scope="module")
def counting(_running_site: Site) -> Iterator[Site]:
    """Slurm powers a node down that is idle for 5 s, but for four of these: nothing, until almanac counts."""
    with quick_slurm(_running_site, SuspendTime="5", SuspendExcNodes="n[1-4]:4"):
        yield _running_site


@pytest.fixture
def power(counting: Site, site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[PowerSite]:
    with power_site(site, tmp_path, capsys) as made:
        yield made


def test_slurm_powers_down_to_the_count_which_is_told_again_after_a_reconfigure(power: PowerSite) -> None:
    site = power.site
    long = site.sbatch("alice", "-w", "n1", "-t", "30", script="#!/bin/sh\nsleep 600\n")
    site.wait_for(long, "RUNNING")
    assert len(power.apply(2)["power_down"]) == 2
    assert power.backend.suspend_exceptions() == "n[1-4]:2"
    nodes = power.wait_for("two asleep", lambda nodes: sum("POWERED_DOWN" in n.states for n in nodes.values()) == 2)
    assert is_up(nodes["n1"])

    # Every reconfigure returns to slurm.conf's count; the next run tells its own again.
    site.run("ctl", "root", "scontrol", "reconfigure")
    site.wait_for_nodes()
    assert power.backend.suspend_exceptions() == "n[1-4]:4"
    assert power.apply(2)["said"] == []
    assert power.backend.suspend_exceptions() == "n[1-4]:2"

    # A higher target wakes by name, and the count keeps what woke on.
    assert len(power.apply(4)["wake"]) == 2
    assert power.backend.suspend_exceptions() == "n[1-4]:4"
    power.wait_up("n1", "n2", "n3", "n4")

    # A hold: nothing may go.
    power("wake", "n1")
    power.said("hold", "--why", "test")
    assert power.apply(1)["hold"]
    assert power.backend.suspend_exceptions() == "n[1-4]:4"
    job = site.job(long)
    assert (job["JobState"], job["Restarts"]) == ("RUNNING", "0")
