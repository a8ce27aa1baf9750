"""jobstats' summaries in a job's AdminComment: "JS1:" + base64(gzip(JSON)), a history of HBM peaks.

The JSON holds per host `gpu_used_memory` (highest seen) and `gpu_total_memory`, bytes by GPU index, and
`gpu_utilization`, mean percent by GPU index (PrincetonUniversity/jobstats). Unknown values are left out, such as the
utilization of MIG instances. "JS1:None" and "JS1:Short" mean that there is no summary.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PREFIX = "JS1:"
NO_SUMMARY = ("None", "Short")
MAX_ENCODED_BYTES = 1 << 20
MAX_JSON_BYTES = 8 << 20
MIB = 1 << 20


@dataclass(frozen=True)
class GpuSummary:
    """The HBM peak (MiB) and mean utilization (%) of one GPU of a job; None where jobstats did not record it."""

    host: str
    gpu: str
    peak_mib: float
    total_mib: float | None
    util_pct: float | None = None


@dataclass(frozen=True)
class JobstatsSummary:
    """What jobstats recorded of a job's GPUs; at least one."""

    gpus: tuple[GpuSummary, ...]

    @property
    def hbm_peak_mib(self) -> float:
        return max(gpu.peak_mib for gpu in self.gpus)

    @property
    def hbm_total_mib(self) -> float | None:
        """The smallest capacity among the job's GPUs: what every one of them had; None where unknown."""
        return min((gpu.total_mib for gpu in self.gpus if gpu.total_mib is not None), default=None)

    @property
    def gpu_util_pct(self) -> float | None:
        """Mean over the GPUs with a known utilization, as jobstats prints it; None if there is none."""
        known = [gpu.util_pct for gpu in self.gpus if gpu.util_pct is not None]
        return sum(known) / len(known) if known else None


def has_jobstats(admin_comment: str) -> bool:
    """Whether a summary is there to be read, well formed or not."""
    return admin_comment.startswith(PREFIX) and admin_comment[len(PREFIX) :].strip() not in NO_SUMMARY


def decode_jobstats(admin_comment: str) -> JobstatsSummary | None:
    """The summary of an AdminComment; None where there is none, it is malformed, or it names no GPU memory.

    Decompression is bounded. A peak above the GPU's memory makes the whole summary malformed.
    """
    if not has_jobstats(admin_comment) or len(admin_comment) > MAX_ENCODED_BYTES:
        return None
    try:
        packed = base64.b64decode(admin_comment[len(PREFIX) :].strip(), validate=True)
        content = json.loads(_gunzip(packed))
        gpus = tuple(_gpus(content["nodes"]))
    except (zlib.error, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return JobstatsSummary(gpus) if gpus else None


def _gunzip(packed: bytes) -> bytes:
    """Raises ValueError where it would grow past MAX_JSON_BYTES or is cut short."""
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    data = stream.decompress(packed, MAX_JSON_BYTES)
    if not stream.eof:
        raise ValueError("too large or cut short")
    return data


def _gpus(nodes: dict[str, Any]) -> Iterator[GpuSummary]:
    for host, node in nodes.items():
        totals, utils = node.get("gpu_total_memory") or {}, node.get("gpu_utilization") or {}
        for gpu, used in (node.get("gpu_used_memory") or {}).items():
            peak, total = _mib(used), _mib(totals[gpu]) if gpu in totals else None
            if total is not None and peak > total:
                raise ValueError("more memory in use than there is")
            yield GpuSummary(host, gpu, peak, total, _percent(utils[gpu]) if gpu in utils else None)


def _mib(value: Any) -> float:
    return _number(value, "bytes") / MIB


def _percent(value: Any) -> float:
    percent = _number(value, "percent")
    if percent > 100:
        raise ValueError("a utilization above 100%")
    return percent


def _number(value: Any, unit: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"not a number of {unit}: {value!r:.40}")
    return value
