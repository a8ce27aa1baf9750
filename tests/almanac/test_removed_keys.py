"""Files that were written for an earlier configuration are still read: a key that went is named, and stops nothing."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from almanac.config import Config
from almanac.config_file import load_config, parse_config
from almanac.errors import ConfigError
from almanac.removed_keys import INSTEAD
from almanac.submit_config import keys_of

FIXTURES = Path(__file__).parent / "fixtures"
EVERY_KEY = FIXTURES / "keys-436059fc.toml"
SECTIONS = [field.name for field in keys_of(Config) if dataclasses.is_dataclass(field.default)]


def test_a_file_with_every_earlier_key_is_read_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(EVERY_KEY)
    assert sorted(config.removed) == sorted(INSTEAD)
    assert [getattr(config, name) for name in SECTIONS] == [getattr(Config(), name) for name in SECTIONS]
    [warning] = [record.getMessage() for record in caplog.records]
    assert all(f"{key} ({text})" in warning for key, text in INSTEAD.items())


def test_every_earlier_key_is_a_key_or_a_removed_one() -> None:
    earlier = tomllib.loads(EVERY_KEY.read_text())
    keys = {f"{section}.{key.name}" for section in SECTIONS for key in keys_of(type(getattr(Config(), section)))}
    then = {f"{name}.{key}" for name, section in earlier.items() if isinstance(section, dict) for key in section}
    assert then - keys == set(INSTEAD)


def test_a_section_that_went_is_read_while_it_is_empty_and_nothing_else() -> None:
    assert parse_config({"metrics": {}}) == Config()
    for content in (0, 5, {"window": 60}):
        with pytest.raises(ConfigError, match="metrics"):
            parse_config({"metrics": content})


@pytest.mark.parametrize("uncommented", [False, True])
def test_the_file_that_packages_shipped_is_read_without_a_warning(tmp_path: Path, uncommented: bool) -> None:
    text = (FIXTURES / "shipped-436059fc.toml").read_text()
    path = tmp_path / "almanac.toml"
    path.write_text(re.sub(r"(?m)^# (?=\[|\w+ = )", "", text) if uncommented else text)
    config = load_config(path)
    assert (config.removed, len(config.tiers)) == ((), 2 if uncommented else 0)


@pytest.mark.parametrize("value", [True, -1, 10**400, float("nan"), [], ["a", 1], {"a": {}}, ""])
def test_no_value_of_a_removed_key_stops_a_command(value: Any) -> None:
    data: dict[str, dict[str, Any]] = {}
    for name in INSTEAD:
        section, key = name.split(".")
        data.setdefault(section, {})[key] = value
    assert dataclasses.replace(parse_config(data), removed=()) == Config()
