"""The legal states of a GPU under MIG, the way from one to the next, and the sizes it can be cut into. Pure.

A state (Saraha et al., 4.2) is a set of placements: a profile and the memory slice that it begins at. It is
written as an integer with one bit for each placement of the machine, so that a look-up costs a dictionary's. A state is
legal if no memory slice is taken twice, the compute slices suffice, no profile has more instances than its maximum, and
at most one instance has the media extensions. It is final if nothing can be added.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import combinations

from almanac.hardware import MigModel, MigProfile

DEFAULT_SHAPES = ("1g", "2g", "3g", "4g", "7g")
"""The profiles that sites lay out. +me instances differ by their media engines only."""
Layout = tuple[int, ...]
"""Instances of each profile of a machine, in its order."""


@dataclass(frozen=True)
class Placement:
    """An instance of a profile that begins at a memory slice."""

    profile: MigProfile
    start: int

    @property
    def memory_mask(self) -> int:
        """The memory slices that it blocks, one bit each."""
        return ((1 << self.profile.memory) - 1) << self.start


@dataclass(frozen=True)
class Creation:
    """A way to make room for one instance: the placements to destroy, bit by bit, and the one to create."""

    destroyed: int
    created: int


class PartitionStates:
    """The partition state machine of one geometry with some of its profiles.

    shapes: of the profiles, in the geometry's order; methods name a profile by its shape, such as "1g", and raise
    KeyError for one that the machine lacks. placements: by profile, then start; bit i of a state is placements[i].
    scores: reachability by legal state: the number of final states that legal additions reach (Saraha et al.,
    algorithm 2).
    """

    def __init__(self, profiles: Sequence[MigProfile], compute_slices: int) -> None:
        self.shapes = tuple(each.shape for each in profiles)
        self.compute_slices = compute_slices
        self.placements = _placements(profiles)
        self._number = {(each.profile.shape, each.start): number for number, each in enumerate(self.placements)}
        self._of_shape = {
            shape: [number for number, each in enumerate(self.placements) if each.profile.shape == shape]
            for shape in self.shapes
        }
        self._masks = [each.memory_mask for each in self.placements]
        self._successors = self._enumerate()
        self.scores = self._score()
        self._best = {(state, shape): self._choose(state, shape) for state in self._successors for shape in self.shapes}
        self._states_of = self._by_layout()

    @property
    def states(self) -> Iterable[int]:
        """Every legal state, the empty one included."""
        return self.scores.keys()

    @property
    def final_states(self) -> tuple[int, ...]:
        """The states that nothing can be added to."""
        return tuple(state for state, added in self._successors.items() if not added)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Every multiset of instances that some legal state holds, the empty one included."""
        return tuple(self._states_of)

    @property
    def final_layouts(self) -> tuple[Layout, ...]:
        """The multisets of the final states."""
        return tuple(dict.fromkeys(map(self.layout_of, self.final_states)))

    def bit(self, shape: str, start: int) -> int:
        """The bit of a placement."""
        return 1 << self._number[shape, start]

    def placements_of(self, state: int) -> tuple[Placement, ...]:
        """The placements of a state."""
        return tuple(self.placements[number] for number in _bits(state))

    def layout_of(self, state: int) -> Layout:
        """Count the instances of each profile in a state."""
        return tuple((state & sum(1 << number for number in own)).bit_count() for own in self._of_shape.values())

    def allocate(self, state: int, shape: str) -> int | None:
        """The bit of the placement whose successor has the highest reachability; None where nothing fits.

        Saraha et al., algorithm 3. Of equal ones the first start is taken, as the paper has no rule.
        """
        return self._best[state, shape]

    def allocate_first(self, state: int, shape: str) -> int | None:
        """The bit of the first placement that fits (first fit); None where nothing fits."""
        added = self._successors[state]
        return next((1 << number for number in self._of_shape[shape] if added >> number & 1), None)

    def choose_gpu(self, states: Sequence[int], shape: str) -> tuple[int, int] | None:
        """Return the first GPU that an instance fits on, and the bit of its best placement there; None if none fits.

        Packing the first GPUs keeps whole ones free. Scores compared across GPUs would spread small instances over
        empty GPUs, which then refuse large ones.
        """
        for gpu, state in enumerate(states):
            bit = self._best[state, shape]
            if bit is not None:
                return gpu, bit
        return None

    def state_of(self, layout: Layout, fixed: int = 0) -> int | None:
        """A legal state with these instances that keeps the placements `fixed`; None if there is no such state.

        Of several the one with the highest reachability, then the lowest bits.
        """
        fits = [state for state in self._states_of.get(layout, ()) if state & fixed == fixed]
        return min(fits, key=lambda state: (-self.scores[state], state), default=None)

    def make_room(self, state: int, idle: int, shape: str) -> Creation | None:
        """The fewest idle instances to destroy so that one of `shape` can be created; None if all of them are too few.

        Fusion (several small ones become a large one) and fission (a large one is destroyed for a small one) both
        follow from this. Of equal numbers the successor with the highest reachability wins, then the lowest bits.
        idle: the part of `state` that no job uses. Raises ValueError if it is no part of it, or if state is illegal.
        """
        if idle & ~state or state not in self.scores:
            raise ValueError(f"idle {idle:b} is no part of a legal state {state:b}")
        return self._make_room(state, idle, shape)

    @lru_cache(maxsize=1 << 16)  # noqa: B019 - machines live as long as the process
    def _make_room(self, state: int, idle: int, shape: str) -> Creation | None:
        idle_bits = [1 << number for number in _bits(idle)]
        for size in range(len(idle_bits) + 1):
            found = []
            for chosen in combinations(idle_bits, size):
                kept = state & ~sum(chosen)
                bit = self._best[kept, shape]
                if bit is not None:
                    found.append((-self.scores[kept | bit], sum(chosen), bit))
            if found:
                return Creation(*min(found)[1:])
        return None

    def _enumerate(self) -> dict[int, int]:
        """By legal state the bits that can be added."""
        successors: dict[int, int] = {}
        frontier = [0]
        while frontier:
            state = frontier.pop()
            if state in successors:
                continue
            added = [number for number in range(len(self.placements)) if self._can_add(state, number)]
            successors[state] = sum(1 << number for number in added)
            frontier.extend(state | 1 << number for number in added)
        return successors

    def _can_add(self, state: int, number: int) -> bool:
        added, compute, same, media = self.placements[number].profile, 0, 0, 0
        for other in _bits(state):
            if self._masks[other] & self._masks[number]:
                return False
            profile = self.placements[other].profile
            compute += profile.compute
            same += profile.shape == added.shape
            media += profile.has_media
        return compute + added.compute <= self.compute_slices and same < added.most and not (media and added.has_media)

    def _score(self) -> dict[int, int]:
        """A final state is reached from each of its parts, since parts of legal states are legal."""
        scores = dict.fromkeys(self._successors, 0)
        for final in self.final_states:
            part = final
            while True:
                scores[part] += 1
                if not part:
                    break
                part = (part - 1) & final
        return scores

    def _choose(self, state: int, shape: str) -> int | None:
        added = self._successors[state]
        fits = [1 << number for number in self._of_shape[shape] if added >> number & 1]
        return max(fits, key=lambda bit: (self.scores[state | bit], -bit), default=None)

    def _by_layout(self) -> dict[Layout, list[int]]:
        found: dict[Layout, list[int]] = {}
        for state in self.scores:
            found.setdefault(self.layout_of(state), []).append(state)
        return found


