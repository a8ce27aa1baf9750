"""The topology rule of packing as it is stated."""

from __future__ import annotations

from simulator.policies.packing import Gpus, PackingNodes

State = tuple[Gpus, ...]


def follows_rule(jobs: State, nodes: PackingNodes) -> bool:
    """The rule as it is stated, for a whole placement, without a thought for speed."""
    for gpu in range(len(nodes.node_of)):
        if sum(gpu in job for job in jobs) > 2:
            return False
    for job in jobs:
        on = len({nodes.node_of[gpu] for gpu in job})
        sizes = sorted((nodes.node_of.count(node) for node in set(nodes.node_of)), reverse=True)
        if sum(sizes[: on - 1]) >= len(job):
            return False
    for place, job in enumerate(jobs):
        others = [other for number, other in enumerate(jobs) if number != place and job & other]
        if any(len(other) == len(job) and other != job for other in others):
            return False
        if any(len(other) >= len(job) for other in others) and len(others) > 1:
            return False
    return True
