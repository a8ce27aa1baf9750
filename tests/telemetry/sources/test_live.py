"""Rounds read from a real Prometheus and squeue's text: whose GPUs are whose, and what is left unknown."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_ingest
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "cli"))
sys.path.insert(0, str(Path(__file__).parents[2] / "slurm"))

from command_line import CommandLine
from squeue_text import squeue_record

from advisor.watch.live import LiveWatch
from almanac.config_file import parse_config
from reports.published.live import live_jobs
from telemetry.site import Site
from telemetry.store.store import Store

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("prometheus_binaries")]

NOW_S, TIMES = 0, np.arange(0.0)


def series() -> dict[str, list[Any]]:
    """Two GPUs on each of five nodes: 1 idles; on 2 two jobs share, one of them idle; 3 serves; 4 is busy; 5 is silent
    for 15 minutes. On node 8 two MIG slices of a GPU idle; they have no GPU_UTIL, the whole GPU has."""
    found: dict[str, list[Any]] = {}

    def add(name: str, labels: Mapping[str, str], values: Any, times: np.ndarray = TIMES) -> None:
        found.setdefault(name, []).append((labels, times, np.broadcast_to(values, len(times)).astype(float)))

    for node in range(1, 6):
        for gpu in range(2):
            is_busy = node == 4 or (node, gpu) == (2, 0)
            labels = {"gpu": str(gpu), "UUID": f"GPU-{node}-{gpu}", "modelName": "NVIDIA H100",
                      "Hostname": f"n{node}.cluster.example"}  # fmt: skip
            if node == 2:
                labels["hpc_job"] = str(20 + gpu)
            times = TIMES[(TIMES < NOW_S - 2700) | (TIMES > NOW_S - 1750)] if node == 5 else TIMES
            add("DCGM_FI_DEV_GPU_UTIL", labels, 95 if is_busy else 0, times)
            add("DCGM_FI_PROF_GR_ENGINE_ACTIVE", labels, 0.9 if is_busy else 0, times)
            add("DCGM_FI_DEV_FB_USED", labels, 40_000, times)
            add("DCGM_FI_DEV_FB_FREE", labels, 41_000, times)
            add("DCGM_FI_DEV_POWER_USAGE", labels, 60 + np.arange(len(times)) % 7 / 10, times)
            add("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", labels, 0x40 if (node, gpu) == (4, 1) else 0, times)
    # XID 94 again: the gauge had it before, and only the exporter's count of it changes, 10 minutes ago.
    labels = {"gpu": "0", "UUID": "GPU-4-0", "modelName": "NVIDIA H100", "Hostname": "n4.cluster.example"}
    add("DCGM_FI_DEV_XID_ERRORS", {**labels, "err_code": "94"}, 94)
    add("DCGM_EXP_XID_ERRORS_TOTAL", {**labels, "xid": "94"}, 1 + (TIMES > NOW_S - 600))
    add("DCGM_EXP_XID_ERRORS_TOTAL", {**labels, "xid": "31"}, 7)
    for mig in ("", "1", "2"):
        labels = {"gpu": "0", "UUID": "GPU-8-0", "modelName": "NVIDIA H100", "Hostname": "n8", "GPU_I_ID": mig}
        if mig:
            add("DCGM_FI_PROF_GR_ENGINE_ACTIVE", {**labels, "GPU_I_PROFILE": "1g.10gb"}, 0)
        else:
            add("DCGM_FI_DEV_GPU_UTIL", labels, 50, TIMES[::2])
        add("DCGM_FI_DEV_POWER_USAGE", labels, 60 + np.arange(len(TIMES)) % 7 / 10)
    add("vllm:num_requests_running", {"instance": "n3:8000", "model_name": "m"}, 0)
    for name, mib in (("rss", 99_000), ("total", 100_000)):
        labels = {"instance": "n4:9306", "jobid": "40", "step": "", "task": "", "cgroup": "/slurm/job_40"}
        add(f"cgroup_memory_{name}_bytes", labels, mib * 2.0**20)
    return found


def jobs() -> bytes:
    def record(job: int, node: str, gpus: int, **fields: str) -> bytes:
        start_s = str(NOW_S - 8000)
        tres = f"cpu=1,gres/gpu={gpus}"
        return squeue_record(JobID=str(job), NodeList=node, StartTime=start_s, SubmitTime=start_s, ArrayTaskID="N/A",
                             EndTime=str(NOW_S + 9000), tres_alloc=tres, **fields)  # fmt: skip

    shards = squeue_record(JobID="60", NodeList="n6", tres_alloc="cpu=1,gres/shard=2", StartTime=str(NOW_S - 8000))
    records = [record(10, "n1", 2), record(20, "n2", 1), record(21, "n2", 1), record(30, "n3", 2), record(40, "n4", 2),
               record(50, "n5", 2), record(70, "n7", 2, Name="gone\n"), record(80, "n8", 2)]  # fmt: skip
    return b"".join([*records, shards])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A site whose Slurm is a file, and whose Prometheus is real; its now is that of the first test."""
    global NOW_S, TIMES
    NOW_S = int(time.time())
    TIMES = np.arange(NOW_S - 4200, NOW_S + 120, 30.0)
    root = tmp_path_factory.mktemp("watch")
    prometheus_ingest.write_openmetrics(root / "history.om", series())
    server = prometheus_ingest.LocalPrometheus(root / "server")
    server.load(root / "history.om")
    (root / "bin").mkdir()
    (root / "jobs").write_bytes(jobs())
    (root / "nodes").write_text("n[1-5,7] 8 1000 1 gpu:2 (null)\nn8 8 1000 1 gpu:1g.10gb:2 (null)\n")
    for name, content in (("squeue", "jobs"), ("sinfo", "nodes")):
        (root / "bin" / name).write_text(f"#!/bin/sh\nexec cat {root}/{content}\n")
        (root / "bin" / name).chmod(0o755)
    Store.create(root / "store").of("c")
    with server:
        text = (
            f'[site]\ncluster = "c"\n[slurm]\nbin_dir = "{root}/bin"\n[prometheus]\nurl = "{server.url}"\ndelay_s = 0\n'
        )
        (root / "almanac.toml").write_text(text)
        yield root


