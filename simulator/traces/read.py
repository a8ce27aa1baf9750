"""Read a trace of any known format. The format is found by content, not by the file's name."""

from __future__ import annotations

import dataclasses
import gzip
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa

from almanac.config import Tier
from almanac.errors import FileFormatError, RequestError
from demo import GPUS_PER_NODE, SiteShape, generate_jobs
from simulator.cluster import Cluster, NodeSet
from simulator.traces.gavel import is_gavel, read_gavel
from simulator.traces.job_table import COLUMNS, workload_of_jobs
from simulator.traces.recorded_cluster import recorded_cluster
from simulator.traces.swf import is_swf, read_swf
from simulator.workload import Workload, make_workload
from telemetry.sources.files import FileSource
from telemetry.store.cluster_store import ClusterStore

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
    """tiers: for job tables that do not name a job's tier. are_cpus_gpus: CPUs of a job table stand for GPUs.

    throughputs: Gavel's file of steps/s. seed: of the generator.
    """

    tiers: Sequence[Tier] = ()
    are_cpus_gpus: bool = False
    throughputs: Path | None = None
    seed: int = 1


def read_trace(source: Path | str, options: TraceOptions = TraceOptions()) -> Workload:
    """The workload of `open_trace`."""
    return open_trace(source, options).workload


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
        tuple(NodeSet(nodes, GPUS_PER_NODE, "A100", mib, frozenset({"gpu", name})) for nodes, mib, name in sets)
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
