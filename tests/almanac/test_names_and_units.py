"""The name mask, addresses of users, units, and scrubbed texts of servers."""

from __future__ import annotations

import datetime as dt
import json
import re
from base64 import b64encode
from collections.abc import Callable
from importlib import resources
from uuid import UUID

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from almanac import names
from almanac.config_file import parse_config
from almanac.errors import ConfigError
from almanac.names import MAX_BYTES, address_of, is_domain, is_family, is_pattern, name_key
from almanac.records import Counts
from almanac.scrub import forms, scrub
from almanac.units import cell_text, format_duration, format_gib, parse_moment, parse_time_limit, printable

VECTORS = json.loads((resources.files("almanac") / "name_mask_vectors.json").read_text(encoding="utf-8"))


def test_the_mask_passes_its_vectors() -> None:
    for name, key, *comment in VECTORS:
        assert name_key(name, *comment) == key


@given(st.text())
def test_a_key_is_short_printable_ascii_and_its_own_key(name: str) -> None:
    key = name_key(name)
    assert 1 <= len(key) <= MAX_BYTES
    assert all(0x21 <= ord(char) <= 0x7E for char in key)
    assert not any(char.isdigit() for char in key)
    assert name_key(key) == key


@given(st.text(alphabet="abcxyz_-. "), st.integers(0, 10**6), st.integers(0, 10**6))
def test_names_that_differ_in_a_number_share_a_key(stem: str, first: int, second: int) -> None:
    assert name_key(f"{stem}_run{first}") == name_key(f"{stem}_run{second}")


@given(
    st.uuids(),
    st.sampled_from([str, lambda each: each.hex, lambda each: str(each).upper(), lambda each: each.hex[:12]]),
)
def test_a_name_of_an_identifier_alone_is_no_family_and_its_prefix_is_one(
    each: UUID, form: Callable[[UUID], str]
) -> None:
    assume(re.search("[0-9]", form(each)) and re.search("[a-fA-F]", form(each)))
    assert name_key(form(each)) == "-"
    assert name_key(f"rnaseq_{form(each)}") == "rnaseq_#"
    assert name_key(form(each), "rule_align_wildcards_x") == "align"


@given(
    st.datetimes(),
    st.sampled_from(["%Y-%m-%d", "%Y%m%dT%H%M%SZ", "%d%b%Y", "%B_%d_%H:%M", "%a-%d-%b", "%I%p", "run-%s"]),
)
def test_a_date_is_no_family(when: dt.datetime, form: str) -> None:
    assert name_key(when.strftime(form)) == "-"


@given(
    st.lists(st.sampled_from(sorted(names._generic()[0])), min_size=1, max_size=4),
    st.sampled_from(["-", "_", ".", "#7/"]),
)
def test_generic_names_alone_are_no_family(words: list[str], between: str) -> None:
    assert name_key(between.join(words)) == "-"
    assert is_family(name_key(between.join([*words, "bert"]))) or name_key(words[0] + "/x") == "-"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("10:30", 630), ("1:00:00", 3600), ("2-0", 172800), ("1-02:03", 93780), ("1-02:03:04", 93784)],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert parse_time_limit(text) == seconds


def test_no_time_limit_is_none_and_nonsense_is_named() -> None:
    assert parse_time_limit("UNLIMITED") is None
    with pytest.raises(ValueError, match="'soon'"):
        parse_time_limit("soon")


def test_moments_are_read_as_sacct_reads_them() -> None:
    assert parse_moment("now-2hours", 10_000) == 2800
    assert parse_moment("@1234", 0) == 1234
    assert parse_moment("2025-03-01T00:00:00+00:00", 0) == 1740787200
    with pytest.raises(ValueError, match="'yesterdayish'"):
        parse_moment("yesterdayish", 0)
    for far in ("@999999999999", "now+99999999999days", "now-99999999999days", f"now-{'9' * 5000}days", "0001-01-01"):
        with pytest.raises(ValueError, match="not a time") as caught:
            parse_moment(far, 0)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "60 min"), (3600, "1 h"), (11400, "3 h 10 min"),
     (187200, "2 d 4 h")],
)  # fmt: skip
def test_durations_read_as_a_person_says_them(seconds: int, text: str) -> None:
    assert format_duration(seconds) == text


