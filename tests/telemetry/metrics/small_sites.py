"""Telemetry tables of small examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from almanac.config import Config, Filters
from telemetry.attribution.allocations import JobRun
from telemetry.counters import COUNTER_COLUMNS
from telemetry.store.schema import TELEMETRY

# Nothing is set aside, so that small examples are measured.
OPEN = Config(filters=Filters(min_elapsed_s=0, min_gpu_util_pct=-1.0, min_coverage=0.0))


def telemetry(frame: pd.DataFrame) -> pa.Table:
    """A telemetry table of a frame; missing columns are null, NaN is null."""
    columns: dict[str, Any] = {"mig": "", "model": "NVIDIA A100-SXM4-40GB"}
    columns |= dict.fromkeys(("uuid", "job_label", "mig_profile"))
    full = frame.assign(**{name: value for name, value in columns.items() if name not in frame})
    full = full.assign(**{name: np.nan for name in COUNTER_COLUMNS if name not in frame})
    return pa.table([pa.Array.from_pandas(full[field.name], type=field.type) for field in TELEMETRY], schema=TELEMETRY)


def side_by_side(
    run: Callable[..., Any], cases: Sequence[tuple[pd.DataFrame, JobRun]], **more: Any
) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Run the engine once on jobs of one node each, as if each case were alone. Returns a job's row, and its GPUs'.

    The node of case 3 is n3.
    """
    frames = [frame.assign(host=f"n{number}") for number, (frame, _) in enumerate(cases)]
    jobs = [replace(job, job_id=number, hosts=(f"n{number}",)) for number, (_, job) in enumerate(cases)]
    found, gpus = run(pd.concat(frames, ignore_index=True), jobs, **more)
    return [(found[job.job_id], [row for row in gpus if row["job_id"] == job.job_id]) for job in jobs]
