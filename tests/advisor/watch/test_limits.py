"""Jobs that will meet their time limit, by the runs of their family, on a site without Prometheus."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "slurm"))

from squeue_text import squeue_record

from advisor.watch.live import LiveWatch
from almanac.config import Config
from telemetry.site import Site
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

NOW_S = 1_795_880_000
LIMIT_S = 3600
Runs = Sequence[tuple[int, str]]


def found(folder: Path, runs: Runs, gpus: int = 2, left_s: int = 1200) -> list[tuple[str, float]]:
    """Kind and chance of what is found of a job with left_s until its limit. runs: length and state of earlier ones."""
    start_s = NOW_S - LIMIT_S + left_s
    first_s = NOW_S - 80_000
    family = {"user": "alice", "name": "train", "name_key": "train", "gpu_count": 2, "node_count": 1}
    rows = [
        {"job_id": 100 + number, "submit_s": first_s - 9, "start_s": first_s, "end_s": first_s + length_s,
         "elapsed_s": length_s, "state": state, "partition": "all", "time_limit_s": LIMIT_S, **family}
        for number, (length_s, state) in enumerate(runs)
    ]  # fmt: skip
    store = Store.create(folder / "store").of("c")
    store.write("jobs", pa.Table.from_pylist(rows, schema=JOBS))
    record = squeue_record(StartTime=str(start_s), EndTime=str(start_s + LIMIT_S), tres_alloc=f"gres/gpu={gpus}")
    site = Site.of(store, Config(), NOW_S).but(run=lambda argv: record)
    round_, findings = LiveWatch(site).look()
    assert round_.unknown == "no Prometheus is configured"
    return [(each.kind, each.evidence["chance"]) for each in findings]


@pytest.mark.parametrize(
    ("runs", "chance"),
    [
        ([(3600, "TIMEOUT")] * 4, 0.9),
        ([(3600, "TIMEOUT")] * 4 + [(60, "COMPLETED")] * 40, 0.9),
        ([(3600, "TIMEOUT")] * 4 + [(2600, "TIMEOUT")] * 9, 0.9),
        ([(3600, "TIMEOUT")] * 4 + [(3000, "COMPLETED")] * 3, None),
        ([(3600, "TIMEOUT")] * 2, None),
        ([], None),
    ],
)
def test_runs_that_lasted_as_long_say_whether_the_limit_is_met(
    tmp_path: Path, runs: Runs, chance: float | None
) -> None:
    assert found(tmp_path, runs) == ([] if chance is None else [("limit", chance)])


def test_other_families_and_far_limits_say_nothing(tmp_path: Path) -> None:
    runs = [(3600, "TIMEOUT")] * 9
    assert found(tmp_path / "a", runs, gpus=4) == []
    assert found(tmp_path / "b", runs, left_s=2000) == []
    assert found(tmp_path / "c", runs, left_s=1790) != []
