"""Arithmetic intensity of single samples: a * F / (d * B) flop per byte, five bins a decade (paper-constants).

Bin 0 begins at LOWEST; bin -1 holds what is below, bin BINS what is above. Samples without activity of the pipe or of
the memory have no place on a logarithmic axis and are left out, as are GPUs without known peaks.
"""

from __future__ import annotations

import pyarrow as pa

from telemetry.metrics.base import is_placed
from telemetry.metrics.catalogue import PIPES
from telemetry.metrics.family import Family, joined
from telemetry.metrics.options import Options
from telemetry.metrics.samples import Known
from telemetry.schema import schema_of

DECADES_FROM = -3
PER_DECADE = 5
BINS = 30

_SCHEMA = schema_of({"job": pa.int32(), "pipe": pa.int8(), "bin": pa.int8(), "samples": pa.int64()})


def bin_edges() -> list[float]:
    """Lower edges of bins 0..BINS, flop per byte."""
    return [10 ** (DECADES_FROM + number / PER_DECADE) for number in range(BINS + 1)]


def _bin(pipe: str) -> str:
    intensity = f"{pipe}_active_frac::DOUBLE / dram_active_frac::DOUBLE * c.ridge_{pipe}"
    place = f"floor({PER_DECADE} * (log10({intensity}) - {DECADES_FROM}))"
    return (
        f"CASE WHEN {pipe}_active_frac > 0 AND dram_active_frac > 0 THEN "
        f"greatest(-1, least({BINS}, {place}))::TINYINT END AS bin_{pipe}"
    )


def _query(options: Options, known: Known) -> str:
    bins = [f"bin_{pipe}" for pipe in PIPES]
    sets = ", ".join(f"(job, {name})" for name in bins)
    pipe = " ".join(f"WHEN grouping({name}) = 0 THEN {number}" for number, name in enumerate(bins))
    return f"""
SELECT * FROM (
  SELECT job, (CASE {pipe} END)::TINYINT AS pipe, coalesce({", ".join(bins)}) AS bin, count(*) AS samples
  FROM (SELECT c.job, {", ".join(_bin(name) for name in PIPES)} FROM {joined(known)} WHERE {is_placed(known)})
  GROUP BY GROUPING SETS ({sets}))
WHERE bin IS NOT NULL"""


_MERGE = "SELECT job, pipe, bin, sum(samples) AS samples FROM parts GROUP BY job, pipe, bin"

HISTOGRAM = Family("histogram", _SCHEMA, _query, _MERGE, only_full=True)
