"""Search the share of a GPU's SMs for each packed job, between runs (Gimbal, algorithm 1, corrected).

Shares are those of CUDA MPS, from 10 to 100% in steps of 10; their sum may exceed 100, and 100 for every job is free
competition. A share is fixed when a CUDA context is created, so every try is another run or task.

The search differs from the printed algorithm, which lowers one side only, in three ways:
- a job's range is narrowed by halves instead of one step at a time, and both sides are lowered;
- among the tries that keep the bound below, a model of the measured throughputs chooses;
- after three tries in a row without gain, once all ranges are closed, it ends with the best shares.

The model is a smooth surface through the throughputs that were measured (kriging): one smooth curve for each job's
share and a small interaction. Without numpy, because almanac-pack runs without any library.

If every job has one best share whatever the others have (a single peak), and no two tries tie, the best of all shares
is found within 10 (M - 1) + 3 tries of M jobs, one after the other. On other tables, with concurrent runs, and
under shares that are held for long, the model's choice counts, and there is no bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import combinations, product
from typing import Literal

_LENGTH_PCT = 40.0
"""Shares nearer than this have similar throughput."""
_INTERACTION, _SLOPE, _NUGGET = 0.1, 0.001, 1e-4
"""Variances relative to that of the curve of one share; the slope's is per percent squared."""
_LEAST = 1e-3
"""Of the largest rate: a prediction is never zero or negative."""
_NEAR = [math.exp(-0.5 * (distance / _LENGTH_PCT) ** 2) for distance in range(101)]
Measured = tuple[tuple[int, ...], tuple[float | None, ...]]
"""Shares, and the rate of each job under them."""


def predict_throughputs(measured: Sequence[Measured], shares: Sequence[tuple[int, ...]]) -> list[list[float]]:
    """Steps per second of each job, one row per entry of shares. Every measured rate must be above zero."""
    known = [tried for tried, _ in measured]
    rates = [[rate or 0.0 for rate in rates] for _, rates in measured]
    tops = [max(column) for column in zip(*rates, strict=True)]
    scaled = [[rate / top for rate, top in zip(row, tops, strict=True)] for row in rates]
    means = [sum(column) / len(column) for column in zip(*scaled, strict=True)]
    covariance = [[_covariance(one, other) for other in known] for one in known]
    for place, row in enumerate(covariance):
        row[place] += _NUGGET
    columns = _solve(covariance, [[rate - mean for rate, mean in zip(row, means, strict=True)] for row in scaled])
    weights = list(zip(*columns, strict=True))
    found = []
    for wanted in shares:
        near = [_covariance(wanted, tried) for tried in known]
        found.append(
            [top * _height(mean, near, weight) for top, mean, weight in zip(tops, means, weights, strict=True)]
        )
    return found


def _height(mean: float, near: Sequence[float], weights: Sequence[float]) -> float:
    return max(_LEAST, mean + sum(one * weight for one, weight in zip(near, weights, strict=True)))


def _covariance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    curves, product, slope = 0.0, 1.0, 0
    for share, wanted in zip(one, other, strict=True):
        near = _NEAR[abs(share - wanted)]
        curves, product, slope = curves + near, product * near, slope + share * wanted
    return curves + _INTERACTION * product + _SLOPE * slope


def _solve(matrix: Sequence[list[float]], right: Sequence[list[float]]) -> list[list[float]]:
    """X of matrix X = right, by elimination without pivots: the matrix is positive definite."""
    rows = [[*left, *values] for left, values in zip(matrix, right, strict=True)]
    size = len(rows)
    for place, pivot in enumerate(rows):
        for row in rows[place + 1 :]:
            factor = row[place] / pivot[place]
            row[place:] = [value - factor * above for value, above in zip(row[place:], pivot[place:], strict=True)]
    found: list[list[float]] = [[] for _ in rows]
    for place in reversed(range(size)):
        row = rows[place]
        values = row[size:]
        for later in range(place + 1, size):
            values = [value - row[later] * known for value, known in zip(values, found[later], strict=True)]
        found[place] = [value / row[place] for value in values]
    return found


