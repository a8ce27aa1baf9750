"""The list of all tables, and the function that makes them."""

from __future__ import annotations

import pyarrow as pa

from almanac.config import Config
from telemetry.characterize.headline import HEADLINE, headline
from telemetry.characterize.imbalance import IMBALANCE_TABLES
from telemetry.characterize.population import Population, select
from telemetry.characterize.relations import RELATION_TABLES
from telemetry.characterize.roofline import ROOFLINE_TABLES
from telemetry.characterize.table import Result, StudyTable
from telemetry.characterize.usage import USAGE

TABLES: tuple[StudyTable, ...] = (*USAGE, *ROOFLINE_TABLES, *IMBALANCE_TABLES, *RELATION_TABLES)
"""Every table but the headline, which is read off these."""


def characterize(population: Population, config: Config) -> dict[str, Result]:
    """Every table by its name, "headline" last. A table without suitable jobs is empty, and says why."""
    results = {table.name: _result(table, population, config) for table in TABLES}
    return {**results, HEADLINE: headline(results, config)}


def _result(table: StudyTable, population: Population, config: Config) -> Result:
    selection = select(population.jobs, table)
    if selection.jobs.empty:
        return Result(table, table.schema.empty_table(), 0, selection.left_out, _why_empty(selection.left_out))
    given = population.histograms if table.is_of_histograms else selection.jobs
    frame = table.of(given, config)[table.schema.names]
    rows = pa.Table.from_pandas(frame, schema=table.schema, preserve_index=False).replace_schema_metadata(None)
    return Result(table, rows, len(selection.jobs), selection.left_out)


def _why_empty(left_out: dict[str, int]) -> str:
    """The commonest reason for which jobs that have a verdict were left out, else for which any were."""
    if not left_out:
        return "there are no jobs"
    reasons = [why for why in left_out if not why.startswith("verdict: ")] or list(left_out)
    return max(reasons, key=lambda why: left_out[why])
