"""States of a GPU under MIG: known counts, and an oracle written from the rules, which knows nothing of the class."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache, partial
from itertools import combinations, product

import pytest

from advisor.mig.states import DEFAULT_SHAPES, Creation, PartitionStates, is_placeable, partition_states
from almanac.hardware import MigModel, mig_models

MODELS = mig_models()
SEVEN, FOUR = MODELS["A100-40"], MODELS["A30"]
PLAIN = ("1g", "1g double memory", "2g", "3g", "4g", "7g")
ALL = (*PLAIN, "1g+me", "2g+me")
State = frozenset[tuple[str, int]]
"""The oracle's knowledge: shapes and their starts."""

# Compute slices, memory slices, starts, most: the placement table of NVIDIA's listings.
RULES = {
    "seven": {
        "1g": (1, 1, range(7), 7), "1g+me": (1, 1, range(7), 1), "1g double memory": (1, 2, (0, 2, 4, 6), 4),
        "2g": (2, 2, (0, 2, 4), 3), "3g": (3, 4, (0, 4), 2), "4g": (4, 4, (0,), 1), "7g": (7, 8, (0,), 1),
    },
    "four": {
        "1g": (1, 1, range(4), 4), "1g+me": (1, 1, range(4), 1), "2g": (2, 2, (0, 2), 2), "2g+me": (2, 2, (0, 2), 1),
        "4g": (4, 4, (0,), 1),
    },
}  # fmt: skip
COMPUTE = {"seven": 7, "four": 4}
MACHINES = [("seven", DEFAULT_SHAPES), ("seven", PLAIN), ("seven", ALL), ("four", PLAIN), ("four", ALL)]


def model_of(geometry: str) -> MigModel:
    return SEVEN if geometry == "seven" else FOUR


@cache
def is_legal(geometry: str, state: State) -> bool:
    """By the rules: no memory slice twice, compute slices, maxima, one instance with media extensions."""
    rules = RULES[geometry]
    blocked = [slot for shape, start in state for slot in range(start, start + rules[shape][1])]
    counts = Counter(shape for shape, _ in state)
    return (
        len(blocked) == len(set(blocked))
        and sum(rules[shape][0] for shape, _ in state) <= COMPUTE[geometry]
        and all(number <= rules[shape][3] for shape, number in counts.items())
        and sum(number for shape, number in counts.items() if shape.endswith("+me")) <= 1
        and all(start in rules[shape][2] for shape, start in state)
    )


@cache
def fits(geometry: str, state: State, shape: str) -> tuple[tuple[str, int], ...]:
    """Every placement of the shape that the rules allow in addition to the state's."""
    starts = RULES[geometry][shape][2]
    return tuple((shape, at) for at in starts if (shape, at) not in state and is_legal(geometry, state | {(shape, at)}))


@cache
def all_states(geometry: str, shapes: tuple[str, ...]) -> frozenset[State]:
    """Every legal state, by adding in any order."""
    known = [shape for shape in shapes if shape in RULES[geometry]]
    found: set[State] = {frozenset()}
    frontier = list(found)
    while frontier:
        state = frontier.pop()
        larger = {state | {one} for shape in known for one in fits(geometry, state, shape)} - found
        found |= larger
        frontier.extend(larger)
    return frozenset(found)


def read(machine: PartitionStates, state: int) -> State:
    return frozenset((each.profile.shape, each.start) for each in machine.placements_of(state))


def write(machine: PartitionStates, state: State) -> int:
    return sum(machine.bit(shape, start) for shape, start in state)


def multiset(state: State) -> frozenset[tuple[str, int]]:
    return frozenset(Counter(shape for shape, _ in state).items())


KNOWN = [
    ("seven", DEFAULT_SHAPES, (14, 298, 19, 14, 38)),
    ("seven", PLAIN, (18, 723, 78, 38, 78)),
    ("seven", ALL, (25, 2319, 239, 64, 128)),
    ("four", PLAIN, (7, 26, 5, 4, 10)),
    ("four", ALL, (13, 76, 17, 8, 20)),
]


