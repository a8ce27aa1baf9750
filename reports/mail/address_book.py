"""Each user's address: from mail.address_map, then mail.address_command, then mail.recipient.

Only the site decides where mail goes: a map that users can write is not read, and a name that is no plain user name is
never given to the command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from almanac.addresses import address_of, is_address
from almanac.bounded import run
from almanac.config import Mail
from almanac.errors import ConfigError, SourceError
from almanac.trusted_file import read_trusted
from almanac.units import printable

MOST_MAP_BYTES = 16 << 20
MOST_ANSWER_BYTES = 4096
COMMAND_TIMEOUT_S = 10.0
MOST_FAILURES = 3
"""Timeouts of the command in a row, or starts that fail, after which one run asks it no more."""


class AddressError(SourceError):
    """The address of a user cannot be looked up now. Mail waits until it can."""


@dataclass
class AddressBook:
    """Looks up each user once. faults: what to tell the operators, each once."""

    config: Mail
    timeout_s: float = COMMAND_TIMEOUT_S
    faults: list[str] = field(default_factory=list)
    _known: dict[str, str | AddressError | None] = field(default_factory=dict)
    _map: Mapping[str, str] | AddressError | None = None
    _failures: int = 0

    def address(self, user: str) -> str | None:
        """None if the site gives the user no address. Raises AddressError if that cannot be known now."""
        if user not in self._known:
            try:
                self._known[user] = self._looked_up(user)
            except AddressError as error:
                self._known[user] = error
                self._note(error)
        found = self._known[user]
        if isinstance(found, AddressError):
            raise found
        return found

    def _note(self, error: AddressError) -> None:
        said = f"{error}; try: {error.hint}"
        if said not in self.faults and len(self.faults) < MOST_FAILURES:
            self.faults.append(said)

    def _looked_up(self, user: str) -> str | None:
        by_recipient = address_of(user, self.config.recipient)
        if self.config.address_map and (mapped := self._mapped(user)) is not None:
            return mapped
        if not self.config.address_command:
            return by_recipient
        # A name with other characters than {user} may have must not become an option or a search filter.
        return self._asked(user) if address_of(user, "{user}") else None

    def _mapped(self, user: str) -> str | None:
        if self._map is None:
            try:
                self._map = read_map(Path(self.config.address_map))
            except AddressError as error:
                self._map = error
        if isinstance(self._map, AddressError):
            raise self._map
        found = self._map.get(user)
        if found is not None and not is_address(found):
            said = f"mail.address_map: the address of {printable(user, 40)} is {printable(repr(found), 80)}"
            raise AddressError(said, "write one address for each user")
        return found

    def _asked(self, user: str) -> str | None:
        program = self.config.address_command[0]
        hint = f"run it yourself, as the user of the timer: {' '.join(self.config.address_command)} {user}"
        if self._failures >= MOST_FAILURES:
            raise AddressError(f"mail.address_command: {program} gave no answer {MOST_FAILURES} times in a row", hint)
        try:
            answer = _answer([*self.config.address_command, user], self.timeout_s)
        except ConfigError as error:
            raise AddressError(f"mail.address_command: {error}", error.hint) from error
        except (OSError, ValueError) as error:
            # An exit code can be about this user alone. It costs no time, and must not hold up the others.
            self._failures += isinstance(error, OSError)
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise AddressError(f"mail.address_command: {program} {printable(why, 200)}", hint) from error
        self._failures = 0
        if answer and not is_address(answer):
            said = f"mail.address_command: {program} printed {printable(repr(answer), 80)} for {user}"
            raise AddressError(said, "let it print one address, or nothing for a user without one")
        return answer or None


def read_map(path: Path) -> dict[str, str]:
    """Addresses by user, from lines `user address`; # begins a comment. A faulty line gives a text that is no address.

    Raises AddressError if the file cannot be read, or if users could have written it.
    """
    try:
        text = read_trusted(path, (), MOST_MAP_BYTES)
    except ConfigError as error:
        raise AddressError(f"mail.address_map: {error}", error.hint) from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        todo = f"make it readable for the user of the timer, owned by root, with mode 0640: {path}"
        raise AddressError(f"mail.address_map: {path}: {why}", todo) from error
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        user, address = words[0], words[1] if len(words) == 2 else f"of line {number}: {' '.join(words[1:])}"
        found[user] = address if found.get(user, address) == address else f"of line {number}, and another one"
    return found


def _answer(argv: Sequence[str], timeout_s: float) -> str:
    """What the program printed, one line; "" if it printed nothing. Ends it and its children.

    Raises OSError if it cannot start or takes too long, ConfigError if root must not run it, and ValueError if it fails
    or prints too much.
    """
    done = run(argv, timeout_s=timeout_s, most_bytes=MOST_ANSWER_BYTES)
    if done.code:
        raise ValueError(f"failed with exit code {done.code}" if done.code > 0 else f"was ended by signal {-done.code}")
    return done.stdout.decode("ascii", "backslashreplace").strip()
