"""`almanac mail`, its sub-command send, and the findings of doctor about mail."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from aiosmtpd.smtp import AuthResult
from click.testing import CliRunner, Result
from mail_server import MailServer
from mails import NOW_S, message
from mails import run as about

from almanac.config import Config
from almanac.config_file import parse_config
from almanac.errors import AlmanacError, CommandError, ConfigError, NotAllowedError, ServerError, StoreError
from cli import mail
from cli.app import App
from cli.doctor import Check
from cli.doctor.mail import check_mail
from reports.mail.recipients import FOLDER_MODE, folder_of, mark_read
from reports.mail.record import MailRecord, record_path
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

FLAGS = b"AccountingStorageType   = x\nAccountingStoreFlags    = job_comment,job_script\n"


@dataclass
class Someone(App):
    """A caller, with a configuration and a Slurm of their own."""

    given: dict[str, Any] = field(default_factory=dict)
    name: str = "alice"
    can_see_all: bool = False
    settings: bytes = FLAGS

    @property
    def config(self) -> Config:  # type: ignore[override]
        return parse_config(self.given)

    @property
    def caller(self) -> str:
        return self.name

    @property
    def is_operator(self) -> bool:
        return self.can_see_all

    @property
    def may_read_store(self) -> bool:
        return True

    @property
    def commands(self) -> Any:  # type: ignore[override]
        def run(argv: Any) -> bytes:
            if not self.settings:
                raise CommandError("scontrol failed")
            return self.settings

        return run

    def now_s(self) -> int:
        return NOW_S


@pytest.fixture
def server() -> Iterator[MailServer]:
    with MailServer() as started:
        yield started


@pytest.fixture(autouse=True)
def known_users(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Uids of the users that the system knows. alice runs the tests."""
    uids = {"alice": os.getuid(), "bob": os.getuid() + 1}
    monkeypatch.setattr("reports.mail.recipients.read.__defaults__", (uids.get,))
    return uids


@pytest.fixture
def app(tmp_path: Path, server: MailServer) -> Someone:
    store = Store.create(tmp_path / "store")
    rows = [
        {"job_id": job_id, "submit_s": NOW_S - 1000, "array_job_id": array, "array_task_id": task, "user": user,
         "name": "x\r\nBcc: mallory@evil.example", "state": "COMPLETED", "start_s": NOW_S - 990, "end_s": NOW_S - 90,
         "elapsed_s": 900, "gpu_count": 1, "node_list": "n1", "node_count": 1}
        for job_id, array, task, user in [(1, None, None, "alice"), (2, None, None, "bob"),
                                          *((10 + task, 10, task, "alice") for task in range(8))]
    ]  # fmt: skip
    store.of("c").write("jobs", pa.Table.from_pylist(rows, TABLES["jobs"].schema))
    advice = Path(tempfile.mkdtemp(dir=tmp_path))
    (advice / "mail").mkdir()
    (advice / "mail").chmod(FOLDER_MODE)
    given = {
        "mail": {"server": "127.0.0.1", "port": server.port, "sender": "almanac@example.org",
                 "recipient": "{user}@example.org"},
        "hooks": {"advice_dir": str(advice)},
    }  # fmt: skip
    return Someone(store_path=str(store.root), given=given)


def run(app: App, *argv: str, command: Any = mail.command) -> Result:
    return CliRunner().invoke(command, list(argv), obj=app)


def findings(app: App) -> dict[str, Check]:
    return {check.name: check for check in check_mail(app)}


def test_a_user_chooses_and_sees_the_choice(app: Someone) -> None:
    mark_read(folder_of(app.config), NOW_S - 60, "mailhost", os.getuid())
    assert run(app).output == "every: one mail after each GPU job, or one for a burst of jobs (this site's default)\n"
    assert run(app, "off").output == "off: no mail (your choice)\n"
    assert run(app).output == "off: no mail (your choice)\n"
    assert run(app, "default").output.endswith("(this site's default)\n")
    assert run(app, "never").exit_code == 2


