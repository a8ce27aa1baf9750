"""The site's own rules.toml, beside the configuration file: changes to the rules of reports/job/rules.toml.

A rule is named by `name`; its other keys replace those of the packaged rule. Limits of `when` replace those of the same
fact. `enabled = false` removes a rule.
"""

from __future__ import annotations

import difflib
import string
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from almanac.config import Config
from almanac.errors import ConfigError
from almanac.trusted_file import read_trusted
from almanac.units import printable
from reports.job.rules import CharacterLimits, Rule, RuleSet, packaged

MOST_BYTES = 1 << 20
MOST_TEXT = 1000
_FIXED = {"name", "topic", "source"}
TEXTS = tuple(field.name for field in fields(Rule) if field.type == "str" and field.name not in _FIXED)
"""The keys of a rule that are texts with words in braces."""
_TESTS = ("min", "max", "is", "one_of")


def rules_path(config: Config) -> Path | None:
    """The site's file, if there is one."""
    path = Path(config.source).parent / "rules.toml" if config.source else None
    return path if path and (path.exists() or path.is_symlink()) else None


def rules_of(config: Config) -> RuleSet:
    """The packaged rules with the site's changes. Raises ConfigError."""
    path = rules_path(config)
    if path is None:
        return packaged()
    try:
        text = read_trusted(path, {Path(config.source).stat().st_uid}, MOST_BYTES)
        return merged(packaged(), tomllib.loads(text), str(path))
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", "make it readable, in UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}", "correct that line") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}", "make it a file of root with mode 0644") from error


def merged(rules: RuleSet, changes: Mapping[str, Any], where: str) -> RuleSet:
    """Raises ConfigError for what is unknown or has a wrong type."""
    _refuse_unknown(changes, ("rule", "character"), where, "section")
    found = {rule.name: rule for rule in rules.rules}
    named: set[str] = set()
    for number, row in enumerate(_tables(changes.get("rule", []), where), 1):
        here = f"{where}: [[rule]] number {number}"
        name = row.get("name")
        if not isinstance(name, str):
            raise ConfigError(f"{here} has no name", 'name the rule to change, as in name = "idle_gpus"')
        _refuse_unknown([name], [rule.name for rule in rules.rules], here, "rule")
        here = f"{where}: rule {name}"
        if name in named:
            raise ConfigError(f"{here} is there twice", "write all its changes under one [[rule]]")
        named.add(name)
        if _is_enabled(row, here):
            found[name] = _changed(found[name], row, here)
        else:
            del found[name]
    return RuleSet(tuple(found.values()), _character(rules.character, changes.get("character", {}), where))


def _tables(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, list) and all(isinstance(row, dict) for row in content):
        return content
    raise ConfigError(f"{where}: rule must be an array of tables", "write each rule under its own [[rule]]")


def _is_enabled(row: Mapping[str, Any], where: str) -> bool:
    enabled = row.get("enabled", True)
    if isinstance(enabled, bool):
        return enabled
    raise ConfigError(f"{where}: enabled is {_shown(enabled)}", "write true or false")


def _changed(rule: Rule, row: Mapping[str, Any], where: str) -> Rule:
    _refuse_unknown(row, ("name", "enabled", "when", "source", *TEXTS), where, "key")
    texts = {key: _text(row[key], f"{where}: {key}", key != "source") for key in ("source", *TEXTS) if key in row}
    when = _when(rule.when, row["when"], f"{where}: when") if "when" in row else rule.when
    return replace(rule, **texts, when=when)


def _text(text: Any, where: str, has_words: bool) -> str:
    if not isinstance(text, str) or printable(text, MOST_TEXT) != text:
        raise ConfigError(f"{where} is {_shown(text)}", f"write one line of at most {MOST_TEXT} printable characters")
    if has_words:
        _check_words(text, where)
    return text


def _check_words(text: str, where: str) -> None:
    """A text may name the job's words only: str.format_map also takes attributes and formats of them."""
    _, words = known_names()
    try:
        parts = [part[1:] for part in string.Formatter().parse(text) if part[1] is not None]
    except ValueError as error:
        raise ConfigError(f"{where}: {error}", "write {{ for a brace") from error
    _refuse_unknown([str(name) for name, _, _ in parts], words, where, "word in braces")
    if any(form or conversion for _, form, conversion in parts):
        raise ConfigError(f"{where}: a word in braces has a format", "write only its name, such as {elapsed}")


def _when(before: Mapping[str, Mapping[str, Any]], when: Any, where: str) -> dict[str, Mapping[str, Any]]:
    if not isinstance(when, dict):
        raise ConfigError(f"{where} is {_shown(when)}", "write such as when = { util_pct = { max = 20 } }")
    values, _ = known_names()
    _refuse_unknown(when, values, where, "fact")
    for fact, tests in when.items():
        here = f"{where}.{fact}"
        if not isinstance(tests, dict) or not tests:
            raise ConfigError(f"{here} is {_shown(tests)}", "write such as { max = 20 }")
        _refuse_unknown(tests, _TESTS, here, "limit")
        for test, limit in tests.items():
            _check_limit(test, limit, f"{here}.{test}")
    return {**before, **when}


def _check_limit(test: str, limit: Any, where: str) -> None:
    if test in ("min", "max"):
        is_valid, expected = _is_number(limit), "a number"
    elif test == "is":
        is_valid, expected = isinstance(limit, bool | str) or _is_number(limit), "true, false, a text, or a number"
    else:
        is_valid = isinstance(limit, list) and bool(limit) and all(isinstance(each, str) for each in limit)
        expected = 'texts, such as ["FAILED", "TIMEOUT"]'
    if not is_valid:
        raise ConfigError(f"{where} is {_shown(limit)}", f"write {expected}")


def _character(limits: CharacterLimits, changes: Any, where: str) -> CharacterLimits:
    if not isinstance(changes, dict):
        raise ConfigError(f"{where}: character is {_shown(changes)}", "write it as a table [character]")
    names = [field.name for field in fields(CharacterLimits)]
    _refuse_unknown(changes, names, f"{where}: [character]", "key")
    for name, value in changes.items():
        if not (isinstance(value, str) if name == "source" else _is_number(value)):
            raise ConfigError(f"{where}: character.{name} is {_shown(value)}", "write a number, or a text for source")
    return replace(limits, **changes)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53


@cache
def known_names() -> tuple[frozenset[str], frozenset[str]]:
    """The facts that a site's rules can test, and the words that their texts can name: those of the packaged rules."""
    rules = packaged().rules
    texts = [getattr(rule, key) for rule in rules for key in TEXTS]
    words = {name for text in texts for _, name, _, _ in string.Formatter().parse(text) if name is not None}
    return frozenset(fact for rule in rules for fact in rule.when), frozenset(words)


def _refuse_unknown(names: Iterable[str], valid: Collection[str] | Sequence[str], where: str, what: str) -> None:
    for name in names:
        if name not in valid:
            near = difflib.get_close_matches(name[:80], sorted(valid), n=1, cutoff=0.0)
            listed = f"; all: {', '.join(sorted(valid))}" if len(valid) <= 12 else "; docs/report-rules.md lists them"
            raise ConfigError(f"{where}: unknown {what} {_shown(name)}", f"did you mean {near[0]!r}?{listed}")


def _shown(value: Any) -> str:
    return printable(repr(value), 80)
