"""The weight of a sample in a mean: the time that it stands for, in scrape intervals of its GPU.

It stands for the time to the next sample, but at most for twice the longer of the two neighboring distances. So a gap
has little weight. The last sample weighs as much as the one before it. A weight within a tenth of 1 is 1. So most
samples weigh 1, and only the others cost time. Each hour of an allocation is weighed separately, so that files can be
cut anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from telemetry.metrics.runs import Array, RowRuns
from telemetry.metrics.samples import CounterValues
from telemetry.metrics.scrapes import EVEN, gaps_ms

_LONGEST = 2


@dataclass(frozen=True)
class Weights:
    """rows: samples that do not weigh 1, in order; run: the run of each; extra: the weight of each minus 1."""

    rows: Array
    run: Array
    extra: Array

    @classmethod
    def of(cls, runs: RowRuns, time_ms: Array, interval_ms: Array) -> Weights:
        """interval_ms: the scrape interval of the GPU of each run; NaN where it is not known."""
        gap = gaps_ms(runs, time_ms)
        differs = (gap > runs.spread(EVEN * interval_ms)) | (gap < runs.spread(interval_ms / EVEN))
        rows = np.flatnonzero(differs & (gap > 0))
        run = np.searchsorted(runs.starts, rows, side="right") - 1
        return cls(rows, run, _bounded_ms(runs, run, gap, rows) / interval_ms[run] - 1)

    def added(self, values: Array | float, number: int) -> Array:
        """The sums of extra * values in each of `number` runs. values: of the samples in `rows`."""
        found: Array = np.bincount(self.run, self.extra * values, number)
        return found

    def total(self, counter: CounterValues, runs: RowRuns) -> Array:
        """The weighted sum of each run."""
        plain = counter.total(runs)
        if not len(self.rows):
            return plain
        values = counter.values[self.rows]
        if counter.known is not None:
            values = np.where(counter.known[self.rows], values, 0)
        return plain + self.added(values, len(runs.starts))


def _bounded_ms(runs: RowRuns, run: Array, gap: Array, rows: Array) -> Array:
    """The time that these samples stand for."""
    first, last = runs.starts[run], runs.ends[run] - 1
    rows = np.minimum(rows, last - 1)
    before = np.where(rows > first, gap[rows - 1], 0)
    after = np.where(rows + 1 < last, gap[np.minimum(rows + 1, len(gap) - 1)], 0)
    beside = np.maximum(before, after)
    found: Array = np.where(beside > 0, np.minimum(gap[rows], _LONGEST * beside), gap[rows])
    return found
