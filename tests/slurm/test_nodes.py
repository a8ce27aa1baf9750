"""Nodes of recorded outputs: what they have, what is free, and whether they take jobs; by commands and by pyslurm.

Defaults of partitions are those in the record of a job, and GPU types those that nodes offer now.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from almanac.errors import CommandError
from almanac.records import JobRequest
from almanac.submit_config import Tier
from slurm.nodes import (
    NodeShape,
    PartitionGpus,
    SlurmNode,
    node_shapes,
    nodes_of,
    partition_gpus,
    read_nodes,
    smallest_shape,
    tiers_now,
    with_defaults,
)
from slurm.pyslurm_backend import PyslurmBackend

FIXTURES = Path(__file__).parent / "fixtures"


def recorded(release: str, name: str) -> list[SlurmNode]:
    return read_nodes(lambda argv: (FIXTURES / release / name).read_bytes())


@pytest.mark.parametrize("release", ["24.11.5", "26.05.5"])
def test_free_slices(release: str) -> None:
    nodes = recorded(release, "mig_nodes.json")
    assert {node.name: node.free_gpus for node in nodes} == {
        "n1": {"1g.10gb": 0},
        "n2": {"3g.40gb": 2},
        "n3": {"1g.10gb": 0, "2g.20gb": 1, "a100": 1},
    }
    assert (nodes[2].free_cpus, nodes[2].memory_mib, nodes[2].free_memory_mib) == (31, 64000, 63900)
    assert all(node.takes_jobs for node in nodes)


def test_a_gpu_that_is_given_out_in_shards_is_not_free() -> None:
    nodes = {node.name: node for node in recorded("25.11.7", "odd_nodes.json")}
    assert {name: node.free_gpus for name, node in nodes.items()} == {
        f"n{number}": {"a100": int(number in (4, 6))} for number in range(1, 7)
    }
    assert [(name, node.reservation) for name, node in nodes.items() if not node.takes_jobs] == [("n4", "maint")]
    [full] = recorded("25.11.7", "shard_nodes.json")
    assert (full.gpus, full.free_gpus) == ({"a100": 4}, {"a100": 0})


def test_free_gpus_by_text() -> None:
    for gres, used, free in [
        ("gpu:4", "gpu:(null):1(IDX:0)", {"": 3}), ("gpu:4", "gpu:a100:1(IDX:0)", {"": 3}),
        ("gpu:3090:2(S:0-1)", "gpu:3090:2(IDX:0-1)", {"3090": 0}),
        ("gpu:a100:4,mps:a100:400", "gpu:a100:1(IDX:3),mps:a100:50(50/100,0/100,0/100,0/100)", {"a100": 2}),
        ("gpu:a100:2,gpu:h100:2,shard:8", "gpu:a100:0(IDX:N/A),gpu:h100:0(IDX:N/A),shard:1", {"a100": 1, "h100": 1}),
        ("gpu:a100:2,shard:8", "gpu:a100:1(IDX:0),shard:a100:5", {"a100": 0}),
        ("gpu:a100:2,shard:8", "gpu:a100:1(IDX:0),shard:a100:many", {}),
        ("gpu:a100:2", "gpu:a100:3(IDX:0-2)", {"a100": 0}), ("gpu:a100:2", "", {}), ("gpu:a100:2", "gpu:0", {}),
        ("gpu:a100:2", "nvme:0", {}), ("gpu:a100:2,gpu:h100:2", "gpu:a100:0", {}), ("(null)", "gpu:0", {}),
    ]:  # fmt: skip
        assert SlurmNode("n1", frozenset(), gres=gres, gres_used=used).free_gpus == free


@pytest.mark.parametrize(
    "holes",
    [
        {"gres_used": None}, {"gres_used": "gpu:1g.10gb:x"}, {"gres_used": "gpu"}, {"gres_used": "N/A"},
        {"gres": ""}, {"gres": "(null)"}, {"gres": "gpu:1g.10gb:1:2"},
    ],
)  # fmt: skip
def test_an_unreadable_node_has_nothing_free(holes: dict[str, Any]) -> None:
    records = json.loads((FIXTURES / "24.11.5/mig_nodes.json").read_bytes())["nodes"]
    assert not any(node.free_gpus for node in nodes_of([{**record, **holes} for record in records]))


@pytest.mark.parametrize("release", ["22.05.8", "24.11.5", "26.05.5"])
def test_when_a_node_was_busy_and_booted_is_read_of_every_release(release: str) -> None:
    [node] = [node for node in recorded(release, "nodes.json") if node.name == "n4"]
    assert 1_795_230_000 < node.boot_s <= node.last_busy_s < 1_795_231_000
    assert node.states == {"MIXED", "DRAIN", "POWER_DOWN"}
    assert (node.features, node.partitions, node.gres) == (("gpu", "hbm80g"), ("all", "hbm80"), "gpu:a100:4")


def test_times_that_are_missing_are_unknown_not_1970() -> None:
    unset = {"set": False, "infinite": False, "number": 5}
    [node] = nodes_of([{"name": "n1", "state": ["IDLE"], "last_busy": 0, "boot_time": unset, "reservation": "r"}])
    assert node == SlurmNode("n1", frozenset({"IDLE"}), reservation="r")


def test_each_release_is_asked_until_it_lists_nodes() -> None:
    asked: list[str] = []

    def slurm(answers: dict[str, bytes]) -> Any:
        def run(argv: Sequence[str]) -> bytes:
            asked.append(" ".join(argv))
            if asked[-1] not in answers:
                raise CommandError("unrecognized option")
            return answers[asked[-1]]

        return run

    one = b'{"nodes": [{"name": "n1", "state": "idle"}]}'
    assert read_nodes(slurm({"sinfo --json": one}), ["n1"])[0].states == {"IDLE"}
    assert asked == ["scontrol show nodes n1 --json", "sinfo --json"]
    asked.clear()
    assert read_nodes(slurm({"scontrol show nodes --json": b'{"nodes": []}'})) == []
    assert asked == ["scontrol show nodes --json"]
    with pytest.raises(CommandError, match="list of nodes"):
        read_nodes(slurm({"sinfo --json": b'{"sinfo": []}'}))


def test_a_lost_slurmctld_is_asked_once() -> None:
    """Each command waits 9 s for it."""
    asked: list[str] = []

    def lost(argv: Sequence[str]) -> bytes:
        asked.append(argv[0])
        raise CommandError("slurm_load_node error: Unable to contact slurm controller (connect failure)")

    with pytest.raises(CommandError, match="Unable to contact"):
        read_nodes(lost)
    assert asked == ["scontrol"]


def as_pyslurm(record: dict[str, Any]) -> SimpleNamespace:
    """The node as pyslurm.Node 25.11 gives it: its to_gres_dict of the same texts, and no reservation."""

    def gres_dict(text: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, kind, count, index in re.findall(r"(\w+):([\w.]+):([0-9]+)(?:\(IDX:([^)]*)\)|\([^)]*\))?", text):
            found[f"{name}:{kind}"] = {"count": count, "indexes": index} if index else int(count)
        return found

    return SimpleNamespace(
        name=record["name"], state="+".join(record["state"]), available_features=record["features"],
        partitions=record["partitions"], reason=record["reason"] or None, total_cpus=record["cpus"],
        configured_gres=gres_dict(record["gres"]), allocated_gres=gres_dict(record["gres_used"]),
        effective_cpus=record["effective_cpus"], allocated_cpus=record["alloc_cpus"],
        real_memory=record["real_memory"], allocated_memory=record["alloc_memory"],
        last_busy_time=record["last_busy"]["number"], boot_time=record["boot_time"]["number"],
    )  # fmt: skip


def test_pyslurm_gives_the_same_nodes() -> None:
    """But the order of shards on GPUs, which it leaves out: a GPU more may count as in use."""
    records = json.loads((FIXTURES / "25.11.7/odd_nodes.json").read_bytes())["nodes"]
    pyslurm = SimpleNamespace(
        Nodes=SimpleNamespace(load=lambda: {each["name"]: as_pyslurm(each) for each in records}), RPCError=OSError
    )
    line = "ReservationName={} StartTime={} EndTime={} Duration=1 Nodes={} NodeCnt=1 Features=(null)\n"
    shown = (line.format("maint", 900, 2000, "n4") + line.format("later", 2000, 3000, "n3")).encode()
    commands: Any = lambda argv: shown  # noqa: E731
    nodes = PyslurmBackend(commands, pyslurm, now=lambda: 1000.0).nodes()
    by_json = nodes_of(records)
    for name in ("name", "states", "features", "partitions", "reason", "reservation", "cpu_count", "gpus",
                 "free_cpus", "memory_mib", "free_memory_mib", "last_busy_s", "boot_s", "takes_jobs"):  # fmt: skip
        assert [getattr(node, name) for node in nodes] == [getattr(node, name) for node in by_json], name
    free = [node.free_gpus["a100"] for node in nodes]
    assert (free, [node.free_gpus["a100"] for node in by_json]) == ([0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 0, 1])


SINFO = b"""\
n[1-2] 128 256000 2 gpu:a100:4(S:0-1) gpu,hbm80g
n3 64 n/a 1 gpu:a100:2,gpu:1g.10gb:7 (null)
n4 32 128000 1 (null) (null)
n[ 1 1 1 gpu:1 (null)
n5 64+ 1 1 gpu:1 (null)
"""


def test_the_size_of_nodes_is_known_only_where_sinfo_says_it() -> None:
    asked: list[Sequence[str]] = []

    def sinfo(argv: Sequence[str]) -> bytes:
        asked.append(argv)
        return SINFO

    found = node_shapes(sinfo)
    assert "-e" in asked[0], "else sinfo prints the least of several nodes"
    features, a100 = frozenset({"gpu", "hbm80g"}), frozenset({"a100"})
    large, small = NodeShape(128, 256000, 2, 4, features, a100), NodeShape(32, 128000, 1, 0)
    mixed = NodeShape(64, None, 1, None, types=a100 | {"1g.10gb"})
    assert found == {
        "n1": large, "n2": large, "n3": mixed, "n4": small, "n5": NodeShape(None, 1, 1, 1, types=frozenset({""}))
    }  # fmt: skip
    assert smallest_shape([large, found["n3"]]) == NodeShape(64, None, 2, None)
    assert smallest_shape([large, small]) == NodeShape(32, 128000, 2, 0)
    assert smallest_shape([large, None]) == smallest_shape([]) == NodeShape(None, None, None, None)


PARTITIONS = (
    b"PartitionName=all AllowGroups=ALL Default=YES QoS=N/A DefaultTime=01:00:00 MaxTime=2-00:00:00 Nodes=n[1-4]\n"
    b"PartitionName=long Default=NO DefaultTime=NONE MaxTime=7-00:00:00 Nodes=n[1-4]\n"
    b"PartitionName=free Default=NO DefaultTime=NONE MaxTime=UNLIMITED Nodes=n[1-4]\n"
)
ASSOCIATIONS = b"ml|ml|\nml|vision|high\nml|both|high\nml|both|low\n"
BY_CONSTRAINT = (Tier("hbm40g", 40960, constraint="hbm40g"),)
REQUEST = JobRequest(user="alice", job_name="x", gpu_count=2)


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
    request: JobRequest, *typed: str, tiers: Sequence[Tier] = BY_CONSTRAINT, slurm: Slurm | None = None
) -> JobRequest:
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


PARTITIONS_SINFO = """\
all*|idle|gpu:a100:3,gpu:1g.10gb:7(S:0-1)
all*|drain|gpu:2g.20gb:3
all*|mix-|gpu:a100:4
down|down*|gpu:3g.40gb:2
cloud|idle~|gpu:4g.40gb:1
cpu|idle|(null)
odd|idle|gpu:2,nvme:1,gpu:1g.5gb:0
broken
"""
SLICE, GONE, WHOLE = (
    Tier(name="slice", capacity_mib=9728, gres="1g.10gb"),
    Tier(name="gone", capacity_mib=19968, gres="2g.20gb"),
    Tier(name="whole", capacity_mib=81920, gres="a100"),
)


def says(text: str) -> object:
    def commands(argv: Sequence[str]) -> bytes:
        assert argv[0] == "sinfo"
        return text.encode()

    return commands


def test_types_by_partition_and_state() -> None:
    assert partition_gpus(says(PARTITIONS_SINFO)) == [  # type: ignore[arg-type]
        PartitionGpus("all", True, ("a100", "1g.10gb")),
        PartitionGpus("all", False, ("2g.20gb",)),
        PartitionGpus("all", True, ("a100",)),
        PartitionGpus("down", False, ("3g.40gb",)),
        PartitionGpus("cloud", True, ("4g.40gb",)),
        PartitionGpus("odd", True, ("",)),
    ]


def test_a_type_on_no_node_in_service_is_not_advised() -> None:
    now = tiers_now((SLICE, GONE, WHOLE), says(PARTITIONS_SINFO))  # type: ignore[arg-type]
    assert (now.tiers, now.missing) == ((SLICE, WHOLE), (GONE,))
    nothing = tiers_now((SLICE, GONE, WHOLE), says(""))  # type: ignore[arg-type]
    assert nothing.tiers == ()


def test_where_slurm_does_not_answer_no_slice_is_advised() -> None:
    def fails(argv: Sequence[str]) -> bytes:
        raise CommandError("sinfo: lost", "start it")

    now = tiers_now((SLICE, WHOLE), fails)
    assert (now.tiers, now.missing) == ((WHOLE,), (SLICE,))
    assert "sinfo" in now.why_not


def test_without_slices_slurm_is_not_asked() -> None:
    def never(argv: Sequence[str]) -> bytes:
        pytest.fail("asked")

    assert tiers_now((WHOLE,), never).tiers == (WHOLE,)
    mig_partition = Tier(name="mig", capacity_mib=9728, partition="mig", compute_slices=1)
    assert tiers_now((mig_partition,), says("")).tiers == (mig_partition,)  # type: ignore[arg-type]
