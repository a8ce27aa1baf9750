"""What a report says about a job: the summary at its top, and suggestions for the next job."""

from __future__ import annotations

from dataclasses import dataclass

from reports.job.facts import Facts
from reports.job.rules import first_of_topics, rules

MAX_SUGGESTIONS = 3
MAX_SENTENCES = 2


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

    rules: the names of all rules that hold, also of those whose texts are not shown.
    """

    sentences: tuple[str, ...]
    suggestions: tuple[Suggestion, ...]
    rules: tuple[str, ...]

    @property
    def summary(self) -> str:
        return " ".join(self.sentences)


def conclude(facts: Facts) -> Conclusions:
    """What the first matching rule of each topic says; at least one sentence."""
    found = first_of_topics(rules(), facts.values)
    sentences = [rule.summary.format_map(facts.words) for rule in found if rule.summary]
    suggestions = [
        Suggestion(rule.name, rule.advice.format_map(facts.words), rule.reason.format_map(facts.words))
        for rule in found
        if rule.advice
    ]
    return Conclusions(
        sentences=tuple(sentences[:MAX_SENTENCES]) or ("There is nothing to report about how this job used its GPUs.",),
        suggestions=tuple(suggestions[:MAX_SUGGESTIONS]),
        rules=tuple(rule.name for rule in found),
    )
