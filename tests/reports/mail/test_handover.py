"""Hand-over to real SMTP servers and sendmail programs: what is taken, refused, or lost, and what is on record then."""

from __future__ import annotations

import shlex
import socket
import ssl
import subprocess
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from email import message_from_bytes
from pathlib import Path
from typing import Any, cast

import pytest
from aiosmtpd.smtp import AuthResult
from mail_server import HANG_UP, MailServer
from mails import NOW_S, message, run

from almanac.config import Config, Mail
from almanac.errors import AlmanacError, ServerError
from reports.mail.batch import MOST_REFUSED, MailBatch
from reports.mail.due import MailOutcome
from reports.mail.handover import MailAgent
from reports.mail.record import RETRY_S, MailRecord, record_path


@pytest.fixture
def record(tmp_path: Path) -> Iterator[MailRecord]:
    with MailRecord(record_path(tmp_path)) as opened:
        yield opened


@pytest.fixture
def server() -> Iterator[MailServer]:
    with MailServer() as started:
        yield started


def config_of(server: MailServer, **more: Any) -> Mail:
    return Mail(**{"server": "127.0.0.1", "port": server.port, "sender": "almanac@example.org", **more})


def batch_of(record: MailRecord, agent: MailAgent, left: int = 9) -> MailBatch:
    """A batch that hands over ready mails, and needs no store for it."""
    return MailBatch(cast(Any, None), Config(), lambda: NOW_S, lambda user: None, record, agent, MailOutcome(), left)


def sent(record: MailRecord, config: Mail, *numbers: int, left: int = 300) -> tuple[MailOutcome, str]:
    """Hand over a mail to the user u<number> for each number; what came of it, and the fault that ended it."""
    with MailAgent(config) as agent:
        batch = batch_of(record, agent, left)
        try:
            for number in numbers:
                batch.hand_over(message(number, user=f"u{number}"))
        except AlmanacError as error:
            return batch.outcome, str(error)
        return batch.outcome, ""


def due(record: MailRecord) -> list[int]:
    return [each.job_id for each in record.due(NOW_S + RETRY_S, "test")]


def test_a_mail_arrives_as_it_was_made_over_one_connection(record: MailRecord, server: MailServer) -> None:
    outcome, fault = sent(record, config_of(server), *range(1, 51))
    assert (outcome.sent, fault, server.connections) == ({"job": 50}, "", 1)
    sender, recipients, _ = server.taken[0]
    assert (sender, recipients) == ("almanac@example.org", ["u1@example.org"])
    assert server.raw[0] == message(1, user="u1").raw and len(set(server.ids)) == 50
    assert due(record) == []


@pytest.mark.parametrize(
    ("at", "reply"),
    [
        ("rcpt", "450 4.7.1 greylisted"), ("rcpt", "550 5.1.1 no such user"), ("rcpt", "550 relay not permitted"),
        ("data", "554 5.6.0 no such content"), ("data", "451 4.3.0 later"),
    ],
)  # fmt: skip
def test_a_refused_mail_is_due_again_and_delays_no_other(
    record: MailRecord, server: MailServer, at: str, reply: str
) -> None:
    setattr(server, f"says_{at}", lambda about: reply if about in ("u1@example.org", "<m1@example.org>") else None)
    outcome, fault = sent(record, config_of(server), 1, 2, 3)
    name = f"127.0.0.1:{server.port}"
    assert (outcome.sent, outcome.refused, fault) == ({"job": 2}, [f"u1@example.org: {name}: {reply}"], "")
    assert due(record) == [1] and record.counts().words == outcome.refused[0]
    server.says_rcpt = server.says_data = lambda about: None
    sent(record, config_of(server), 1)
    assert due(record) == [] and sorted(server.ids) == ["<m1@example.org>", "<m2@example.org>", "<m3@example.org>"]


def test_a_server_that_refuses_one_after_the_other_is_left_alone(record: MailRecord, server: MailServer) -> None:
    server.says_rcpt = lambda address: "550 relay not permitted"
    outcome, fault = sent(record, config_of(server), *range(1, 10))
    assert "550 relay not permitted" in fault and len(outcome.refused) == MOST_REFUSED
    server.says_rcpt = lambda address: "550 gone" if int(address[1]) % 2 else None
    outcome, fault = sent(record, config_of(server), *range(1, 10))
    assert fault == "" and outcome.sent == {"job": 4}, "every other mailbox is gone"
    server.says_rcpt = lambda address: "451 greylisted"
    assert sent(record, config_of(server), *range(1, 10))[1] == "", "it may take them later"


