"""The tables of the store: columns, units, and keys. Raise SCHEMA_VERSION for a change that old code cannot read.

Times are UTC: seconds (`_s`) or milliseconds (`_ms`) since 1970. A missing value is null, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from telemetry.counters import COUNTERS
from telemetry.metrics.catalogue import GPU_METRICS, JOB_METRICS, STEP_METRICS

SCHEMA_VERSION = 1

_DOUBLE = {"energy_mj", "nvlink_tx_bytes_s", "nvlink_rx_bytes_s", "pcie_tx_bytes_s", "pcie_rx_bytes_s"}


def _field(name: str, kind: pa.DataType, unit: str = "", nullable: bool = True) -> pa.Field[pa.DataType]:
    return pa.field(name, kind, nullable=nullable, metadata={"unit": unit} if unit else None)


_TEXT, _INT = pa.string(), pa.int64()

TELEMETRY = pa.schema(
    [
        _field("host", _TEXT, nullable=False),
        _field("gpu", pa.int16(), "GPU index on its host", nullable=False),
        _field("mig", _TEXT, "MIG instance id; empty: whole GPU", nullable=False),
        _field("time_ms", _INT, "ms since 1970, UTC", nullable=False),
        _field("uuid", _TEXT),
        _field("model", _TEXT, "the exporter's model name"),
        _field("job_label", _INT, "job id in the exporter's label"),
        *(_field(c.column, pa.float64() if c.column in _DOUBLE else pa.float32(), c.unit) for c in COUNTERS),
        _field(
            "mig_profile", _TEXT, "MIG profile that the exporter names, such as 1g.10gb; null: whole GPU, or not named"
        ),
    ]
)

JOBS = pa.schema(
    [
        _field("job_id", _INT, "JobIDRaw", nullable=False),
        _field("submit_s", _INT, "s since 1970, UTC", nullable=False),
        _field("array_job_id", _INT),
        _field("array_task_id", _INT),
        _field("het_job_id", _INT),
        _field("het_offset", _INT),
        _field("user", _TEXT),
        _field("account", _TEXT),
        _field("partition", _TEXT, "where it ran; before its start, the requested one"),
        _field("partition_req", _TEXT, "partitions in its submit line; null: at most one, or not recorded"),
        _field("qos", _TEXT),
        _field("name", _TEXT, "null: unknown; never read from text output, which a user can forge"),
        _field("name_key", _TEXT, "key of the job family (almanac.names.name_key); - for none"),
        _field(
            "script_key", _TEXT, "hash of script or --wrap, folder, and argument names; null: none, or not recorded"
        ),
        _field("refuses_mail", pa.bool_(), "whether its comment has almanac:nomail; null: unknown"),
        _field("is_packed", pa.bool_(), "whether its comment has almanac:packed; null: no comment recorded"),
        _field("state", _TEXT, "COMPLETED, FAILED, TIMEOUT, CANCELLED, ..."),
        _field("eligible_s", _INT, "s since 1970, UTC: when it became eligible to start; null: not recorded"),
        _field("start_s", _INT, "s since 1970, UTC; null: never started"),
        _field("end_s", _INT, "s since 1970, UTC; null: still running or pending"),
        _field("elapsed_s", _INT, "s"),
        _field("time_limit_s", _INT, "s; null: none"),
        _field("node_count", _INT),
        _field("node_list", _TEXT, "Slurm hostlist"),
        _field("cpu_count", _INT),
        _field("gpu_count", _INT, "GPUs allocated"),
        _field("gpu_count_req", _INT, "GPUs requested; 0: it asked for none; null: not recorded"),
        _field("gpu_share_count", _INT, "shards of GPUs (gres/shard, or gres/mps) that it shares with other jobs"),
        _field("cpu_count_req", _INT, "CPUs requested; null: not recorded"),
        _field("node_count_req", _INT, "nodes requested; null: not recorded"),
        _field("gpu_type", _TEXT),
        _field("gpu_type_req", _TEXT, "GPU type requested; empty: none; null: not recorded"),
        _field("constraints", _TEXT),
        _field("tier", _TEXT, "memory tier requested, by the configuration at ingest"),
        _field("exit_code", _INT),
        _field("exit_signal", _INT),
        _field("restarts", _INT),
        _field("jobstats_hbm_peak_mib", pa.float64(), "MiB, highest GPU in jobstats' AdminComment blob"),
        _field("jobstats_hbm_total_mib", pa.float64(), "MiB"),
        _field("jobstats_gpu_util_pct", pa.float64(), "%, mean over GPUs in jobstats' AdminComment blob"),
        _field("used_mem_mib", pa.float64(), "MiB of host memory, if a trace records it"),
        _field("cpu_time_s", pa.float64(), "s, user and system time of all its steps; null: not gathered for each"),
        _field("host_mem_alloc_mib", pa.float64(), "MiB of host memory allocated on all nodes; null: not tracked"),
        _field(
            "host_mem_peak_mib",
            pa.float64(),
            "MiB, upper estimate of peak host memory: largest task times tasks, of all steps that ran at one time",
        ),
        _field("host_mem_task_peak_mib", pa.float64(), "MiB, peak host memory of the largest task"),
    ]
)

STEPS = pa.schema(
    [
        _field("job_id", _INT, "JobIDRaw", nullable=False),
        _field("submit_s", _INT, "s since 1970, UTC, of the job's run", nullable=False),
        _field("step", _TEXT, "0, 1, ..., or 1+0 for a heterogeneous step", nullable=False),
        _field("state", _TEXT, "COMPLETED, FAILED, CANCELLED, ..."),
        _field("start_s", _INT, "s since 1970, UTC"),
        _field("end_s", _INT, "s since 1970, UTC"),
        _field("node_count", _INT),
        _field("node_list", _TEXT, "Slurm hostlist"),
        _field("gpu_count", _INT, "GPUs allocated to the step; null: not recorded"),
        _field("exit_code", _INT),
        _field("exit_signal", _INT),
    ]
)

BINDINGS = pa.schema(
    [
        _field("job_id", _INT, nullable=False),
        _field("host", _TEXT, nullable=False),
        _field("gpu", pa.int16(), "Slurm's index on the host, of a GPU or a MIG instance", nullable=False),
        _field("origin", _TEXT, "prolog or squeue", nullable=False),
        _field("seen_s", _INT, "s since 1970, UTC", nullable=False),
        _field("uuid", _TEXT, "UUID of the GPU (GPU-...), or of the MIG instance (MIG-...) if its GPU is unknown"),
        _field("mig", _TEXT, "MIG instance id on the GPU of uuid; null: whole GPU, or unknown"),
    ]
)

ADVICE = pa.schema(
    [
        _field("published_s", _INT, "s since 1970, UTC", nullable=False),
        _field("user", _TEXT, "user; empty: everybody else (_site)", nullable=False),
        _field("kind", _TEXT, "file, or a row in it: F (job family), G (GPU count), U (any job)", nullable=False),
        _field("name_key", _TEXT, "key of the job family; empty except for F", nullable=False),
        _field("gpu_count", _INT, "GPUs requested; 0 for U and file", nullable=False),
        _field("version", _TEXT, "version of the advice file; null: the file was removed"),
        _field("predicted_s", _INT, "s, predicted duration; null: the row was removed"),
        _field("term", _INT, "site factor; for U only what options add"),
        _field("bound_mib", _INT, "MiB, memory bound of one GPU"),
        _field("tier", _TEXT, "memory tier to ask for"),
        _field("expires_s", _INT, "s since 1970, UTC, when the file expires"),
        _field("mode", _TEXT, "of a file: off, observe, or apply"),
        _field("points_per_e", pa.float64(), "of a file: K of the site factor"),
        _field("min_gpu_time_s", pa.float64(), "of a file: scale of the site factor, GPU-seconds"),
        _field("max_gpu_time_s", pa.float64(), "of a file: scale of the site factor, GPU-seconds"),
    ]
)

NODE_COUNTS = pa.schema(
    [
        _field("node_set", _TEXT, "name of the node set", nullable=False),
        _field("time_s", _INT, "s since 1970, UTC, a full minute", nullable=False),
        _field("total", _INT, "nodes in use or usable, powered up or down"),
        _field("active", _INT, "nodes in use"),
        _field("wanted", _INT, "nodes that pending jobs want"),
        _field("asleep", _INT, "nodes powered down or powering down"),
        _field("queued_node_min", pa.float64(), "predicted node-minutes of pending jobs; null: unknown"),
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


def _of_runs(name: str, schema: pa.Schema, *more: str) -> Table:
    """A table of job runs, or of parts of runs (steps, GPUs), which the columns `more` identify."""
    return Table(
        name=name,
        schema=schema,
        key=("job_id", "submit_s", *more),
        order=("submit_s", "job_id", *more),
        time_column="submit_s",
        ticks_per_s=1,
        part_s=86400,
    )


TABLES = {
    table.name: table
    for table in (
        Table(
            name="telemetry",
            schema=TELEMETRY,
            key=("host", "gpu", "mig", "time_ms"),
            order=("host", "gpu", "mig", "time_ms"),
            time_column="time_ms",
            ticks_per_s=1000,
            part_s=3600,
            is_unordered=True,
        ),
        _of_runs("jobs", JOBS),
        _of_runs("steps", STEPS, "step"),
        Table(
            name="bindings",
            schema=BINDINGS,
            key=("job_id", "host", "gpu", "origin", "seen_s"),
            order=("job_id", "host", "gpu", "origin", "seen_s"),
            time_column="seen_s",
            ticks_per_s=1,
            part_s=86400,
        ),
        _of_runs("job_metrics", JOB_METRICS),
        _of_runs("gpu_metrics", GPU_METRICS, "host", "gpu", "mig"),
        _of_runs("step_metrics", STEP_METRICS, "step"),
        Table(
            name="advice",
            schema=ADVICE,
            key=("user", "kind", "name_key", "gpu_count", "published_s"),
            order=("user", "kind", "name_key", "gpu_count", "published_s"),
            time_column="published_s",
            ticks_per_s=1,
            part_s=86400,
        ),
        Table(
            name="node_counts",
            schema=NODE_COUNTS,
            key=("node_set", "time_s"),
            order=("node_set", "time_s"),
            time_column="time_s",
            ticks_per_s=1,
            part_s=86400,
        ),
    )
}


def schema_of(columns: Mapping[str, pa.DataType]) -> pa.Schema:
    """A schema of nullable columns without metadata, for tables outside the store."""
    return pa.schema([pa.field(name, kind) for name, kind in columns.items()])


def table_of(schema: pa.Schema, rows: Sequence[Sequence[Any]]) -> pa.Table:
    """A table from rows of plain values in the order of the schema's columns."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema.names)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.table(arrays, schema=schema)
