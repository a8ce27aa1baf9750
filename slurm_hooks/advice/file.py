"""The advice of one user, and of `_site` for everybody else. `almanac publish` writes it, programs of users read it.

    <root>/user/<uid>/advice.json     of root, readable by that user: for showing only

Readers look for a row F of the name key and GPU count, then G of the GPU count, then U, in the user's file; then for G
and U in `_site`. Of equal rows the first counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from advisor.priority import site_factor
from almanac.published.files import TEXT_BYTES, PublishedKind
from almanac.records import gain_text
from almanac.submit_config import Priority, PriorityMode, PromptMode, Tier

LIFETIME_S = 48 * 3600
"""Time after which advice expires: two days of failed publishing, over which advice stays about right."""
RowKind = Literal["F", "G", "U"]
FAMILY: Final = "F"
GPUS: Final = "G"
USER: Final = "U"


@dataclass(frozen=True, slots=True)
class AdviceRow:
    """The prediction and the advice for a family (F), a GPU count (G), or any job (U) of one user.

    predicted_s: run time; of U the time that counts for the site factor. site_factor: of U only the points of options.
    bound_mib: upper bound of the peak GPU memory; tier: the one to ask for; None where unknown.
    gains: "hbm80g=40 min", by tier asked for, how much earlier jobs start in this one. Releases before had `waits` in
    each tier; the name is another one, so that neither takes one for the other. text: the sentence for the user;
    with a tier, "TIER is enough: " goes before it. Both "" if there is none. why_not: why there is no text; "" if there
    is one, or if it is not known. checkpoint: a sentence on failures and checkpoints; "" for jobs that seldom fail.
    pilot: jobs that may still take a smaller tier, counted from the time of the file; None: any number.
    """

    kind: RowKind
    predicted_s: int
    site_factor: int
    key: str = ""
    gpus: int | None = None
    bound_mib: int | None = None
    tier: str | None = None
    gains: str = ""
    text: str = ""
    why_not: str = ""
    checkpoint: str = ""
    pilot: int | None = None

    def gain(self, asked: Tier | None, tier: Tier | None, gpus: int) -> str:
        """The user's gain from a change of tier; "" if it is not known."""
        if asked is None or tier is None:
            return ""
        return gain_text(self.earlier.get(asked.name, ""), gpus, asked.name if asked.size > tier.size else "")

    @property
    def earlier(self) -> dict[str, str]:
        """The gains by tier."""
        return dict(part.split("=", 1) for part in self.gains.split(";") if "=" in part)


@dataclass(frozen=True)
class AdviceFile:
    """A file's content. priority: only K, least and greatest GPU-time are told."""

    version: str
    written_s: int
    expires_s: int
    mode: PriorityMode
    tell: bool
    prompt: PromptMode
    priority: Priority
    tiers: tuple[Tier, ...]
    rows: tuple[AdviceRow, ...]

    @cached_property
    def _places(self) -> dict[tuple[RowKind, str, int | None], AdviceRow]:
        places: dict[tuple[RowKind, str, int | None], AdviceRow] = {}
        for row in self.rows:
            places.setdefault((row.kind, row.key, row.gpus), row)
        return places

    def find(self, key: str, gpus: int) -> AdviceRow | None:
        """The row of a submission, by this file alone."""
        ways = ((FAMILY, key, gpus), (GPUS, "", gpus), (USER, "", None))
        return next((self._places[way] for way in ways if way in self._places), None)

    def find_any(self, gpus: int) -> AdviceRow | None:
        """Return the row for a name that the file does not have: by GPU count, else the user's; else None."""
        return self._places.get((GPUS, "", gpus)) or self._places.get((USER, "", None))


@dataclass(frozen=True)
class AdviceMatch:
    """The row of a submission, the file that it is from, and the site factor of the whole submission."""

    row: AdviceRow
    file: AdviceFile
    site_factor: int


def look_up(user: AdviceFile | None, site: AdviceFile | None, key: str, gpus: int) -> AdviceMatch | None:
    """Find the row of a submission; None if the files have none, and without GPUs."""
    if gpus <= 0:
        return None
    ways = ((user, user.find(key, gpus) if user else None), (site, site.find_any(gpus) if site else None))
    for file, row in ways:
        if file is not None and row is not None:
            return AdviceMatch(row, file, site_factor_of(row, gpus, file.priority))
    return None


def site_factor_of(row: AdviceRow, gpus: int, priority: Priority) -> int:
    """The site factor of a submission with this number of GPUs."""
    return row.site_factor if row.kind != USER else site_factor(row.predicted_s * gpus, priority) + row.site_factor


ADVICE = PublishedKind("advice.json", AdviceFile, text_bytes=4 * TEXT_BYTES)
"""Four times the size of the lines in sched/ (slurm_hooks.advice.sched): the same rows with names fit always."""


def unwritable(tiers: Iterable[Tier]) -> list[str]:
    """Return the names and selectors that an advice file cannot hold: not ASCII, or with a field separator."""
    texts = [text for tier in tiers for text in (tier.name, tier.constraint, tier.gres, tier.partition) if text]
    return [text for text in texts if not re.fullmatch(r"[\x21-\x3a\x3c\x3e-\x7e]+", text) or text == "-"]
