"""Energy from the cumulative counter, and how the samples of a claim follow each other.

The counter is mJ since the driver was loaded: energy is the sum of its steps. Where it falls, the driver was loaded
anew, and what it shows then is what was used since (paper-constants, Energy).
"""

from __future__ import annotations

import pyarrow as pa

from telemetry.metrics.family import JOIN, Family
from telemetry.metrics.options import Options
from telemetry.schema import schema_of


def step(earlier: str, later: str) -> str:
    """SQL: mJ used between two readings."""
    return f"CASE WHEN {later} >= {earlier} THEN {later} - {earlier} ELSE {later} END"


def _query(options: Options) -> str:
    """Runs of samples that follow each other in the files, per claim and hour.

    runs is 1 and out_of_order 0 for every claim and hour of a file that is sorted and unique: it is how sorting is
    checked, at no cost of its own. energy_gaps counts samples without the counter, whose neighbours are not joined.
    """
    return f"""
SELECT claim, count(*) FILTER (WHERE is_start) AS runs, count(*) FILTER (WHERE NOT is_start AND time_ms <= last_ms) AS out_of_order,
       min(time_ms) FILTER (WHERE mj IS NOT NULL) AS first_ms, max(time_ms) FILTER (WHERE mj IS NOT NULL) AS last_ms,
       arg_min(mj, time_ms) AS first_mj, arg_max(mj, time_ms) AS last_mj,
       sum({step("last_mj", "mj")}) FILTER (WHERE NOT is_start) AS used_mj,
       count(*) FILTER (WHERE NOT is_start AND mj < last_mj) AS resets,
       count(mj) AS n_energy
FROM (SELECT claim, hour, time_ms, mj, last_ms, last_mj, last_claim IS DISTINCT FROM claim OR last_hour <> hour AS is_start
      FROM (SELECT *, lag(claim) OVER () AS last_claim, lag(hour) OVER () AS last_hour,
                   lag(time_ms) OVER () AS last_ms, lag(mj) OVER () AS last_mj
            FROM (SELECT c.claim, c.hour, t.time_ms, t.energy_mj AS mj FROM {JOIN})))
GROUP BY claim, hour"""


ENERGY = Family(name="energy", key=("claim",), schema=schema_of({}), query=_query, merge="")
