"""Read a trace of any known format, by content rather than by name, and tables of recorded jobs.

Job tables are the store, sacct exports, and other files that `almanac ingest --jobs` reads. The cluster on which the
jobs ran follows from their node lists.
"""

from __future__ import annotations

import dataclasses
import gzip
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from almanac.config import Tier
from almanac.errors import FileFormatError, RequestError
from demo import GPUS_PER_NODE, SiteShape, generate_jobs
from simulator.cluster import Cluster, NodeGroup
from simulator.requests import plain_features
from simulator.traces.gavel import is_gavel, read_gavel
from simulator.traces.swf import is_swf, read_swf
from simulator.workload import Workload, make_workload
from slurm.hostlist import expand
from slurm.states import PART_OF_JOB
from telemetry.sources.files import FileSource
from telemetry.store.store import ClusterStore

NO_GPU = "without a GPU"
COLUMNS = (
    "job_id", "submit_s", "user", "account", "partition", "qos", "name", "state", "eligible_s", "start_s", "end_s",
    "time_limit_s", "node_count", "node_list", "cpu_count", "cpu_count_req", "gpu_count", "gpu_count_req",
    "node_count_req", "gpu_type", "constraints", "tier", "array_job_id",
)  # fmt: skip
"""Columns of the table `jobs` that a workload and its cluster need."""
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
        ("requeued or resized, not a whole job", jobs["state"].isin(PART_OF_JOB).to_numpy()),
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
    hint = "if CPUs stand for GPUs in it, give --set cpus_as_gpus=1" if only_cpus else "check the trace's columns"
    return RequestError(f"the trace has no job to simulate: {said}", hint)


NODE_COLUMNS = ("node_list", "node_count", "gpu_count", "gpu_type", "partition", "constraints")
_MOST_GPUS = 64


@dataclass
class _RecordedNode:
    gpus: int = 0
    models: Counter[str] = field(default_factory=Counter)
    features: set[str] = field(default_factory=set)
    partitions: set[str] = field(default_factory=set)


def recorded_cluster(rows: pa.Table) -> Cluster | None:
    """Nodes on which GPU jobs of the table ran; None if the table names no nodes.

    A node has as many GPUs as the largest share of a job on it. It has the features that jobs on it asked for, and
    belongs to their partitions.
    """
    nodes: defaultdict[str, _RecordedNode] = defaultdict(_RecordedNode)
    hosts_of: dict[str, tuple[str, ...]] = {}
    columns = (rows[name].to_pylist() for name in NODE_COLUMNS)
    for text, count, gpus, model, partition, constraint in zip(*columns, strict=True):
        if not text or not gpus:
            continue
        if text not in hosts_of:
            try:
                hosts_of[text] = expand(text)
            except ValueError:
                hosts_of[text] = ()
        hosts = hosts_of[text]
        for host in hosts:
            node = nodes[host]
            node.gpus = max(node.gpus, min(math.ceil(gpus / max(len(hosts), count or 1)), _MOST_GPUS))
            node.models[model or ""] += 1
            node.features.update(plain_features(constraint or ""))
            node.partitions.add(partition or "")
    return _grouped(nodes.values()) if nodes else None


def _grouped(nodes: Iterable[_RecordedNode]) -> Cluster:
    """Equal nodes as one set. Partitions count only if there are several."""
    nodes = list(nodes)
    every = set().union(*(node.partitions for node in nodes))
    sets: Counter[NodeGroup] = Counter()
    for node in nodes:
        model = max(sorted(node.models), key=lambda name: node.models[name])
        partitions = tuple(sorted(node.partitions)) if len(every) > 1 else ()
        sets[NodeGroup(1, node.gpus, model, features=frozenset(node.features), partitions=partitions)] += 1
    ordered = sorted(
        sets.items(), key=lambda each: (each[0].gpus, each[0].gpu_model, sorted(each[0].features), each[0].partitions)
    )
    return Cluster(tuple(dataclasses.replace(each, nodes=count) for each, count in ordered))


