"""Demand of a node set, live and from accounting, of real jobs."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from processes import wait_until
from testbed import Cluster

from almanac.config import NodeSet, Slurm
from almanac.records import Counts
from slurm.backend import CommandBackend
from slurm.commands import SlurmCommands
from slurm.node_sets import live_demand, members, wants_nodes
from slurm.queued_job import QueuedJob
from telemetry.attribution.allocations import parse_hosts
from telemetry.power.demand import accounted_demand
from telemetry.sources.sacct import SacctSource
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

pytestmark = pytest.mark.cluster
SET = NodeSet("all", nodes="n[1-4]")
NAMES = ("n1", "n2", "n3", "n4")


UNTIL_SIGNAL = "#!/bin/sh\ntrap 'kill $!; exit 0' USR1\nsleep 600 &\nwait\n"


def script(seconds: int) -> str:
    return f"#!/bin/sh\nsleep {seconds}\n"


def test_live_and_accounted_demand_of_real_jobs(cluster: Cluster, tmp_path: Path) -> None:
    lab = cluster.lab
    commands = SlurmCommands(timeout_s=60, env=lab.env)
    backend = CommandBackend(commands)
    wait_until("idle nodes", lambda: live_demand(NAMES, backend.nodes(), []).active == 0, seen=lab.node_states)
    begin_s = int(time.time())
    first = lab.sbatch("alice", "-w", "n1", "--gpus-per-node=4", script=UNTIL_SIGNAL)
    lab.wait_for_state(first, "RUNNING")
    blocked = [
        lab.sbatch("alice", "-H", "--gpus=4", script=script(1)),
        lab.sbatch("alice", "-d", f"afterany:{first}", "--gpus=1", script=script(3)),
        lab.sbatch("alice", "--begin=now+1hour", "--gpus=4", script=script(1)),
    ]
    array = lab.sbatch("alice", "-w", "n1", "--gpus-per-node=4", "-a", "1-3%1", script=script(1))
    small = lab.sbatch("alice", "-w", "n1", "--gpus=2", script=script(1))
    ours = {first, *blocked, array, small}

    def waiting() -> dict[int, QueuedJob]:
        return {job.job_id: job for job in backend.pending(Counts()) if job.job_id in ours}

    def reasons() -> dict[int, str]:
        return {number: job.reason for number, job in waiting().items()}

    wait_until("a reason for each job", lambda: set(reasons().values()).isdisjoint({"", "None"}), seen=reasons)
    pending = waiting()
    assert [wants_nodes(pending[number]) for number in blocked] == [False] * 3, reasons()
    assert wants_nodes(pending[array]) and pending[array].task_count == 1
    assert (pending[small].gpu_count, pending[small].gpus_per_node) == (2, 0)
    nodes = backend.nodes()
    assert members(SET, nodes) == NAMES
    found = live_demand(NAMES, nodes, list(pending.values()))
    assert (found.total, found.active, found.wanted, found.asleep) == (4, 1, 2, 0), "a node and half a node"

    lab.run("scancel", "-b", "--signal=USR1", str(first))
    lab.run("scancel", str(blocked[0]), str(blocked[2]))
    lab.wait_for_jobs(first, *blocked, small)

    def tasks() -> list[list[str]]:
        return lab.sacct("-j", str(array), "-o", "JobIDRaw,State")

    wait_until("the array's end", lambda: [state for _, state in tasks()] == ["COMPLETED"] * 3, seen=tasks)
    ours.update(int(number) for number, _ in tasks())
    store = Store.create(tmp_path / "store")
    early = {
        "job_id": 1,
        "submit_s": begin_s - 600,
        "start_s": begin_s - 600,
        "end_s": begin_s - 300,
        "node_list": "n9",
    }
    store.of("lab").write("jobs", pa.Table.from_pylist([early], schema=JOBS))  # accounting is complete from its end on
    source = SacctSource(commands, lab.cluster, (), Slurm(read_steps=False), time.time)
    row = {}

    def is_stored() -> bool:
        now_s = int(time.time())
        for batch in source.read(begin_s - 60, now_s + 1):
            is_ours = pc.is_in(batch.rows["job_id"], pa.array(ours, JOBS.field("job_id").type))
            store.of("lab").write(batch.table, batch.rows.filter(is_ours))
        rows = store.of("lab").read("jobs").to_pylist()
        row.update({one["job_id"]: one for one in rows})
        return ours - {*blocked} <= row.keys() and all(one["end_s"] for one in rows)

    wait_until("the jobs in the store", is_stored, seen=lambda: row)
    assert row[blocked[1]]["eligible_s"] >= row[first]["end_s"], "eligible only when it no longer depends"
    assert row[small]["eligible_s"] <= row[small]["start_s"]
    end_s = int(time.time())
    store.of("lab").set_watermark("sacct", end_s + 60)
    demand = accounted_demand(store.of("lab"), SET, NAMES, begin_s, end_s)
    asked = ["sacct", "-X", "-D", "-n", "-P", "-j", ",".join(map(str, ours)), "-S", "now-1hour"]
    listed = [line.split("|") for line in commands([*asked, "-o", "Start,End,NodeList"]).decode().splitlines()]
    spans = [(int(start), int(end), node) for start, end, node in listed if start.isdigit() and end.isdigit()]
    assert len(spans) >= 6
    for minute, value in enumerate(demand.active.tolist()):
        if np.isnan(value):
            continue
        seconds = range(demand.start_s + 60 * minute, demand.start_s + 60 * minute + 60)
        busy = [[nodes for start, end, nodes in spans if start <= now < max(end, start + 1)] for now in seconds]
        used = [len({node for nodes in each for node in parse_hosts(nodes)}) for each in busy]
        assert value == max(used)
    assert np.nanmax(demand.active) >= 1 and np.nanmax(demand.wanted) >= 1
