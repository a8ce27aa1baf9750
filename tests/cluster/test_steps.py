"""Job steps on real Slurm: what srun started, and what each of them did."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until
from testbed import Cluster

from almanac.config import Config, Filters, Prometheus, Slurm
from almanac.tres import size_mib
from reports.job.build import build, live_contexts
from reports.job.conclusions import conclude
from reports.job.evidence import JobContext, figure_rows
from reports.job.facts import facts_of
from slurm.accounting import STEP_COLUMNS
from slurm.commands import SlurmCommands
from slurm.nodes import node_shapes
from slurm.queue import read_queue
from slurm.queued_job import QueuedJob
from slurm.step_use import parse_cpu_time
from telemetry.ingest import IngestResult, ingest
from telemetry.metrics.steps import CONCURRENT, SOME_GPUS
from telemetry.metrics.summary import SummaryCounts, summarize
from telemetry.site import Site
from telemetry.sources.prometheus import PrometheusSource
from telemetry.sources.sacct import SacctSource
from telemetry.store.store import Store

pytestmark = pytest.mark.cluster

# Two steps one after the other, each until its memory was seen, the second with more; two that wait for each other; one
# with a single GPU. The first one's name forges a step, as if the delimiter had been foreseen.
SCRIPT = """#!/bin/bash
profile={root}/profiles/$SLURM_JOB_ID
echo low > $profile
for ((i = 0; i < 400000; i++)); do :; done
until='until [ -e $0 ]; do sleep 0.2; done; sleep 3'
srun -n1 --gpus=4 -J "$FORGED" sh -c "$until" $profile.seen-low
echo high > $profile
srun -n1 --gpus=4 sh -c "$until" $profile.seen-high
srun --exact -n1 --gpus=2 --mem=500 sh -c 'touch $1; '"$until" $profile.b $profile.a &
srun --exact -n1 --gpus=2 --mem=500 sh -c 'touch $1; '"$until" $profile.a $profile.b &
wait
srun -n1 --gpus=1 sleep 3
"""
FORGED = "innocent\n" + ";;".join(
    {"Cluster": "lab", "JobIDRaw": "1.99", "State": "COMPLETED", "ExitCode": "0:0"}.get(name, "1")
    for name in STEP_COLUMNS
    for name in STEP_COLUMNS
)
CONFIG = Config(filters=Filters(min_elapsed_s=2, min_gpu_util_pct=-1.0))


@dataclass
class Seen:
    """live: the report's context while the job's first step ran, once its memory had filled. begin_s: before it."""

    begin_s: int = field(default_factory=lambda: int(time.time()) - 60)
    live: list[JobContext] = field(default_factory=list)


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


@pytest.fixture(scope="module")
def job(cluster: Cluster, seen: Seen) -> int:
    script = SCRIPT.format(root=cluster.lab.root)
    options = ("-N1", "-n4", "--gpus=4", "-C", "hbm80g", f"--export=ALL,FORGED={FORGED}")
    job_id = cluster.lab.sbatch("alice", *options, script=script)
    cluster.lab.wait_for_state(job_id, "RUNNING")

    def fills(mib: int) -> None:
        full = f'min(DCGM_FI_DEV_FB_USED{{hpc_job="{job_id}"}}) > {mib}'
        wait_until("the step's memory in Prometheus", lambda: cluster.prometheus.query(full))

    fills(19_000)
    commands = SlurmCommands(timeout_s=60, env=cluster.lab.env)

    def running() -> list[QueuedJob]:
        return [each for each in read_queue(commands, "lab", [job_id]).jobs if each.has_started]

    # It stays CONFIGURING until slurmctld has heard of the prolog's end, while its script runs already.
    wait_until("a job that runs in squeue", lambda: bool(running()))
    config, now_s = replace(CONFIG, prometheus=Prometheus(url=cluster.prometheus.url)), int(time.time())
    seen.live += live_contexts(Site().but(config=config).at(now_s), running())
    (cluster.lab.root / f"profiles/{job_id}.seen-low").touch()
    fills(58_000)
    (cluster.lab.root / f"profiles/{job_id}.seen-high").touch()
    assert cluster.lab.wait_for_jobs(job_id) == {job_id: "COMPLETED"}
    # 22.05 stores up to some seconds late from when on a job was eligible: no span lists it until then.
    wait_until("the job in sacct -S", lambda: [str(job_id)] in cluster.lab.sacct("-S", "now-1hour", "-o", "JobIDRaw"))
    return job_id


@pytest.fixture(scope="module")
def summary(
    cluster: Cluster, job: int, seen: Seen, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Store, SummaryCounts]:
    """A store with the last minutes of accounting and telemetry, summarised."""
    store = Store.create(tmp_path_factory.mktemp("steps") / "store")
    until_s = int(time.time()) + 1
    commands = SlurmCommands(timeout_s=60, env=cluster.lab.env)
    shapes = partial(node_shapes, commands)
    sacct = SacctSource(commands, "lab", (), Slurm(), time.time, delimiter=lambda: ";;", shapes=shapes)
    for source in (sacct, PrometheusSource(Prometheus(url=cluster.prometheus.url, delay_s=0))):
        result = IngestResult(source.name, seen.begin_s, until_s)
        ingest(source, store.of("lab"), seen.begin_s, until_s, result, lambda rows, reached_s: None)
        assert not result.counts.dropped, result.counts
    return store, summarize(store.of("lab"), CONFIG, seen.begin_s, until_s)


def of_job(store: Store, table: str, job_id: int) -> dict[str, dict[str, Any]]:
    rows = [row for row in store.of("lab").read(table).to_pylist() if row["job_id"] == job_id]
    return {row["step"]: row for row in sorted(rows, key=lambda row: str(row["step"]))}


def test_the_steps_are_those_that_sacct_shows(cluster: Cluster, job: int, summary: tuple[Store, SummaryCounts]) -> None:
    shown = cluster.lab.run(
        "env", "TZ=UTC", "SLURM_TIME_FORMAT=%s",
        "sacct", "-n", "-P", "-j", str(job), "-o", "JobIDRaw,State,Start,End,NodeList,ExitCode",
    ).stdout.splitlines()  # fmt: skip
    real = {f"{job}.{n}": None for n in range(5)}
    expected = [row.split("|") for row in shown if row.split("|")[0] in real]
    steps = of_job(summary[0], "steps", job)
    assert [
        [f"{job}.{name}", row["state"], str(row["start_s"]), str(row["end_s"]), row["node_list"],
         f"{row['exit_code']}:{row['exit_signal']}"]
        for name, row in steps.items()
    ] == expected  # fmt: skip
    assert [row["gpu_count"] for row in steps.values()] == [4, 4, 2, 2, 1]
    # The name would forge a step, where anybody asks for it.
    naive = cluster.lab.run("sacct", "-n", "-P", "--delimiter=;;", "-j", str(job), "-o", "JobIDRaw,JobName").stdout
    assert "lab;;1.99;;COMPLETED" in naive
    assert not any(row["step"] == "99" for row in summary[0].of("lab").read("steps").to_pylist())


def test_each_step_has_its_own_metrics_where_its_gpus_are_known(
    cluster: Cluster, job: int, summary: tuple[Store, SummaryCounts]
) -> None:
    store, counts = summary
    found = of_job(store, "step_metrics", job)
    assert [row["verdict"] for row in found.values()] == ["ok", "ok", CONCURRENT, CONCURRENT, SOME_GPUS]
    assert [(found[name]["gpus_seen"], found[name]["attributed_by"]) for name in "01"] == [(4, "whole node")] * 2
    assert found["0"]["hbm_peak_mib"] == pytest.approx(20 * 1024, rel=0.1)
    assert found["1"]["hbm_peak_mib"] == pytest.approx(60 * 1024, rel=0.1)
    assert all(found[name]["energy_j"] > 0 for name in "01")
    [whole] = [row for row in store.of("lab").read("job_metrics").to_pylist() if row["job_id"] == job]
    assert whole["hbm_peak_mib"] == found["1"]["hbm_peak_mib"]
    assert counts.steps.as_dict()["steps"] >= 5 and counts.steps.as_dict()["samples_without_step"] > 0
    assert found["0"]["samples"] + found["1"]["samples"] < whole["samples"]


def test_a_job_that_runs_is_reported_with_its_gpus_so_far(cluster: Cluster, job: int, seen: Seen) -> None:
    [context] = seen.live
    assert (context.job_id, context.user, context.job["state"], context.job["end_s"]) == (job, "alice", "RUNNING", None)
    assert context.is_live and (context.elapsed_s or 0) >= 4
    assert (context.metrics["attributed_by"], context.metrics["gpus_seen"], len(context.gpus)) == ("whole node", 4, 4)
    # The first step only: the second has three times as much.
    assert context.metrics["hbm_peak_mib"] == pytest.approx(20 * 1024, rel=0.1)
    assert context.series is not None and context.series.has("gpu_util_pct")
    said = conclude(facts_of(context))
    assert said.headline.startswith("still running")
    assert not {rule for rule in said.rules if rule.startswith(("tier", "limit"))}


def test_cpu_time_and_host_memory_are_those_of_sacct(
    cluster: Cluster, job: int, summary: tuple[Store, SummaryCounts]
) -> None:
    columns = "JobIDRaw,TotalCPU,MaxRSS,NTasks,AllocTRES"
    shown = cluster.lab.run("sacct", "-n", "-P", "-j", str(job), "-o", columns).stdout.splitlines()
    whole, *steps = (line.split("|") for line in shown)
    [row] = [row for row in summary[0].of("lab").read("jobs").to_pylist() if row["job_id"] == job]
    # sacct adds up the steps for the job's own line.
    assert row["cpu_time_s"] == pytest.approx(parse_cpu_time(whole[1]), abs=0.01 * len(steps))
    assert row["cpu_time_s"] > 0.3
    largest = max(size_mib(step[2]) or 0 for step in steps)
    assert row["host_mem_task_peak_mib"] == pytest.approx(largest)
    assert largest <= row["host_mem_peak_mib"] <= sum((size_mib(step[2]) or 0) * int(step[3]) for step in steps)
    assert row["host_mem_alloc_mib"] == 4000
    shown = cluster.lab.run("scontrol", "-o", "show", "node", row["node_list"]).stdout
    sizes = {name: int(re.search(rf" {name}=(\d+)", shown)[1]) for name in ("CPUTot", "RealMemory", "ThreadsPerCore")}
    named = ("node_cpu_count", "node_memory_mib", "node_threads", "node_gpu_count")
    assert tuple(row[name] for name in named) == (*sizes.values(), 4), "as sinfo says"
    gathered = [row[name] for name in ("sacct_hbm_peak_mib", "sacct_hbm_least_mib", "sacct_gpu_util_pct")]
    assert gathered == [None] * 3, "nothing gathers the use of these GPUs: that is not 0"


@pytest.mark.parametrize("run", ["", "srun "], ids=["batch alone", "a step"])
def test_a_job_without_gpus_has_its_cpu_time_and_peak_memory(cluster: Cluster, tmp_path: Path, run: str) -> None:
    """A real MaxRSS of 200 MiB and 4 s of CPU time, of a batch script and of a step of srun."""
    begin_s = int(time.time())
    script = f"#!/bin/sh\n{run}perl -e '$x = 1; $x x= 200 << 20; 1 while (times)[0] + (times)[1] < 4'\n"
    job_id = cluster.lab.sbatch("alice", "-n1", "--mem=800", script=script)
    assert cluster.lab.wait_for_jobs(job_id) == {job_id: "COMPLETED"}
    commands, until_s = SlurmCommands(timeout_s=60, env=cluster.lab.env), int(time.time()) + 1
    listed = ("-S", "now-1hour", "-o", "JobIDRaw")
    wait_until("the job in sacct -S", lambda: [str(job_id)] in cluster.lab.sacct(*listed))
    store = Store.create(tmp_path / "store").of("lab")
    sacct = SacctSource(commands, "lab", (), Slurm(), time.time, delimiter=lambda: ";;")
    ingest(sacct, store, begin_s - 60, until_s + 30, IngestResult("sacct", 0, until_s), lambda rows, reached_s: None)
    assert not [row for row in store.read("steps").to_pylist() if row["job_id"] == job_id]
    [context] = build(Site().but(store=store).at(until_s), [job_id], has_series=False)
    row = context.job
    assert row["host_mem_alloc_mib"] == 800 and 200 <= (row["host_mem_peak_mib"] or 0) < 400
    assert 4 <= (row["cpu_time_s"] or 0) < 10 and context.is_cpu_only
    summary = conclude(facts_of(context)).summary
    shown = {figure.name: figure.value for figure in figure_rows(context)}
    efficiency = f"{100 * row['cpu_time_s'] / row['cpu_count'] / (row['end_s'] - row['start_s']):.0f}%"
    assert "GPU" not in summary + "".join(shown) and "of 800 MiB" not in summary and "of 0.8 GiB of memory" in summary
    assert shown["Host memory"].endswith(" of 0.8 GiB") and shown["CPU efficiency"] == efficiency
