"""Schemes A and B of a paper on MIG (its section 4.3), and the jobs that two placement rules refuse (4.2).

The paper is "Managing Multi Instance GPUs for High Throughput and Energy Savings". Schemes run a batch of jobs on one
A100-40. Here, a change of layout takes no time, and instances do not slow each other down. Slices have the paper's
nominal sizes: 5, 10, 20, and 40 GB. Rules place jobs on the first GPU with room: at the first place that fits, or the
best one by reachability. Instances are created and destroyed one by one next to busy ones, in no time. A job without a
place on any GPU is lost.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from advisor.events import JobLoop
from advisor.mig.states import WHOLE, PartitionStates, Placement, partition_states
from almanac.hardware import MigModel, MigProfile, mig_models
from simulator.traces.mig import SliceRequest

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
        """Return True if the job runs out of memory on a slice of this size."""
        return self.need_gb is not None and size_gb < self.need_gb

    def seconds_on(self, profile: MigProfile, size_gb: int) -> float:
        """Seconds on an instance, to the end of the job or until it is out of memory."""
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
    return _SchemeA(jobs, is_split).runs()


def run_scheme_b(jobs: Sequence[BatchJob]) -> list[SliceRun]:
    """Scheme B: in order, and the first job blocks the others.

    It takes an idle instance of its size; else one is created; else idle ones are destroyed for it, the fewest; else it
    waits. A job that is out of memory keeps its place in the order, with the next size.
    """
    return _SchemeB(jobs).runs()


class _Batch(JobLoop):
    """Jobs that are all there at time 0, and the sizes that they ask for next."""

    def __init__(self, jobs: Sequence[BatchJob]) -> None:
        super().__init__([0.0] * len(jobs))
        self.jobs, self.sizes_gb = jobs, [job.size_gb for job in jobs]
        self._runs: list[SliceRun] = []

    def runs(self) -> list[SliceRun]:
        self.run()
        return self._runs

    def start_on(self, job: int, placement: Placement) -> None:
        size_gb = self.sizes_gb[job]
        self.start(job, self.jobs[job].seconds_on(placement.profile, size_gb))
        is_out_of_memory = self.jobs[job].is_too_small(size_gb)
        self._runs.append(SliceRun(job, placement, self.now_s, self.end_s[job], is_out_of_memory))

    def ended(self, job: int) -> None:
        size_gb = self.sizes_gb[job]
        if self.jobs[job].is_too_small(size_gb):
            self.sizes_gb[job] = SIZES_GB[SIZES_GB.index(size_gb) + 1]
            self.submitted(job)


class _SchemeA(_Batch):
    """Of instances that are free at once, the one with more compute slices takes the next job."""

    def __init__(self, jobs: Sequence[BatchJob], is_split: bool) -> None:
        super().__init__(jobs)
        self._is_split = is_split
        self._waiting: dict[int, list[int]] = {size_gb: [] for size_gb in SIZES_GB}
        self._instances: list[tuple[Placement, deque[int]]] = []
        self._jobs_on: dict[int, int] = {}
        """Place in _instances to its job."""

    def submitted(self, job: int) -> None:
        self._waiting[self.sizes_gb[job]].append(job)

    def ended(self, job: int) -> None:
        super().ended(job)
        del self._jobs_on[next(place for place, other in self._jobs_on.items() if other == job)]

    def settle(self) -> None:
        if not self.speeds and not any(queue for _, queue in self._instances):
            self._cut_for_next_size()
        for place, (placement, queue) in enumerate(self._instances):
            if queue and place not in self._jobs_on:
                self._jobs_on[place] = queue.popleft()
                self.start_on(self._jobs_on[place], placement)

    def _cut_for_next_size(self) -> None:
        size_gb = next((size_gb for size_gb, jobs in self._waiting.items() if jobs), WHOLE_GB)
        jobs, instances = self._waiting.pop(size_gb, []), _instances(size_gb)
        queues = [deque(jobs[place :: len(instances)]) for place in range(len(instances))]
        self._instances = list(zip(instances, queues if self._is_split else [deque(jobs)] * len(queues), strict=True))


def _instances(size_gb: int) -> list[Placement]:
    """The instances of scheme A's layout, those with more compute slices first."""
    machine = _machine()
    state = machine.state_of(tuple(LAYOUTS[size_gb].count(shape) for shape in machine.shapes))
    assert state is not None
    return sorted(machine.placements_of(state), key=lambda each: (-each.profile.compute, each.start))


def _machine() -> PartitionStates:
    return partition_states(mig_models()["A100-40"])


class _SchemeB(_Batch):
    def __init__(self, jobs: Sequence[BatchJob]) -> None:
        super().__init__(jobs)
        self._gpu = _Gpu()
        self._queue: list[int] = []
        self._bits: dict[int, int] = {}

    def submitted(self, job: int) -> None:
        insort(self._queue, job)

    def ended(self, job: int) -> None:
        super().ended(job)
        self._gpu.busy &= ~self._bits[job]

    def settle(self) -> None:
        while self._queue and (bit := self._gpu.take(self.sizes_gb[self._queue[0]])) is not None:
            job = self._queue.pop(0)
            self._bits[job] = bit
            self.start_on(job, self._gpu.placement(bit))


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


_Choose = Callable[[Sequence[int], str], tuple[int, int] | None]
"""GPU and bit of a new instance of a shape, by the states of the GPUs."""


@dataclass(frozen=True)
class Refusals:
    """Shares of the jobs that were refused, in 0..1."""

    first_fit: float
    reachability: float


def count_refusals(jobs: Sequence[SliceRequest], model: MigModel, gpus: int) -> Refusals:
    """Count the refusals of both rules on the same jobs; each job gets an instance of its own shape."""
    states = partition_states(model)
    return Refusals(
        *(_refused(_LossyJobs(jobs, model, gpus, choose)) for choose in (_first_fit(states), states.choose_gpu))
    )


def _refused(run: _LossyJobs) -> float:
    run.run()
    return run.refused / max(1, len(run.jobs))


class _LossyJobs(JobLoop):
    """Jobs that run at once or never."""

    def __init__(self, jobs: Sequence[SliceRequest], model: MigModel, gpus: int, choose: _Choose) -> None:
        super().__init__([job.submit_s for job in jobs])
        self.jobs, self.refused = jobs, 0
        self._whole, self._choose = model.whole.shape, choose
        self._compute = {each.shape: each.compute for each in model.profiles}
        self._states = [0] * gpus
        self._places: dict[int, tuple[int, int]] = {}

    def submitted(self, job: int) -> None:
        each = self.jobs[job]
        shape = self._whole if each.shape == WHOLE else each.shape
        found = self._choose(self._states, shape)
        if found is None:
            self.refused += 1
            return
        self._places[job] = gpu, bit = found
        self._states[gpu] |= bit
        self.start(job, each.full_s * max(1.0, each.compute / self._compute[shape]))

    def ended(self, job: int) -> None:
        gpu, bit = self._places[job]
        self._states[gpu] ^= bit


def _first_fit(states: PartitionStates) -> _Choose:
    def choose(now: Sequence[int], shape: str) -> tuple[int, int] | None:
        bits = ((gpu, states.allocate_first(state, shape)) for gpu, state in enumerate(now))
        return next(((gpu, bit) for gpu, bit in bits if bit is not None), None)

    return choose
