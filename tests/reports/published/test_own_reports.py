"""A user's own reports: they say what the store says, of that user alone, and only what changed is made."""

from __future__ import annotations

import dataclasses
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from publisher import CLUSTER, NAMES, NOW_S, Publisher
from reported_site import CASES

from almanac.config import Config, Reports
from almanac.errors import FileFormatError, StoreError
from almanac.published.files import UNPACKED_BYTES
from reports.job.conclusions import report_of
from reports.job.evidence import JobContext
from reports.job.job_report import JobReport
from reports.job.render import render_email
from reports.mail.record import EndedRun, MailRecord, Message, record_path
from reports.published.caller import REPORT, StoreJobs, UserMail
from reports.published.newest import Chosen, newest_runs
from reports.published.publish import MANIFEST
from telemetry.history import HISTORY
from telemetry.metrics.summary import summarize
from telemetry.site import Site
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

DAY_S = 86_400


@pytest.mark.parametrize("case", CASES)
def test_a_published_report_is_the_same_value(reported: Any, case: str) -> None:
    report = report_of(reported.contexts[case])
    found = REPORT.parse(REPORT.render(report))
    assert (found.value, found.unknown) == (report, ())


def test_releases_one_apart_read_each_others_reports(reported: Any) -> None:
    """A newer one has more fields, and columns in its rows; an older one lacks those with a default."""
    report = report_of(reported.contexts["half"])
    document = json.loads(gzip.decompress(REPORT.render(report)))
    del document["series"]
    older = REPORT.parse(gzip.compress(json.dumps(document).encode()))
    assert older.value == dataclasses.replace(report, series=None)
    newer = {**document, "mood": "good", "figures": [{**row, "color": 7} for row in document["figures"]]}
    newer["job"] = {**document["job"], "flavor": "mint"}
    found = REPORT.parse(gzip.compress(json.dumps(newer).encode()))
    assert found.unknown == ("color", "mood")
    assert dataclasses.replace(found.value, job=report.job) == older.value
    assert render_text(found.value) == render_text(older.value)


def render_text(report: JobReport) -> str:
    return render_email(report).text


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


def test_reports_read_back_by_id_and_the_newest_run_counts(published: Publisher) -> None:
    own = published.of("alice")
    again, plain = own.reports([801, 101, 801])
    assert [report.job_id for report in (again, plain)] == [801, 101]
    assert again.job["restarts"] == 1 and len(again.earlier_runs) == 1
    assert own.reports([999]) == []


def test_the_list_has_the_rows_that_almanac_jobs_shows(published: Publisher) -> None:
    own = published.of("alice")
    site = Site.of(published.reported.store.of(CLUSTER), published.reported.config, NOW_S)
    stored = StoreJobs(site, "alice")
    assert own.columns == stored.columns
    rows = [dict(row) for row in own.history(HISTORY.names)]
    assert rows == [dict(row) for row in stored.history(HISTORY.names)]
    assert own.next_steps(rows) == stored.next_steps(rows)
    assert "try hbm40g" in own.next_steps(rows)


def test_files_of_the_release_before_are_made_again(published: Publisher) -> None:
    """Format 3: gzip of a line of JSON, and then samples."""
    for name in published.files():
        path = published.root / "user" / name
        kind = "jobs" if path.name == "jobs" else "report"
        older = path.with_name(f"{path.name}0123" if kind == "report" else path.name)
        path.unlink()
        older.write_bytes(gzip.compress(json.dumps({"almanac": kind, "format": 3}).encode() + b"\n\x00\xff"))
        older.chmod(0o400)
    (published.root / MANIFEST).unlink()
    with pytest.raises(FileFormatError, match="older release") as caught:
        published.of("alice").reports([101])
    assert "publish` writes it again" in caught.value.hint
    done = published()
    assert (done.lists, done.reports) == (2, 59)
    assert len(published.files()) == 2 + 59
    assert published.of("alice").reports([101])[0].job_id == 101


def test_each_user_gets_their_newest_mails_with_the_servers_words(published: Publisher) -> None:
    with MailRecord(record_path(published.reported.store.root)) as record:
        for job_id, user in ((1, "alice"), (2, "alice"), (3, "bob")):
            mail = EndedRun(CLUSTER, job_id, NOW_S - 900, user, NOW_S - 60, 1)
            about = Message(f"<{job_id}>", user, f"{user}@x.org", "job", b"", (mail,))
            record.trying(about, NOW_S + job_id)
            if job_id == 2:
                record.failed([mail], "550 5.1.1 \x1b[2Jno such user" + "!" * 900, NOW_S + job_id)
            else:
                record.taken(about, NOW_S + job_id)
    assert (published().lists, published().lists) == (2, 0)
    failed, sent = published.of("alice").mails("alice")
    assert sent == UserMail(NOW_S + 1, "job", 1, 1, "alice@x.org")
    assert (failed.kind, failed.job_id, failed.to) == ("failed", 2, "alice@x.org")
    assert failed.words.startswith("550 5.1.1") and "\x1b" not in failed.words and len(failed.words) <= 500
    assert [mail.job_id for mail in published.of("bob").mails("bob")] == [3]
    site = Site.of(published.reported.store.of(CLUSTER), published.reported.config, NOW_S)
    assert list(StoreJobs(site, "alice").mails("alice")) == [failed, sent]
    record_path(published.reported.store.root).unlink()
    assert published().lists == 2 and not published.of("alice").mails("alice")


def test_nothing_is_made_again_where_nothing_changed(published: Publisher) -> None:
    before = published.times()
    published.now_s += 600
    again = published()
    assert (again.lists, again.reports, again.removed) == (0, 0, 0)
    assert published.times() == before


