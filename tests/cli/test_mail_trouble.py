"""`almanac mail run` where something fails, or is killed: no mail is lost, and no other waits for it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from due_site import HOUR_S, Site, killed_runs, know_everybody, running_site, scenario
from fake_accounting import CLUSTER, Accounting
from mails import NOW_S

from almanac.errors import CommandError, DamageWarning, StoreError
from reports.job.job_report import JobReport
from reports.mail.record import ASKED, DAILY, SEEN, STARTED, WEEK, WEEK_TRIED, MailRecord, record_path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    yield from running_site(tmp_path, monkeypatch)


FULL = 3
POINTS = 8
"""Of its steps, a hundred or so, at which a run is killed."""


def test_with_a_server_that_is_not_there_mail_waits(site: Site) -> None:
    port = site.app.given["mail"]["port"]
    site.change("mail", port=9)
    site.ends(2, NOW_S + 60)
    site.ingest()
    assert any("127.0.0.1:9" in fault for fault in site.due().faults)
    site.change("mail", port=port)
    site.due(NOW_S + 86_400)
    assert site.jobs_told == ["2"]


def test_a_report_that_cannot_be_made_keeps_no_other_waiting(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    import reports.mail.batch

    for number in (2, 3, 4):
        site.ends(number, NOW_S + 60, user=f"user{number}")
    site.ingest()
    real = reports.mail.batch.render_email

    def faulty(report: JobReport) -> Any:
        if report.job_id == 3:
            raise ZeroDivisionError("not ours")
        return real(report)

    monkeypatch.setattr(reports.mail.batch, "render_email", faulty)
    assert site.due().faults == ["report of job 3: ZeroDivisionError: not ours"]
    assert site.jobs_told == ["2", "4"]
    monkeypatch.undo()
    know_everybody(monkeypatch)
    site.due(NOW_S + 3 * HOUR_S)
    assert site.jobs_told == ["2", "3", "4"]


def unreadable(*given: Any) -> None:
    raise StoreError("telemetry cannot be read", "move the file away")


def test_a_damaged_file_of_other_jobs_costs_no_report(site: Site) -> None:
    site.ends(2, NOW_S + 60)
    site.ingest()
    past = {"job_id": [1], "submit_s": [NOW_S - 10**8]}
    site.store.of(CLUSTER).write("jobs", pa.table({**past, "user": ["ann"]}))  # of another day of theirs
    site.store.of(CLUSTER).write("job_metrics", pa.table({**past, "verdict": ["ok"]}))
    for path in (site.root / "store" / "job_metrics").rglob("*.parquet"):
        path.write_bytes(b"damaged")
    with pytest.warns(DamageWarning, match="job_metrics"):
        assert site.due().faults == []
    assert site.jobs_told == ["2"]


def test_settings_that_keep_mail_from_leaving_keep_no_end_from_being_noticed(site: Site) -> None:
    site.change("mail", username="almanac", password_file=str(site.root / "none"))
    site.ends(3, NOW_S + 60)
    site.ingest()
    outcome = site.due()
    assert outcome.noticed == 1 and "mail.password_file" in outcome.faults[0]


def set_marks(site: Site, time_s: int, *names: str) -> None:
    with MailRecord(record_path(site.root / "store")) as record:
        for name in names:
            record.set_mark(name, CLUSTER, time_s)


def test_after_a_run_with_a_clock_a_year_ahead_no_mail_waits_for_a_year(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks, and times of tries and of sent mail: each would keep mail back as long."""
    monkeypatch.setattr("reports.mail.run.PER_USER_HOUR", 1)
    site.ends(2, NOW_S + 60)
    site.ends(3, NOW_S + 60, user="bob")
    site.ingest()
    year_s = 365 * 24 * HOUR_S
    site.app.clock_s += 120
    set_marks(site, NOW_S + year_s, WEEK, DAILY, WEEK_TRIED, ASKED)
    site.due()
    assert site.jobs_told == ["2", "3"]
    with MailRecord(record_path(site.root / "store")) as record, record._changing() as db:
        db.execute("UPDATE run SET time_s = time_s + ?", (year_s,))
    site.ends(4, NOW_S + 180)
    site.app.clock_s += 2 * HOUR_S
    site.ingest()
    site.due()
    assert site.jobs_told == ["2", "3"], "what was sent by a clock that was ahead counts as sent now"
    site.due(site.app.clock_s + 2 * HOUR_S)
    assert site.jobs_told == ["2", "3", "4"]
    with MailRecord(record_path(site.root / "store")) as record:
        marks = [record.mark(name, CLUSTER) or 0 for name in (STARTED, SEEN, ASKED, DAILY, WEEK, WEEK_TRIED)]
    assert max(marks) <= site.app.clock_s


