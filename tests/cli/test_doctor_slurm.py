"""doctor on what Slurm answers: backend, host names, MIG slices, shared GPUs, and jobs that accept any GPU type."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from advisor.artefacts import current_version, save
from advisor.service import train
from advisor.types.learning import SpeedTable
from almanac.config import Config
from almanac.config_file import parse_config
from almanac.errors import DamageWarning
from cli.app import App
from cli.doctor import Check, Probe
from cli.doctor.prometheus import check_hosts
from cli.doctor.site import PROBES
from cli.doctor.slurm import BACKEND, PLACEMENT, SHARING, SLICES
from telemetry.history import HISTORY
from telemetry.store.store import Store

Examine = Callable[..., list[Check]]
Backend = Callable[..., Check]
SCONTROL = """
case "$*" in
--version) echo "slurm-wlm 25.11.7";;
"show config") {config};;
"show nodes --json") echo '{{"nodes": [{{"name": "n1"}}, {{"name": "n2"}}]}}';;
*) exit 9;;
esac
"""
CONFIG = "echo ClusterName=lab; echo 'SLURM_VERSION = 25.11.7'"
AWAY = "echo 'slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
PYSLURM = """
from types import SimpleNamespace as Space
class RPCError(Exception): pass
class Job: gpus = {}
node = Space(name="n1", state="IDLE", available_features=[], configured_gres={}, partitions=[], reason=None,
             total_cpus=8, effective_cpus=8, allocated_cpus=0, real_memory=64, allocated_memory=0, allocated_gres={},
             last_busy_time=None, boot_time=None)
Nodes = Space(load=lambda: {"n1": node})
slurmctld = Space(Config=Space(load=lambda: Space(cluster_name="lab")))
"""


@pytest.fixture
def examine(tmp_path: Path) -> Examine:
    """The findings of a check, with programs that answer as Slurm's do (bodies of shell scripts by name)."""

    def examine(
        check: Probe | str,
        programs: dict[str, str],
        store: Path | None = None,
        **config: Any,
    ) -> list[Check]:
        for name, body in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(0o755)
        app = App(None, str(store or tmp_path / "no-store"), "x")
        slurm = {"bin_dir": str(tmp_path), **config.pop("slurm", {})}
        app.__dict__["config"] = parse_config({"slurm": slurm, **config})
        return list((PROBES[check] if isinstance(check, str) else check)(app))

    return examine


def says(text: str) -> str:
    """A program that prints the text."""
    return f"cat <<'END'\n{text.rstrip()}\nEND"


