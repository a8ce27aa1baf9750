"""Predict that a running job outgrows its GPU memory, and choose the next larger GPU type to restart it on.

GrowthWatch uses samples of used GPU memory alone. The samples of DCGM or nvidia-smi show what a framework holds, not
what it needs: a caching allocator climbs in stairs, a preallocating one is flat, evaluation phases come and go. The
rule therefore extrapolates the highest use so far, takes the least growth that explains it, and restarts a job only
after five predictions in a row and above 80% of the capacity. Memory that rises in one step is never predicted: nothing
announces it.

AllocatorWatch uses an allocator's requests and its reuse ratio by iteration (Saraha et al., Algorithm 1). The
paper fits a line to the requested memory (a + b i) and one to the inverse reuse ratio, requested / held (c + d i):

    peak(T) = (a + b T + z sigma) / (c + d T) + context

It does not give the test of convergence, T, the constant of the CUDA context, or whether z is one- or two-sided: the
constants below are our choice. benchmarks/mig_restart.py measures them. In pure Python: compute nodes have no numpy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from slurm.releases import Release, first_with

USE_SHARE = 0.8  # of the capacity, that the highest use must have reached
NEWER_SHARE = 0.5  # of the run so far, that the fit is on: what a program loads at its start is no growth
LAW_SHARE = 0.75  # of the run so far, on which the law is chosen as well: a curve shows better on more of it
IN_A_ROW = 5  # predictions that must all say that the job does not fit
STEP_SHARE = 0.005  # of the run so far, between two predictions, so that five are not one
LEAST_ELAPSED_SHARE = 0.15  # of the expected run time; before it, the first tooth of a sawtooth looks like growth
BLOCKS = 10  # of equal length, whose highest uses are fitted; half of them need samples
LEAST_SAMPLES = 12  # before the first prediction
MOST_JUMP_SHARE = 0.6  # of the growth in the fitted part, that one block may have; above it the growth is a step
FALLEN_SHARE = 0.1  # of the capacity, by which the newest use may be below the highest
Z = 2.33  # standard errors taken off the fitted growth: one-sided 99%
LEAST_CHANCE = 0.95  # that the job still runs when the memory would be full
ALIKE = 1e-6  # squared error, as a share of the squared capacity, below which all laws fit
LEAST_POINTS = 3  # that a law is fitted to
MOST_POINTS = 256  # samples kept; with more, neighbors become one, the higher of them

Series = Sequence[tuple[float, float]]
"""Shares of the run so far, and MiB."""
Law = tuple[Callable[[float], float], Callable[[float], float]]
"""Growth by the time as a share of the run so far, increasing, and its inverse."""


def _logarithmic(scale: float) -> Law:
    return lambda share: math.log1p(share / scale), lambda x: scale * math.expm1(x) if x < 50 else math.inf


def _saturating(scale: float) -> Law:
    return lambda share: -math.expm1(-share / scale), lambda x: -scale * math.log1p(-x) if x < 1 else math.inf


LAWS: tuple[Law, ...] = (
    (lambda share: share, lambda level: level),
    *(_logarithmic(scale) for scale in (0.02, 0.1, 0.3, 1.0)),
    *(_saturating(scale) for scale in (0.1, 0.15, 0.2, 0.28, 0.4, 0.55, 0.75, 1.0, 1.5, 2.5)),
)


def fit(law: Law, series: Series, z: float) -> tuple[float, float]:
    """Fit law(time) to three points or more. Returns the squared error, and the slope less z standard errors."""
    points = [(law[0](share), mib) for share, mib in series]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    error = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return error, slope - z * math.sqrt(error / (len(points) - 2) / spread)


def full_share(series: Sequence[Series], room_mib: float, floor: float) -> float:
    """Return the share of the run so far after which room_mib more is used; infinite if it never is.

    By the slowest law whose squared error is the least, or below floor, on any of the series; its slope is that of the
    first one.
    """
    full = 0.0
    for each in series:
        errors = [fit(law, each, 0.0)[0] for law in LAWS]
        for law, error in zip(LAWS, errors, strict=True):
            if error <= min(errors) + floor:
                grown, reached = law
                slope = fit(law, series[0], Z)[1]
                full = max(full, reached(grown(1.0) + room_mib / slope) if slope > 0 else math.inf)
    return full


@dataclass(frozen=True)
class ExpectedEnd:
    """The expected end of a job, in s since its start.

    predicted_s: its median; spread: the standard deviation of its logarithm (0: it is exact). limit_s: the time limit;
    alone, every end up to it is equally likely.
    """

    predicted_s: float | None = None
    spread: float = 0.0
    limit_s: float | None = None

    @property
    def end_s(self) -> float | None:
        """The predicted end or the time limit, whichever comes first; None if neither is known."""
        known = [end for end in (self.predicted_s, self.limit_s) if end is not None and 0 < end < math.inf]
        return min(known, default=None)

    def chance_of_reaching(self, time_s: float, now_s: float) -> float:
        """The probability that the job still runs at time_s, given that it runs now. 0 if nothing is known."""
        limit = self.limit_s if self.limit_s is not None and self.limit_s > 0 else math.inf
        if not time_s < limit or self.end_s is None:
            return 0.0
        predicted = self.predicted_s
        if predicted is None or not 0 < predicted < math.inf or (self.spread <= 0 and now_s >= predicted):
            return 0.0 if limit == math.inf else max(0.0, (limit - time_s) / (limit - now_s))
        if self.spread <= 0:
            return 1.0 if time_s <= predicted else 0.0
        tails = [math.erfc(math.log(max(at, 1e-9) / predicted) / self.spread / 2**0.5) for at in (time_s, now_s)]
        return tails[0] / tails[1] if tails[1] > 0 else 0.0


@dataclass(frozen=True)
class GrowthPoint:
    """Neighboring samples: the time of the newest, their highest, their mean, and how many they are."""

    time_s: float
    highest_mib: float
    mean_mib: float
    samples: int

    def joined(self, after: GrowthPoint) -> GrowthPoint:
        samples = self.samples + after.samples
        mean = (self.mean_mib * self.samples + after.mean_mib * after.samples) / samples
        return GrowthPoint(after.time_s, max(self.highest_mib, after.highest_mib), mean, samples)


class GrowthWatch:
    """The samples of one run: observe() each of them, in order, as it comes.

    capacity_mib: of the GPU or slice; None, NaN, or not positive: unknown, and nothing is ever predicted.
    family_peak_mib: of completed runs of the family; growth up to it is no reason to restart, if it fits.
    """

    def __init__(self, capacity_mib: float | None, run_time: ExpectedEnd, family_peak_mib: float | None = None) -> None:
        self._capacity_mib = capacity_mib if capacity_mib is not None and 0 < capacity_mib < math.inf else None
        self._run_time, self._family_peak_mib = run_time, family_peak_mib
        self._points: list[GrowthPoint] = []
        self._stride = 1
        self._newest_s, self._predicted_s = -1.0, -math.inf
        self._row = 0
        self._full_s: float | None = None

    def observe(self, time_s: float, used_mib: float | None) -> float | None:
        """Note the use at a time, s since the start. Returns when the memory is full, if the job is to restart now.

        A sample that is missing, not finite, negative, or not later than the one before changes nothing.
        """
        is_finite = used_mib is not None and math.isfinite(used_mib) and math.isfinite(time_s)
        if not is_finite or used_mib is None or used_mib < 0 or time_s <= self._newest_s:
            return self._full_s
        self._newest_s = time_s
        self._note(time_s, used_mib)
        if time_s - self._predicted_s >= STEP_SHARE * time_s:
            self._predicted_s = time_s
            full_s = self._predict(time_s)
            self._row = 0 if full_s is None else self._row + 1
            self._full_s = full_s if full_s is not None and self._may_restart(time_s, used_mib) else None
        return self._full_s

    def _note(self, time_s: float, used_mib: float) -> None:
        """Join every _stride samples to one point; past MOST_POINTS, each two points to one."""
        sample = GrowthPoint(time_s, used_mib, used_mib, 1)
        if self._points and self._points[-1].samples < self._stride:
            self._points[-1] = self._points[-1].joined(sample)
        else:
            self._points.append(sample)
        if len(self._points) > MOST_POINTS:
            rest = self._points[len(self._points) // 2 * 2 :]
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [before.joined(after) for before, after in pairs] + rest
            self._stride *= 2

    def _predict(self, now_s: float) -> float | None:
        """Return when memory is full, in s since the start, if the job outgrows it; ignores the present use."""
        if self._capacity_mib is None or self._run_time.end_s is None or len(self._points) < LEAST_SAMPLES:
            return None
        newer, longer = (self._blocks(now_s, share) for share in (NEWER_SHARE, LAW_SHARE))
        if len(newer) < BLOCKS // 2:
            return None
        before = self._points[: round(len(self._points) * (1 - NEWER_SHARE))]
        start_mib = max((point.highest_mib for point in before), default=0.0)
        peaks = list(accumulate((block.highest_mib for block in newer), max, initial=start_mib))[1:]
        rises = [after - before for before, after in pairwise(peaks)]
        if sum(rises) <= 0 or max(rises) > MOST_JUMP_SHARE * sum(rises):
            return None
        both = [newer, longer if len(longer) >= LEAST_POINTS else newer]  # after a long gap in the samples
        series = [[(block.time_s / now_s, block.mean_mib) for block in blocks] for blocks in both]
        full_s = now_s * full_share(series, self._capacity_mib - peaks[-1], ALIKE * self._capacity_mib**2)
        return full_s if self._run_time.chance_of_reaching(full_s, now_s) >= LEAST_CHANCE else None

    def _blocks(self, now_s: float, share: float) -> list[GrowthPoint]:
        """This newest share of the samples in blocks of equal length; a block without samples is left out."""
        newer = self._points[round(len(self._points) * (1 - share)) :]
        start_s, length_s = newer[0].time_s, now_s - newer[0].time_s
        blocks: dict[int, GrowthPoint] = {}
        for point in newer:
            index = min(int((point.time_s - start_s) / length_s * BLOCKS), BLOCKS - 1)
            blocks[index] = blocks[index].joined(point) if index in blocks else point
        return list(blocks.values())

    def _may_restart(self, now_s: float, used_mib: float) -> bool:
        capacity, end_s, family = self._capacity_mib or 0.0, self._run_time.end_s or 0.0, self._family_peak_mib
        highest = max(point.highest_mib for point in self._points)
        return (
            now_s >= LEAST_ELAPSED_SHARE * end_s
            and highest >= USE_SHARE * capacity
            and highest - used_mib <= FALLEN_SHARE * capacity
            and self._row >= IN_A_ROW
            and not (family is not None and highest <= family <= capacity)
        )


Z_ONE_SIDED = 2.3263  # 99% of a normal distribution lie below it; only a peak above the prediction matters
CONTEXT_MIB = 450.0  # of the CUDA context: about what a process without tensors shows in nvidia-smi on an A100
LEAST_ITERATIONS = 3  # before the first prediction
LEAST_INVERSE = 1.0  # that the fitted inverse reuse ratio counts as; 1.0 is no reuse at all


class Iteration(NamedTuple):
    """One iteration of a job. requested_mib: by its tensors; held_mib: what the allocator took for them, its peak."""

    requested_mib: float
    held_mib: float


class Line(NamedTuple):
    """a + b i by least squares. sigma: standard deviation of the residuals, with two degrees of freedom less."""

    intercept: float
    slope: float
    sigma: float


def fit_line(start: int, values: Sequence[float]) -> Line:
    """The line through (start, values[0]), (start + 1, values[1]) and so on; two values or more."""
    count = len(values)
    mean_i, mean = start + (count - 1) / 2, sum(values) / count
    spread = count * (count * count - 1) / 12
    slope = sum((start + n - mean_i) * (value - mean) for n, value in enumerate(values)) / spread
    error = sum((value - mean - slope * (start + n - mean_i)) ** 2 for n, value in enumerate(values))
    return Line(mean - slope * mean_i, slope, math.sqrt(error / (count - 2)) if count > 2 else 0.0)


def predicted_peak_mib(iterations: Sequence[Iteration], last: float, newer_share: float = 1.0) -> float | None:
    """The peak up to iteration `last` (counted from 1); None with too few iterations or an unusable value among them.

    Values that are not finite, a held memory of 0, and a `last` that is over are unusable. newer_share: of the
    iterations, that the lines are fitted to; 1.0 is the paper's.
    """
    first = round(len(iterations) * (1 - newer_share))
    newer = iterations[first:]
    if len(newer) < LEAST_ITERATIONS or not (math.isfinite(last) and last >= len(iterations)):
        return None
    if not all(math.isfinite(value) and value > 0 for each in newer for value in each):
        return None
    requested = fit_line(first + 1, [each.requested_mib for each in newer])
    inverse = fit_line(first + 1, [each.requested_mib / each.held_mib for each in newer])
    peak_mib = requested.intercept + requested.slope * last + Z_ONE_SIDED * requested.sigma
    return peak_mib / max(inverse.intercept + inverse.slope * last, LEAST_INVERSE) + CONTEXT_MIB


class AllocatorWatch:
    """Algorithm 1 with the guards of an early restart: observe() each iteration as it ends.

    capacity_mib: None, NaN, or not positive: unknown, and nothing is ever predicted. family_peak_mib: see GrowthWatch.
    """

    def __init__(self, capacity_mib: float | None, family_peak_mib: float | None = None) -> None:
        self._capacity_mib = capacity_mib if capacity_mib is not None and 0 < capacity_mib < math.inf else math.inf
        self._family_peak_mib = family_peak_mib
        self._iterations: list[Iteration] = []
        self._row = 0

    def observe(self, iteration: Iteration, last: float | None) -> bool:
        """Return True to restart now. last: the number of the job's last iteration; None: nothing is predicted."""
        self._iterations.append(iteration)
        peak = predicted_peak_mib(self._iterations, math.nan if last is None else last, NEWER_SHARE)
        self._row = self._row + 1 if peak is not None and peak > self._capacity_mib else 0
        used, family = max(each.held_mib for each in self._iterations) + CONTEXT_MIB, self._family_peak_mib
        is_known = family is not None and used <= family <= self._capacity_mib
        return self._row >= IN_A_ROW and used >= USE_SHARE * self._capacity_mib and not is_known


