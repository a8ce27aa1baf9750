"""Find the hosts of a host list among known ones without writing the list out: 20,000 hosts take microseconds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from slurm.hostlist import checked_terms, expand

Places = NDArray[np.int32]

_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})([^0-9]*)", re.DOTALL)
_PLAIN = re.compile(r"(|[^\[\]]*[^\[\]0-9])\[([0-9,-]+)\]([^\[\]0-9]*)")
"""A term with one bracket that stands for the last number of its hosts."""


class HostIndex:
    """Host names, each with its place among all of them in sorted order."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = tuple(sorted(set(names)))
        self._place = {name: place for place, name in enumerate(self.names)}
        numbered = defaultdict[tuple[str, str], defaultdict[int, list[tuple[int, int]]]](lambda: defaultdict(list))
        for name, place in self._place.items():
            if match := _NUMBERED.fullmatch(name):
                numbered[match[1], match[3]][len(match[2])].append((int(match[2]), place))
        self._numbered = {
            key: {digits: _columns(found) for digits, found in by.items()} for key, by in numbered.items()
        }

    def places(self, text: str) -> Places:
        """Return the places of the hosts that a host list names, in order; unknown hosts are skipped.

        Raises ValueError as `expand` does.
        """
        if text in self._place:
            return np.array([self._place[text]], dtype=np.int32)
        found = [self._of_term(term) for term in checked_terms(text)] if text else []
        return np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.int32)

    def _of_term(self, term: str) -> Places:
        match = _PLAIN.fullmatch(term)
        spans = [(low, high) for low, _, high in (part.partition("-") for part in match[2].split(","))] if match else []
        if match is None or any(map(_is_unevenly_padded, spans)):
            hosts = expand(term)
            return np.array([self._place[host] for host in hosts if host in self._place], dtype=np.int32)
        by_digits = self._numbered.get((match[1], match[3]), {})
        found = [
            places[np.searchsorted(values, least) : np.searchsorted(values, int(high or low), side="right")]
            for low, high in spans
            for digits, (values, places) in by_digits.items()
            if (least := _least(low, digits)) is not None
        ]
        return np.concatenate(found) if found else np.empty(0, dtype=np.int32)


def _columns(found: list[tuple[int, int]]) -> tuple[NDArray[np.int64], Places]:
    found = sorted(found)
    return np.array([value for value, _ in found]), np.array([place for _, place in found], dtype=np.int32)


def _is_unevenly_padded(span: tuple[str, str]) -> bool:
    """Return True for a span such as [1-010], which only ClusterShell can read or refuse."""
    low, high = span
    return bool(high) and len(low) != len(high) and (high[0] == "0" or (low[0] == "0" and low != "0"))


def _least(low: str, digits: int) -> int | None:
    """The least number of a range from `low` that is written with so many digits; None: none is.

    A range pads to the digits of its begin: [08-11] is 08, 09, 10, 11, and [8-11] is 8, 9, 10, 11.
    """
    if digits < len(low):
        return None
    return int(low) if digits == len(low) else max(int(low), 10 ** (digits - 1))
