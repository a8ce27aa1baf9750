"""Columns of partials: their types, what they hold where there is nothing, and how plain ones merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from telemetry.metrics.runs import Array, RowRuns

Columns = dict[str, Array]


@dataclass(frozen=True)
class Kind:
    """merge: "sum", "max" or "min" of the rows of one allocation; "": what is more than that."""

    dtype: type[np.generic]
    empty: float
    merge: str = ""


NUMBER, TOTAL = Kind(np.int64, 0, "sum"), Kind(np.float64, 0.0, "sum")
HIGHEST, LOWEST = Kind(np.float64, np.nan, "max"), Kind(np.float64, np.nan, "min")
WHOLE, REAL = Kind(np.int64, 0), Kind(np.float64, 0.0)

_NARROWER = {"i": (np.int8, np.int16, np.int32), "f": (np.int8, np.int16, np.int32, np.float32)}


@dataclass(frozen=True)
class Rows:
    """Rows of many parts, in an order of their own. A column is put together when it is asked for, and not kept."""

    kinds: Mapping[str, Kind]
    parts: Sequence[Mapping[str, Array]]
    order: Array | None = None

    def __getitem__(self, name: str) -> Array:
        """Filled with what stands for nothing where a part leaves the column out."""
        kind = self.kinds[name]
        whole = np.concatenate([np.zeros(0, kind.dtype), *(_of(name, kind, part) for part in self.parts)])
        return whole if self.order is None else whole[self.order]

    def by(self, *keys: str) -> tuple[Rows, RowRuns]:
        """The rows sorted by columns, the first one foremost, and the runs that are equal in all of them."""
        order = np.lexsort([self[key] for key in reversed(keys)])
        rows = Rows(self.kinds, self.parts, order if self.order is None else self.order[order])
        return rows, RowRuns.of(*(rows[key] for key in keys))

    def merged(self, runs: RowRuns) -> Columns:
        """The plain columns, a row for each run."""
        merges = {"sum": runs.sum, "max": runs.max, "min": runs.min}
        return {name: merges[kind.merge](self[name]) for name, kind in self.kinds.items() if kind.merge}


def _of(name: str, kind: Kind, part: Mapping[str, Array]) -> Array:
    if name in part:
        return part[name].astype(kind.dtype)
    return np.full(len(next(iter(part.values()))), kind.empty, kind.dtype)


def scattered(rows: Columns, places: Array, length: int) -> Columns:
    """Rows put at their places among `length` rows, 0 elsewhere."""
    found = {}
    for name, values in rows.items():
        found[name] = np.zeros(length, values.dtype)
        found[name][places] = values
    return found


def packed(kinds: Mapping[str, Kind], rows: Columns) -> pa.Table:
    """As a table of the narrowest types that hold every value exactly, without columns that say nothing."""
    key = next(iter(kinds))
    told = [name for name, kind in kinds.items() if name == key or not _is_empty(rows[name], kind)]
    return pa.table({name: pa.array(_narrow(rows[name])) for name in told})


def unpacked(table: pa.Table) -> Columns:
    return {name: table[name].to_numpy() for name in table.column_names}


def _is_empty(values: Array, kind: Kind) -> bool:
    return bool(np.isnan(values).all() if np.isnan(kind.empty) else (values == kind.empty).all())


def _narrow(values: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        for kind in _NARROWER[values.dtype.kind]:
            if np.array_equal(narrow := values.astype(kind), values, equal_nan=values.dtype.kind == "f"):
                return narrow
    return values
