"""The rules of rules.toml: which of them hold for a job, its verdict, and what is suggested."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from reports.job.facts import Fact, Facts

MAX_SUGGESTIONS = 3
MAX_SENTENCES = 2
TESTS = ("min", "max", "is", "one_of")


@dataclass(frozen=True)
class Character:
    """Limits of the words "steady", "in bursts" and "well balanced"."""

    steady_max: float
    bursty_min: float
    balanced_max: float
    source: str


@dataclass(frozen=True)
class Rule:
    """when: by fact, its limits (min, max, is, one_of). verdict, advice and reason name words in braces."""

    name: str
    topic: str
    source: str
    when: Mapping[str, Mapping[str, Any]]
    verdict: str = ""
    advice: str = ""
    reason: str = ""

    def holds(self, values: Mapping[str, Fact]) -> bool:
        return all(
            _meets(values[fact], test, limit) for fact, tests in self.when.items() for test, limit in tests.items()
        )


@dataclass(frozen=True)
class Suggestion:
    """rule: its name. advice: what to do; reason: why, with the evidence. Plain text without control characters."""

    rule: str
    advice: str
    reason: str


@dataclass(frozen=True)
class Judgement:
    """What a job is told. sentences: one or two; suggestions: at most MAX_SUGGESTIONS, most important first."""

    sentences: tuple[str, ...]
    suggestions: tuple[Suggestion, ...]
    rules: tuple[str, ...]

    @property
    def verdict(self) -> str:
        return " ".join(self.sentences)


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads((resources.files("reports.job") / "rules.toml").read_text(encoding="utf-8"))


@cache
def rules() -> tuple[Rule, ...]:
    """In the order of the file."""
    return tuple(Rule(**row) for row in _file()["rule"])


@cache
def character() -> Character:
    return Character(**_file()["character"])


def judge(facts: Facts) -> Judgement:
    """Of each topic its first rule that holds. A job of which nothing is known gets a sentence that says so."""
    found = first_of_topics(rules(), facts.values)
    sentences = [rule.verdict.format_map(facts.words) for rule in found if rule.verdict]
    suggestions = [
        Suggestion(rule.name, rule.advice.format_map(facts.words), rule.reason.format_map(facts.words))
        for rule in found
        if rule.advice
    ]
    return Judgement(
        sentences=tuple(sentences[:MAX_SENTENCES]) or ("There is nothing to say of how this job used its GPUs.",),
        suggestions=tuple(suggestions[:MAX_SUGGESTIONS]),
        rules=tuple(rule.name for rule in found),
    )


def first_of_topics(among: Sequence[Rule], values: Mapping[str, Fact]) -> list[Rule]:
    """The first rule of each topic that holds; a job without GPU or run has nothing but its outcome."""
    found: dict[str, Rule] = {}
    for rule in among:
        if rule.topic not in found and rule.holds(values):
            found[rule.topic] = rule
            if rule.name in ("never_started", "no_gpu", "running"):
                break
    return list(found.values())


def _meets(value: Fact, test: str, limit: Any) -> bool:
    """A fact that is not known meets nothing."""
    if value is None:
        return False
    if test == "is":
        return bool(value == limit)
    if test == "one_of":
        return value in limit
    return isinstance(value, int | float) and bool(value >= limit if test == "min" else value <= limit)
