"""The rules of rules.toml: which facts each one needs, and what it says."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, TypeAlias

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
        """Whether the headline says that nothing must change."""
        return self.headline.startswith("OK")

    def holds(self, values: Mapping[str, Fact]) -> bool:
        return all(
            _meets(values[fact], test, limit) for fact, tests in self.when.items() for test, limit in tests.items()
        )


@dataclass(frozen=True)
class RuleSet:
    """rules: in the order of the file."""

    rules: tuple[Rule, ...]
    character: CharacterLimits


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads((resources.files("reports.job") / "rules.toml").read_text(encoding="utf-8"))


def rule_of(row: Mapping[str, Any]) -> Rule:
    """A rule from its table in the file. Raises TypeError for an unknown or missing key."""
    return Rule(**{_OLD_KEYS.get(key, key): value for key, value in row.items()})


@cache
def packaged() -> RuleSet:
    """The rules without a site's changes."""
    return RuleSet(tuple(map(rule_of, _file()["rule"])), CharacterLimits(**_file()["character"]))


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
    """Whether a fact is within one limit; an unknown fact never is."""
    if value is None:
        return False
    if test == "is":
        return bool(value == limit)
    if test == "one_of":
        return value in limit
    return isinstance(value, int | float) and bool(value >= limit if test == "min" else value <= limit)
