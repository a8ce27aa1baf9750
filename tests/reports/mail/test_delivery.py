"""Delivery to a real SMTP server: what is taken, refused, lost; how fast, how often, and what a kill leaves."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import ssl
import subprocess
import sys
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.smtp import AuthResult
from mail_server import HANG_UP, MailServer
from mails import NOW_S, Clock, message, run

from almanac.config import Mail
from almanac.errors import ConfigError, ServerError, StoreError
from almanac.units import HOUR_S
from reports.mail.delivery import (
    BATCH,
    MOST_REFUSED,
    RETRY_S,
    deliver,
    send_now,
)
from reports.mail.outbox import Outbox, outbox_path
from reports.mail.outcome import LEFT, Outcome


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    with Outbox(outbox_path(tmp_path)) as opened:
        yield opened


@pytest.fixture
def server() -> Iterator[MailServer]:
    with MailServer() as started:
        yield started


@pytest.fixture
def clock() -> Clock:
    return Clock()


def mail_config(server: MailServer, **more: Any) -> Mail:
    given = {"server": "127.0.0.1", "port": server.port, "sender": "almanac@example.org"}
    return Mail(**{**given, **more})


@dataclass(frozen=True)
class Delivered:
    """What one delivery did. fault, last_error: the parts of its faults."""

    sent: int = 0
    failed: int = 0
    given_up: int = 0
    held: int = 0
    left: int = 0
    fault: str = ""
    last_error: str = ""


def sent(outbox: Outbox, config: Mail, clock: Clock, **chosen: str) -> Delivered:
    """chosen: the frequency of each user who has chosen one."""
    outcome = Outcome()
    deliver(outbox, config, clock, clock.sleep, lambda user: chosen.get(user, "every"), outcome)
    counts = {name: outcome.delivered[name] for name in ("sent", "failed", "given_up", "held")}
    said = dict(fault.split(": ", 1) for fault in outcome.faults)
    last = said.pop("mails that will never be sent", "").partition(", the last one to ")[2]
    fault = said.pop("mail server", "")
    assert not said and bool(fault) == outcome.delivered["fault"]
    return Delivered(**counts, left=outcome.delivered[LEFT], fault=fault, last_error=last)


def test_a_mail_arrives_as_it_was_queued(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    outbox.notice([run(1)])
    outbox.put(message(1, run(1)), NOW_S)
    assert sent(outbox, mail_config(server), clock) == Delivered(sent=1)
    sender, recipients, mail = server.taken[0]
    assert (sender, recipients) == ("almanac@example.org", ["ann@example.org"])
    assert server.raw == [message(1).raw]
    assert mail["Subject"] == "number 1"
    assert outbox.counts().queued == 0
    assert sent(outbox, mail_config(server), clock) == Delivered()


def test_one_connection_serves_all(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    for number in range(50):
        outbox.put(message(number, user=f"u{number}"), NOW_S)
    assert sent(outbox, mail_config(server), clock) == Delivered(sent=50)
    assert server.connections == 1
    assert len(set(server.ids)) == 50


def test_what_a_server_does_not_take_for_now_is_tried_again(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    server.says_rcpt = lambda address: "450 4.2.1 greylisted" if address.startswith("bob") else None
    outbox.put(message(1, recipient="bob@example.org"), NOW_S)
    outbox.put(message(2), NOW_S)
    assert sent(outbox, mail_config(server), clock) == Delivered(sent=1, failed=1)
    assert sent(outbox, mail_config(server), clock) == Delivered()
    server.says_rcpt = lambda address: None
    clock.now_s += RETRY_S
    assert sent(outbox, mail_config(server), clock) == Delivered(sent=1)
    assert server.ids == ["<m2@example.org>", "<m1@example.org>"]


def put_for(outbox: Outbox, users: int, kind: str = "") -> None:
    """A mail to each of so many users; that of number n has the Message-ID of message(n)."""
    for number in range(1, users + 1):
        outbox.put(message(number, user=f"u{number}", recipient=f"{kind}u{number}@example.org"), NOW_S + number)


def refuses_first(at: str, reply: str) -> dict[str, Callable[[str], str | None]]:
    return {f"says_{at}": lambda about: reply if about in ("u1@example.org", "<m1@example.org>") else None}


REFUSALS = [
    ("rcpt", "550 5.1.1 no such user"),
    ("rcpt", "550 relay not permitted"),
    ("data", "554 5.6.0 spam"),
]


@pytest.mark.parametrize(("at", "reply"), REFUSALS)
@pytest.mark.parametrize("is_first", [True, False])
def test_refused_mail_is_tried_again_for_days_and_then_named(
    outbox: Outbox, server: MailServer, clock: Clock, at: str, reply: str, is_first: bool
) -> None:
    """A refusal can be the server's fault: an operator has three days to correct it."""
    vars(server).update(refuses_first(at, reply))
    outbox.put(message(1, recipient="u1@example.org"), NOW_S)
    outbox.put(message(2), NOW_S + (1 if is_first else -1))
    assert sent(outbox, mail_config(server), clock) == Delivered(sent=1, failed=1)
    clock.now_s += 72 * HOUR_S
    expected = Delivered(failed=1, given_up=1, last_error=f"u1@example.org: {reply}")
    assert sent(outbox, mail_config(server), clock) == expected
    assert outbox.counts().queued == 0