def partition_states(model: MigModel, shapes: Iterable[str] = DEFAULT_SHAPES) -> PartitionStates:
    """The state machine of a model with the profiles of these shapes (those that the model lacks are left out).

    Models of one geometry share its tables and its bits; the placements hold the model's own profiles.
    """
    wanted = frozenset(shapes)
    return _partition_states(tuple(each for each in model.profiles if each.shape in wanted), model.compute_slices)


@cache
def _partition_states(profiles: tuple[MigProfile, ...], compute_slices: int) -> PartitionStates:
    bare = tuple(replace(each, name=each.shape, sms=None, memory_gib=None) for each in profiles)
    if bare == profiles:
        return PartitionStates(profiles, compute_slices)
    machine = copy.copy(_partition_states(bare, compute_slices))
    machine.placements = _placements(profiles)
    return machine


def is_placeable(model: MigModel, counts: Mapping[str, int]) -> bool:
    """Return True if a GPU of the model holds these instances, by shape (checked against enumeration).

    Memory and compute slices, each profile's maximum, and the one instance with media extensions decide. Raises
    KeyError for unknown shapes, ValueError for negative counts.
    """
    profiles = {each.shape: each for each in model.profiles}
    wanted = [(profiles[shape], number) for shape, number in counts.items()]
    if any(number < 0 for _, number in wanted):
        raise ValueError(f"negative count of instances in {dict(counts)}")
    return (
        sum(profile.memory * number for profile, number in wanted) <= model.memory_slices
        and sum(profile.compute * number for profile, number in wanted) <= model.compute_slices
        and sum(number for profile, number in wanted if profile.has_media) <= 1
        and all(number <= profile.most for profile, number in wanted)
    )


