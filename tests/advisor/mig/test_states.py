"""States of a GPU under MIG: known counts, and an oracle written from the rules, which knows nothing of the class."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest

from advisor.mig.states import DEFAULT_SHAPES, Creation, PartitionStates, Placement, is_placeable, partition_states
from almanac.mig import MigModel, mig_models

MODELS = mig_models()
SEVEN, FOUR = MODELS["A100-40"], MODELS["A30"]
PLAIN = ("1g", "1g double memory", "2g", "3g", "4g", "7g")
ALL = (*PLAIN, "1g+me", "2g+me")
State = frozenset[tuple[str, int]]
"""What the oracle knows: shapes and where they begin."""

# Compute slices, memory slices, starts, most: the placement table of NVIDIA's listings.
RULES = {
    "seven": {
        "1g": (1, 1, range(7), 7),
        "1g+me": (1, 1, range(7), 1),
        "1g double memory": (1, 2, (0, 2, 4, 6), 4),
        "2g": (2, 2, (0, 2, 4), 3),
        "3g": (3, 4, (0, 4), 2),
        "4g": (4, 4, (0,), 1),
        "7g": (7, 8, (0,), 1),
    },
    "four": {
        "1g": (1, 1, range(4), 4),
        "1g+me": (1, 1, range(4), 1),
        "2g": (2, 2, (0, 2), 2),
        "2g+me": (2, 2, (0, 2), 1),
        "4g": (4, 4, (0,), 1),
    },
}
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
    """Every placement of the shape that the rules allow beside the state's."""
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
        assert machine.is_legal(number)
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
    assert scores == {
        **{("1g", start): 6 for start in range(6)},
        ("1g", 6): 12,
        **{("2g", start): 6 for start in (0, 2, 4)},
        ("3g", 0): 3,
        ("3g", 4): 6,
        ("4g", 0): 3,
        ("7g", 0): 1,
    }
    assert machine.scores[0] == 19


@pytest.mark.parametrize("model", [each for each in MODELS.values() if each.geometry == "seven"], ids=lambda m: m.name)
def test_the_drivers_own_first_choice_is_ours(model: MigModel) -> None:
    machine = partition_states(model)
    assert machine.allocate(0, "1g") == machine.bit("1g", 6)
    assert machine.allocate(0, "3g") == machine.bit("3g", 4)
    assert machine.allocate_first(0, "1g") == machine.bit("1g", 0)


def test_placements_hold_the_models_own_profiles() -> None:
    for model in MODELS.values():
        machine = partition_states(model, ALL)
        assert {each.profile for each in machine.placements} == set(model.profiles)
    a100, h100 = partition_states(SEVEN), partition_states(MODELS["H100-80"])
    assert a100.scores is h100.scores  # one table for one geometry
    assert h100.placements_of(1)[0].profile.name == "1g.10gb"
    assert h100.placements_of(h100.bit("7g", 0))[0].profile.sms == 132


def test_a_placement_blocks_its_memory_slices() -> None:
    profile = SEVEN.profile("3g")
    assert profile is not None
    assert Placement(profile, 4).memory_mask == 0b11110000
    # 3g blocks four memory slices, so that 1g:4 beside it fill the GPU, and a fifth 1g at 4 to 6 does not fit.
    machine = partition_states(SEVEN)
    state = machine.bit("3g", 4)
    for _ in range(4):
        bit = machine.allocate(state, "1g")
        assert bit is not None
        state |= bit
    assert machine.allocate(state, "1g") is None


SEQUENCES = {("seven", DEFAULT_SHAPES): 40_000, ("seven", ALL): 40_000, ("four", ALL): 20_000}


def steps(machine: PartitionStates, rng: random.Random) -> Iterator[tuple[int, str, int | None, int]]:
    """State, shape, placement, next state: of a sequence with placements of either kind, removals, and destruction."""
    state = 0
    for _ in range(rng.randrange(2, 25)):
        shape, kind = rng.choice(machine.shapes), rng.random()
        if kind < 0.3 and state:
            following = state & ~(1 << rng.choice([bit for bit in range(state.bit_length()) if state >> bit & 1]))
            yield state, "", None, following
        elif kind < 0.4:
            idle = state & rng.getrandbits(len(machine.placements))
            made = machine.make_room(state, idle, shape)
            following = state if made is None else state & ~made.destroyed | made.created
            assert following & state & ~idle == state & ~idle, "an instance in use was destroyed"
            yield state, "", None, following
        else:
            bit = (machine.allocate if kind < 0.8 else machine.allocate_first)(state, shape)
            following = state | (bit or 0)
            yield state, shape, bit, following
        state = following


@pytest.mark.parametrize(("geometry", "shapes"), SEQUENCES)
def test_random_sequences_of_placements_and_removals_are_legal(geometry: str, shapes: tuple[str, ...]) -> None:
    """100,000 of them. A refusal has to be right too: the rules allow no placement then."""
    machine, rng, refused = partition_states(model_of(geometry), shapes), random.Random(20), 0
    as_rules: dict[int, State] = {}
    for _ in range(SEQUENCES[geometry, shapes]):
        for state, shape, bit, following in steps(machine, rng):
            for each in (state, following):
                if each not in as_rules:
                    as_rules[each] = read(machine, each)
            assert is_legal(geometry, as_rules[following])
            if shape and bit is None:
                assert fits(geometry, as_rules[state], shape) == ()
                refused += 1
    assert refused > 1000
    assert len(as_rules) > 0.6 * len(machine.scores)


