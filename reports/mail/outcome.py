"""Counts of what one run of `almanac report --due` did, and how they read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from almanac.units import format_count

LEFT = "left to the next run"
"""Mails that are still queued when the rate limit ends a run. This is not a fault."""


@dataclass
class Outcome:
    """Counts of one run. looks: how often each source was read. faults: what failed; the next run tries it again.

    delivered: mails by what became of them. held: kept for later, because the system does not know the user now.
    """

    noticed: int = 0
    looks: Counter[str] = field(default_factory=Counter)
    put: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    delayed: Counter[str] = field(default_factory=Counter)
    delivered: Counter[str] = field(default_factory=Counter)
    spool: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """No line if there was nothing to do, because a timer runs this every minute."""
        decisions = list(self.decisions())
        if self.noticed or self.put or decisions:
            yield f"{format_count(self.noticed)} jobs have ended; mails made: {said(self.put) or 'none'}"
        yield from decisions

    def decisions(self) -> Iterator[str]:
        for title, counts in (
            ("no mail of", self.skipped), ("later", self.delayed), ("spool", Counter(self.spool)),
            ("mail server", self.delivered),
        ):  # fmt: skip
            if words := said(counts):
                yield f"  {title}: {words}"


def said(counts: Counter[str]) -> str:
    return ", ".join(f"{format_count(number)} {what}" for what, number in counts.most_common() if number)
