"""Wait: how long jobs waited of late, by tier and size."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from advisor.duration.features import known_at, without_parts
from advisor.duration.waits import WaitQuartiles, learn_waits
from advisor.services.base import AdviceRequest
from almanac.records import ExpectedWait


def learn_site_waits(history: pd.DataFrame, now_s: int) -> WaitQuartiles:
    """The recent waits of a site's jobs at now_s."""
    return learn_waits(without_parts(known_at(history, now_s)), now_s)


def expected_waits(asked: Sequence[AdviceRequest], waits: WaitQuartiles | None) -> list[tuple[ExpectedWait, ...]]:
    """The waits of jobs like each request, by tier; () without training."""
    return [waits.expected(each.config.tiers, each.request.node_count) if waits else () for each in asked]
