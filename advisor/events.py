"""One loop over time and one heap of events, on which simulations run.

At each time its events run by order and number, and then `settle` runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush

END, CALL, SUBMIT, LAST = range(4)
"""Orders of events at one time: what ends frees its place first, and what comes last sees the result."""
_Event = tuple[float, int, int, int, Hashable, Callable[[], None]]
"""Time, order, number, count of events so far, key, and action."""


class EventLoop:
    """The clock and its events. Subclasses act in their events and in `settle`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[_Event] = []
        self._latest: dict[Hashable, int] = {}
        self._count = 0

    def at(
        self, time_s: float, action: Callable[[], None], order: int = CALL, number: int = 0, key: Hashable = None
    ) -> None:
        """Call action at a time that is not past. A new event of a key replaces the one before it."""
        self._count += 1
        if key is not None:
            self._latest[key] = self._count
        heappush(self._heap, (time_s, order, number, self._count, key, action))

    def settle(self) -> None:
        """Act after all events of a time."""

    def run(self) -> None:
        """Go from event to event until none is left."""
        heap, latest = self._heap, self._latest
        while heap:
            if heap[0][4] is not None and latest[heap[0][4]] != heap[0][3]:
                heappop(heap)
                continue
            self.now_s = now_s = heap[0][0]
            while heap and heap[0][0] <= now_s:
                _, _, _, count, key, action = heappop(heap)
                if key is None or latest[key] == count:
                    action()
            self.settle()

    def stop(self) -> None:
        """Drop all events."""
        self._heap.clear()


class JobLoop(EventLoop):
    """Jobs by number that are submitted, run at a speed that can change, and end.

    start_s, end_s: NaN until known; of a running job, end_s is what its present speed leads to.
    """

    def __init__(self, submit_s: Sequence[float]) -> None:
        super().__init__()
        self.submit_s = submit_s
        self.start_s, self.end_s = [float("nan")] * len(submit_s), [float("nan")] * len(submit_s)
        self.speeds: dict[int, float] = {}
        """Of the running jobs."""
        self._left, self._since_s = [0.0] * len(submit_s), [0.0] * len(submit_s)
        self._heap += [(at_s, SUBMIT, job, 0, None, partial(self.submitted, job)) for job, at_s in enumerate(submit_s)]
        heapify(self._heap)

    def submitted(self, job: int) -> None:
        """A job arrives."""
        raise NotImplementedError

    def ended(self, job: int) -> None:
        """A job that ran has done its work."""

    def start(self, job: int, work: float, speed: float = 1.0, delay_s: float = 0.0) -> None:
        """Run a job, which does `speed` of its work per second, from now or after a delay."""
        self.start_s[job] = self._since_s[job] = self.now_s + delay_s
        self._left[job] = work
        self._run(job, speed)

    def change_speed(self, job: int, speed: float, pause_s: float = 0.0) -> None:
        """Run a running job at another speed, after a pause."""
        ran_s = self.now_s - self._since_s[job]
        if ran_s > 0:
            self._left[job] = max(0.0, self._left[job] - ran_s * self.speeds[job])
            self._since_s[job] = self.now_s
        self._since_s[job] += pause_s
        self._run(job, speed)

    def _run(self, job: int, speed: float) -> None:
        self.speeds[job] = speed
        self.end_s[job] = self._since_s[job] + self._left[job] / speed
        self.at(self.end_s[job], partial(self._end, job), END, job, key=job)

    def _end(self, job: int) -> None:
        del self.speeds[job]
        self.ended(job)


class StrictPool:
    """Jobs of a queue and their starts. ends: (end, GPUs) of the jobs that run at now_s."""

    def __init__(self, gpus: int, now_s: float = 0.0, ends: Iterable[tuple[float, int]] = ()) -> None:
        self._ends, self._time_s = list(ends), now_s
        self._free = gpus - sum(held for _, held in self._ends)
        heapify(self._ends)

    def next_start_s(self, gpus: int) -> float:
        """The start of a job of so many GPUs, if it is the next one."""
        while self._free < gpus and self._ends:
            end_s, held = heappop(self._ends)
            self._time_s, self._free = max(self._time_s, end_s), self._free + held
        return self._time_s

    def start(self, gpus: int, run_s: float, not_before_s: float = 0.0) -> float:
        """The start of the next job."""
        self._time_s = max(self.next_start_s(gpus), not_before_s)
        heappush(self._ends, (self._time_s + run_s, gpus))
        self._free -= gpus
        return self._time_s
