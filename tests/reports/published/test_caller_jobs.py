"""One way to get a caller's jobs: from the store, and from what was published for them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from almanac.config import Config
from almanac.errors import FileFormatError
from almanac.published.files import user_folder
from reports.published.caller import (
    JOBS,
    CallerJobs,
    JobList,
    PublishedJobs,
    PublishedRun,
    StoreJobs,
    history_columns,
)  # fmt: skip
from telemetry.site import Site
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

DAY_S = 86_400
ROWS = [
    {
        "job_id": job_id, "submit_s": job_id * DAY_S, "start_s": job_id * DAY_S, "end_s": job_id * DAY_S + 60,
        "user": user, "gpu_count": 1, "state": "COMPLETED", "array_job_id": array, "array_task_id": array and 0,
    }
    for job_id, user, array in ((1, "ann", None), (2, "bob", None), (3, "ann", 30), (4, "bob", 30))
]  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.create(tmp_path / "store")
    store.of("c").write("jobs", pa.Table.from_pylist(ROWS, schema=TABLES["jobs"].schema))
    return store


def in_store(store: Store, only: str | None) -> CallerJobs:
    return StoreJobs(Site.of(store.of("c"), Config(), 9 * DAY_S), only)


def published(folder: Path) -> CallerJobs:
    own = [row for row in ROWS if row["user"] == "ann"]
    names = ("job_id", "submit_s", "end_s", "array_job_id", "array_task_id", "gpu_count")
    none = {"het_job_id": None, "het_offset": None, "report": None}
    runs = tuple(PublishedRun(**{name: row[name] for name in names}, **none) for row in own)
    index = JobList("c", "ann", 7 * DAY_S, history_columns(), runs, tuple(own))
    path = user_folder(folder, str(os.getuid())) / JOBS.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(JOBS.render(index))
    path.chmod(0o600)
    return PublishedJobs(folder, os.getuid())


def ids(rows: Iterable[Mapping[str, Any]]) -> list[int]:
    return sorted(row["job_id"] for row in rows)


def test_both_give_a_user_their_own_jobs(store: Store, tmp_path: Path) -> None:
    for jobs in (in_store(store, "ann"), published(tmp_path)):
        assert ids(jobs.history(["job_id"])) == [1, 3]
        assert ids(jobs.history(["job_id"], since_s=2 * DAY_S)) == [3]
        assert ids(jobs.history(["job_id"], until_s=3 * DAY_S)) == [1]
        assert next(iter(jobs.history(["job_id"]))).keys() == {"job_id"}
        assert ids(jobs.history(["job_id"], among={"submit_s": [3 * DAY_S], "job_id": [1, 3]})) == [3]
        assert 3 in ids(jobs.runs_named([30]))


@pytest.mark.parametrize("user", [None, "bob"])
def test_naming_another_user_shows_none_of_their_jobs(store: Store, tmp_path: Path, user: str | None) -> None:
    for jobs in (in_store(store, "ann"), published(tmp_path)):
        assert ids(jobs.history(["job_id"], user=user)) == [1, 3]
        assert 4 not in ids(jobs.runs_named([30])) and 2 not in ids(jobs.runs_named([2]))
    assert in_store(store, "ann").reports([2, 4]) == []


def test_an_operator_sees_all_or_those_of_one_user(store: Store) -> None:
    jobs = in_store(store, None)
    assert ids(jobs.history(["job_id"])) == [1, 2, 3, 4]
    assert ids(jobs.history(["job_id"], user="bob")) == [2, 4]
    assert ids(jobs.runs_named([30, 1])) == [1, 3, 4]


def test_only_published_jobs_have_a_time(store: Store, tmp_path: Path) -> None:
    assert in_store(store, None).published_s is None
    assert published(tmp_path).published_s == 7 * DAY_S


def test_columns_and_values_that_do_not_fit_are_named(store: Store, tmp_path: Path) -> None:
    own, stored = published(tmp_path), in_store(store, "ann")
    assert own.columns == stored.columns and own.columns["job_id"].kind == "number"
    own.index.history[0]["gpu_count"] = "many"
    with pytest.raises(FileFormatError, match="gpu_count is 'many'"):
        list(own.history(["gpu_count"]))
