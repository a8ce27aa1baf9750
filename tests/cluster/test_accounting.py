"""The Slurm sources and the submission parser against the real servers."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until
from testbed import Cluster

from almanac.config import Slurm, Tier
from almanac.tres import parse_tres
from slurm.accounting import probe_accounting
from slurm.commands import SlurmCommands
from slurm.options import environment_options, parse_options, parse_script
from slurm.queue import read_queue
from slurm.sacct import COLUMNS
from slurm.sbatch import merge, to_request
from telemetry.sources.hook_records import PrologSource, SqueueSource
from telemetry.sources.sacct import SacctSource
from telemetry.store.store import Store

pytestmark = pytest.mark.cluster
TIERS = (Tier("hbm40g", 40960, constraint="hbm40g"), Tier("hbm80g", 81920, constraint="hbm80g"))
QUICK = "#!/bin/sh\ntrue\n"


def commands(cluster: Cluster) -> SlurmCommands:
    return SlurmCommands(timeout_s=60, env=cluster.lab.env)


def accounting(cluster: Cluster, **given: Any) -> SacctSource:
    return SacctSource(commands(cluster), cluster.lab.cluster, TIERS, Slurm(read_steps=False), time.time, **given)


def ingest(cluster: Cluster, store: Store) -> list[Any]:
    """Stores the last hour of accounting; what each batch added, left or replaced."""
    now_s = int(time.time())
    return [
        store.of("lab").write(batch.table, batch.rows) for batch in accounting(cluster).read(now_s - 3600, now_s + 1)
    ]


def wait_until_listed(cluster: Cluster, job_id: int) -> None:
    """22.05 stores the time from which a job was eligible up to some seconds late, and no span lists it until then."""

    def is_listed() -> bool:
        return [str(job_id)] in cluster.lab.sacct("-S", "now-1hour", "-o", "JobIDRaw")

    wait_until(f"job {job_id} in sacct -S", is_listed)


def rows_of(store: Store, job_id: int) -> list[dict[str, Any]]:
    return [row for row in store.of("lab").read("jobs").to_pylist() if row["job_id"] == job_id]


def test_a_name_and_a_comment_that_forge_rows_forge_nothing(cluster: Cluster) -> None:
    # As if the drawn delimiter had been foreseen. slurmdbd keeps 255 characters of a name.
    source = replace(accounting(cluster), delimiter=lambda: ";;")
    value = {"Cluster": "lab", "JobIDRaw": "999999", "JobID": "999999", "User": "root", "State": "COMPLETED",
             "Submit": "1800000000", "ExitCode": "0:0"}  # fmt: skip
    forged = "innocent\n" + ";;".join(value.get(name, "1") for name in COLUMNS) + "\n"
    job = cluster.lab.sbatch("alice", "-J", forged, "--comment", forged, "--wckey", forged, script=QUICK)
    cluster.lab.sbatch("alice", "-A", "ml\n" + forged, script=QUICK)
    assert cluster.lab.wait_for_jobs(job) == {job: "COMPLETED"}
    wait_until_listed(cluster, job)
    # It would forge a row, where anybody asks for the name.
    naive = cluster.lab.run("sacct", "-a", "-X", "-n", "-P", "-j", str(job), "-o", "JobIDRaw,JobName").stdout
    assert len(naive.splitlines()) > 1

    now_s = int(time.time())
    [batch] = source.read(now_s - 3600, now_s + 1)
    rows = {row["job_id"]: row for row in batch.rows.to_pylist()}
    assert 999999 not in rows
    assert (rows[job]["name"], rows[job]["user"]) == (forged, "alice")


def test_a_name_that_is_not_utf8_is_read_everywhere(cluster: Cluster) -> None:
    job = cluster.lab.sbatch("alice", "-J", os.fsdecode(b"train-\xff\xfe"), script="#!/bin/sh\nsleep 20\n")
    jobs = read_queue(commands(cluster), cluster.lab.cluster, [job]).jobs
    [queued] = [each for each in jobs if each.job_id == job]
    assert queued.name == "train-\ufffd\ufffd"
    cluster.lab.run("scancel", str(job))
    cluster.lab.wait_for_jobs(job)
    wait_until_listed(cluster, job)
    now_s = int(time.time())
    [batch] = accounting(cluster).read(now_s - 3600, now_s + 1)
    [row] = [row for row in batch.rows.to_pylist() if row["job_id"] == job]
    # MariaDB stores what it cannot read as "?"; both names are of one family.
    assert row["name"] in ("train-\ufffd\ufffd", "train-??")
    assert row["name_key"] == queued.request().name_key


def test_each_run_of_a_requeued_job_is_kept(cluster: Cluster, tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    job = cluster.lab.sbatch("alice", "--requeue", "--gpus=1", "--exclude=n[2-4]", script="#!/bin/sh\nsleep 60\n")
    cluster.lab.wait_for_state(job, "RUNNING")
    wait_until_listed(cluster, job)
    ingest(cluster, store)
    assert [(row["state"], row["end_s"]) for row in rows_of(store, job)] == [("RUNNING", None)]
    cluster.lab.run("scontrol", "requeue", str(job))

    # A requeued job waits two minutes before it is eligible again, is not listed until then, and its node refuses the
    # revoked credential for as long: it goes to another.
    cluster.lab.wait_for_state(job, "PENDING")
    cluster.lab.run("scontrol", "update", f"jobid={job}", "StartTime=now", "ExcNodeList=n1")
    cluster.lab.wait_for_state(job, "RUNNING")
    cluster.lab.run("scancel", str(job))

    def has_both() -> bool:
        ingest(cluster, store)
        return [row["state"] for row in rows_of(store, job)] == ["REQUEUED", "CANCELLED"]

    wait_until("both records of the job", has_both)
    first, second = rows_of(store, job)
    assert first["submit_s"] < first["end_s"] <= second["submit_s"] <= second["start_s"]
    assert first["name"] == second["name"] == "sbatch"


def test_reading_again_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    job = cluster.lab.sbatch("bob", "-C", "gpu&hbm80g", "--gpus=2", script="#!/bin/sh\nexit 3\n")
    assert cluster.lab.wait_for_jobs(job) == {job: "FAILED"}
    wait_until_listed(cluster, job)
    ingest(cluster, store)
    before = store.of("lab").read("jobs")
    ended = sum(end is not None for end in before["end_s"].to_pylist())
    again = ingest(cluster, store)
    assert sum(result.added for result in again) == 0 and sum(result.unchanged for result in again) >= ended
    [row] = rows_of(store, job)
    expected = {"user": "bob", "tier": "hbm80g", "gpu_count": 2, "gpu_count_req": 2, "exit_code": 3, "name": "sbatch"}
    assert {key: row[key] for key in expected} == expected


def test_a_job_left_open_is_found_by_its_id_whatever_the_span(cluster: Cluster) -> None:
    job = cluster.lab.sbatch("alice", script=QUICK)
    cluster.lab.wait_for_jobs(job)
    source = replace(accounting(cluster, open_jobs=lambda: {job: 0}), config=Slurm(overlap_hours=0, read_steps=False))
    batches = list(source.read(86400, 86400 + 10))
    assert [batch.rows["job_id"].to_pylist() for batch in batches] == [[], [job]]
    assert batches[1].rows["state"].to_pylist() == ["COMPLETED"]


def test_doctor_learns_what_accounting_can_do(cluster: Cluster) -> None:
    status = probe_accounting(commands(cluster))
    assert re.fullmatch(r"\d\d\.\d\d\.\d+", status.version)
    assert (status.cluster, status.has_json, status.tracks_gpus) == ("lab", True, True)


def test_prolog_records_and_squeue_name_the_same_gpus(cluster: Cluster) -> None:
    job = cluster.lab.sbatch("alice", "-N2", "--gpus-per-node=2", script="#!/bin/sh\nsleep 8\n")
    cluster.lab.wait_for_state(job, "RUNNING")
    wait_until("a record of each node", lambda: len(cluster.prolog_records(job)) == 2)
    now_s = int(time.time())
    found = {}
    for source in (SqueueSource(commands(cluster), time.time, "lab"), PrologSource(cluster.prolog_dir, "lab")):
        rows = [row for batch in source.read(now_s - 600, now_s + 1) for row in batch.rows.to_pylist()]
        found[source.name] = {(row["host"], row["gpu"]) for row in rows if row["job_id"] == job}
    assert found["squeue"] == found["prolog"] and len(found["prolog"]) == 4
    cluster.lab.run("scancel", str(job))


BODY = "#!/bin/bash\n"
SUBMISSIONS: list[tuple[str, list[str], dict[str, str]]] = [
    ('#SBATCH -J "my job" # comment\n#SBATCH --constraint=gpu\\&hbm80g --gpus\n#SBATCH 2\n\n#SBATCH -t 10', [], {}),
    (" #SBATCH -J indented\n##SBATCH -J double\n#SBATCH--account ml\n#SBATCH --part=hbm80\n#SLURM -q normal", [], {}),
    ("#SBATCH --comment='a \"b\" \\' c' -J a#b -C gpu\n#SBATCH -G1\ntrue\n#SBATCH -J after", [], {}),
    ("#SBATCH --job-name=x\"y z\"w\n#SBATCH -Cgpu -G 2", [], {}),
    ("#SBATCH -HOn4 --gpus a100:1", [], {}),
    ("#SBATCH -C gpu\\\n#SBATCH -J x", [], {}),
    (":\n#SBATCH -J late", [], {}),
    ("#SBATCH -J script -C gpu -p all", ["-J", "cmd"],
     {"SBATCH_PARTITION": "hbm80", "SBATCH_JOB_NAME": "env", "SBATCH_CONSTRAINT": "hbm80g"}),
    ("#SBATCH -J\ttab\t-C\tgpu", ["--gpus-per-node=a100:2", "-N2"], {}),
    ("#SBATCH -k -C gpu -J b\n#SBATCH --propagate=STACK -p all --nice=5 --exclusive", [], {}),
    ("#sbatch -J lower\n#SBATCH -Jx=3", ["-A", "ml", "-qnormal"], {}),
    ("#SBATCH --gpus=a100:2 --gpus-per-node=a100 -N 2-4", [], {"SBATCH_GPUS": "4"}),
]  # fmt: skip
SHOWN = ("account", "comment", "constraint", "gpus", "gpus-per-node", "job-name", "nodes", "ntasks", "partition", "qos")


@pytest.mark.parametrize(("body", "argv", "environ"), SUBMISSIONS)
def test_a_submission_is_read_as_sbatch_reads_it(
    cluster: Cluster, body: str, argv: list[str], environ: dict[str, str]
) -> None:
    script = BODY + body + "\ntrue\n"
    settings = [f"{name}={value}" for name, value in environ.items()]
    said = cluster.lab.run(
        "env", *settings, "sbatch", "-v", "--test-only", *argv, user="alice", stdin=script, check=False
    ).stderr
    assert "end of defined options" in said, said
    lines = (re.fullmatch(r"sbatch: ([a-z-]+) +: (.*)", line) for line in said.splitlines())
    real = {match[1]: match[2] for match in lines if match and match[1] in SHOWN}
    merged = merge(parse_script(script), environment_options(environ), parse_options(argv)[0])
    assert {name: option.value for name, option in merged.items() if name in SHOWN} == real


REQUESTS = (
    "--gres=gpu:2 -N 2", "--gpus=3 -N 1", "--gpus=a100:2 -N 1", "--gpus-per-node=2 -N2", "--gpus-per-task=1 -n3 -N 1",
    "--gpus=4 --gpus-per-node=2", "-n4 --ntasks-per-node=2 --gpus-per-node=1", "--gpus=2 --gpus-per-task=1",
    "--gpus=2 --ntasks-per-gpu=2 -N 1", "--gres=gpu -c 3", "--gpus=2 --cpus-per-gpu=3 -N 1", "-w n[1-2]", "-n 5 -N 1",
)  # fmt: skip


def test_a_request_counts_as_slurm_counts_it(cluster: Cluster) -> None:
    jobs = {cluster.lab.sbatch("alice", *options.split(), script=QUICK): options for options in REQUESTS}
    cluster.lab.wait_for_jobs(*jobs)
    ids = ",".join(map(str, jobs))
    real = {}
    for job, text in cluster.lab.sacct("-j", ids, "-o", "JobIDRaw,AllocTRES"):
        tres = parse_tres(text)
        options = jobs[int(job)]
        nodes = int(tres["node"]) if re.search("-N|-w|per-node", options) else None  # else the scheduler's choice
        real[options] = (int(tres.get("gres/gpu", 0)), nodes, int(tres["cpu"]))
    ours = {}
    for options in REQUESTS:
        request = to_request(merge(parse_options(options.split())[0]), "alice", 0)
        nodes = request.node_count if re.search("-N|-w|per-node", options) else None
        ours[options] = (request.gpu_count, nodes, request.cpu_count)
    assert ours == real
