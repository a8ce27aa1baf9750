"""Energy from the cumulative counter.

The counter is mJ since the driver was loaded, so energy is the sum of its steps in time order. Where it falls, the
driver was loaded anew, and what it then shows was used since (paper-constants, Energy).
"""

from __future__ import annotations

import pyarrow as pa

from telemetry.metrics.family import Family, claimed, neighbour, starts_anew
from telemetry.metrics.options import Options
from telemetry.metrics.samples import Known
from telemetry.schema import schema_of

_SCHEMA = schema_of(
    {
        "claim": pa.int32(),
        "first_ms": pa.int64(),
        "last_ms": pa.int64(),
        "first_mj": pa.float64(),
        "last_mj": pa.float64(),
        "used_mj": pa.float64(),
        "resets": pa.int64(),
        "n_energy": pa.int64(),
        "misplaced": pa.int64(),
    }
)


def _step(earlier: str, later: str) -> str:
    return f"CASE WHEN {later} >= {earlier} THEN {later} - {earlier} ELSE {later} END"


def _query(options: Options, known: Known) -> str:
    return f"""
SELECT claim, min(time_ms) AS first_ms, max(time_ms) AS last_ms, max(CASE WHEN is_first THEN mj END) AS first_mj,
       arg_max(mj, time_ms) AS last_mj,
       coalesce(sum(CASE WHEN NOT is_first THEN {_step("before_mj", "mj")} END), 0) AS used_mj,
       count(*) FILTER (WHERE NOT is_first AND mj < before_mj) AS resets, count(*) AS n_energy,
       count(*) FILTER (WHERE is_first) - 1 + count(*) FILTER (WHERE NOT is_first AND time_ms <= before_ms) AS misplaced
FROM (SELECT c.claim, c.hour, t.*, {starts_anew("before", known)} AS is_first
      FROM (SELECT host, gpu, mig, time_ms, energy_mj AS mj, lag(energy_mj) OVER () AS before_mj,
                   {neighbour("lag", "before", known)}
            FROM samples WHERE energy_mj IS NOT NULL) t JOIN hourly c ON {claimed(known)})
GROUP BY claim, hour"""


_MERGE = f"""
SELECT claim, min(first_ms) AS first_ms, max(last_ms) AS last_ms, arg_min(first_mj, first_ms) AS first_mj,
       arg_max(last_mj, last_ms) AS last_mj,
       sum(used_mj) + coalesce(sum({_step("before_mj", "first_mj")}) FILTER (WHERE before_mj IS NOT NULL), 0)
         AS used_mj,
       sum(resets) + count(*) FILTER (WHERE first_mj < before_mj) AS resets, sum(n_energy) AS n_energy,
       sum(misplaced) AS misplaced
FROM (SELECT *, lag(last_mj) OVER (PARTITION BY claim ORDER BY first_ms) AS before_mj FROM parts)
GROUP BY claim"""

ENERGY = Family("energy", _SCHEMA, _query, _MERGE, is_chained=True)