def test_a_server_that_refuses_every_mail_loses_none(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    """A job now and then: each mail alone in its run, and a server that does not know whom it takes mail for."""
    server.says_rcpt = lambda address: "550 unrouteable address"
    for number in range(1, 6):
        outbox.put(message(number, recipient=f"u{number}@example.org"), int(clock()))
        assert sent(outbox, mail_config(server), clock).given_up == 0
        clock.now_s += 600
    server.says_rcpt = lambda address: None
    clock.now_s += RETRY_S
    assert sent(outbox, mail_config(server), clock) == Delivered(sent=5)


@pytest.mark.parametrize("reply", ["550 unrouteable address", "550 relay not permitted", "554 5.7.1 access denied"])
def test_a_server_that_refuses_one_mail_after_the_other_is_left_alone(
    outbox: Outbox, server: MailServer, clock: Clock, reply: str
) -> None:
    tried = []
    server.says_rcpt = lambda address: tried.append(address) or reply  # type: ignore[func-returns-value]
    put_for(outbox, 30)
    counts = sent(outbox, mail_config(server), clock)
    assert counts == Delivered(failed=MOST_REFUSED, fault=counts.fault)
    assert f"takes no mail: {reply}" in counts.fault
    assert (len(tried), outbox.counts().queued) == (MOST_REFUSED, 30)
    server.says_rcpt = lambda address: None
    assert sent(outbox, mail_config(server), clock).sent == 30 - MOST_REFUSED
    clock.now_s += RETRY_S
    assert sent(outbox, mail_config(server), clock) == Delivered(sent=MOST_REFUSED)


def test_users_who_are_gone_hold_up_nobody_for_long(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    """Five, whose mails come first."""
    server.says_rcpt = lambda address: "550 5.1.1 no such user" if address.startswith("gone") else None
    put_for(outbox, 5, "gone-")
    outbox.put(message(6), NOW_S + 6)
    assert sent(outbox, mail_config(server), clock).failed == MOST_REFUSED
    assert sent(outbox, mail_config(server), clock) == Delivered(sent=1, failed=5 - MOST_REFUSED)


def test_only_refusals_in_a_row_end_a_run(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    """Every other mailbox is gone."""
    server.says_rcpt = lambda address: "550 5.1.1 no such user" if address[1] in "13579" else None
    put_for(outbox, 2 * MOST_REFUSED)
    assert sent(outbox, mail_config(server), clock) == Delivered(sent=MOST_REFUSED, failed=MOST_REFUSED)


def test_one_dead_mailbox_holds_up_nobody(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    """Not even for one run: twenty mails that the server refuses, before and after another user's mail."""
    server.says_rcpt = lambda address: "550 5.1.1 no such user" if address.startswith("gone") else None
    for number in range(20):
        outbox.put(message(number, recipient="gone@example.org"), NOW_S)
    outbox.put(message(20), NOW_S + 1)
    assert sent(outbox, mail_config(server), clock) == Delivered(sent=1, failed=20)


def test_mail_that_was_refused_before_comes_after_new_mail(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    server.says_rcpt = lambda address: "550 5.1.1 no such user" if address.startswith("gone") else None
    put_for(outbox, MOST_REFUSED, "gone-")
    assert sent(outbox, mail_config(server), clock).fault
    clock.now_s += RETRY_S
    outbox.put(message(9), int(clock()))
    assert sent(outbox, mail_config(server), clock).sent == 1


def test_old_mail_ends_without_a_server_though_new_mail_comes_first(outbox: Outbox, clock: Clock) -> None:
    """A refused mail, and more new mails than a batch holds."""
    with MailServer() as server:
        server.says_rcpt = lambda address: "550 5.1.1 no such user"
        outbox.put(message(0, recipient="gone@example.org"), NOW_S)
        assert sent(outbox, mail_config(server), clock).failed == 1
    clock.now_s += 72 * HOUR_S
    for number in range(1, BATCH + 2):
        outbox.put(message(number), int(clock()))
    counts = sent(outbox, mail_config(server), clock)
    assert (counts.given_up, counts.last_error) == (1, "gone@example.org: 550 5.1.1 no such user")
    assert outbox.counts().queued == BATCH + 1


def test_a_server_that_refuses_the_sender_is_named(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    server.says_mail = lambda address: "553 5.1.8 who are you"
    for number in range(3):
        outbox.put(message(number), NOW_S)
    counts = sent(outbox, mail_config(server), clock)
    assert counts == Delivered(failed=1, fault=counts.fault)
    assert "takes no mail: 553 5.1.8 who are you" in counts.fault
    assert outbox.counts().queued == 3


def test_a_connection_lost_after_the_data_repeats_the_same_mail(
    outbox: Outbox, server: MailServer, clock: Clock
) -> None:
    server.says_data = lambda name: HANG_UP if name == "<m1@example.org>" and not server.taken else None
    for number in (1, 2):
        outbox.put(message(number), NOW_S)
    lost = sent(outbox, mail_config(server), clock)
    assert lost == Delivered(failed=1, fault=lost.fault) and "Connection unexpectedly closed" in lost.fault
    assert sent(outbox, mail_config(server), clock) == Delivered(sent=1)
    clock.now_s += RETRY_S
    assert sent(outbox, mail_config(server), clock) == Delivered(sent=1)
    assert Counter(server.ids) == {"<m1@example.org>": 2, "<m2@example.org>": 1}


def test_a_server_that_hangs_up_is_left_alone(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    server.says_rcpt = lambda address: "421 too busy"
    for number in range(9):
        outbox.put(message(number), NOW_S)
    counts = sent(outbox, mail_config(server), clock)
    assert counts == Delivered(failed=1, fault=counts.fault)
    assert "takes no mail: 421 too busy" in counts.fault


def test_no_server_is_no_message_s_fault(outbox: Outbox, clock: Clock) -> None:
    with MailServer() as gone:
        pass
    outbox.put(message(1), NOW_S)
    outbox.put(message(2), NOW_S + HOUR_S)
    config = mail_config(gone)
    counts = sent(outbox, config, clock)
    assert counts == Delivered(fault=counts.fault)
    assert counts.fault.startswith(f"127.0.0.1:{gone.port}: ")
    assert [each.attempts for each in outbox.ready(NOW_S, 10)] == [0, 0]
    clock.now_s += 72 * HOUR_S
    assert sent(outbox, config, clock).given_up == 1
    assert [each.message_id for each in outbox.ready(int(clock()), 10)] == ["<m2@example.org>"]


def test_a_mail_is_tried_again_until_it_is_given_up(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    server.says_data = lambda name: "451 later"
    outbox.put(message(1), NOW_S)
    tries, given_up = 0, 0
    while outbox.counts().queued:
        counts = sent(outbox, mail_config(server), clock)
        tries, given_up = tries + counts.failed, given_up + counts.given_up
        clock.now_s += 60
    assert (clock() - NOW_S, tries, given_up) == (72 * HOUR_S + 60, 72 * HOUR_S // RETRY_S + 1, 1)


def test_a_server_gets_so_many_a_minute(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    for number in range(25):
        outbox.put(message(number, user=f"u{number}"), NOW_S)
    assert sent(outbox, mail_config(server, per_minute=10), clock) == Delivered(sent=25)
    assert clock() == NOW_S + 120
    sent_by = [outbox.sent_since(NOW_S + second) for second in range(181)]
    assert max(one - later for one, later in zip(sent_by, sent_by[60:], strict=False)) == 10


def test_a_later_run_knows_what_an_earlier_one_sent(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    for number in range(10):
        outbox.put(message(number, user=f"u{number}"), NOW_S)
    assert sent(outbox, mail_config(server, per_minute=10), clock).sent == 10
    outbox.put(message(10), NOW_S)
    assert sent(outbox, mail_config(server, per_minute=10), clock).sent == 1
    assert clock() == NOW_S + 60


def test_a_choice_holds_for_what_is_queued(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    outbox.notice([run(1), run(2), run(3)])
    outbox.put(message(1, run(1)), NOW_S)
    outbox.put(message(2, run(2), run(3), kind="digest"), NOW_S)
    outbox.put(message(3, kind="weekly"), NOW_S)
    outbox.put(message(4, user="bob"), NOW_S)
    outbox.put(message(5, user="bob", kind="weekly"), NOW_S)
    outbox.put(message(6, user="eve"), NOW_S)
    counts = sent(outbox, mail_config(server), clock, ann="off", bob="digest")
    assert counts == Delivered(sent=2)
    assert sorted(server.ids) == ["<m5@example.org>", "<m6@example.org>"]
    assert outbox.counts().skipped == {"the user wants none": 4, "the user wants weekly mail": 1}
    assert (outbox.counts().given_up, outbox.counts().queued) == (0, 0)
    assert sent(outbox, mail_config(server), clock) == Delivered()


def test_who_opts_out_gets_nothing_of_a_backlog(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    server.says_rcpt = lambda address: "451 later"
    for number in range(3):
        outbox.put(message(number), NOW_S)
    assert sent(outbox, mail_config(server), clock) == Delivered(failed=3)
    server.says_rcpt = lambda address: None
    clock.now_s += 10 * HOUR_S
    assert sent(outbox, mail_config(server), clock, ann="off") == Delivered()
    assert outbox.counts().skipped == {"the user wants none": 3}


def test_mail_of_a_user_whom_the_system_does_not_know_waits(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    """The directory service is away: who said "off" must get nothing because of that."""
    outbox.put(message(1), NOW_S)
    outbox.put(message(2, user="bob"), NOW_S)
    assert sent(outbox, mail_config(server), clock, ann="unknown") == Delivered(sent=1, held=1)
    clock.now_s += RETRY_S
    assert sent(outbox, mail_config(server), clock) == Delivered(sent=1)
    outbox.put(message(3), int(clock()))
    clock.now_s += 72 * HOUR_S
    reason = "ann@example.org: the system does not know the user"
    expected = Delivered(held=1, given_up=1, last_error=reason)
    assert sent(outbox, mail_config(server), clock, ann="unknown") == expected
    assert server.ids == ["<m2@example.org>", "<m1@example.org>"]


def test_a_run_ends_though_much_is_left(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    for number in range(20):
        outbox.put(message(number, user=f"u{number}"), NOW_S)
    counts = sent(outbox, mail_config(server, per_minute=1), clock)
    assert counts == Delivered(sent=16, left=4)
    assert outbox.counts().queued == 4


def test_mail_that_waits_for_days_for_a_refused_sender_is_given_up(
    outbox: Outbox, server: MailServer, clock: Clock
) -> None:
    server.says_mail = lambda sender: "550 not from you"
    outbox.put(message(1), NOW_S)
    outbox.put(message(2), NOW_S + 60)
    clock.now_s = NOW_S + 72 * HOUR_S
    counts = sent(outbox, mail_config(server), clock)
    assert (counts.given_up, counts.failed) == (1, 1) and "550 not from you" in counts.last_error
    assert "550 not from you" in counts.fault
    assert outbox.counts().queued == 1


def test_what_cannot_be_sent_at_all_holds_up_one_run(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    outbox.put(message(1, recipient="\u00e4nn@example.org"), NOW_S)
    outbox.put(message(2), NOW_S + 1)
    assert sent(outbox, mail_config(server), clock).fault
    assert sent(outbox, mail_config(server), clock) == Delivered(sent=1)
    clock.now_s += 72 * HOUR_S
    assert sent(outbox, mail_config(server), clock).given_up == 1


def test_without_a_server_nothing_is_tried(outbox: Outbox, clock: Clock) -> None:
    with pytest.raises(ConfigError, match=r"mail\.server"):
        sent(outbox, Mail(), clock)


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


def test_it_encrypts_and_logs_in(outbox: Outbox, clock: Clock, certificate: Path, tmp_path: Path) -> None:
    seen = []

    def authenticator(server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        seen.append((data.login, data.password))
        return AuthResult(success=data.password == b"se cret", handled=False)

    password = tmp_path / "password"
    password.write_text("se cret\n")
    options = {"tls_context": context_of(certificate), "require_starttls": True, "auth_required": True,
               "authenticator": authenticator}  # fmt: skip
    outbox.put(message(1), NOW_S)
    with MailServer(options=options) as server:
        config = mail_config(server, security="starttls", ca_file=str(certificate / "cert.pem"), username="almanac",
                             password_file=str(password))  # fmt: skip
        assert sent(outbox, config, clock) == Delivered(sent=1)
        outbox.put(message(2), NOW_S)
        refused = sent(outbox, replace(config, ca_file=""), clock)
        assert "CERTIFICATE_VERIFY_FAILED" in refused.fault
        password.write_text("wrong")
        assert "535" in sent(outbox, config, clock).fault
    assert seen[0] == (b"almanac", b"se cret")
    assert outbox.counts().queued == 1


@pytest.mark.parametrize("stage", ["says_mail", "says_rcpt", "says_data"])
def test_a_password_that_the_server_says_back_is_not_kept(
    outbox: Outbox, clock: Clock, tmp_path: Path, stage: str
) -> None:
    (tmp_path / "password").write_text("se cret\n")
    told = ["se cret", *(b64encode(text).decode() for text in (b"\0almanac\0se cret", b"se cret"))]
    echo = {stage: lambda about: f"554 5.7.1 {about} AUTH PLAIN {' '.join(told)} \x1b[2J {'x' * 400}"}
    options = {"auth_require_tls": False, "authenticator": lambda *_: AuthResult(success=True)}
    outbox.put(message(1), NOW_S)
    with MailServer(**echo, options=options) as server:  # type: ignore[arg-type]
        config = mail_config(server, username="almanac", password_file=str(tmp_path / "password"))
        done = sent(outbox, config, clock)
        with pytest.raises(ServerError) as caught:
            send_now(message(2), config)
    kept = sqlite3.connect(outbox.path).execute("SELECT * FROM message").fetchall()
    said = f"{done} {caught.value} {kept}"
    assert "554" in said and "\x1b" not in said and len(str(caught.value)) < 500
    assert not [secret for secret in told if secret in said]


def test_it_encrypts_from_the_first_byte(outbox: Outbox, clock: Clock, certificate: Path) -> None:
    outbox.put(message(1), NOW_S)
    with MailServer(options={"ssl_context": context_of(certificate)}) as server:
        config = mail_config(server, security="tls", ca_file=str(certificate / "cert.pem"))
        assert sent(outbox, config, clock) == Delivered(sent=1)


def test_a_server_without_starttls_gets_nothing_in_the_open(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    outbox.put(message(1), NOW_S)
    assert "STARTTLS" in sent(outbox, mail_config(server, security="starttls"), clock).fault
    assert not server.taken and outbox.counts().queued == 1


def test_a_password_is_not_sent_in_the_open(outbox: Outbox, server: MailServer, clock: Clock) -> None:
    outbox.put(message(1), NOW_S)
    with pytest.raises(ConfigError, match=r"mail\.security"):
        sent(outbox, replace(mail_config(server, username="almanac"), server="mail.example.org"), clock)
    with pytest.raises(ConfigError, match="password_file"):
        sent(outbox, mail_config(server, username="almanac", password_file="/nowhere"), clock)


def test_one_mail_can_be_sent_at_once(server: MailServer) -> None:
    send_now(message(1), mail_config(server))
    assert server.ids == ["<m1@example.org>"]
    server.says_rcpt = lambda address: "550 5.1.1 no such user"
    with pytest.raises(ServerError, match=r"550 5\.1\.1 no such user"):
        send_now(message(1), mail_config(server))


@contextmanager
def full_disk(outbox: Outbox, room_bytes: int) -> Iterator[None]:
    """No file of this process grows past the size that the outbox's log has now and so many bytes more."""
    log = outbox.path.with_name(f"{outbox.path.name}-wal")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((log.stat().st_size if log.exists() else 0) + room_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def copies_in_hour(path: Path, server: MailServer, clock: Clock, room_bytes: int) -> int:
    """How many mails leave while the disk stays full and the timer fires each minute."""
    before = len(server.ids)
    for _ in range(60):
        clock.now_s += 60
        # The log of a timer's run is its own: it goes when the run ends.
        with Outbox(path) as outbox, full_disk(outbox, room_bytes), suppress(StoreError):
            sent(outbox, mail_config(server), clock)
    return len(server.ids) - before


def test_a_full_disk_stops_sending_and_repeats_nothing(tmp_path: Path, server: MailServer, clock: Clock) -> None:
    path = outbox_path(tmp_path)
    with Outbox(path) as outbox:
        outbox.put(message(1), NOW_S)
    assert copies_in_hour(path, server, clock, 0) == 0
    assert copies_in_hour(path, server, clock, 1 << 20) == 1


def test_a_try_is_on_record_before_the_server_hears_of_it(
    outbox: Outbox, server: MailServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that has room for the try and none for its outcome: the mail waits, as after any failure."""

    def fails(*_: object) -> None:
        raise StoreError("disk full")

    monkeypatch.setattr(outbox, "sent", fails)
    outbox.put(message(1), NOW_S)
    tried_min = []
    for minute in range(60):
        before = len(server.ids)
        with suppress(StoreError):
            sent(outbox, mail_config(server), clock)
        tried_min += [minute] * (len(server.ids) - before)
        clock.now_s += 60
    assert tried_min == [0, 15, 30, 45]


@pytest.mark.parametrize("goodbye", ["421 4.3.2 going down", "500 what?"])
def test_a_mail_that_was_taken_is_sent_whatever_follows(server: MailServer, goodbye: str) -> None:
    server.says_quit = goodbye
    send_now(message(1), mail_config(server))
    assert server.ids == ["<m1@example.org>"]


WORKER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from almanac.config import Mail
from mails import NOW_S, message
from reports.mail.delivery import deliver
from reports.mail.outbox import Outbox
from reports.mail.outcome import Outcome

with Outbox(Path(sys.argv[1])) as outbox:
    print("ready", flush=True)
    config = Mail(server="127.0.0.1", port=int(sys.argv[2]), sender="almanac@example.org")
    deliver(outbox, config, lambda: NOW_S + int(sys.argv[4]), time.sleep, lambda user: "every", Outcome())
"""


@pytest.mark.parametrize("is_taken", [False, True], ids=["before it is taken", "after it is taken"])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_killed_while_the_server_takes_a_mail_it_is_sent_again_under_the_same_id(
    tmp_path: Path, at: int, is_taken: bool
) -> None:
    path = outbox_path(tmp_path)
    with Outbox(path) as outbox:
        for number in range(1, 5):
            outbox.put(message(number), NOW_S)
    process: subprocess.Popen[bytes] | None = None

    def says(name: str) -> str | None:
        if process is None or name != f"<m{at}@example.org>":
            return None
        process.send_signal(signal.SIGKILL)
        process.wait()
        return None if is_taken else "451 never heard"

    with MailServer(says_data=says) as server:
        argv = [sys.executable, "-c", WORKER, str(path), str(server.port), str(Path(__file__).parent)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen([*argv, "0"], env=environment)
        assert process.wait() == -signal.SIGKILL
        process = None
        for later_s in (0, RETRY_S):  # the mail whose try did not end waits
            subprocess.run([*argv, str(later_s)], env=environment, check=True)
            assert len(server.ids) == 3 + is_taken + bool(later_s)
    expected = Counter({f"<m{number}@example.org>": 1 for number in range(1, 5)})
    expected[f"<m{at}@example.org>"] += is_taken
    assert Counter(server.ids) == expected
    with Outbox(path) as outbox:
        assert outbox.counts().sent == {"job": 4}
