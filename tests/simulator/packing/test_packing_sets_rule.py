"""The topology rule of packing against a definition of its own, on every placement of small clusters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, combinations, permutations, product

import pytest
from packing_rule import State, follows_rule

from simulator.policies.packing import Gpus, PackingNodes, choose_gpus


def subsets(nodes: PackingNodes) -> list[Gpus]:
    gpus = range(len(nodes.node_of))
    found = chain.from_iterable(combinations(gpus, count) for count in range(1, len(gpus) + 1))
    return [frozenset(each) for each in found]


def symmetries(nodes: PackingNodes) -> list[tuple[int, ...]]:
    """Renumberings of GPUs that keep nodes together."""
    by_node = [[g for g, on in enumerate(nodes.node_of) if on == node] for node in sorted(set(nodes.node_of))]
    found = []
    for order in permutations(range(len(by_node))):
        if all(len(by_node[old]) == len(by_node[new]) for old, new in enumerate(order)):
            for inner in product(*(permutations(by_node[new]) for new in order)):
                moved = dict(zip(chain(*by_node), chain(*inner), strict=True))
                found.append(tuple(moved[gpu] for gpu in range(len(nodes.node_of))))
    return found


Moves = list[dict[Gpus, int]]


def moved_masks(nodes: PackingNodes) -> Moves:
    """For each symmetry, the bits of each set of GPUs after it."""
    return [{gpus: sum(1 << move[gpu] for gpu in gpus) for gpus in subsets(nodes)} for move in symmetries(nodes)]


def canonical(jobs: State, moves: Moves) -> tuple[int, ...]:
    """One name for all placements that differ in the numbers of GPUs."""
    return min(tuple(sorted([masks[job] for job in jobs])) for masks in moves)


def reachable(nodes: PackingNodes) -> Iterator[tuple[State, set[Gpus]]]:
    """Every placement that the rule can lead to, one of each symmetry, with the GPUs that a next job may take."""
    moves, candidates = moved_masks(nodes), subsets(nodes)
    seen, todo = {canonical((), moves)}, [()]
    while todo:
        jobs: State = todo.pop()
        allowed = {gpus for gpus in candidates if follows_rule((*jobs, gpus), nodes)}
        yield jobs, allowed
        for gpus in allowed:
            name = canonical((*jobs, gpus), moves)
            if name not in seen:
                seen.add(name)
                todo.append((*jobs, gpus))


LAYOUTS = [(0, 0, 0, 0), (0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 2, 3), (0, 0, 0, 1, 1)]
SIX = [(0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 2, 2), (0, 0, 0, 0, 1, 1), (0, 0, 0, 0, 0, 0)]


@pytest.mark.parametrize("node_of", LAYOUTS + SIX, ids=lambda node_of: "".join(map(str, node_of)))
def test_what_the_rule_allows_is_chosen_and_nothing_else(node_of: tuple[int, ...]) -> None:
    nodes = PackingNodes(node_of)
    states = list(reachable(nodes))
    assert len(states) > 80
    for jobs, allowed in states:
        for count in range(1, len(node_of) + 1):
            check_choice(count, jobs, {gpus for gpus in allowed if len(gpus) == count}, nodes)


def check_choice(count: int, jobs: State, allowed: set[Gpus], nodes: PackingNodes) -> None:
    """A choice exists exactly where one is allowed, with all jobs and with every second one.

    Free GPUs come first. Of shared ones, none have a larger least gain.
    """
    gains = [1 + (3 * job % 7) / 10 for job in range(len(jobs))]

    def value(gpus: Gpus) -> float:
        return min((gains[job] for job, own in enumerate(jobs) if own & gpus), default=math.inf)

    for willing in (set(range(len(jobs))), set(range(0, len(jobs), 2))):
        fitting = {gpus for gpus in allowed if all(job in willing for job, own in enumerate(jobs) if own & gpus)}
        choice = choose_gpus(
            count, dict(enumerate(jobs)), nodes, lambda job, kept=willing: gains[job] if job in kept else None
        )
        assert (choice is not None) == bool(fitting), (jobs, count)
        if choice is not None:
            assert choice in fitting, (jobs, count)
            assert value(choice) == max(map(value, fitting)), (jobs, count)


def test_the_best_gain_wins() -> None:
    """Three jobs of one GPU: the new one joins the one of the largest gain; nobody willing, nobody joined."""
    nodes = PackingNodes.uniform(3, 3)
    placed = {job: frozenset((job,)) for job in range(3)}
    gains = {0: 1.2, 1: 1.7, 2: 1.5}
    choice = choose_gpus(1, placed, nodes, gains.get)
    assert choice == {1}
    assert choose_gpus(1, placed, nodes, lambda job: None) is None


def test_a_job_on_full_nodes_prefers_to_leave_free_nodes_whole() -> None:
    nodes = PackingNodes.uniform(8, 4)
    choice = choose_gpus(2, {0: frozenset((4, 5))}, nodes, lambda job: 2.0)
    assert choice == {6, 7}


@pytest.mark.parametrize("count", [-1, 0, 4])
def test_no_gpus_are_chosen_for_none_and_for_more_than_there_are(count: int) -> None:
    assert choose_gpus(count, {}, PackingNodes.uniform(3, 2), lambda job: 1.0) is None
