"""Run times by GPU type, waits, and packing: published with the advice, for showing only.

user/<uid>/times     a user's run times by GPU type, for that user
user/<uid>/packing   a user's job families whose runs can share a GPU, for that user
user/_site/waits     how long a job would wait now, for everybody. It has totals by type and size, in steps of 5
                     minutes: nothing in it names a user or a job, or says when somebody's job ends
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor

from advisor.types.decide import TypeRunTime, TypeWait
from almanac.published.files import PublishedKind
from almanac.submit_config import MAX_WAIT_AGE_S, MIN_TYPE_GAIN, GpuType
from almanac.units import size_class

Family = tuple[str, int]
"""Name key and GPU count."""
_MOST_S, _STEP_S = 10**9, 300


@dataclass(frozen=True)
class FamilyTimes:
    key: str
    gpus: int
    times: tuple[TypeRunTime, ...]


@dataclass(frozen=True)
class TimesFile:
    """Run times of a user's families, the newest family first."""

    written_s: int
    expires_s: int
    families: tuple[FamilyTimes, ...]

    def of_family(self, family: Family) -> tuple[TypeRunTime, ...]:
        return next((each.times for each in self.families if (each.key, each.gpus) == family), ())


TIMES = PublishedKind("times", TimesFile)


def times_file(written_s: int, expires_s: int, families: Mapping[Family, Sequence[TypeRunTime]]) -> TimesFile:
    """Return the file of as many of the first families as fit, in whole seconds."""
    rows = [FamilyTimes(key, gpus, tuple(map(_rounded, times))) for (key, gpus), times in families.items()]
    return TimesFile(written_s, expires_s, TIMES.fitting([row for row in rows if row.times]))


def _rounded(time: TypeRunTime) -> TypeRunTime:
    run_s, low_s, high_s, longest_s = (
        max(round(each), 1) for each in (time.run_s, time.low_s, time.high_s, time.longest_s)
    )
    return TypeRunTime(time.gpu_type, run_s, low_s, high_s, longest_s, time.runs, time.source)


@dataclass(frozen=True)
class WaitsFile:
    """The published file of expected waits by GPU type.

    waits: number of GPUs and the wait by the queue played forward, to choose a type by, not to show. told: number of
    GPUs, a power of two, and the wait by recent waits, for groups in which such predictions held. min_gain, max_age_s:
    limits of advice on types.
    """

    as_of_s: int
    types: tuple[GpuType, ...]
    waits: tuple[tuple[int, TypeWait], ...]
    told: tuple[tuple[int, TypeWait], ...] = ()
    min_gain: float = MIN_TYPE_GAIN
    max_age_s: int = MAX_WAIT_AGE_S

    def __post_init__(self) -> None:
        names = {kind.name for kind in self.types}
        every = [wait for _, wait in (*self.waits, *self.told)]
        if len(names) != len(self.types) or any(wait.gpu_type not in names for wait in every):
            raise ValueError("a wait of an unknown type, or a type twice")
        if any(not wait.low_s <= wait.wait_s <= wait.high_s for wait in every):
            raise ValueError("a wait is not inside its interval")

    @property
    def written_s(self) -> int:
        return self.as_of_s

    @property
    def expires_s(self) -> int:
        return self.as_of_s + self.max_age_s + 1

    def is_young(self, now_s: int) -> bool:
        """Return False if the waits are too old, or of the future."""
        return self.as_of_s <= now_s < self.expires_s

    def of_size(self, gpus: int, now_s: int) -> tuple[TypeWait, ...]:
        """Return each type's wait for the next size in the file, to choose by."""
        if not self.is_young(now_s) or gpus <= 0:
            return ()
        nearest: dict[str, tuple[int, TypeWait]] = {}
        for size, wait in self.waits:
            if size >= gpus and (wait.gpu_type not in nearest or size < nearest[wait.gpu_type][0]):
                nearest[wait.gpu_type] = (size, wait)
        return tuple(wait for _, wait in nearest.values())

    def told_of(self, gpus: int, now_s: int) -> tuple[TypeWait, ...]:
        """Return the waits of jobs of this size that may be told."""
        if not self.is_young(now_s) or gpus <= 0:
            return ()
        return tuple(wait for size, wait in self.told if size == size_class(gpus))


WAITS = PublishedKind("waits", WaitsFile)


def in_steps(file: WaitsFile) -> WaitsFile:
    """Return the same waits in steps of 5 minutes."""
    return replace(file, waits=_all_in_steps(file.waits), told=_all_in_steps(file.told))


def _all_in_steps(waits: Sequence[tuple[int, TypeWait]]) -> tuple[tuple[int, TypeWait], ...]:
    return tuple(
        (
            size,
            replace(
                wait, wait_s=_step(wait.wait_s, round), low_s=_step(wait.low_s, floor), high_s=_step(wait.high_s, ceil)
            ),
        )
        for size, wait in waits
    )


def _step(seconds: float, rounded: Callable[[float], int]) -> int:
    return rounded(min(max(seconds, 0.0), _MOST_S) / _STEP_S) * _STEP_S


@dataclass(frozen=True)
class PackingRow:
    """A family whose runs can share a GPU with at least need_mib of memory. text: what to tell the user."""

    key: str
    gpus: int
    need_mib: int
    text: str


@dataclass(frozen=True)
class PackingFile:
    """Rows of a user's families, the newest family first."""

    written_s: int
    expires_s: int
    rows: tuple[PackingRow, ...]

    def of_family(self, key: str, gpus: int) -> PackingRow | None:
        return next((row for row in self.rows if (row.key, row.gpus) == (key, gpus)), None)


PACKING = PublishedKind("packing", PackingFile)