Objective = Literal["jct", "deadline", "makespan"]
Shares = tuple[int, ...]
STEP_PCT = 10
LEVELS = tuple(range(STEP_PCT, 101, STEP_PCT))
MOST_JOBS = 5
MOST_RUNS = 10
"""A mean of this many runs follows later ones like a moving mean, so that it forgets an older program."""
MOST_FAILURES = 3
"""Tries in a row without gain that end the search (the paper's early exit)."""
MOST_PENDING = 4
"""Shares that concurrent runs try at a time: those that start later learn from what these reach."""
MOST_HELD = 4
"""Tries under the same held shares: a longer job must not take all tries to where its own share is poor."""
_OPENING_PCT = 50
_OUTSIDE = STEP_PCT


@dataclass(frozen=True)
class PackedJob:
    """A job as the objectives see it. left_s: until the deadline; None: no deadline."""

    remaining_steps: float = 1.0
    left_s: float | None = None


@dataclass(frozen=True)
class ShareTry:
    """Shares, and the throughput of each job under them; None if it could not be measured, which is not zero.

    runs: how many runs had these shares; the throughput is their mean.
    """

    shares: Shares
    steps_per_s: tuple[float | None, ...]
    runs: int = 1

    @property
    def is_measured(self) -> bool:
        return None not in self.steps_per_s


@dataclass(frozen=True)
class ShareSearch:
    """The state: what was tried so far, oldest first. Ask `next_shares()`, run with them, then `record()`."""

    objective: Objective
    jobs: tuple[PackedJob, ...]
    tries: tuple[ShareTry, ...] = ()
    pending: tuple[Shares, ...] = field(default=(), compare=False)
    """Shares that runs are trying now, so that another run tries something else."""

    def __post_init__(self) -> None:
        if not 2 <= len(self.jobs) <= MOST_JOBS:
            raise ValueError(f"{len(self.jobs)} jobs share a GPU, expected 2 to {MOST_JOBS}")

    @property
    def most_tries(self) -> int:
        return 10 * (len(self.jobs) - 1) + MOST_FAILURES

    @cached_property
    def is_done(self) -> bool:
        """True if nothing more is tried: the bound is reached, nothing can be gained, or tries fail in a row."""
        values = [self.value(one) for one in self.tries]
        if len(self.tries) >= self.most_tries or 0.0 in values:
            return True
        if len(values) >= MOST_FAILURES and not any(one.is_measured for one in self.tries[-MOST_FAILURES:]):
            return True
        return self._failures() >= MOST_FAILURES

    def _failures(self) -> int:
        """Tries without gain since the last gain, counted from when every job's range was closed."""
        failed = 0
        for count in range(len(self.tries) - 1, 0, -1):
            before = replace(self, tries=self.tries[:count])
            if self.value(self.tries[count]) < before.best_value or (before.open_tries and before.best is not None):
                break
            failed += 1
        return failed

    def value(self, one: ShareTry) -> float:
        """The objective, the less the better; infinite if a job stood still or was not measured."""
        if not one.is_measured:
            return math.inf
        return objective_value(self.objective, self.jobs, [rate or 0.0 for rate in one.steps_per_s])

    @cached_property
    def best(self) -> ShareTry | None:
        """The best try, the first of equal ones; None if every try failed."""
        finite = [one for one in self.tries if math.isfinite(self.value(one))]
        return min(finite, key=self.value) if finite else None

    @property
    def best_value(self) -> float:
        return math.inf if self.best is None else self.value(self.best)

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The open interval of each job's best share, by all pairs of tries that differ in it alone."""
        found = [(0, 100 + _OUTSIDE)] * len(self.jobs)
        for one, other in combinations([one for one in self.tries if one.is_measured], 2):
            changed = _changed(one.shares, other.shares)
            if len(changed) != 1 or self.value(one) == self.value(other):
                continue
            (job,) = changed
            better, worse = sorted((one, other), key=self.value)
            low, high = found[job]
            if worse.shares[job] < better.shares[job]:
                found[job] = max(low, worse.shares[job]), high
            else:
                found[job] = low, min(high, worse.shares[job])
        return tuple(found)

    @property
    def open_tries(self) -> int:
        """Tries that close all ranges at worst."""
        best = self.best.shares if self.best else (100,) * len(self.jobs)
        return sum(_needed(*ends, at) for ends, at in zip(self.ranges, best, strict=True))


