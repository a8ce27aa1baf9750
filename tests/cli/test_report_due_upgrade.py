"""Upgrade from a release that kept the marks of the mail timer in the store: no mail is lost, none comes twice."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from due_site import HOUR_S, Site, killed_runs, running_site, scenario
from fake_accounting import CLUSTER
from mails import NOW_S

from cli import report_due
from reports.mail.marks import OF_THE_STORE, STARTED
from reports.mail.outbox import Outbox, outbox_path, read_counts


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    yield from running_site(tmp_path, monkeypatch)


def marks_of(site: Site) -> dict[str, int]:
    with Outbox(outbox_path(site.root / "store")) as outbox:
        found = {name: outbox.mark(name, CLUSTER) for name in OF_THE_STORE.values()}
    return {name: time_s for name, time_s in found.items() if time_s is not None}


def old_files(site: Site) -> list[Path]:
    return sorted((site.root / "store" / "watermarks").glob("report*.json"))


def make_old(site: Site) -> dict[str, int]:
    """Lay the site out as the older release did: version 1 of the outbox, marks in the store. The marks."""
    marks = marks_of(site)
    for old, name in OF_THE_STORE.items():
        if name in marks:
            path = site.root / "store" / "watermarks" / f"{old}.{CLUSTER}.json"
            path.write_text(json.dumps({"until_s": marks[name]}))
    with closing(sqlite3.connect(outbox_path(site.root / "store"))) as database:
        database.executescript("DROP TABLE mark; DROP TABLE told; PRAGMA user_version = 1;")
    return marks


def test_an_upgrade_loses_no_mail_and_repeats_none(site: Site) -> None:
    """Job 2 has its mail, the mail of job 3 is queued, job 4 waits to be noticed; job 9 ended before mail was on."""
    port = site.app.given["mail"]["port"]
    site.ends(2, NOW_S + 60)
    site.ingest()
    site.due()
    site.change("mail", port=9)
    site.ends(3, NOW_S + 610, user="bob")
    site.ingest()
    site.due()
    assert site.jobs_told == ["2"]
    marks = make_old(site)
    assert len(marks) == 4 and len(old_files(site)) == 4
    site.change("mail", port=port)
    site.ends(4, NOW_S + 700)
    site.ends(9, NOW_S - 60)
    site.app.clock_s += HOUR_S
    site.ingest()
    site.due()
    site.due(site.app.clock_s + HOUR_S)
    assert site.jobs_told == ["2", "3", "4"]
    assert old_files(site) == [] and marks_of(site)[STARTED] == marks[STARTED]


def test_marks_that_a_killed_upgrade_left_do_not_count_again(site: Site) -> None:
    make_old(site)
    left = {path: path.read_bytes() for path in old_files(site)}
    site.due(NOW_S + HOUR_S)
    marks = marks_of(site)
    for path, content in left.items():
        path.write_bytes(content.replace(b"1", b"2", 1))
    site.due()
    assert marks_of(site) == marks and old_files(site) == []


def test_where_mail_is_off_an_upgrade_moves_the_marks_too(site: Site) -> None:
    make_old(site)
    server = site.app.given["mail"]["server"]
    site.change("mail", server="")
    site.app.clock_s += 600
    assert report_due.run(site.app, is_dry=False, as_json=False) == 0
    assert old_files(site) == [] and marks_of(site)[STARTED] == site.app.clock_s
    site.change("mail", server=server)
    site.ends(2, site.app.clock_s - 60)
    site.ends(3, site.app.clock_s + 60)
    site.app.clock_s += 120
    site.ingest()
    site.due()
    assert site.jobs_told == ["3"]


def test_before_the_first_run_counts_and_a_dry_run_read_the_old_outbox(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.ends(2, NOW_S + 60)
    site.ingest()
    site.due()
    site.ends(3, NOW_S + 660, user="bob")
    site.ends(9, NOW_S - 60, user="eve")
    site.app.clock_s += 600
    site.ingest()
    make_old(site)
    before = {path: path.read_bytes() for path in old_files(site)}
    counts = read_counts(outbox_path(site.root / "store"))
    assert counts is not None and counts.sent == {"job": 1}
    assert report_due.run(site.app, is_dry=True, as_json=False) == 0
    said = capsys.readouterr().out
    assert said.startswith("to bob@example.org: job 3\n") and "eve" not in said
    assert {path: path.read_bytes() for path in old_files(site)} == before


def test_killed_while_marks_move_every_mail_comes_and_one_at_most_comes_twice(site: Site) -> None:
    scenario(site)
    site.says_ended(2, 3, 4, 5, 6, 11, 12, 13)
    make_old(site)
    before = shutil.copytree(site.root, site.root.with_name(f"{site.root.name}-before"))
    with killed_runs(site) as run:
        assert run(0)[0] == 0
        expected = sorted(site.server.ids)
        assert len(expected) == 5
        for number in range(3, 31, 3):
            site.server.taken.clear()
            shutil.rmtree(site.root)
            shutil.copytree(before, site.root)
            assert run(number)[0] == -signal.SIGKILL
            assert run(0)[0] == 0
            assert sorted(site.server.ids) == expected, number
            assert old_files(site) == []
