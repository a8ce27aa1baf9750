"""The demo's site with GPUs of a model that is not in the hardware table: the same evidence and the same back-test."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from advisor.memory.backtest import replay_tiers
from advisor.memory.runs import runs_of
from almanac.config import Config, Tier
from demo import GeneratedSource, SiteShape
from telemetry.history import load_history
from telemetry.ingest import IngestResult, ingest
from telemetry.metrics.summary import summarize
from telemetry.sources.source import RowBatch
from telemetry.store.store import Store

SHAPE = SiteShape(
    seed=5, days=3, nodes_40=4, nodes_80=3, users=5, jobs_per_day=90, tier80_request_share=0.4, max_nodes=1,
    duration_scale=0.1, interval_s=30,
    counters=("gpu_util_pct", "hbm_used_mib", "hbm_total_mib", "tensor_active_frac", "dram_active_frac"),
)  # fmt: skip
CONFIG = Config(tiers=(Tier("hbm40g", 40960, constraint="hbm40g"), Tier("hbm80g", 81920, constraint="hbm80g")))


class Renamed(GeneratedSource):
    """The generated site with another model name."""

    label = "NVIDIA Rubin R100"

    def read(self, since_s: int, until_s: int) -> Any:
        for batch in super().read(since_s, until_s):
            rows = batch.rows
            if batch.table == "telemetry":
                names = pa.array([self.label] * len(rows), pa.string())
                rows = rows.set_column(rows.column_names.index("model"), rows.schema.field("model"), names)
            yield RowBatch(batch.table, rows, batch.counts, batch.watermark_s)


def made(root: Path, source: GeneratedSource) -> tuple[pd.DataFrame, IngestResult]:
    store = Store.create(root).of("demo")
    result = IngestResult("demo", SHAPE.start_s, SHAPE.end_s)
    ingest(source, store, SHAPE.start_s, SHAPE.end_s, result, lambda done, total: None)
    summarize(store, CONFIG)
    return load_history(store), result


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[pd.DataFrame, IngestResult]]:
    return [made(tmp_path_factory.mktemp("site"), source(SHAPE)) for source in (GeneratedSource, Renamed)]


def test_ingest_counts_the_samples_of_a_model_that_it_does_not_know(both: Any) -> None:
    (_, listed), (_, unlisted) = both
    assert not [note for note in listed.counts.notes if "GPU model" in note]
    assert unlisted.counts.notes["GPU model not in the table: NVIDIA Rubin R100"] > 1000


def test_evidence_and_back_test_are_those_of_a_listed_model(both: Any) -> None:
    (listed, _), (unlisted, _) = both
    assert set(listed["gpu_model"].dropna()) == {"A100-40", "A100-80"}
    assert set(unlisted["gpu_model"].dropna()) == {"NVIDIA Rubin R100"}
    pd.testing.assert_frame_equal(listed.drop(columns="gpu_model"), unlisted.drop(columns="gpu_model"))
    reasons = [
        Counter(run.why_not for run in runs_of(frame, CONFIG.advice, CONFIG.tiers) if run)
        for frame in (listed, unlisted)
    ]
    assert reasons[0] == reasons[1]
    assert reasons[0][""] > 30
    pd.testing.assert_frame_equal(replay_tiers(listed, CONFIG), replay_tiers(unlisted, CONFIG))
