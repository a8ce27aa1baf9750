"""How long jobs of one tier and size waited of late: a reason beside the advice, not a promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from almanac.config import Tier
from almanac.records import ExpectedWait

RECENT_DAYS = 28
MIN_JOBS = 10
SIZES = ((1, "1 node"), (4, "2-4 nodes"), (None, "5 nodes or more"))
ALL_SIZES = "any size"


@dataclass(frozen=True)
class WaitQuartiles:
    """Per "tier/size", what ExpectedWait holds: jobs, median, lower and upper quartile, seconds."""

    table: Mapping[str, tuple[int, float, float, float]] = field(default_factory=dict)

    def expected(self, tiers: Sequence[Tier], node_count: int) -> tuple[ExpectedWait, ...]:
        """One per tier with at least MIN_JOBS recent jobs of this size, else of any size."""
        found = []
        for tier in tiers:
            known = self.table.get(f"{tier.name}/{size_of(node_count)}") or self.table.get(f"{tier.name}/{ALL_SIZES}")
            if known is not None:
                found.append(ExpectedWait(tier.name, *known))
        return tuple(found)


def size_of(node_count: int) -> str:
    return next(name for most, name in SIZES if most is None or node_count <= most)


def learn_waits(history: pd.DataFrame, now_s: int) -> WaitQuartiles:
    """From the jobs that started within RECENT_DAYS before now_s, by the tier they asked for.

    An array counts once: its later tasks often wait for its own earlier ones. Jobs that gave up waiting are not in the
    history, so that very long waits are missing.
    """
    started = history["start_s"]
    recent = history[(started < now_s) & (started >= now_s - RECENT_DAYS * 86_400) & history["tier"].notna()]
    is_task = recent["is_array"].fillna(False).astype(bool)
    recent = recent[~(is_task & recent.duplicated(["user", "name_key", "submit_s"]))]
    waits_s = (recent["start_s"] - recent["submit_s"]).clip(lower=0).astype("float64")
    sizes = recent["node_count"].fillna(1).astype("int64").map(size_of)
    table: dict[str, tuple[int, float, float, float]] = {}
    for size in (sizes, pd.Series(ALL_SIZES, index=recent.index)):
        for (tier, name), group in waits_s.groupby([recent["tier"], size]):
            if len(group) >= MIN_JOBS:
                low_s, median_s, high_s = np.quantile(group, [0.25, 0.5, 0.75]).tolist()
                table[f"{tier}/{name}"] = (len(group), median_s, low_s, high_s)
    return WaitQuartiles(dict(sorted(table.items())))
