"""How long a job of a shape is expected to run, from the ones that have ended."""

from __future__ import annotations

from bisect import bisect_right, insort

DEFAULT_S = 3600.0
"""Expected where nothing has ended yet: an hour, as good a guess as any."""
KEPT = 400


class RunTimes:
    """Run times of the last jobs of each shape."""

    def __init__(self) -> None:
        self._ended: dict[int, list[float]] = {}
        self._order: dict[int, list[float]] = {}

    def observe(self, shape: int, run_s: float) -> None:
        """Add the run time of a job that has ended."""
        ended, order = self._ended.setdefault(shape, []), self._order.setdefault(shape, [])
        insort(ended, run_s)
        order.append(run_s)
        if len(order) > KEPT:
            ended.remove(order.pop(0))

    def expect(self, shape: int, elapsed_s: float) -> float:
        """Mean run time of those that ran longer than elapsed_s; half as long again where none did."""
        ended = self._ended.get(shape, [])
        longer = ended[bisect_right(ended, elapsed_s) :]
        return sum(longer) / len(longer) if longer else max(DEFAULT_S, 1.5 * elapsed_s)
