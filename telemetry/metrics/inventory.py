"""What the telemetry of a span holds: its GPUs, how often they were scraped, and which carry a job's label."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from telemetry.attribution import Inventory, Job
from telemetry.schema import schema_of

UNITS = schema_of(
    {
        "host": pa.string(),
        "gpu": pa.int16(),
        "mig": pa.string(),
        "day": pa.int64(),
        "model": pa.string(),
        "total_mib": pa.float32(),
        "counted": pa.int64(),
    }
)
_UNITS = """
SELECT host, gpu, mig, time_ms // 86400000 AS day, max(model) AS model, max(hbm_total_mib) AS total_mib,
       count(*) FILTER (WHERE time_ms >= $since_ms AND time_ms < $until_ms) AS counted
FROM read_parquet($files, hive_partitioning=false) GROUP BY ALL ORDER BY ALL
"""
_INTERVALS = """
SELECT day, quantile_disc(gap_ms, 0.5) AS gap_ms
FROM (SELECT time_ms // 86400000 AS day, (max(time_ms) - min(time_ms)) / (count(*) - 1) AS gap_ms
      FROM read_parquet($files, hive_partitioning=false)
      GROUP BY host, gpu, mig, time_ms // 86400000, time_ms // 3600000 HAVING count(*) > 1)
GROUP BY day ORDER BY day
"""
_LABELS = """
SELECT DISTINCT r.job, t.host, t.gpu, t.mig
FROM read_parquet($files, hive_partitioning=false) t
JOIN runs r ON t.job_label = r.job_id AND t.host = r.host AND t.time_ms >= r.start_ms AND t.time_ms < r.end_ms
"""


@dataclass(frozen=True)
class Intervals:
    """The discovered scrape interval of each day since 1970, s; `usual_s` stands in for days without one."""

    by_day: Mapping[int, float]
    usual_s: float | None

    def expected(self, start_s: int, end_s: int) -> float | None:
        """Samples that one GPU should have in [start_s, end_s); None where no interval is known."""
        if self.usual_s is None:
            return None
        total = 0.0
        for day in range(start_s // 86_400, (end_s - 1) // 86_400 + 1):
            seconds = min(end_s, (day + 1) * 86_400) - max(start_s, day * 86_400)
            total += seconds / self.by_day.get(day, self.usual_s)
        return total


@dataclass(frozen=True)
class Survey:
    """units: one row per host, gpu, mig and day (days since 1970): model, total_mib; counted: samples of the span."""

    units: pa.Table
    intervals: Intervals

    @property
    def counted(self) -> int:
        return int(self.units["counted"].to_numpy().sum())

    def inventory(self) -> Inventory:
        found: dict[tuple[str, int], set[tuple[int, str]]] = defaultdict(set)
        columns = (self.units[name].to_pylist() for name in ("host", "day", "gpu", "mig"))
        for host, day, gpu, mig in zip(*columns, strict=True):
            found[host, day].add((gpu, mig))
        return Inventory({key: frozenset(units) for key, units in found.items()})


def survey(db: duckdb.DuckDBPyConnection, files: Sequence[Path], counted_ms: tuple[int, int]) -> Survey:
    """Look through telemetry files, counting samples of the span. Raises duckdb.Error where one cannot be read."""
    if not files:
        return Survey(UNITS.empty_table(), Intervals({}, None))
    since_ms, until_ms = counted_ms
    units = rows(db, _UNITS, {"files": [str(path) for path in files], "since_ms": since_ms, "until_ms": until_ms})
    gaps = rows(db, _INTERVALS, {"files": [str(path) for path in files]}).to_pylist()
    by_day = {row["day"]: row["gap_ms"] / 1000 for row in gaps if row["gap_ms"]}
    ordered = sorted(by_day.values())
    return Survey(units, Intervals(by_day, ordered[(len(ordered) - 1) // 2] if ordered else None))


def labelled_units(
    db: duckdb.DuckDBPyConnection, files: Sequence[Path], jobs: Sequence[Job], numbers: Sequence[int]
) -> dict[int, set[tuple[str, int, str]]]:
    """Units (host, gpu, mig) that carry a job's label on its own hosts and in its own time, by place of the job."""
    runs = [
        (n, jobs[n].job_id, host, jobs[n].start_s * 1000, jobs[n].end_s * 1000)
        for n in numbers
        for host in jobs[n].hosts
    ]
    found: dict[int, set[tuple[str, int, str]]] = defaultdict(set)
    if not runs or not files:
        return found
    columns = dict(zip(("job", "job_id", "host", "start_ms", "end_ms"), zip(*runs, strict=True), strict=True))
    db.register("runs", pa.table({name: pa.array(values) for name, values in columns.items()}))
    for row in rows(db, _LABELS, {"files": [str(path) for path in files]}).to_pylist():
        found[row["job"]].add((row["host"], row["gpu"], row["mig"]))
    db.unregister("runs")
    return found


def rows(db: duckdb.DuckDBPyConnection, sql: str, parameters: dict[str, Any] | None = None) -> pa.Table:
    """The result of one query."""
    found: pa.Table = db.sql(sql, params=parameters or {}).to_arrow_table()
    return found
