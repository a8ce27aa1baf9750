"""The mail itself: its parts, its headers, whom it goes to, and what hostile text cannot do to it."""

from __future__ import annotations

from dataclasses import replace
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mails import NOW_S, run
from profiles import examples

from almanac.config import Config, Mail
from almanac.config_file import parse_config
from almanac.errors import ConfigError
from almanac.names import is_address
from reports.job.conclusions import report_of
from reports.job.render import Rendered, render_email
from reports.mail.handover import MAX_MAIL_BYTES, compose, sender_of
from reports.mail.recipients import AddressBook

CONFIG = Config(mail=Mail(server="localhost", sender="almanac@example.org", recipient="{user}@example.org"))
PNG = b"\x89PNG\r\n\x1a\n"
PAGE = '<p>fine <img class="p" src="cid:a.1@almanac" alt="A picture of <b>" width="6"></p>'
PLAIN = Rendered("GPU job 1: fine", "fine\n", PAGE, {"a.1@almanac": PNG})


def parsed(raw: bytes) -> EmailMessage:
    mail = message_from_bytes(raw, policy=default)
    assert isinstance(mail, EmailMessage)
    return mail


def mail_of(rendered: Rendered = PLAIN, **more: Any) -> EmailMessage:
    return parsed(compose(rendered, [run(1)], "ann@example.org", CONFIG, NOW_S, **more).raw)


def test_a_mail_has_a_text_and_a_page_with_its_pictures(reported: Any) -> None:
    rendered = render_email(report_of(reported.contexts["idle"]))
    message = compose(rendered, [run(201)], "ann@example.org", CONFIG, NOW_S)
    mail = parsed(message.raw)
    assert mail.get_content_type() == "multipart/alternative"
    text, page = mail.iter_parts()
    assert text.get_content_type() == "text/plain" and text.get_content().replace("\r\n", "\n") == rendered.text
    assert page.get_content_type() == "multipart/related"
    html, *pictures = page.iter_parts()
    assert html.get_content_type() == "text/html" and html.get_content().replace("\r\n", "\n") == f"{rendered.html}\n"
    assert {str(part["Content-ID"]).strip("<>"): part.get_content() for part in pictures} == rendered.images
    assert {part.get_content_disposition() for part in pictures} == {"inline"}
    assert {part.get_filename() for part in pictures} == {"timeline.png", "roofline.png", "memory.png"}
    assert len(message.raw) < MAX_MAIL_BYTES


def test_its_headers_say_what_it_is() -> None:
    mail = mail_of()
    expected = {
        "From": '"almanac of test" <almanac@example.org>',
        "To": "ann@example.org",
        "Subject": "GPU job 1: fine",
        "Date": "Wed, 18 Nov 2026 12:00:00 +0000",
        "Auto-Submitted": "auto-generated",
        "Precedence": "bulk",
        "X-Auto-Response-Suppress": "All",
        "List-Id": "GPU job reports <test.almanac.example.org>",
        "MIME-Version": "1.0",
    }
    assert {name: str(mail[name]).replace("almanac of test <", '"almanac of test" <') for name in expected} == expected


def test_its_id_is_that_of_its_runs() -> None:
    def id_of(*runs: Any, **more: Any) -> str:
        return compose(PLAIN, runs, "ann@example.org", CONFIG, **{"now_s": NOW_S, **more}).message_id

    first = id_of(run(1), run(2))
    assert first == id_of(run(2), run(1), now_s=NOW_S + 99)
    others = [
        id_of(run(1)), id_of(run(1), run(2, end_s=NOW_S)), id_of(run(1), run(2), kind="digest"),
        id_of(run(1), run(2), key="copy"), id_of(run(1, cluster="b"), run(2)), id_of(user="ann", cluster="test"),
    ]  # fmt: skip
    assert len({first, *others}) == 7
    assert first.startswith("<job.") and first.endswith("@test.almanac>")
    assert str(mail_of()["Message-ID"]) == id_of(run(1))


