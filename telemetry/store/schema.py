"""The tables of the store: columns, units, and keys. Raise SCHEMA_VERSION for a change that old code cannot read.

Times are UTC: seconds (`_s`) or milliseconds (`_ms`) since 1970. A missing value is null, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from telemetry.counters import COUNTERS, GPU_METRICS, JOB_METRICS, STEP_METRICS, column

SCHEMA_VERSION = 1

_DOUBLE = {"energy_mj", "nvlink_tx_bytes_s", "nvlink_rx_bytes_s", "pcie_tx_bytes_s", "pcie_rx_bytes_s"}


_TEXT, _INT = pa.string(), pa.int64()

TELEMETRY = pa.schema(
    [
        column("host", _TEXT, nullable=False),
        column("gpu", pa.int16(), "GPU index on its host", nullable=False),
        column("mig", _TEXT, "MIG instance id; empty: whole GPU", nullable=False),
        column("time_ms", _INT, "ms since 1970, UTC", nullable=False),
        column("uuid", _TEXT),
        column("model", _TEXT, "the exporter's model name"),
        column("job_label", _INT, "job id in the exporter's label"),
        *(column(c.column, pa.float64() if c.column in _DOUBLE else pa.float32(), c.unit) for c in COUNTERS),
        column(
            "mig_profile", _TEXT, "MIG profile that the exporter names, such as 1g.10gb; null: whole GPU, or not named"
        ),
    ]
)

JOBS = pa.schema(
    [
        column("job_id", _INT, "JobIDRaw", nullable=False),
        column("submit_s", _INT, "s since 1970, UTC", nullable=False),
        column("array_job_id", _INT),
        column("array_task_id", _INT),
        column("het_job_id", _INT),
        column("het_offset", _INT),
        column("user", _TEXT),
        column("account", _TEXT),
        column("partition", _TEXT, "where it ran; before its start, the requested one"),
        column("partition_req", _TEXT, "partitions in its submit line; null: at most one, or not recorded"),
        column("qos", _TEXT),
        column("name", _TEXT, "null: unknown; never read from text output, which a user can forge"),
        column("name_key", _TEXT, "key of the job family (almanac.names.name_key); - for none"),
        column(
            "script_key", _TEXT, "hash of script or --wrap, folder, and argument names; null: none, or not recorded"
        ),
        column("framework", _TEXT, "that its submit line shows (PyTorch, ...); null: none, or not recorded"),
        column("refuses_mail", pa.bool_(), "whether its comment has almanac:nomail; null: unknown"),
        column("is_packed", pa.bool_(), "whether its comment has almanac:packed; null: no comment recorded"),
        column("state", _TEXT, "COMPLETED, FAILED, TIMEOUT, CANCELLED, ..."),
        column("eligible_s", _INT, "s since 1970, UTC: when it became eligible to start; null: not recorded"),
        column("start_s", _INT, "s since 1970, UTC; null: never started"),
        column("end_s", _INT, "s since 1970, UTC; null: still running or pending"),
        column("elapsed_s", _INT, "s"),
        column("time_limit_s", _INT, "s; null: none"),
        column("node_count", _INT),
        column("node_list", _TEXT, "Slurm hostlist"),
        column("failed_node", _TEXT, "node whose failure ended it; null: none, or not recorded"),
        column("cpu_count", _INT),
        column("gpu_count", _INT, "GPUs allocated"),
        column("gpu_count_req", _INT, "GPUs requested; 0: it asked for none; null: not recorded"),
        column("gpu_share_count", _INT, "shards of GPUs (gres/shard, or gres/mps) that it shares with other jobs"),
        column("cpu_count_req", _INT, "CPUs requested; null: not recorded"),
        column("node_count_req", _INT, "nodes requested; null: not recorded"),
        column("gpu_type", _TEXT),
        column("gpu_type_req", _TEXT, "GPU type requested; empty: none; null: not recorded"),
        column("constraints", _TEXT),
        column("tier", _TEXT, "memory tier requested, by the configuration at ingest"),
        column("exit_code", _INT),
        column("exit_signal", _INT),
        column("restarts", _INT),
        column("jobstats_hbm_peak_mib", pa.float64(), "MiB, highest GPU in jobstats' AdminComment blob"),
        column("jobstats_hbm_total_mib", pa.float64(), "MiB"),
        column("jobstats_gpu_util_pct", pa.float64(), "%, mean over GPUs in jobstats' AdminComment blob"),
        column("sacct_hbm_peak_mib", pa.float64(), "MiB, upper bound for the peak of one GPU by Slurm's gres/gpumem"),
        column("sacct_hbm_least_mib", pa.float64(), "MiB, lower bound for the peak of the busiest GPU"),
        column("sacct_gpu_util_pct", pa.float64(), "%, highest sample of gres/gpuutil of one task, on all its GPUs"),
        column("gpu_memory_mib", pa.float64(), "MiB, nominal memory of its smallest GPU, by tier or GPU type"),
        column("used_mem_mib", pa.float64(), "MiB of host memory, if a trace records it"),
        column("cpu_time_s", pa.float64(), "s, user and system time of all its steps; null: not gathered for each"),
        column("host_mem_alloc_mib", pa.float64(), "MiB of host memory allocated on all nodes; null: not tracked"),
        column(
            "host_mem_peak_mib",
            pa.float64(),
            "MiB, upper estimate of peak host memory: largest task times tasks, of all steps that ran at one time",
        ),
        column("host_mem_task_peak_mib", pa.float64(), "MiB, peak host memory of the largest task"),
        column("node_cpu_count", _INT, "CPUs that the smallest of its nodes has; null: not recorded"),
        column("node_gpu_count", _INT, "GPUs that the smallest of its nodes has; null: not recorded, or several types"),
        column("node_memory_mib", _INT, "MiB of host memory that the smallest of its nodes has; null: not recorded"),
        column("node_threads", _INT, "hardware threads of a core of its nodes; null: not recorded"),
    ]
)

STEPS = pa.schema(
    [
        column("job_id", _INT, "JobIDRaw", nullable=False),
        column("submit_s", _INT, "s since 1970, UTC, of the job's run", nullable=False),
        column("step", _TEXT, "0, 1, ..., or 1+0 for a heterogeneous step", nullable=False),
        column("state", _TEXT, "COMPLETED, FAILED, CANCELLED, ..."),
        column("start_s", _INT, "s since 1970, UTC"),
        column("end_s", _INT, "s since 1970, UTC"),
        column("node_count", _INT),
        column("node_list", _TEXT, "Slurm hostlist"),
        column("gpu_count", _INT, "GPUs allocated to the step; null: not recorded"),
        column("exit_code", _INT),
        column("exit_signal", _INT),
    ]
)

BINDINGS = pa.schema(
    [
        column("job_id", _INT, nullable=False),
        column("host", _TEXT, nullable=False),
        column("gpu", pa.int16(), "Slurm's index on the host, of a GPU or a MIG instance", nullable=False),
        column("origin", _TEXT, "prolog or squeue", nullable=False),
        column("seen_s", _INT, "s since 1970, UTC", nullable=False),
        column("uuid", _TEXT, "UUID of the GPU (GPU-...), or of the MIG instance (MIG-...) if its GPU is unknown"),
        column("mig", _TEXT, "MIG instance id on the GPU of uuid; null: whole GPU, or unknown"),
    ]
)

ADVICE = pa.schema(
    [
        column("published_s", _INT, "s since 1970, UTC", nullable=False),
        column("user", _TEXT, "user; empty: everybody else (_site)", nullable=False),
        column("kind", _TEXT, "file, or a row in it: F (job family), G (GPU count), U (any job)", nullable=False),
        column("name_key", _TEXT, "key of the job family; empty except for F", nullable=False),
        column("gpu_count", _INT, "GPUs requested; 0 for U and file", nullable=False),
        column("version", _TEXT, "version of the advice file; null: the file was removed"),
        column("predicted_s", _INT, "s, predicted duration; null: the row was removed"),
        column("term", _INT, "site factor; for U only what options add"),
        column("bound_mib", _INT, "MiB, memory bound of one GPU"),
        column("tier", _TEXT, "memory tier to ask for"),
        column("expires_s", _INT, "s since 1970, UTC, when the file expires"),
        column("mode", _TEXT, "of a file: off, observe, or apply"),
        column("points_per_e", pa.float64(), "of a file: K of the site factor"),
        column("min_gpu_time_s", pa.float64(), "of a file: scale of the site factor, GPU-seconds"),
        column("max_gpu_time_s", pa.float64(), "of a file: scale of the site factor, GPU-seconds"),
    ]
)

NODE_COUNTS = pa.schema(
    [
        column("node_set", _TEXT, "name of the node set", nullable=False),
        column("time_s", _INT, "s since 1970, UTC, a full minute", nullable=False),
        column("total", _INT, "nodes in use or usable, powered up or down"),
        column("active", _INT, "nodes in use"),
        column("wanted", _INT, "nodes that pending jobs want"),
        column("asleep", _INT, "nodes powered down or powering down"),
        column("queued_node_min", pa.float64(), "predicted node-minutes of pending jobs; null: unknown"),
    ]
)


@dataclass(frozen=True)
class Table:
    """One table of the store. `key` makes a row unique within a cluster. Files are sorted by `order`.

    is_unordered: rows of one write have no order, so that for rows with one key the greatest value counts, not the
    last. time_column and part_s give the partition file of a row: date=YYYY-MM-DD/HHMM of floor(time / part_s).
    """

    name: str
    schema: pa.Schema
    key: tuple[str, ...]
    order: tuple[str, ...]
    time_column: str
    ticks_per_s: int
    part_s: int
    is_unordered: bool = False


def _daily(name: str, schema: pa.Schema, time_column: str, *key: str) -> Table:
    """A table with a file for each day, whose rows have times in s."""
    return Table(name, schema, key, key, time_column, ticks_per_s=1, part_s=86400)


def _of_runs(name: str, schema: pa.Schema, *more: str) -> Table:
    """A table of job runs, or of parts of runs (steps, GPUs), which the columns `more` identify."""
    of_day = _daily(name, schema, "submit_s", "job_id", "submit_s", *more)
    return replace(of_day, order=("submit_s", "job_id", *more))


_UNIT = ("host", "gpu", "mig", "time_ms")
TABLES = {
    table.name: table
    for table in (
        Table("telemetry", TELEMETRY, _UNIT, _UNIT, "time_ms", ticks_per_s=1000, part_s=3600, is_unordered=True),
        _of_runs("jobs", JOBS),
        _of_runs("steps", STEPS, "step"),
        _daily("bindings", BINDINGS, "seen_s", "job_id", "host", "gpu", "origin", "seen_s"),
        _of_runs("job_metrics", JOB_METRICS),
        _of_runs("gpu_metrics", GPU_METRICS, "host", "gpu", "mig"),
        _of_runs("step_metrics", STEP_METRICS, "step"),
        _daily("advice", ADVICE, "published_s", "user", "kind", "name_key", "gpu_count", "published_s"),
        _daily("node_counts", NODE_COUNTS, "time_s", "node_set", "time_s"),
    )
}


def schema_of(columns: str) -> pa.Schema:
    """A schema of nullable columns without metadata, from their names and Arrow types: "host string, gpu int16"."""
    pairs = (column.split() for column in columns.split(","))
    return pa.schema([pa.field(name, pa.type_for_alias(kind)) for name, kind in pairs])  # type: ignore[call-overload]


def table_of(schema: pa.Schema, rows: Sequence[Sequence[Any]]) -> pa.Table:
    """A table from rows of plain values in the order of the schema's columns."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema.names)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.table(arrays, schema=schema)
