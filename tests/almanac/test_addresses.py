"""mail.recipient: a pattern that gives each user an address of their own, or an error before any mail is decided."""

from __future__ import annotations

import pytest

from almanac.addresses import address_of, is_domain, is_pattern
from almanac.config_file import parse_config
from almanac.errors import ConfigError


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
