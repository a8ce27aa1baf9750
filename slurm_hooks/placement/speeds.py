"""Run times by GPU type of the jobs in the queue, from the site's speed table (advisor.speed)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from almanac.errors import AlmanacError, NoModelError
from slurm_hooks.placement.state import RunTime, SpeedTable
from telemetry.slurm.placement_queue import QueueJob

if TYPE_CHECKING:
    from almanac.config import Config
    from telemetry.store.cluster_store import ClusterStore

LONG_RUN = 0.9
"""Probability that a run is in the interval whose end must be within the time limit."""


def stored_speeds(store: ClusterStore, config: Config, now_s: int) -> SpeedTable:
    """From the jobs in the store, read here and now. Raises NoModelError where there is no speed table.

    Raises StoreError where the store cannot be read. The callable raises NoModelError where the table knows fewer than
    two of the types.
    """
    site = _module("advisor.speed.site")
    runs = _module("advisor.speed.runs").load_speed_runs(store)
    table = site.learn_site_speeds(runs, config, now_s)
    families = site.user_families(runs, table, config, now_s)

    def times(jobs: Sequence[QueueJob], types: Sequence[str]) -> Mapping[int, Sequence[RunTime]]:
        if len(set(table.names) & set(types)) < 2:
            raise NoModelError(
                f"the store has run times of {len(set(table.names) & set(types))} of {len(types)} GPU types",
                "check placement.types against the GPU types of `almanac jobs`, or wait for more jobs",
            )
        return {
            job.job_id: [
                _run_time(each, config.training.coverage)
                for each in site.request_times(job.record.request(), families, table, None, config)
            ]
            for job in jobs
        }

    return times


def speeds_or_fault(store: ClusterStore, config: Config, now_s: int) -> SpeedTable:
    """`stored_speeds`; where there are none, a callable that raises why, so that earlier changes can be settled."""
    try:
        return stored_speeds(store, config, now_s)
    except AlmanacError as error:
        found = error

    def fail(jobs: Sequence[QueueJob], types: Sequence[str]) -> Mapping[int, Sequence[RunTime]]:
        raise found

    return fail


def _run_time(each: Any, coverage: float) -> RunTime:
    """Of advisor.speed's TypeTime. A single run varies more than the usual time, whose interval is not used."""
    low_s, high_s = each.next_run(coverage)
    return RunTime(each.gpu_type, each.run_s, low_s, high_s, max(high_s, each.next_run(LONG_RUN)[1]))


def no_speeds(jobs: Sequence[QueueJob], types: Sequence[str]) -> Mapping[int, Sequence[RunTime]]:
    """A table without any job."""
    return {}


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NoModelError("this almanac has no speed table", "install a release with advisor.speed") from error
