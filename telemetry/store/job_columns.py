"""Job records of accounting as columns of numbers and texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class TextColumn:
    """A column of texts: (n,) which of the different ones."""

    codes: Ints
    texts: tuple[str, ...]

    def used(self) -> list[str]:
        return [self.texts[code] for code in np.unique(self.codes).tolist()]

    def array(self, rows: Ints) -> pa.Array[Any]:
        """(n_rows,) the texts of these rows."""
        return pa.array(self.texts, pa.string()).take(pa.array(self.codes[rows], pa.int64()))

    def spread(self, values: Sequence[Any]) -> NDArray[Any]:
        """(n,) the value of each row's text."""
        return np.array(values)[self.codes] if len(self.codes) else np.array(values)[:0]


@dataclass(frozen=True)
class JobColumns:
    """Job records as columns; a number that is missing is -1, a text that is missing is empty."""

    number: dict[str, Ints]
    text: dict[str, TextColumn]

    def __len__(self) -> int:
        return len(next(iter(self.number.values())))

    @classmethod
    def of(cls, rows: pa.Table, numbers: Sequence[str], texts: Sequence[str]) -> JobColumns:
        return cls({name: _ints(rows[name]) for name in numbers}, {name: _texts(rows[name]) for name in texts})

    def where(self, chosen: Bools) -> JobColumns:
        return JobColumns(
            {name: values[chosen] for name, values in self.number.items()},
            {name: TextColumn(column.codes[chosen], column.texts) for name, column in self.text.items()},
        )


def _ints(column: Any) -> Ints:
    return np.asarray(column.cast(pa.int64()).fill_null(-1).to_numpy(), dtype=np.int64)


def _texts(column: Any) -> TextColumn:
    encoded = column.cast(pa.string()).fill_null("").combine_chunks().dictionary_encode()
    return TextColumn(np.asarray(encoded.indices.to_numpy(), dtype=np.int64), tuple(encoded.dictionary.to_pylist()))
