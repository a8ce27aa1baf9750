"""A user's own reports: they say what the store says, of that user alone, and only what changed is made."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from publisher import CLUSTER, NAMES, Publisher
from rich.console import Console

from almanac.config import Config, Reports
from almanac.errors import StoreError
from reports.job.context import JobContext
from reports.job.report import render_email, render_page, to_json
from reports.job.terminal import render_terminal
from reports.published.choice import Chosen, newest_runs
from reports.published.folder import MANIFEST
from reports.published.format import FORMAT, MAX_FILE_BYTES, pack_report, unpack_report
from telemetry.history import HISTORY, load_history_table
from telemetry.metrics.summary import summarize
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

DAY_S = 86_400
CASES = {
    "balanced": 101, "idle": 201, "no-telemetry": 301, "half": 401, "out-of-memory": 501, "64-gpus": 601,
    "cancelled": 701, "requeued": 801, "mig": 901, "array-task": 1002, "hostile": 1101, "never-started": 1201,
    "failed": 1301, "timeout": 1401, "reserved": 1501,
}  # fmt: skip


def on_terminal(context: JobContext) -> str:
    console = Console(width=100, file=io.StringIO(), highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(render_terminal(context, 100))
    return capture.get()


@pytest.mark.parametrize("case", CASES)
def test_what_is_published_says_what_the_store_says(reported: Any, case: str) -> None:
    context = reported.contexts[case]
    own = unpack_report(pack_report(context))
    assert dataclasses.replace(own, series=None) == dataclasses.replace(context, series=None)
    mail, of_store = render_email(own, reported.config), render_email(context, reported.config)
    assert (mail.subject, mail.text, mail.html) == (of_store.subject, of_store.text, of_store.html)
    assert list(mail.images) == list(of_store.images)
    assert to_json(own) == to_json(context)
    assert render_page(own).startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("no-telemetry", "never-started")])
def test_published_samples_have_three_digits(reported: Any, case: str) -> None:
    context = reported.contexts[case]
    own = unpack_report(pack_report(context))
    assert own.series is not None
    assert (own.series.units, own.series.bin_s) == (context.series.units, context.series.bin_s)
    np.testing.assert_allclose(own.series.util_pct, context.series.util_pct, rtol=6e-4, atol=1e-6)
    used = context.series.values["hbm_used_mib"]
    np.testing.assert_allclose(own.series.values["hbm_used_mib"], used, rtol=6e-4)
    # A block can fall on the other side of a border: the terminals may differ in a few characters.
    ours, theirs = on_terminal(own), on_terminal(context)
    assert len(ours) == len(theirs)
    assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 0.01 * len(theirs)


def test_each_user_gets_their_own_jobs_and_no_others(publisher: Publisher) -> None:
    done = publisher()
    assert (done.lists, done.reports, done.waiting) == (2, 59, 0)
    alice, bob = (publisher.of(user).index for user in ("alice", "bob"))
    assert {run.job_id for run in bob.runs} == set(range(1, 31))
    assert {run.job_id for run in alice.runs} == {*CASES.values(), *range(111, 123), 1001, 1003}
    assert all(run.report for run in (*alice.runs, *bob.runs))
    for name, content in publisher.files().items():
        uid, whole = int(name.split("/")[0]), gzip.decompress(content)
        other = {60_001: b'"bob"', 60_002: b'"alice"'}[uid]
        assert other not in whole


def test_reports_read_back_by_id_and_the_newest_run_counts(publisher: Publisher) -> None:
    publisher()
    own = publisher.of("alice")
    again, plain = own.contexts([801, 101, 801])
    assert [context.job_id for context in (again, plain)] == [801, 101]
    assert again.job["restarts"] == 1 and len(again.earlier_runs) == 1
    assert own.contexts([999]) == []


def test_the_list_has_the_rows_that_almanac_jobs_shows(publisher: Publisher) -> None:
    publisher()
    own = publisher.of("alice").history(HISTORY.names)
    stored = load_history_table(publisher.reported.store.of(CLUSTER), HISTORY.names, user="alice")
    as_rows = [
        [{name: None if value != value else value for name, value in row.items()} for row in table.to_pylist()]
        for table in (own, stored)
    ]
    assert own.schema == stored.schema
    assert as_rows[0] == as_rows[1]


def test_nothing_is_made_again_where_nothing_changed(publisher: Publisher) -> None:
    publisher()
    before = publisher.times()
    publisher.now_s += 600
    again = publisher()
    assert (again.lists, again.reports, again.removed) == (0, 0, 0)
    assert publisher.times() == before


def test_a_run_in_another_process_makes_nothing_again(publisher: Publisher) -> None:
    """What says that a job has not changed must not depend on the process."""
    runs = newest_runs(publisher.reported.store.of(CLUSTER), 0, 50)["alice"]
    program = (
        "import sys, pathlib; from telemetry.store.store import Store;"
        "from reports.published.choice import newest_runs;"
        f"runs = newest_runs(Store.open(pathlib.Path(sys.argv[1])).of({CLUSTER!r}), 0, 50);"
        "print(*[run.digest for run in runs['alice']])"
    )
    root = str(publisher.reported.store.root)
    said = subprocess.run([sys.executable, "-c", program, root], capture_output=True, text=True, check=True).stdout
    assert said.split() == [run.digest for run in runs]


@pytest.mark.parametrize(
    ("run", "is_ready"),
    [
        ({"start_s": 200, "gpu_count": 1}, False),  # waits for its metrics
        ({"start_s": 900, "gpu_count": 1}, True),  # ended at once
        ({"start_s": 900, "end_s": 899, "gpu_count": 1}, True),
        ({"start_s": 200, "gpu_count": 0}, True),  # asked for a GPU and got none
        ({"start_s": 200, "gpu_count": None}, True),
        ({"start_s": None, "gpu_count": None}, True),
    ],
)
def test_a_run_that_never_gets_metrics_does_not_wait_for_them(
    tmp_path: Path, run: dict[str, Any], is_ready: bool
) -> None:
    row = {"job_id": 1, "submit_s": 100, "end_s": 900, "user": "ann", "gpu_count_req": 1, "state": "FAILED", **run}
    store = Store.create(tmp_path).of("c")
    store.write("jobs", pa.Table.from_pylist([row], TABLES["jobs"].schema))
    [chosen] = newest_runs(store, 0, 9)["ann"]
    assert chosen.is_ready is is_ready
    summarize(store, Config(), 0, 1000)
    [chosen] = newest_runs(store, 0, 9)["ann"]
    assert chosen.is_ready  # the rule is the summary's own


def test_only_the_newest_jobs_are_kept(publisher: Publisher) -> None:
    publisher()
    publisher.own = Reports(own_jobs=3)
    done = publisher()
    assert (done.lists, done.reports) == (2, 0)
    assert [run.job_id for run in publisher.of("bob").index.runs] == [3, 2, 1]
    assert len(publisher.files()) == 2 * (3 + 1)
    publisher.own = Reports(own_jobs=0)
    assert publisher().removed == 2
    assert publisher.files() == {}
    assert not list((publisher.root / "user").iterdir())


def test_old_jobs_go_and_with_the_last_one_everything(publisher: Publisher) -> None:
    publisher.own = Reports(own_days=2)
    publisher()
    assert 112 not in {run.job_id for run in publisher.of("alice").index.runs}
    assert 111 in {run.job_id for run in publisher.of("alice").index.runs}
    publisher.now_s += 3 * DAY_S
    done = publisher()
    assert (done.removed, publisher.files()) == (2, {})


def test_a_run_makes_so_many_reports_newest_jobs_first_and_the_next_one_goes_on(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reports.published.publish.OWN_PER_RUN", 20)
    seen = []
    for _ in range(3):
        done = publisher()
        seen.append((done.reports, done.waiting))
        own = publisher.of("bob")
        ends = [run.end_s for run in own.index.runs if run.report]
        waiting = [run.end_s for run in own.index.runs if not run.report]
        assert not waiting or not ends or min(ends) > max(waiting)
    assert seen == [(20, 39), (20, 19), (19, 0)]
    assert publisher().reports == 0


def test_a_job_without_its_report_is_listed_and_says_so(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reports.published.publish.OWN_PER_RUN", 1)
    publisher()
    own = publisher.of("bob")
    assert own.history(["job_id"]).num_rows == 30
    with pytest.raises(StoreError, match="not published yet"):
        own.contexts([30])


@pytest.mark.parametrize("fault", ["number", "size"])
def test_a_report_that_cannot_be_written_keeps_no_other_from_being_so(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def pack(context: JobContext) -> bytes:
        if context.job_id != 5:
            return pack_report(context)
        if fault == "size":
            return bytes(MAX_FILE_BYTES + 1)
        return pack_report(dataclasses.replace(context, metrics={**context.metrics, "energy_j": float("inf")}))

    monkeypatch.setattr("reports.published.publish.pack_report", pack)
    done = publisher()
    assert (done.reports, done.unwritable) == (58, 1)
    assert [run.job_id for run in publisher.of("bob").index.runs if run.report is None] == [5]


def test_reports_that_cannot_be_written_hold_up_no_older_ones(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two newest; they are tried again where their job or the format has changed, and else never."""
    tried = []

    def pack(context: JobContext) -> bytes:
        tried.append(context.job_id)
        if context.job_id in (1, 2):
            raise ValueError("Out of range float values are not JSON compliant")
        return pack_report(context)

    monkeypatch.setattr("reports.published.publish.pack_report", pack)
    publisher.own = Reports(own_jobs=30)
    monkeypatch.setattr("reports.published.publish.OWN_PER_RUN", 2)
    publisher.uids = {"bob": 60_002}
    seen = [publisher() for _ in range(3)]
    assert [(done.reports, done.unwritable, done.waiting) for done in seen] == [(0, 2, 28), (2, 2, 26), (2, 2, 24)]
    assert tried == [1, 2, 3, 4, 5, 6]
    monkeypatch.setattr("reports.published.publish.OWN_PER_RUN", 1000)
    assert (publisher().reports, publisher().unwritable) == (24, 2)
    tried.clear()
    change_job(monkeypatch, 2)
    assert (publisher().reports, tried) == (0, [2])
    tried.clear()
    monkeypatch.setattr("reports.published.publish.FORMAT", FORMAT + 1)
    assert (publisher().unwritable, len(tried)) == (2, 30)
    tried.clear()
    publisher.own = Reports(own_jobs=1)
    assert (publisher().unwritable, tried) == (1, [])
    manifest = json.loads((publisher.root / MANIFEST).read_bytes())
    assert [name.split("-")[0] for name in manifest["unwritable"]] == ["1"]


