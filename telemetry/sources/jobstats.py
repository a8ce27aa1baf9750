"""jobstats' summaries in a job's AdminComment: "JS1:" + base64(gzip(JSON)), a history of HBM peaks.

The JSON holds per host `gpu_used_memory` (highest seen) and `gpu_total_memory`, bytes by GPU index, and
`gpu_utilization`, mean percent by GPU index (PrincetonUniversity/jobstats). Unknown values are left out or null, such
as the utilization of MIG instances (job_defense_shield, issue 13). "JS1:None" and "JS1:Short" mean that there is no
summary.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "JS1:"
NO_SUMMARY = ("None", "Short")
MAX_ENCODED_BYTES = 1 << 20
MAX_JSON_BYTES = 8 << 20
MIB = 1 << 20
_HIGHEST = 2.0**62


@dataclass(frozen=True)
class GpuSummary:
    """The HBM peak (MiB) and mean utilization (%) of one GPU of a job; None where jobstats did not record it."""

    host: str
    gpu: str
    peak_mib: float | None
    total_mib: float | None
    util_pct: float | None = None


@dataclass(frozen=True)
class JobstatsSummary:
    """Figures of a job's GPUs, at least one. unreadable: values that are not null and make no sense."""

    gpus: tuple[GpuSummary, ...]
    unreadable: int = 0

    @property
    def hbm_peak_mib(self) -> float | None:
        """The highest peak among the job's GPUs; None if that of any GPU is not known: it may be the highest."""
        peaks = [gpu.peak_mib for gpu in self.gpus if gpu.peak_mib is not None]
        return max(peaks) if len(peaks) == len(self.gpus) else None

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
    """The summary of an AdminComment; None where there is none, it is malformed, or nothing of a GPU can be read.

    Decompression is bounded. A value that cannot be read costs no other: it is None and counted. A peak above the GPU's
    memory says nothing, and neither does that memory.
    """
    if not has_jobstats(admin_comment) or len(admin_comment) > MAX_ENCODED_BYTES:
        return None
    try:
        packed = base64.b64decode(admin_comment[len(PREFIX) :].strip(), validate=True)
        content = json.loads(_gunzip(packed))
        nodes = content["nodes"].items()
    except (zlib.error, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    values = _Values()
    gpus = tuple(gpu for host, node in nodes for gpu in _gpus(host, node, values))
    is_empty = all(gpu.peak_mib is None and gpu.util_pct is None for gpu in gpus)
    return None if is_empty else JobstatsSummary(gpus, values.unreadable)


def _gunzip(packed: bytes) -> bytes:
    """Raises ValueError where it would grow past MAX_JSON_BYTES or is cut short."""
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    data = stream.decompress(packed, MAX_JSON_BYTES)
    if not stream.eof:
        raise ValueError("too large or cut short")
    return data


@dataclass
class _Values:
    """Reads values, and counts those that make no sense."""

    unreadable: int = 0

    def mapping(self, value: Any) -> Mapping[str, Any]:
        if value is None or isinstance(value, dict):
            return value or {}
        self.unreadable += 1
        return {}

    def number(self, value: Any, high: float = math.inf) -> float | None:
        """A number from 0 to high; None for any other value."""
        if value is None:
            return None
        if type(value) in (int, float) and 0 <= value <= high and value < _HIGHEST:
            return float(value)
        self.unreadable += 1
        return None


def _gpus(host: str, node: Any, values: _Values) -> Iterator[GpuSummary]:
    """The GPUs that a node names; one named "" stands for those of a node that cannot be read."""
    fields = ("gpu_used_memory", "gpu_total_memory", "gpu_utilization")
    is_read = isinstance(node, dict) and isinstance(node.get("gpu_used_memory", {}), dict)
    node = values.mapping(node)
    used, totals, utils = (values.mapping(node.get(field)) for field in fields)
    for gpu in dict.fromkeys((*used, *totals, *utils, *(() if is_read else ("",)))):
        peak, total = values.number(used.get(gpu)), values.number(totals.get(gpu))
        if peak is not None and total is not None and peak > total:
            values.unreadable += 2
            peak = total = None
        peak_mib, total_mib = (None if size is None else size / MIB for size in (peak, total))
        yield GpuSummary(host, gpu, peak_mib, total_mib, values.number(utils.get(gpu), 100))
