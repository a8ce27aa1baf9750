"""What of the metrics can be chosen."""

from __future__ import annotations

from dataclasses import dataclass

from almanac.config import MetricsSection
from telemetry.counters import COUNTER_COLUMNS
from telemetry.metrics.samples import Known


@dataclass(frozen=True)
class Options:
    """imbalance_counter: whose imbalance is computed. window_ms: length of the windows of spatial imbalance.

    is_aligned_to_job: windows start at the job's first sample (as in the notebooks of perlmutter-telemetry), not at
    full UTC minutes. is_full: also what `core` leaves out: time-weighted classes and the intensity histogram.
    """

    imbalance_counter: str = "gpu_util_pct"
    window_ms: int = 60_000
    is_aligned_to_job: bool = False
    is_full: bool = True

    @classmethod
    def of(cls, section: MetricsSection) -> Options:
        return cls(section.imbalance_counter, section.window_s * 1000, section.window_alignment == "job")

    def activity_sql(self, known: Known) -> str:
        """The chosen counter of one sample. MIG instances have no GPU_UTIL: GR_ENGINE_ACTIVE stands in, as percent."""
        assert self.imbalance_counter in COUNTER_COLUMNS
        if self.imbalance_counter == "gpu_util_pct":
            if known.is_whole:
                return "t.gpu_util_pct::DOUBLE"
            return "(CASE WHEN t.mig = '' THEN t.gpu_util_pct ELSE 100 * t.gr_engine_active_frac END)::DOUBLE"
        return f"t.{self.imbalance_counter}::DOUBLE"
