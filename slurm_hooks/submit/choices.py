"""A user's answers at the prompt, in the user's own file: one line per job family, rewritten as a whole.

    key  gpus  asked|always|never  tier  time      separated by tabs; the time in s since 1970

sbatch-almanac and almanac-prompt share the file. It counts as empty if it breaks the format anywhere, is too large, is
not a regular file, or belongs to another user.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

MAX_BYTES = 65_536
ChoiceWord = Literal["asked", "always", "never"]
ASK_AGAIN_S = 3600
_LINE = re.compile(
    r"([\x21-\x7e]{1,64})\t([1-9][0-9]{0,5})\t(asked|always|never)\t([\x20-\x7e]{1,100})\t([0-9]{1,12})\n"
)


@dataclass(frozen=True)
class Choice:
    """The last answer for a job family. tier: the tier advised at that time."""

    key: str
    gpus: int
    word: ChoiceWord
    tier: str
    time_s: int

    def is_recent(self, now_s: int, within_s: int = ASK_AGAIN_S) -> bool:
        """True if the user saw the advice within this time; False for a time in the future."""
        return 0 <= now_s - self.time_s < within_s


def choices_path(environ: Mapping[str, str]) -> str | None:
    """Path of the user's answers; None where neither XDG_STATE_HOME nor HOME is set."""
    state, home = environ.get("XDG_STATE_HOME", ""), environ.get("HOME", "")
    if not state.startswith("/"):
        if not home.startswith("/"):
            return None
        state = f"{home}/.local/state"
    return f"{state}/almanac/choices"


def parse(text: str) -> tuple[Choice, ...]:
    """The answers; () where any line breaks the format. The first line of a family counts."""
    found: dict[tuple[str, int], Choice] = {}
    for line in text.splitlines(keepends=True):
        match = _LINE.fullmatch(line)
        if not match:
            return ()
        key, gpus, word, tier, time_s = match.groups()
        found.setdefault((key, int(gpus)), Choice(key, int(gpus), cast(ChoiceWord, word), tier, int(time_s)))
    return tuple(found.values())


def read(path: str | None) -> tuple[Choice, ...]:
    """The answers so far; () where the file cannot be read."""
    return parse(read_own(path, MAX_BYTES)) if path else ()


def read_own(path: str, most: int) -> str:
    """Text of a file of the user; "" if it cannot be read. Never raises, never waits (a FIFO is refused)."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_size > most:
            return ""
        return os.read(handle, most).decode("latin-1")
    except OSError:
        return ""
    finally:
        os.close(handle)


def find(choices: Iterable[Choice], key: str, gpus: int) -> Choice | None:
    return next((choice for choice in choices if (choice.key, choice.gpus) == (key, gpus)), None)


def replaced(choices: Iterable[Choice], new: Choice, kept_s: int = ASK_AGAIN_S) -> tuple[Choice, ...]:
    """The answers with the new one first, without questions older than kept_s, cut at MAX_BYTES."""
    kept = [new]
    room = MAX_BYTES - len(_line(new))
    for choice in choices:
        is_same = (choice.key, choice.gpus) == (new.key, new.gpus)
        if is_same or (choice.word == "asked" and not choice.is_recent(new.time_s, kept_s)):
            continue
        room -= len(_line(choice))
        if room < 0:
            break
        kept.append(choice)
    return tuple(kept)


def _line(choice: Choice) -> str:
    return f"{choice.key}\t{choice.gpus}\t{choice.word}\t{choice.tier}\t{choice.time_s}\n"


def write(path: str, choices: Iterable[Choice]) -> None:
    """Replace the file with these choices, a line each. Raises OSError."""
    write_own(path, "".join(map(_line, choices)))


def write_own(path: str, text: str) -> None:
    """Replace a file with mode 0600, and make its folder if it is missing. Raises OSError.

    A link in its place is replaced, not followed.
    """
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)  # noqa: PTH103, PTH120 - pathlib takes 3 ms
    new = f"{path}.{os.getpid()}"
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(handle, "wb") as file:  # noqa: PTH123 - of a descriptor
            file.write(text.encode("latin-1"))
        os.rename(new, path)  # noqa: PTH104
    except OSError:
        os.unlink(new)  # noqa: PTH108
        raise
