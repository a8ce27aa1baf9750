"""The types of the rows that the site report shows, compared with the tables that have them."""

from __future__ import annotations

from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pyarrow as pa
import pytest

from reports.site import rows, tables
from telemetry.characterize import TABLES

KINDS = {int: pa.int64(), float: pa.float64(), str: pa.string()}
SCHEMAS = {table.name: table.schema for table in TABLES} | {"by_partition": tables._SHARE}


@pytest.mark.parametrize(
    ("row", "names"),
    [
        (rows.SizeRow, ["fig01_job_size", "fig01_duration", "fig01_gpu_util"]),
        (rows.PipeMixRow, ["fig02_pipe_mix"]),
        (rows.PeakRow, ["fig03_hbm_peak"]),
        (rows.IntensityRow, ["fig04_intensity"]),
        (rows.EnergyRow, ["fig05_energy"]),
        (rows.SpatialRow, ["fig06_spatial_by_util"]),
        (rows.TemporalRow, ["fig07_temporal_by_util"]),
        (rows.PipesRow, ["fig08_spatial_by_pipes", "fig09_temporal_by_pipes"]),
        (rows.ClassRow, ["fig08_spatial_by_class", "fig09_temporal_by_class"]),
        (rows.HeatmapRow, ["fig10_heatmap"]),
        (rows.CorrelationRow, ["fig11_spearman"]),
        (rows.ShareRow, ["by_partition"]),
    ],
)
def test_typed_rows_have_columns_of_their_tables(row: type, names: list[str]) -> None:
    for name in names:
        for column, hint in get_type_hints(row).items():
            assert SCHEMAS[name].field(column).type == KINDS[_known(hint)], (name, column)


def _known(hint: Any) -> type:
    """int of int | None."""
    is_union = get_origin(hint) in (Union, UnionType)
    [known] = [each for each in get_args(hint) if each is not type(None)] if is_union else [hint]
    return known  # type: ignore[no-any-return]
