"""Telemetry tables of small examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from almanac.config import Config, Filters
from telemetry.counters import COUNTER_COLUMNS
from telemetry.store.schema import TELEMETRY

# Nothing is set aside, so that small examples are measured.
OPEN = Config(filters=Filters(min_elapsed_s=0, min_gpu_util_pct=-1.0, min_coverage=0.0))


def telemetry(frame: pd.DataFrame) -> pa.Table:
    """A telemetry table of a frame; missing columns are null, NaN is null."""
    columns: dict[str, Any] = {
        "mig": "",
        "model": "NVIDIA A100-SXM4-40GB",
        "uuid": None,
        "job_label": None,
        "mig_profile": None,
    }
    full = frame.assign(**{name: value for name, value in columns.items() if name not in frame})
    full = full.assign(**{name: np.nan for name in COUNTER_COLUMNS if name not in frame})
    return pa.table([pa.Array.from_pandas(full[field.name], type=field.type) for field in TELEMETRY], schema=TELEMETRY)
