"""What each past run says of the memory it needed: a peak, a peak that was cut off, or nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from almanac.config import AdviceSection, Tier

INFORMATIVE = ("telemetry", "jobstats")
PREALLOCATED = "preallocated memory"
FAILED_EARLY = "failed before its end"
ENDED_WELL = ("COMPLETED", "TIMEOUT", "CANCELLED", "PREEMPTED")


@dataclass(frozen=True)
class Run:
    """One ended run of a job.

    peak_mib: as measured; NaN where it says nothing. need_mib: the least HBM that the run can have needed, with the
    margin for spikes; NaN likewise. is_censored: it may have needed more. is_oom: it seems to have died of that.
    is_failed: it failed, so that its peak is no more than a least need. is_known: it says what the family needs, if
    only "at least the capacity". capacity_mib: of the GPUs it ran on; infinite where unknown. submit_s, end_s: s since
    1970. why_not: in a word, why the run is no evidence; "" where it is.
    """

    peak_mib: float
    need_mib: float
    is_censored: bool
    is_oom: bool
    is_failed: bool
    capacity_mib: float
    submit_s: int
    end_s: int
    why_not: str = ""
    is_known: bool = False


def runs_of(history: pd.DataFrame, config: AdviceSection, tiers: Sequence[Tier] = ()) -> list[Run | None]:
    """One per row of the history frame, in its order; None for a job that has not ended."""
    capacities = {tier.name: float(tier.capacity_mib) for tier in tiers}
    verdicts = history["verdict"].fillna("").astype(str) if "verdict" in history else pd.Series("", history.index)
    asked = [capacities.get(tier, math.inf) if isinstance(tier, str) else math.inf for tier in history["tier"]]
    columns = [
        history[name].astype("float64").tolist() for name in ("hbm_peak_mib", "hbm_capacity_mib", "submit_s", "end_s")
    ]
    texts = [history[name].astype(str).tolist() for name in ("hbm_evidence", "state")]
    return [
        None
        if math.isnan(end)
        else _run(peak, known if known > 0 else tier, int(submit), int(end), evidence, state, verdict, config)
        for peak, known, submit, end, evidence, state, verdict, tier in zip(
            *columns, *texts, verdicts.tolist(), asked, strict=True
        )
    ]


def _run(
    peak_mib: float,
    capacity_mib: float,
    submit_s: int,
    end_s: int,
    evidence: str,
    state: str,
    verdict: str,
    config: AdviceSection,
) -> Run:
    is_failed = not state.startswith(ENDED_WELL)
    if evidence not in INFORMATIVE or not peak_mib > 0 or not math.isfinite(peak_mib):
        why_not = PREALLOCATED if evidence == "preallocated" else (verdict if verdict != "ok" else "") or "no telemetry"
        return Run(math.nan, math.nan, False, False, is_failed, capacity_mib, submit_s, end_s, why_not)
    share = config.failed_share if is_failed else config.censored_share
    is_censored = peak_mib >= share * capacity_mib
    need_mib = peak_mib * (1 + config.spike_margin)
    if is_censored:
        need_mib = max(need_mib, capacity_mib)
    why_not = FAILED_EARLY if is_failed and not is_censored else ""
    is_oom = is_censored and is_failed
    return Run(
        peak_mib, need_mib, is_censored, is_oom, is_failed, capacity_mib, submit_s, end_s, why_not, is_known=not why_not
    )
