"""One user's jobs of one GPU count, as the memory advice remembers them: families of names, scripts, what is open."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rapidfuzz import process
from rapidfuzz.distance import Levenshtein

from advisor.duration.features import Submission
from advisor.memory.evidence import Oom
from advisor.memory.peaks import Run

SIMILARITY = 0.8
MIN_PREFIX = 4
MAX_FAMILY_RUNS = 256
MAX_USER_RUNS = 1024
MAX_FAMILIES = 256
"""Families remembered per user and GPU count; a new one takes the place of the one whose last end is oldest.

Each new name is compared with them all. In the Mason trace (two months), no user has more than 71 with one GPU count.
"""


@dataclass
class PeakFamily:
    """What one user's family, of one GPU count, is remembered by beside its runs.

    kin: all runs of names like this, oldest first. known_s: ends of its own newest min_runs runs with a known need, s
    since 1970; reserved_s: of its newest run, where the framework reserved memory; has_reserved: an earlier run did.
    void_s: end of the newest run that reserved memory again; known needs up to it do not count. submit_s: of its newest
    run;
    comes_again: it was submitted more than once.
    """

    kin: deque[Run]
    known_s: deque[int] = field(default_factory=deque)
    reserved_s: int | None = None
    has_reserved: bool = False
    void_s: float = -math.inf
    submit_s: int | None = None
    comes_again: bool = False
    largest_mib: float = 0.0
    oom: Oom | None = None
    failed: Run | None = None


@dataclass
class _Open:
    """The submissions of one name that have not ended: single jobs, and tasks of arrays by when they were submitted."""

    singles: int = 0
    arrays: Counter[int] = field(default_factory=Counter)

    def number(self, job: Submission) -> int:
        """How many a submission meets; an array is one, and meets nothing of itself."""
        return self.singles + len(self.arrays) - (job.is_array and job.submit_s in self.arrays)

    def add(self, job: Submission) -> None:
        if job.is_array:
            self.arrays[job.submit_s] += 1
        else:
            self.singles += 1

    def end(self, job: Submission) -> bool:
        """Whether none is left."""
        if not job.is_array:
            self.singles -= 1
        elif self.arrays[job.submit_s] > 1:
            self.arrays[job.submit_s] -= 1
        else:
            del self.arrays[job.submit_s]
        return not self.singles and not self.arrays


class ReadPeaks(NamedTuple):
    """What the runs that ended at since_s or later say for a name: fields of Evidence. names: whose runs.

    It is the same for each later time up to until_s, as long as no run is added.
    """

    since_s: int
    until_s: float
    names: Collection[str]
    fields: Mapping[str, Any]


class _OpenBy(defaultdict[str, _Open]):
    """By key the submissions that have not ended; a key without any is forgotten."""

    def __init__(self) -> None:
        super().__init__(_Open)

    def end(self, key: str, job: Submission) -> None:
        still_open = self.get(key)
        if still_open is not None and still_open.end(job):
            del self[key]

    def number(self, key: str, job: Submission) -> int:
        return self[key].number(job) if key in self else 0


@dataclass
class UserPeaks:
    """One user's families of one GPU count, all their runs with names, oldest first, and what is open, by name.

    scripts: of each script the runs under names that were submitted once, by name; open_scripts: what of it is open.
    read, read_of_new: what was read last for families, and for names that are none yet. A burst is read once.
    """

    families: OrderedDict[str, PeakFamily] = field(default_factory=OrderedDict)
    kin_of: dict[str, set[str]] = field(default_factory=dict)
    runs: deque[tuple[str, Run]] = field(default_factory=lambda: deque(maxlen=MAX_USER_RUNS))
    scripts: OrderedDict[str, OrderedDict[str, deque[Run]]] = field(default_factory=OrderedDict)
    open: _OpenBy = field(default_factory=_OpenBy)
    open_scripts: _OpenBy = field(default_factory=_OpenBy)
    read: dict[str, ReadPeaks] = field(default_factory=dict)
    read_of_new: dict[str, ReadPeaks] = field(default_factory=dict)

    def family(self, key: str) -> PeakFamily:
        """The family of this key, from now on the newest; a new one starts with what is known of names like it."""
        if key not in self.families:
            kin = self.like(key)
            self.families[key] = PeakFamily(deque(self.runs_of(kin), maxlen=MAX_FAMILY_RUNS))
            self.kin_of[key] = kin
            for other in kin - {key}:
                self.kin_of[other].add(key)
            if len(self.families) > MAX_FAMILIES:
                self._forget(next(iter(self.families)))
        self.families.move_to_end(key)
        return self.families[key]

    def _forget(self, key: str) -> None:
        del self.families[key]
        self.read.pop(key, None)
        for other in self.kin_of.pop(key) - {key}:
            self.kin_of[other].remove(key)

    def like(self, key: str) -> set[str]:
        """This name, and the names like it that are remembered."""
        return similar_names(key, self.families) | {key}

    def runs_of(self, names: Collection[str]) -> list[Run]:
        """The newest, oldest first."""
        return [run for name, run in self.runs if name in names]

    def absorb(self, key: str, script: str, run: Run) -> None:
        """Of a family that family() has given."""
        self.runs.append((key, run))
        for other in self.kin_of[key]:
            self.families[other].kin.append(run)
            self.read.pop(other, None)
        self.read_of_new.clear()
        self._absorb_script(key, script, run)

    def _absorb_script(self, key: str, script: str, run: Run) -> None:
        family, before = self.families[key], self.scripts.get(script)
        first_s = before[key][0].submit_s if before and key in before else family.submit_s
        family.submit_s = run.submit_s
        if not family.comes_again and first_s not in (None, run.submit_s):
            family.comes_again = True
            for other in self.scripts.values():
                other.pop(key, None)
        if family.comes_again or not script:
            return
        names = self.scripts.setdefault(script, OrderedDict())
        names.setdefault(key, deque(maxlen=MAX_FAMILY_RUNS)).append(run)
        self.scripts.move_to_end(script)
        if len(names) > MAX_FAMILIES:
            names.popitem(last=False)
        if len(self.scripts) > MAX_FAMILIES:
            self.scripts.popitem(last=False)


def similar_names(name: str, others: Iterable[str]) -> set[str]:
    """The others that begin with the name, that it begins with, or that differ from it in at most a fifth of letters.

    Fewer than MIN_PREFIX letters are no beginning.
    """
    names, scorer = list(others), Levenshtein.normalized_similarity
    alike = process.extract_iter(name, names, scorer=scorer, processor=None, score_cutoff=SIMILARITY)
    found = {other for other, _, _ in alike}
    if len(name) >= MIN_PREFIX:
        long = (other for other in names if len(other) >= MIN_PREFIX)
        found.update(other for other in long if other.startswith(name) or name.startswith(other))
    return found