GpuField = Literal["gres", "TresPerJob", ""]
"""The field of `scontrol update` that holds the job's GPUs; "": none that can be rewritten."""
_PROFILE = re.compile(r"([1-9][0-9]?)g\.([1-9][0-9]{0,3})gb(?:\.me|\+me)?")


@dataclass(frozen=True)
class RestartJob:
    """The job as Slurm shows it. gpus: of all its nodes; gpu_type: that it was given; restarts: so far."""

    gpus: int
    gpu_type: str
    request: GpuField
    restarts: int
    can_requeue: bool
    is_own: bool
    appends_output: bool
    is_het: bool = False


@dataclass(frozen=True)
class Destination:
    """The type to ask for, or the reason why there is none ("" with a type)."""

    gpu_type: str = ""
    why_not: str = ""


def why_never(job: RestartJob, release: Release | None, most_restarts: int) -> str:
    """Say why this job is never moved, whatever its memory does; "" if it can be. Known when the job starts."""
    if release is None or not release.changes_gpu_type:
        seen = "an unknown release" if release is None else f"Slurm {release}"
        return f"restarts need Slurm {first_with('changes_gpu_type')} or later, this is {seen}"
    if not job.is_own:
        return "the job belongs to another user"
    if not job.can_requeue:
        return "the job cannot be requeued: submit it without --no-requeue, or with --requeue"
    if job.is_het:
        return "the job is part of a heterogeneous job"
    if job.gpus != 1:
        return f"the job has {job.gpus} GPUs, and only a job with one is moved"
    if not job.request:
        return "the job's GPU is not requested by --gres, --gpus-per-node, or --gpus alone"
    if not job.appends_output:
        return "a restart would empty the output file: submit with --open-mode=append"
    if job.restarts >= most_restarts:
        return f"the job was restarted {job.restarts} times, at most {most_restarts} are allowed"
    return ""


