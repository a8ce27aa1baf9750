"""A generated site's history frame, drawn from the needs themselves, without telemetry.

The rows are those of telemetry.history.load_history. Only the HBM peak is drawn; no sample of telemetry is made. What
counts as reserved is decided by the product's rule, from what telemetry shows, and never from the truth.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from hostile_site import (
    GAPS,
    KINDS,
    NEW_USER,
    PLAIN,
    PREALLOCATING,
    RESERVED,
    batch_of,
    hostile_profile,
    plan_hostile,
)

from demo.jobs import FAILED
from demo.shape import Arrays, Bools, Floats, Ints, SiteShape
from demo.site import SitePlan, jobs_table, plan_site, shown_peak_mib
from demo.users import REGULAR
from telemetry.metrics.data_quality import NO_TELEMETRY, OK, SHORT
from telemetry.metrics.preallocation import is_reserved_share

TRUTH = ("need_mib", "kind", "family", "batch", "is_death")
MIN_RUN_S = 180
"""Shorter runs have no verdict (perlmutter-telemetry, II-C)."""


def record_of(shape: SiteShape, *, is_hostile: bool = True) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The history frame of the jobs that ran and ended, and, row by row, what no site knows of them (TRUTH).

    batch: number of the batch within the family, -1 for none. is_death: the run died for want of memory. is_hostile:
    some families need memory as hostile_site.toml has it.
    """
    plan, hostile = plan_hostile(shape) if is_hostile else (plan_site(shape), None)
    runs, jobs = plan.runs, plan.jobs
    family = jobs.family[runs.job]
    drawn = pd.DataFrame(
        {
            "job_id": jobs.job_id[runs.job],
            "submit_s": runs.submit_s,
            "hbm_max_mib": _measured_mib(plan, hostile),
            "hbm_capacity_mib": runs.capacity_mib,
            "is_flat": _is_flat(plan, hostile),
            "role": jobs.role[runs.job],
            "need_mib": jobs.need_mib[runs.job],
            "kind": _kinds(plan, hostile),
            "family": family,
            "batch": batch_of(hostile, jobs)[runs.job] if hostile else -1,
            "is_death": _is_death(plan),
        }
    )
    accounting = jobs_table(plan).to_pandas()
    frame = accounting.merge(drawn, on=["job_id", "submit_s"], validate="one_to_one")
    frame = frame[frame["start_s"].notna() & frame["end_s"].notna() & (frame["role"] == REGULAR)]
    frame = frame.sort_values(["end_s", "job_id", "submit_s"], ignore_index=True)
    frame["is_array"] = frame["array_job_id"].notna()
    frame["time_limit_s"] = frame["time_limit_s"].astype("float64")
    frame["elapsed_s"] = frame["elapsed_s"].astype("float64")
    frame = frame.assign(**evidence_columns(frame))
    whole = {"job_id": "int64", "submit_s": "int64", "start_s": "int64", "end_s": "int64"}
    return frame.drop(columns=["role", *TRUTH]).astype(whole), frame[list(TRUTH)]


def evidence_columns(frame: pd.DataFrame) -> dict[str, Any]:
    """hbm_peak_mib, hbm_evidence and verdict, as the store has them of hbm_max_mib, is_flat and elapsed_s."""
    is_short, is_seen = frame["elapsed_s"] < MIN_RUN_S, frame["hbm_max_mib"].notna()
    share = (frame["hbm_max_mib"] / frame["hbm_capacity_mib"]).tolist()
    is_reserved = frame["is_flat"] & np.array([is_reserved_share(each) for each in share], dtype=bool) & ~is_short
    is_known = ~is_short & is_seen & ~is_reserved
    return {
        "hbm_peak_mib": frame["hbm_max_mib"].where(is_known),
        "hbm_evidence": np.select([is_reserved, is_known], ["preallocated", "telemetry"], "none"),
        "verdict": np.select([is_short, ~is_seen], [SHORT, NO_TELEMETRY], OK),
    }


def _is_death(plan: SitePlan) -> Bools:
    runs, jobs = plan.runs, plan.jobs
    starved: Bools = (jobs.need_mib[runs.job] > runs.capacity_mib) & (runs.state == FAILED)
    return starved & (plan.families.framework[jobs.family[runs.job]] < 0)


def _measured_mib(plan: SitePlan, hostile: Arrays | None) -> Floats:
    """The highest sample: a little less than the peak, of some deaths of memory much less; NaN without telemetry."""
    rng = np.random.default_rng([plan.shape.seed, 13])
    tables, runs = hostile_profile(), plan.runs
    number, family = len(runs.job), plan.jobs.family[runs.job]
    least, most = tables["measured"]["missed"]
    shown: Floats = shown_peak_mib(plan) * (1 - rng.uniform(least, most, number))
    is_silent = _is_death(plan) & (rng.random(number) < tables["measured"]["silent_death_share"])
    least, most = tables["measured"]["silent_death_peak"]
    shown = np.where(is_silent, runs.capacity_mib * rng.uniform(least, most, number), shown)
    if hostile is None:
        return shown
    kind, chance, factor = hostile.kind[family], hostile.chance[family], hostile.factor[family]
    shown = np.where((kind == RESERVED) & ~_is_death(plan), factor * runs.capacity_mib, shown)
    is_missed = rng.random(number) < tables["gaps"]["missed_share"]
    least, most = tables["gaps"]["missed_peak"]
    partly = np.where(is_missed, shown * rng.uniform(least, most, number), shown)
    seen = np.where(rng.random(number) < chance, np.nan, partly)
    return np.where(kind == GAPS, seen, shown)


def _is_flat(plan: SitePlan, hostile: Arrays | None) -> Bools:
    """Whether use stays within 1% of the capacity below its peak for most of the run."""
    rng = np.random.default_rng([plan.shape.seed, 19])
    measured, family = hostile_profile()["measured"], plan.jobs.family[plan.runs.job]
    of_family = rng.random(len(plan.families.framework)) < measured["flat_share"]
    of_death = rng.random(len(family)) < measured["flat_death_share"]
    flat: Bools = np.where(_is_death(plan), of_death, of_family[family])
    is_reserving = plan.families.framework[family] >= 0
    if hostile is not None:
        is_reserving |= hostile.kind[family] == RESERVED
    return flat | is_reserving


def _kinds(plan: SitePlan, hostile: Arrays | None) -> list[str]:
    """Per run: what its family is, else what its user is."""
    family: Ints = plan.jobs.family[plan.runs.job]
    kind = hostile.kind[family] if hostile else np.full(len(family), PLAIN)
    user = plan.families.user[family]
    named = np.array(KINDS, dtype=object)[kind]
    named = np.where((kind == PLAIN) & plan.families.is_growing[family], "growing", named)
    is_new = plan.users.first_s[user] > plan.shape.start_s
    named = np.where((named == KINDS[PLAIN]) & is_new, NEW_USER, named)
    return [str(name) for name in np.where(plan.families.framework[family] >= 0, PREALLOCATING, named)]
