"""A generated site's history frame, drawn from the needs themselves: as if its telemetry had been summarised.

The rows are those of telemetry.history.load_history. Only the HBM peak is drawn; no sample of telemetry is made.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from telemetry.sources.generated.families import MIB_40
from telemetry.sources.generated.hostile import GROWING, KINDS, NEW_USER, PLAIN, PREALLOCATING, hostile_profile
from telemetry.sources.generated.jobs import FAILED
from telemetry.sources.generated.plan import SitePlan, jobs_table, shown_peak_mib
from telemetry.sources.generated.population import REGULAR
from telemetry.sources.generated.profile import Floats
from telemetry.sources.generated.quotas import rank_within

TRUTH = ("need_mib", "kind", "family", "chance_above")
MIN_RUN_S = 180
"""Shorter runs have no verdict (perlmutter-telemetry, II-C)."""


def record_of(plan: SitePlan, usable_mib: float = MIB_40) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The history frame of the jobs that ran and ended, and, row by row, what no site knows of them (TRUTH).

    chance_above: probability that a job drawn from the same family at the same moment needs more than usable_mib.
    """
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
            "chance_above": chance_above(plan, usable_mib)[runs.job],
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
    least, most = measured["missed"]
    peak: Floats = shown_peak_mib(plan) * (1 - rng.uniform(least, most, number))
    starved = (plan.jobs.need_mib[runs.job] > runs.capacity_mib) & (runs.state == FAILED)
    is_silent = starved & (rng.random(number) < measured["silent_death_share"])
    least, most = measured["silent_death_peak"]
    shown: Floats = np.where(is_silent, runs.capacity_mib * rng.uniform(least, most, number), peak)
    return shown


def chance_above(plan: SitePlan, usable_mib: float) -> Floats:
    """Per job, the chance that its family's next need, at this stage of its growth, is above usable_mib."""
    families, jobs = plan.families, plan.jobs
    family = jobs.family
    rank, of = rank_within(family)
    first, last = families.grow_mib[family].T
    grown = first + (last - first) * (rank + 0.5) / of
    by_trend = _normal_above(usable_mib / grown, np.full(len(family), 0.01))
    chance, times = np.zeros(len(family)), np.ones(len(family))
    if plan.hostile:
        chance, times = plan.hostile.chance[family], plan.hostile.factor[family]
        growth = times ** ((rank + 0.5) / of - 0.5)
        usual = np.where(plan.hostile.kind[family] == GROWING, growth, 1.0)
    else:
        usual = times
    around = (1 - chance) * _around(plan, usable_mib / usual) + chance * _around(plan, usable_mib / times)
    return np.where(families.is_growing[family], by_trend, around)


def _around(plan: SitePlan, limit_mib: Floats) -> Floats:
    """Chance that a need around the family's usual one, within its band, is above limit_mib (one per job)."""
    families, family = plan.families, plan.jobs.family
    above = _normal_above(limit_mib / families.need_mib[family], families.need_spread[family])
    above = np.where(limit_mib >= families.need_high_mib[family], 0.0, above)
    return np.where(limit_mib < families.need_low_mib[family] * 1.001, 1.0, above)


def _normal_above(ratio: Floats, spread: Floats) -> Floats:
    """Chance that 1 + spread times a normal deviate, cut off at three, exceeds ratio."""
    deviate = (ratio - 1) / spread
    tail = np.array([0.5 * math.erfc(value / math.sqrt(2)) for value in deviate.tolist()])
    return np.where(deviate >= 3, 0.0, np.where(deviate < -3, 1.0, tail))


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
