"""What of the metrics can be chosen."""

from __future__ import annotations

from dataclasses import dataclass

from almanac.config import MetricsSection
from almanac.errors import ConfigError
from telemetry.metrics.catalogue import AVERAGED


@dataclass(frozen=True)
class Options:
    """imbalance_counter: the counter of the imbalance metrics. window_ms: length of the windows of spatial imbalance.

    spatial_method: "means" or "paper", see `telemetry.metrics.spatial`.
    is_aligned_to_job: windows start at the job's first sample (as in the notebooks of perlmutter-telemetry), not at
    full UTC minutes. is_full: also compute the metrics that `core` leaves out: time-weighted classes, the intensity
    histogram, growth of memory, and preallocation. Raises ConfigError for a counter that has no mean.
    """

    imbalance_counter: str = "gpu_util_pct"
    window_ms: int = 60_000
    is_aligned_to_job: bool = False
    is_full: bool = True
    spatial_method: str = "means"

    def __post_init__(self) -> None:
        names = [counter.column for counter in AVERAGED]
        if self.imbalance_counter not in names:
            raise ConfigError(
                f"metrics.imbalance_counter is {self.imbalance_counter!r}", f"use one of {', '.join(names)}"
            )

    @classmethod
    def of(cls, section: MetricsSection) -> Options:
        is_aligned = section.window_alignment == "job"
        return cls(section.imbalance_counter, is_aligned_to_job=is_aligned, spatial_method=section.spatial_method)
