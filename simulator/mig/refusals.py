"""First place that fits against the best place by reachability (migm-mig-scheduling, 4.2), on the first GPU with room.

Instances are created and destroyed one by one beside busy ones, in no time. A job that finds no place on any GPU is
refused and lost. Both rules see the same jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from advisor.mig.sizes import WHOLE
from advisor.mig.states import PartitionStates, partition_states
from almanac.mig import MigModel
from simulator.mig.demand import SliceRequest


@dataclass(frozen=True)
class Refusals:
    """Shares of the jobs that were refused, in 0..1."""

    first_fit: float
    reachability: float


def count_refusals(jobs: Sequence[SliceRequest], model: MigModel, gpus: int) -> Refusals:
    """Both rules on the same jobs (by submit time); each job gets an instance of its own shape."""
    states = partition_states(model)
    return Refusals(_refused(jobs, model, gpus, states, True), _refused(jobs, model, gpus, states, False))


def _refused(
    jobs: Sequence[SliceRequest], model: MigModel, gpus: int, states: PartitionStates, is_first_fit: bool
) -> float:
    compute = {each.shape: each.compute for each in model.profiles}
    now = [0] * gpus
    ends: list[tuple[float, int, int]] = []
    refused = 0
    for job in jobs:
        while ends and ends[0][0] <= job.submit_s:
            _, gpu, bit = heappop(ends)
            now[gpu] ^= bit
        shape = model.whole.shape if job.shape == WHOLE else job.shape
        found = _first(now, states, shape) if is_first_fit else states.choose_gpu(now, shape)
        if found is None:
            refused += 1
            continue
        gpu, bit = found
        now[gpu] |= bit
        run_s = job.full_s * max(1.0, job.compute / compute[shape])
        heappush(ends, (job.submit_s + run_s, gpu, bit))
    return refused / max(1, len(jobs))


def _first(now: Sequence[int], states: PartitionStates, shape: str) -> tuple[int, int] | None:
    for gpu, state in enumerate(now):
        bit = states.allocate_first(state, shape)
        if bit is not None:
            return gpu, bit
    return None
