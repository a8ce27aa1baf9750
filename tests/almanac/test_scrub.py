"""What of a server's text is shown."""

from __future__ import annotations

from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.scrub import forms, scrub


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Basic YWxtYW5hYzpwdw==, no", "Authorization: ***, no"),
        ("you sent {'Proxy-Authorization': 'Bearer abc'}", "you sent {'Proxy-Authorization': '***'}"),
        ("Basic authentication is required", "Basic authentication is required"),
        ("got bearer eyJhbGciOiJIUzI1NiJ9.e30.x", "got bearer ***"),
        ("see http://ann:pw@host/x, http://host/a@b", "see http://***@host/x, http://host/a@b"),
        ("a\x1b[2Jb\u202ec\r\nd", "a?[2Jb?c??d"),
        ("x" * 1000, "x" * 299 + "\u2026"),
    ],
)
def test_what_looks_like_a_credential_is_hidden_and_the_rest_is_shown(text: str, shown: str) -> None:
    assert scrub(text) == shown


@given(secret=st.text(st.characters(min_codepoint=48, max_codepoint=0x2FF, categories=["L", "N"]), min_size=6))
def test_no_form_of_a_secret_is_shown(secret: str) -> None:
    encoded = b64encode(f"almanac:{secret}".encode()).decode()
    for told in (secret, encoded, encoded.rstrip("=")):
        for start in (0, 280):
            shown = scrub("-" * start + told, forms(secret, "almanac"))
            assert shown == "-" * start + "***"


def test_without_a_secret_nothing_is_replaced() -> None:
    assert forms("") == ()
    assert scrub("plain", forms("")) == "plain"
