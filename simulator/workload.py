"""The jobs that a simulation runs, as one checked table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from almanac.errors import RequestError

COLUMNS: Mapping[str, tuple[str, Any]] = {
    "job_id": ("object", ""),
    "submit_s": ("int64", None),
    "run_s": ("int64", None),
    "gpu_count": ("int64", None),
    "node_count": ("int64", 0),
    "is_exclusive": ("bool", False),
    "time_limit_s": ("int64", 0),
    "cancel_s": ("int64", -1),
    "start_s": ("int64", -1),
    "cpu_count": ("int64", 0),
    "is_array": ("bool", False),
    "user": ("object", ""),
    "account": ("object", ""),
    "partition": ("object", ""),
    "qos": ("object", ""),
    "constraint": ("object", ""),
    "name": ("object", ""),
    "tier": ("object", ""),
    "state": ("object", ""),
    "kind": ("object", ""),
    "array_group": ("int64", -1),
    "deadline_s": ("int64", -1),
}
"""Type and default of each column; None: every job must have it.

run_s: seconds that the job runs when nothing slows it. gpu_count: GPUs of the whole job. node_count: 0 for as few nodes
as possible. time_limit_s: 0 for none. cancel_s: when its user cancels it if it still waits, -1 for never. start_s: when
it started on the real cluster, -1 if unknown. constraint:
features that each of its nodes must have, joined by `&`. kind: names its row in a table of speeds. array_group: number
of a group with a limit on running tasks, -1 for none. deadline_s: when it should have ended, -1 for no deadline.
"""
MOST_S = 2**40


@dataclass(frozen=True)
class Workload:
    """The jobs that a simulation runs.

    jobs: one row a job with all of COLUMNS, in the order of submission; a job's number is its row. excluded: reason to
    number of records that cannot be simulated. dependencies: pairs (job, the job that must end first). array_limits:
    array_group to the most tasks that run at once. history: jobs from which predictors learn before the simulation
    starts; they are not simulated.
    """

    jobs: pd.DataFrame
    excluded: Mapping[str, int] = field(default_factory=dict)
    dependencies: tuple[tuple[int, int], ...] = ()
    array_limits: Mapping[int, int] = field(default_factory=dict)
    history: Workload | None = None

    def __len__(self) -> int:
        return len(self.jobs)

    def array(self, column: str) -> npt.NDArray[Any]:
        return self.jobs[column].to_numpy()

    def requested_s(self) -> npt.NDArray[np.int64]:
        """Requested run times: the time limit, and the run time of jobs without one."""
        limits, runs = self.array("time_limit_s"), self.array("run_s")
        return np.where(limits > 0, limits, runs).astype("int64")


def part_of(workload: Workload, first: int, last: int) -> Workload:
    """The jobs from the number `first` to before `last`, and the dependencies between them."""
    pairs = tuple(
        (job - first, before - first) for job, before in workload.dependencies if before >= first and job < last
    )
    jobs = workload.jobs.iloc[first:last].reset_index(drop=True)
    return dataclasses.replace(workload, jobs=jobs, dependencies=pairs)


def split_history(workload: Workload, share: float) -> Workload:
    """The workload without its first jobs, which become its history. share: of all jobs, in [0, 1)."""
    first = int(len(workload) * share)
    if not first:
        return workload
    history = dataclasses.replace(part_of(workload, 0, first), excluded={}, dependencies=())
    return dataclasses.replace(part_of(workload, first, len(workload)), history=history)


def make_workload(records: pd.DataFrame, array_limits: Mapping[int, int] | None = None) -> Workload:
    """Check records with columns of COLUMNS; those that cannot be simulated are counted by reason.

    Run times are at least 1 s. A time limit ends a run. `depends_on`, where present, holds the job_id of the job that
    must end first. Raises RequestError where a column that every job needs is absent, or no job is left.
    """
    absent = [name for name, (_, default) in COLUMNS.items() if default is None and name not in records]
    if absent:
        raise RequestError(f"the trace has no column {absent[0]}", f"give one row a job with {', '.join(_needed())}")
    reasons = _exclusions(records)
    kept = records[reasons == ""]
    excluded = {str(reason): int(count) for reason, count in pd.Series(reasons[reasons != ""]).value_counts().items()}
    if kept.empty:
        said = "; ".join(f"{count} {reason}" for reason, count in excluded.items()) or "it is empty"
        raise RequestError(f"the trace has no job to simulate: {said}", "check the trace's columns and units")
    kept = kept.sort_values("submit_s", kind="stable", ignore_index=True)
    jobs = pd.DataFrame({name: _column(kept, name) for name in COLUMNS})
    if (jobs["job_id"] == "").all():
        jobs["job_id"] = [str(number) for number in range(len(jobs))]
    limits = jobs["time_limit_s"].to_numpy()
    run_s = np.maximum(jobs["run_s"].to_numpy(), 1)
    jobs["run_s"] = np.where(limits > 0, np.minimum(run_s, limits), run_s)
    return Workload(jobs, excluded, _dependencies(kept, jobs), dict(array_limits or {}))


def _needed() -> list[str]:
    return [name for name, (_, default) in COLUMNS.items() if default is None]


def _exclusions(records: pd.DataFrame) -> npt.NDArray[np.object_]:
    """Reason by record; "" for those that can be simulated."""
    reasons = np.full(len(records), "", dtype=object)
    submit, run, gpus = (pd.to_numeric(records[name], errors="coerce").to_numpy("float64") for name in _needed())
    for reason, is_excluded in (
        ("without a submit time", ~np.isfinite(submit) | (np.abs(submit) > MOST_S)),
        ("that never ran or have no end", ~np.isfinite(run)),
        ("with a negative run time", run < 0),
        ("with an impossible run time", run > MOST_S),
        ("without a GPU", ~(gpus >= 1)),
        ("with an impossible number of GPUs", (gpus > 10**6) | (gpus != np.floor(gpus))),
    ):
        reasons[(reasons == "") & is_excluded] = reason
    return reasons


def _column(kept: pd.DataFrame, name: str) -> Any:
    kind, default = COLUMNS[name]
    if name not in kept:
        return np.full(len(kept), default, dtype=kind)
    if kind == "object":
        return kept[name].astype(object).where(kept[name].notna(), "").astype(str).to_numpy(dtype=object)
    values = pd.to_numeric(kept[name], errors="coerce").to_numpy("float64")
    missing = ~np.isfinite(values)
    # Missing limits are absent limits; a limit of more than MOST_S never ends a run.
    return np.where(missing, default if default is not None else 0, np.minimum(values, MOST_S)).astype(kind)


def _dependencies(kept: pd.DataFrame, jobs: pd.DataFrame) -> tuple[tuple[int, int], ...]:
    """Pairs by row; a job that is not in the trace holds up none."""
    if "depends_on" not in kept:
        return ()
    rows = {job_id: row for row, job_id in enumerate(jobs["job_id"])}
    named = kept["depends_on"].astype(object).where(kept["depends_on"].notna(), "").astype(str)
    found = ((row, rows.get(job_id)) for row, job_id in enumerate(named) if job_id)
    return tuple((row, before) for row, before in found if before is not None and before != row)
