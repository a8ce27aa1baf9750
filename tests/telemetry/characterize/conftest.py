"""Made-up jobs, and the tables of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest

from almanac.config import Config, Tier
from telemetry.characterize import study
from telemetry.characterize.study import POPULATION, TABLES, characterize, population_of
from telemetry.characterize.table import Result

TIERS = (
    Tier(name="hbm40g", capacity_mib=40960, gpu_model="A100-40", constraint="hbm40g"),
    Tier(name="hbm80g", capacity_mib=81920, gpu_model="A100-80", constraint="hbm80g"),
)
SITE = Config(tiers=TIERS)
Job = dict[str, Any]
Make = Callable[..., Job]
Rows = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def job() -> Make:
    """Makes a job with a verdict, an hour on 4 GPUs; every other metric is null unless given."""
    numbers = itertools.count(1)

    def make(**metrics: Any) -> Job:
        return {
            "job_id": next(numbers), "submit_s": 1_750_000_000, "verdict": "ok", "reasons": [], "state": "COMPLETED",
            "gpu_count": 4, "gpus_seen": 4, "elapsed_s": 3600, "samples": 100, **metrics,
        }  # fmt: skip

    return make


def table_of_jobs(jobs: Sequence[Job]) -> pa.Table:
    return pa.Table.from_pylist(list(jobs), schema=POPULATION)


@pytest.fixture
def results() -> Callable[..., dict[str, Result]]:
    return lambda jobs, config=SITE: characterize(population_of(table_of_jobs(jobs)), config)


@pytest.fixture
def rows(results: Callable[..., dict[str, Result]], monkeypatch: pytest.MonkeyPatch) -> Rows:
    """The rows of one table, without making the others: (name, jobs, config) -> dictionaries."""

    def of_table(name: str, jobs: Sequence[Job], config: Config = SITE) -> list[dict[str, Any]]:
        with monkeypatch.context() as patch:
            if name != study.HEADLINE:
                patch.setattr(study, "TABLES", [table for table in TABLES if table.name == name])
                patch.setattr(study, "headline", lambda *_: None)
            return results(jobs, config)[name].rows.to_pylist()

    return of_table
