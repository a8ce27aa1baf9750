"""The event-driven engine: it owns the clock and the cluster, and asks a policy for the order of the queue.

At each time, in this order: jobs end, nodes change, waiting jobs are canceled, jobs become eligible, the policy's tick
runs, and jobs start. The same input gives the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop

import numpy as np

from simulator.changes import Changes
from simulator.cluster import Cluster
from simulator.eligibility import Eligibility
from simulator.policies.base import Policy
from simulator.record import CANCELED, COMPLETED, TIMEOUT, UNFINISHED, Placements, Record
from simulator.requests import can_ever_fit
from simulator.schedulers import make_scheduler
from simulator.sharing import SharedGpus
from simulator.simulation import Simulation
from simulator.waiting import JOB_MASK
from simulator.workload import Workload

FAR_S = 1 << 62
IDLE_TICKS = 100
"""Ticks after which jobs that still wait, while nothing runs, are left waiting."""
TOO_LARGE = "ask for more than the cluster has"
STUCK = "still wait at the end"
Progress = Callable[[int, int], None]


def simulate(workload: Workload, cluster: Cluster, policy: Policy, progress: Progress | None = None) -> Record:
    """Run the whole workload. progress: told of (jobs that have ended, all jobs) now and then."""
    return _Engine(Simulation(workload, cluster, policy), progress or (lambda done, all_jobs: None)).run()


class _Engine:
    """The loop over the times at which something happens."""

    def __init__(self, state: Simulation, progress: Progress) -> None:
        self._state, self._progress = state, progress
        if state.policy.slices or state.policy.speeds is not None:
            state.shared = SharedGpus(state)
        state.scheduler = make_scheduler(state)
        state.power = self._changes = Changes(state)
        state.eligibility = self._eligibility = Eligibility(state)

    def run(self) -> Record:
        """One long loop: a call for each step would cost a tenth of the speed."""
        state = self._state
        submit_s = [*state.workload.array("submit_s").tolist(), FAR_S]
        too_large = self._too_large()
        ends, end_s, node_of, mask_of = state.ends, state.end_s, state.node_of, state.mask_of
        free, count, by_count, in_service = state.free.free, state.free.count, state.free.by_count, state.free
        changes, eligibility, scheduler, entries = self._changes, self._eligibility, state.scheduler, state.entries
        add, start_jobs = scheduler.add, scheduler.start_jobs
        is_plain_end = state.is_plain and not eligibility.watches_ends
        is_plain_arrival = state.is_ranked and not eligibility.is_needed and not too_large
        expected = state.running if state.expected_end_s else None
        job, step, idle_ticks, all_jobs = 0, 0, 0, len(end_s)
        while True:
            now = submit_s[job]
            if ends and ends[0] >> 32 < now:
                now = ends[0] >> 32
            if changes.next_s < now:
                now = changes.next_s
            if expected and expected[0] >> 32 < now and scheduler:
                # A job outruns its expected run time: reservations change.
                now = max(expected[0] >> 32, state.now_s)
            if now >= FAR_S:
                break
            state.now_s = now
            bound = (now + 1) << 32
            freed = 0
            while ends and ends[0] < bound:
                ended = heappop(ends) & JOB_MASK
                if end_s[ended] != now:
                    continue
                node = node_of[ended]
                if not is_plain_end or node < 0:
                    # A job that was preempted and resumed at once, or whose speed changed and back, has two entries.
                    while ends and ends[0] == now << 32 | ended:
                        heappop(ends)
                    state.freed = 0
                    state.end(ended)
                    freed |= state.freed
                    continue
                bit = 1 << node
                mask = free[node] | mask_of[ended]
                free[node] = mask
                freed |= bit
                number = mask.bit_count()
                if in_service.in_service & bit:
                    by_count[count[node]] ^= bit
                    by_count[number] |= bit
                count[node] = number
            state.freed = freed
            if changes.next_s <= now:
                changes.apply()
            if is_plain_arrival:
                while submit_s[job] == now:
                    add(job, entries[job])
                    job += 1
            else:
                first = job
                while submit_s[job] == now:
                    job += 1
                eligibility.submit([each for each in range(first, job) if each not in too_large])
            if changes.next_tick_s <= now:
                changes.tick()
            start_jobs(state.freed)
            step += 1
            if not step & 0x3FFF:
                self._progress(job, all_jobs)
            if job == all_jobs and not ends and changes.next_s < FAR_S:
                # Only planned changes, or ticks, can let a waiting job start now.
                idle_ticks = 0 if changes.is_pending() else idle_ticks + 1
                if idle_ticks > IDLE_TICKS or not (scheduler or eligibility.is_holding()):
                    break
        self._progress(len(end_s), len(end_s))
        return self._record(too_large)

    def _too_large(self) -> set[int]:
        fits = {id(each): can_ever_fit(each, self._state.cluster) for each in self._state.requests.distinct}
        if all(fits.values()):
            return set()
        return {job for job, request in enumerate(self._state.request) if not fits[id(request)]}

    def _record(self, too_large: set[int]) -> Record:
        state = self._state
        start, end = np.array(state.first_s, dtype="int64"), np.array(state.end_s, dtype="int64")
        limits, runs = state.workload.array("time_limit_s"), state.workload.array("run_s")
        outcome = np.where(end < 0, UNFINISHED, np.where((limits > 0) & (runs >= limits), TIMEOUT, COMPLETED)).astype(
            "int8"
        )
        outcome[list(state.canceled)] = CANCELED
        preemptions = np.zeros(len(start), dtype="int32")
        preemptions[list(state.preemptions)] = list(state.preemptions.values())
        waiting = int((outcome == UNFINISHED).sum()) - len(too_large)
        return Record(
            policy=state.policy.label or state.policy.name,
            start_s=start,
            end_s=end,
            last_start_s=np.array(state.begun_s, dtype="int64"),
            state=outcome,
            preemptions=preemptions,
            allocations=Placements(state.node_of, state.mask_of),
            segments=tuple(state.segments),
            node_states=tuple(self._changes.states),
            unfinished={reason: number for reason, number in ((TOO_LARGE, len(too_large)), (STUCK, waiting)) if number},
        )
