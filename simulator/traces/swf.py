"""The Standard Workload Format: 18 numbers a line, header comments after `;`, -1 for unknown (Chapin et al., 1999)."""

from __future__ import annotations

import gzip
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from almanac.errors import FileFormatError
from simulator.cluster import Cluster, uniform
from simulator.workload import Workload

FIELDS = (
    "job_id", "submit_s", "wait_s", "run_s", "allocated", "cpu_time_s", "used_kb", "gpu_count", "time_limit_s",
    "requested_kb", "status", "user", "account", "name", "qos", "partition", "depends_on", "think_s",
)  # fmt: skip
"""Our names of the 18 fields. Processors are GPUs; group, executable, and queue are account, name, and QOS."""
_NUMBERED = ("user", "account", "name", "qos", "partition")
_STATES = {0: "FAILED", 1: "COMPLETED", 5: "CANCELLED"}
_PARTIAL = frozenset((2, 3, 4))
_HEADER = re.compile(r";\s*(\w+):\s*(-?[0-9]{1,15})\s*")
_LINE = re.compile(rb"\s*(-?[0-9.]+([eE][+-]?[0-9]+)?\s+){17}-?[0-9.]+([eE][+-]?[0-9]+)?\s*")


@dataclass(frozen=True)
class SwfRecords:
    """The jobs of an SWF file.

    records: for make_workload. excluded: reason to number of lines. header: its numbers by name.
    """

    records: pd.DataFrame
    excluded: Mapping[str, int]
    header: Mapping[str, int] = field(default_factory=dict)

    def cluster(self) -> Cluster | None:
        """Equal nodes with all processors, as the header has them; None if it does not say."""
        nodes, processors = self.header.get("MaxNodes", 0), self.header.get("MaxProcs", 0)
        return uniform(nodes, processors // nodes) if 0 < nodes <= processors else None


def is_swf(start: bytes) -> bool:
    """Return True if the first bytes of a file are header comments, or a line of 18 numbers."""
    lines = [line for line in start.split(b"\n")[:-1] or [start] if line.strip()]
    return bool(lines) and (lines[0].lstrip().startswith(b";") or _LINE.fullmatch(lines[0]) is not None)


def read_swf(path: Path) -> SwfRecords:
    """Read jobs from an SWF file, gzipped or not; count lines that are not jobs. Raises FileFormatError."""
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, ValueError) as error:
        raise FileFormatError(f"{path}: cannot be read: {error}", "check the file, or export it again") from error
    return parse_swf(io.StringIO(text.decode("ascii", "replace")))


def parse_swf(lines: Iterable[str]) -> SwfRecords:
    """Each line is one job. A zero or negative number of requested processors means the allocated ones."""
    rows: list[list[float]] = []
    excluded: Counter[str] = Counter()
    header: dict[str, int] = {}
    for line in lines:
        if line.lstrip().startswith(";"):
            if found := _HEADER.fullmatch(line.strip()):
                header.setdefault(found[1], int(found[2]))
        elif line.strip():
            row = _numbers(line)
            if row is None:
                excluded["not a line of 18 numbers"] += 1
            elif row[10] in _PARTIAL:
                excluded["part of a job with checkpoints"] += 1
            else:
                rows.append(row)
    table = np.array(rows, dtype="float64").reshape(len(rows), len(FIELDS))
    return SwfRecords(_records(table, header.get("UnixStartTime", 0)), dict(excluded), header)


def _numbers(line: str) -> list[float] | None:
    try:
        row = [float(part) for part in line.split()]
    except ValueError:
        return None
    return row if len(row) == len(FIELDS) else None


def _records(table: npt.NDArray[np.float64], start_s: int) -> pd.DataFrame:
    column = dict(zip(FIELDS, table.T, strict=True))
    run_s = np.where(column["run_s"] < 0, np.nan, column["run_s"])
    # A job that was canceled in the queue ran for 0 s.
    run_s = np.where((column["status"] == 5) & (run_s == 0), np.nan, run_s)
    submit_s = column["submit_s"] + max(start_s, 0)
    columns: dict[str, Any] = {
        "job_id": _texts(column["job_id"]),
        "submit_s": np.where(column["submit_s"] < 0, np.nan, submit_s),
        "run_s": run_s,
        "start_s": np.where(column["wait_s"] < 0, -1, submit_s + column["wait_s"]),
        "gpu_count": np.where(column["gpu_count"] > 0, column["gpu_count"], column["allocated"]),
        "time_limit_s": np.maximum(column["time_limit_s"], 0),
        "depends_on": _texts(column["depends_on"]),
        "state": [_STATES.get(status, "") for status in column["status"].tolist()],
    }
    return pd.DataFrame({**columns, **{name: _texts(column[name]) for name in _NUMBERED}})


def _texts(values: npt.NDArray[np.float64]) -> list[str]:
    """Whole numbers as text, "" for unknown ones."""
    return [str(int(value)) if math.isfinite(value) and value >= 0 else "" for value in values.tolist()]


def swf_text(workload: Workload, cluster: Cluster | None = None) -> str:
    """The workload as SWF. Waits are unknown in it, and names become numbers.

    Times are relative to the first submission, which the header gives. Fields without a place in SWF are lost: node
    counts, constraints, tiers, and the times of canceled jobs.
    """
    start_s = int(workload.array("submit_s")[0])
    columns = {name: _codes(workload.array(name)) for name in _NUMBERED}
    limits, gpus = workload.array("time_limit_s"), workload.array("gpu_count")
    status = {state: number for number, state in _STATES.items()}
    before = dict(reversed(workload.dependencies))
    columns |= {
        "job_id": np.arange(1, len(workload) + 1),
        "submit_s": workload.array("submit_s") - start_s,
        "run_s": workload.array("run_s"),
        "allocated": gpus,
        "gpu_count": gpus,
        "time_limit_s": np.where(limits > 0, limits, -1),
        "status": np.array([status.get(state, -1) for state in workload.array("state")]),
        "depends_on": np.array([before.get(job, -2) + 1 for job in range(len(workload))]),
    }
    unknown = np.full(len(workload), -1)
    rows = np.stack([columns.get(name, unknown) for name in FIELDS], axis=1)
    lines = ["; Version: 2.2", f"; MaxJobs: {len(workload)}", f"; UnixStartTime: {start_s}"]
    if cluster:
        lines += [f"; MaxNodes: {cluster.node_count}", f"; MaxProcs: {cluster.gpu_count}"]
    lines.append("; Note: processors are GPUs; written by almanac simulate")
    return "\n".join([*lines, *(" ".join(map(str, row)) for row in rows.tolist()), ""])


def _codes(texts: npt.NDArray[np.object_]) -> npt.NDArray[np.int64]:
    """Numbers stay as they are; other texts are numbered from 1 in the order of appearance. -1 for unknown."""
    known = [text for text in texts.tolist() if text]
    if all(re.fullmatch(r"0|[1-9][0-9]{0,14}", text) for text in known):
        return np.array([int(text) if text else -1 for text in texts.tolist()], dtype="int64")
    numbers = {text: number for number, text in enumerate(dict.fromkeys(known), 1)}
    return np.array([numbers.get(text, -1) for text in texts.tolist()], dtype="int64")
