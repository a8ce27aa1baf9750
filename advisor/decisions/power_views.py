"""What a power controller sees at each step of a node series: the same for the back-test and for a live decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from advisor.decisions.power import DemandView
from advisor.demand.features import HOUR, Floats, Steps
from advisor.demand.forecast import HORIZON, LIKELY, SOON, Key

HIGHS_SEEN = 6 * HOUR
"""A longer cool-down is replayed as one of so many steps."""
AGREED = HOUR
"""Nodes power down only to the highest level that the forecasts of so many steps ask for: one low forecast is not
enough.
"""


@dataclass(frozen=True)
class Views:
    """What every decision of a span sees of the record, prepared once for many controllers. first: step of views[0]."""

    first: int
    views: list[DemandView]


def views_of(
    steps: Steps, changes: Mapping[Key, Floats], first: int, end: int, expected: Mapping[int, Floats] | None = None
) -> Views:
    """Views of steps first .. end-1 with those forecasts; what a step sees ends before it."""
    expected = expected or {}
    levels = {
        key: _highest(steps.recent + values, AGREED)[first:end].tolist()
        for key, values in changes.items() if key[0] == HORIZON
    }  # fmt: skip
    likely = changes.get((SOON, LIKELY))
    soon = None if likely is None else (steps.recent + likely)[first:end].tolist()
    has_forecast = ~np.isnan(steps.recent) & ~np.any([np.isnan(values) for values in changes.values()], axis=0)
    found = []
    for step in range(first, end):
        highs = steps.highest[max(0, step - HIGHS_SEEN) : step]
        gap = np.flatnonzero(np.isnan(highs))
        is_known = step > 0 and not np.isnan(steps.last[step - 1])
        is_forecast = is_known and bool(has_forecast[step])
        recent = float(steps.recent[step])
        found.append(
            DemandView(
                step=step, total=0, powered=0,
                active=float(steps.last[step - 1]) if is_known else None,
                recent=None if np.isnan(recent) else recent,
                highs=tuple(highs[gap[-1] + 1 if len(gap) else 0 :].tolist()),
                levels={key: values[step - first] for key, values in levels.items()} if is_forecast else None,
                soon=soon[step - first] if is_forecast and soon else None,
                expected={size: float(ahead[step]) for size, ahead in expected.items()} if is_forecast else None,
                is_stale=not is_known or bool(steps.is_suspect[step]),
            )
        )  # fmt: skip
    return Views(first, found)


def _highest(values: Floats, window: int) -> Floats:
    """(n,) highest of the last `window` values up to each, of those that are known; NaN where none is."""
    found = values.copy()
    for lag in range(1, window):
        found[lag:] = np.fmax(found[lag:], values[:-lag])
    return found
