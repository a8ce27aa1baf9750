"""Schemes A and B of migm-mig-scheduling (4.3): a batch of jobs on one A100-40 under MIG.

Changing the layout takes no time here, and instances do not slow each other down. Sizes of slices are the nominal ones
of the paper: 5, 10, 20, and 40 GB.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.mig.states import PartitionStates, Placement, partition_states
from almanac.mig import Profile, mig_models

LAYOUTS: dict[int, tuple[str, ...]] = {5: ("1g",) * 7, 10: ("2g",) * 3, 20: ("4g", "3g"), 40: ("7g",)}
"""Scheme A's layout for each size in GB. Scheme B uses the same shapes for it."""
SIZES_GB = tuple(LAYOUTS)
WHOLE_GB = SIZES_GB[-1]


@dataclass(frozen=True)
class BatchJob:
    """A job of the batch.

    size_gb: the slice that it first asks for. run_s: on the whole GPU. slice_s: on any slice; None: as on the whole
    GPU. full_speed_slices: with fewer compute slices it is slower in proportion.
    need_gb: the slice that holds it; None: size_gb. out_of_memory_at: the share of its run after which a smaller one
    is full.
    """

    size_gb: int
    run_s: float
    slice_s: float | None = None
    full_speed_slices: float = 1.0
    need_gb: int | None = None
    out_of_memory_at: float = 1.0

    def __post_init__(self) -> None:
        for size_gb in (self.size_gb, self.size_gb if self.need_gb is None else self.need_gb):
            if size_gb not in LAYOUTS:
                raise ValueError(f"no slice of {size_gb} GB: the sizes are {', '.join(map(str, SIZES_GB))}")
        if not (self.run_s > 0 and (self.slice_s is None or self.slice_s > 0) and 0 < self.out_of_memory_at <= 1):
            raise ValueError(f"run times and shares must be positive: {self}")

    def is_too_small(self, size_gb: int) -> bool:
        """Whether the job runs out of memory on a slice of this size."""
        return self.need_gb is not None and size_gb < self.need_gb

    def seconds_on(self, profile: Profile, size_gb: int) -> float:
        """How long it runs on an instance, to its end or until it is out of memory."""
        whole_s = self.run_s if self.slice_s is None or size_gb == WHOLE_GB else self.slice_s
        run_s = whole_s * max(1.0, self.full_speed_slices / profile.compute)
        return run_s * self.out_of_memory_at if self.is_too_small(size_gb) else run_s


@dataclass(frozen=True)
class SliceRun:
    """One run of a job, by its number in the batch, on an instance. A job that runs out of memory has several."""

    job: int
    placement: Placement
    start_s: float
    end_s: float
    is_out_of_memory: bool


def throughput_gain(jobs: Sequence[BatchJob], runs: Sequence[SliceRun]) -> float:
    """Throughput over that of one job at a time on the whole GPU. Raises ValueError without a run."""
    if not runs:
        raise ValueError("no job has run: a batch needs at least one")
    return sum(job.run_s for job in jobs) / max(run.end_s for run in runs)


def run_scheme_a(jobs: Sequence[BatchJob], *, is_split: bool = False) -> list[SliceRun]:
    """Scheme A: by size, on a layout of equal memory for each; the next size starts when all of this one have ended.

    A job that is out of memory runs again with the next size. is_split: each instance has its own queue with an equal
    share of the jobs, as in the paper's program (5.2.1); otherwise all share one.
    """
    runs: list[SliceRun] = []
    again: list[int] = []
    for size_gb in SIZES_GB:
        begin_s = max((run.end_s for run in runs), default=0.0)
        numbers = [number for number, job in enumerate(jobs) if job.size_gb == size_gb] + again
        made = _run_size(jobs, numbers, size_gb, begin_s, is_split)
        again = [run.job for run in made if run.is_out_of_memory]
        runs += made
    return runs


