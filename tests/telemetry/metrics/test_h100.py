"""The engine agrees with the independent implementation on real H100 counters, ten samples a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from test_against_numpy import assert_same

from telemetry.attribution.allocations import JobRun
from telemetry.sources.files import FileSource

# First and last second of run e2 (mixed traffic: GPUs 0-3 nearly idle, some counters null).
START_S, END_S = 1775088787, 1775089096
PEAKS = {"fp64": 33.5e12, "fp32": 66.9e12, "fp16": 133.8e12, "tensor": 989.4e12}


@pytest.fixture(scope="module")
def frame(trace: Callable[[str], Path]) -> pd.DataFrame:
    batches = FileSource(trace("h100_dcgm_10hz.parquet"), "telemetry", None).read(START_S, END_S)
    return pa.concat_tables(batch.rows for batch in batches).to_pandas()


@pytest.mark.data
def test_every_metric_of_a_real_run_agrees_to_1e_12(
    run: Any, frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy_reference

    monkeypatch.setattr(numpy_reference, "PEAKS", PEAKS)
    monkeypatch.setattr(numpy_reference, "BANDWIDTH", 3.35e12)
    rows, gpus = run(frame, [JobRun(1, START_S, START_S, END_S, 8, ("node0",))])
    unknown = ("fp64", "fp32", "gr_engine")  # all-null columns are objects in pandas
    given = frame.assign(**{f"{name}_active_frac": np.nan for name in unknown})
    intervals_ms = {("node0", row["gpu"], ""): 1000 * (END_S - START_S) / row["expected_samples"] for row in gpus}
    units = list(intervals_ms)
    expected = numpy_reference.job_metrics(given, START_S, END_S, units, intervals_ms=intervals_ms)
    for pipe in ("fp64", "fp32"):  # the engine says null, the reference an empty sum
        assert rows[1][f"flops_{pipe}"] is None and rows[1][f"intensity_bins_{pipe}"] is None
        del expected[f"flops_{pipe}"], expected[f"intensity_bins_{pipe}"], expected[f"intensity_{pipe}"]
    assert_same(rows[1], expected, "e2")
