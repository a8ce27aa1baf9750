"""almanac-power-off and -on, called by Slurm in the docker cluster: what they refuse, and a node that hangs at boot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from docker_site import SUITES
from power_site import quick_slurm
from power_walk import log_of_power, states, wait_for_states
from processes import wait_until
from sites import Site

pytestmark = [pytest.mark.cluster, pytest.mark.sites(*SUITES)]


@pytest.fixture
def quick(_running_site: Site) -> Iterator[None]:
    """With short timeouts in slurm.conf."""
    with quick_slurm(_running_site):
        yield


def test_nobody_cuts_a_node_by_calling_the_program(site: Site) -> None:
    job = site.sbatch("alice", "-w", "n3", script="#!/bin/sh\nsleep 5\n")
    site.wait_for(job, "RUNNING")
    before = log_of_power(site).count('"result": "refused"')
    site.run("ctl", "slurm", "almanac-power-off", "n[2-3]")
    wait_until("two refusals", lambda: log_of_power(site).count('"result": "refused"') == before + 2, 30)
    assert site.run("ctl", "root", "bmc", "status", "n2", "n3").stdout == "n2 on\nn3 on\n"
    site.wait_for(job, "COMPLETED")
    assert site.run("ctl", "alice", "almanac-power-off", "n3", check=False).rc == 3


def test_a_node_that_hangs_at_boot_is_cut_and_boots_the_next_time(quick: None, site: Site) -> None:
    """Slurm gives it up after ResumeTimeout and calls ResumeFailProgram."""
    site.run("ctl", "root", "bmc", "broken", "n2")
    site.run("ctl", "root", "scontrol", "update", "nodename=n2", "state=power_down_asap")
    wait_for_states(site, "n2", {"IDLE", "POWERED_DOWN"}, 60)
    site.run("ctl", "root", "scontrol", "update", "nodename=n2", "state=power_up")

    def power() -> str:
        return site.run("ctl", "root", "bmc", "status", "n2").stdout

    wait_until("the BMC to switch n2 on", lambda: power() == "n2 on\n", 60)
    wait_until("n2 to be given up and cut", lambda: "DOWN" in states(site, "n2") and power() == "n2 off\n", 120)
    site.run("ctl", "root", "bmc", "mended", "n2")
    site.run("ctl", "root", "scontrol", "update", "nodename=n2", "state=resume")
    site.run("ctl", "root", "scontrol", "update", "nodename=n2", "state=power_up")
    wait_for_states(site, "n2", {"IDLE"}, 60)