def site_at(folder: Path, now_s: int, **prometheus: Any) -> Site:
    import tomllib

    values = tomllib.loads((folder / "almanac.toml").read_text())
    values["prometheus"] |= prometheus
    return Site.of(Store.open(folder / "store").of("c"), parse_config(values), now_s)


def test_rounds_of_an_hour_find_what_a_person_would(folder: Path) -> None:
    found: dict[int, set[str]] = {}
    for now_s in range(NOW_S - 3600, NOW_S, 120):
        watch = LiveWatch(site_at(folder, now_s))
        round_, findings = watch.look()
        watch.save()
        assert not watch.notes
        for each in findings:
            found.setdefault(each.job_id, set()).add(each.kind)
    assert found == {10: {"idle"}, 21: {"idle"}, 40: {"throttled", "host_memory", "xid"}, 80: {"idle"}}
    (xid,) = [each for each in findings if each.kind == "xid"]
    assert (xid.evidence["values"], xid.evidence["gpus"]) == ([94], ["n4:0"])
    assert 480 <= NOW_S - xid.until_s <= 720
    rows = round_.gpus.to_pylist()
    assert [(row["job"], row["host"], row["gpu"]) for row in rows if row["job"] in (1, 2)] == [
        (1, "n2", "0"),
        (2, "n2", "1"),
    ]
    assert {row["sample_count"] for row in rows} == {4.0}
    assert rows[0]["hbm_total_mib"] == 81_000
    shown = {job.job_id: job for job in live_jobs(round_, findings)}
    assert (shown[10].kinds, shown[10].idle_gpus, shown[10].gpus_seen) == (("idle",), 2, 2)
    assert shown[10].idle_s >= 3000 and shown[10].says.startswith("if it waits for nothing")
    idle = next(each for each in findings if each.job_id == 10)
    assert (idle.coverage, idle.is_suspect, idle.evidence["gpus"]) == (1.0, False, ["n1:0", "n1:1"])
    slices = next(each for each in findings if each.job_id == 80)
    assert (slices.coverage, slices.is_suspect, slices.evidence["gpus"]) == (1.0, False, ["n8:0:1", "n8:0:2"])


def test_server_that_is_down_makes_all_unknown_and_keeps_the_state(folder: Path) -> None:
    watch = LiveWatch(site_at(folder, NOW_S, url="http://127.0.0.1:9", retries=0))
    before = list(watch.state.gpus)
    round_, findings = watch.look()
    assert "no connection" in round_.unknown
    assert [(each.job_id, each.kind) for each in findings] == [
        (10, "idle"),
        (21, "idle"),
        (40, "throttled"),
        (40, "xid"),
        (80, "idle"),
    ]
    assert round_.jobs["is_serving"].to_pylist() == [None] * 9
    assert {each.until_s for each in findings if each.kind != "xid"} == {NOW_S - 120}
    assert watch.state.gpus == before


def test_state_that_cannot_be_read_is_none(folder: Path) -> None:
    path = folder / "store" / "watch" / "c.json"
    kept = path.read_bytes()
    try:
        for content in (b"{", b'{"gpus": 3}', b"\xff", b"[]", kept.replace(b'"xid_met"', b'"other"')):
            path.write_bytes(content)
            watch = LiveWatch(site_at(folder, NOW_S))
            assert (watch.state.at_s, len(watch.notes)) == (0, 1)
    finally:
        path.write_bytes(kept)


def test_command_shows_the_round_and_keeps_nothing_without_apply(folder: Path) -> None:
    run = CommandLine(folder)
    before = (folder / "store" / "watch" / "c.json").read_bytes()
    text = run("watch")
    assert "10  alice  all  idle, " in text
    assert "9 running GPU jobs, 7 with counters now" in text
    answer = json.loads(run("watch", "--json"))
    assert (answer["schema"], answer["jobs"], answer["actions"]) == (1, 9, None)
    assert {each["kind"] for each in answer["findings"]} >= {"idle", "host_memory"}
    assert (folder / "store" / "watch" / "c.json").read_bytes() == before
