"""A generated site's history frame, drawn from the needs themselves: as if its telemetry had been summarised.

The rows are those of telemetry.history.load_history. Only the HBM peak is drawn; no sample of telemetry is made.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from telemetry.sources.generated.hostile import KINDS, NEW_USER, PLAIN, PREALLOCATING, hostile_profile
from telemetry.sources.generated.jobs import FAILED
from telemetry.sources.generated.plan import SitePlan, jobs_table, shown_peak_mib
from telemetry.sources.generated.population import REGULAR
from telemetry.sources.generated.profile import Floats

TRUTH = ("need_mib", "kind", "family")
MIN_RUN_S = 180
"""Shorter runs have no verdict (perlmutter-telemetry, II-C)."""


def record_of(plan: SitePlan) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The history frame of the jobs that ran and ended, and, row by row, what no site knows of them (TRUTH)."""
    runs, jobs = plan.runs, plan.jobs
    drawn = pd.DataFrame(
        {
            "job_id": jobs.job_id[runs.job],
            "submit_s": runs.submit_s,
            "peak_mib": _measured_mib(plan),
            "hbm_capacity_mib": runs.capacity_mib,
            "is_preallocated": plan.families.framework[jobs.family[runs.job]] >= 0,
            "role": jobs.role[runs.job],
            "need_mib": jobs.need_mib[runs.job],
            "kind": _kinds(plan),
            "family": jobs.family[runs.job],
        }
    )
    accounting = jobs_table(plan).to_pandas()
    frame = accounting.merge(drawn, on=["job_id", "submit_s"], validate="one_to_one")
    frame = frame[frame["start_s"].notna() & frame["end_s"].notna() & (frame["role"] == REGULAR)]
    frame = frame.sort_values(["end_s", "job_id", "submit_s"], ignore_index=True)
    is_short = frame["elapsed_s"] < MIN_RUN_S
    known = ~is_short & ~frame["is_preallocated"]
    frame["hbm_peak_mib"] = frame["peak_mib"].where(known)
    frame["hbm_evidence"] = np.select([is_short, frame["is_preallocated"]], ["none", "preallocated"], "telemetry")
    frame["verdict"] = np.where(is_short, "short", "ok")
    frame["is_array"] = frame["array_job_id"].notna()
    frame["time_limit_s"] = frame["time_limit_s"].astype("float64")
    frame["elapsed_s"] = frame["elapsed_s"].astype("float64")
    whole = {"job_id": "int64", "submit_s": "int64", "start_s": "int64", "end_s": "int64"}
    return frame.drop(columns=["peak_mib", "is_preallocated", "role", *TRUTH]).astype(whole), frame[list(TRUTH)]


def _measured_mib(plan: SitePlan) -> Floats:
    """What the samples show: a little less than the peak, and of some that die of memory much less."""
    rng = np.random.default_rng([plan.shape.seed, 13])
    measured, runs = hostile_profile()["measured"], plan.runs
    number = len(runs)
    peak = shown_peak_mib(plan) * (1 - rng.uniform(*measured["missed"], number))
    starved = (plan.jobs.need_mib[runs.job] > runs.capacity_mib) & (runs.state == FAILED)
    is_silent = starved & (rng.random(number) < measured["silent_death_share"])
    return np.where(is_silent, runs.capacity_mib * rng.uniform(*measured["silent_death_peak"], number), peak)


def _kinds(plan: SitePlan) -> list[str]:
    """Per run: what its family is, else what its user is."""
    family = plan.jobs.family[plan.runs.job]
    kind = plan.hostile.kind[family] if plan.hostile else np.full(len(family), PLAIN)
    user = plan.people.family_user[family]
    named = np.array(KINDS, dtype=object)[kind]
    named = np.where((kind == PLAIN) & plan.families.is_growing[family], "growing", named)
    is_new = plan.people.user_first_s[user] > plan.shape.start_s
    named = np.where((named == KINDS[PLAIN]) & is_new, NEW_USER, named)
    return [str(name) for name in np.where(plan.families.framework[family] >= 0, PREALLOCATING, named)]
