"""Terms that job_submit may have given, by the record of what was published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from almanac.config import Priority
from slurm_hooks.advice_file import FAMILY, GPUS, USER, AdviceFile, Row
from slurm_hooks.published import EVERYBODY, Change, changed_rows, record
from slurm_hooks.published_terms import LATE_S, PublishedTerms
from telemetry.slurm.backend import PendingJob
from telemetry.store import Store

T0_S, DAY_S = 1_795_000_000, 86_400


def _file(at_s: int, *rows: Row, mode: str = "apply") -> AdviceFile:
    return AdviceFile("v1", at_s, at_s + 2 * DAY_S, mode, False, "ask", Priority(), (), rows)


def _job(submit_s: int, name: str = "train-7", user: str = "ann", gpus: int = 4) -> PendingJob:
    return PendingJob(1, "1", submit_s, user, name, gpu_count=gpus)


@pytest.fixture
def terms(tmp_path: Path) -> PublishedTerms:
    """ann's file of T0, and of a day later with another term; everybody's, in force for two days."""
    store = Store.create(tmp_path / "store")
    first = _file(T0_S, Row(FAMILY, 60, 900, "train-#", 4), Row(GPUS, 60, 700, gpus=4))
    second = _file(T0_S + DAY_S, Row(FAMILY, 90, 800, "train-#", 4))
    everybody = _file(T0_S, Row(USER, 8_640_000, 5))
    record(store, "lab", changed_rows([Change("ann", None, first), Change(EVERYBODY, None, everybody)], T0_S))
    record(store, "lab", changed_rows([Change("ann", first, second)], T0_S + DAY_S))
    record(store, "lab", changed_rows([Change("obs", None, replace(first, mode="observe"))], T0_S))
    return PublishedTerms(store, "lab")


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (_job(T0_S - LATE_S - 1), set()),
        (_job(T0_S + 60), {900}),
        (_job(T0_S + DAY_S - 1), {900}),
        (_job(T0_S + DAY_S + 60), {800, 900}),
        (_job(T0_S + DAY_S + LATE_S), {800}),
        (_job(T0_S + 3600, name="other"), {700}),
        (_job(T0_S + 3600, name="other", user="new"), {5}),
        (_job(T0_S + 3600, user="obs"), set()),
        (_job(T0_S + DAY_S + 3600, name="other"), {5}),
        (_job(T0_S + 5 * DAY_S), set()),
        (_job(T0_S + 3600, gpus=0), set()),
    ],
)
def test_terms_of_the_files_in_force_at_the_submission(
    terms: PublishedTerms, job: PendingJob, expected: set[int]
) -> None:
    assert terms(job) == expected


def test_a_store_without_publications_has_none(tmp_path: Path) -> None:
    assert PublishedTerms(Store.create(tmp_path / "store"), "lab")(_job(T0_S)) == frozenset()
