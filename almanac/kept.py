"""What almanac keeps of a person in one place, and how it is removed: `almanac forget` puts the places together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """One place. number, noun: how much it holds, such as 3 rows. remove: deletes it. Raises AlmanacError, OSError.

    `remove` looks again for what to delete, so it also deletes what came after the count.
    """

    place: str
    number: int
    noun: str
    remove: Callable[[], None]
