"""What a submission does not say is what Slurm says of it, as in the record of such a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from almanac.config import Tier
from almanac.errors import CommandError
from almanac.records import Request
from telemetry.slurm.defaults import with_defaults

PARTITIONS = (
    b"PartitionName=all AllowGroups=ALL Default=YES QoS=N/A DefaultTime=01:00:00 MaxTime=2-00:00:00 Nodes=n[1-4]\n"
    b"PartitionName=long Default=NO DefaultTime=NONE MaxTime=7-00:00:00 Nodes=n[1-4]\n"
    b"PartitionName=free Default=NO DefaultTime=NONE MaxTime=UNLIMITED Nodes=n[1-4]\n"
)
ASSOCIATIONS = b"ml|ml|\nml|vision|high\nml|both|high\nml|both|low\n"
BY_CONSTRAINT = (Tier("hbm40g", 40960, constraint="hbm40g"),)
REQUEST = Request(user="alice", job_name="x", gpu_count=2)


@dataclass
class Slurm:
    """Answers scontrol and sacctmgr of the cluster lab."""

    faults: tuple[str, ...] = ()
    asked: list[Sequence[str]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str]) -> bytes:
        self.asked.append(argv)
        if argv[0] in self.faults:
            raise CommandError(f"{argv[0]} was not found", "")
        return PARTITIONS if argv[0] == "scontrol" else ASSOCIATIONS


def completed(
    request: Request, *typed: str, tiers: Sequence[Tier] = BY_CONSTRAINT, slurm: Slurm | None = None
) -> Request:
    return with_defaults(request, typed, tiers, "lab", slurm or Slurm())


def test_what_is_not_said_is_slurms_default() -> None:
    expected = replace(REQUEST, partition="all", time_limit_s=3600, account="ml", qos="normal")
    assert completed(REQUEST) == expected


def test_what_is_said_stays() -> None:
    request = replace(REQUEST, partition="long", time_limit_s=60, account="a", qos="q")
    slurm = Slurm()
    assert completed(request, "partition", "time", "account", "qos", slurm=slurm) == request
    assert [argv[0] for argv in slurm.asked] == ["scontrol"]
    assert completed(replace(REQUEST, time_limit_s=None), "time").time_limit_s is None


@pytest.mark.parametrize(
    ("partition", "limit_s"), [("long", 7 * 86400), ("free", None), ("long,all", 7 * 86400), ("gone", None)]
)
def test_the_limit_is_that_of_the_first_partition(partition: str, limit_s: int | None) -> None:
    assert completed(replace(REQUEST, partition=partition)).time_limit_s == limit_s


@pytest.mark.parametrize(("account", "qos"), [("vision", "high"), ("both", ""), ("unknown", "")])
def test_the_qos_is_that_of_the_account_where_it_has_one(account: str, qos: str) -> None:
    found = completed(replace(REQUEST, account=account))
    assert (found.account, found.qos) == (account, qos)


@pytest.mark.parametrize(("tier", "partition"), [("all", "all"), ("long", "")])
def test_a_default_partition_that_is_no_tiers_leaves_the_tier_open(tier: str, partition: str) -> None:
    tiers = (Tier("a", 40960, partition=tier), Tier("b", 81920, partition="free"))
    found = completed(REQUEST, tiers=tiers)
    assert (found.partition, found.time_limit_s) == (partition, 3600)


@pytest.mark.parametrize("faults", [("scontrol",), ("sacctmgr",), ("scontrol", "sacctmgr")])
def test_a_slurm_that_does_not_answer_changes_nothing_that_it_would_tell(faults: tuple[str, ...]) -> None:
    found = completed(REQUEST, slurm=Slurm(faults))
    expected = completed(REQUEST)
    if "scontrol" in faults:
        expected = replace(expected, partition="", time_limit_s=None)
    if "sacctmgr" in faults:
        expected = replace(expected, account="", qos="")
    assert found == expected


def test_answers_that_cannot_be_read_tell_nothing() -> None:
    strange = b"\xff|\n\nPartitionName= Default=YES DefaultTime=soon\nDefault=YES\n"
    assert with_defaults(REQUEST, (), (), "lab", lambda argv: strange) == REQUEST
