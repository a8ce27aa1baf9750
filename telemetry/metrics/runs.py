"""Reductions over runs: consecutive rows of arrays that belong together, as the samples of one GPU in a sorted file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RowRuns:
    """Run i is the rows starts[i] up to the next start, the last one up to `rows`. No run is empty."""

    starts: Array
    rows: int

    @classmethod
    def of(cls, *keys: Array) -> RowRuns:
        """Runs of neighboring rows that are equal in every key."""
        rows = len(keys[0])
        differs = np.zeros(max(rows - 1, 0), bool)
        for key in keys:
            differs |= key[1:] != key[:-1]
        return cls(np.concatenate([np.arange(min(rows, 1)), np.flatnonzero(differs) + 1]), rows)

    @classmethod
    def of_lengths(cls, lengths: Array) -> RowRuns:
        ends = np.cumsum(lengths)
        return cls(ends - lengths, int(ends[-1]) if len(ends) else 0)

    @property
    def ends(self) -> Array:
        return np.append(self.starts[1:], self.rows)[: len(self.starts)]

    @property
    def lengths(self) -> Array:
        return self.ends - self.starts

    def sum(self, values: Array) -> Array:
        """Sums in 64 bits: whole numbers exactly; of flags how many are set."""
        kind: Any = np.float64 if values.dtype.kind == "f" else np.int64
        found: Array = np.add.reduceat(values, self.starts, dtype=kind) if len(self.starts) else np.zeros(0, kind)
        return found

    def max(self, values: Array) -> Array:
        """Highest values; NaN only where a run has nothing else."""
        return np.fmax.reduceat(values, self.starts) if len(self.starts) else values[:0]

    def min(self, values: Array) -> Array:
        """Lowest values; NaN only where a run has nothing else."""
        return np.fmin.reduceat(values, self.starts) if len(self.starts) else values[:0]

    def first(self, values: Array) -> Array:
        return values[self.starts]

    def last(self, values: Array) -> Array:
        places: Array = self.ends - 1
        return values[places]

    def spread(self, values: Array) -> Array:
        """One value a run, repeated for each of its rows."""
        return np.repeat(values, self.lengths)

    def where(self, flags: Array) -> tuple[Array, RowRuns]:
        """Places of the runs that keep a row where flags are set, and the runs of the rows kept."""
        kept = self.sum(flags)
        places = np.flatnonzero(kept)
        return places, RowRuns.of_lengths(kept[places])


def grouped(*keys: Array) -> tuple[Array, RowRuns]:
    """The order that sorts rows by the keys, the first one foremost, and the runs of equal first keys in that order."""
    order = np.lexsort(keys[::-1])
    return order, RowRuns.of(keys[0][order])


def ragged(firsts: Array, runs: RowRuns) -> Array:
    """firsts[i], firsts[i] + 1, ...: as many numbers as run i has rows, run after run."""
    return np.arange(runs.rows) + runs.spread(firsts - runs.starts)