@pytest.mark.parametrize(
    ("at", "reply", "said"),
    [("mail", "553 5.1.8 no such sender", "553"), ("data", HANG_UP, "closed"), ("rcpt", "421 4.3.2 going down", "421")],
)
def test_a_server_that_hangs_up_or_refuses_the_sender_ends_the_run(
    record: MailRecord, server: MailServer, at: str, reply: str, said: str
) -> None:
    setattr(server, f"says_{at}", lambda about: reply)
    outcome, fault = sent(record, config_of(server), 1, 2)
    assert said in fault and f"127.0.0.1:{server.port} takes no mail: " in fault and not outcome.sent
    assert due(record) == [1]


def test_without_a_server_nothing_is_tried(record: MailRecord) -> None:
    record.notice([run(1)])
    _, fault = sent(record, Mail(server="127.0.0.1", port=9, sender="almanac@example.org"), 1)
    assert "127.0.0.1:9 takes no mail: [Errno 111] Connection refused" in fault
    assert record.due(NOW_S, "test") == [run(1)], "at the next run"


def test_the_rate_limit_leaves_mails_to_the_next_run(record: MailRecord, server: MailServer) -> None:
    outcome, fault = sent(record, config_of(server), 1, 2, 3, left=2)
    assert (outcome.sent, outcome.left, fault) == ({"job": 2}, 1, "")


