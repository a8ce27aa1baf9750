"""What a report says about a job: headline, summary, and suggestions for the next job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reports.job.facts import Facts
from reports.job.rules import Rule, first_of_topics

MAX_SUGGESTIONS = 3
MAX_SENTENCES = 2
NOTHING_TO_CHANGE = "OK, nothing to change"


@dataclass(frozen=True)
class Suggestion:
    """What to do next time (advice) and why (reason), as plain text without control characters.

    rule: the name of the rule that says it.
    """

    rule: str
    advice: str
    reason: str


@dataclass(frozen=True)
class Conclusions:
    """What a report says. sentences: one or two; suggestions: at most MAX_SUGGESTIONS, most important first.

    headline: what happened and what to do, in a few words: "40 GB GPUs are enough (peak 26 of 80 GiB)".
    rules: the names of all rules that hold, also of those whose texts are not shown.
    """

    headline: str
    sentences: tuple[str, ...]
    suggestions: tuple[Suggestion, ...]
    rules: tuple[str, ...]

    @property
    def summary(self) -> str:
        return " ".join(self.sentences)


def conclude(facts: Facts) -> Conclusions:
    """What the first matching rule of each topic says; at least one sentence."""
    found = first_of_topics(facts.rules.rules, facts.values)
    sentences = [rule.summary.format_map(facts.words) for rule in found if rule.summary]
    suggestions = [
        Suggestion(rule.name, rule.advice.format_map(facts.words), rule.reason.format_map(facts.words))
        for rule in found
        if rule.advice
    ]
    return Conclusions(
        headline=_headline(found).format_map(facts.words),
        sentences=tuple(sentences[:MAX_SENTENCES]),
        suggestions=tuple(suggestions[:MAX_SUGGESTIONS]),
        rules=tuple(rule.name for rule in found),
    )


def _headline(found: Sequence[Rule]) -> str:
    """The first rule's headline, and what to do if that rule has no advice; rules.toml says which one is used."""
    said = [rule for rule in found if rule.headline and not rule.is_fine]
    if not said:
        return next((rule.headline for rule in found if rule.headline), NOTHING_TO_CHANGE)
    first, *others = said
    action = next((rule.headline for rule in others if rule.advice), "")
    return f"{first.headline}; {action}" if action and not first.advice else first.headline
