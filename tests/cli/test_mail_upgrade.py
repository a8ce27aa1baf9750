"""Upgrade from a release that queued mails itself: each mail of its outbox is sent once, and no other again."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from due_site import Site, running_site
from mails import NOW_S

from almanac.errors import StoreError
from reports.mail import record_file
from reports.mail.record import WEEK, MailRecord, read_counts, record_path
from reports.mail.week import last_week

OLD_S = NOW_S + 6 * 86_400 + 3660
"""The time at which commit 09e00f37 wrote outbox-3.sql: jobs 2, 3, and 5 have their mail, 4 and 8 were skipped, 7
waits, and 6 (tried) and 9 are queued. The digests of ann and eve were sent, and bob's is queued."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for made in running_site(tmp_path, monkeypatch):
        path = record_path(tmp_path / "store")
        for file in path.parent.iterdir():
            file.unlink()
        with closing(sqlite3.connect(path)) as database:
            database.executescript(Path(__file__).with_name("outbox-3.sql").read_text(encoding="utf-8"))
        made.change("mail", frequency="useful")
        day_s = OLD_S - 3660
        for number, end_s, user in (
            (2, NOW_S + 60, "ann"), (3, NOW_S + 70, "bob"), (5, day_s + 3000, "ann"), (6, day_s + 3100, "bob"),
            (7, day_s + 3200, "gus"), (9, day_s + 3600, "dan"),
        ):  # fmt: skip
            made.ends(number, end_s, user=user, state="FAILED")
        made.ends(4, NOW_S + 80, user="eve", elapsed_s=9000)
        made.ends(8, day_s + 3300, user="eve", elapsed_s=30)
        made.app.clock_s = OLD_S
        made.ingest(since_s=NOW_S)
        yield made


def mails(site: Site) -> list[str]:
    return sorted(to.partition("@")[0] + (" week" if "Your GPU week" in subject else "") for to, subject in site.got)


def test_each_queued_mail_is_sent_once(site: Site) -> None:
    first = site.due(OLD_S + 60)
    assert first.faults == [] and mails(site) == ["bob week", "dan", "gus"]
    for later_s in (960, 86_400, 2 * 86_400):
        assert site.due(OLD_S + later_s).faults == []
    assert mails(site) == ["bob", "bob week", "dan", "gus"]
    with closing(sqlite3.connect(record_path(site.root / "store"))) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert tables == {"run", "counter", "horizon", "mark", "told"}
    counts = read_counts(record_path(site.root / "store"))
    assert counts and counts.sent == {"job": 6, "weekly": 3} and (counts.waiting, counts.refused) == (0, 0)


def test_a_choice_made_meanwhile_holds_for_what_was_queued(site: Site) -> None:
    site.change("mail", frequency="off")
    site.due(OLD_S + 960)
    assert mails(site) == []


def test_before_the_first_run_counts_and_a_dry_run_leave_the_outbox(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.change("mail", frequency="every")
    path = record_path(site.root / "store")
    before = path.read_bytes()
    assert read_counts(path) is not None
    assert site.timer("--dry-run") == 0
    said = capsys.readouterr().out
    assert "to dan@example.org: job 9\n" in said and "job 5" not in said
    assert path.read_bytes() == before


def test_an_upgrade_that_fails_changes_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record_path(site.root / "store")
    with monkeypatch.context() as patch, pytest.raises(StoreError):
        patch.setattr(record_file, "_TAKE_OUTBOX", f"{record_file._TAKE_OUTBOX} INSERT INTO absent VALUES (1);")
        MailRecord(path).__enter__()
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA user_version").fetchall() == [(3,)]
        assert database.execute("SELECT count(*) FROM message").fetchall() == [(8,)]
    with MailRecord(path) as record:
        assert record.mark(WEEK, "test") == last_week(OLD_S).start_s