def test_a_user_sees_what_became_of_their_mails(app: Someone) -> None:
    mark_read(folder_of(app.config), NOW_S - 60, "mailhost", os.getuid())
    with MailRecord(record_path(app.store.root)) as record:
        for number in range(3):
            mail = message(number + 1, *([about(1, user="alice"), about(9, user="alice")] if not number else []),
                           **({"kind": "job"} if number else {"kind": "digest"}), user="alice")  # fmt: skip
            mail = replace(mail, runs=tuple(replace(each, cluster="c") for each in mail.runs))
            record.trying(mail, NOW_S + number)
            if number == 1:
                record.failed(mail.runs, "550 5.1.1 \x1b[2Jno such user", NOW_S + number)
            else:
                record.taken(mail, NOW_S + number)
    lines = [line[len("2026-11-21 10:15  ") :] for line in run(app).output.splitlines()[3:]]
    assert lines == [
        "job 3: sent to alice@example.org",
        "job 2: not taken yet, and tried again every 15 min. The mail server's answer about alice@example.org: "
        "550 5.1.1 ?[2Jno such user",
        "job 1 and 1 other job: sent to alice@example.org",
    ]


def test_a_choice_that_no_timer_reads_says_so(app: Someone) -> None:
    """On a host without the shared folder, or where the timer is down. Before its first run, that is no alarm."""
    folder = folder_of(app.config)
    assert run(app).output.count("\n") == 1, "nothing is chosen, so nothing can go unread"
    never = " ".join(run(app, "off").output.split())
    assert never.startswith("off: no mail (your choice) It is stored on ")
    assert "has read it yet. In an hour, run this again: almanac mail" in never and "almanac:nomail" in never
    assert max(len(line) for line in run(app).output.splitlines() if str(folder) not in line) <= 80
    mark_read(folder, NOW_S - 3 * 86_400, "mailhost", os.getuid())
    stale = " ".join(run(app).output.split())
    assert "has read it for 3 d. Tell the operators that the mail timer of mailhost no longer reads" in stale
    mark_read(folder, NOW_S - 60, "mailhost", os.getuid())
    assert run(app).output == "off: no mail (your choice)\n"
    app.given["mail"] = {}
    assert run(app).output == "off: no mail (your choice)\n", "the host that sends mail has a configuration of its own"


def test_a_site_that_sends_no_mail_says_so(app: Someone) -> None:
    app.given = {"hooks": app.given["hooks"]}
    assert "This site sends no mail" in run(app, "digest").output


def test_where_no_choice_can_be_kept_it_is_an_error(app: Someone) -> None:
    app.given = {"hooks": {"advice_dir": "/nowhere"}}
    refused = run(app, "off").exception
    assert isinstance(refused, StoreError) and "almanac:nomail" in refused.hint
    assert "No choice can be kept on " in run(app).output


def test_a_report_is_sent_to_the_owner(app: Someone, server: MailServer) -> None:
    done = run(app, "send", "1")
    assert done.output == "sent to alice@example.org: 1 job\n"
    ((sender, recipients, sent),) = server.taken
    assert (sender, recipients) == ("almanac@example.org", ["alice@example.org"])
    assert sent["Bcc"] is None and sent["Subject"].strip().startswith("x??Bcc") and sent["Subject"].endswith("[job 1]")


def test_an_operator_sends_each_report_to_its_own_user(app: Someone, server: MailServer) -> None:
    app.name, app.can_see_all = "root", True
    assert run(app, "send", "1", "2").exit_code == 0
    assert [recipients for _, recipients, _ in server.taken] == [["alice@example.org"], ["bob@example.org"]]
    assert len(set(server.ids)) == 2


def test_an_operator_sends_a_preview(app: Someone, server: MailServer) -> None:
    """To any one address, without asking the owner, and without a trace in the record."""
    app.given["mail"] |= {"users": ["nobody"], "reply_to": "help@example.org"}
    run(app, "off")
    argv = ["send", "2", "1", "--to", "me@example.org"]
    assert isinstance(run(app, *argv).exception, NotAllowedError)
    app = replace(app, name="root", can_see_all=True)
    lines = run(app, *argv).output.splitlines()
    assert lines[0] == "sent to me@example.org: 1 job of bob; not sent to them, and not recorded as sent"
    assert [recipients for _, recipients, _ in server.taken] == [["me@example.org"]] * 2
    assert {str(mail["Reply-To"]) for _, _, mail in server.taken} == {"help@example.org"}
    assert not record_path(app.store_root).exists()
    for bad in ("", "a@b\r\nBcc: c@d", "a@b.example,c@d.example", "A <a@b.example>", "a b@c.example", "-x@c.example"):
        assert run(app, "send", "1", "--to", bad).exit_code == 2
    assert len(server.taken) == 2


