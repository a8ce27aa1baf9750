"""GPUs that hold more than one job, and speeds that depend on the GPU and on the jobs beside.

A shared GPU is a set of positions, as the memory slices of MIG are. A slice takes one of the masks that the policy
gives for it. Two jobs packed on one GPU are two slices of one position each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from simulator.free_gpus import lowest_bits
from simulator.requests import Request
from simulator.simulation import Simulation

_Gpu = tuple[int, int]
"""Node, and mask of one GPU."""


@dataclass
class _Pace:
    """How fast a running job runs. work_s: what it had left at since_s, at speed 1."""

    speed: float
    since_s: int
    work_s: float


@dataclass
class _Residents:
    used: int = 0
    slices: dict[int, int] = field(default_factory=dict)
    """Job to mask of positions."""


class SharedGpus:
    """The GPUs that are split, and the pace of every running job."""

    def __init__(self, simulation: Simulation) -> None:
        self._of = simulation
        self._split: dict[_Gpu, _Residents] = {}
        self._pace: dict[int, _Pace] = {}
        self._set_of = simulation.cluster.set_by_node()
        self._kept: list[int] = simulation.workload.array("time_limit_s").tolist()

    def try_start(self, job: int, request: Request) -> bool:
        """Put each of the job's slices on the fullest split GPU that accepts it, or on a free GPU of the same node."""
        for shape in request.shapes:
            found = self._choose(job, request.slice, shape.gpus, shape.allowed)
            if found is not None:
                self._place(job, *found)
                return True
        return False

    def _choose(self, job: int, part: str, gpus: int, allowed: int) -> tuple[int, list[tuple[_Gpu, int]]] | None:
        """(node, the split GPUs on it with the positions to take); the rest is taken from the node's free GPUs."""
        free, masks = self._of.free, self._of.policy.slices[part]
        accepting: dict[int, list[tuple[int, _Gpu, int]]] = {}
        for gpu, residents in self._split.items():
            if free.in_service & allowed & (1 << gpu[0]):
                mask = next((mask for mask in masks if not mask & residents.used), 0)
                if mask and self._of.policy.shares(job, sorted(residents.slices)):
                    accepting.setdefault(gpu[0], []).append((-residents.used.bit_count(), gpu, mask))
        whole = [
            (max(gpus - len(found), 0), min(found), node)
            for node, found in accepting.items()
            if gpus - len(found) <= free.count[node]
        ]
        if whole:
            node = min(whole)[2]
            return node, [(gpu, mask) for _, gpu, mask in sorted(accepting[node])[:gpus]]
        node = free.find_node(gpus, allowed)
        return None if node < 0 else (node, [])

    def _place(self, job: int, node: int, found: list[tuple[_Gpu, int]]) -> None:
        simulation = self._of
        missing = simulation.request[job].asked.gpus - len(found)
        first = simulation.policy.slices[simulation.request[job].slice][0]
        taken = simulation.free.take(node, missing) if missing else 0
        while taken:
            bit = lowest_bits(taken, 1)
            taken ^= bit
            self._split[node, bit] = _Residents()
            found = [*found, ((node, bit), first)]
        mask = 0
        for gpu, positions in found:
            residents = self._split[gpu]
            residents.used |= positions
            residents.slices[job] = positions
            mask |= gpu[1]
        simulation.node_of[job], simulation.mask_of[job] = node, mask
        simulation.began(job)

    def positions(self, job: int) -> dict[_Gpu, int]:
        """Positions that a running job takes, by GPU; {} for whole GPUs."""
        return {gpu: split.slices[job] for gpu, split in self._gpus_of(job).items()}

    def _gpus_of(self, job: int) -> dict[_Gpu, _Residents]:
        found = {}
        for node, mask in self._of.allocation(job):
            while mask:
                bit = lowest_bits(mask, 1)
                mask ^= bit
                split = self._split.get((node, bit))
                if split is not None and job in split.slices:
                    found[node, bit] = split
        return found

    def _neighbors(self, job: int) -> list[int]:
        return sorted({other for split in self._gpus_of(job).values() for other in split.slices if other != job})

    def began(self, job: int) -> int:
        """When the job ends at the speed that it has now. Its neighbors change theirs."""
        self._pace[job] = _Pace(1.0, self._of.now_s, float(self._of.left_s[job]))
        end = self._set_pace(job)
        for other in self._neighbors(job):
            self._retime(other)
        return end

    def _set_pace(self, job: int) -> int:
        """When the job ends: once its work is done, or at its time limit."""
        simulation, pace = self._of, self._pace[job]
        if simulation.policy.speeds is not None:
            node = simulation.allocation(job)[0][0]
            pace.speed = simulation.policy.speeds(job, self._set_of[node], self._neighbors(job))
        end = simulation.now_s + max(math.ceil(pace.work_s / pace.speed - 1e-9), 1)
        return min(end, simulation.begun_s[job] + self._kept[job]) if self._kept[job] else end

    def _retime(self, job: int) -> None:
        simulation, pace = self._of, self._pace[job]
        if simulation.policy.speeds is None or simulation.end_s[job] <= simulation.now_s:
            return
        pace.work_s = max(pace.work_s - (simulation.now_s - pace.since_s) * pace.speed, 0.0)
        pace.since_s = simulation.now_s
        end = self._set_pace(job)
        if end != simulation.end_s[job]:
            simulation.moved(job, end)

    def work_left_s(self, job: int) -> int:
        pace = self._pace[job]
        done_s = (self._of.now_s - pace.since_s) * pace.speed
        return max(math.ceil(pace.work_s - done_s - 1e-9), 1)

    def stopped(self, job: int) -> bool:
        """Take a job off its GPUs. True if they were split: then they are freed here."""
        simulation = self._of
        neighbors = self._neighbors(job)
        gpus = self._gpus_of(job)
        for (node, bit), split in gpus.items():
            split.used ^= split.slices.pop(job)
            simulation.freed |= 1 << node
            if not split.slices:
                del self._split[node, bit]
                simulation.free.release(node, bit)
        del self._pace[job]
        for other in neighbors:
            self._retime(other)
        return bool(gpus)
