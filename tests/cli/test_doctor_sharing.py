"""doctor on gres/mps and gres/shard: several users, several GPUs, and no limit of GPU memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from almanac.config_file import parse_config
from cli.app import App
from cli.doctor.findings import Check
from cli.doctor.main import PROBES

Examine = Callable[..., list[Check]]
MPS = "gpu:a100:1(S:0-1),mps:a100:100(S:0-1)"
MPS_OF_FOUR = "gpu:a100:4(S:0-1),mps:400(S:0-1)"
SHARD = "gpu:a100:4(S:0),shard:a100:32(S:0)"


@pytest.fixture
def examine(tmp_path: Path) -> Examine:
    def examine(
        nodes: dict[str, str],
        users: str | None = "ann\nbob\nann\n",
        exclusive: str = "NO",
        release: str = "22.05.8",
        oversubscribe: str = "NO",
        tracked: str = "cpu,gres/gpu,gres/mps,gres/shard",
    ) -> list[Check]:
        rows = [
            {"name": name, "state": ["IDLE"], "partitions": ["gpu"], "gres": gres, "hostname": name}
            for name, gres in nodes.items()
        ]
        (tmp_path / "nodes").write_text(json.dumps({"nodes": rows}))
        (tmp_path / "users").write_text(users or "")
        partition = (
            f"PartitionName=gpu AllowGroups=ALL ExclusiveUser={exclusive} GraceTime=0 OverSubscribe={oversubscribe} "
            "State=UP"
        )
        scontrol = (
            f'case "$*" in *partition*) echo "{partition}";; '
            f"*) printf 'ClusterName = x\\nSLURM_VERSION = {release}\\nAccountingStorageTRES = {tracked}\\n';; esac"
        )
        sacct = "exit 1" if users is None else f"cat {tmp_path / 'users'}"
        for name, body in (("scontrol", scontrol), ("sinfo", f"cat {tmp_path / 'nodes'}"), ("sacct", sacct)):
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(0o755)
        app = App()
        app.__dict__["config"] = parse_config({"slurm": {"bin_dir": str(tmp_path)}})
        return list(PROBES["GPU sharing"](app))

    return examine


def test_nothing_without_shared_gpus(examine: Examine) -> None:
    assert examine({"n1": "gpu:a100:4(S:0-1)", "n2": "", "n3": "gpu:mps:2,lustre:1"}) == []


def test_mps_of_several_users(examine: Examine) -> None:
    [check] = examine({"n1": MPS})
    assert (check.status, check.details) == ("warn", {"nodes": ["n1"]})
    assert check.said == (
        "1 node (n1) with gres/mps has 2 users a day: an MPS server takes one user at a time, and a fault of one job "
        "ends all jobs on its GPU"
    )
    assert check.todo == "set ExclusiveUser=YES on their partitions"


@pytest.mark.parametrize("users", ["ann\nbob\n", None])
@pytest.mark.parametrize("setting", [{"exclusive": "YES"}, {"oversubscribe": "EXCLUSIVE"}])
def test_mps_of_one_user_at_a_time_is_in_order(examine: Examine, users: str | None, setting: dict[str, str]) -> None:
    [check] = examine({"n1": MPS}, users, **setting)
    assert (check.status, check.said) == ("ok", "1 node (n1): one user at a time, one GPU each")


@pytest.mark.parametrize("users", ["ann\nann\n", ""])
@pytest.mark.parametrize("oversubscribe", ["NO", "FORCE:4", "YES:4"])
def test_where_others_may_come_one_user_is_not_promised(examine: Examine, users: str, oversubscribe: str) -> None:
    [check] = examine({"n1": MPS}, users, oversubscribe=oversubscribe)
    assert (check.status, check.said) == ("ok", "1 node (n1): no second user in the last day, one GPU each")
    [check] = examine({"n1": SHARD}, users, oversubscribe=oversubscribe)
    assert check.said.endswith("one job can take the memory of the same user's other jobs")


def test_without_accounting_several_users_are_assumed(examine: Examine) -> None:
    [check] = examine({"n1": MPS}, None)
    assert "has several users" in check.said
    [check] = examine({"n1": SHARD}, None)
    assert check.said.endswith("and several users run there")


@pytest.mark.parametrize(("gres", "kind"), [(MPS, "mps"), (SHARD, "shard")])
def test_parts_of_gpus_that_accounting_does_not_record(examine: Examine, gres: str, kind: str) -> None:
    found = examine({"n1": gres}, exclusive="YES", tracked="cpu,gres/gpu")
    assert f"add gres/{kind} to AccountingStorageTRES in slurm.conf" in [check.todo for check in found]
    assert not any("TRES" in check.todo for check in examine({"n1": gres}, tracked=f"cpu,gres/gpu,gres/{kind}:a100"))


def test_mps_on_several_gpus_of_a_node(examine: Examine) -> None:
    [check] = examine({"n1": MPS_OF_FOUR, "n2": MPS}, exclusive="YES")
    assert check.said == (
        "1 node (n1) with gres/mps has several GPUs: Slurm gives out mps on one GPU of a node at a time, so the others "
        "stay idle while jobs wait"
    )
    assert "almanac-pack" in check.todo


def test_both_faults_are_named(examine: Examine) -> None:
    found = examine({"n1": MPS_OF_FOUR, "n2": MPS_OF_FOUR})
    assert [check.said.partition(":")[0] for check in found] == [
        "2 nodes (n1, n2) with gres/mps have 2 users a day",
        "2 nodes (n1, n2) with gres/mps have several GPUs",
    ]


def test_shard_has_no_memory_limit(examine: Examine) -> None:
    [check] = examine({"n1": SHARD})
    assert check.said == (
        "1 node (n1): gres/shard has no limit of GPU memory: one job can take the memory of other jobs, and 2 users "
        "a day run there"
    )
    assert check.todo.startswith("set ExclusiveUser=YES on their partitions, or offer MIG slices instead")
    [check] = examine({"n1": SHARD}, exclusive="YES")
    assert check.said.endswith("one job can take the memory of the same user's other jobs")
    assert check.todo.startswith("offer MIG slices instead, or for runs of one user, use almanac-pack")
