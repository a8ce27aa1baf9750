"""A cloud without capacity: nodes are asked for again after growing pauses, and none is given up."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm, PowerSite

from slurm.nodes import SlurmNode
from slurm_hooks.power.failures import failures_of, pause_s
from slurm_hooks.power.nodes import NodeState, PowerState

TEN_MIN = 600


@pytest.fixture
def site(tmp_path: Path) -> PowerSite:
    return PowerSite(FakeSlurm([f"n{number}" for number in range(1, 9)]), tmp_path / "power")


def test_a_cloud_without_capacity_is_asked_again_after_growing_pauses_and_no_node_is_given_up(site: PowerSite) -> None:
    site.run(target=5)
    site.slurm.pass_time(TEN_MIN)
    site.slurm.dead = site.slurm.cloud = {"n3"}
    asked, now_s = [], site.slurm.now_s
    site.run(target=8)
    for _ in range(24 * 6):
        site.slurm.pass_time(TEN_MIN)
        failures = site.run(target=8).plan.failures
        assert failures.give_up == () and failures.again in ((), ("n3",))
        if failures.again:
            asked.append((site.slurm.now_s - now_s) // TEN_MIN)
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert asked[0] == 1 and pauses[:5] == [1, 2, 4, 8, 16] and max(pauses) == 36
    assert "DRAIN" not in site.slurm.states("n3") and site.run(target=8).plan.failures.later == ("n3",)
    site.slurm.dead.clear()
    for _ in range(38):
        site.slurm.pass_time(TEN_MIN)
        site.run(target=8)
    assert site.slurm.asleep() == set() and site.folder.load("lab").of("n3").retries == 0


@pytest.mark.parametrize("reason", [
    "(Code:InsufficientInstanceCapacity)Error setting up instance", "GCP Error: ZONE_RESOURCE_POOL_EXHAUSTED",
    "SkuNotAvailable", "QuotaExceeded",
])  # fmt: skip
@pytest.mark.parametrize("retries", [0, 1, 2, 9, 60])
def test_what_a_resume_program_says_of_capacity_is_never_a_broken_node(reason: str, retries: int) -> None:
    node = SlurmNode("n1", frozenset({"DOWN", "POWERED_DOWN"}), reason=reason)
    memory = PowerState(nodes={"n1": NodeState(changed_s=1000, is_ours=True, retries=retries)})
    waits_s = pause_s(retries)
    assert 0 <= waits_s <= 6 * 3600
    assert failures_of(["n1"], {"n1": node}, memory, 1000 + waits_s).again == ("n1",)
    found = failures_of(["n1"], {"n1": node}, memory, 999 + waits_s)
    assert found.give_up == () and found.later == ("n1",)