GENERATED = "generated"
"""The name of the trace that the generator makes."""
_HEAD_BYTES = 1 << 16
_FOREVER = 2**40


@dataclass(frozen=True)
class Trace:
    """A workload with its name. find_cluster: the cluster on which it ran; None if the trace does not say."""

    name: str
    workload: Workload
    find_cluster: Callable[[], Cluster | None] = lambda: None


@dataclass(frozen=True)
class TraceOptions:
    """Options of reading a trace.

    tiers: for job tables that do not name a job's tier. are_cpus_gpus: CPUs of a job table stand for GPUs. throughputs:
    Gavel's file of steps/s. seed: of the generator.
    """

    tiers: Sequence[Tier] = ()
    are_cpus_gpus: bool = False
    throughputs: Path | None = None
    seed: int = 1


def open_trace(source: Path | str, options: TraceOptions = TraceOptions()) -> Trace:
    """Read a job table (Parquet or CSV, as sacct and other tools export it), SWF, or a trace of Gavel.

    source: a path, or GENERATED. Records that cannot be simulated are counted in Workload.excluded.
    Raises FileFormatError if the file has none of these formats, and RequestError if it has no job to simulate.
    """
    if source == GENERATED:
        return generated_trace(options.seed)
    path = Path(source)
    start = _head(path)
    if is_swf(start):
        records = read_swf(path)
        return Trace(path.name, _workload(records.records, records.excluded), records.cluster)
    if is_gavel(start):
        if options.throughputs is None:
            raise RequestError(f"{path}: Gavel's traces hold steps, not run times", "give --throughputs FILE")
        return Trace(path.name, _workload(*read_gavel(path, options.throughputs)))
    rows, dropped = _job_rows(path, options.tiers)
    workload = workload_of_jobs(rows, dropped, are_cpus_gpus=options.are_cpus_gpus)
    return Trace(path.name, workload, lambda: None if options.are_cpus_gpus else recorded_cluster(rows))


def stored_trace(store: ClusterStore) -> Trace:
    """The jobs of a cluster in the store."""
    rows = store.read("jobs", COLUMNS)
    return Trace(store.cluster, workload_of_jobs(rows), lambda: recorded_cluster(rows))


def generated_trace(seed: int) -> Trace:
    """Two weeks of the generated demo site: jobs that belong to job families, with names and memory tiers."""
    shape = SiteShape.demo(seed)
    workload = workload_of_jobs(generate_jobs(shape))
    sets = ((shape.nodes_40, 40_960, "hbm40g"), (shape.nodes_80, 81_920, "hbm80g"))
    cluster = Cluster(
        tuple(NodeGroup(nodes, GPUS_PER_NODE, "A100", mib, frozenset({"gpu", name})) for nodes, mib, name in sets)
    )
    return Trace(GENERATED, workload, lambda: cluster)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            start = file.read(_HEAD_BYTES)
        if start[:2] == b"\x1f\x8b":
            with gzip.open(path) as unpacked:
                start = unpacked.read(_HEAD_BYTES)
    except (OSError, EOFError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FileFormatError(f"{path}: cannot be read: {said}", "check the path and its permissions") from error
    return start


def _job_rows(path: Path, tiers: Sequence[Tier]) -> tuple[pa.Table, Mapping[str, int]]:
    """Rows of the table `jobs`, and reason to number of dropped records. A trace may lie in the future."""
    parts, dropped = [], Counter[str]()
    for batch in FileSource(path, "jobs", tiers=tiers, clock=lambda: _FOREVER).read(-_FOREVER, _FOREVER):
        parts.append(batch.rows.select(list(COLUMNS)))
        dropped.update(batch.counts.dropped)
    if not parts:
        raise RequestError(f"{path}: has no records", "check that the export is complete")
    return pa.concat_tables(parts), dropped


def _workload(records: pd.DataFrame, excluded: Mapping[str, int]) -> Workload:
    workload = make_workload(records)
    return dataclasses.replace(workload, excluded={**excluded, **workload.excluded})