def change_job(monkeypatch: pytest.MonkeyPatch, job_id: int) -> None:
    """What is stored of it."""

    def changed(*args: Any) -> dict[str, list[Chosen]]:
        return {
            user: [dataclasses.replace(run, digest="0") if run.job_id == job_id else run for run in runs]
            for user, runs in newest_runs(*args).items()
        }

    monkeypatch.setattr("reports.published.publish.newest_runs", changed)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"cluster": "test", "users": {}, "unwritable": 7}', b"7"])
def test_a_damaged_record_of_what_was_published_is_made_anew(publisher: Publisher, content: bytes) -> None:
    publisher()
    (publisher.root / MANIFEST).write_bytes(content)
    done = publisher()
    assert (done.lists, done.reports, done.unwritable) == (2, 0, 0)
    assert publisher().lists == 0


def test_a_dry_run_writes_nothing(publisher: Publisher) -> None:
    done = publisher(is_dry=True)
    assert (done.lists, done.reports) == (2, 59)
    assert not publisher.root.exists()


def test_users_without_a_uid_and_names_that_share_one_get_nothing(publisher: Publisher) -> None:
    publisher.uids = {"alice": 60_001, "bob": 60_001}
    assert publisher().lists == 0
    publisher.uids = {"alice": 60_001}
    assert publisher().lists == 1
    assert publisher.folder.uids() == [60_001]


def test_reports_stay_while_the_user_database_is_out_of_reach_until_their_jobs_are_too_old(
    publisher: Publisher,
) -> None:
    publisher()
    before = publisher.files()
    publisher.uids = {}
    done = publisher()
    assert (done.removed, len(done.warnings)) == (0, 1)
    assert publisher.files() == before
    publisher.now_s += 31 * DAY_S
    assert publisher().removed == 2
    assert publisher.files() == {}


def test_a_uid_that_is_another_users_now_shows_them_nothing_of_the_former(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher()
    del publisher.uids["bob"]
    monkeypatch.setitem(NAMES, 60_002, "carol")
    assert publisher().removed == 1
    assert publisher.folder.uids() == [60_001]
    with pytest.raises(StoreError, match="no reports for you"):
        publisher.of("bob")
