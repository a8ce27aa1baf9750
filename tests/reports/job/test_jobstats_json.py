"""A job in jobstats' own format: what reads jobstats' summaries finds the figures of almanac, and no others."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
from typing import Any

import pytest

from reports.job.conclusions import report_of
from reports.job.render import jobstats_comment, jobstats_document
from telemetry.sources.sacct import decode_jobstats


def read_as_jobstats_does(comment: str, run_time_s: int) -> dict[str, Any]:
    """The steps of jobstats' parse_stats: its error codes for CPU data, and its overall figures for GPUs."""
    nodes = json.loads(gzip.decompress(base64.b64decode(comment[4:])))["nodes"]
    utils, used, total = list[float](), 0, 0
    for node in nodes.values():
        utils += [node["gpu_utilization"][gpu] for gpu in sorted(node["gpu_utilization"])]
        for gpu in sorted(node["gpu_total_memory"]):
            used += node["gpu_used_memory"][gpu]
            total += node["gpu_total_memory"][gpu]
    cpu_error = int(not all("total_time" in node and "cpus" in node for node in nodes.values()))
    return {"util": sum(utils) / len(utils), "memory": 100 * used / total, "cpu_error": cpu_error, "gpus": len(utils)}


@pytest.mark.parametrize("name", ["balanced", "64-gpus", "idle", "half"])
def test_readers_of_jobstats_find_the_jobs_figures(reported: Any, name: str) -> None:
    context = reported.contexts[name]
    found = read_as_jobstats_does(jobstats_comment(report_of(context)), context.elapsed_s)
    known = [row for row in context.gpus if row["mean_gpu_util_pct"] is not None]
    assert found["gpus"] == len(known) > 0
    assert found["util"] == pytest.approx(sum(row["mean_gpu_util_pct"] for row in known) / len(known), abs=0.05)
    used, total = (sum(row[name] for row in known) for name in ("hbm_peak_mib", "hbm_capacity_mib"))
    assert found["memory"] == pytest.approx(100 * used / total)
    assert found["cpu_error"] == 1, "jobstats says that CPU data is missing: none is made up"


def test_almanac_reads_its_own_summary_back(reported: Any) -> None:
    context = reported.contexts["balanced"]
    summary = decode_jobstats(jobstats_comment(report_of(context)))
    assert summary.hbm_peak_mib == pytest.approx(max(row["hbm_peak_mib"] for row in context.gpus), abs=1e-4)
    assert {(gpu.host, gpu.gpu) for gpu in summary.gpus} == {(row["host"], str(row["gpu"])) for row in context.gpus}


def test_the_document_has_the_keys_of_jobstats_and_nothing_unknown(reported: Any) -> None:
    document = jobstats_document(report_of(reported.contexts["balanced"]))
    assert set(document) == {"nodes", "total_time", "gpus"}
    assert {key for node in document["nodes"].values() for key in node} == {
        "gpu_used_memory", "gpu_total_memory", "gpu_utilization",
    }  # fmt: skip
    assert all(type(size) is int for node in document["nodes"].values() for size in node["gpu_used_memory"].values())


def test_one_mig_instance_of_a_gpu_has_its_memory_and_no_utilization(reported: Any) -> None:
    context = reported.contexts["mig"]
    alone = dataclasses.replace(context, gpus=context.gpus[:1])
    (node,) = jobstats_document(report_of(alone))["nodes"].values()
    assert node == {"gpu_used_memory": {"0": 4 << 30}, "gpu_total_memory": {"0": 40_192 << 20}}


@pytest.mark.parametrize("name", ["no-telemetry", "never-started", "mig"])
def test_without_figures_there_is_no_summary(reported: Any, name: str) -> None:
    """As jobstats has it; two MIG instances of one GPU have one index."""
    assert jobstats_comment(report_of(reported.contexts[name])) == "JS1:None"
    assert jobstats_document(report_of(reported.contexts[name]))["nodes"] == {}
    assert decode_jobstats("JS1:None") is None
