"""Time-weighted classes: each sample that the roofline can place weighs the time to the next one of its GPU.

Samples that it cannot place are left out first, so that the one before them weighs their time too (paper-constants,
Class). The last sample of a run weighs nothing; at the end of an hour or a day its weight waits for the merge.
"""

from __future__ import annotations

import pyarrow as pa

from telemetry.metrics.base import is_compute, is_placed
from telemetry.metrics.catalogue import PIPES
from telemetry.metrics.family import Family, claimed, neighbour, starts_anew
from telemetry.metrics.options import Options
from telemetry.metrics.samples import Known
from telemetry.schema import schema_of

_SCHEMA = schema_of(
    {
        "claim": pa.int32(),
        "first_ms": pa.int64(),
        "last_ms": pa.int64(),
        **{
            name: kind
            for pipe in PIPES
            for name, kind in (
                (f"compute_ms_{pipe}", pa.int64()),
                (f"known_ms_{pipe}", pa.int64()),
                (f"last_{pipe}", pa.bool_()),
            )
        },
        "misplaced": pa.int64(),
    }
)


def _each(template: str) -> str:
    return ", ".join(template.format(p=pipe) for pipe in PIPES)


def _query(options: Options, known: Known) -> str:
    classes = ", ".join(f"{is_compute(pipe, known)} AS {pipe}" for pipe in PIPES)
    weights = _each(
        "coalesce(sum(CASE WHEN {p} THEN weight END), 0) AS compute_ms_{p}, "
        "coalesce(sum(CASE WHEN {p} IS NOT NULL THEN weight END), 0) AS known_ms_{p}, "
        "bool_or(CASE WHEN weight IS NULL THEN {p} END) AS last_{p}"
    )
    return f"""
SELECT claim, min(time_ms) AS first_ms, max(time_ms) AS last_ms, {weights},
       count(*) FILTER (WHERE weight IS NULL) - 1 + count(*) FILTER (WHERE weight <= 0) AS misplaced
FROM (SELECT c.claim, c.hour, t.*,
             CASE WHEN NOT ({starts_anew("next", known)}) THEN (next_ms - time_ms)::INTEGER END
                AS weight
      FROM (SELECT host, gpu, mig, time_ms, {classes}, {neighbour("lead", "next", known)}
            FROM samples WHERE {is_placed(known)}) t JOIN hourly c ON {claimed(known)})
GROUP BY claim, hour"""


_MERGE = f"""
SELECT claim, min(first_ms) AS first_ms, max(last_ms) AS last_ms,
       {
    _each(
        "sum(compute_ms_{p}) + coalesce(sum(carried) FILTER (last_{p}), 0) AS compute_ms_{p}, "
        "sum(known_ms_{p}) + coalesce(sum(carried) FILTER (last_{p} IS NOT NULL), 0) AS known_ms_{p}, "
        "bool_or(last_{p}) FILTER (carried IS NULL) AS last_{p}"
    )
},
       sum(misplaced) AS misplaced
FROM (SELECT *, lead(first_ms) OVER (PARTITION BY claim ORDER BY first_ms) - last_ms AS carried FROM parts)
GROUP BY claim"""

ROOFLINE = Family("roofline", _SCHEMA, _query, _MERGE, is_chained=True, only_full=True)