def test_gib() -> None:
    assert format_gib(21811) == "21.3 GiB"


@given(st.text())
def test_printable_text_holds_no_control_character(text: str) -> None:
    assert printable(text).isprintable()
    assert len(printable(text, 10)) <= 10


def test_counts_keep_the_first_example_of_each_reason() -> None:
    counts = Counts(seen=3, kept=1)
    counts.drop("bad", example="first")
    counts.drop("bad", example="second")
    assert counts.seen == counts.kept + sum(counts.dropped.values())
    assert counts.examples == {"bad": "first"}


def test_cells_for_spreadsheets_hold_no_formula() -> None:
    for value, cell in [
        (None, ""), (-1.5, "-1.5"), (0, "0"), (["n1:0", "n1:1"], "n1:0;n1:1"), ("plain", "plain"), ("=1+1", "'=1+1"),
        ("+a", "'+a"), ("-a", "'-a"), ("@a", "'@a"), ("  =a", "'  =a"), ("\t=a", "?=a"), ("\r=a", "?=a"),
        ("＝a", "'＝a"), (["=a", "b"], "'=a;b"), ("a=b", "a=b"),
    ]:  # fmt: skip
        assert cell_text(value, is_for_spreadsheets=True) == cell


def test_other_cells_keep_their_text() -> None:
    assert cell_text("-a", is_for_spreadsheets=False) == "-a"
    assert cell_text("a\nb|c", is_for_spreadsheets=False) == "a?b|c"


@given(st.text())
def test_no_text_begins_as_a_formula_or_a_new_row(text: str) -> None:
    cell = cell_text(text, is_for_spreadsheets=True)
    assert not cell.lstrip().startswith(("=", "+", "-", "@"))
    assert "\n" not in cell


@pytest.mark.parametrize(
    "pattern",
    [
        "staff@example.org", "", "{name}@example.org", "user@example.org", "{user}@exa mple.org", "{user}@", "@{user}",
        "{user}@example.org\n", "{user}@example.org, eve@evil.example", "{user}.", "{user}|sh",
        "hpc@{user}.example.org", "Ann <{user}@example.org>",
        "a-prefix-so-long-that-a-longer-name-has-no-room-{user}@example.org", "{user}@a..b",
    ],
)  # fmt: skip
def test_what_gives_no_user_an_address_of_their_own_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"mail\.recipient is .*, which does not give each user an address") as seen:
        parse_config({"mail": {"recipient": pattern}})
    assert '"{user}@example.org"' in seen.value.hint


@pytest.mark.parametrize("pattern", ["{user}", "{user}@example.org", "gpu+{user}@localhost"])
def test_what_gives_each_user_an_address_is_taken(pattern: str) -> None:
    assert is_pattern(pattern)
    assert parse_config({"mail": {"recipient": pattern}}).mail.recipient == pattern
    assert address_of("ann", pattern) == pattern.replace("{user}", "ann")


def test_only_a_strange_name_has_no_address() -> None:
    assert address_of("eve@evil.example", "{user}@example.org") is None
    assert address_of("ann.", "{user}@example.org") is None
    assert address_of("", "{user}@example.org") is None


def test_a_domain_has_an_end() -> None:
    assert is_domain("localhost") and is_domain(".".join(["a" * 60] * 4))
    assert not is_domain("") and not is_domain(".".join(["a" * 63] * 4)) and not is_domain("a_b.example")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("Authorization: Basic YWxtYW5hYzpwdw==, no", "Authorization: ***, no"),
     ("you sent {'Proxy-Authorization': 'Bearer abc'}", "you sent {'Proxy-Authorization': '***'}"),
     ("Basic authentication is required", "Basic authentication is required"),
     ("got bearer eyJhbGciOiJIUzI1NiJ9.e30.x", "got bearer ***"),
     ("see http://ann:pw@host/x, http://host/a@b", "see http://***@host/x, http://host/a@b"),
     ("a\x1b[2Jb\u202ec\r\nd", "a?[2Jb?c??d"), ("x" * 1000, "x" * 299 + "\u2026")],
)  # fmt: skip
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