def _run_size(
    jobs: Sequence[BatchJob], numbers: Sequence[int], size_gb: int, begin_s: float, is_split: bool
) -> list[SliceRun]:
    """The runs of one size. Of instances that are free at once, the one with more compute slices is first."""
    instances = _instances(size_gb)
    free_s = [begin_s] * len(instances)
    runs = []
    for place, number in enumerate(numbers):
        at = place % len(instances) if is_split else free_s.index(min(free_s))
        end_s = free_s[at] + jobs[number].seconds_on(instances[at].profile, size_gb)
        runs.append(SliceRun(number, instances[at], free_s[at], end_s, jobs[number].is_too_small(size_gb)))
        free_s[at] = end_s
    return runs


def _instances(size_gb: int) -> list[Placement]:
    """The instances of scheme A's layout, those with more compute slices first."""
    machine = _machine()
    state = machine.state_of(tuple(LAYOUTS[size_gb].count(shape) for shape in machine.shapes))
    assert state is not None
    return sorted(machine.placements_of(state), key=lambda each: (-each.profile.compute, each.start))


def _machine() -> PartitionStates:
    return partition_states(mig_models()["A100-40"])


def run_scheme_b(jobs: Sequence[BatchJob]) -> list[SliceRun]:
    """Scheme B: in order, and the first job blocks the others.

    It takes an idle instance of its size; else one is created; else idle ones are destroyed for it, the fewest; else it
    waits. A job that is out of memory keeps its place in the order, with the next size.
    """
    gpu = _Gpu()
    queue = [(number, job.size_gb) for number, job in enumerate(jobs)]
    running: list[tuple[float, int, int, int]] = []
    runs: list[SliceRun] = []
    now_s = 0.0
    while queue or running:
        while queue and (bit := gpu.take(queue[0][1])) is not None:
            number, size_gb = heapq.heappop(queue)
            placement = gpu.placement(bit)
            end_s = now_s + jobs[number].seconds_on(placement.profile, size_gb)
            runs.append(SliceRun(number, placement, now_s, end_s, jobs[number].is_too_small(size_gb)))
            heapq.heappush(running, (end_s, number, size_gb, bit))
        now_s = running[0][0]
        while running and running[0][0] == now_s:
            _, number, size_gb, bit = heapq.heappop(running)
            gpu.busy &= ~bit
            if jobs[number].is_too_small(size_gb):
                heapq.heappush(queue, (number, SIZES_GB[SIZES_GB.index(size_gb) + 1]))
    return runs


class _Gpu:
    """The instances of one GPU. busy: the bits of those with a job."""

    def __init__(self) -> None:
        self._machine = _machine()
        self._state = 0
        self.busy = 0

    def placement(self, bit: int) -> Placement:
        return self._machine.placements_of(bit)[0]

    def take(self, size_gb: int) -> int | None:
        """The bit of an instance of this size, which is busy from now on; None if the job must wait."""
        shapes = tuple(dict.fromkeys(LAYOUTS[size_gb]))
        bit = self._idle(shapes) or self._create(shapes) or self._make_room(shapes)
        self.busy |= bit or 0
        return bit

    def _idle(self, shapes: Sequence[str]) -> int | None:
        """An idle instance; of two shapes the one with more compute slices."""
        idle = self._machine.placements_of(self._state & ~self.busy)
        found = [each for each in idle if each.profile.shape in shapes]
        best = max(found, key=lambda each: (each.profile.compute, -each.start), default=None)
        return self._machine.bit(best.profile.shape, best.start) if best else None

    def _create(self, shapes: Sequence[str]) -> int | None:
        """A new instance; of two shapes the one that keeps more final states, then the one with more compute slices."""
        found = [
            (self._rank(self._state | bit, bit), bit)
            for shape in shapes
            if (bit := self._machine.allocate(self._state, shape))
        ]
        if not found:
            return None
        bit = max(found)[1]
        self._state |= bit
        return bit

    def _make_room(self, shapes: Sequence[str]) -> int | None:
        """A new instance in place of the fewest idle ones; of two shapes as above."""
        found = []
        for shape in shapes:
            if made := self._machine.make_room(self._state, self._state & ~self.busy, shape):
                left = self._state & ~made.destroyed | made.created
                found.append((-made.destroyed.bit_count(), self._rank(left, made.created), left, made.created))
        if not found:
            return None
        *_, self._state, bit = max(found)
        return bit

    def _rank(self, state: int, bit: int) -> tuple[int, int]:
        return self._machine.scores[state], self.placement(bit).profile.compute
