"""The speeds of a site's GPU types, learned from its jobs and read for one submission."""

from __future__ import annotations

import numpy as np
import pandas as pd

from advisor.duration.features import submission_of
from advisor.duration.intervals import COVERAGE
from advisor.speed.gpu_types import learn_types
from advisor.speed.learning import SpeedTable, learn_speeds
from advisor.speed.runs import FamilyKey, FamilyRuns, families_of, load_speed_runs, runs_of
from advisor.speed.times import MemoryFit, TypeTime, family_times
from almanac.config import Config
from almanac.records import MemoryBound, Request
from almanac.units import DAY_S
from telemetry.store.cluster_store import ClusterStore


def learn_site_speeds(jobs: pd.DataFrame, config: Config, now_s: int) -> SpeedTable:
    """From `load_speed_runs` of everybody: the jobs of the last 120 days that ended before now_s. Pure."""
    known = known_runs(jobs, config, now_s)
    types = learn_types(known, config.tiers)
    return learn_speeds(families_of(runs_of(known, types)), types)


def known_runs(jobs: pd.DataFrame, config: Config, now_s: int) -> pd.DataFrame:
    """The rows that count at now_s, oldest end first."""
    ends = jobs["end_s"].to_numpy(dtype="float64", na_value=np.nan)
    is_known = (ends < now_s) & (jobs["submit_s"].to_numpy(dtype="int64") >= now_s - config.advice.history_days * DAY_S)
    return jobs[is_known].sort_values(["end_s", "job_id", "submit_s"], kind="stable")


def user_families(jobs: pd.DataFrame, table: SpeedTable, config: Config, now_s: int) -> dict[FamilyKey, FamilyRuns]:
    """The families of these jobs, by the site's names of types. jobs: `load_speed_runs` of the users. Pure."""
    return families_of(runs_of(known_runs(jobs, config, now_s), table.types))


def request_times(
    request: Request,
    families: dict[FamilyKey, FamilyRuns],
    table: SpeedTable,
    bound: MemoryBound | None,
    config: Config,
) -> tuple[TypeTime, ...]:
    """The run time of a submission on each GPU type that holds it; () without completed runs like it. Pure.

    families: `user_families` of the user. bound: of the submission's advice. A bound that was not stated in MiB, but
    leads to a tier, counts with the memory that the tier must have.
    """
    job = submission_of(request, config.tiers)
    need_mib = None
    if bound is not None:
        need_mib = bound.bound_mib if bound.bound_mib is not None else bound.tier_mib
    fit = MemoryFit(need_mib, float(config.advice.headroom_mib))
    key = FamilyKey(job.user, job.name_key, job.gpu_count)
    return family_times(key, families, table, fit, COVERAGE)


def stored_times(
    store: ClusterStore, request: Request, table: SpeedTable, bound: MemoryBound | None, config: Config, now_s: int
) -> tuple[TypeTime, ...]:
    """`request_times` from the user's jobs in the store. Raises StoreError."""
    if len(table.names) < 2:
        return ()
    families = user_families(load_speed_runs(store, user=request.user), table, config, now_s)
    return request_times(request, families, table, bound, config)
