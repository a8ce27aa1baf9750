"""Users whose newest runs took far longer than the predictions that their site factors stood for.

The prediction itself follows a change of habits within a few runs. To compare runs with the habit as well would make
users with runs of very different lengths wait: on Helios a third of all jobs, for a mean JCT 1.5 times as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

TIMES = 2.0
MIN_RUNS = 4
_MOST_LOG = 25.0


class Overrun(NamedTuple):
    """share: of the newest runs, those that took more than TIMES as long as expected.

    times: the geometric mean of how many times as long the newest runs took, at least 1.
    """

    share: float = 0.0
    times: float = 1.0


NO_OVERRUN = Overrun()


def overrun_of(log_ratios: Sequence[float]) -> Overrun:
    """log_ratios: logarithms of actual over expected time, of a user's newest runs. Fewer than MIN_RUNS say nothing."""
    if len(log_ratios) < MIN_RUNS:
        return NO_OVERRUN
    share = sum(ratio > math.log(TIMES) for ratio in log_ratios) / len(log_ratios)
    mean = sum(log_ratios) / len(log_ratios)
    return Overrun(share, math.exp(min(max(mean, 0.0), _MOST_LOG)))
