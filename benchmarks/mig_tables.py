"""MIG states: time to make every table, time of a placement, and 100,000 random sequences of placements and removals.

Run: python benchmarks/mig_tables.py. Times are CPU seconds of this process.
"""

from __future__ import annotations

import random
import time
from collections import Counter

from figures import Figure, at_most, exactly, main

from advisor.mig.states import DEFAULT_SHAPES, PartitionStates, Placement, partition_states
from almanac.mig import mig_models

SEQUENCES, SEED = 100_000, 20


def all_tables() -> list[PartitionStates]:
    """Of every model: the usual profiles, those without media extensions, and all."""
    machines = []
    for model in mig_models().values():
        plain = [each.shape for each in model.profiles if not each.has_media]
        every = [each.shape for each in model.profiles]
        machines += [partition_states(model, shapes) for shapes in (DEFAULT_SHAPES, plain, every)]
    return machines


def slowest_placement_us(machine: PartitionStates) -> float:
    """The slowest tenth of a percent of all look-ups: state by state, profile by profile."""
    taken = []
    for state in machine.states:
        for shape in machine.shapes:
            started = time.perf_counter_ns()
            machine.allocate(state, shape)
            taken.append(time.perf_counter_ns() - started)
    return sorted(taken)[int(0.999 * len(taken))] / 1000


def mean_us(machine: PartitionStates, gpus: int) -> float:
    """One GPU: a placement. Several: the choice of the GPU too."""
    rng = random.Random(SEED)
    states = rng.choices(sorted(machine.states), k=gpus)
    started = time.process_time()
    for _ in range(20_000):
        if gpus == 1:
            machine.allocate(states[0], "1g")
        else:
            machine.choose_gpu(states, "1g")
    return (time.process_time() - started) / 20_000 * 1e6


def breaks_a_rule(placements: tuple[Placement, ...]) -> bool:
    """By the rules of the placement table, whatever the class says."""
    slots = [slot for each in placements for slot in range(each.start, each.start + each.profile.memory)]
    counts = Counter(each.profile for each in placements)
    return (
        len(slots) != len(set(slots))
        or sum(each.profile.compute for each in placements) > 7
        or any(number > profile.most for profile, number in counts.items())
        or sum(each.profile.has_media for each in placements) > 1
    )


def illegal_sequences(machine: PartitionStates) -> int:
    rng, broken = random.Random(SEED), 0
    verdicts: dict[int, bool] = {}
    for _ in range(SEQUENCES):
        state, seen = 0, set()
        for _ in range(rng.randrange(2, 20)):
            if state and rng.random() < 0.35:
                state &= ~rng.choice([1 << bit for bit in range(state.bit_length()) if state >> bit & 1])
            else:
                choose = machine.allocate if rng.random() < 0.5 else machine.allocate_first
                state |= choose(state, rng.choice(machine.shapes)) or 0
            seen.add(state)
        for each in seen - verdicts.keys():
            verdicts[each] = breaks_a_rule(machine.placements_of(each))
        broken += any(verdicts[each] for each in seen)
    return broken


def measure() -> list[Figure]:
    started = time.process_time()
    machines = all_tables()
    tables_s = time.process_time() - started
    largest = max(machines, key=lambda each: len(each.scores))
    one_us, eight_us, slowest_us = mean_us(largest, 1), mean_us(largest, 8), slowest_placement_us(largest)
    broken = illegal_sequences(largest)
    return [
        Figure(f"all {len(machines)} tables of {len(mig_models())} models, s", tables_s, "below 0.5", tables_s < 0.5),
        exactly("states of the largest table", len(largest.scores), 2319),
        at_most("a placement, us", one_us, 20),
        at_most("a placement, slowest 0.1%, us", slowest_us, 20),
        at_most("a placement on one of 8 GPUs, us", eight_us, 20),
        exactly(f"illegal of {SEQUENCES:,} random sequences", broken, 0),
    ]


if __name__ == "__main__":
    main(measure)
