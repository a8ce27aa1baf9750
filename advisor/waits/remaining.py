"""How long running and waiting jobs still need the GPUs: predicted run times, capped by time limits."""

from __future__ import annotations

import math

from advisor.waits.view import Span
from almanac.records import Duration

MOST_S = 7 * 86_400.0
"""Stands for the time limit of a job without one."""
LEAST_S = 1.0
OVERRUN_SHARE = 0.5
"""Share of its elapsed time that a job may still need once it has run longer than its interval."""


def run_span(duration: Duration | None, limit_s: float | None) -> Span:
    """The run time of a job that has not started. Without a prediction it is anything up to the limit."""
    most_s = limit_s or MOST_S
    if duration is None:
        return Span(min(LEAST_S, most_s), most_s / 2, most_s)
    low_s = duration.low_s if duration.low_s is not None else duration.duration_s / 4
    high_s = duration.high_s if duration.high_s is not None else duration.duration_s * 4
    return _ordered(low_s, duration.duration_s, high_s, most_s)


def left_span(run: Span, elapsed_s: float, limit_s: float | None) -> Span:
    """What is left of a run after elapsed_s. A job that outlived its prediction has half of what it ran still ahead.

    limit_s: of the whole run. A job past its limit ends now.
    """
    most_s = math.inf if limit_s is None else max(limit_s - elapsed_s, 0.0)
    longer_s = OVERRUN_SHARE * elapsed_s
    if elapsed_s < run.likely_s:
        likely_s = run.likely_s - elapsed_s
    elif elapsed_s < run.high_s:
        likely_s = (run.high_s - elapsed_s) / 2
    else:
        likely_s = longer_s
    high_s = run.high_s - elapsed_s if elapsed_s < run.high_s else 2 * longer_s
    return _ordered(max(run.low_s - elapsed_s, 0.0), likely_s, high_s, most_s)


def _ordered(low_s: float, likely_s: float, high_s: float, most_s: float) -> Span:
    likely_s = min(max(likely_s, LEAST_S), most_s)
    return Span(min(low_s, likely_s), likely_s, min(max(high_s, likely_s), most_s))
