"""Jobs that take longer than they were believed to, whatever their names are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from slurm_hooks.priority.action_log import ActionLog, LoggedAction
from slurm_hooks.priority.overruns import overruns

T0_S = 1_795_000_000


def line(job_id: int, gpu_time_s: float | None = 60.0, what: str = "set", submit_s: int = T0_S) -> LoggedAction:
    return LoggedAction(what, T0_S, "lab", job_id, str(job_id), submit_s, 0, 11_878, "", gpu_time_s)


def ran(job_id: int, elapsed_s: float, user: str = "ann", **more: Any) -> dict[str, Any]:
    row = {"job_id": job_id, "submit_s": T0_S, "user": user, "elapsed_s": elapsed_s, "gpu_count": 1}
    row |= {"end_s": float(T0_S + 100 * job_id), "state": "COMPLETED"}
    return row | more


def shares(lines: list[LoggedAction], rows: list[dict[str, Any]], least_s: float = 1.0) -> dict[str, float]:
    found = overruns({each.job_id: each for each in lines}, pd.DataFrame(rows), least_s)
    return {user: each.share for user, each in found.items()}


def test_the_share_of_jobs_that_took_more_than_twice_what_they_were_believed() -> None:
    lines = [line(number) for number in range(1, 5)]
    assert shares(lines, [ran(1, 121), ran(2, 120), ran(3, 20_000), ran(4, 10)]) == {"ann": 0.5}
    assert shares(lines, [ran(1, 60, gpu_count=4), *(ran(number, 60) for number in (2, 3, 4))]) == {"ann": 0.25}


def test_how_many_times_as_long_is_a_geometric_mean_and_at_least_one() -> None:
    lines = {number: line(number) for number in range(1, 5)}
    longer = overruns(lines, pd.DataFrame([ran(1, 60), ran(2, 600), ran(3, 6000), ran(4, 60_000)]), 1.0)
    assert longer["ann"] == (0.75, pytest.approx(10**1.5))
    shorter = overruns(lines, pd.DataFrame([ran(1, 600), ran(2, 600), ran(3, 1), ran(4, 1)]), 1.0)
    assert shorter["ann"] == (0.5, 1.0), "half of the runs are ten times as long, half sixty times as short"


def test_only_the_newest_eight_count_and_each_user_for_themselves() -> None:
    lines = [line(number) for number in range(1, 21)]
    rows = [ran(number, 20_000 if number <= 8 else 10) for number in range(1, 17)]
    rows += [ran(number, 20_000, user="bob") for number in range(17, 21)]
    assert shares(lines, rows) == {"ann": 0.0, "bob": 1.0}


@pytest.mark.parametrize(
    ("lines", "more"),
    [
        ([line(number) for number in range(1, 4)], {}),
        ([line(number, None, "clear") for number in range(1, 5)], {}),
        ([line(number, 60, "ignored") for number in range(1, 5)], {}),
        ([line(number, submit_s=T0_S - 1) for number in range(1, 5)], {}),
        ([line(number) for number in range(1, 5)], {"end_s": float("nan")}),
        ([line(number) for number in range(1, 5)], {"state": "REQUEUED"}),
    ],
)
def test_what_says_nothing(lines: list[LoggedAction], more: dict[str, Any]) -> None:
    assert shares(lines, [ran(number, 20_000, **more) for number in range(1, 5)]) == {}


def test_below_the_least_gpu_time_there_is_nothing_to_gain() -> None:
    lines = [line(number, 5) for number in range(1, 5)]
    rows = [ran(number, 100) for number in range(1, 5)]
    assert (shares(lines, rows), shares(lines, rows, least_s=60)) == ({"ann": 1.0}, {"ann": 0.0})


def test_the_record_keeps_what_a_term_stood_for(tmp_path: Path) -> None:
    log = ActionLog(tmp_path / "actions")
    log.append([line(1), line(2, None, "clear")], T0_S)
    assert {number: each.gpu_time_s for number, each in log.newest("lab", T0_S).items()} == {1: 60.0, 2: None}


def test_jobs_that_are_not_on_record() -> None:
    assert overruns({1: line(1)}, pd.DataFrame([ran(9, 1)]), 1.0) == {}
    assert overruns({}, pd.DataFrame([ran(9, 1)]), 1.0) == {}