def counts_up_to_one_too_many(geometry: str, machine: PartitionStates) -> Iterator[tuple[int, ...]]:
    yield from product(*(range(RULES[geometry][shape][3] + 2) for shape in machine.shapes))


@pytest.mark.parametrize(("geometry", "shapes"), MACHINES)
def test_feasibility_is_what_enumeration_finds(geometry: str, shapes: tuple[str, ...]) -> None:
    """Of all counts up to one above each maximum; with fixed placements too, in the next test."""
    model = model_of(geometry)
    machine = partition_states(model, shapes)
    placeable = {multiset(state) for state in all_states(geometry, shapes)}
    for layout in counts_up_to_one_too_many(geometry, machine):
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


def test_fusion_and_fission_with_all_profiles() -> None:
    machine, rng = partition_states(SEVEN, ALL), random.Random(3)
    states = sorted(all_states("seven", ALL), key=sorted)
    for _ in range(3000):
        state = rng.choice(states)
        idle = frozenset(each for each in state if rng.random() < 0.7)
        check_room("seven", machine, state, idle, rng.choice(machine.shapes))


def test_fusion_and_fission_by_example() -> None:
    machine = partition_states(SEVEN)
    ones = sum(machine.bit("1g", start) for start in range(7))
    # Fusion: a 2g needs two neighbors, of three pairs the one that keeps the most final states; with one busy at 4, 5
    # remains alone.
    made = machine.make_room(ones, ones, "2g")
    assert made == Creation(machine.bit("1g", 0) | machine.bit("1g", 1), machine.bit("2g", 0))
    made = machine.make_room(ones, ones & ~machine.bit("1g", 0) & ~machine.bit("1g", 4), "2g")
    assert made == Creation(machine.bit("1g", 2) | machine.bit("1g", 3), machine.bit("2g", 2))
    # Fission: the whole GPU goes for one 1g, which lies where most can follow.
    whole = machine.bit("7g", 0)
    assert machine.make_room(whole, whole, "1g") == Creation(whole, machine.bit("1g", 6))
    assert machine.make_room(whole, 0, "1g") is None
    # Nothing is destroyed where there is room.
    assert machine.make_room(machine.bit("4g", 0), machine.bit("4g", 0), "3g") == Creation(0, machine.bit("3g", 4))


@pytest.mark.parametrize("idle", [-1, 1 << 13, 1 << 40, 2])
def test_instances_that_are_not_there_cannot_be_idle(idle: int) -> None:
    machine = partition_states(SEVEN)
    with pytest.raises(ValueError, match="no part of a legal state"):
        machine.make_room(1, idle, "1g")


def test_an_illegal_state_is_refused() -> None:
    machine = partition_states(SEVEN)
    both = machine.bit("4g", 0) | machine.bit("7g", 0)
    assert not machine.is_legal(both) and not machine.is_legal(-1) and not machine.is_legal(1 << 99)
    with pytest.raises(ValueError, match="no part of a legal state"):
        machine.make_room(both, both, "1g")
    with pytest.raises(KeyError):
        machine.allocate(both, "1g")


def test_unknown_shapes_and_layouts() -> None:
    machine = partition_states(SEVEN)
    for shape in ("", "8g", "1g.5gb", "1g+me", "1g\n"):
        with pytest.raises(KeyError):
            machine.allocate(0, shape)
        with pytest.raises(KeyError):
            machine.allocate_first(0, shape)
        with pytest.raises(KeyError):
            machine.make_room(0, 0, shape)
        with pytest.raises(KeyError):
            machine.choose_gpu([0], shape)
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


def test_small_instances_leave_whole_gpus_free() -> None:
    """The score of a lone 1g on an empty GPU is higher than that of a second one on the first: it must not decide."""
    machine = partition_states(SEVEN)
    gpus = [0, 0]
    for _ in range(7):
        gpu, bit = machine.choose_gpu(gpus, "1g") or (None, 0)
        assert gpu == 0
        gpus[0] |= bit
    assert machine.choose_gpu(gpus, "7g") == (1, machine.bit("7g", 0))
    assert machine.choose_gpu([0, 0], "3g") == (0, machine.bit("3g", 4)), "inside a GPU the reachability decides"


def test_maxima_and_compute_slices_count_where_memory_alone_would_do() -> None:
    """On today's models memory implies both; a driver's listing may say otherwise."""
    two = [replace(each, most=2) for each in SEVEN.profiles if each.shape == "1g"]
    assert PartitionStates(two, 7).layouts == ((0,), (1,), (2,))
    three = [replace(each, compute=2) for each in SEVEN.profiles if each.shape == "1g"]
    assert PartitionStates(three, 7).layouts == ((0,), (1,), (2,), (3,))
    model = replace(SEVEN, profiles=(*two, SEVEN.whole))
    assert is_placeable(model, {"1g": 2}) and not is_placeable(model, {"1g": 3})
