"""almanac-power-off and -on, called by Slurm: what they refuse, and nodes that hang at boot.

The BMCs are OpenIPMI's simulator (n1) and sushy-tools' emulator of Redfish (the other nodes).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from power_site import quick_slurm
from power_walk import log_of_power, states, wait_for_states
from processes import wait_until
from sites import Site

pytestmark = [pytest.mark.cluster, pytest.mark.sites("native")]


@pytest.fixture
def quick(_running_site: Site) -> Iterator[None]:
    """With short timeouts in slurm.conf."""
    with quick_slurm(_running_site):
        yield


def test_nobody_cuts_a_node_by_calling_the_program(site: Site) -> None:
    job = site.sbatch("alice", "-w", "n3", script="#!/bin/sh\nsleep 5\n")
    site.wait_for(job, "RUNNING")
    before = log_of_power(site).count('"result": "refused"')
    site.run("ctl", "slurm", site.power_off, "n[2-3]")
    wait_until("two refusals", lambda: log_of_power(site).count('"result": "refused"') == before + 2)
    assert site.run("ctl", "slurm", site.power_off, "--status", "n[1-4]").stdout == "n1: on\nn2: on\nn3: on\nn4: on\n"
    assert site.bmc("status", "n2", "n3") == "n2 on\nn3 on\n"
    site.wait_for(job, "COMPLETED")
    assert site.run("ctl", "alice", site.power_off, "n3", check=False).rc == 3


def test_nodes_that_hang_at_boot_are_cut_and_boot_the_next_time(quick: None, site: Site) -> None:
    """Slurm gives them up after ResumeTimeout and calls ResumeFailProgram."""
    nodes = ("n1", "n2")

    def tell(state: str) -> None:
        site.run("ctl", "root", "scontrol", "update", f"nodename={','.join(nodes)}", f"state={state}")

    def is_all(power: str) -> bool:
        return site.bmc("status", *nodes) == "".join(f"{node} {power}\n" for node in nodes)

    site.bmc("broken", *nodes)
    tell("power_down_asap")
    for node in nodes:
        wait_for_states(site, node, {"IDLE", "POWERED_DOWN"})
    tell("power_up")
    wait_until("the BMCs to switch them on", lambda: is_all("on"))
    given_up = lambda: all("DOWN" in states(site, node) for node in nodes) and is_all("off")  # noqa: E731
    wait_until("the nodes to be given up and cut", given_up)
    site.bmc("mended", *nodes)
    tell("resume")
    tell("power_up")
    for node in nodes:
        wait_for_states(site, node, {"IDLE"})
    assert log_of_power(site).count('"result": "done"') >= 6
