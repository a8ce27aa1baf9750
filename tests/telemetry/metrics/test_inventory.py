"""The inventory of telemetry: GPUs by day, their models, and samples of the span."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from telemetry.metrics.chunks import split_files
from telemetry.metrics.inventory import Survey, survey
from telemetry.store.store import Store

START_S = 1_741_046_400  # midnight UTC
DAY = START_S // 86_400
COUNTED_MS = (-(2**60), 2**60)


def gpu(number: int, step_s: int, length_s: int, start_s: int = START_S, mig: str = "") -> pd.DataFrame:
    times = np.arange(start_s, start_s + length_s, step_s) * 1000
    return pd.DataFrame({"host": "n1", "gpu": number, "mig": mig, "time_ms": times})


def look(root: Path, *frames: pd.DataFrame, counted_ms: tuple[int, int] = COUNTED_MS) -> Survey:
    from small_sites import telemetry

    store = Store.create(root)
    store.of("c").write("telemetry", telemetry(pd.concat(frames, ignore_index=True)))
    with store.connect() as db:
        return survey(db, split_files(store.of("c").files("telemetry")), counted_ms)


def test_units_are_seen_by_the_day_with_what_their_samples_name(tmp_path: Path) -> None:
    whole, instance = gpu(0, 10, 40), gpu(1, 10, 40, mig="3")
    whole["model"] = [None, "A", "B", None]
    whole["hbm_total_mib"] = [np.nan, 40_960.0, 40_960.0, 70_000.0]
    instance["model"] = None
    found = look(tmp_path, whole, instance, gpu(0, 10, 20, START_S + 86_400))
    rows = [(row["gpu"], row["mig"], row["day"], row["model"], row["total_mib"]) for row in found.units.to_pylist()]
    assert rows == [
        (0, "", DAY, "B", 40_960.0),
        (0, "", DAY + 1, None, None),
        (1, "3", DAY, None, None),
    ]
    assert found.inventory().units["n1", DAY] == {(0, ""), (1, "3")}


def test_samples_of_the_span_are_counted(tmp_path: Path) -> None:
    """Of 8 samples from midnight on, 3 lie in [10 s, 40 s)."""
    span = ((START_S + 10) * 1000, (START_S + 40) * 1000)
    assert look(tmp_path, gpu(0, 10, 80), counted_ms=span).counted == 3
    assert look(tmp_path / "more", gpu(0, 10, 80)).counted == 8


def test_no_files_hold_nothing(tmp_path: Path) -> None:
    with Store.create(tmp_path).connect() as db:
        found = survey(db, [], COUNTED_MS)
    assert (found.counted, found.chunks, found.inventory().units) == (0, [], {})