def next_shares(search: ShareSearch, held: Mapping[int, int] | None = None) -> Shares:
    """The shares for the next run: what to try, or the best once the search is done; free competition if all failed.

    held: shares that cannot change now, by the job's place, because those jobs go on running.
    """
    held = held or {}
    free = (100,) * len(search.jobs)
    best = _with_held(search.best.shares if search.best else free, held)
    known = {one.shares for one in search.tries}
    pending = set(search.pending) - known
    tried = known | pending
    left = search.most_tries - len(search.tries) - len(pending) - 1
    if search.is_done or left < 0 or len(pending) >= MOST_PENDING:
        return best
    beside = [one for one in search.tries if one.is_measured and one.shares == _with_held(one.shares, held)]
    if held and len(beside) >= MOST_HELD:
        return min(beside, key=search.value).shares
    if not search.tries:
        return _with_held(free, held)
    if not search.tries[-1].is_measured and search.tries[-1].shares not in search.pending:
        return _with_held(search.tries[-1].shares, held)
    for shares in _openings(search):
        if shares not in tried and shares == _with_held(shares, held):
            return shares
    seen = [(one.shares, one.steps_per_s) for one in search.tries if math.isfinite(search.value(one))]
    if len(seen) < 2 and set(search.pending) - {shares for shares, _ in seen}:
        return best
    options = [shares for shares in _options(best) if shares not in tried and shares == _with_held(shares, held)]
    safe = [shares for shares in options if _needed_after(search, shares) <= left] or options
    if len(seen) < 2:
        return min(safe, key=lambda shares: sum(abs(a - b) for a, b in zip(shares, best, strict=True)), default=best)
    return _most_promising(search, seen, safe) if safe else best


def _most_promising(search: ShareSearch, seen: Sequence[Measured], options: Sequence[Shares]) -> Shares:
    """Those whose predicted objective is least, the first of equal ones."""
    values = [objective_value(search.objective, search.jobs, rates) for rates in predict_throughputs(seen, options)]
    return options[values.index(min(values))]


def _with_held(shares: Shares, held: Mapping[int, int]) -> Shares:
    return tuple(held.get(job, share) for job, share in enumerate(shares))


def record(search: ShareSearch, shares: Shares, steps_per_s: Sequence[float | None]) -> ShareSearch:
    """The search after a run. A negative, infinite, or NaN rate counts as not measured; 0 is a standstill.

    Another run with the same shares is no further try: its rates are averaged. Beyond the most tries, other shares are
    not recorded: they come about under held ones. Raises ValueError for shares that `next_shares` cannot return.
    """
    if len(shares) != len(search.jobs) or len(steps_per_s) != len(search.jobs) or not set(shares) <= set(LEVELS):
        raise ValueError(f"{shares} and {len(steps_per_s)} rates do not fit a search over {len(search.jobs)} jobs")
    rates = tuple(rate if rate is not None and math.isfinite(rate) and rate >= 0 else None for rate in steps_per_s)
    new = ShareTry(shares, rates)
    for place, known in enumerate(search.tries):
        if known.shares == shares and known.is_measured:
            averaged = _averaged(known, new) if new.is_measured else known
            return replace(search, tries=(*search.tries[:place], averaged, *search.tries[place + 1 :]))
    return search if len(search.tries) >= search.most_tries else replace(search, tries=(*search.tries, new))


def _averaged(known: ShareTry, new: ShareTry) -> ShareTry:
    runs = min(known.runs + 1, MOST_RUNS)
    rates = (
        (old or 0.0) + ((rate or 0.0) - (old or 0.0)) / runs
        for old, rate in zip(known.steps_per_s, new.steps_per_s, strict=True)
    )
    return ShareTry(known.shares, tuple(rates), runs)


