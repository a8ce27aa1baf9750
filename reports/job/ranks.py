"""How a job compares with other jobs of its site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from almanac.units import format_count
from reports.job.rows import MetricsRow
from telemetry.history import load_history_table
from telemetry.metrics.data_quality import OK
from telemetry.store.cluster_store import ClusterStore

Ranked = Literal["spatial_imbalance", "temporal_imbalance", "mean_gpu_util_pct", "hbm_peak_frac", "energy_j"]
RANKED: tuple[Ranked, ...] = get_args(Ranked)
SITE_DAYS = 30
MIN_JOBS = 20


_PHRASES: Mapping[Ranked, tuple[str, str]] = {
    "mean_gpu_util_pct": ("use their GPUs less", "use their GPUs more"),
    "hbm_peak_frac": ("use a smaller share", "use a larger share"),
    "spatial_imbalance": ("are more even", "are less even"),
    "temporal_imbalance": ("are steadier", "are less steady"),
}
"""What jobs with a lower figure do, and what jobs with a higher one do."""


@dataclass(frozen=True)
class Rank:
    """A job's rank. below, above: the shares of the site's jobs with a lower and a higher figure, without equal ones.

    jobs: how many jobs have the figure, with this one.
    """

    below: float
    above: float
    jobs: int


@dataclass(frozen=True)
class SiteFigures:
    """The figures of a site's jobs with data quality ok, in the order of submission, without users."""

    submit_s: npt.NDArray[np.int64]
    figures: Mapping[Ranked, npt.NDArray[np.float64]]

    @classmethod
    def load(cls, store: ClusterStore, since_s: int, until_s: int) -> SiteFigures:
        """The figures of jobs submitted in [since_s - SITE_DAYS, until_s). Raises StoreError."""
        columns = ["submit_s", "verdict", "mig_profile", *RANKED]
        rows = load_history_table(store, columns, since_s - SITE_DAYS * 86_400, until_s).sort_by("submit_s")
        is_ok = rows["verdict"].to_numpy() == OK
        figures = {name: rows[name].to_numpy().astype(np.float64)[is_ok] for name in RANKED}
        is_slice = rows["mig_profile"].combine_chunks().is_valid().to_numpy(zero_copy_only=False)[is_ok]
        figures["mean_gpu_util_pct"] = np.where(is_slice, np.nan, figures["mean_gpu_util_pct"])
        return cls(rows["submit_s"].to_numpy()[is_ok], figures)

    def ranks(self, metrics: MetricsRow, submit_s: int, end_s: int) -> dict[str, Rank]:
        """A job's ranks by figure, among jobs submitted between SITE_DAYS before its submission and its end.

        A figure has no rank if the job lacks it, or if fewer than MIN_JOBS have it.
        """
        if metrics.get("verdict") != OK:
            return {}
        low, high = np.searchsorted(self.submit_s, [submit_s - SITE_DAYS * 86_400, end_s])
        found: dict[str, Rank] = {}
        for name, values in self.figures.items():
            own, others = metrics.get(name), values[low:high]
            known = int(np.isfinite(others).sum())
            is_other = name == "mean_gpu_util_pct" and metrics.get("mig_profile")  # of a slice: no GPU_UTIL
            if own is not None and known >= MIN_JOBS and not is_other:
                # Less means less by more than rounding.
                margin = 1e-9 * abs(own)
                below, above = (others < own - margin).sum(), (others > own + margin).sum()
                found[name] = Rank(float(below) / known, float(above) / known, known)
        return found


def rank_text(ranks: Mapping[str, Rank], name: Ranked) -> str:
    """ "70% of 3,340 jobs here use their GPUs more": the larger side; "" without a rank."""
    rank = ranks.get(name)
    if rank is None:
        return ""
    share, side = max((rank.below, 0), (rank.above, 1))
    if share < 0.5:
        return f"in the middle of {format_count(rank.jobs)} jobs here"
    shown = "more than 99%" if share > 0.99 else f"{share:.0%}"  # the job itself is one of them: never all
    return f"{shown} of {format_count(rank.jobs)} jobs here {_PHRASES[name][side]}"


def span_of(runs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The first submit_s and the last end_s of several runs (submit_s, end_s)."""
    return min(first for first, _ in runs), max(last for _, last in runs)
