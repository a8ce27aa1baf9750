"""The measurements of a share search, kept between the jobs of a sweep in a file of the user's own.

Array tasks run at the same time, so each change is made under a lock, and the file is replaced by renaming. Content
that is not understood is dropped, and the search starts again. The file steers nothing but its owner's own jobs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from advisor.packing.shares import LEVELS, MOST_RUNS, Shares, ShareTry
from almanac.files import open_plain
from almanac.names import name_key

VERSION = 1
MOST_BYTES = 64 * 1024
MOST_TRIES = 100
MOST_CLAIMS = 100
"""The newest are kept: of 1,000 array tasks, a few claim shares that others may not."""
LOCK_S = 5.0
CLAIM_S = 86_400.0
"""A run that has measured nothing for a day is taken for dead, and its shares may be tried again. A claim may be a
little in the future, because the clocks of nodes differ."""
KEPT_S = 90 * 86_400.0
"""Measurements are dropped after so long without a run: the program has changed since."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class Claim:
    """Shares that a run is trying, since a Unix time."""

    shares: Shares
    since_s: float


@dataclass(frozen=True)
class Saved:
    """Content of the file. claims: by run. fault: why older content was dropped; "": none was."""

    tries: tuple[ShareTry, ...] = ()
    claims: Mapping[str, Claim] = field(default_factory=dict)
    fault: str = ""


def state_folder(environ: Mapping[str, str]) -> Path | None:
    """$XDG_STATE_HOME/almanac/pack, by default below ~/.local/state; None without an absolute path for it."""
    base, home = environ.get("XDG_STATE_HOME", ""), environ.get("HOME", "")
    if not base.startswith("/"):
        base = f"{home}/.local/state" if home else ""
    return Path(base) / "almanac" / "pack" if base.startswith("/") else None


def file_name(job_name: str, parts: Sequence[str]) -> str:
    """Return a readable file name: the job family, and a hash of it and `parts`, which affect throughput."""
    family = re.sub("[^a-z0-9.-]+", "_", name_key(job_name)).strip("._-")[:40] or "job"
    text = "\0".join((name_key(job_name), *parts)).encode("utf-8", "surrogateescape")
    return f"{family}-{hashlib.sha256(text).hexdigest()[:16]}.json"


@dataclass(frozen=True)
class SearchFile:
    """The file of one share search. jobs: number of jobs that share a GPU. now_s: the clock, unix seconds."""

    path: Path
    jobs: int
    now_s: Callable[[], float] = time.time

    def change(self, change: Callable[[Saved], tuple[Saved, Found]]) -> tuple[Saved, Found]:
        """Apply `change` to the file's content under its lock; return the new content, and what `change` found.

        Raises OSError; the file then stays as it was.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self.path.with_suffix(".lock")):
            saved, found = change(self.read())
            self._write(saved)
        return saved, found

    def read(self) -> Saved:
        """Return the content; empty without a file, and with a fault if it is damaged or too old.

        Raises OSError if the file cannot be read, or belongs to another user.
        """
        try:
            with open_plain(self.path, os.O_NOFOLLOW) as file:
                owner = os.fstat(file.fileno()).st_uid
                if owner != os.getuid():
                    raise OSError(f"it belongs to another user (uid {owner})")
                content = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return Saved()
        try:
            return self._parse(content)
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            return Saved(fault=f"{self.path} is not understood ({type(error).__name__}): the search starts again")

    def _parse(self, content: bytes) -> Saved:
        if len(content) > MOST_BYTES:
            raise ValueError("too large")
        data = json.loads(content)
        if data["version"] != VERSION:
            raise ValueError("other version")
        if self.now_s() - _number(data["written_s"]) > KEPT_S:
            return Saved(fault=f"{self.path} is older than {KEPT_S / 86_400:g} days: the search starts again")
        tries = tuple(self._try(one) for one in data["tries"])
        if len(tries) > MOST_TRIES:
            raise ValueError("too many tries")
        claims = {str(run): self._claim(one) for run, one in data["claims"].items()}
        return Saved(tries, {run: one for run, one in claims.items() if abs(self.now_s() - one.since_s) < CLAIM_S})

    def _try(self, data: Any) -> ShareTry:
        rates = tuple(None if rate is None else _number(rate) for rate in data["steps_per_s"])
        runs = data["runs"]
        if len(rates) != self.jobs or type(runs) is not int or not 1 <= runs <= MOST_RUNS:
            raise ValueError("no try")
        return ShareTry(self._shares(data["shares"]), rates, runs)

    def _claim(self, data: Any) -> Claim:
        return Claim(self._shares(data["shares"]), _number(data["since_s"]))

    def _shares(self, data: Any) -> Shares:
        if len(data) != self.jobs or not all(type(share) is int and share in LEVELS for share in data):
            raise ValueError("no shares")
        return tuple(data)

    def _write(self, saved: Saved) -> None:
        newest = sorted(saved.claims.items(), key=lambda claim: claim[1].since_s)[-MOST_CLAIMS:]
        data = {
            "version": VERSION,
            "written_s": self.now_s(),
            "tries": [vars(one) for one in saved.tries],
            "claims": {run: vars(one) for run, one in newest},
        }
        new = self.path.with_suffix(".new")
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(handle, "w", encoding="ascii") as file:  # noqa: PTH123 - of a descriptor
            json.dump(data, file)
            file.flush()
            os.fsync(handle)
        new.replace(self.path)


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError("no number")
    return float(value)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Raises OSError where locks do not work, and TimeoutError where another process keeps it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"{path} is locked by another run for more than {LOCK_S:g} s") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)
