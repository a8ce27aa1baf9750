"""A site that starts with mail: a pilot, addresses of its own, blind copies, links, and its own rules."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from email.message import EmailMessage
from pathlib import Path

import pytest
from click.testing import CliRunner
from due_site import Site, running_site
from mails import NOW_S

from almanac.config_file import load_config, parse_config
from almanac.errors import ConfigError
from cli import mail, report
from cli.doctor.mail import check_mail_settings, check_rules
from reports.job.rules import rules_of
from reports.mail.due import OUTSIDE
from reports.mail.recipients import FOLDER_MODE, LAST_READ, folder_of, last_read, mark_read
from reports.mail.record import MailRecord, record_path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    yield from running_site(tmp_path, monkeypatch)


def ends(site: Site, **users: str) -> None:
    """A job of each user, with its account, soon after mail was switched on."""
    for number, (user, account) in enumerate(users.items(), 2):
        site.ends(number, NOW_S + 60 + number, user=user, account=account)
    site.app.clock_s = NOW_S + 900
    site.ingest()


def told(site: Site) -> list[str]:
    return sorted(to.partition("@")[0] for to, _ in site.got)


def page_of(message: EmailMessage) -> tuple[str, str]:
    text, html = (message.get_body((kind,)) for kind in ("plain", "html"))
    assert text is not None and html is not None
    return text.get_content().replace("\r\n", "\n"), html.get_content()


def test_a_pilot_leaves_the_others_out_for_good(site: Site) -> None:
    site.change("mail", users=["ann", "a,b"], accounts=["lab"])
    ends(site, ann="ml", bob="lab", eve="ml")
    outcome = site.due()
    assert told(site) == ["ann", "bob"]
    assert outcome.skipped == {OUTSIDE: 1} and not outcome.faults
    site.change("mail", users=[], accounts=[])
    assert not site.due(NOW_S + 1000).skipped
    assert told(site) == ["ann", "bob"], "who joins later gets no mail about the past"


def test_mail_waits_for_an_address_and_is_not_lost(site: Site, tmp_path: Path) -> None:
    addresses = tmp_path / "addresses"
    site.change("mail", address_map=str(addresses))
    ends(site, ann="ml", bob="ml")
    outcome = site.due()
    [fault] = outcome.faults
    assert "mail.address_map" in fault and "No such file" in fault
    assert outcome.delayed["the address of their user cannot be looked up"] == 2 and not site.got
    addresses.write_text("bob b.ob@elsewhere.example\n")
    addresses.chmod(0o640)
    assert not site.due(NOW_S + 1000).faults
    assert told(site) == ["ann", "b.ob"]
    assert not site.due(NOW_S + 1060).sent


def test_mail_without_an_address_for_days_is_dropped_and_says_why(site: Site, tmp_path: Path) -> None:
    site.change("mail", address_map=str(tmp_path / "addresses"))
    ends(site, ann="ml")
    assert site.due().delayed["the address of their user cannot be looked up"] == 1
    outcome = site.due(NOW_S + 73 * 3600)
    assert outcome.skipped == {"the address of their user cannot be looked up": 1}


LINKS = [
    {"name": "Open in Grafana", "url": "https://g.example.org/d/x?var-jobid={job_id}&u={user}&to={end_ms}"},
    {"name": "R&D <b>", "url": "http://[::1]:3000/{account}"},
]


def test_reports_link_to_the_sites_pages(site: Site) -> None:
    site.app.given |= {"links": LINKS}
    site.change("site", help_url="https://help.example.org/gpus?a=b&c=d")
    ends(site, ann='"><script>/..%0aé &x=')
    site.due()
    [(_, _, message)] = site.server.taken
    text, html = page_of(message)
    account = "%22%3E%3Cscript%3E%2F..%250a%C3%A9%20%26x%3D"
    end_ms = (NOW_S + 62) * 1000
    assert f"https://g.example.org/d/x?var-jobid=2&u=ann&to={end_ms}\n" in text
    assert f"  http://[::1]:3000/{account}\n" in text
    assert f'href="https://g.example.org/d/x?var-jobid=2&amp;u=ann&amp;to={end_ms}"' in html
    assert f'href="http://[::1]:3000/{account}"' in html and "R&amp;D &lt;b&gt;" in html
    assert "<script" not in html and "https://help.example.org/gpus?a=b&amp;c=d" in html
    assert "https://help.example.org/gpus?a=b&c=d" in text
    site.change("mail", storm=1)
    for job_id in (7, 8):
        site.ends(job_id, NOW_S + 950 + job_id, user="bob", state="FAILED")
    site.app.clock_s = NOW_S + 1000
    site.ingest()
    site.due()
    text, html = page_of(site.server.taken[1][2])
    assert all(f"var-jobid={job_id}&amp;u=bob" in html for job_id in (7, 8))
    assert "Help:                https://help.example.org" in text


FAULTY = {
    '[[rule]]\nname = "low_used"\nenabled = false': "did you mean 'low_use'?",
    '[[rule]]\nname = "low_use"\nadvise = "x"': "did you mean 'advice'?",
    '[[rule]]\nname = "low_use"\nadvice = "{util.__class__}"': "did you mean 'util",
    '[[rule]]\nname = "low_use"\nadvice = "{util!r}"': "write only its name",
    '[[rule]]\nname = "low_use"\nadvice = "{util:>9999999}"': "write only its name",
    '[[rule]]\nname = "low_use"\nadvice = "{util"': "write {{ for a brace",
    '[[rule]]\nname = "low_use"\nadvice = "{}"': "did you mean",
    '[[rule]]\nname = "low_use"\nadvice = "a\\u001b[31mb"': "printable characters",
    '[[rule]]\nname = "low_use"\nwhen = { utils_pct = { max = 3 } }': "did you mean 'util_pct'?",
    '[[rule]]\nname = "low_use"\nwhen = { util_pct = { maximum = 3 } }': "did you mean 'max'?",
    '[[rule]]\nname = "low_use"\nwhen = { util_pct = { max = nan } }': "write a number",
    '[[rule]]\nname = "low_use"\nwhen = { util_pct = { max = true } }': "write a number",
    '[[rule]]\nname = "low_use"\nwhen = { state = { one_of = "FAILED" } }': "write texts",
    '[[rule]]\nname = "low_use"\nwhen = 3': "write such as",
    '[[rule]]\nname = "low_use"\nenabled = "no"': "true or false",
    '[[rule]]\nname = "low_use"\n[[rule]]\nname = "low_use"': "under one [[rule]]",
    '[[rule]]\nadvice = "x"': "name the rule",
    'rule = "x"': "under its own [[rule]]",
    "[characters]\nsteady_max = 1": "did you mean 'character'?",
    '[character]\nsteady_max = "1"': "write a number",
    "x =": "correct that line",
}


@pytest.mark.parametrize("text", FAULTY)
def test_a_fault_of_rules_toml_is_named_with_its_fix(tmp_path: Path, text: str) -> None:
    (tmp_path / "almanac.toml").write_text("")
    (tmp_path / "rules.toml").write_text(text)
    (tmp_path / "rules.toml").chmod(0o644)
    with pytest.raises(ConfigError) as raised:
        rules_of(load_config(tmp_path / "almanac.toml"))
    assert FAULTY[text] in raised.value.hint and "rules.toml: " in str(raised.value)


def test_a_site_changes_rules_and_a_fault_in_them_stops_no_mail(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "almanac.toml"
    source.write_text("")
    monkeypatch.setattr(
        type(site.app), "config", property(lambda app: replace(parse_config(app.given), source=str(source)))
    )
    assert not list(check_rules(site.app))
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nname = "no_telemetry"\nsummary = "Job of {gpus} GPU, see {{here}}."\n')
    rules.chmod(0o644)
    ends(site, ann="ml")
    assert not site.due().faults
    text, _ = page_of(site.server.taken[0][2])
    assert "\nJob of 1 GPU, see {here}." in text
    [check] = check_rules(site.app)
    assert (check.status, check.said) == ("ok", f"{rules} changes 1 rules and removes 0")
    rules.chmod(0o666)
    site.ends(7, NOW_S + 950, user="bob")
    site.app.clock_s = NOW_S + 1000
    site.ingest()
    [fault] = site.due().faults
    assert "rules.toml belongs to root and has mode 0666" in fault
    text, _ = page_of(site.server.taken[1][2])
    assert "\nWe cannot tell which GPUs" in text, "mail goes on, with the packaged rules"
    [check] = check_rules(site.app)
    assert check.status == "fail"
    failed = CliRunner().invoke(report.command, ["7"], obj=site.app)
    assert isinstance(failed.exception, ConfigError) and failed.exception.exit_code == 3
    monkeypatch.setattr(type(site.app), "is_operator", False)
    monkeypatch.setattr(type(site.app), "caller", "bob")
    monkeypatch.setattr(type(site.app), "may_read_store", True)
    shown = CliRunner().invoke(report.command, ["7"], obj=site.app)
    assert shown.exit_code == 0 and "warning: this report leaves out the site's own rules" in shown.output


def test_a_run_notes_that_it_reads_the_choices(site: Site) -> None:
    folder = folder_of(site.app.config)
    site.due()
    assert last_read(folder) is None, "no folder, no mark, no fault"
    folder.mkdir(parents=True)
    folder.chmod(FOLDER_MODE)
    site.due(NOW_S + 700)
    found = last_read(folder)
    assert found and found.time_s == NOW_S + 700
    said = CliRunner().invoke(mail.command, ["off"], obj=site.app).output
    assert said == "off: no mail (your choice)\n"
    site.due(NOW_S + 760)
    assert last_read(folder) == found, "not written every minute"
    site.due(NOW_S + 3000)
    assert last_read(folder) != found
    for forged in (b"", b"9" * 400, b"1 host\nx", b"x host\n", b"1 \x1b[31m\n", b"\xff 1\n"):
        (folder / LAST_READ).write_bytes(forged)
        assert last_read(folder) is None
    (folder / LAST_READ).unlink()
    (folder / LAST_READ).symlink_to("/etc/passwd")
    assert last_read(folder) is None
    mark_read(folder, NOW_S, "a", os.getuid())
    assert last_read(folder) is not None and not (folder / LAST_READ).is_symlink()


def test_doctor_looks_at_addresses_and_the_pilot(site: Site, tmp_path: Path) -> None:
    assert not list(check_mail_settings(site.app))
    addresses, program = tmp_path / "addresses", tmp_path / "mail-of"
    site.change("mail", address_map=str(addresses), address_command=[str(program)], users=["ann"])
    missing, absent, pilot = check_mail_settings(site.app)
    assert (missing.status, absent.status, pilot.status) == ("fail", "fail", "ok")
    addresses.write_text("ann ann@example.org\nbob bob@example.org,eve@example.org\n")
    addresses.chmod(0o640)
    program.write_text("#!/bin/sh\necho $1@example.org\n")
    program.chmod(0o757)
    bad, writable, _ = check_mail_settings(site.app)
    assert bad.status == "warn" and "bob bob@example.org,eve@example.org" in bad.said
    assert writable.status == "fail" and "has mode 0757" in writable.said
    addresses.write_text("ann ann@example.org\n")
    program.chmod(0o755)
    good, command, _ = check_mail_settings(site.app)
    assert good.said == f"{addresses} has the addresses of 1 users"
    if program.stat().st_uid == 0:
        assert (command.status, command.said) == (
            "ok",
            f"{program} gives {site.app.caller} {site.app.caller}@example.org",
        )
    with MailRecord(record_path(site.root / "store")):
        assert not site.got