def test_outside_the_pilot_mail_goes_to_those_who_ask_for_it(app: Someone, server: MailServer) -> None:
    app.given["mail"] |= {"accounts": ["lab"]}
    assert run(app, "send", "1").exit_code == 0
    assert [to for _, recipients, _ in server.taken for to in recipients] == ["alice@example.org"]
    app.name, app.can_see_all = "root", True
    refused = run(app, "send", "1").exception
    assert isinstance(refused, NotAllowedError) and "outside the pilot" in str(refused) and "--to" in refused.hint


def test_another_s_job_cannot_be_mailed(app: Someone, server: MailServer) -> None:
    assert isinstance(run(app, "send", "2").exception, AlmanacError)
    assert not server.taken


def test_who_wants_no_mail_gets_none_from_others(app: Someone, server: MailServer) -> None:
    run(app, "off")
    assert run(app, "send", "1").exit_code == 0
    app.name, app.can_see_all = "root", True
    refused = run(app, "send", "1").exception
    assert isinstance(refused, NotAllowedError) and str(refused) == "alice wants no mail"
    assert len(server.taken) == 1


def test_who_may_want_no_mail_gets_none_from_others(
    app: Someone, server: MailServer, known_users: dict[str, int]
) -> None:
    known_users.clear()
    app.name, app.can_see_all = "root", True
    refused = run(app, "send", "1").exception
    assert isinstance(refused, NotAllowedError) and "does not know alice" in str(refused)
    assert not server.taken
    app.name = "alice"
    assert run(app, "send", "1").exit_code == 0


def test_faults_of_mailing_are_said(app: Someone, server: MailServer) -> None:
    server.says_rcpt = lambda address: "550 5.1.1 no such user"
    assert isinstance(run(app, "send", "1").exception, ServerError)
    app.given = {"hooks": app.given["hooks"]}
    assert isinstance(run(app, "send", "1").exception, ConfigError)


@pytest.mark.skipif(os.getuid() != 0, reason="the folder of preferences has to be root's")
def test_doctor_finds_nothing_amiss(app: Someone) -> None:
    with MailRecord(record_path(app.store_root)) as record:
        record.notice([about(1)])
    found = findings(app)
    assert {check.status for check in found.values()} == {"ok"}
    assert found["mail"].said.endswith("answers (none); mail is sent from almanac@example.org")
    assert found["mail record"].said == "0 mails sent, 0 refused and due again, 0 jobs given up; 1 jobs not decided yet"


def test_doctor_names_a_server_that_is_not_there(app: Someone, server: MailServer) -> None:
    app.given["mail"]["port"] = 1
    found = findings(app)
    assert found["mail"].status == "fail" and "127.0.0.1:1 takes no mail: [Errno 111]" in found["mail"].said
    assert found["mail record"].status == "warn" and found["mail record"].said == "nothing was ever sent"


def test_doctor_and_mailing_name_a_server_whose_name_is_none(app: Someone) -> None:
    app.given["mail"]["server"] = "mail..example.org"
    found = findings(app)
    assert found["mail"].status == "fail" and "mail..example.org:" in found["mail"].said
    assert found["mail record"].status == "warn"
    failed = run(app, "send", "1").exception
    assert isinstance(failed, ServerError) and "mail..example.org:" in str(failed)


def test_doctor_and_mailing_name_a_password_that_cannot_be_sent(app: Someone, tmp_path: Path) -> None:
    def anybody(*_: Any) -> AuthResult:
        return AuthResult(success=True)

    password = tmp_path / "password"
    password.write_text("p\u00e4ssword", encoding="utf-8")
    password.chmod(0o600)
    options = {"auth_require_tls": False, "authenticator": anybody}
    with MailServer(options=options) as server:
        app.given["mail"] |= {"port": server.port, "username": "almanac", "password_file": str(password)}
        said = findings(app)["mail"]
        assert said.status == "fail" and "takes no mail" in said.said
        assert isinstance(run(app, "send", "1").exception, ServerError)


def test_doctor_names_what_the_server_refused_in_its_words(app: Someone) -> None:
    with MailRecord(record_path(app.store_root)) as record:
        record.trying(message(1), NOW_S)
        record.failed(message(1).runs, "550 no such user", NOW_S)
    found = findings(app)["mail record"]
    assert found.status == "warn"
    assert "1 refused and due again" in found.said
    assert "the last refusal: ann@example.org: 550 no such user" in found.said


