"""Spatial imbalance of a job in windows of time (perlmutter-telemetry, eq. 4 and 5).

1 - sum(TC) / (g * max(TC)) needs g, the number of GPUs seen anywhere in the job, which is known at the end only. So a
partial holds, over windows with activity, the sum of sum(TC) / max(TC), with the number of windows.
"""

from __future__ import annotations

import pyarrow as pa

from telemetry.metrics.family import Family, joined
from telemetry.metrics.options import Options
from telemetry.metrics.samples import Known
from telemetry.schema import schema_of

_SCHEMA = schema_of({"job": pa.int32(), "windows": pa.int64(), "active_windows": pa.int64(), "ratio_sum": pa.float64()})
_OPEN_SCHEMA = schema_of({"job": pa.int32(), "claim": pa.int32(), "opened_ms": pa.int64(), "total": pa.float64()})

FOLD = """
SELECT job, count(*) AS windows, count(*) FILTER (WHERE highest > 0) AS active_windows,
       coalesce(sum(whole / highest) FILTER (WHERE highest > 0), 0) AS ratio_sum
FROM (SELECT job, opened_ms, sum(total) AS whole, max(total) AS highest FROM {totals} GROUP BY job, opened_ms)
GROUP BY job"""


def _totals(options: Options, known: Known) -> str:
    """TC of each claim and window. Windows of UTC minutes never cross files; those aligned to a job's start do."""
    width = options.window_ms
    opened = f"(t.time_ms - c.offset_ms) // {width} * {width} + c.offset_ms"
    return f"""
SELECT c.job, c.claim, {opened} AS opened_ms, sum({options.activity_sql(known)}) AS total
FROM {joined(known)} WHERE {options.activity_sql(known)} IS NOT NULL GROUP BY ALL"""


def _is_closed(options: Options) -> str:
    if not options.is_aligned_to_job:
        return "true"
    closed_ms = f"opened_ms + {options.window_ms}"
    return f"opened_ms >= getvariable('files_from_ms') AND {closed_ms} <= getvariable('files_until_ms')"


def _closed(options: Options, known: Known) -> str:
    return FOLD.format(totals=f"(SELECT * FROM ({_totals(options, known)}) WHERE {_is_closed(options)})")


def _open(options: Options, known: Known) -> str:
    return f"SELECT * FROM ({_totals(options, known)}) WHERE NOT ({_is_closed(options)})"


_MERGE = """
SELECT job, sum(windows) AS windows, sum(active_windows) AS active_windows, sum(ratio_sum) AS ratio_sum
FROM parts GROUP BY job"""
_OPEN_MERGE = "SELECT job, claim, opened_ms, sum(total) AS total FROM parts GROUP BY job, claim, opened_ms"

SPATIAL = Family("spatial", _SCHEMA, _closed, _MERGE)
OPEN_WINDOWS = Family("open_windows", _OPEN_SCHEMA, _open, _OPEN_MERGE, only_aligned=True)
