"""Mail about running jobs: who gets it, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mail_server import MailServer

from advisor.watch.actions import DueStep, Step
from advisor.watch.round import WatchFinding
from almanac.config_file import parse_config
from almanac.errors import AlmanacError
from reports.mail.watch import WatchMail, render_steps

NOW_S = 1_795_464_000
JOB: dict[str, Any] = {
    "job_id": 7, "submit_s": 1, "restarts": 0, "array_job_id": 6, "array_task_id": 2, "user": "root", "account": "a",
    "partition": "gpu", "name": "x\x1b[2J\nBcc: eve@x", "gpu_count": 4, "start_s": 9, "comment": "",
}  # fmt: skip
FOUND = WatchFinding(7, 9, "idle", NOW_S - 7200, NOW_S, 0.97, {}, "end it: scancel 7")


def mail(folder: Path, port: int = 25, **more: Any) -> WatchMail:
    given = {"server": "127.0.0.1", "port": port, "sender": "almanac@x.org", "recipient": "{user}@x.org", **more}
    data = {"mail": given, "hooks": {"advice_dir": str(folder)}, "watch": {"operators_mail": "ops@x.org"}}
    return WatchMail(parse_config(data), "c", lambda: NOW_S)


@pytest.mark.parametrize(
    ("more", "job", "message", "warn"),
    [
        ({}, {}, "", ""),
        ({"server": ""}, {}, "mail.server is empty", "mail.server is empty"),
        ({"frequency": "off"}, {}, "the user wants none", ""),
        ({"frequency": "digest"}, {}, "the user wants weekly mail", ""),
        ({}, {"comment": "almanac:nomail"}, "almanac:nomail", ""),
        ({}, {"user": "no.such.user"}, "the system does not know the user", ""),
        ({"users": ["ann"]}, {}, "outside the pilot", "outside the pilot"),
        ({"accounts": ["a"]}, {}, "", ""),
        ({"address_command": ["/bin/true"]}, {}, "no address", "no address"),
        ({"address_command": ["/bin/false"]}, {}, "cannot be looked up now", "cannot be looked up now"),
    ],
)
def test_a_warning_reaches_those_who_want_no_other_mail(
    tmp_path: Path, more: dict[str, Any], job: dict[str, Any], message: str, warn: str
) -> None:
    for step, why in (("message", message), ("warn", warn)):
        found = mail(tmp_path, **more).why_no_mail({**JOB, **job}, step)  # type: ignore[arg-type]
        assert why in found and bool(why) == bool(found)


@pytest.mark.parametrize(
    ("what", "subject", "text"),
    [
        ("warn", "Job 6_2 will be cancelled after 2026-11-23 21:15 UTC: idle", "comment=almanac:keep:8h"),
        ("cancel", "Job 6_2 was cancelled: idle", "two mails said so"),
        ("message", "Job 6_2: idle", "while it still helps"),
        ("operators", "Job 6_2: idle", "root"),
    ],
)
def test_a_mail_says_first_what_to_do(what: Step, subject: str, text: str) -> None:
    cancel_s = NOW_S + 4500 if what == "warn" else 0
    rendered = render_steps([DueStep(what, FOUND, JOB, cancel_s)], parse_config({}), "c", NOW_S)
    assert rendered.subject == subject and text in rendered.text
    assert "end it: scancel 7" in " ".join(rendered.text.split())
    assert "idle for 2 h on 4 GPUs" in " ".join(rendered.text.split())
    assert "\x1b" not in rendered.text + rendered.html


def test_one_mail_goes_to_one_reader_and_what_is_refused_is_said(tmp_path: Path) -> None:
    steps = [DueStep("message", FOUND, JOB), DueStep("warn", FOUND, JOB, NOW_S + 4500)]
    with MailServer() as server:
        mail(tmp_path, server.port).hand_over("root", steps)
        mail(tmp_path, server.port).hand_over("", [DueStep("operators", FOUND, JOB)])
        server.says_rcpt = lambda recipient: "550 no such user"
        with pytest.raises(AlmanacError, match="no such user"):
            mail(tmp_path, server.port).hand_over("root", steps)
    assert [to for _, to, _ in server.taken] == [["root@x.org"], ["ops@x.org"]]
    assert server.taken[0][2]["Bcc"] is None and "will be cancelled" in server.taken[0][2]["Subject"]
    with pytest.raises(AlmanacError):
        mail(tmp_path, server.port).hand_over("root", steps)
