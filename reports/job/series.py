"""Load a job's counters over time, on a grid of limited size, and its ranks among the jobs of its site."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reports.job.evidence import Ranked
from reports.job.job_report import GpuSeries, MetricsRow, Rank, unit_name
from telemetry.attribution.allocations import match_hosts
from telemetry.history import load_history_table
from telemetry.metrics.data_quality import OK
from telemetry.store.partitions import partition_start
from telemetry.store.schema import schema_of, table_of
from telemetry.store.store import ClusterStore

MAX_BINS = 600
MIN_BINS = 60
MAX_CELLS = 200_000
"""Most GPUs times bins of one counter. Jobs with more than 333 GPUs get fewer bins."""
DEFAULT_INTERVAL_S = 10.0

_MEANS = (
    "gpu_util_pct", "gr_engine_active_frac", "dram_active_frac", "fp64_active_frac", "fp32_active_frac",
    "fp16_active_frac", "tensor_active_frac",
)  # fmt: skip
_DIGITS = {"gpu_util_pct": 1, "hbm_used_mib": 0}
"""Decimals that a chart can show; of other counters, which are fractions, four."""
_ALLOCATIONS = schema_of(
    "allocation int32, host string, gpu int16, mig string, start_ms int64, end_ms int64, bin_ms int64, "
    "bins int64, label int64, engines int64"
)


@dataclass(frozen=True)
class SeriesRequest:
    """A run to load, [start_s, end_s), with its GPUs (host, gpu, mig) from gpu_metrics.

    interval_s: seconds between samples; None if unknown. label: the job id that samples must have in their label, if
    the label says which GPUs the job had. engines: compute slices of each GPU that is a MIG instance; None: unknown.
    pipes: those that the roofline shows.
    """

    start_s: int
    end_s: int
    units: tuple[tuple[str, int, str], ...]
    interval_s: float | None = None
    label: int | None = None
    engines: tuple[int | None, ...] = ()
    pipes: tuple[str, ...] = ()

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
    known = [name for name in (*_MEANS, "hbm_used_mib") if name in rows.column_names]
    values = {name: rows[name].to_numpy().astype(np.float64) for name in known}
    found: list[GpuSeries | None] = []
    first = 0
    for run in wanted:
        low, high = np.searchsorted(allocation, [first, first + len(run.units)])
        grids = {}
        for name in known if high > low else ():
            grids[name] = np.full((len(run.units), run.bins()), np.nan)
            grids[name][allocation[low:high] - first, place[low:high]] = values[name][low:high]
        found.append(_shown(run, grids) if grids else None)
        first += len(run.units)
    return found


def _shown(run: SeriesRequest, grids: Mapping[str, npt.NDArray[np.float64]]) -> GpuSeries:
    """The counters that charts show, where any value is known."""
    known = {name: grid for name, grid in grids.items() if np.isfinite(grid).any()}
    if "gpu_util_pct" not in known and "gr_engine_active_frac" in known:
        known["gpu_util_pct"] = 100 * known["gr_engine_active_frac"]
    pipes = [f"{pipe}_active_frac" for pipe in run.pipes]
    names = ("gpu_util_pct", "hbm_used_mib", *pipes, *(["dram_active_frac"] if pipes else []))
    return GpuSeries(
        tuple(unit_name(*unit) for unit in run.units),
        run.bin_ms() / 1000,
        {name: _rows(known[name].round(_DIGITS.get(name, 4))) for name in names if name in known},
    )


def _rows(grid: npt.NDArray[np.float64]) -> tuple[tuple[float | None, ...], ...]:
    return tuple(tuple(value if math.isfinite(value) else None for value in row) for row in grid.tolist())


RANKED: tuple[Ranked, ...] = get_args(Ranked)
SITE_DAYS = 30
MIN_JOBS = 20


@dataclass(frozen=True)
class SiteFigures:
    """The figures of a site's jobs with data quality ok, in the order of submission, without users."""

    submit_s: npt.NDArray[np.int64]
    figures: Mapping[Ranked, npt.NDArray[np.float64]]

    @classmethod
    def load(cls, store: ClusterStore, since_s: int, until_s: int) -> SiteFigures:
        """The figures of jobs submitted in [since_s - SITE_DAYS, until_s). Raises StoreError."""
        columns = ["submit_s", "verdict", "mig_profile", *RANKED]
        rows = load_history_table(store, columns, since_s - SITE_DAYS * 86_400, until_s).sort_by("submit_s")
        is_ok = rows["verdict"].to_numpy() == OK
        figures = {name: rows[name].to_numpy().astype(np.float64)[is_ok] for name in RANKED}
        is_slice = rows["mig_profile"].combine_chunks().is_valid().to_numpy(zero_copy_only=False)[is_ok]
        figures["mean_gpu_util_pct"] = np.where(is_slice, np.nan, figures["mean_gpu_util_pct"])
        return cls(rows["submit_s"].to_numpy()[is_ok], figures)

    def ranks(self, metrics: MetricsRow, submit_s: int, end_s: int) -> dict[str, Rank]:
        """A job's ranks by figure, among jobs submitted between SITE_DAYS before its submission and its end.

        A figure has no rank if the job lacks it, or if fewer than MIN_JOBS have it.
        """
        if metrics.get("verdict") != OK:
            return {}
        low, high = np.searchsorted(self.submit_s, [submit_s - SITE_DAYS * 86_400, end_s])
        found: dict[str, Rank] = {}
        for name, values in self.figures.items():
            own, others = metrics.get(name), values[low:high]
            known = int(np.isfinite(others).sum())
            is_other = name == "mean_gpu_util_pct" and metrics.get("mig_profile")  # of a slice: no GPU_UTIL
            if own is not None and known >= MIN_JOBS and not is_other:
                # Less means less by more than rounding.
                margin = 1e-9 * abs(own)
                below, above = (others < own - margin).sum(), (others > own + margin).sum()
                found[name] = Rank(float(below) / known, float(above) / known, known)
        return found


def span_of(runs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The first submit_s and the last end_s of several runs (submit_s, end_s)."""
    return min(first for first, _ in runs), max(last for _, last in runs)