def next_type(
    job: RestartJob, capacities_mib: Mapping[str, int], existing: Collection[str], wanted: Sequence[str] = ()
) -> Destination:
    """The smallest existing type with more memory than the job's. Always strictly up, so restarts end.

    capacities_mib: of the site's tiers, by type; a MIG profile that is not among them counts by its name. wanted: types
    that the user named, in order; the first that is larger counts, and one of unknown size only after the type before
    it in the list.
    """
    if not existing:
        return Destination(why_not="Slurm lists no GPU types")
    if wanted:
        return _named(job.gpu_type, capacities_mib, existing, wanted)
    here, slices = capacity_of(job.gpu_type, capacities_mib), slices_of(job.gpu_type)
    if here is None:
        return Destination(why_not=f'the memory of the type "{job.gpu_type}" is unknown: name the next with --next')
    # Of types with as much memory: no fewer compute slices than now, then as few as possible.
    larger = [
        (size, slices_of(name) < slices, slices_of(name), name)
        for name in existing
        if (size := capacity_of(name, capacities_mib)) is not None and size > here
    ]
    if not larger:
        return Destination(why_not=f'no type is larger than "{job.gpu_type}"')
    return Destination(min(larger)[-1])


def _named(
    here: str, capacities_mib: Mapping[str, int], existing: Collection[str], wanted: Sequence[str]
) -> Destination:
    wanted = list(dict.fromkeys(wanted))  # a name that comes twice would make a circle
    rest = wanted[wanted.index(here) + 1 :] if here in wanted else wanted
    size = capacity_of(here, capacities_mib)
    for name in rest:
        other = capacity_of(name, capacities_mib)
        if name == here or (size is not None and other is not None and other <= size):
            continue
        if name in existing:
            return Destination(name)
    return Destination(why_not=f'no type of --next ({", ".join(wanted)}) exists and comes after "{here}"')


def capacity_of(gpu_type: str, capacities_mib: Mapping[str, int]) -> int | None:
    """MiB of a type: the site's tier, else of a MIG profile such as 2g.20gb what its name says; else None."""
    if gpu_type in capacities_mib:
        return capacities_mib[gpu_type]
    match = _PROFILE.search(gpu_type)
    return int(match[2]) * 1024 if match else None


def slices_of(gpu_type: str) -> int:
    """Compute slices of a MIG profile by its name; 7 of any other type."""
    match = _PROFILE.search(gpu_type)
    return int(match[1]) if match else 7
