"""The counters of a job's GPUs over time, from the samples of its hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from reports.job.series import SeriesRequest, load_series
from telemetry.store.schema import TELEMETRY
from telemetry.store.store import Store

START_S = 1_741_046_400


@pytest.mark.parametrize("host", ["nl2", "NL2", "nl2.cluster.example", "nl2:9400"])
def test_the_exporter_may_write_the_host_of_a_gpu_in_another_way(tmp_path: Path, host: str) -> None:
    """gpu_metrics names hosts as Slurm does, and the samples as the exporter does."""
    rows: list[dict[str, Any]] = [
        {"host": name, "gpu": 0, "mig": "", "time_ms": (START_S + at) * 1000, "gpu_util_pct": util, "hbm_used_mib": 5.0}
        for name, util in ((host, 40.0), ("nl3", 90.0))
        for at in range(0, 600, 10)
    ]
    store = Store.create(tmp_path / "s").of("c")
    store.write("telemetry", pa.Table.from_pylist(rows, schema=TELEMETRY))
    [found] = load_series(store, [SeriesRequest(START_S, START_S + 600, (("nl2", 0, ""),), 10.0)])
    assert found is not None and found.units == ("nl2:0",)
    assert found.values["gpu_util_pct"] == ((40.0,) * 30,)
    assert load_series(store, [SeriesRequest(START_S, START_S + 600, (("nl4", 0, ""),), 10.0)]) == [None]


@pytest.mark.parametrize(
    ("engines", "engine", "sm", "used_pct"),
    [(2, 0.5, None, 100.0), (2, 0.2, 0.9, 90.0), (None, 0.5, 0.9, 90.0), (None, 0.5, None, None),
     (2, None, None, None)],
)  # fmt: skip
def test_what_is_not_known_of_a_slice_is_not_busy(
    tmp_path: Path, engines: int | None, engine: float | None, sm: float | None, used_pct: float | None
) -> None:
    rows: list[dict[str, Any]] = [
        {"host": "n1", "gpu": 0, "mig": "1", "time_ms": (START_S + at) * 1000, "hbm_used_mib": 5.0,
         "gr_engine_active_frac": engine, "sm_active_frac": sm}
        for at in range(0, 600, 10)
    ]  # fmt: skip
    store = Store.create(tmp_path / "s").of("c")
    store.write("telemetry", pa.Table.from_pylist(rows, schema=TELEMETRY))
    unit = SeriesRequest(START_S, START_S + 600, (("n1", 0, "1"),), 10.0, engines=(engines,))
    [found] = load_series(store, [unit])
    assert found is not None
    assert {value for row in found.values.get("gpu_util_pct", ((None,),)) for value in row} == {used_pct}
