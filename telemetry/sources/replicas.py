"""GPUs that several Prometheus servers scrape, or one server twice: each scrape counts once.

Such copies differ only in labels that do not identify the GPU or its job: external labels such as `replica`, or
`instance`, `pod`, and `job`. Their timestamps differ too, so timestamps alone do not reveal copies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

Replica = tuple[tuple[str, str], ...]
"""The labels of a series that do not identify the GPU or its job, sorted."""

_NEAR = 0.75
"""Copies lie at most half a scrape interval apart, and scrapes of one server about a whole one."""
_Ints = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]


def replica_of(labels: Mapping[str, str], known: Collection[str]) -> Replica:
    """The replica that a series comes from. known: labels that identify its GPU and job."""
    return tuple(sorted((name, text) for name, text in labels.items() if name not in known))


def copies(gpu: _Ints, time_ms: _Ints, replica: _Ints, span_ms: tuple[int, int]) -> _Flags:
    """Flags of the scrapes that are copies. The replica with the lowest number counts; others fill its gaps.

    gpu, time_ms: sorted. span_ms: [start, end) of the query; a replica can have scrapes outside it.
    """
    found = np.zeros(len(gpu), dtype=bool)
    first = np.flatnonzero(np.diff(gpu, prepend=-1))
    low, high = (limit.reduceat(replica, first) if len(first) else replica[:0] for limit in (np.minimum, np.maximum))
    ends = np.append(first[1:], len(gpu))
    for start, end in zip(first[low < high].tolist(), ends[low < high].tolist(), strict=True):
        found[start:end] = _copies_of_one(time_ms[start:end], replica[start:end], span_ms)
    return found


def _copies_of_one(time_ms: _Ints, replica: _Ints, span_ms: tuple[int, int]) -> _Flags:
    numbers = np.unique(replica)
    found = np.zeros(len(time_ms), dtype=bool)
    kept = time_ms[replica == numbers[0]]
    for number in numbers[1:].tolist():
        own = replica == number
        gap_ms = _median_gap_ms(kept) or _median_gap_ms(time_ms[own])
        near = _distance(time_ms[own], _extended(kept, gap_ms, span_ms)) < _NEAR * gap_ms
        found[own] = near
        kept = np.sort(np.concatenate([kept, time_ms[own][~near]]))
    return found


def _median_gap_ms(time_ms: _Ints) -> float:
    return float(np.median(np.diff(time_ms))) if len(time_ms) > 1 else 0.0


def _extended(kept: _Ints, gap_ms: float, span_ms: tuple[int, int]) -> _Ints:
    """Add the scrapes just before and after the span, which were not read, if the replica was up at its ends."""
    before, after = kept[:1] - int(gap_ms), kept[-1:] + int(gap_ms)
    return np.concatenate([before[before < span_ms[0]], kept, after[after >= span_ms[1]]])


def _distance(time_ms: _Ints, kept: _Ints) -> _Ints:
    """The distance between each time and the nearest kept one. kept: sorted."""
    at = np.searchsorted(kept, time_ms)
    later, earlier = kept[np.minimum(at, len(kept) - 1)], kept[np.maximum(at - 1, 0)]
    nearest: _Ints = np.minimum(np.abs(later - time_ms), np.abs(time_ms - earlier))
    return nearest
