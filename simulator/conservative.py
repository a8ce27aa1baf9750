"""Conservative backfill (Mu'alem and Feitelson 2001): all waiting jobs get a reserved start, as by sched/backfill.

Its limits are those of slurmctld. It plans for GPUs, and with the ends of running jobs to the second; slurmctld plans
for whole nodes, and rounds the ends. Without bf_interval, it plans after each event.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, merge
from itertools import islice

from simulator.backfill import Pool, Skip
from simulator.policies.base import JOB_MASK, BackfillLimits
from simulator.requests import Shape, find
from simulator.simulation import Simulation

_NEVER_S = 1 << 62
_Spans = list[tuple[int, int]]


class Conservative(Skip):
    """Each waiting job in turn gets the earliest start at which it fits along with the jobs before it.

    All reservations are made again after each change, as Slurm's sched/backfill does; policy.limits are its limits.
    """

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self._limits = simulation.policy.limits
        self._users: list[str] = simulation.workload.array("user").tolist() if self._limits.of_user else []
        self._next_s, self._is_due = 0, False

    def start_jobs(self, freed: int) -> None:
        """Plan after each change; with bf_interval, only so often, and start jobs in turn at once, as slurmctld does.

        Its thread sleeps for bf_interval after a plan, and then until a job, node, or partition has changed
        (backfill_agent in backfill.c of 22.05 and 25.05).
        """
        simulation, interval_s = self._of, self._limits.interval_s
        if not interval_s:
            super().start_jobs(freed)
            return
        is_overdue = bool(simulation.running) and simulation.renew_overdue()
        for pool in self._pools:
            if pool.waiting and (is_overdue or pool.is_changed or freed & pool.nodes):
                pool.is_changed = False
                self._start_in_turn(pool)
                if pool.waiting and not self._is_due:
                    self._is_due = True
                    if self._next_s > simulation.now_s:
                        simulation.changes.look_at(self._next_s)
        if self._is_due and self._next_s <= simulation.now_s:
            self._is_due, self._next_s = False, simulation.now_s + interval_s
            for pool in self._pools:
                if pool.waiting:
                    self._pass(pool)

    def _start_in_turn(self, pool: Pool) -> None:
        """Start jobs in order until one of their partition does not fit: slurmctld's main scheduler."""
        ready, blocked = sorted((jobs.first, number) for number, jobs in pool.waiting.items()), set[int]()
        while ready:
            entry, number = heappop(ready)
            queue = self._request[number].queue
            if queue in blocked:
                continue
            if not self._of.try_start(entry & JOB_MASK):
                blocked.add(queue)
                continue
            self._remove(pool, entry)
            if number in pool.waiting:
                heappush(ready, (pool.waiting[number].first, number))

    def _pass(self, pool: Pool) -> None:
        simulation, limits = self._of, self._limits
        self._of.changes.wake_for(pool.first() & JOB_MASK)
        entries = self._considered(pool)
        count = self._until_last_fit(entries, len(entries))
        if not count:
            return
        profile, place, reserved = Profile(simulation, limits), 0, 0
        while place < count:
            entry = entries[place]
            job = entry & JOB_MASK
            may_reserve = not 0 < limits.reserved <= reserved
            chosen = profile.reserve(simulation.request[job].shapes, simulation.expected_s[job], may_reserve)
            place += 1
            if chosen:
                simulation.start(job, chosen)
                self._remove(pool, entry)
                count = self._until_last_fit(entries, count)
            elif profile.is_full:
                return
            else:
                reserved += 1
            count = self._until_last_start(profile, entries, place, count)

    def _considered(self, pool: Pool) -> list[int]:
        """Entries in order, up to the limits of their number and of each user's."""
        entries: Iterator[int] = merge(*pool.waiting.values())
        if most := self._limits.of_user:
            seen = Counter[str]()
            users = self._users

            def is_within(entry: int) -> bool:
                seen[users[entry & JOB_MASK]] += 1
                return seen[users[entry & JOB_MASK]] <= most

            entries = filter(is_within, entries)
        return list(islice(entries, self._limits.depth))

    def _until_last_fit(self, entries: list[int], count: int) -> int:
        """Number of the first entries to look at: no job behind them fits on what is free now."""
        by_count, fits = self._of.free.by_count, dict[int, bool]()
        for place in range(count, 0, -1):
            number = self._number[entries[place - 1] & JOB_MASK]
            if number not in fits:
                fits[number] = bool(find(by_count, self._request[number].shapes))
            if fits[number]:
                return place
        return 0

    def _until_last_start(self, profile: Profile, entries: list[int], place: int, count: int) -> int:
        """Number of the first entries to look at: reservations only take GPUs, so no job behind them starts now."""
        never_s = dict[int, int]()
        while count > place:
            job = entries[count - 1] & JOB_MASK
            number, expected_s = self._number[job], self._of.expected_s[job]
            if expected_s < never_s.get(number, _NEVER_S):
                if profile.starts_now(self._request[number].shapes, expected_s):
                    return count
                never_s[number] = expected_s
            count -= 1
        return count


