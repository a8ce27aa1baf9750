"""The test cluster itself: what the other cluster tests rely on, each checked against the real servers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_dcgm import PROFILES_GIB
from lab import SlurmLab
from layout import NODES
from processes import PATIENCE_S, LabError, describe, lab_processes, wait_until
from testbed import Cluster

pytestmark = pytest.mark.cluster
FB_USED = "DCGM_FI_DEV_FB_USED"


def busy_gpus(cluster: Cluster, job_id: int) -> set[tuple[str, str]]:
    """(node, GPU index) of the GPUs that the exporter names the job for."""
    return {
        (series.labels["Hostname"], series.labels["gpu"])
        for series in cluster.scrape(FB_USED)
        if series.labels.get("hpc_job") == str(job_id)
    }


def test_every_node_is_idle_and_has_its_tier(cluster: Cluster) -> None:
    wait_until("idle nodes", lambda: set(cluster.lab.node_states().values()) == {"idle"})
    shown = cluster.lab.run("sinfo", "-h", "-N", "-p", "all", "-o", "%N %f %G").stdout.splitlines()
    tiers = {node: "hbm40g" if node in ("n1", "n2") else "hbm80g" for node in NODES}
    assert shown == [f"{node} gpu,{tier} gpu:a100:4" for node, tier in tiers.items()]


def test_a_gpu_job_is_known_everywhere_by_its_id(cluster: Cluster) -> None:
    job = cluster.train("alice", "-C", "gpu&hbm80g", "--gpus=2", profile="high", seconds=900)
    wait_until("the exporter to name the job", lambda: len(busy_gpus(cluster, job)) == 2)
    on = busy_gpus(cluster, job)
    full = f'{FB_USED}{{hpc_job="{job}"}} == {1024 * PROFILES_GIB["high"]}'
    wait_until("its full memory in Prometheus", lambda: len(cluster.prometheus.query(full)) == 2)
    cluster.lab.run("scancel", str(job))
    assert cluster.lab.wait_for_jobs(job) == {job: "CANCELLED"}
    [(node, tres)] = cluster.lab.sacct("-j", str(job), "-S", "now-1hour", "-o", "NodeList,AllocTRES")
    assert node in ("n3", "n4") and "gres/gpu=2" in tres.split(",")

    [record] = cluster.prolog_records(job)
    assert record["job_id"] == str(job) and record["host"] == node
    assert {(node, index) for index in record["gpus"].split(",")} == on
    assert int(record["uid"]) == int(cluster.lab.run("id", "-u", "alice").stdout)

    peaks = cluster.prometheus.query(f'max_over_time({FB_USED}{{hpc_job="{job}"}}[10m])')
    assert {(one["metric"]["Hostname"], one["metric"]["gpu"]) for one in peaks} == on
    assert {float(one["value"][1]) for one in peaks} == {1024 * PROFILES_GIB["high"]}

    wait_until("idle GPUs", lambda: not busy_gpus(cluster, job))
    wait_until("an idle GPU's few MiB", lambda: all(
        series.value < 100
        for series in cluster.scrape(FB_USED)
        if (series.labels["Hostname"], series.labels["gpu"]) in on
    ))  # fmt: skip


def test_a_job_of_two_nodes_has_a_prolog_record_of_each(cluster: Cluster) -> None:
    job = cluster.train("bob", "-N", "2", "--gpus-per-node=1", seconds=1)
    cluster.lab.wait_for_jobs(job)
    assert len({record["host"] for record in cluster.prolog_records(job)}) == 2


def users_of(folder: Path) -> list[str]:
    """Find processes that work in `folder` or hold a file of it open, in another way than the lab's own."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [process / "cwd", *(process / "fd").iterdir()]
            if any(str(link.readlink()).startswith(f"{folder}/") for link in links):
                found.append((process / "comm").read_text().strip())
        except OSError:
            continue
    return found


def test_no_process_outlives_the_lab_even_with_a_job_on_it(lab_root: Path) -> None:
    script = "#!/bin/sh\ntrap '' TERM\nenv -i sleep 600 &\nsleep 601\n"
    with pytest.raises(ZeroDivisionError):
        with SlurmLab(lab_root, users=("alice",)) as lab:
            job = lab.sbatch("alice", "--gpus=1", script=script)
            lab.wait_for_state(job, "RUNNING")
            wait_until("the job", lambda: users_of(lab_root).count("sleep") == 2)
            assert {"slurmctld", "slurmd", "slurmdbd", "mariadbd", "munged"} <= set(users_of(lab_root))
            raise ZeroDivisionError
    assert users_of(lab_root) == []


def test_a_server_that_cannot_start_is_shown_with_its_log(lab_root: Path) -> None:
    with pytest.raises(LabError, match=r"(?s)slurmctld ended.*priority/no-such"):
        with SlurmLab(lab_root, extra_slurm_conf="PriorityType=priority/no-such\n"):
            raise AssertionError("started all the same")
    assert describe(lab_processes(lab_root)) == ""


def test_the_command_line_starts_and_ends_a_lab(lab_root: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("lab.py"))]
    subprocess.run([*command, "up", str(lab_root)], check=True, capture_output=True, timeout=2 * PATIENCE_S)
    shown = subprocess.run([*command, "env", str(lab_root)], check=True, capture_output=True, text=True)
    assert shown.stdout == f"export SLURM_CONF={lab_root}/etc/slurm.conf\n"
    assert "slurmctld" in describe(lab_processes(lab_root))
    subprocess.run([*command, "down", str(lab_root)], check=True, capture_output=True, timeout=PATIENCE_S)
    assert describe(lab_processes(lab_root)) == ""
