"""Which GPU type to ask for now: the one whose wait and run time together end first. Pure.

The intervals of both ends must not overlap, and the gain must be at least GpuTypeRules.min_gain of the time until the
end. They are intervals of the usual run times: what makes one run longer than another one, such as its data, makes it
longer on every type. The time limit is compared with a single run. Waits older than GpuTypeRules.max_age_s are not
used: then there is no advice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from advisor.waits.view import TypeWait
from almanac.submit_config import MAX_WAIT_AGE_S, MIN_TYPE_GAIN
from almanac.units import format_duration

MEASURED = "own runs"


class RunTime(Protocol):
    """A run time on a GPU type, seconds, as advisor.speed.times.TypeTime and published run times have it.

    low_s, high_s: interval of the usual (median) run time. longest_s: that few single runs exceed.
    runs: completed runs on the type. source: "own runs", "own rates", "other families", or "specifications".
    """

    @property
    def gpu_type(self) -> str: ...

    @property
    def run_s(self) -> float: ...

    @property
    def low_s(self) -> float: ...

    @property
    def high_s(self) -> float: ...

    @property
    def longest_s(self) -> float: ...

    @property
    def runs(self) -> int: ...

    @property
    def source(self) -> str: ...


@dataclass(frozen=True)
class GpuTypeRules:
    """now_s: unix seconds. min_gain: share of the time until the end; max_age_s: of a wait."""

    now_s: int
    min_gain: float = MIN_TYPE_GAIN
    max_age_s: int = MAX_WAIT_AGE_S


@dataclass(frozen=True)
class TypeEnd:
    """When a job would end on a type, seconds from now, with its interval."""

    gpu_type: str
    end_s: float
    low_s: float
    high_s: float
    time: RunTime
    wait: TypeWait


@dataclass(frozen=True)
class TypeAdvice:
    """best: the type to ask for; others: that end about as soon, the first first. asked: what it is compared with.

    gain_s: how much sooner the best one ends.
    """

    best: TypeEnd
    asked: TypeEnd
    gain_s: float
    others: tuple[TypeEnd, ...] = ()

    @property
    def types(self) -> tuple[str, ...]:
        """The types that are about as good, the best first."""
        return (self.best.gpu_type, *(each.gpu_type for each in self.others))

    @property
    def text(self) -> str:
        """Run times, waits, and the gain, in the order of the ends."""
        first, second = self.best, self.asked
        waits = f"Wait now: {_short(first.wait.wait_s)} and {_short(second.wait.wait_s)}."
        gain = f"{first.gpu_type} ends {_short(self.gain_s)} earlier."
        return f"Your runs take {_run(first)}, {_run(second)}. {waits} {gain}"


def _run(end: TypeEnd) -> str:
    time = end.time
    about = "" if time.source == MEASURED else "about "
    runs = f" ({time.runs} {'run' if time.runs == 1 else 'runs'})" if time.runs else f" (from {time.source})"
    return f"{about}{_short(time.run_s)} on {end.gpu_type}{runs}"


def _short(seconds: float) -> str:
    return format_duration(round(seconds)) if seconds >= 1 else "none"


def ends_of(times: Sequence[RunTime], waits: Sequence[TypeWait], rules: GpuTypeRules) -> dict[str, TypeEnd]:
    """The ends by type, of types with a known run time and a young enough wait. A wait of the future is none."""
    fresh = {wait.gpu_type: wait for wait in waits if 0 <= rules.now_s - wait.as_of_s <= rules.max_age_s}
    return {
        time.gpu_type: TypeEnd(
            time.gpu_type,
            fresh[time.gpu_type].wait_s + time.run_s,
            fresh[time.gpu_type].low_s + time.low_s,
            fresh[time.gpu_type].high_s + time.high_s,
            time,
            fresh[time.gpu_type],
        )
        for time in times
        if time.gpu_type in fresh and math.isfinite(fresh[time.gpu_type].high_s + time.high_s)
    }


def decide_type(
    times: Sequence[RunTime],
    waits: Sequence[TypeWait],
    asked: Sequence[str],
    rules: GpuTypeRules,
    limit_s: float | None = None,
) -> TypeAdvice | None:
    """The type that ends the job sooner than those asked for; None where none surely does.

    limit_s: the job's time limit, None if it names none. A type on which the job could reach it is not advised; none is
    if either is NaN (not known).

    asked: names of the types that the request accepts; empty: any. Slurm starts the job on the type that is free first,
    so that one is compared.
    """
    ends = ends_of(times, waits, rules)
    accepted = asked or [wait.gpu_type for wait in waits]
    own = [ends[name] for name in accepted if name in ends]
    if not own or len(own) != len(accepted):
        return None
    current = min(own, key=lambda end: (end.wait.wait_s, *_order(end)))
    better = sorted((end for end in ends.values() if _is_better(end, current, rules, limit_s)), key=_order)
    if not better:
        return None
    best = better[0]
    others = tuple(end for end in better[1:] if end.end_s <= best.end_s * (1 + rules.min_gain))
    return TypeAdvice(best, current, current.end_s - best.end_s, others)


def _order(end: TypeEnd) -> tuple[float, str]:
    return end.end_s, end.gpu_type


def _is_better(end: TypeEnd, current: TypeEnd, rules: GpuTypeRules, limit_s: float | None) -> bool:
    if limit_s is not None and not end.time.longest_s <= limit_s:
        return False
    gain_s = current.end_s - end.end_s
    return gain_s > 0 and gain_s >= rules.min_gain * current.end_s and end.high_s < current.low_s
