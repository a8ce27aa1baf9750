"""The counters of a job's GPUs over time, on a grid of limited size."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.attribution.host_names import match_hosts
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.partitions import partition_start
from telemetry.store.schema import schema_of, table_of

Floats: TypeAlias = npt.NDArray[np.float32]

MAX_BINS = 600
MIN_BINS = 60
MAX_CELLS = 200_000
"""Most GPUs times bins of one counter. Jobs with more than 333 GPUs get fewer bins."""
DEFAULT_INTERVAL_S = 10.0

_MEANS = (
    "gpu_util_pct", "gr_engine_active_frac", "power_w", "dram_active_frac", "fp64_active_frac", "fp32_active_frac",
    "fp16_active_frac", "tensor_active_frac",
)  # fmt: skip
COUNTERS = (*_MEANS, "hbm_used_mib")
_ALLOCATIONS = schema_of(
    {
        "allocation": pa.int32(),
        "host": pa.string(),
        "gpu": pa.int16(),
        "mig": pa.string(),
        "start_ms": pa.int64(),
        "end_ms": pa.int64(),
        "bin_ms": pa.int64(),
        "bins": pa.int64(),
        "label": pa.int64(),
        "engines": pa.int64(),
    }
)


@dataclass(frozen=True)
class GpuSeries:
    """A job's counters over time. units: host:gpu or host:gpu:mig, one for each row.

    values: by counter, (n_gpus, n_bins); NaN if unknown. A bin has the mean of its samples, or the highest sample of
    hbm_used_mib. bin_s: seconds of a bin.
    """

    units: tuple[str, ...]
    bin_s: float
    values: Mapping[str, Floats]

    @property
    def bins(self) -> int:
        return int(self.values["hbm_used_mib"].shape[1])

    def has(self, counter: str) -> bool:
        return bool(np.isfinite(self.values[counter]).any())

    @property
    def util_pct(self) -> Floats:
        """GPU_UTIL in percent, or what stands for it on MIG; without it, the activity of the graphics engine."""
        if self.has("gpu_util_pct"):
            return self.values["gpu_util_pct"]
        return self.values["gr_engine_active_frac"] * np.float32(100)


@dataclass(frozen=True)
class SeriesRequest:
    """A run to load, [start_s, end_s), with its GPUs (host, gpu, mig) from gpu_metrics.

    interval_s: seconds between samples; None if unknown. label: the job id that samples must have in their label, if
    the label says which GPUs the job had. engines: compute slices of each GPU that is a MIG instance; None: unknown.
    """

    start_s: int
    end_s: int
    units: tuple[tuple[str, int, str], ...]
    interval_s: float | None = None
    label: int | None = None
    engines: tuple[int | None, ...] = ()

    def bins(self) -> int:
        """The number of bins. Each has at least two samples, so that a late sample leaves no gap."""
        most = max(MIN_BINS, min(MAX_BINS, MAX_CELLS // max(len(self.units), 1)))
        narrowest_s = 2 * (self.interval_s or DEFAULT_INTERVAL_S)
        return max(1, min(most, int((self.end_s - self.start_s) / narrowest_s)))

    def bin_ms(self) -> int:
        return max(1, -(-(self.end_s - self.start_s) * 1000 // self.bins()))


def load_series(store: ClusterStore, wanted: Sequence[SeriesRequest]) -> list[GpuSeries | None]:
    """The series of each run, in order; None if no GPU or no sample is known. Reads every file once.

    Raises StoreError.
    """
    if not any(run.units for run in wanted):
        return [None] * len(wanted)
    paths = _files(store, wanted)
    allocations = _allocations(wanted)
    if not paths:
        return [None] * len(wanted)
    with store.connect() as db:
        rows = _read(db, paths, allocations)
        if len(pc.unique(rows["allocation"])) < allocations.num_rows and (nodes := _nodes(db, paths, allocations)):
            rows = _read(db, paths, allocations, nodes)
    return _split(rows, wanted)


def _files(store: ClusterStore, wanted: Sequence[SeriesRequest]) -> list[str]:
    """The telemetry files of the hours in which any of the runs ran."""
    hours = {hour for run in wanted if run.units for hour in range(run.start_s // 3600, (run.end_s - 1) // 3600 + 1)}
    if not hours:
        return []
    files = store.files("telemetry", min(hours) * 3600, (max(hours) + 1) * 3600)
    return [str(path) for path in files if partition_start(path) // 3600 in hours]


def _allocations(wanted: Sequence[SeriesRequest]) -> pa.Table:
    rows: list[tuple[Any, ...]] = []
    for run in wanted:
        fixed = (run.start_s * 1000, run.end_s * 1000, run.bin_ms(), run.bins(), run.label)
        engines = run.engines or (None,) * len(run.units)
        rows += [(len(rows) + place, *unit, *fixed, engines[place]) for place, unit in enumerate(run.units)]
    return table_of(_ALLOCATIONS, rows)


def _nodes(db: duckdb.DuckDBPyConnection, paths: list[str], allocations: pa.Table) -> Mapping[str, str]:
    """The Slurm node of each host with another name in the samples."""
    sql = "SELECT DISTINCT host FROM read_parquet($paths, union_by_name=true, hive_partitioning=false)"
    hosts = [row[0] for row in db.execute(sql, {"paths": paths}).fetchall()]
    return match_hosts(hosts, [str(host) for host in allocations["host"].to_pylist()]).nodes


def _read(
    db: duckdb.DuckDBPyConnection, paths: list[str], allocations: pa.Table, nodes: Mapping[str, str] | None = None
) -> pa.Table:
    """A row for each allocation and bin with samples, sorted by both."""
    known = {row[0] for row in db.execute("SELECT name FROM parquet_schema($paths)", {"paths": paths}).fetchall()}
    values = {name: f"t.{name}" for name in _MEANS if name in known} | _of_slices(known)
    means = "".join(f", avg({v}) FILTER (NOT isnan({v}))::FLOAT AS {name}" for name, v in values.items())
    db.register("allocations", allocations)
    join, host = "", "t.host"
    if nodes:
        db.register("renamed", pa.table({"host": [*nodes], "node": [*nodes.values()]}))
        join, host = "LEFT JOIN renamed n ON t.host = n.host", "coalesce(n.node, t.host)"
    sql = f"""
    SELECT c.allocation, least((t.time_ms - c.start_ms) // c.bin_ms, c.bins - 1) AS bin,
           max(t.hbm_used_mib) FILTER (NOT isnan(t.hbm_used_mib))::FLOAT AS hbm_used_mib{means}
    FROM read_parquet($paths, union_by_name=true, hive_partitioning=false) t
    {join} JOIN allocations c ON {host} = c.host AND t.gpu = c.gpu AND t.mig = c.mig
    WHERE t.host BETWEEN $first AND $last AND t.time_ms >= c.start_ms AND t.time_ms < c.end_ms
      AND (c.label IS NULL OR t.job_label IS NULL OR t.job_label = c.label)
    GROUP BY c.allocation, bin ORDER BY c.allocation, bin
    """
    hosts = sorted([*map(str, allocations["host"].to_pylist()), *(nodes or ())])
    rows: pa.Table = db.sql(sql, params={"paths": paths, "first": hosts[0], "last": hosts[-1]}).to_arrow_table()
    return rows


def _of_slices(known: Collection[str]) -> dict[str, str]:
    """SQL of the counters that mean something else on a MIG instance, as `telemetry.metrics.samples` reads them."""
    names = ("gpu_util_pct", "sm_active_frac", "gr_engine_active_frac")
    util, sm, whole = (f"t.{name}" if name in known else "NULL::FLOAT" for name in names)
    # least() passes over a null: of an instance of unknown size the engine is not known.
    engine = f"CASE WHEN isnan({whole}) OR {whole} * c.engines IS NULL THEN NULL ELSE least({whole} * c.engines, 1) END"
    own = f"CASE WHEN {sm} > 0 AND NOT isnan({sm}) THEN {sm} ELSE coalesce({engine}, {sm}) END"
    return {
        "gpu_util_pct": f"(CASE WHEN c.mig = '' THEN {util} ELSE 100 * {own} END)",
        "gr_engine_active_frac": f"(CASE WHEN c.mig = '' THEN {whole} ELSE {engine} END)",
    }


def _split(rows: pa.Table, wanted: Sequence[SeriesRequest]) -> list[GpuSeries | None]:
    allocation, place = rows["allocation"].to_numpy(), rows["bin"].to_numpy()
    known = [name for name in COUNTERS if name in rows.column_names]
    values = {name: rows[name].to_numpy().astype(np.float32) for name in known}
    found: list[GpuSeries | None] = []
    first = 0
    for run in wanted:
        low, high = np.searchsorted(allocation, [first, first + len(run.units)])
        shape = (len(run.units), run.bins())
        grids = {name: np.full(shape, np.nan, np.float32) for name in COUNTERS} if high > low else {}
        for name in known if grids else ():
            grids[name][allocation[low:high] - first, place[low:high]] = values[name][low:high]
        units = tuple(unit_name(*unit) for unit in run.units)
        found.append(GpuSeries(units, run.bin_ms() / 1000, grids) if grids else None)
        first += len(run.units)
    return found


def unit_name(host: str, gpu: int, mig: str) -> str:
    """host:gpu, or host:gpu:mig, as in the column idle_gpus."""
    return f"{host}:{gpu}" + (f":{mig}" if mig else "")
