"""Several Prometheus servers side by side: which of them gives a node that more than one has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from almanac.errors import AlmanacError
from almanac.records import Counts
from almanac.units import printable

_LATE_S = 60
"""A server that is further behind another one than this may find nodes whose samples the other gave meanwhile."""


class ServerOfNodes(Protocol):
    """A source of one server."""

    name: str

    def nodes_in(self, start_s: int, end_s: int) -> frozenset[str]:
        """The nodes, in lower case, with samples in a span. Raises AlmanacError."""
        ...


class SharedNodes:
    """Let each node come from one server: the first of the configuration that answers, or the one that gave it before.

    sources: in the configuration's order. marks_s: their watermarks, by name. stored: the rows of a span that are in
    the store, with the columns host and time_ms.
    """

    def __init__(
        self,
        sources: Sequence[ServerOfNodes],
        marks_s: Mapping[str, int | None],
        stored: Callable[[int, int], pa.Table],
    ) -> None:
        self._sources, self._marks_s, self._stored = tuple(sources), marks_s, stored
        self._lock = Lock()
        self._known: dict[tuple[str, int, int], frozenset[str]] = {}
        self._failed: dict[str, AlmanacError] = {}

    def check(self, source: ServerOfNodes) -> None:
        """Raise the error for which another server already took the nodes of this one, in this run."""
        if source.name in self._failed:
            raise self._failed[source.name]

    def before(self, source: ServerOfNodes, start_s: int, end_s: int) -> dict[str, str]:
        """The nodes, in lower case, that servers before this one have in a span, each with the server's name."""
        found: dict[str, str] = {}
        for earlier in self._sources[: self._sources.index(source)]:
            for node in self._nodes(earlier, start_s, end_s):
                found.setdefault(node, earlier.name)
        return found

    def _nodes(self, source: ServerOfNodes, start_s: int, end_s: int) -> frozenset[str]:
        with self._lock:
            span = (source.name, start_s, end_s)
            if span not in self._known and source.name not in self._failed:
                try:
                    self._known[span] = source.nodes_in(start_s, end_s)
                except AlmanacError as error:
                    self._failed[source.name] = error
            return self._known.get(span, frozenset())

    def unless_stored(self, source: ServerOfNodes, rows: pa.Table, span_s: tuple[int, int], counts: Counts) -> pa.Table:
        """The rows without those of nodes that another server gave while this one did not answer."""
        others = [mark for name, mark in self._marks_s.items() if name != source.name and mark is not None]
        if max(others, default=0) <= span_s[0] + _LATE_S:
            return rows
        known, own = (_times(table) for table in (self._stored(*span_s), rows))
        taken = [host for host in own.keys() & known.keys() if not np.isin(own[host], known[host]).any()]
        if not taken:
            return rows
        kept = rows.filter(pc.invert(pc.is_in(rows["host"].cast(pa.string()), pa.array(taken))))
        counts.note(
            "rows of nodes that another server gave",
            rows.num_rows - kept.num_rows,
            printable(", ".join(sorted(taken)[:4])),
        )
        return kept


def _times(rows: pa.Table) -> dict[str, npt.NDArray[Any]]:
    """The times (ms) of each host's rows."""
    hosts = rows.select(["host", "time_ms"]).set_column(0, "host", rows["host"].cast(pa.string()))
    found = hosts.group_by("host").aggregate([("time_ms", "distinct")])
    pairs = zip(found["host"].to_pylist(), found["time_ms_distinct"], strict=True)
    return {str(host): times.values.to_numpy(zero_copy_only=False) for host, times in pairs}
