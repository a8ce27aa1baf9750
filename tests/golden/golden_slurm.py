"""A Slurm that answers from files: every command is one shell script, and every answer is a fixed text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slurm.hostlist import expand

SCRIPT = """#!/bin/sh
cd "${0%/*}" || exit 9
case "${0##*/} $*" in
*" --version") echo "slurm 24.11.5";;
"scontrol show config") cat config;;
"scontrol show nodes --json" | "scontrol show nodes "*" --json" | "sinfo --json") cat nodes.json;;
"scontrol -o show reservation") echo "No reservations in the system";;
"scontrol -o show partition" | "scontrol -M demo -o show partition") cat partitions;;
"squeue "*" --json"*) cat queue.json;;
"squeue -h -a -t "*) ;;
"sinfo -a -e -h -o "*) printf 'gpu|idle|gpu:a100:4\\nmig|idle|gpu:a100_1g.10gb:7\\n';;
"sinfo -h -N -o "*) cat hosts;;
"sprio "*) cat factors;;
"sacctmgr -n -P show cluster "*) echo demo;;
"sacctmgr "*) ;;
"sacct --helpformat") cat columns;;
"sacct "*" --json "*) echo '{"jobs": []}';;
"sacct "*) ;;
"mig-parted "*) cat layout.json;;
*) echo "unknown: ${0##*/} $*" >&2; exit 9;;
esac
"""
COMMANDS = ("scontrol", "squeue", "sinfo", "sprio", "sacct", "sacctmgr", "mig-parted")
CONFIG = """\
AccountingStorageTRES   = cpu,mem,energy,node,billing,gres/gpu
AccountingStoreFlags    = job_comment,job_script
ClusterName             = demo
JobFileAppend           = 1
PriorityMaxAge          = 12-00:00:00
PriorityParameters      = (null)
PrioritySiteFactorParameters = (null)
PriorityType            = priority/multifactor
PriorityWeightAge       = 12000
PriorityWeightAssoc     = 0
PriorityWeightTRES      = (null)
ResumeProgram           = /usr/bin/almanac-power-on
ResumeTimeout           = 300 sec
SLURM_CONF              = slurm/slurm.conf
SLURM_VERSION           = 24.11.5
SlurmctldHost[0]        = controller
SuspendExcNodes         = (null)
SuspendExcParts         = (null)
SuspendProgram          = /usr/bin/almanac-power-off
SuspendTime             = 31536000 sec
SuspendTimeout          = 30 sec
"""
PARTITION = "PartitionName={} AllowGroups=ALL DefaultTime=01:00:00 MaxTime=1-00:00:00 OverSubscribe=NO State=UP\n"
SLICES = "gpu:a100_1g.10gb:1,gpu:a100_3g.40gb:1"
LAYOUT = {"mig-configs": {"current": [
    {"devices": [0], "mig-enabled": True, "mig-devices": {"1g.10gb": 1, "3g.40gb": 1}},
]}}  # fmt: skip


def _nodes(now_s: int) -> list[dict[str, Any]]:
    kinds = (("nid[001001-001014]", "hbm40g"), ("nid[008193-008200]", "hbm80g"))
    busy = {"nid001001": "gpu:a100:4(IDX:0-3)", "nid008193": "gpu:a100:4(IDX:0-3)"}
    nodes = [
        {
            "name": name, "state": ["ALLOCATED" if name in busy else "IDLE"], "partitions": ["gpu"],
            "features": ["gpu", tier], "gres": "gpu:a100:4", "gres_used": busy.get(name, "gpu:a100:0(IDX:N/A)"),
        }
        for hosts, tier in kinds
        for name in expand(hosts)
    ]  # fmt: skip
    nodes.append({
        "name": "m1", "state": ["MIXED"], "partitions": ["mig"], "features": [], "gres": SLICES,
        "gres_used": "gpu:a100_1g.10gb:1(IDX:0),gpu:a100_3g.40gb:0(IDX:N/A)",
    })  # fmt: skip
    more = {
        "cpus": 64,
        "effective_cpus": 64,
        "alloc_cpus": 4,
        "last_busy": now_s - 86_400,
        "boot_time": now_s - 864_000,
    }
    return [{**node, **more} for node in nodes]


def _queue(now_s: int) -> list[dict[str, Any]]:
    def job(number: int, user: str, name: str, gpus: int, **more: Any) -> dict[str, Any]:
        return {
            "job_id": number, "user_name": user, "name": name, "account": "m1001", "job_state": ["PENDING"],
            "state_reason": "Resources", "priority": 1000, "submit_time": now_s - 600, "eligible_time": now_s - 600,
            "partition": "gpu", "qos": "normal", "node_count": max(1, gpus // 4), "cpus": 16, "comment": "",
            "features": "gpu&hbm40g", "tres_req_str": f"cpu=16,gres/gpu={gpus}", "tres_per_job": f"gres/gpu:{gpus}",
            "time_limit": 240, "batch_flag": True, "requeue": True, **more,
        }  # fmt: skip

    runs = {"job_state": ["RUNNING"], "state_reason": "None", "start_time": now_s - 900, "gres_detail": ["gpu:a100:4"]}
    any_type = {"comment": "almanac:any-gpu", "features": "[hbm40g|hbm80g]"}
    slices = {
        "partition": "mig", "features": "", "tres_per_job": "gres/gpu:a100_1g.10gb:1", "comment": "almanac:larger",
    }  # fmt: skip
    return [
        job(2_000_001, "benabel", "deepcam_bench_20261117", 4, nodes="nid001001", **runs),
        job(2_000_002, "carlabel", "gnn-scf_20261117_03", 4, nodes="nid008193", **runs, features="gpu&hbm80g"),
        job(2_000_003, "benabel", "cosmoflow_pretrain_20261118_11", 4),
        job(2_000_004, "carlabel", "gnn-scf_20261118_04", 16, submit_time=now_s - 7200),
        job(2_000_005, "emilabel", "evil\x1b[31m\nJobId=9", 4, submit_time=now_s - 86_400),
        job(2_000_006, "benabel", "cosmoflow_pretrain_20261118_12", 4, **any_type),
        job(2_000_007, "emilabel", "notebook", 1, **slices, cpus=1),
    ]


def install(folder: Path, now_s: int, columns: str) -> None:
    """Put the commands and their answers into a folder. columns: of `sacct --helpformat`."""
    folder.mkdir()
    for name in COMMANDS:
        (folder / name).write_text(SCRIPT)
        (folder / name).chmod(0o755)
    nodes, queue = _nodes(now_s), _queue(now_s)
    answers = {
        "columns": columns,
        "config": CONFIG,
        "factors": "".join(f"{job['job_id']}|1000|0|1000|0|0|0|0|0|0|\n" for job in queue),
        "hosts": "".join(f"{each['name']} {each['name']} {each['gres']} idle\n" for each in nodes),
        "layout.json": json.dumps(LAYOUT),
        "nodes.json": json.dumps({"nodes": nodes}),
        "partitions": PARTITION.format("gpu") + PARTITION.format("mig"),
        "slurm.conf": "ClusterName=demo\ninclude almanac-mig.conf\n",
        "queue.json": json.dumps({"jobs": queue}),
    }
    for name, text in answers.items():
        (folder / name).write_text(text)