def test_a_run_in_another_process_makes_nothing_again(publisher: Publisher) -> None:
    """The digest of an unchanged job must not depend on the process."""
    runs = newest_runs(publisher.reported.store.of(CLUSTER), 0, 50)["alice"]
    program = (
        "import sys, pathlib; from telemetry.store.store import Store;"
        "from reports.published.publish import newest_runs;"
        f"runs = newest_runs(Store.open(pathlib.Path(sys.argv[1])).of({CLUSTER!r}), 0, 50);"
        "print(*[run.digest for run in runs['alice']])"
    )
    root = str(publisher.reported.store.root)
    said = subprocess.run([sys.executable, "-c", program, root], capture_output=True, text=True, check=True).stdout
    assert said.split() == [run.digest for run in runs]


def test_a_run_that_never_gets_metrics_does_not_wait_for_them(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"start_s": 200, "gpu_count": 1}, False),  # waits for its metrics
        ({"start_s": 900, "gpu_count": 1}, True),  # ended at once
        ({"start_s": 900, "end_s": 899, "gpu_count": 1}, True),
        ({"start_s": 200, "gpu_count": 0}, True),  # asked for a GPU and got none
        ({"start_s": 200, "gpu_count": None}, True),
        ({"start_s": None, "gpu_count": None}, True),
    ]
    usual = {"submit_s": 100, "end_s": 900, "user": "ann", "gpu_count_req": 1, "state": "FAILED"}
    rows = [{"job_id": number, **usual, **run} for number, (run, _) in enumerate(cases)]
    store = Store.create(tmp_path).of("c")
    store.write("jobs", pa.Table.from_pylist(rows, TABLES["jobs"].schema))
    ready = {chosen.job_id: chosen.is_ready for chosen in newest_runs(store, 0, 9)["ann"]}
    assert ready == {number: is_ready for number, (_, is_ready) in enumerate(cases)}
    summarize(store, Config(), 0, 1000)
    assert all(chosen.is_ready for chosen in newest_runs(store, 0, 9)["ann"])  # the rule is the summary's own


def test_only_the_newest_jobs_are_kept(published: Publisher) -> None:
    published.own = Reports(own_jobs=3)
    done = published()
    assert (done.lists, done.reports) == (2, 0)
    assert [run.job_id for run in published.of("bob").index.runs] == [3, 2, 1]
    assert len(published.files()) == 2 * (3 + 1)
    published.own = Reports(own_jobs=0)
    assert published().removed == 2
    assert published.files() == {}
    assert not list((published.root / "user").iterdir())


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
    assert len(list(own.history(["job_id"]))) == 30
    with pytest.raises(StoreError, match="not published yet"):
        own.reports([30])


@pytest.mark.parametrize("fault", ["number", "size"])
def test_a_report_that_cannot_be_written_keeps_no_other_from_being_so(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def faulty(context: JobContext) -> JobReport:
        report = report_of(context)
        if report.job_id != 5:
            return report
        if fault == "size":
            return dataclasses.replace(report, headline="x" * UNPACKED_BYTES)
        return dataclasses.replace(report, gpu_hours=float("inf"))

    monkeypatch.setattr("reports.published.publish.report_of", faulty)
    done = publisher()
    assert (done.reports, done.unwritable) == (58, 1)
    assert [run.job_id for run in publisher.of("bob").index.runs if run.report is None] == [5]


def test_reports_that_cannot_be_written_hold_up_no_older_ones(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two newest; they are tried again where their job or the format has changed, and else never."""
    tried = []

    def faulty(context: JobContext) -> JobReport:
        tried.append(context.job_id)
        report = report_of(context)
        return dataclasses.replace(report, gpu_hours=float("nan")) if context.job_id in (1, 2) else report

    monkeypatch.setattr("reports.published.publish.report_of", faulty)
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
    monkeypatch.setattr("reports.published.publish.REPORT", dataclasses.replace(REPORT, version=REPORT.version + 1))
    assert (publisher().unwritable, len(tried)) == (2, 30)
    tried.clear()
    publisher.own = Reports(own_jobs=1)
    assert (publisher().unwritable, tried) == (1, [])
    manifest = json.loads((publisher.root / MANIFEST).read_bytes())
    assert [name.split("-")[0] for name in manifest["unwritable"]] == ["1"]


def change_job(monkeypatch: pytest.MonkeyPatch, job_id: int) -> None:
    """Change the digest of its stored values."""

    def changed(*args: Any) -> dict[str, list[Chosen]]:
        return {
            user: [dataclasses.replace(run, digest="0") if run.job_id == job_id else run for run in runs]
            for user, runs in newest_runs(*args).items()
        }

    monkeypatch.setattr("reports.published.publish.newest_runs", changed)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"cluster": "test", "users": {}, "unwritable": 7}', b"7"])
def test_a_damaged_record_of_what_was_published_is_made_anew(published: Publisher, content: bytes) -> None:
    (published.root / MANIFEST).write_bytes(content)
    done = published()
    assert (done.lists, done.reports, done.unwritable) == (2, 0, 0)
    assert published().lists == 0


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
    published: Publisher,
) -> None:
    before = published.files()
    published.uids = {}
    done = published()
    assert (done.removed, len(done.warnings)) == (0, 1)
    assert published.files() == before
    published.now_s += 31 * DAY_S
    assert published().removed == 2
    assert published.files() == {}


def test_a_uid_that_is_another_users_now_shows_them_nothing_of_the_former(
    published: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    del published.uids["bob"]
    monkeypatch.setitem(NAMES, 60_002, "carol")
    assert published().removed == 1
    assert published.folder.uids() == [60_001]
    with pytest.raises(StoreError, match="no reports for you"):
        _ = published.of("bob").index
