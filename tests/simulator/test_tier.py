"""Users who follow the memory advice, on two nodes of one GPU: traces with answers that were worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from advisor.memory.backtest import DOWN, KEPT, SILENT
from almanac.config import Config
from simulator.memory import advice_of_jobs, ask_for_tiers, compare_waits, follow_advice, tier_cluster
from simulator.workload import Workload, make_workload

CLUSTER = tier_cluster({"big": 1, "small": 1}, 1)


def workload(run_s: list[int], tiers: list[str], users: list[str] | None = None) -> Workload:
    users = users or [f"user{number}" for number in range(len(run_s))]
    rows = pd.DataFrame({"submit_s": 0, "run_s": run_s, "gpu_count": 1, "tier": tiers, "user": users, "partition": "x"})
    return ask_for_tiers(make_workload(rows), CLUSTER)


def advice(*rows: tuple[str, str, float]) -> pd.DataFrame:
    """rows: (move, advised tier, need in MiB); the small tier can use 40,000 MiB."""
    frame = pd.DataFrame(rows, columns=["move", "advised", "need_mib"])
    return frame.assign(usable_mib=frame["advised"].map({"small": 40_000.0, "big": 80_000.0}))


def waits(recorded: Workload, rows: pd.DataFrame, share: float = 1.0) -> dict[str, tuple[float, float]]:
    """Mean wait as recorded and with the advice, by group."""
    followed = follow_advice(recorded, rows, share, 1)
    found = compare_waits(recorded, followed, CLUSTER, Config())
    return {each.group: (each.recorded_s.mean, each.followed_s.mean) for each in found}


def test_a_job_that_moves_down_no_longer_waits_for_the_larger_tier() -> None:
    recorded = workload([100, 60], ["big", "big"])
    rows = advice((KEPT, "big", 70_000), (DOWN, "small", 30_000))
    assert waits(recorded, rows) == {"all": (50, 0), "big": (50, 0), "moved jobs": (100, 0)}


def test_a_job_that_needs_more_dies_there_and_comes_again_as_it_was() -> None:
    recorded = workload([1000, 900], ["big", "big"])
    rows = advice((KEPT, "big", 70_000), (DOWN, "small", 50_000))
    followed = follow_advice(recorded, rows, 1.0, 1)
    jobs = followed.workload.jobs
    assert jobs["run_s"].tolist() == [1000, 600, 900]
    assert jobs["constraint"].tolist() == ["big", "small", "big"]
    assert followed.workload.dependencies == ((2, 1),)
    assert followed.last.tolist() == [0, 2]
    assert followed.is_out_of_memory.tolist() == [False, True]
    # It starts again at 1,000 s, when the larger node is free.
    assert waits(recorded, rows)["moved jobs"] == (1000, 1000)
    # With nobody on the larger node, only the run that dies is lost.
    alone = workload([900], ["big"])
    assert waits(alone, rows.iloc[1:].reset_index(drop=True))["moved jobs"] == (0, 600)


def test_an_unknown_need_is_counted_and_kills_no_job() -> None:
    followed = follow_advice(workload([900], ["big"]), advice((DOWN, "small", math.nan)), 1.0, 1)
    assert (followed.is_need_unknown.tolist(), followed.is_out_of_memory.tolist()) == ([True], [False])
    assert len(followed.workload) == 1


def test_only_the_chosen_share_of_users_follows_and_a_seed_chooses_which() -> None:
    recorded = workload([10] * 40, ["big"] * 40, [f"user{number // 2}" for number in range(40)])
    rows = advice(*[(DOWN, "small", 1.0)] * 40)

    def moved(share: float, seed: int) -> list[str]:
        followed = follow_advice(recorded, rows, share, seed)
        return sorted(set(recorded.array("user")[followed.moved == DOWN]))

    assert (moved(0.0, 1), len(moved(0.25, 1)), len(moved(1.0, 1))) == ([], 5, 20)
    assert moved(0.25, 1) == moved(0.25, 1)
    assert moved(0.25, 1) != moved(0.25, 2)
    assert follow_advice(recorded, rows, 0.0, 1).workload.jobs["constraint"].tolist() == ["big"] * 40


def test_advice_is_found_by_job_and_start() -> None:
    known: dict[str, Any] = {"submit_s": 0, "run_s": 9, "gpu_count": 1}
    recorded = make_workload(
        pd.DataFrame([{**known, "job_id": "7", "start_s": 5}, {**known, "job_id": "8", "start_s": 6}])
    )
    history = pd.DataFrame({"job_id": [8, 7, 7], "start_s": [6, 99, 5]})
    outcomes = advice((SILENT, "", math.nan), (DOWN, "small", 1.0), (KEPT, "big", 2.0)).assign(row=[0, 1, 2])
    found = advice_of_jobs(recorded, history, outcomes)
    assert found["move"].tolist() == [KEPT, SILENT]
    missing = advice_of_jobs(recorded, history.iloc[:1], outcomes.iloc[:1])
    assert missing["move"].tolist() == ["", ""]


def test_a_tier_that_the_cluster_does_not_have_asks_for_nothing() -> None:
    rows = pd.DataFrame({"submit_s": 0, "run_s": [5], "gpu_count": 1, "tier": ["\x1b[31m"], "constraint": ["gpu&x"]})
    assert ask_for_tiers(make_workload(rows), CLUSTER).jobs["constraint"].tolist() == [""]
