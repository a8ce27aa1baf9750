"""Run times by GPU type of the jobs in the queue, from the site's trained speed table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from advisor.artefacts import load_speeds
from advisor.duration.intervals import COVERAGE
from advisor.speed.runs import load_speed_runs
from advisor.speed.site import request_times, user_families
from almanac.errors import AlmanacError, NoModelError
from almanac.units import DAY_S
from slurm_hooks.placement.state import RunTime, SpeedTable
from telemetry.slurm.placement_queue import QueueJob

if TYPE_CHECKING:
    from advisor.speed.times import TypeTime
    from almanac.config import Config
    from telemetry.store.cluster_store import ClusterStore

LONG_RUN = 0.9
"""Probability that a run is in the interval whose end must be within the time limit."""
TRAIN = "run `almanac train`, or see `almanac run --list`"


def stored_speeds(store: ClusterStore, config: Config, now_s: int, users: Collection[str]) -> SpeedTable:
    """By the trained table, and the runs of these users in the store, read here and now.

    Raises NoModelError where nothing is trained, StoreError where the store or the table cannot be read. The callable
    raises NoModelError where the table knows fewer than two of the types.
    """
    table = load_speeds(store.models_dir)
    if table is None:
        raise NoModelError("no model is trained, so the speeds of the GPU types are not known", TRAIN)
    since_s = now_s - config.advice.history_days * DAY_S
    families = user_families(load_speed_runs(store, users, since_s), table, config, now_s)

    def times(jobs: Sequence[QueueJob], types: Sequence[str]) -> Mapping[int, Sequence[RunTime]]:
        known = sorted(set(table.names) & set(types))
        if len(known) < 2:
            raise NoModelError(
                f"the trained speeds hold {len(known)} of {len(types)} GPU types ({', '.join(table.names) or 'none'})",
                f"correct placement.types, or, once jobs ran on each type, {TRAIN}",
            )
        return {
            job.job_id: [
                _run_time(each, COVERAGE) for each in request_times(job.record.request(), families, table, None, config)
            ]
            for job in jobs
        }

    return times


def speeds_or_fault(store: ClusterStore, config: Config, now_s: int, users: Collection[str]) -> SpeedTable:
    """`stored_speeds`; where there are none, a callable that raises why, so that earlier changes can be settled."""
    try:
        return stored_speeds(store, config, now_s, users)
    except AlmanacError as error:
        found = error

    def fail(jobs: Sequence[QueueJob], types: Sequence[str]) -> Mapping[int, Sequence[RunTime]]:
        raise found

    return fail


def _run_time(each: TypeTime, coverage: float) -> RunTime:
    """A single run varies more than the usual time, whose interval is not used."""
    low_s, high_s = each.next_run(coverage)
    return RunTime(each.gpu_type, each.run_s, low_s, high_s, max(high_s, each.next_run(LONG_RUN)[1]))


def no_speeds(jobs: Sequence[QueueJob], types: Sequence[str]) -> Mapping[int, Sequence[RunTime]]:
    """A table without any job."""
    return {}
