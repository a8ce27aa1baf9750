"""Queues of waiting jobs. An entry is one int, order << 32 | job number: the smallest starts first."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

JOB_MASK = (1 << 32) - 1
_CHUNK = 256


def order_of(key: float) -> int:
    """An int that orders as the float does; a NaN comes last."""
    if key != key:
        return 1 << 63
    bits: int = struct.unpack("<q", struct.pack("<d", key + 0.0))[0]
    return bits if bits >= 0 else -(bits & (1 << 63) - 1)


def orders_of(keys: npt.NDArray[np.generic]) -> list[int]:
    """As order_of, for an array; whole numbers are their own order."""
    if np.issubdtype(keys.dtype, np.integer):
        return [int(key) for key in keys.tolist()]
    return [order_of(key) for key in keys.tolist()]


class WaitingJobs:
    """Waiting jobs of one kind of request in order, with their expected run times: finds short ones fast.

    Entries lie in sorted chunks. Each chunk knows its least expected run time.
    """

    __slots__ = ("_chunks", "_expected", "_least")

    def __init__(self) -> None:
        self._chunks: list[list[int]] = []
        self._expected: list[list[int]] = []
        self._least: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __iter__(self) -> Iterator[int]:
        for chunk in self._chunks:
            yield from chunk

    @property
    def first(self) -> int:
        return self._chunks[0][0]

    def add(self, entry: int, expected_s: int) -> None:
        chunks = self._chunks
        if not chunks:
            self._chunks, self._expected, self._least = [[entry]], [[expected_s]], [expected_s]
            return
        number = len(chunks) - 1
        if entry < chunks[number][0]:
            low, high = 0, number
            while low < high:
                middle = (low + high) // 2
                if entry < chunks[middle][-1]:
                    high = middle
                else:
                    low = middle + 1
            number = low
        chunk, expected = chunks[number], self._expected[number]
        place = bisect_left(chunk, entry)
        chunk.insert(place, entry)
        expected.insert(place, expected_s)
        if expected_s < self._least[number]:
            self._least[number] = expected_s
        if len(chunk) > 2 * _CHUNK:
            self._split(number)

    def _split(self, number: int) -> None:
        chunk, expected = self._chunks[number], self._expected[number]
        self._chunks[number : number + 1] = [chunk[:_CHUNK], chunk[_CHUNK:]]
        self._expected[number : number + 1] = [expected[:_CHUNK], expected[_CHUNK:]]
        self._least[number : number + 1] = [min(expected[:_CHUNK]), min(expected[_CHUNK:])]

    def remove(self, entry: int) -> None:
        chunks = self._chunks
        number = 0
        if entry > chunks[0][-1]:
            low, high = 0, len(chunks) - 1
            while low < high:
                middle = (low + high) // 2
                if entry > chunks[middle][-1]:
                    low = middle + 1
                else:
                    high = middle
            number = low
        chunk, expected = chunks[number], self._expected[number]
        place = bisect_left(chunk, entry)
        if chunk[place] != entry:
            raise KeyError(entry)
        del chunk[place]
        was = expected.pop(place)
        if not chunk:
            del chunks[number], self._expected[number], self._least[number]
        elif was == self._least[number]:
            self._least[number] = min(expected)

    def first_within(self, most_s: int) -> int | None:
        """The first entry that is expected to run at most most_s seconds."""
        for number, least in enumerate(self._least):
            if least <= most_s:
                for entry, expected in zip(self._chunks[number], self._expected[number], strict=True):
                    if expected <= most_s:
                        return entry
        return None
