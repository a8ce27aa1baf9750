"""What became of a node set's nodes in a span, from the counts that each power run leaves: asleep, woken, short."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from telemetry.nodes.counts import COUNTED, LIVE_HOLD_MIN, TABLE, NodeCounts
from telemetry.store.cluster_store import ClusterStore

HOLD_S = 60 * LIVE_HOLD_MIN
"""A count stands until the next one, for at most so long. After that nothing is known."""


@dataclass(frozen=True)
class NodeCount:
    """Nodes of a set at one time. wanted: by pending jobs, beside those in use."""

    time_s: int
    total: int
    active: int
    wanted: int
    asleep: int


@dataclass(frozen=True)
class NodeUse:
    """A node set over a span. known_s: seconds of it that counts cover; the other fields are of these alone.

    Hours are node-hours. wake_times_s: when fewer nodes were asleep than at the count before; two wake-ups between two
    counts are one. short_min: minutes with nodes asleep while pending jobs wanted more nodes than were idle.
    newest: the last count; None without any. counts: those of the span.
    """

    span_s: int
    known_s: int
    total_hours: float
    active_hours: float
    asleep_hours: float
    wake_times_s: tuple[int, ...]
    short_min: float
    newest: NodeCount | None = None
    counts: NodeCounts | None = field(default=None, repr=False, compare=False)

    @property
    def coverage(self) -> float:
        """Share of the span that counts cover."""
        return self.known_s / self.span_s if self.span_s else 0.0

    @property
    def known_days(self) -> float:
        return self.known_s / 86_400


def node_use(counts: NodeCounts, span_s: tuple[int, int]) -> NodeUse:
    """Add up the counts of one node set, each time once.

    span_s: begin and end; counts outside are not used.
    """
    is_inside = (counts.time_s >= span_s[0]) & (counts.time_s < span_s[1])
    time_s, total, active, wanted, asleep = columns = [getattr(counts, name)[is_inside] for name in COUNTED]
    stood_s = np.diff(time_s, append=span_s[1])
    is_followed = stood_s[:-1] <= HOLD_S
    stood_s = np.minimum(stood_s, HOLD_S)
    idle = np.maximum(total - active - asleep, 0)
    is_short = (asleep > 0) & (wanted > idle)
    # A set that lost nodes lost sleeping ones, too: that is no wake-up.
    woken = -np.diff(asleep) - np.maximum(-np.diff(total), 0)
    return NodeUse(
        span_s=max(span_s[1] - span_s[0], 0),
        known_s=int(stood_s.sum()),
        total_hours=float((total * stood_s).sum() / 3600),
        active_hours=float((active * stood_s).sum() / 3600),
        asleep_hours=float((asleep * stood_s).sum() / 3600),
        wake_times_s=tuple(time_s[1:][is_followed & (woken > 0)].tolist()),
        short_min=float(stood_s[is_short].sum() / 60),
        newest=NodeCount(*(int(values[-1]) for values in columns)) if len(time_s) else None,
        counts=NodeCounts(time_s, total, active, wanted, asleep, counts.queued_node_min[is_inside]),
    )


def load_node_use(store: ClusterStore, span_s: tuple[int, int]) -> dict[str, NodeUse]:
    """Of each node set that has counts in the span, by its name. Raises StoreError."""
    rows = store.read(TABLE, ("node_set", *COUNTED), *span_s).to_pandas().dropna()
    found = {}
    for name, own in rows.sort_values("time_s").groupby("node_set"):
        columns: dict[str, Any] = {column: own[column].to_numpy(dtype=np.int64) for column in COUNTED}
        counts = NodeCounts(**columns, queued_node_min=np.full(len(own), np.nan))
        found[str(name)] = node_use(counts, span_s)
    return found
