"""Columns of partials: their types, what they hold where there is nothing, and how plain ones merge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from telemetry.metrics.runs import Array, Runs

Columns = dict[str, Array]


@dataclass(frozen=True)
class Kind:
    """merge: "sum", "max" or "min" of the rows of one claim; "": what is more than that."""

    dtype: type[np.generic]
    empty: float
    merge: str = ""


NUMBER, TOTAL = Kind(np.int64, 0, "sum"), Kind(np.float64, 0.0, "sum")
HIGHEST, LOWEST = Kind(np.float64, np.nan, "max"), Kind(np.float64, np.nan, "min")
WHOLE, REAL = Kind(np.int64, 0), Kind(np.float64, 0.0)

_NARROWER = (np.int8, np.int16, np.int32, np.float32)


def stacked(kinds: Mapping[str, Kind], parts: Sequence[Columns]) -> Columns:
    """Rows of many parts as one; columns that a part leaves out are filled with what stands for nothing."""
    return {
        name: np.concatenate([np.zeros(0, kind.dtype), *(_of(name, kind, part) for part in parts)], dtype=kind.dtype)
        for name, kind in kinds.items()
    }


def _of(name: str, kind: Kind, part: Columns) -> Array:
    if name in part:
        return part[name]
    return np.full(len(next(iter(part.values()))), kind.empty, kind.dtype)


def merged(kinds: Mapping[str, Kind], rows: Columns, runs: Runs) -> Columns:
    """The plain columns of rows that are sorted into runs."""
    merges = {"sum": runs.sum, "max": runs.max, "min": runs.min}
    return {name: merges[kind.merge](rows[name]) for name, kind in kinds.items() if kind.merge}


def taken(rows: Columns, places: Array) -> Columns:
    return {name: values[places] for name, values in rows.items()}


def scattered(rows: Columns, places: Array, length: int) -> Columns:
    """Rows put at their places among `length` rows, 0 elsewhere."""
    found = {}
    for name, values in rows.items():
        found[name] = np.zeros(length, values.dtype)
        found[name][places] = values
    return found


def packed(kinds: Mapping[str, Kind], rows: Columns) -> pa.Table:
    """As a table of the narrowest types that hold every value exactly, without columns that say nothing."""
    length = len(next(iter(rows.values())))
    return pa.table(
        {
            name: _narrow(values)
            for place, (name, values) in enumerate(rows.items())
            if place == 0 or not _is_empty(values, kinds[name])
        }
    ) if length else pa.table({})


def unpacked(kinds: Mapping[str, Kind], tables: Iterable[pa.Table]) -> Columns:
    """The rows of packed tables."""
    parts = [{name: table[name].to_numpy() for name in table.column_names} for table in tables if table.num_rows]
    return stacked(kinds, parts)


def _is_empty(values: Array, kind: Kind) -> bool:
    return bool(np.isnan(values).all() if np.isnan(kind.empty) else (values == kind.empty).all())


def _narrow(values: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        for kind in _NARROWER:
            if np.array_equal(narrow := values.astype(kind), values, equal_nan=values.dtype.kind == "f"):
                return narrow
    return values
