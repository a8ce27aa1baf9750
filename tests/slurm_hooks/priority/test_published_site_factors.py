"""Site factors that job_submit may have given, by the record of what was published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from almanac.config import Priority
from slurm_hooks.advice.file import FAMILY, GPUS, USER, AdviceFile, Row
from slurm_hooks.advice.publication_log import EVERYBODY, PublishedChange, changed_rows, record
from slurm_hooks.priority.published_site_factors import LATE_S, PublishedSiteFactors
from telemetry.slurm.backend import PendingJob
from telemetry.store.store import Store

T0_S, DAY_S = 1_795_000_000, 86_400


def _file(at_s: int, *rows: Row, mode: str = "apply") -> AdviceFile:
    return AdviceFile("v1", at_s, at_s + 2 * DAY_S, mode, False, "ask", Priority(), (), rows)


def _job(submit_s: int, name: str = "train-7", user: str = "ann", gpus: int = 4) -> PendingJob:
    return PendingJob(1, "1", submit_s, user, name, gpu_count=gpus)


@pytest.fixture
def given(tmp_path: Path) -> PublishedSiteFactors:
    """ann's file of T0, and of a day later with another site factor; everybody's, in force for two days."""
    store = Store.create(tmp_path / "store")
    first = _file(T0_S, Row(FAMILY, 60, 900, "train-#", 4), Row(GPUS, 60, 700, gpus=4))
    second = _file(T0_S + DAY_S, Row(FAMILY, 90, 800, "train-#", 4))
    everybody = _file(T0_S, Row(USER, 8_640_000, 5))
    record(
        store.of("lab"),
        changed_rows([PublishedChange("ann", None, first), PublishedChange(EVERYBODY, None, everybody)], T0_S),
    )
    record(store.of("lab"), changed_rows([PublishedChange("ann", first, second)], T0_S + DAY_S))
    record(store.of("lab"), changed_rows([PublishedChange("obs", None, replace(first, mode="observe"))], T0_S))
    return PublishedSiteFactors(store.of("lab"), lambda: 4)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (_job(T0_S - LATE_S - 1), set()),
        (_job(T0_S + 60), {900, 700, 5}),
        (_job(T0_S + DAY_S - 1), {900, 700, 5}),
        (_job(T0_S + DAY_S + 60), {900, 800, 700, 5}),
        (_job(T0_S + DAY_S + LATE_S), {800, 5}),
        (_job(T0_S + 3600, user="new"), {5}),
        (_job(T0_S + 3600, user="obs"), {5}),
        (_job(T0_S + 5 * DAY_S), set()),
    ],
)
def test_site_factors_of_the_files_in_force_at_the_submission(
    given: PublishedSiteFactors, job: PendingJob, expected: set[int]
) -> None:
    assert {number for number in range(1000) if given(job, number)} == expected


@pytest.mark.parametrize(
    "job", [_job(T0_S + 60, name="other"), _job(T0_S + 60, name='q"'), _job(T0_S + 60, gpus=1), _job(T0_S + 60, gpus=8)]
)
def test_the_owner_cannot_keep_a_site_factor_by_another_name_or_gpu_count(
    given: PublishedSiteFactors, job: PendingJob
) -> None:
    assert given(job, 900)
    assert given(job, 700)
    assert not given(job, 901)


def test_the_row_of_any_job_gives_a_site_factor_for_each_gpu_count(tmp_path: Path) -> None:
    """1000 ln(8640000 / 3600 g) + 5, g from 1 to 4, limited by the least and greatest GPU-time."""
    store = Store.create(tmp_path / "store")
    file = _file(T0_S, Row(USER, 3600, 5))
    record(store.of("lab"), changed_rows([PublishedChange(EVERYBODY, None, file)], T0_S))
    given = PublishedSiteFactors(store.of("lab"), lambda: 4)
    assert [number for number in range(12_000) if given(_job(T0_S + 60), number)] == [6402, 6690, 7095, 7788]
    none = PublishedSiteFactors(store.of("lab"), lambda: 0)
    assert not any(none(_job(T0_S + 60), number) for number in (5, 7788))


def test_a_store_without_publications_has_none(tmp_path: Path) -> None:
    assert not PublishedSiteFactors(Store.create(tmp_path / "store").of("lab"), lambda: 4)(_job(T0_S), 900)
