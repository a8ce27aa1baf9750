"""What `Counter.feeds` says is lost without a counter is what the engine loses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from telemetry.attribution.allocations import JobRun
from telemetry.counters import COUNTERS, Counter

START_S, SAMPLES = 1_741_046_400, 120
TYPICAL = {"gpu_util_pct": 80.0, "hbm_used_mib": 20_000.0, "hbm_total_mib": 40_960.0, "power_w": 300.0, "temp_c": 50.0}


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    """Two GPUs of one job, every counter known."""
    rng = np.random.default_rng(1)
    gpus = []
    for gpu in range(2):
        rows = pd.DataFrame(
            {"host": "n1", "gpu": gpu, "mig": "", "time_ms": START_S * 1000 + np.arange(SAMPLES) * 10_000}
        )
        for counter in COUNTERS:
            rows[counter.column] = TYPICAL.get(counter.column, 0.5) * (1 + 0.1 * rng.random(SAMPLES))
        gpus.append(rows.assign(energy_mj=1e9 + np.arange(SAMPLES) * 3e6))
    return pd.concat(gpus, ignore_index=True)


def missing(run: Any, frame: pd.DataFrame) -> set[str]:
    rows, _ = run(frame, [JobRun(1, START_S, START_S, START_S + SAMPLES * 10, 2, ("n1",))])
    of_whole_gpus = rows[1].keys() - {"mig_profile"}
    return {name for name in of_whole_gpus if rows[1][name] is None}


def test_nothing_is_null_with_every_counter(run: Any, frame: pd.DataFrame) -> None:
    assert missing(run, frame) == set()


@pytest.mark.parametrize("counter", COUNTERS, ids=lambda counter: counter.column)
def test_a_counter_feeds_what_is_null_without_it(run: Any, frame: pd.DataFrame, counter: Counter) -> None:
    lost = missing(run, frame.assign(**{counter.column: np.nan}))
    assert lost - {f"mean_{counter.column}"} == set(counter.feeds)
