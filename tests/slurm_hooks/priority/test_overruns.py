"""Jobs that take longer than they were believed to, whatever their names are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from almanac.config import Priority
from slurm.queued_job import QueuedJob
from slurm_hooks.advice.file import FAMILY, GPUS, USER, AdviceFile, AdviceRow
from slurm_hooks.advice.publication_log import EVERYBODY, PublishedChange, changed_rows, record
from slurm_hooks.jobs.log import JobLine, JobLog
from slurm_hooks.priority.reprioritize import LATE_S, PublishedSiteFactors, overruns
from telemetry.store.store import Store

T0_S = 1_795_000_000


def line(job_id: int, gpu_time_s: float | None = 60.0, what: str = "set", submit_s: int = T0_S) -> JobLine:
    return JobLine(what, T0_S, "lab", job_id, submit_s, 0, "SiteFactor", "0", "11878", "", gpu_time_s=gpu_time_s)


def ran(job_id: int, elapsed_s: float, user: str = "ann", **more: Any) -> dict[str, Any]:
    row = {"job_id": job_id, "submit_s": T0_S, "user": user, "elapsed_s": elapsed_s, "gpu_count": 1}
    row |= {"end_s": float(T0_S + 100 * job_id), "state": "COMPLETED"}
    return row | more


def shares(lines: list[JobLine], rows: list[dict[str, Any]], least_s: float = 1.0) -> dict[str, float]:
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
        ([line(number, None, "undo") for number in range(1, 5)], {}),
        ([line(number, 60, "ignored") for number in range(1, 5)], {}),
        ([line(number, submit_s=T0_S - 1) for number in range(1, 5)], {}),
        ([line(number) for number in range(1, 5)], {"end_s": float("nan")}),
        ([line(number) for number in range(1, 5)], {"state": "REQUEUED"}),
    ],
)
def test_what_says_nothing(lines: list[JobLine], more: dict[str, Any]) -> None:
    assert shares(lines, [ran(number, 20_000, **more) for number in range(1, 5)]) == {}


def test_below_the_least_gpu_time_there_is_nothing_to_gain() -> None:
    lines = [line(number, 5) for number in range(1, 5)]
    rows = [ran(number, 100) for number in range(1, 5)]
    assert (shares(lines, rows), shares(lines, rows, least_s=60)) == ({"ann": 1.0}, {"ann": 0.0})


def test_the_record_keeps_what_a_term_stood_for(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "actions", "reprioritize")
    log.append([line(1), line(2, None, "undo")], T0_S)
    assert {number: each.gpu_time_s for number, each in log.history("lab", T0_S).newest.items()} == {1: 60.0, 2: None}


def test_jobs_that_are_not_on_record() -> None:
    assert overruns({1: line(1)}, pd.DataFrame([ran(9, 1)]), 1.0) == {}
    assert overruns({}, pd.DataFrame([ran(9, 1)]), 1.0) == {}


PUBLISHED_S, DAY_S = 1_795_000_000, 86_400


def _file(at_s: int, *rows: AdviceRow, mode: str = "apply") -> AdviceFile:
    return AdviceFile("v1", at_s, at_s + 2 * DAY_S, mode, False, "ask", Priority(), (), rows)


def _job(submit_s: int, name: str = "train-7", user: str = "ann", gpus: int = 4) -> QueuedJob:
    return QueuedJob(1, "1", submit_s, user, name, gpu_count=gpus)


@pytest.fixture
def given(tmp_path: Path) -> PublishedSiteFactors:
    """ann's file of T0, and of a day later with another site factor; everybody's, in force for two days."""
    store = Store.create(tmp_path / "store")
    first = _file(PUBLISHED_S, AdviceRow(FAMILY, 60, 900, "train-#", 4), AdviceRow(GPUS, 60, 700, gpus=4))
    second = _file(PUBLISHED_S + DAY_S, AdviceRow(FAMILY, 90, 800, "train-#", 4))
    everybody = _file(PUBLISHED_S, AdviceRow(USER, 8_640_000, 5))
    record(
        store.of("lab"),
        changed_rows([PublishedChange("ann", None, first), PublishedChange(EVERYBODY, None, everybody)], PUBLISHED_S),
    )
    record(store.of("lab"), changed_rows([PublishedChange("ann", first, second)], PUBLISHED_S + DAY_S))
    record(store.of("lab"), changed_rows([PublishedChange("obs", None, replace(first, mode="observe"))], PUBLISHED_S))
    return PublishedSiteFactors(store.of("lab"), lambda: 4)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (_job(PUBLISHED_S - LATE_S - 1), set()),
        (_job(PUBLISHED_S + 60), {900, 700, 5}),
        (_job(PUBLISHED_S + DAY_S - 1), {900, 700, 5}),
        (_job(PUBLISHED_S + DAY_S + 60), {900, 800, 700, 5}),
        (_job(PUBLISHED_S + DAY_S + LATE_S), {800, 5}),
        (_job(PUBLISHED_S + 3600, user="new"), {5}),
        (_job(PUBLISHED_S + 3600, user="obs"), {5}),
        (_job(PUBLISHED_S + 5 * DAY_S), set()),
    ],
)
def test_site_factors_of_the_files_in_force_at_the_submission(
    given: PublishedSiteFactors, job: QueuedJob, expected: set[int]
) -> None:
    assert {number for number in range(1000) if given(job, number)} == expected


@pytest.mark.parametrize(
    "job",
    [
        _job(PUBLISHED_S + 60, name="other"),
        _job(PUBLISHED_S + 60, name='q"'),
        _job(PUBLISHED_S + 60, gpus=1),
        _job(PUBLISHED_S + 60, gpus=8),
    ],
)
def test_the_owner_cannot_keep_a_site_factor_by_another_name_or_gpu_count(
    given: PublishedSiteFactors, job: QueuedJob
) -> None:
    assert given(job, 900)
    assert given(job, 700)
    assert not given(job, 901)


def test_the_row_of_any_job_gives_a_site_factor_for_each_gpu_count(tmp_path: Path) -> None:
    """1000 ln(8640000 / 3600 g) + 5, g from 1 to 4, limited by the least and greatest GPU-time."""
    store = Store.create(tmp_path / "store")
    file = _file(PUBLISHED_S, AdviceRow(USER, 3600, 5))
    record(store.of("lab"), changed_rows([PublishedChange(EVERYBODY, None, file)], PUBLISHED_S))
    given = PublishedSiteFactors(store.of("lab"), lambda: 4)
    assert [number for number in range(12_000) if given(_job(PUBLISHED_S + 60), number)] == [6402, 6690, 7095, 7788]
    none = PublishedSiteFactors(store.of("lab"), lambda: 0)
    assert not any(none(_job(PUBLISHED_S + 60), number) for number in (5, 7788))


def test_a_store_without_publications_has_none(tmp_path: Path) -> None:
    assert not PublishedSiteFactors(Store.create(tmp_path / "store").of("lab"), lambda: 4)(_job(PUBLISHED_S), 900)
