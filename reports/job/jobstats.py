"""A job's data in the format of jobstats, so that tools that read jobstats' own summaries can read it.

`jobstats --json` prints nodes, total_time (run time in s), and gpus (allocated). Each node has gpu_used_memory
(highest) and gpu_total_memory in bytes, and gpu_utilization (mean, percent), each by GPU index
(PrincetonUniversity/jobstats, `Jobstats.__str__`). AdminComment holds the same as "JS1:" + base64(gzip(JSON)).

What is not known is left out, as jobstats itself does: CPU time and host memory of each node (almanac has those of the
job), and the utilization of a MIG instance. Several instances of one GPU have one index, so all of them are left out.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from typing import Any

from reports.job.context import JobContext
from reports.job.rows import GpuRow
from telemetry.sources.jobstats import MIB, PREFIX

SHORT_S = 60
"""Below two samples of 30 s, jobstats stores "Short" in place of data."""


def jobstats_document(context: JobContext) -> dict[str, Any]:
    """What `jobstats --json` would print. Nodes without any known figure are left out."""
    nodes: dict[str, dict[str, dict[str, float]]] = {}
    number = Counter((row["host"], row["gpu"]) for row in context.gpus)
    for row in context.gpus:
        for key, value in _figures(row).items() if number[row["host"], row["gpu"]] == 1 else ():
            nodes.setdefault(row["host"], {}).setdefault(key, {})[str(row["gpu"])] = value
    return {"nodes": nodes, "total_time": context.elapsed_s, "gpus": context.gpu_count}


def jobstats_comment(context: JobContext) -> str:
    """The text that jobstats keeps in AdminComment: "JS1:" and the packed JSON, or "JS1:Short" or "JS1:None"."""
    document = jobstats_document(context)
    if context.elapsed_s is not None and context.elapsed_s < SHORT_S:
        return f"{PREFIX}Short"
    if not document["nodes"] or document["total_time"] is None:
        return f"{PREFIX}None"
    text = json.dumps(document, separators=(",", ":"), sort_keys=True, allow_nan=False)
    return PREFIX + base64.b64encode(gzip.compress(text.encode("ascii"), mtime=0)).decode("ascii")


def _figures(row: GpuRow) -> dict[str, float]:
    """The known figures of a GPU, or of a MIG instance. Readers of one memory figure expect the other.

    jobstats has no utilization of MIG instances, and its readers expect none.
    """
    found: dict[str, float] = {}
    peak_mib, total_mib, util_pct = row["hbm_peak_mib"], row["hbm_capacity_mib"], row["mean_gpu_util_pct"]
    if peak_mib is not None and total_mib is not None and peak_mib <= total_mib:
        found = {"gpu_used_memory": round(peak_mib * MIB), "gpu_total_memory": round(total_mib * MIB)}
    return found if util_pct is None or row["mig"] else {**found, "gpu_utilization": round(util_pct, 1)}
