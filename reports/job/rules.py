"""The rules of rules.toml: the facts that each one needs, its texts, and a site's changes to them.

A site's own rules.toml is in the folder of its configuration file. A rule is named by `name`; its other keys replace
those of the packaged rule. Limits of `when` replace those of the same fact. `enabled = false` removes a rule.
"""

from __future__ import annotations

import difflib
import string
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from almanac.config import Config, Link
from almanac.errors import ConfigError
from almanac.files import read_trusted
from almanac.units import format_job_id, printable
from reports.job.job_report import JobRow, ReportLink

Fact: TypeAlias = float | str | bool | None
"""A fact about a job; None if it is not known."""
ALL_IDLE = frozenset({"all_idle", "all_idle_unasked", "unasked_idle"})
SOME_IDLE = frozenset({"idle_gpus", "idle_gpus_unasked"})
"""Names of the rules that say that all GPUs, or some, did nothing."""
_OLD_KEYS = {"verdict": "summary"}
"""Keys of a rule in files that were written for older releases."""


@dataclass(frozen=True)
class CharacterLimits:
    """Limits of the words "steady", "in bursts" and "well balanced"."""

    steady_max: float
    bursty_min: float
    balanced_max: float
    source: str


@dataclass(frozen=True)
class Rule:
    """A rule. when: by fact, its limits (min, max, is, one_of). The texts name the job's figures in braces.

    covers: other topics whose rules are left out.
    """

    name: str
    topic: str
    source: str
    when: Mapping[str, Mapping[str, Any]]
    summary: str = ""
    short: str = ""
    advice: str = ""
    reason: str = ""
    headline: str = ""
    covers: Sequence[str] = ()

    @property
    def is_fine(self) -> bool:
        """True if the headline says that nothing must change."""
        return self.headline.startswith("OK")

    def holds(self, values: Mapping[str, Fact]) -> bool:
        return all(
            _meets(values[fact], test, limit) for fact, tests in self.when.items() for test, limit in tests.items()
        )


@dataclass(frozen=True)
class FrameworkAdvice:
    """The advice of rules, by name, for jobs of a framework."""

    source: str
    advice: Mapping[str, str]


@dataclass(frozen=True)
class RuleSet:
    """The rules of a rules.toml, in the order of the file, with its limits and its advice on frameworks by name."""

    rules: tuple[Rule, ...]
    character: CharacterLimits
    frameworks: Mapping[str, FrameworkAdvice] = field(default_factory=dict)

    def advice_of(self, rule: Rule, framework: Fact) -> str:
        """The rule's advice in the words of the framework, if it has some."""
        known = self.frameworks.get(str(framework))
        return known.advice.get(rule.name, rule.advice) if known and rule.advice else rule.advice


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads((resources.files("reports.job") / "rules.toml").read_text(encoding="utf-8"))


def rule_of(row: Mapping[str, Any]) -> Rule:
    """A rule from its table in the file. Raises TypeError for an unknown or missing key."""
    return Rule(**{_OLD_KEYS.get(key, key): value for key, value in row.items()})


@cache
def packaged() -> RuleSet:
    """The rules without a site's changes."""
    return RuleSet(
        tuple(map(rule_of, _file()["rule"])),
        CharacterLimits(**_file()["character"]),
        {name: FrameworkAdvice(**table) for name, table in _file()["framework"].items()},
    )


def first_of_topics(among: Sequence[Rule], values: Mapping[str, Fact]) -> list[Rule]:
    """The first rule of each topic that holds. A job without a GPU or a run has only its outcome."""
    found: dict[str, Rule] = {}
    covered: set[str] = set()
    for rule in among:
        if rule.topic not in {*found, *covered} and rule.holds(values):
            found[rule.topic] = rule
            covered.update(rule.covers)
            if rule.name in ("never_started", "shared_gpu", "no_gpu", "running"):
                break
    return list(found.values())


def _meets(value: Fact, test: str, limit: Any) -> bool:
    """Return True if a fact is within one limit; an unknown fact never is."""
    if value is None:
        return False
    if test == "is":
        return bool(value == limit)
    if test == "one_of":
        return value in limit
    return isinstance(value, int | float) and bool(value >= limit if test == "min" else value <= limit)


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
    """Return the rules with a site's changes. Raises ConfigError if a change is unknown or has a wrong type."""
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
    own = {str(row["name"]) for row in changes.get("rule", []) if "advice" in row}  # a site's text holds for all
    frameworks = {
        name: replace(each, advice={rule: text for rule, text in each.advice.items() if rule not in own})
        for name, each in rules.frameworks.items()
    }
    return RuleSet(tuple(found.values()), _character(rules.character, changes.get("character", {}), where), frameworks)


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


@dataclass(frozen=True)
class SiteChoices:
    """A site's rules, links, and help page for reports.

    help_url: "" if the site has none. rules_fault: why the site's rules.toml is not used; None if it is, or if there is
    none.
    """

    rules: RuleSet = field(default_factory=packaged)
    links: tuple[Link, ...] = ()
    help_url: str = ""
    rules_fault: ConfigError | None = None

    def links_of(self, job: JobRow, cluster: str) -> tuple[ReportLink, ...]:
        """The links of a job, without those that need an unknown value."""
        values = _values(job, cluster)
        filled = [(link.name, link.filled(values)) for link in self.links]
        return tuple(ReportLink(name, url) for name, url in filled if url is not None)


def choices_of(config: Config) -> SiteChoices:
    """A faulty rules.toml stops no report: then the packaged rules hold, and rules_fault says why."""
    try:
        rules, fault = rules_of(config), None
    except ConfigError as error:
        rules, fault = packaged(), error
    return SiteChoices(rules, config.links, config.site.help_url, fault)


def _values(job: JobRow, cluster: str) -> Mapping[str, str]:
    """The known values of a job for the placeholders of almanac.config, URL-encoded: a user chooses some of them."""
    known = {
        "job_id": job["job_id"],
        "shown_id": format_job_id(job),
        "user": job["user"],
        "account": job["account"],
        "partition": job["partition"],
        "cluster": cluster,
    }
    for name in ("start", "end"):
        time_s = job["start_s"] if name == "start" else job["end_s"]
        known |= {f"{name}_s": time_s, f"{name}_ms": None if time_s is None else time_s * 1000}
    return {name: quote(str(value), safe="") for name, value in known.items() if value not in (None, "")}
