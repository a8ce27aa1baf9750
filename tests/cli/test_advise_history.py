"""What `almanac advise` looks at of a user's past."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from almanac.records import Request
from cli.advise import advise
from cli.app import App
from telemetry.schema import JOBS
from telemetry.store import Store

NOW_S, DAY_S = 1_760_000_000, 86_400


def test_runs_of_any_age_count_for_the_time_as_they_do_in_training(tmp_path: Path) -> None:
    starts_s = [NOW_S - days * DAY_S for days in (300, 200, 130, 100)]
    rows = [
        {
            "job_id": number, "submit_s": start_s, "start_s": start_s, "end_s": start_s + 600, "elapsed_s": 600,
            "user": "ann", "name": "train", "name_key": "train", "state": "COMPLETED", "gpu_count": 4,
        }
        for number, start_s in enumerate(starts_s, 1)
    ]  # fmt: skip
    Store.create(tmp_path / "store").write("jobs", "c", pa.Table.from_pylist(rows, schema=JOBS))
    app = App(None, str(tmp_path / "store"), "c")
    advice = advise(app, Request(user="ann", job_name="train", gpu_count=4, submit_s=NOW_S), ())
    assert advice.duration is not None
    assert advice.duration.runs == 4