@pytest.fixture
def backend(examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """The finding on a backend. config: what scontrol does when it is asked for the settings."""

    def backend(name: str, pyslurm: str = "", config: str = CONFIG, mode: str = "observe") -> Check:
        (tmp_path / "pyslurm.py").write_text(pyslurm)
        programs = {"scontrol": SCONTROL.format(config=config), "sinfo": "echo '{}'"}
        (check,) = examine(BACKEND, programs, slurm={"backend": name}, priority={"mode": mode})
        return check

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pyslurm", raising=False)
    yield backend
    sys.modules.pop("pyslurm", None)


def test_commands_that_work_are_in_order(backend: Backend) -> None:
    check = backend("commands")
    assert (check.status, check.todo) == ("ok", "")
    assert check.said == "commands: scontrol 25.11.7 reaches slurmctld 25.11.7 of lab, 2 nodes"
    assert check.details["slurmctld"] == "25.11.7"


def test_a_pyslurm_that_fits_is_in_order(backend: Backend) -> None:
    check = backend("pyslurm", PYSLURM + "__version__ = '25.11.2'\n")
    assert (check.status, check.todo) == ("ok", "")
    assert check.said == "pyslurm: pyslurm 25.11.2 reaches slurmctld 25.11.7 of lab, 1 node"


@pytest.mark.parametrize(
    ("pyslurm", "config", "said"),
    [
        (PYSLURM + "__version__ = '25.05.0'\n", CONFIG, "pyslurm: pyslurm 25.05.0 does not support Slurm 25.11.7"),
        ("import os\nos._exit(1)\n", CONFIG, "pyslurm: pyslurm crashed with exit code 1"),
        ("raise ImportError('no module')\n", CONFIG, "pyslurm: pyslurm cannot be imported: no module"),
        (PYSLURM, AWAY, "Unable to contact slurm controller"),
    ],
)
def test_a_pyslurm_that_does_not_work_is_a_fault(backend: Backend, pyslurm: str, config: str, said: str) -> None:
    check = backend("pyslurm", pyslurm, config)
    assert check.status == "fail"
    assert said in check.said
    assert check.todo


@pytest.mark.parametrize(("mode", "status"), [("observe", "warn"), ("apply", "fail")])
def test_commands_that_do_not_work_are_a_fault_where_factors_are_set(backend: Backend, mode: str, status: str) -> None:
    check = backend("commands", config=AWAY, mode=mode)
    assert check.status == status
    assert check.said.startswith("commands: scontrol show config failed with exit code 1: ")
    assert check.todo


def hosts_of(examine: Examine, lines: str, hosts: Collection[str]) -> list[Check]:
    """lines: of sinfo (NodeName, NodeHostName, GRES, state); hosts: of telemetry."""
    return examine(lambda app: check_hosts(app, hosts), {"sinfo": says(lines)})


def sinfo(*nodes: str, state: str = "idle") -> str:
    return "".join(f"{node} {node} gpu:a100:4(S:0-1) {state}\n" for node in nodes)


def test_names_that_fit_are_in_order(examine: Examine) -> None:
    lines = (
        sinfo("nl1", "nl2", "nl2")
        + sinfo("nl3", state="idle~")
        + sinfo("nl4", state="down*")
        + "cpu1 cpu1 (null) idle\n"
    )
    [check] = hosts_of(examine, lines, {"NL1", "nl2.cluster.example"})
    assert (check.status, check.said) == ("ok", "Prometheus and Slurm know the same 2 GPU nodes")


def test_gpu_nodes_without_counters_are_counted_and_the_first_are_named(examine: Examine) -> None:
    [check] = hosts_of(examine, sinfo(*(f"n{number}" for number in range(1, 7))), {"n1"})
    assert (check.status, check.said) == ("warn", "no GPU counters from 5 GPU nodes (n2, n3, n4, n5, ...) of Slurm")
    assert "scrape_configs" in check.todo
    assert check.details["nodes"] == ["n2", "n3", "n4", "n5", "n6"]


def test_a_host_that_slurm_does_not_know_is_named_printably(examine: Examine) -> None:
    hostile = "x\x1b[31m\n"
    [check] = hosts_of(examine, sinfo("n1"), {"n1", hostile})
    assert check.said == "1 host (x?[31m?) with GPU counters is no GPU node of Slurm"
    assert check.details["hosts"] == [hostile]


def test_a_node_host_name_is_not_taken_for_a_node_name(examine: Examine) -> None:
    silent, strange = hosts_of(examine, "gpu-st-1 ip-10-0-0-5 gpu:1 idle\n", {"IP-10-0-0-5.ec2.internal"})
    assert silent.said == "no GPU counters from 1 GPU node (gpu-st-1) of Slurm; gpu-st-1 has NodeHostName ip-10-0-0-5"
    assert "relabel_configs" in silent.todo
    assert strange.details["hosts"] == ["IP-10-0-0-5.ec2.internal"]


def test_hosts_of_one_short_name_are_said_with_the_setting_that_tells_them_apart(examine: Examine) -> None:
    unclear, silent = hosts_of(examine, sinfo("n1"), {"n1.a.example", "n1.b.example"})
    assert unclear.said.startswith("2 hosts (n1.a.example, n1.b.example) may be one of several nodes")
    assert "host_suffix" in unclear.todo
    assert "(n1)" in silent.said


def test_nothing_is_said_without_slurm_or_counters(examine: Examine, tmp_path: Path) -> None:
    assert hosts_of(examine, sinfo("n1"), set()) == []
    assert hosts_of(examine, "", {"n1"}) == []
    assert examine(lambda app: check_hosts(app, {"n1"}), {}, slurm={"bin_dir": str(tmp_path / "nowhere")}) == []


SLICE = {"name": "slice", "capacity_mib": 9728, "gpu_model": "A100-80", "gres": "1g.10gb"}


def slices(examine: Examine, lines: str, *tiers: dict[str, object], code: int = 0) -> list[Check]:
    return examine(SLICES, {"sinfo": f"{says(lines)}\nexit {code}"}, tiers=list(tiers))


def test_untyped_requests_on_a_mixed_partition(examine: Examine) -> None:
    lines = "gpu*|idle|gpu:a100:4\ngpu*|mix|gpu:1g.10gb:7\nlong|idle|gpu:a100:4\ntwo|idle|gpu:a100:2,gpu:1g.10gb:14\n"
    [check] = slices(examine, lines, SLICE)
    assert check.status == "warn"
    assert check.said == "2 partitions (gpu, two) have whole GPUs and MIG slices: untyped requests land on slices"
    assert "job_submit.lua" in check.todo and "partition of their own" in check.todo


def test_partitions_of_slices_alone_are_in_order(examine: Examine) -> None:
    [check] = slices(examine, "gpu|idle|gpu:a100:4\nmig|idle|gpu:1g.10gb:7\ngpu|drain|gpu:1g.10gb:7\n", SLICE)
    assert (check.status, check.said) == ("ok", "advised: slice")


def test_tiers_that_no_node_has_and_slices_that_no_tier_names(examine: Examine) -> None:
    wrong = {**SLICE, "name": "wrong", "gres": "1g.5gb"}
    found = slices(examine, "mig|idle|gpu:2g.20gb:3\n", SLICE, wrong)
    assert [check.status for check in found] == ["warn"] * 3
    assert [check.said for check in found] == [
        "wrong: A100-80 has no MIG profile 1g.5gb",
        "no node in service has the GRES type of 2 tiers (slice, wrong), so almanac does not advise it",
        "no tier names 1 GRES type (2g.20gb) of MIG slices, so almanac does not advise it",
    ]


def test_nothing_without_slices_or_without_slurm(examine: Examine) -> None:
    whole = {"name": "w", "capacity_mib": 81920, "gres": "a100"}
    assert slices(examine, "gpu|idle|gpu:a100:4\n", whole) == []
    assert slices(examine, "gpu|idle|gpu:1g.10gb:7\n", SLICE, code=1) == []


MPS = "gpu:a100:1(S:0-1),mps:a100:100(S:0-1)"
MPS_OF_FOUR = "gpu:a100:4(S:0-1),mps:400(S:0-1)"
SHARD = "gpu:a100:4(S:0),shard:a100:32(S:0)"


def sharing(
    examine: Examine, nodes: dict[str, str], users: str | None = "ann\nbob\nann\n", exclusive: str = "NO",
    oversubscribe: str = "NO", tracked: str = "cpu,gres/gpu,gres/mps,gres/shard",
) -> list[Check]:  # fmt: skip
    rows = [{"name": name, "state": ["IDLE"], "partitions": ["gpu"], "gres": gres} for name, gres in nodes.items()]
    partition = f"PartitionName=gpu ExclusiveUser={exclusive} GraceTime=0 OverSubscribe={oversubscribe} State=UP"
    settings = f"ClusterName = x\nSLURM_VERSION = 22.05.8\nAccountingStorageTRES = {tracked}"
    programs = {
        "scontrol": f'case "$*" in *partition*) echo "{partition}"; exit;; esac\n{says(settings)}',
        "sinfo": says(json.dumps({"nodes": rows})),
        "sacct": "exit 1" if users is None else says(users),
    }
    return examine(SHARING, programs)


def test_nothing_without_shared_gpus(examine: Examine) -> None:
    assert sharing(examine, {"n1": "gpu:a100:4(S:0-1)", "n2": "", "n3": "gpu:mps:2,lustre:1"}) == []


def test_mps_of_several_users(examine: Examine) -> None:
    [check] = sharing(examine, {"n1": MPS})
    assert (check.status, check.details) == ("warn", {"nodes": ["n1"]})
    assert check.said == (
        "1 node (n1) with gres/mps has 2 users a day: an MPS server takes one user at a time, and a fault of one job "
        "ends all jobs on its GPU"
    )
    assert check.todo == "set ExclusiveUser=YES on their partitions"


@pytest.mark.parametrize("users", ["ann\nbob\n", None])
@pytest.mark.parametrize("setting", [{"exclusive": "YES"}, {"oversubscribe": "EXCLUSIVE"}])
def test_mps_of_one_user_at_a_time_is_in_order(examine: Examine, users: str | None, setting: dict[str, str]) -> None:
    [check] = sharing(examine, {"n1": MPS}, users, **setting)
    assert (check.status, check.said) == ("ok", "1 node (n1): one user at a time, one GPU each")


@pytest.mark.parametrize("users", ["ann\nann\n", ""])
@pytest.mark.parametrize("oversubscribe", ["NO", "FORCE:4", "YES:4"])
def test_where_others_may_come_one_user_is_not_promised(examine: Examine, users: str, oversubscribe: str) -> None:
    [check] = sharing(examine, {"n1": MPS}, users, oversubscribe=oversubscribe)
    assert (check.status, check.said) == ("ok", "1 node (n1): no second user in the last day, one GPU each")
    [check] = sharing(examine, {"n1": SHARD}, users, oversubscribe=oversubscribe)
    assert check.said.endswith("one job can take the memory of the same user's other jobs")


def test_without_accounting_several_users_are_assumed(examine: Examine) -> None:
    [check] = sharing(examine, {"n1": MPS}, None)
    assert "has several users" in check.said
    [check] = sharing(examine, {"n1": SHARD}, None)
    assert check.said.endswith("and several users run there")


@pytest.mark.parametrize(("gres", "kind"), [(MPS, "mps"), (SHARD, "shard")])
def test_parts_of_gpus_that_accounting_does_not_record(examine: Examine, gres: str, kind: str) -> None:
    found = sharing(examine, {"n1": gres}, exclusive="YES", tracked="cpu,gres/gpu")
    assert f"add gres/{kind} to AccountingStorageTRES in slurm.conf" in [check.todo for check in found]
    assert not any(
        "TRES" in check.todo for check in sharing(examine, {"n1": gres}, tracked=f"cpu,gres/gpu,gres/{kind}:a100")
    )


def test_mps_on_several_gpus_of_a_node(examine: Examine) -> None:
    [check] = sharing(examine, {"n1": MPS_OF_FOUR, "n2": MPS}, exclusive="YES")
    assert check.said == (
        "1 node (n1) with gres/mps has several GPUs: Slurm gives out mps on one GPU of a node at a time, so the others "
        "stay idle while jobs wait"
    )
    assert "almanac-pack" in check.todo


def test_both_faults_are_named(examine: Examine) -> None:
    found = sharing(examine, {"n1": MPS_OF_FOUR, "n2": MPS_OF_FOUR})
    assert [check.said.partition(":")[0] for check in found] == [
        "2 nodes (n1, n2) with gres/mps have 2 users a day",
        "2 nodes (n1, n2) with gres/mps have several GPUs",
    ]


def test_shard_has_no_memory_limit(examine: Examine) -> None:
    [check] = sharing(examine, {"n1": SHARD})
    assert check.said == (
        "1 node (n1): gres/shard has no limit of GPU memory: one job can take the memory of other jobs, and 2 users "
        "a day run there"
    )
    assert check.todo.startswith("set ExclusiveUser=YES on their partitions, or offer MIG slices instead")
    [check] = sharing(examine, {"n1": SHARD}, exclusive="YES")
    assert check.said.endswith("one job can take the memory of the same user's other jobs")
    assert check.todo.startswith("offer MIG slices instead, or for runs of one user, use almanac-pack")


NODES = {"n1": ("a100", "gpu:a100:2"), "n2": ("h100", "gpu:h100:2")}


def placement(
    examine: Examine, release: str = "24.11.5", nodes: dict[str, tuple[str, str]] = NODES,
    gpu_types: Collection[dict[str, str]] = (), store: Path | None = None, **values: Any,
) -> list[Check]:  # fmt: skip
    rows = [
        {"name": name, "state": ["IDLE"], "partitions": ["gpu"], "features": [feature], "gres": gres}
        for name, (feature, gres) in nodes.items()
    ]
    text = f"ClusterName = x\nSLURM_VERSION = {release}\nAccountingStorageType = accounting_storage/none"
    programs = {"scontrol": says(text), "sinfo": says(json.dumps({"nodes": rows}))}
    settings = {"partitions": ["gpu"], "types": ["a100", "h100"], **values}
    return examine(PLACEMENT, programs, store, placement=settings, gpu_types=[*gpu_types])


def test_placement_is_in_order(examine: Examine) -> None:
    [check] = placement(examine)
    assert (check.status, check.said) == ("ok", "2 types (a100, h100), by constraint; mode observe")


def test_no_placement_unless_configured(examine: Examine) -> None:
    assert placement(examine, partitions=[], types=[]) == []


@pytest.mark.parametrize(
    ("values", "status", "said"),
    [
        ({"partitions": ["gpus"]}, "fail", "no node is in 1 partition (gpus)"),
        ({"types": ["a100", "h200"]}, "fail", "no node of these partitions has 1 feature (h200)"),
        (
            {"types": ["a100", "h200"], "select_by": "gres"},
            "fail",
            "no node of these partitions has 1 GRES type (h200)",
        ),
        ({"types": ["a100"]}, "fail", "placement has 1 partitions and 1 types"),
        ({"select_by": "gres", "release": "22.05.8"}, "fail", "22.05"),
        ({"nodes": {**NODES, "n3": ("x", "gpu:2")}}, "warn", "1 node (n3) without exactly one of placement.types"),
        ({"requeue": True}, "warn", "no job will be requeued"),
        (
            {"gpu_types": [{"name": "a100", "constraint": "a100"}, {"name": "h100", "gres": "h100"}]},
            "warn",
            "no [[gpu_types]] has as its constraint 1 placement type (h100)",
        ),
    ],
)
def test_misconfigured_placement(examine: Examine, values: dict[str, Any], status: str, said: str) -> None:
    checks = placement(examine, **values)
    assert any(check.status == status and said in check.said and check.todo for check in checks), checks


def test_the_trained_speeds_must_know_the_types(examine: Examine, tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    [check] = placement(examine, store=store.root)
    assert (check.status, check.todo) == ("warn", "run `almanac train`")
    models_dir, trained = store.of("x").models_dir, train(HISTORY.empty_table().to_pandas(), Config(), 1_750_000_000)
    for names, said in ((("a100", "h100"), "2 types"), (("a100", "H100"), "have no 1 placement type (h100); they")):
        table = SpeedTable(names=names)
        save(trained, models_dir, speeds=table)
        [check] = placement(examine, store=store.root)
        assert said in check.said
    (models_dir / "speed" / str(current_version(models_dir)) / "meta.json").unlink()
    with pytest.warns(DamageWarning, match="cannot be read"):
        [check] = placement(examine, store=store.root)
    assert "2 types" in check.said  # of the newest whole version
