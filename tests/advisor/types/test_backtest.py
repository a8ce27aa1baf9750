"""The replay of GPU types: queues of a record, and each job with what was known at its submission."""

from __future__ import annotations

import math
from typing import Any

import pytest
from speed_site import NOW_S, job_frame

from advisor.types import backtest as gpu_type
from advisor.types.backtest import (
    KEPT,
    OTHER,
    SILENT,
    TypedJob,
    TypeOutcome,
    TypeQueues,
    peak_use,
    replay_types,
    score_advice,
    score_types,
)
from almanac.config import Config

HOUR_S = 3600


def test_the_wait_is_that_of_the_queue_served_in_order() -> None:
    queues = TypeQueues({"a": 4})
    assert queues.wait_s("a", 4, 0) == 0
    assert queues.wait_s("a", 5, 0) is None
    assert queues.wait_s("b", 1, 0) is None
    for row, gpus in enumerate((2, 2)):
        queues.submit(row, TypedJob("a", gpus, 100.0 * (row + 1)))
        queues.start(row, "a", 0)
    assert [queues.wait_s("a", gpus, 50) for gpus in (1, 2, 3, 4)] == [50, 50, 150, 150]
    queues.submit(2, TypedJob("a", 4, 1000.0))
    assert queues.wait_s("a", 1, 50) == 1150, "behind the one that waits for all GPUs"
    queues.end(0, "a")
    queues.end(1, "a")
    queues.start(2, "a", 60)
    assert queues.wait_s("a", 1, 60) == 1000
    assert queues.wait_s("a", 1, 2060) == pytest.approx(200), "past its prediction, a tenth of what it ran"


def test_the_most_gpus_in_use_are_the_capacity() -> None:
    assert peak_use([("a", 4, 0, 10), ("a", 4, 10, 20), ("a", 2, 15, 16), ("b", 1, 0, 1)]) == {"a": 6, "b": 1}


def record(types: list[tuple[str, float]], **more: Any) -> list[dict[str, Any]]:
    """Runs that begin ten hours apart."""
    begins_s = range(NOW_S, NOW_S + 10 * HOUR_S * len(types), 10 * HOUR_S)
    return [
        {"gpu_type": name, "elapsed_s": run_s, "submit_s": at_s, "start_s": at_s, "end_s": at_s + int(run_s), **more}
        for at_s, (name, run_s) in zip(begins_s, types, strict=True)
    ]


def test_each_job_is_scored_with_what_was_known_before_it() -> None:
    runs = [("a100", 7200.0), ("a100", 7200.0), ("h100", 3600.0), ("h100", 3600.0), ("a100", 7200.0)]
    jobs = job_frame([*record(runs), *record([("a100", 60.0)] * 3, user="bob")])
    found = replay_types(jobs, Config(), 100)
    assert len(found) == 5, "bob's family ran on one type"
    assert found[0].told is None
    assert [each.told.source for each in found if each.told] == ["own runs", "specifications", "own runs", "own runs"]
    assert found[0].advice == SILENT
    assert found[1].told.run_s == pytest.approx(7200, rel=0.01)
    assert [each.submit_s for each in replay_types(jobs, Config(), 2)] == [each.submit_s for each in found[-2:]]


def test_a_later_run_changes_no_earlier_prediction() -> None:
    runs = [("a100", 7200.0), ("h100", 3600.0), ("a100", 7000.0), ("h100", 3700.0)]
    before = replay_types(job_frame(record(runs)), Config(), 100)
    after = replay_types(job_frame(record([*runs, ("h100", 90_000.0)])), Config(), 100)
    assert [(each.told, each.advice) for each in after[:4]] == [(each.told, each.advice) for each in before]


def test_a_job_that_did_not_complete_has_no_run_time_to_score() -> None:
    runs = record([("a100", 7200.0), ("h100", 3600.0)])
    cut = record([("a100", 60.0)], state="FAILED", submit_s=NOW_S + 99 * HOUR_S, start_s=NOW_S + 99 * HOUR_S,
                 end_s=NOW_S + 100 * HOUR_S)  # fmt: skip
    assert len(replay_types(job_frame([*runs, *cut]), Config(), 100)) == 2
    cut[0] |= {"state": "TIMEOUT", "verdict": "ok", "hbm_bytes_s": 1e12}
    scores = score_types(replay_types(job_frame([*runs, *cut]), Config(), 100))[0]
    assert (scores.jobs, scores.completed) == (3, 2)


def test_scores_are_none_where_nothing_is_known() -> None:
    silent = TypeOutcome(0, "a100", math.nan, 60.0, None, False, SILENT, 5.0, None)
    (all_jobs, *_), advice = score_types([silent]), score_advice([silent, silent])
    assert (all_jobs.error, all_jobs.coverage, all_jobs.predicted) == (None, None, 0)
    assert (advice.silent, advice.median_won_hours, advice.wait_error_s) == (2, None, None)
    assert score_types([])[0].jobs == 0
    assert replay_types(job_frame([{}]).iloc[:0], Config(), 10) == []
    assert replay_types(job_frame([{"gpu_type": None, "gpu_count": None}]), Config(), 10) == []


def long_waits(fast_s: float = 3600.0, **more: Any) -> list[dict[str, Any]]:
    """Nine runs on each type, and a last job on the slow one, which the fast one would end 9 h earlier."""
    runs = [(name, run_s) for _ in range(9) for name, run_s in (("slow", 36_000.0), ("fast", fast_s))]
    last_s = NOW_S + 999 * HOUR_S
    return record(runs) + record([("slow", 36_000.0)], submit_s=last_s, start_s=last_s, end_s=last_s + 36_000, **more)


def test_the_replay_takes_the_least_gain_and_the_time_limit_into_account_as_advice_does() -> None:
    jobs = job_frame(long_waits(time_limit_s=72_000))
    [found] = replay_types(jobs, Config(), 1)
    assert (found.advice, found.won_s) == (OTHER, pytest.approx(32_400, rel=0.1))
    little = job_frame(long_waits(fast_s=32_400.0, time_limit_s=72_000))
    assert replay_types(little, Config(), 1)[0].advice == KEPT
    assert replay_types(job_frame(long_waits(time_limit_s=600)), Config(), 1)[0].advice == KEPT


def test_the_replay_asks_decide_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_type, "decide_type", lambda *given: None)
    assert replay_types(job_frame(long_waits(time_limit_s=72_000)), Config(), 1)[0].advice == KEPT
