"""Falls of MFU: found once, by evidence, and not by noise."""

from __future__ import annotations

import random
from typing import Any

import pytest

from reports.job.mfu import LEAST_RUNS, find_falls

BEFORE = [0.44, 0.45, 0.47, 0.46, 0.45]


def run(number: int, mfu: float | None, **more: Any) -> dict[str, Any]:
    start_s = 1_750_000_000 + 10_000 * number
    return {
        "job_id": number, "submit_s": start_s - 60, "start_s": start_s, "end_s": start_s + 3600, "elapsed_s": 3600,
        "state": "COMPLETED", "verdict": "ok", "mfu_frac": mfu, "user": "ann", "name_key": "train-bert-#",
        "gpu_count": 4, "gpu_model": "A100-80", "mig_profile": None, "main_pipe": "tensor", **more,
    }  # fmt: skip


def falls(values: list[float | None], **of_last: Any) -> dict[int, Any]:
    rows = [run(number, mfu) for number, mfu in enumerate(values)]
    rows[-1] |= of_last
    random.Random(1).shuffle(rows)
    return {job_id: fall for (job_id, _), fall in find_falls(rows).items()}


def test_a_fall_is_found_once_with_what_was_before() -> None:
    found = falls([*BEFORE, 0.31, 0.31, 0.30, 0.46, 0.45])
    assert list(found) == [5]
    assert (found[5].before, found[5].runs, round(found[5].share, 3)) == ("44% to 47%", 5, 0.295)


@pytest.mark.parametrize(
    "values",
    [
        [*BEFORE, 0.41],  # too little
        [*BEFORE[1:], 0.31],  # too few runs
        [0.44, 0.30, 0.47, 0.46, 0.45, 0.31],  # as low before
        [0.30, 0.70, 0.35, 0.60, 0.45, 0.25],  # a family that varies
        [0.050, 0.051, 0.052, 0.050, 0.051, 0.035],  # too few points
        [*BEFORE, None], [*BEFORE, 0.0], [*BEFORE, float("nan")], [*BEFORE, float("inf")],
    ],
)  # fmt: skip
def test_no_fall(values: list[float | None]) -> None:
    assert falls(values) == {}


@pytest.mark.parametrize(
    "other",
    [
        {"user": "bob"}, {"gpu_count": 8}, {"gpu_model": "H100-80"}, {"main_pipe": "fp32"}, {"name_key": "other-#"},
        {"elapsed_s": 1000}, {"elapsed_s": 9000}, {"elapsed_s": 300}, {"state": "FAILED"}, {"verdict": "low coverage"},
        {"mig_profile": "3g.40gb"}, {"name_key": None}, {"state": None}, {"elapsed_s": None}, {"verdict": None},
    ],
)  # fmt: skip
def test_only_comparable_runs_are_compared(other: dict[str, Any]) -> None:
    assert list(falls([*BEFORE, 0.31])) == [5]
    assert falls([*BEFORE, 0.31], **other) == {}


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.2, 0.5])
def test_unchanged_families_seldom_give_an_alarm(spread: float) -> None:
    """2,000 families of 12 runs with a log-normal MFU: a run in a thousand at most is said to have fallen."""
    random_, judged, alarms = random.Random(7), 0, 0
    for _ in range(2000):
        values: list[float | None] = [0.3 * random_.lognormvariate(0, spread) for _ in range(12)]
        alarms += len(falls(values))
        judged += len(values) - LEAST_RUNS
    assert alarms <= judged / 1000