def test_a_file_of_the_hook_with_a_time_in_the_future_is_taken_away(site: Site) -> None:
    site.ends(2, NOW_S + 60)
    site.app.clock_s += 365 * 24 * HOUR_S
    site.says_ended(2, 99)
    site.app.clock_s = NOW_S + 120
    site.ingest()
    site.due()
    assert list(site.spool.iterdir()) == [] and site.jobs_told == ["2"]


def test_a_host_without_its_users_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.ends(2, NOW_S + 60)
    site.ingest()

    def unknown(user: str) -> Any:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwnam", unknown)
    assert site.due().faults == []
    site.app.clock_s += 2 * HOUR_S
    assert site.due().faults == ["reports that wait, as this host knows none of their users: 1; see `getent passwd`"]


def test_without_the_telemetry_of_a_damaged_file_reports_go_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telemetry.metrics.summary.summarize", unreadable)
    site.ends(2, NOW_S + 60)
    site.ingest()
    assert site.due().faults == ["telemetry cannot be read; try: move the file away"]
    assert site.jobs_told == ["2"]


@pytest.mark.parametrize(
    ("mail", "mails", "points"),
    [({"family_wait_min": 60}, 3, POINTS), ({"frequency": "useful"}, 4, 2)],
    ids=["like runs together", "useful"],
)
def test_killed_at_any_step_every_mail_comes_and_one_at_most_comes_twice(
    site: Site, mail: dict[str, Any], mails: int, points: int
) -> None:
    scenario(site)
    site.says_ended(2, 3, 4, 5, 6, 11, 12, 13)
    before = shutil.copytree(site.root, site.root.with_name(f"{site.root.name}-before"))
    with killed_runs(site) as run:
        code, steps = run(0, **mail)
        assert code == 0
        expected = sorted(site.server.ids)
        assert len(expected) == mails
        for number in sorted({1 + int(steps.split()[0]) * part // points for part in range(points)}):
            site.server.taken.clear()
            shutil.rmtree(site.root)
            shutil.copytree(before, site.root)
            assert run(number, **mail)[0] == -signal.SIGKILL
            said = [run(0, at_s=NOW_S + later_s, **mail) for later_s in (300, 1500)]  # a killed mail waits 15 minutes
            got = sorted(site.server.ids)
            assert [code for code, _ in said] == [0, 0]
            assert len(got) == len(expected) or "a run was killed while it handed over 1 mail" in said[0][1]
            assert sorted(set(got)) == expected, number
            assert len(got) <= len(expected) + 1, number
            assert list(site.spool.iterdir()) == []


def test_while_accounting_is_down_no_notice_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.ends(2, NOW_S + 60)
    site.says_ended(2)

    def down(self: Accounting, argv: Sequence[str]) -> bytes:
        raise CommandError("sacct: Connection refused", "start slurmdbd")

    monkeypatch.setattr(Accounting, "__call__", down)
    assert "Connection refused" in site.due(NOW_S + 9000).faults[0]
    assert len(list(site.spool.iterdir())) == 1
    monkeypatch.undo()
    know_everybody(monkeypatch)
    site.due(NOW_S + 9060)
    assert site.jobs_told == ["2"] and list(site.spool.iterdir()) == []


def test_a_mail_that_will_never_be_sent_is_a_fault(site: Site) -> None:
    site.server.says_rcpt = lambda address: "550 5.1.1 no such user" if address.startswith("bob") else None
    site.ends(2, NOW_S + 60, user="ann")
    site.ends(3, NOW_S + 60, user="bob")
    site.ingest()
    outcome = site.due()
    name = f"127.0.0.1:{site.server.port}"
    assert (outcome.sent, outcome.faults) == ({"job": 1}, [])
    assert [*outcome.lines()][-1] == f"  not taken: bob@example.org: {name}: 550 5.1.1 no such user"
    site.ends(4, NOW_S + 60 + 72 * HOUR_S, user="ann")
    site.app.clock_s += 72 * HOUR_S
    site.ingest(since_s=NOW_S)
    outcome = site.due()
    assert outcome.sent == {"job": 1}
    assert outcome.faults == [
        f"jobs whose mail will never be sent: 1, the last one to bob@example.org: {name}: 550 5.1.1 no such user"
    ]
    assert site.due().faults == []


@pytest.mark.parametrize("hours", [5, -30 * 24, 10 * 8760])
@pytest.mark.parametrize("at", ["before its end is noticed", "while the server is down", "when it is sent"])
def test_a_clock_that_was_set_loses_and_doubles_no_mail(
    site: Site, hours: int, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some runs of the timer have a clock that is ahead or behind, by whatever, before somebody sets it right."""
    monkeypatch.setattr("reports.mail.record.DOUBTED_RUNS", 4)
    site.ends(2, NOW_S + 60)
    site.ends(3, NOW_S + 70, user="bob", state="FAILED")
    site.ingest()
    if at == "while the server is down":
        site.server.says_rcpt = lambda address: "451 4.3.0 later"
    if at != "before its end is noticed":
        site.due()
    right_s = site.app.clock_s
    for minute in range(3):
        site.due(right_s + hours * HOUR_S + 60 * minute)
    site.server.says_rcpt = lambda address: None
    for minute in (4, 5, 6, 7, 8, 9, 30):
        last = site.due(right_s + 60 * minute)
    assert site.jobs_told == ["2", "3"]
    assert last.faults == []


@pytest.mark.parametrize("days", [-30, 30])
def test_a_clock_that_stays_as_it_was_set_is_believed_after_a_while(
    site: Site, days: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host was off, or the earlier time was wrong."""
    monkeypatch.setattr("reports.mail.record.DOUBTED_RUNS", 5)
    site.app.clock_s += days * 24 * HOUR_S
    faults = [site.due(site.app.clock_s + 60).faults for _ in range(6)]
    assert all("the clock was set" in each for [each] in faults[:5]) and faults[5] == []
    site.ends(2, site.app.clock_s - 60)
    site.ingest(min(NOW_S, site.app.clock_s - HOUR_S))
    outcome = site.due(site.app.clock_s + 60)
    assert site.jobs_told[-1:] == ["2"], outcome


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_is_full_from_any_step_on_loses_and_doubles_no_mail(site: Site) -> None:
    scenario(site)
    site.says_ended(2, 3, 4, 5, 6, 11, 12, 13)
    before = shutil.copytree(site.root, site.root.with_name(f"{site.root.name}-before"))
    disk = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", str(site.root)]
    subprocess.run(disk, check=True)
    try:
        with killed_runs(site) as run:
            code, steps, expected = 0, "", list[str]()
            numbers = [0]
            while numbers:
                number = numbers.pop()
                for path in site.root.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                shutil.copytree(before, site.root, dirs_exist_ok=True)
                site.server.taken.clear()
                code, steps = run(number, str(site.root / "ballast"), family_wait_min=60)
                assert code == 0
                if not number:
                    expected = sorted(site.server.ids)
                    numbers = [1 + int(steps.split()[0]) * part // FULL for part in range(FULL)]
                    continue
                assert run(0, "full", family_wait_min=60, at_s=NOW_S + 360)[0] == 0  # the next run finds it full, too
                (site.root / "ballast").unlink()
                for later_s in (420, 1500):
                    assert run(0, family_wait_min=60, at_s=NOW_S + later_s)[0] == 0
                assert sorted(site.server.ids) == expected, (number, steps)
    finally:
        subprocess.run(["umount", str(site.root)], check=True)
