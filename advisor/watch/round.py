"""One round of the watch: what Slurm and the counters say about all running jobs now, as columns.

A round of 10,000 jobs on 4 GPUs each is two tables and no object per job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from almanac.actions_config import FindingKind
from telemetry.counters import column

_TEXT, _INT, _REAL, _FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()

JOBS = pa.schema(
    [
        column("job_id", _INT, nullable=False),
        column("submit_s", _INT, "s since 1970, UTC", nullable=False),
        column("restarts", _INT, "times that Slurm requeued it", nullable=False),
        column("array_job_id", _INT, "null: no array"),
        column("array_task_id", _INT, "null: no array"),
        column("user", _TEXT, nullable=False),
        column("account", _TEXT, nullable=False),
        column("partition", _TEXT, nullable=False),
        column("name", _TEXT, "null: its user wrote a text that cannot be read", nullable=True),
        column("node_list", _TEXT, "hostlist; null: too long to read"),
        column("node_count", _INT, nullable=False),
        column("gpu_count", _INT, "GPUs allocated: whole ones, slices, or shares", nullable=False),
        column("start_s", _INT, "s since 1970, UTC, by slurmctld's clock", nullable=False),
        column("limit_end_s", _INT, "when its time limit ends it; null: no limit"),
        column("is_interactive", _FLAG, "a person works in it: salloc, srun, or Open OnDemand", nullable=False),
        column("is_shared", _FLAG, "its GPUs are MIG slices, MPS, or shards", nullable=False),
        column("comment", _TEXT, "what --comment says; null: it cannot be read"),
        column("het_job_id", _INT, "the heterogeneous job that it is a part of; null: none"),
        column("het_offset", _INT, "its place in that job; null: none"),
        column("is_serving", _FLAG, "an inference server's metrics come from its nodes; null: not known"),
        column("over_limit_prob", _REAL, "chance that it needs more time than its limit; null: not known"),
        column("host_used_mib", _REAL, "host memory of its fullest node, by a cgroup exporter; null: not known"),
        column("host_limit_mib", _REAL, "limit of that node's cgroup; null: not known"),
    ]
)
"""A row for each running job, by job_id."""

GPU_COUNTERS = (
    "gpu_util_pct", "gr_engine_active_frac", "sm_active_frac", "tensor_active_frac", "dram_active_frac",
    "fp64_active_frac", "fp32_active_frac", "fp16_active_frac", "nvlink_bytes_s", "hbm_used_mib", "hbm_total_mib",
    "power_w", "sm_clock_mhz", "throttle_reasons", "ecc_uncorrected", "row_remap_failures", "xid", "xid_changes",
)  # fmt: skip
"""Columns of a GPU in the span, NaN where unknown: counters.HIGHEST, the last XID, and the means of the others.

nvlink_bytes_s adds both directions. throttle_reasons are NVML's bits. ecc_uncorrected and
row_remap_failures are counts since the driver was loaded, or of the GPU's life. xid is a gauge that keeps its last
value after the job that met it, so that only xid_changes, of this span, says that something happened now.
"""

GPUS = pa.schema(
    [
        column("job", pa.int32(), "row of JOBS", nullable=False),
        column("host", _TEXT, nullable=False),
        column("gpu", _TEXT, "index, and MIG instance after a colon", nullable=False),
        *(column(name, _REAL, nullable=False) for name in GPU_COUNTERS),
        column("sample_count", _REAL, "samples of the span; 0: the GPU is known, but not now", nullable=False),
    ]
)
"""A row for each GPU of a running job that has samples, by job."""


@dataclass(frozen=True)
class Round:
    """Running jobs at one time. span_s: the seconds before at_s that the counters cover.

    unknown: why counters are missing for all jobs, in words ("Prometheus did not answer"); "" if they were read.
    """

    at_s: int
    span_s: int
    jobs: pa.Table
    gpus: pa.Table
    unknown: str = ""

    @property
    def seen_jobs(self) -> int:
        """The number of jobs with samples in this round."""
        return len(pc.unique(self.gpus.filter(pc.field("sample_count") > 0)["job"]))


Kind: TypeAlias = FindingKind


@dataclass(frozen=True)
class WatchFinding:
    """One thing to know about one running job.

    since_s, until_s: from the first to the last sample that shows it; a hole in the samples does not prolong it.
    coverage: share of that time with samples, of the GPU that has the fewest. evidence: numbers, and names of GPUs.
    says: what to do. is_suspect: a counter behind it can be wrong or is missing now, so that nothing is done about it
    but to say so.
    """

    job_id: int
    start_s: int
    kind: Kind
    since_s: int
    until_s: int
    coverage: float
    evidence: Mapping[str, Any]
    says: str
    is_suspect: bool = False


MOST_KEPT_S = 24 * 3600
"""Longest time that a job's own words keep it from being judged, from its start on."""
_WORD = re.compile(r"(?<![\w-])almanac:(keep|serving|loading)(?::([0-9]{1,5})([mh]))?(?![\w:-])", re.ASCII)


@dataclass(frozen=True)
class CommentWords:
    """The words for almanac in a job's comment. keep_s, loading_s: after its start; 0: not asked for."""

    is_serving: bool = False
    keep_s: int = 0
    loading_s: int = 0


def comment_words(comment: str | None) -> CommentWords:
    """Read almanac:serving, almanac:keep[:8h], and almanac:loading[:30m]; the longest counts, and MOST_KEPT_S at most.

    Without a time keep means MOST_KEPT_S, and loading 30 minutes.
    """
    times = {"serving": 0, "keep": 0, "loading": 0}
    for word, number, unit in _WORD.findall((comment or "")[:1024]):
        asked_s = int(number) * (3600 if unit == "h" else 60) if number else {"loading": 1800}.get(word, MOST_KEPT_S)
        times[word] = max(times[word], min(asked_s, MOST_KEPT_S))
    return CommentWords(times["serving"] > 0, times["keep"], times["loading"])
