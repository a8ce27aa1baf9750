"""Workloads from job tables: the store, sacct exports, and other files that `almanac ingest --jobs` reads."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from almanac.errors import RequestError
from simulator.workload import Workload, make_workload

NO_GPU = "without a GPU"
COLUMNS = (
    "job_id", "submit_s", "user", "account", "partition", "qos", "name", "state", "eligible_s", "start_s", "end_s",
    "time_limit_s", "node_count", "node_list", "cpu_count", "cpu_count_req", "gpu_count", "gpu_count_req",
    "node_count_req", "gpu_type", "constraints", "tier", "array_job_id",
)  # fmt: skip
"""What a workload and its cluster need of the table `jobs`."""
_PARTS = ("REQUEUED", "RESIZING")
_TEXTS = ("user", "account", "partition", "qos", "name", "tier", "state")


def workload_of_jobs(
    rows: pa.Table, dropped: Mapping[str, int] | None = None, *, are_cpus_gpus: bool = False
) -> Workload:
    """The ended GPU jobs of a table with the columns COLUMNS.

    A job asks for the GPUs and nodes that it requested. If the request is unknown, it asks for the GPUs that it was
    allocated. It enters the queue when it became eligible, and runs from its start to its end. dropped: records that
    the reader of the file left out, by reason. are_cpus_gpus: CPUs stand for GPUs, for traces without GPUs.
    Raises RequestError if no job is left.
    """
    jobs = rows.select(list(COLUMNS)).to_pandas()
    gpus = _gpus(jobs, are_cpus_gpus)
    reasons = _exclusions(jobs, gpus)
    kept = jobs[reasons == ""]
    excluded = Counter({**(dropped or {})})
    excluded.update(Counter(reasons[reasons != ""].tolist()))
    if kept.empty:
        raise _no_job(excluded, int((_number(jobs, "cpu_count") > 0).sum()))
    workload = make_workload(_records(kept, gpus[reasons == ""], are_cpus_gpus))
    excluded.update(workload.excluded)
    return dataclasses.replace(workload, excluded=dict(excluded.most_common()))


def _number(jobs: pd.DataFrame, name: str) -> npt.NDArray[np.float64]:
    return np.asarray(pd.to_numeric(jobs[name]).to_numpy("float64", na_value=np.nan))


def _gpus(jobs: pd.DataFrame, are_cpus_gpus: bool) -> npt.NDArray[np.float64]:
    """GPUs of each job, 0 for none."""
    if are_cpus_gpus:
        return np.nan_to_num(_number(jobs, "cpu_count"))
    asked, given = np.nan_to_num(_number(jobs, "gpu_count_req")), np.nan_to_num(_number(jobs, "gpu_count"))
    return np.where(asked > 0, asked, given)


def _exclusions(jobs: pd.DataFrame, gpus: npt.NDArray[np.float64]) -> npt.NDArray[np.object_]:
    """Reason by row, "" for jobs that can be simulated."""
    has_start, has_end = jobs["start_s"].notna().to_numpy(), jobs["end_s"].notna().to_numpy()
    # Old releases of Slurm give a job that was canceled in the queue its end as its start.
    is_canceled_at_start = ((jobs["state"] == "CANCELLED") & (jobs["start_s"] == jobs["end_s"])).to_numpy()
    reasons = np.full(len(jobs), "", dtype=object)
    for reason, is_excluded in (
        ("repeated", jobs.duplicated(["job_id", "submit_s"], keep="last").to_numpy()),
        (NO_GPU, gpus < 1),
        ("requeued or resized, not a whole job", jobs["state"].isin(_PARTS).to_numpy()),
        ("still running", has_start & ~has_end),
        ("still pending", ~has_start & ~has_end),
        ("never ran", (~has_start & has_end) | is_canceled_at_start),
    ):
        reasons[(reasons == "") & is_excluded] = reason
    return reasons


def _records(jobs: pd.DataFrame, gpus: npt.NDArray[np.float64], are_cpus_gpus: bool) -> pd.DataFrame:
    """Columns of simulator.workload.COLUMNS."""
    start_s, submit_s = _number(jobs, "start_s"), _number(jobs, "submit_s")
    nodes, given = _number(jobs, "node_count_req"), _number(jobs, "gpu_count")
    # Accounting says node=1 for a job that names only its GPUs; such a job may take as many nodes as it needs.
    is_spread = (nodes > 1) & (nodes <= gpus)
    columns: dict[str, Any] = {
        "job_id": jobs["job_id"].astype(str),
        "submit_s": np.fmax(submit_s, np.minimum(_number(jobs, "eligible_s"), start_s)),
        "run_s": _number(jobs, "end_s") - start_s,
        "gpu_count": gpus,
        "node_count": np.where(is_spread, nodes, 0),
        # A job that got more GPUs than it asked for has whole nodes.
        "is_exclusive": np.zeros(len(jobs), dtype=bool) if are_cpus_gpus else given > gpus,
        "start_s": start_s,
        "cpu_count": jobs["cpu_count_req"].fillna(jobs["cpu_count"]),
        "is_array": jobs["array_job_id"].notna(),
        "time_limit_s": _number(jobs, "time_limit_s"),
        "constraint": jobs["constraints"],
    }
    return pd.DataFrame({**columns, **{name: jobs[name] for name in _TEXTS}})


def _no_job(excluded: Mapping[str, int], with_cpus: int) -> RequestError:
    said = "; ".join(f"{count} {reason}" for reason, count in excluded.items()) or "it is empty"
    only_cpus = with_cpus and NO_GPU in excluded
    hint = "if CPUs stand for GPUs in it, give --cpus-as-gpus" if only_cpus else "check the trace's columns"
    return RequestError(f"the trace has no job to simulate: {said}", hint)