def test_its_id_does_not_depend_on_the_name_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that is away between two runs of the service must not make a second message."""
    ids = set()
    for name in ("head.example.org", "localhost"):
        monkeypatch.setattr("reports.mail.handover._host_name", lambda name=name: name)
        message = compose(PLAIN, [run(1)], "ann@example.org", Config(mail=Mail(server="localhost")), NOW_S)
        assert parsed(message.raw)["From"].addresses[0].domain == name
        ids.add(message.message_id)
    assert len(ids) == 1


@pytest.mark.parametrize("case", ["hostile", "64-gpus", "never-started"])
def test_every_report_is_a_small_mail_of_short_ascii_lines(reported: Any, case: str) -> None:
    rendered = render_email(report_of(reported.contexts[case]))
    raw = compose(rendered, [run(1)], "ann@example.org", CONFIG, NOW_S).raw
    assert len(raw) < MAX_MAIL_BYTES
    assert raw.isascii()
    assert max(map(len, raw.split(b"\r\n"))) <= 998
    assert raw.count(b"\n") == raw.count(b"\r\n") == raw.count(b"\r")


NASTY = st.text(
    st.sampled_from("a \r\n\t\0\x1b\x7f\x85\u2028\u202e\u2066\ud800\U0001f600é=?_<>:,;\"'()@\\%{}"), max_size=60
)


@given(NASTY, NASTY)
@examples(1.5)
@example("x\r\nBcc: mallory@evil.example\r\n\r\nbody", "test\r\nBcc: mallory@evil.example")
@example("=?utf-8?q?a=0d=0aBcc:_m=40evil.example?=", "=?utf-8?q?a=0d=0aBcc:_m=40evil.example?=")
@example("\u202egnp.exe" + "A" * 10_000, "\u202e" * 10_000)
def test_no_text_can_add_a_header_or_an_address(subject: str, cluster: str) -> None:
    rendered = replace(PLAIN, subject=subject, text=f"{subject}\n")
    message = compose(rendered, [run(1, cluster=cluster)], "ann@example.org", CONFIG, NOW_S)
    mail = parsed(message.raw)
    assert sorted(mail.keys()) == sorted(
        ["From", "To", "Subject", "Date", "Message-ID", "Auto-Submitted", "Precedence", "X-Auto-Response-Suppress",
         "List-Id", "List-Unsubscribe", "X-Mailer", "MIME-Version", "Content-Type"]
    )  # fmt: skip
    assert [address.addr_spec for address in mail["From"].addresses] == ["almanac@example.org"]
    assert [address.addr_spec for address in mail["To"].addresses] == ["ann@example.org"]
    for name in ("Subject", "From"):
        assert not set(str(mail[name])) & set("\r\n\0\x1b\u202e\u2066"), name
        assert len(str(mail[name])) < 250


def test_pictures_that_do_not_fit_are_words() -> None:
    big = replace(PLAIN, images={"a.1@almanac": PNG + bytes(100_000), "b.1@almanac": PNG})
    big = replace(big, html=big.html + '<img class="p" src="cid:b.1@almanac" alt="Another" width="6">')
    assert len(list(parsed(compose(big, [run(1)], "ann@example.org", CONFIG, NOW_S).raw).walk())) == 6
    too_big = replace(big, images=big.images | {"a.1@almanac": PNG + bytes(200_000)})
    message = compose(too_big, [run(1)], "ann@example.org", CONFIG, NOW_S)
    html = parsed(message.raw).get_body(("html",))
    assert html is not None
    assert "(A picture of &lt;b&gt;: left out)" in html.get_content()
    assert "a.1@almanac" not in html.get_content() and 'src="cid:b.1@almanac"' in html.get_content()
    assert len(message.raw) < MAX_MAIL_BYTES


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("ann", "ann@example.org"),
        ("ann.b-c_d1", "ann.b-c_d1@example.org"),
        ("mallory@evil.example", None),
        ("ann, mallory", None),
        ("-oQ/tmp", None),
        ("", None),
        ("ann\n", None),
        ("änn", None),
        ("a..b", None),
        ("{user}", None),
    ],
)
def test_mail_goes_to_the_owner(user: str, expected: str | None) -> None:
    assert AddressBook(CONFIG.mail).address(user) == expected


def test_no_site_can_send_to_what_a_job_asked_for() -> None:
    """Accounting does not keep --mail-user; a key that promised to use it would do nothing."""
    with pytest.raises(ConfigError, match="unknown key 'allow_mail_user'"):
        parse_config({"mail": {"allow_mail_user": True}})


def test_a_local_user_needs_no_domain() -> None:
    config = replace(CONFIG, mail=replace(CONFIG.mail, recipient="{user}"))
    assert AddressBook(config.mail).address("ann") == "ann"
    assert str(parsed(compose(PLAIN, [run(1)], "ann", config, NOW_S).raw)["To"]) == "ann"


@given(st.text(max_size=30) | st.from_regex(r"[a-z.@|/!-]{1,20}"))
def test_an_address_holds_nothing_that_a_mail_system_reads_as_more(text: str) -> None:
    if is_address(text):
        assert text.isascii() and not set(text) & set(" \t\r\n,;:<>()[]\\\"|/!%'`$&#*?")
        assert text.count("@") <= 1 and not text.startswith(("-", ".", "@"))


@pytest.mark.parametrize("sender", ["almanac", "almanac@exa mple.org", "almanac@example.org\nBcc: x@y", "<a@b>"])
def test_a_sender_that_is_none_is_refused(sender: str) -> None:
    with pytest.raises(ConfigError, match=r"mail\.sender"):
        sender_of(Mail(sender=sender))


def test_the_default_sender_is_an_address() -> None:
    assert is_address(sender_of(Mail()))


def test_a_recipient_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="no address"):
        compose(PLAIN, [run(1)], "ann@example.org, bob@example.org", CONFIG, NOW_S)


@pytest.mark.parametrize(
    ("mail", "header"),
    [
        ({}, "<mailto:almanac@example.org?subject=unsubscribe>"),
        ({"reply_to": "help@example.org"}, "<mailto:help@example.org?subject=unsubscribe>"),
        ({"unsubscribe": "out@example.org"}, "<mailto:out@example.org?subject=unsubscribe>"),
        ({"unsubscribe": f"https://help.example.org/{'x' * 150}"}, f"<https://help.example.org/{'x' * 150}>"),
    ],
)
def test_every_mail_names_the_way_out(mail: dict[str, str], header: str) -> None:
    config = parse_config({"mail": {"sender": "almanac@example.org", **mail}})
    raw = compose(PLAIN, [run(1)], "ann@example.org", config, NOW_S).raw
    found = parsed(raw)
    assert str(found["List-Unsubscribe"]).strip() == header and found["Auto-Submitted"] == "auto-generated"
    assert b"=?utf-8?" not in raw.partition(b"\r\n\r\n")[0]
