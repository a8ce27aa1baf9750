"""What one day of telemetry says of each job and GPU: sums, counts and extremes that merge exactly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import duckdb
import pyarrow as pa

from telemetry.counters import COUNTER_COLUMNS
from telemetry.metrics.inventory import rows

HOUR_MS = 3_600_000
# The peak and when it was first seen travel as one number: 1/64 MiB above 36 bits of ms before a job's end of time.
PEAK_STEP = 64
PEAK_SPAN = 2**36

PARTIALS = pa.schema(
    [
        pa.field("job", pa.int32()),
        pa.field("host", pa.string()),
        pa.field("gpu", pa.int16()),
        pa.field("mig", pa.string()),
        pa.field("samples", pa.int64()),
        pa.field("counted", pa.int64()),
        *(
            field
            for column in COUNTER_COLUMNS
            for field in (pa.field(f"sum_{column}", pa.float64()), pa.field(f"n_{column}", pa.int64()))
        ),
        pa.field("hbm_peak_mib", pa.float64()),
        pa.field("hbm_peak_key", pa.int64()),
        pa.field("steady_samples", pa.int64()),
        pa.field("steady_low_mib", pa.float64()),
    ]
)

_HOURLY = """
CREATE OR REPLACE TEMP TABLE hourly AS
SELECT *, unnest(range(greatest(start_ms, $since_ms) // 3600000, (least(end_ms, $until_ms) - 1) // 3600000 + 1)) AS hour
FROM claims WHERE start_ms < $until_ms AND end_ms > $since_ms
"""


def partials_sql(counted: str) -> str:
    """One row per job, host, gpu and mig of the samples within the claims of table `hourly`."""
    sums = ", ".join(f"sum({c}::DOUBLE) AS sum_{c}, count({c}) AS n_{c}" for c in COUNTER_COLUMNS)
    steady = "t.time_ms >= c.steady_from_ms AND t.time_ms < c.steady_until_ms"
    return f"""
SELECT c.job, t.host, t.gpu, t.mig, count(*) AS samples, count(*) FILTER (WHERE {counted}) AS counted, {sums},
       max(hbm_used_mib)::DOUBLE AS hbm_peak_mib,
       max(round(hbm_used_mib::DOUBLE * {PEAK_STEP})::BIGINT * {PEAK_SPAN}
           + ({PEAK_SPAN - 1} - (t.time_ms - c.start_ms))) AS hbm_peak_key,
       count(hbm_used_mib) FILTER (WHERE {steady}) AS steady_samples,
       min(hbm_used_mib::DOUBLE) FILTER (WHERE {steady}) AS steady_low_mib
FROM read_parquet($files, hive_partitioning=false) t
JOIN hourly c ON t.host = c.host AND t.gpu = c.gpu AND t.mig = c.mig AND t.time_ms // {HOUR_MS} = c.hour
  AND t.time_ms >= c.start_ms AND t.time_ms < c.end_ms
GROUP BY c.job, t.host, t.gpu, t.mig"""


def day_partials(
    db: duckdb.DuckDBPyConnection,
    files: Sequence[Path],
    claims: pa.Table,
    since_ms: int,
    until_ms: int,
    counted_ms: tuple[int, int],
) -> pa.Table:
    """Partials of the samples of files that lie in [since_ms, until_ms) and within claims.

    counted: samples in the span counted_ms.
    """
    db.register("claims", claims)
    db.execute(_HOURLY, {"since_ms": since_ms, "until_ms": until_ms}).fetchall()
    is_all = counted_ms[0] <= since_ms and until_ms <= counted_ms[1]
    counted = "true" if is_all else f"t.time_ms >= {counted_ms[0]} AND t.time_ms < {counted_ms[1]}"
    found = rows(db, partials_sql(counted), {"files": [str(path) for path in files]})
    db.unregister("claims")
    return found.cast(PARTIALS)
