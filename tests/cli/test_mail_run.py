"""`almanac mail run`, with a stand-in for sacct and a real SMTP server: who hears of what, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from due_site import HOUR_S, Site, SiteApp, job_of, running_site
from fake_accounting import CLUSTER, Accounting
from mails import NOW_S

from almanac.errors import CommandError, NotAllowedError
from reports.mail.record import MailRecord, record_path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    yield from running_site(tmp_path, monkeypatch)


def test_who_switches_mail_on_tells_nothing_of_the_past(site: Site) -> None:
    site.ends(2, NOW_S - 1)
    site.ends(3, NOW_S + 1)
    site.ingest()
    assert site.due().noticed == 1
    assert site.jobs_told == ["3"]


def test_a_report_goes_to_the_jobs_owner_alone(site: Site) -> None:
    site.ends(2, NOW_S + 60)
    site.ends(3, NOW_S + 70, user="bob", name="\r\nBcc: eve@example.org")
    site.ingest()
    site.due()
    site.due(NOW_S + 900)
    told = sorted((to, job_of(subject)) for to, subject in site.got)
    assert told == [("ann@example.org", "2"), ("bob@example.org", "3")]
    assert all(len(recipients) == 1 for _, recipients, _ in site.server.taken)


def test_accounting_is_asked_once_for_what_the_hook_said(site: Site) -> None:
    """Whatever their number: numbers once, names once for each 5,000 of them, and steps once for each 500."""
    for number in range(2, 202):
        site.ends(number, NOW_S + 60 + number % 5, user=f"user{number // 4}")
        site.says_ended(number)
    site.accounting.asked.clear()
    outcome = site.due(NOW_S + 120)
    assert outcome.noticed == 200 and outcome.sent == {"job": 200}
    assert site.accounting.asked == {"numbers": 1, "names": 1, "steps": 1}
    assert len(set(site.server.ids)) == len(site.server.ids) == 200
    assert list(site.spool.iterdir()) == []


def test_ingest_goes_on_from_where_it_stopped(site: Site) -> None:
    """Also after an outage longer than its overlap, while the hook went on: only ingest reads steps."""
    before_s = site.store.of(CLUSTER).watermark("sacct")
    for hour in range(1, 9):
        site.app.clock_s = NOW_S + hour * HOUR_S
        site.ends(1 + hour, site.app.clock_s - 60)
        site.says_ended(1 + hour)
        assert site.due().noticed == 1
    assert len(site.jobs_told) == 8
    assert site.store.of(CLUSTER).watermark("sacct") == before_s == NOW_S


def test_during_a_back_fill_no_more_is_asked_than_can_be_told(site: Site) -> None:
    """The timer of `almanac ingest` has read accounting up to 30 days ago."""
    mark = next((site.root / "store").rglob("sacct.*.json"))
    mark.write_text(json.dumps({"until_s": NOW_S - 30 * 86_400}))
    site.ends(2, NOW_S - 20 * 86_400)
    site.ends(3, NOW_S + 60)
    site.says_ended(3)
    site.due()
    assert site.jobs_told == ["3"]
    assert sorted(site.store.of(CLUSTER).read("jobs", ["job_id"])["job_id"].to_pylist()) == [1, 3]


def test_where_nothing_has_happened_nothing_is_asked(site: Site) -> None:
    site.accounting.asked.clear()
    assert site.due().noticed == 0
    assert site.accounting.asked == {}


def test_an_end_of_which_accounting_learns_hours_late_is_told(site: Site) -> None:
    """As after slurmdbd was away: nine hours, which is more than the overlap of two reads."""
    site.app.clock_s = NOW_S + 9 * HOUR_S
    site.ingest(since_s=NOW_S)
    site.due()
    site.ends(2, NOW_S + 60)
    site.app.clock_s += 600
    site.ingest(since_s=NOW_S)
    assert site.due().noticed == 1
    assert site.jobs_told == ["2"]


def test_a_file_that_lies_costs_a_look_and_no_mail(site: Site) -> None:
    site.ends(2, NOW_S + 9000)
    site.says_ended(2, 3)
    assert site.due().noticed == 0
    assert len(list(site.spool.iterdir())) == 2
    assert site.due(NOW_S + 600 + 1801).spool["not in accounting"] == 2
    assert list(site.spool.iterdir()) == []
    assert site.got == []


def test_what_is_no_notice_is_counted_set_aside_and_named(site: Site) -> None:
    (site.spool / "rm -rf\x1b[31m").write_text("job_id=2\n")
    outcome = site.due()
    assert outcome.spool["file name of another form"] == 1
    assert "bad: file name of another form, such as rm -rf?[31m" in outcome.faults[0]
    assert [path.name for path in site.spool.iterdir()] == ["bad"]
    assert site.due().faults == []


def test_a_spool_that_others_may_write_to_is_not_believed_but_accounting_is(site: Site) -> None:
    site.spool.chmod(0o777)
    site.ends(2, NOW_S + 60)
    site.says_ended(2)
    site.ingest()
    outcome = site.due()
    assert "others can write to it" in outcome.faults[0]
    assert site.jobs_told == ["2"]


def test_a_comment_that_accounting_has_not_told_yet_is_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Accounting.__call__

    def without_json(self: Accounting, argv: Sequence[str]) -> bytes:
        if "--json" in argv and "--helpformat" not in argv:
            raise CommandError("sacct --json: Segmentation fault", "update Slurm")
        return real(self, argv)

    for number, comment in ((2, "almanac:nomail"), (3, "")):
        site.ends(number, NOW_S + 60, comment=comment, user=f"user{number}")
    with monkeypatch.context() as patch:
        patch.setattr(Accounting, "__call__", without_json)
        site.ingest()
        outcome = site.due(NOW_S + 2 * HOUR_S)
        assert outcome.delayed == {"its comment is not known yet": 2}
        assert outcome.faults == ["reports that wait for their job's comment: 2; see what `sacct --json` says"]
    site.app.clock_s += 60
    site.ingest()
    assert site.due().skipped == {"the job wants none": 1}
    assert site.jobs_told == ["3"]


def test_who_got_enough_mail_is_told_of_the_rest_in_one(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("reports.mail.run.PER_USER_HOUR", 2)
    for number in (2, 3):
        site.ends(number, NOW_S + 60)
    site.ingest()
    assert site.due().sent == {"job": 2}
    first_s = site.app.clock_s
    for number in (4, 5, 7):
        site.ends(number, first_s + 20)
    site.ends(6, first_s + 30, user="bob")
    site.app.clock_s += 60
    site.ingest()
    assert site.timer("--dry-run") == 0
    assert "to bob@example.org: job 6\n  later: 3 their user got enough mail for now" in capsys.readouterr().out
    outcome = site.due()
    assert (outcome.sent, outcome.delayed) == ({"job": 1}, {"their user got enough mail for now": 3})
    assert site.due(first_s + HOUR_S - 1).sent == {}
    assert site.due(first_s + HOUR_S).sent == {"digest": 1}
    assert site.got[-1][1].startswith("3 runs of train-1: ")


def test_useful_mail_is_about_failures_and_news_and_the_week_has_the_rest(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.change("mail", frequency="useful")
    site.ends(2, NOW_S + 60, elapsed_s=9000)
    site.ends(3, NOW_S + 70, state="TIMEOUT")
    site.ends(4, NOW_S + 80, elapsed_s=9000, user="bob")
    site.ingest()
    assert site.timer("--dry-run") == 0
    assert "3 their user wants useful mail only" in capsys.readouterr().out
    outcome = site.due()
    assert outcome.skipped == {"nothing new: in the weekly digest": 2} and site.jobs_told == ["3"]
    site.app.clock_s = NOW_S + 6 * 86_400 + 3600
    site.ingest(since_s=NOW_S)
    site.due()
    assert sorted(to for to, subject in site.got if subject.startswith("Your GPU week")) == [
        "ann@example.org", "bob@example.org"
    ]  # fmt: skip
    assert "3 jobs" in site.got[-2][1] + site.got[-1][1], "with job 1, which ended before mail was on"


def test_prometheus_is_asked_once_for_all_jobs_of_a_run(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.change("prometheus", url="http://127.0.0.1:9", timeout_s=1)
    monkeypatch.setattr("telemetry.sources.prometheus_server._FIRST_WAIT_S", 0)
    site.store.of(CLUSTER).set_watermark("prometheus", NOW_S)
    for number, user in ((2, "ann"), (3, "bob"), (4, "eve")):
        site.ends(number, NOW_S + 60 + number, user=user)
    site.says_ended(2, 3, 4)
    outcome = site.due()
    assert outcome.delayed == {"telemetry has not arrived": 3}
    assert outcome.looks == {"report-sacct": 1, "prometheus": 1}
    site.change("prometheus", delay_s=7200)
    assert site.due().looks == {}, "nothing new can be had yet"


def test_where_mail_is_off_nothing_is_sent_now_or_later(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    server = site.app.given["mail"]["server"]
    site.change("mail", server="")
    site.ends(2, NOW_S + 60)
    site.ingest()
    assert site.timer() == 0
    assert "mail is off" in capsys.readouterr().out
    site.change("mail", server=server)
    site.ends(3, NOW_S + 660)
    site.app.clock_s = NOW_S + 700
    site.ingest()
    assert site.timer("--json") == 0
    assert json.loads(capsys.readouterr().out)["sent"] == {"job": 1}
    assert site.jobs_told == ["3"]


def test_a_dry_run_says_what_would_be_mailed_and_leaves_no_trace(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.ends(2, NOW_S + 60)
    site.ends(3, NOW_S + 60, elapsed_s=30)
    site.ingest()
    before = {path: path.read_bytes() for path in site.root.rglob("*.json")}
    assert site.timer("--dry-run") == 0
    said = capsys.readouterr().out
    assert "to ann@example.org: job 2\n" in said and "no mail of: 1 too short" in said
    assert {path: path.read_bytes() for path in site.root.rglob("*.json")} == before and site.got == []
    assert site.due().noticed == 2


def test_a_dry_run_reads_an_outbox_wherever_it_lies(
    tmp_path: Path, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.change("mail", port=9)
    site.ends(2, NOW_S + 60)
    site.ingest()
    site.due()
    odd = tmp_path / "100%?#"
    (site.root / "store").rename(odd)
    site.app.store_path = str(odd)
    assert site.timer("--dry-run") == 0
    assert "nothing was asked" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["100%?#", "ended"]


def test_two_runs_at_once_are_one(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    with MailRecord(record_path(site.root / "store")):
        assert site.timer() == 0
    assert "it does what is due" in capsys.readouterr().out


def test_only_operators_send_mail(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SiteApp, "is_operator", False)
    with pytest.raises(NotAllowedError):
        site.timer()


IDLE = """
import sys
from due_site import NOW_S, Path, know_everybody, site_of

class Port:
    port = 9

know_everybody()
site_of(Path(sys.argv[1]), Port()).due(NOW_S + 600)
print(sorted(name for name in ("matplotlib", "jinja2", "lightgbm") if name in sys.modules))
"""


def test_a_run_with_nothing_to_do_loads_nothing_for_rendering(site: Site) -> None:
    """It is run every minute."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    argv = [sys.executable, "-c", IDLE, str(site.root)]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=300, check=True)
    assert done.stdout == "[]\n"