@pytest.mark.parametrize("goodbye", ["421 4.3.2 going down", "500 what?"])
def test_a_mail_that_was_taken_is_sent_whatever_follows(record: MailRecord, server: MailServer, goodbye: str) -> None:
    server.says_quit = goodbye
    assert sent(record, config_of(server), 1)[0].sent == {"job": 1}


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    argv = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    done = subprocess.run([*argv.split(), "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def context_of(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


def test_it_encrypts_and_logs_in(record: MailRecord, certificate: Path, tmp_path: Path) -> None:
    seen = []

    def authenticator(server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        seen.append((data.login, data.password))
        return AuthResult(success=data.password == b"se cret", handled=False)

    password = tmp_path / "password"
    password.write_text("se cret\n")
    options = {"tls_context": context_of(certificate), "require_starttls": True, "auth_required": True,
               "authenticator": authenticator}  # fmt: skip
    with MailServer(options=options) as server:
        config = config_of(server, security="starttls", ca_file=str(certificate / "cert.pem"), username="almanac",
                           password_file=str(password))  # fmt: skip
        assert sent(record, config, 1)[0].sent == {"job": 1}
        assert "CERTIFICATE_VERIFY_FAILED" in sent(record, replace(config, ca_file=""), 2)[1]
        password.write_text("wrong")
        assert "535" in sent(record, config, 2)[1]
    assert seen[0] == (b"almanac", b"se cret")


def test_it_encrypts_from_the_first_byte(record: MailRecord, certificate: Path) -> None:
    with MailServer(options={"ssl_context": context_of(certificate)}) as server:
        config = config_of(server, security="tls", ca_file=str(certificate / "cert.pem"))
        assert sent(record, config, 1)[0].sent == {"job": 1}


@pytest.mark.parametrize("stage", ["says_mail", "says_rcpt", "says_data"])
def test_a_password_that_the_server_says_back_is_not_kept(record: MailRecord, tmp_path: Path, stage: str) -> None:
    (tmp_path / "password").write_text("se cret\n")
    told = ["se cret", *(b64encode(text).decode() for text in (b"\0almanac\0se cret", b"se cret"))]
    echo: Any = {stage: lambda about: f"554 5.7.1 {about} AUTH PLAIN {' '.join(told)} \x1b[2J {'x' * 400}"}
    options = {"auth_require_tls": False, "authenticator": lambda *_: AuthResult(success=True)}
    with MailServer(**echo, options=options) as server:
        config = config_of(server, username="almanac", password_file=str(tmp_path / "password"))
        said = f"{sent(record, config, 1)} {record.counts()}"
    assert "554" in said and "\x1b" not in said
    assert not [secret for secret in told if secret in said]


def test_nothing_is_sent_in_the_open_that_was_to_be_encrypted(record: MailRecord, server: MailServer) -> None:
    assert "STARTTLS" in sent(record, config_of(server, security="starttls"), 1)[1]
    away = replace(config_of(server, username="almanac"), server="mail.example.org")
    assert "mail.security" in sent(record, away, 1)[1]
    assert "password_file" in sent(record, config_of(server, username="almanac", password_file="/nowhere"), 1)[1]
    assert not server.taken


@contextmanager
def hostile_server(after: int, part: bytes, pause_s: float) -> Iterator[int]:
    """A server that answers so many lines of the client as a real one would, and then sends `part` for ever."""
    listener = socket.create_server(("127.0.0.1", 0))

    def talk() -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                for number in range(after):
                    connection.sendall(b"250 ok\r\n" if number else b"220 here\r\n")
                    lines.readline()
                while part:
                    connection.sendall(part)
                    time.sleep(pause_s)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.mark.parametrize(
    ("part", "pause_s", "said"),
    [
        (b"2", 0.02, "no whole answer within"),
        (b"250-x\r\n", 0.02, "no whole answer within"),
        (b"250-" + b"x" * 1000 + b"\r\n", 0.0, "a reply of more than 65536 bytes"),
        (b"", 0.0, "onnection"),
    ],
    ids=["drips", "drips lines", "floods", "closes"],
)
@pytest.mark.parametrize("after", [0, 1, 2, 3, 4])
def test_a_server_whose_reply_has_no_end_costs_one_run(
    record: MailRecord, monkeypatch: pytest.MonkeyPatch, after: int, part: bytes, pause_s: float, said: str
) -> None:
    """As the greeting, after EHLO, to the sender, to a recipient, and to DATA. The mail is due again."""
    monkeypatch.setattr("reports.mail.handover.TIMEOUT_S", 0.3 if pause_s else 5)
    record.notice([run(1)])
    with hostile_server(after, part, pause_s) as port, pytest.raises(ServerError, match=said):
        config = Mail(server="127.0.0.1", port=port, sender="almanac@example.org")
        batch_of(record, MailAgent(config)).hand_over(message(1))
    assert due(record) == [1]


def sendmail(folder: Path, script: str) -> Mail:
    program = folder / "sendmail"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return Mail(server=str(program), sender="almanac@example.org")


def test_a_sendmail_program_gets_the_mail(record: MailRecord, tmp_path: Path) -> None:
    folder = shlex.quote(str(tmp_path))
    outcome, fault = sent(record, sendmail(tmp_path, f'echo "$@" >{folder}/argv; cat >{folder}/mail'), 1)
    assert (outcome.sent, fault) == ({"job": 1}, "")
    assert (tmp_path / "argv").read_text() == "-i -t -f almanac@example.org\n"
    raw = (tmp_path / "mail").read_bytes()
    assert b"\r" not in raw and message_from_bytes(raw)["To"] == "u1@example.org"


def test_a_sendmail_program_refuses_fails_or_hangs(
    record: MailRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, fault = sent(record, sendmail(tmp_path, "echo no such user >&2; exit 67"), 1)
    assert outcome.refused == [f"u1@example.org: {tmp_path}/sendmail: exit code 67: no such user"] and fault == ""
    assert sent(record, sendmail(tmp_path, "exit 75"), 2, 3, 4, 5)[1].startswith("3 recipients in a row: ")
    monkeypatch.setattr("reports.mail.handover.TIMEOUT_S", 0.2)
    assert "timed out after 0.2 s" in sent(record, sendmail(tmp_path, "sleep 60"), 8)[1]
    assert due(record) == [1, 2, 3, 4, 8]


def test_a_sendmail_program_that_cannot_run_or_is_not_trusted_is_not_run(record: MailRecord, tmp_path: Path) -> None:
    assert "no program that can run" in sent(record, Mail(server=str(tmp_path), sender="a@b.example"), 1)[1]
    config = sendmail(tmp_path, "exit 0")
    (tmp_path / "sendmail").chmod(0o777)
    assert "has mode 0777" in sent(record, config, 1)[1]
    (tmp_path / "sendmail").chmod(0o600)
    assert "no program that can run" in sent(record, config, 1)[1]