def _placements(profiles: Sequence[MigProfile]) -> tuple[Placement, ...]:
    return tuple(Placement(profile, start) for profile in profiles for start in profile.starts)


def _bits(state: int) -> Iterator[int]:
    while state:
        low = state & -state
        yield low.bit_length() - 1
        state ^= low


WHOLE = "gpu"
"""The shape of a GPU with MIG off."""
Counts = tuple[int, ...]
"""Instances of each size, from the smallest size up."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of one model, from the smallest up: each holds every job of a smaller one. The last one is WHOLE.

    compute: compute slices of each size. layouts: instances of each GPU layout that nothing can be added to.
    """

    shapes: tuple[str, ...]
    compute: tuple[int, ...]
    layouts: tuple[Counts, ...]

    def index(self, shape: str) -> int | None:
        """The place of a shape; None if it is not one of these sizes."""
        return self.shapes.index(shape) if shape in self.shapes else None

    def counts(self, gpus: Iterable[Sequence[str]]) -> Counts | None:
        """Instances of each size on several GPUs; None if one has a shape that is not one of these sizes."""
        found = [0] * len(self.shapes)
        for layout in gpus:
            for shape in layout:
                if shape not in self.shapes:
                    return None
                found[self.shapes.index(shape)] += 1
        return tuple(found)

    def gpu_layout(self, counts: Counts) -> tuple[str, ...]:
        """The sorted shapes of one GPU."""
        return tuple(sorted(shape for shape, count in zip(self.shapes, counts, strict=True) for _ in range(count)))

    def run_times(self, full_s: float, compute: float) -> tuple[float, ...]:
        """Seconds on each size, of a job that takes full_s on a full GPU and keeps `compute` slices busy.

        full_s x max(1, compute / slices), as in the paper's mixes (design/mig.md, Ml2).
        """
        return tuple(full_s * max(1.0, compute / slices) for slices in self.compute)


@cache
def sizes_of(model: MigModel) -> Sizes:
    """The default sizes of a model, with the whole GPU without MIG in place of its largest profile."""
    states = partition_states(model, DEFAULT_SHAPES)
    compute = {each.shape: each.compute for each in model.profiles}
    shapes = [shape for shape in states.shapes if shape != model.whole.shape]
    keep = [states.shapes.index(shape) for shape in shapes]
    whole = states.shapes.index(model.whole.shape)
    layouts = [(*(counts[place] for place in keep), counts[whole]) for counts in states.final_layouts]
    return Sizes((*shapes, WHOLE), (*(compute[shape] for shape in shapes), model.whole.compute), tuple(sorted(layouts)))