@pytest.mark.parametrize(("geometry", "shapes", "known"), KNOWN)
def test_counts_are_the_known_ones(geometry: str, shapes: tuple[str, ...], known: tuple[int, ...]) -> None:
    """Placements, states, maximal states, their multisets, and placeable multisets; NVIDIA lists the 19."""
    for model in (each for each in MODELS.values() if each.geometry == geometry):
        made = partition_states(model, shapes)
        counted = (made.placements, list(made.states), made.final_states, made.final_layouts, made.layouts)
        assert tuple(map(len, counted)) == known


@pytest.mark.parametrize(("geometry", "shapes"), MACHINES)
def test_states_scores_and_choices_are_those_of_the_rules(geometry: str, shapes: tuple[str, ...]) -> None:
    machine, states = partition_states(model_of(geometry), shapes), all_states(geometry, shapes)
    assert {read(machine, state) for state in machine.states} == states
    finals = [state for state in states if not any(fits(geometry, state, shape) for shape in machine.shapes)]
    assert {read(machine, state) for state in machine.final_states} == set(finals)
    for state in states:
        number = write(machine, state)
        assert number in machine.states
        assert machine.scores[number] == sum(state <= final for final in finals)
        for shape in machine.shapes:
            allowed = {write(machine, frozenset({one})) for one in fits(geometry, state, shape)}
            chosen, first = machine.allocate(number, shape), machine.allocate_first(number, shape)
            assert first == min(allowed, default=None)
            best = max((machine.scores[number | bit] for bit in allowed), default=0)
            equal = [bit for bit in allowed if machine.scores[number | bit] == best]
            assert chosen == min(equal, default=None)


def test_reachability_has_the_known_scores() -> None:
    machine = partition_states(SEVEN)
    scores = {(each.profile.shape, each.start): machine.scores[1 << bit] for bit, each in enumerate(machine.placements)}
    equal = {**{("1g", start): 6 for start in range(6)}, **{("2g", start): 6 for start in (0, 2, 4)}}
    assert scores == {**equal, ("1g", 6): 12, ("3g", 0): 3, ("3g", 4): 6, ("4g", 0): 3, ("7g", 0): 1}
    assert machine.scores[0] == 19


@pytest.mark.parametrize(("geometry", "shapes"), MACHINES)
def test_feasibility_is_what_enumeration_finds(geometry: str, shapes: tuple[str, ...]) -> None:
    """Of all counts up to one above each maximum; with fixed placements too, in the next test."""
    model = model_of(geometry)
    machine = partition_states(model, shapes)
    placeable = {multiset(state) for state in all_states(geometry, shapes)}
    for layout in product(*(range(RULES[geometry][shape][3] + 2) for shape in machine.shapes)):
        counts = dict(zip(machine.shapes, layout, strict=True))
        expected = frozenset((shape, number) for shape, number in counts.items() if number) in placeable
        assert is_placeable(model, counts) == expected, layout
        state = machine.state_of(layout)
        assert (state is not None) == expected
        assert state is None or machine.layout_of(state) == layout


@pytest.mark.parametrize(("geometry", "shapes"), [MACHINES[0], MACHINES[3], MACHINES[4]])
def test_fixed_placements_stay_where_they_are(geometry: str, shapes: tuple[str, ...]) -> None:
    machine, states = partition_states(model_of(geometry), shapes), all_states(geometry, shapes)
    by_multiset: dict[frozenset[tuple[str, int]], list[State]] = {}
    for state in states:
        by_multiset.setdefault(multiset(state), []).append(state)
    for fixed in states:
        for layout in machine.layouts:
            wanted = frozenset((shape, number) for shape, number in zip(machine.shapes, layout, strict=True) if number)
            holds = [write(machine, state) for state in by_multiset[wanted] if fixed <= state]
            best = max((machine.scores[state] for state in holds), default=0)
            expected = min((state for state in holds if machine.scores[state] == best), default=None)
            assert machine.state_of(layout, write(machine, fixed)) == expected


