"""What of the metrics can be chosen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """window_ms: length of the windows of spatial imbalance, a divisor of the hour.

    is_full: also compute the metrics that `core` leaves out: time-weighted classes, the intensity histogram, growth of
    memory, and preallocation.
    """

    window_ms: int = 60_000
    is_full: bool = True