def test_doctor_says_that_the_unit_cannot_use_a_set_id_program(app: Someone, tmp_path: Path) -> None:
    for name, mode in (("sendmail", 0o755), ("postdrop", 0o755)):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(mode)
    app.given["mail"]["server"] = str(tmp_path / "sendmail")
    assert [check.status for check in check_mail(app) if check.name == "mail"] == ["ok"]
    (tmp_path / "postdrop").chmod(0o2755)
    [ok, warned] = [check for check in check_mail(app) if check.name == "mail"]
    assert "can run" in ok.said and warned.status == "warn" and "NoNewPrivileges" in warned.said
    app.given["mail"]["server"] = str(tmp_path / "absent")
    assert "no program that can run" in next(check.said for check in check_mail(app) if check.status == "fail")


def test_doctor_does_not_blame_a_record_that_is_not_the_caller_s(app: Someone, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> None:
        raise NotAllowedError(f"{path}: can be used by the store's owner only", "run this as its owner")

    monkeypatch.setattr("cli.doctor.mail.read_counts", refused)
    found = findings(app)["mail record"]
    assert (found.status, found.todo) == ("warn", "run this as its owner")


def test_doctor_names_a_password_that_all_can_read(app: Someone, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("x")
    password.chmod(0o644)
    app.given["mail"] |= {"username": "almanac", "password_file": str(password)}
    assert any("is readable by everybody" in check.said for check in check_mail(app))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to other users")
def test_doctor_looks_at_the_preferences(app: Someone) -> None:
    folder = Path(app.given["hooks"]["advice_dir"]) / "mail"
    for name, uid in (("60001", 60001), ("60002", 60001), ("60003.7", 0)):
        (folder / name).write_text("off\n")
        os.chown(folder / name, uid, uid)
    found = findings(app)["mail preferences"]
    assert found.status == "warn" and "60002 of uid 60001" in found.said
    assert "60001 of" not in found.said and "60003" not in found.said
    folder.chmod(0o1777)
    assert "has mode 1777, expected 3733" in findings(app)["mail preferences"].said
    folder.chmod(0o1733)
    found = findings(app)["mail preferences"]
    assert found.status == "warn" and "can read each other's choices" in found.said and "chown root:root" in found.todo
    os.chown(folder, 60001, 0)
    assert findings(app)["mail preferences"].status == "fail"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert "users cannot choose" in findings(app)["mail preferences"].said


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to other users")
def test_doctor_names_choices_that_the_service_cannot_read(app: Someone) -> None:
    os.chown(app.store_root, 60001, 60002)
    found = findings(app)["mail preferences"]
    assert found.status == "fail" and "cannot read the choices" in found.said and "chown root:60002" in found.todo
    os.chown(Path(app.given["hooks"]["advice_dir"]) / "mail", 0, 60002)
    assert findings(app)["mail preferences"].status == "ok"


@pytest.mark.skipif(os.getuid() != 0, reason="the folder of preferences has to be root's")
def test_doctor_warns_where_users_can_link_files_of_others(
    app: Someone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.doctor.mail.HARDLINKS", tmp_path / "protected_hardlinks")
    for value, status in ((None, "ok"), ("1\n", "ok"), ("0\n", "warn")):
        if value:
            (tmp_path / "protected_hardlinks").write_text(value)
        assert findings(app)["mail preferences"].status == status


def test_doctor_names_who_fills_the_disk_beside_the_choices(app: Someone) -> None:
    """The folder is open to all, on the disk of the advice."""
    folder = Path(app.config.hooks.advice_dir) / "mail"
    (folder / "1").write_text("off\n")
    assert findings(app)["mail preferences"].status == "ok"
    (folder / "x").write_bytes(b"x" * (2 << 20))
    found = [check for check in check_mail(app) if check.name == "mail preferences"]
    assert found[0].status == "warn"
    assert f"uid {os.getuid()} keeps 2.0 MiB and 0 folders" in found[0].said


def test_doctor_says_where_comments_are_not_kept(app: Someone) -> None:
    app.settings = b"AccountingStoreFlags    = (null)\n"
    assert "--comment=almanac:nomail has no effect" in findings(app)["mail of one job"].said
    app.settings = b""
    assert "mail of one job" not in findings(app)
