"""Rows in the order of their table's files, sorted by one integer per row instead of by several texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.store.schema import Table

_MOST_CODES = 2**62
_Ints = npt.NDArray[np.int64]


def in_order(spec: Table, rows: pa.Table) -> tuple[pa.Table, bool]:
    """The rows in the order of the table's files, and whether their keys are unique.

    Rows with the same key keep their order. Text can be dictionary-encoded.
    """
    code = _codes(spec, rows)
    if (code[1:] > code[:-1]).all():
        return rows, True
    order = np.argsort(code, kind="stable")
    code = code[order]
    return rows.combine_chunks().take(order), bool((code[1:] > code[:-1]).all())


def repeats(spec: Table, rows: pa.Table) -> npt.NDArray[np.bool_]:
    """Flags of the rows whose key is that of the row before. rows: in order."""
    code = _codes(spec, rows)
    return np.append(np.zeros(min(1, len(code)), dtype=bool), code[1:] == code[:-1])


def _codes(spec: Table, rows: pa.Table) -> _Ints:
    """One integer per row, in the same order as the columns of the table's order."""
    code, size = np.zeros(rows.num_rows, dtype=np.int64), 1
    for name in spec.order:
        own, number = _ranks(rows[name])
        if size * number > _MOST_CODES:
            (code, size), (own, number) = _dense(code), _dense(own)
        code, size = code * number + own, size * number
    return code


def _ranks(column: pa.ChunkedArray[Any]) -> tuple[_Ints, int]:
    """Integers in the same order as the values, and a number above all of them."""
    if pa.types.is_integer(column.type):
        value = column.to_numpy().astype(np.int64, copy=False)
        low, high = (int(value.min()), int(value.max())) if len(value) else (0, 0)
        return (value - low, high - low + 1) if high - low < _MOST_CODES else _dense(value)
    text: Any = column.combine_chunks()
    if not pa.types.is_dictionary(text.type):
        text = text.dictionary_encode()
    rank, number = _text_ranks(text.dictionary)
    return rank[np.asarray(text.indices)], number


def _text_ranks(values: pa.Array[Any]) -> tuple[_Ints, int]:
    """The same for an array of a few texts, which can repeat."""
    distinct: Any = values.dictionary_encode()
    rank = np.empty(len(distinct.dictionary), dtype=np.int64)
    rank[np.asarray(pc.sort_indices(distinct.dictionary))] = np.arange(len(rank))
    return rank[np.asarray(distinct.indices)], max(1, len(rank))


def _dense(value: _Ints) -> tuple[_Ints, int]:
    distinct, rank = np.unique(value, return_inverse=True)
    return rank, max(1, len(distinct))