class Profile:
    """Free GPUs of each node over the time to come: times_s and free by node, each from its time to the next one.

    is_full: a reservation found no room. slurmctld keeps one record between the times at which reservations begin or
    end, bf_max_job_test records at most (bf_node_space_size). spans: by number of GPUs and node, when it has as many.
    """

    def __init__(self, simulation: Simulation, limits: BackfillLimits) -> None:
        free, self._limits, self._now_s = simulation.free, limits, simulation.now_s
        self._bounds_s, self.is_full = {simulation.now_s}, False
        self._most, self._nodes_of_mask = free.most, dict[int, list[int]]()
        counts = [count if free.in_service >> node & 1 else 0 for node, count in enumerate(free.count)]
        self._times_s, self._free = [[simulation.now_s] for _ in counts], [[count] for count in counts]
        self._spans, self._stale = dict[int, list[_Spans]](), dict[int, set[int]]()
        for end in simulation.running or ():
            for node, mask in simulation.allocation(end & JOB_MASK):
                if free.in_service >> node & 1:
                    times_s, numbers = self._times_s[node], self._free[node]
                    number = numbers[-1] + mask.bit_count()
                    if end >> 32 > times_s[-1]:
                        times_s.append(end >> 32)
                        numbers.append(number)
                    else:
                        numbers[-1] = number

    def reserve(self, shapes: tuple[Shape, ...], expected_s: int, may_reserve: bool) -> list[tuple[int, int]] | None:
        """Take the GPUs from the earliest time at which they are free for so long; where, if that is now.

        may_reserve: False to look at now alone.
        """
        last_s = self._now_s + (self._limits.window_s if may_reserve else 0)
        for start_s in self._starts(shapes, max(expected_s, 1), last_s):
            for shape in shapes:
                if chosen := self._chosen(shape, start_s, start_s + expected_s):
                    is_later = start_s > self._now_s
                    self.is_full = is_later and len(self._bounds_s) >= self._limits.depth
                    if not self.is_full:
                        self._take(start_s, start_s + expected_s, chosen)
                    return None if is_later else chosen
        return None

    def starts_now(self, shapes: tuple[Shape, ...], expected_s: int) -> bool:
        """Return True if `reserve` would let a job start now."""
        starts_s = self._starts(shapes, max(expected_s, 1), self._now_s)
        if len(shapes) == 1 and shapes[0].is_single:
            return bool(starts_s)
        return any(self._chosen(shape, now_s, now_s + expected_s) for now_s in starts_s for shape in shapes)

    def _starts(self, shapes: tuple[Shape, ...], needed_s: int, last_s: int) -> list[int]:
        """Times up to last_s at which a shape may fit, ascending: the first one of a job on one node is right."""
        if len(shapes) == 1 and shapes[0].is_single:
            first_s = last_s + 1
            for spans in self._spans_of(shapes[0].allowed, shapes[0].gpus):
                for from_s, until_s in spans:
                    if from_s >= first_s:
                        break
                    if until_s - from_s >= needed_s:
                        first_s = from_s
                        break
                if first_s == self._now_s:
                    break
            return [first_s] if first_s <= last_s else []
        found = set[int]()
        for shape in shapes:
            begin_s, end_s, rest_s = list[int](), list[int](), list[int]()
            for spans in self._spans_of(shape.allowed, shape.gpus):
                for from_s, until_s in spans:
                    if from_s > last_s:
                        break
                    if until_s - from_s >= needed_s:
                        begin_s.append(from_s)
                        end_s.append(until_s - needed_s)
            for spans in self._spans_of(shape.allowed, shape.rest) if shape.rest_nodes and begin_s else ():
                rest_s += [from_s for from_s, until_s in spans if from_s <= last_s and until_s - from_s >= needed_s]
            begin_s.sort()
            end_s.sort()
            found |= {
                time_s
                for time_s in {*begin_s, *rest_s}
                if bisect_right(begin_s, time_s) - bisect_left(end_s, time_s) >= shape.nodes
            }
        return sorted(found)

    def _spans_of(self, allowed: int, gpus: int) -> Sequence[_Spans]:
        """By allowed node, the times from and until which it has so many GPUs."""
        if gpus not in self._spans:
            self._spans[gpus], self._stale[gpus] = [[] for _ in self._free], set(range(len(self._free)))
        spans, stale = self._spans[gpus], self._stale[gpus]
        for node in stale:
            own, begin_s = list[tuple[int, int]](), -1
            for time_s, number in zip(self._times_s[node], self._free[node], strict=True):
                if number >= gpus:
                    begin_s = time_s if begin_s < 0 else begin_s
                elif begin_s >= 0:
                    own.append((begin_s, time_s))
                    begin_s = -1
            if begin_s >= 0:
                own.append((begin_s, _NEVER_S))
            spans[node] = own
        stale.clear()
        nodes = self._nodes(allowed)
        return spans if len(nodes) == len(spans) else [spans[node] for node in nodes]

    def _nodes(self, allowed: int) -> list[int]:
        nodes = self._nodes_of_mask.get(allowed)
        if nodes is None:
            nodes = self._nodes_of_mask[allowed] = [node for node in range(len(self._free)) if allowed >> node & 1]
        return nodes

    def _chosen(self, shape: Shape, start_s: int, end_s: int) -> list[tuple[int, int]] | None:
        """Nodes for the shape by their number of GPUs in that time, as requests.find chooses them."""
        by_count = [0] * (self._most + 1)
        spans = self._spans_of(shape.allowed, shape.rest or shape.gpus)
        for node, own in zip(self._nodes(shape.allowed), spans, strict=True):
            if own and own[0][0] <= start_s:
                times_s = self._times_s[node]
                first = bisect_right(times_s, start_s) - 1
                by_count[min(self._free[node][first : bisect_left(times_s, end_s, first + 1)])] |= 1 << node
        return find(by_count, (shape,))

    def _take(self, start_s: int, end_s: int, chosen: list[tuple[int, int]]) -> None:
        """Times of later starts are rounded down, as slurmctld does: a reservation can overlap the next one by less."""
        if start_s > self._now_s:
            step_s = self._limits.resolution_s
            start_s, end_s = max(self._now_s, start_s // step_s * step_s), end_s // step_s * step_s
            self._bounds_s |= {each for each in (start_s, end_s) if each < self._now_s + self._limits.window_s}
        for node, gpus in chosen:
            free, first = self._free[node], self._place_at(node, start_s)
            for place in range(first, self._place_at(node, max(end_s, start_s))):
                free[place] = max(free[place] - gpus, 0)
            for stale in self._stale.values():
                stale.add(node)

    def _place_at(self, node: int, time_s: int) -> int:
        """The place of a node's time; made if there is none."""
        times_s = self._times_s[node]
        place = bisect_left(times_s, time_s)
        if place == len(times_s) or times_s[place] > time_s:
            times_s.insert(place, time_s)
            self._free[node].insert(place, self._free[node][place - 1])
        return place
