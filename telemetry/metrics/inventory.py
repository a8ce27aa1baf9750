"""What the telemetry of a span holds: its GPUs, how often they were scraped, and which carry a job's label."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa

from telemetry.attribution import Inventory, Job
from telemetry.metrics.samples import rows, run, source_sql
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
_HOURS = """
CREATE OR REPLACE TEMP TABLE unit_hours AS
SELECT host, gpu, mig, time_ms // 3600000 AS hour, max(model) AS model, max(hbm_total_mib) AS total_mib,
       count(*) FILTER (WHERE time_ms >= {since_ms} AND time_ms < {until_ms}) AS counted,
       (max(time_ms) - min(time_ms)) / nullif(count({distinct} time_ms) - 1, 0) AS gap_ms
FROM {source} GROUP BY ALL
"""
_UNITS = """
SELECT host, gpu, mig, hour // 24 AS day, max(model) AS model, max(total_mib) AS total_mib,
       sum(counted)::BIGINT AS counted
FROM unit_hours GROUP BY ALL ORDER BY ALL
"""
_INTERVALS = "SELECT hour // 24 AS day, quantile_disc(gap_ms, 0.5) AS gap_ms FROM unit_hours GROUP BY ALL ORDER BY day"
_LABELS = """
SELECT DISTINCT r.job, t.host, t.gpu, t.mig
FROM {source} t
JOIN runs r ON t.job_label = r.job_id AND t.host = r.host AND t.time_ms >= r.start_ms AND t.time_ms < r.end_ms
"""
_FIRST = """
SELECT c.job, min(t.time_ms) AS first_ms
FROM {source} t
JOIN (SELECT *, unnest(range(start_ms // 3600000, (end_ms - 1) // 3600000 + 1)) AS hour FROM claims) c
  ON t.host = c.host AND t.gpu = c.gpu AND t.mig = c.mig AND t.time_ms // 3600000 = c.hour
 AND t.time_ms >= c.start_ms AND t.time_ms < c.end_ms
GROUP BY c.job
"""


@dataclass(frozen=True)
class Intervals:
    """The discovered scrape interval of each day since 1970, s."""

    by_day: Mapping[int, float]

    def expected(self, start_s: int, end_s: int) -> float | None:
        """Samples that one GPU should have in [start_s, end_s); None where no interval is known.

        The median of the other days of the span stands in for a day without an interval.
        """
        days = range(start_s // 86_400, (end_s - 1) // 86_400 + 1)
        known = sorted(self.by_day[day] for day in days if day in self.by_day)
        if not known:
            return None
        total = 0.0
        for day in days:
            seconds = min(end_s, (day + 1) * 86_400) - max(start_s, day * 86_400)
            total += seconds / self.by_day.get(day, known[(len(known) - 1) // 2])
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


def survey(
    db: duckdb.DuckDBPyConnection, files: Sequence[Path], counted_ms: tuple[int, int], *, is_unique: bool = True
) -> Survey:
    """Look through telemetry files, counting samples of the span counted_ms.

    is_unique: no sample is given twice. A scrape interval is the median, over GPUs and hours, of the mean distance of
    samples. Raises duckdb.Error where a file cannot be read.
    """
    if not files:
        return Survey(UNITS.empty_table(), Intervals({}))
    distinct = "" if is_unique else "DISTINCT"
    since_ms, until_ms = counted_ms
    run(db, _HOURS.format(source=source_sql(files), since_ms=since_ms, until_ms=until_ms, distinct=distinct))
    units = rows(db, _UNITS)
    gaps = rows(db, _INTERVALS).to_pylist()
    run(db, "DROP TABLE unit_hours")
    by_day = {row["day"]: row["gap_ms"] / 1000 for row in gaps if row["gap_ms"]}
    return Survey(units, Intervals(by_day))


def first_samples(db: duckdb.DuckDBPyConnection, files: Sequence[Path], claims: pa.Table) -> dict[int, int]:
    """Time of the first sample of each job that has any, ms."""
    if not files:
        return {}
    db.register("claims", claims)
    found = rows(db, _FIRST.format(source=source_sql(files)))
    db.unregister("claims")
    return {row["job"]: row["first_ms"] for row in found.to_pylist()}


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
    for row in rows(db, _LABELS.format(source=source_sql(files))).to_pylist():
        found[row["job"]].add((row["host"], row["gpu"], row["mig"]))
    db.unregister("runs")
    return found
