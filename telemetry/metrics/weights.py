"""What a sample weighs in a mean: the time that it stands for, in scrape intervals of its GPU.

It stands for the time to the next sample, but not for a gap: at most for twice the longer of the two gaps next to that
one. The last sample weighs as much as the one before it. Samples at even distances weigh the same. Each hour of an
allocation is weighed alone, so that files can be cut anywhere. Most samples weigh 1, so that only the rest costs time.
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
    """of_run: the weight of each sample of a run. places, rows, runs, of_row: uneven runs, their rows and weights."""

    of_run: Array
    places: Array
    rows: Array
    runs: RowRuns
    of_row: Array

    @classmethod
    def of(cls, runs: RowRuns, time_ms: Array, interval_ms: Array) -> Weights:
        """interval_ms: the scrape interval of the GPU of each run; NaN where it is not known."""
        gap = gaps_ms(runs, time_ms)
        longest_ms = runs.max(gap)
        is_uneven = longest_ms > EVEN * runs.min(gap)
        of_run = (runs.last(time_ms) - runs.first(time_ms)) / np.maximum(runs.lengths - 1, 1) / interval_ms
        of_run[~(of_run > 0) | ((of_run > 1 / EVEN) & (of_run < EVEN)) | is_uneven] = 1.0
        places = np.flatnonzero(is_uneven)
        rows = np.flatnonzero(runs.spread(is_uneven)) if len(places) else places
        uneven = RowRuns.of_lengths(runs.lengths[places])
        of_row = _bounded_ms(uneven, gap[rows]) / uneven.spread(interval_ms[places])
        return cls(of_run, places, rows, uneven, of_row)

    @property
    def is_plain(self) -> bool:
        """Whether every sample weighs 1."""
        return not len(self.places) and bool((self.of_run == 1).all())

    def total(self, counter: CounterValues, runs: RowRuns) -> Array:
        """The weighted sum of each run."""
        found = counter.total(runs) * self.of_run
        if len(self.places):
            values = counter.values[self.rows]
            if counter.known is not None:
                values = np.where(counter.known[self.rows], values, 0)
            found[self.places] = self.runs.sum(values * self.of_row)
        return found

    def extra(self, flags: Array | None, runs: RowRuns) -> Array:
        """By how much the samples with a flag, by default all, weigh more than 1 each."""
        number = runs.lengths if flags is None else runs.sum(flags)
        found = (self.of_run - 1) * number
        if len(self.places):
            extra = self.of_row - 1
            found[self.places] = self.runs.sum(extra if flags is None else extra * flags[self.rows])
        return found


def _bounded_ms(runs: RowRuns, gap: Array) -> Array:
    """The time that each sample stands for. No run has fewer than three samples: two are even."""
    last = runs.ends - 1
    beside = np.zeros(len(gap), gap.dtype)
    beside[1:] = gap[:-1]
    beside[runs.starts] = 0
    after = np.append(gap[1:], 0)[: len(gap)]
    after[last - 1] = 0
    found: Array = np.minimum(gap, _LONGEST * np.maximum(beside, after)).astype(np.float64)
    found[last] = found[last - 1]
    return found