def fewest_destroyed(geometry: str, state: State, idle: State, shape: str) -> int | None:
    """By trying every set of idle instances, whatever its size."""
    sizes = [
        size
        for size in range(len(idle) + 1)
        if any(fits(geometry, state - set(chosen), shape) for chosen in combinations(sorted(idle), size))
    ]
    return min(sizes, default=None)


def check_room(geometry: str, machine: PartitionStates, state: State, idle: State, shape: str) -> None:
    made = machine.make_room(write(machine, state), write(machine, idle), shape)
    fewest = fewest_destroyed(geometry, state, idle, shape)
    assert (made is None) == (fewest is None)
    if made is not None:
        destroyed, created = read(machine, made.destroyed), read(machine, made.created)
        assert destroyed <= idle and len(destroyed) == fewest
        assert len(created) == 1 and {each for each, _ in created} == {shape}
        assert is_legal(geometry, state - destroyed | created) and not created & (state - destroyed)
        assert made == min(
            (
                Creation(write(machine, frozenset(chosen)), write(machine, frozenset({one})))
                for chosen in combinations(sorted(idle), fewest or 0)
                for one in fits(geometry, state - set(chosen), shape)
            ),
            key=lambda each: (
                -machine.scores[write(machine, state) & ~each.destroyed | each.created],
                each.destroyed,
                each.created,
            ),
        )


@pytest.mark.parametrize(("geometry", "shapes"), [MACHINES[0], MACHINES[3], MACHINES[4]])
def test_fusion_and_fission_destroy_the_fewest_instances(geometry: str, shapes: tuple[str, ...]) -> None:
    """Of every state, each set of idle instances, and each profile."""
    machine = partition_states(model_of(geometry), shapes)
    for state in all_states(geometry, shapes):
        for size in range(len(state) + 1):
            for idle in combinations(sorted(state), size):
                for shape in machine.shapes:
                    check_room(geometry, machine, state, frozenset(idle), shape)


def test_an_illegal_state_and_idle_instances_that_are_not_there_are_refused() -> None:
    machine = partition_states(SEVEN)
    both = machine.bit("4g", 0) | machine.bit("7g", 0)
    assert not {both, -1, 1 << 99} & set(machine.states)
    for state, idle in ((both, both), (1, -1), (1, 1 << 13), (1, 1 << 40), (1, 2)):
        with pytest.raises(ValueError, match="no part of a legal state"):
            machine.make_room(state, idle, "1g")
    with pytest.raises(KeyError):
        machine.allocate(both, "1g")


def test_unknown_shapes_and_layouts() -> None:
    machine = partition_states(SEVEN)
    asks = (partial(machine.allocate, 0), partial(machine.allocate_first, 0), partial(machine.make_room, 0, 0),
            partial(machine.choose_gpu, [0]))  # fmt: skip
    for shape, ask in product(("", "8g", "1g.5gb", "1g+me", "1g\n"), asks):
        with pytest.raises(KeyError):
            ask(shape)
    assert [machine.state_of(each) for each in ((), (0, 0, 0, 0, -1), (8, 0, 0, 0, 0))] == [None] * 3
    with pytest.raises(KeyError):
        is_placeable(SEVEN, {"8g": 1})
    with pytest.raises(ValueError, match="negative count"):
        is_placeable(SEVEN, {"7g": 2, "1g": -7})
    assert is_placeable(SEVEN, {})
    assert partition_states(SEVEN, ()).final_states == (0,)


def test_of_several_gpus_the_first_that_fits_is_taken_at_its_best_place() -> None:
    machine = partition_states(SEVEN)
    states = sorted(machine.states)
    rng = random.Random(7)
    for _ in range(2000):
        gpus, shape = rng.sample(states, rng.randrange(1, 6)), rng.choice(machine.shapes)
        options = [
            (gpu, -machine.scores[state | bit], bit)
            for gpu, state in enumerate(gpus)
            for bit in (write(machine, frozenset({one})) for one in fits("seven", read(machine, state), shape))
        ]
        gpu, _, bit = min(options, default=(None, None, None))
        assert machine.choose_gpu(gpus, shape) == (None if gpu is None else (gpu, bit))
    assert machine.choose_gpu([], "1g") is None