def objective_value(objective: Objective, jobs: Sequence[PackedJob], steps_per_s: Sequence[float]) -> float:
    """Seconds to minimize (Gimbal, equations 1, 3, and 5): mean or largest time left, or the largest lateness.

    Equation 3 is corrected: a job is late by its time left beyond its deadline. Infinite if a job stands still.
    """
    left = [job.remaining_steps / rate if rate > 0 else math.inf for job, rate in zip(jobs, steps_per_s, strict=True)]
    if objective == "jct":
        return sum(left) / len(left)
    if objective == "makespan":
        return max(left)
    return max(_lateness(job, time_s) for job, time_s in zip(jobs, left, strict=True))


def _lateness(job: PackedJob, time_s: float) -> float:
    if math.isinf(time_s):
        return math.inf
    return 0.0 if job.left_s is None else max(0.0, time_s - job.left_s)


def lowered_first(search: ShareSearch) -> tuple[int, ...]:
    """The jobs of less priority: the first one, or all others (mean priority). Needs one measured try.

    By makespan, jobs that end sooner; by deadline, jobs with more time to spare; by jct, the first one: the paper takes
    the one that uses its GPU more, which no task says.
    """
    first, *others = _priorities(search)
    return tuple(range(1, len(search.jobs))) if sum(others) / len(others) < first else (0,)


def _priorities(search: ShareSearch) -> list[float]:
    rates = search.best.steps_per_s if search.best else (None,) * len(search.jobs)
    times = [job.remaining_steps / rate if rate else 0.0 for job, rate in zip(search.jobs, rates, strict=True)]
    if search.objective == "deadline":
        late = zip(search.jobs, times, strict=True)
        return [-math.inf if job.left_s is None else time_s - job.left_s for job, time_s in late]
    return times if search.objective == "makespan" else [0.0] * len(times)


def _openings(search: ShareSearch) -> Iterator[Shares]:
    """Shares to try before there is a model: half for the jobs of less priority, then half for the others."""
    low = lowered_first(search)
    first = tuple(_OPENING_PCT if job in low else 100 for job in range(len(search.jobs)))
    yield first
    best = search.best.shares if search.best else first
    if not any(one.shares[job] < 100 for one in search.tries for job in range(len(best)) if job not in low):
        yield tuple(share if job in low else _OPENING_PCT for job, share in enumerate(best))


def _options(best: Shares) -> list[Shares]:
    """Shares that differ from the best ones in at most two jobs: all 100 pairs of two jobs, 856 of five."""
    found = {
        (*best[:one], low, *best[one + 1 : other], high, *best[other + 1 :])
        for one, other in combinations(range(len(best)), 2)
        for low, high in product(LEVELS, LEVELS)
    }
    return sorted(found)


def _changed(one: Shares, other: Shares) -> list[int]:
    return [job for job, (share, wanted) in enumerate(zip(one, other, strict=True)) if share != wanted]


@lru_cache(maxsize=4096)
def _needed(low: int, high: int, at: int) -> int:
    """Tries that find the peak of the open interval at worst, given one measured inside; one more if none is."""
    if low + STEP_PCT >= high:
        return 0
    inside = [share for share in range(low + STEP_PCT, high, STEP_PCT) if share != at]
    if not low < at < high:
        return 1 + min(_needed(low, high, share) for share in inside)
    return 1 + min(_needed_beside(low, high, at, share) for share in inside) if inside else 0


def _needed_beside(low: int, high: int, at: int, share: int) -> int:
    """Tries at worst after one at this share: it is better or worse than the one at `at`."""
    if share < at:
        return max(_needed(low, min(high, at), share), _needed(max(low, share), high, at))
    return max(_needed(max(low, at), high, share), _needed(low, min(high, share), at))


def _needed_after(search: ShareSearch, shares: Shares) -> int:
    """Tries that close all ranges at worst after a try of these shares."""
    best = search.best.shares if search.best else (100,) * len(search.jobs)
    changed = _changed(best, shares)
    needed = [_needed(*ends, at) for ends, at in zip(search.ranges, best, strict=True)]
    if len(changed) == 1:
        (job,) = changed
        return sum(needed) - needed[job] + _needed_beside(*search.ranges[job], best[job], shares[job])
    moved = [_needed(*ends, at) for ends, at in zip(search.ranges, shares, strict=True)]
    return max(sum(needed), sum(moved))
