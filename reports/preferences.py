"""How often a user wants mail: one word in a file of their own in <advice_dir>/mail/, root's, mode 1733.

Whose a preference is, is said by the owner of the file, never by its name alone: nobody can speak for another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from almanac.config import Config

FREQUENCIES = ("off", "digest", "every")


@dataclass(frozen=True)
class Preference:
    """frequency: one of FREQUENCIES. is_own: the user's own, else the site's default."""

    frequency: str
    is_own: bool


def uid_of(user: str) -> int | None:
    """None for a name that the system does not know."""
    raise NotImplementedError


def read(user: str, config: Config, uids: Callable[[str], int | None] = uid_of) -> Preference:
    raise NotImplementedError


def write(frequency: str | None, config: Config) -> None:
    """The caller's own; None: the site's default from now on. Raises StoreError."""
    raise NotImplementedError
