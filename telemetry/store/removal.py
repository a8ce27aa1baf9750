"""What the tables of a cluster keep of one user, and how these rows are removed, for `almanac forget`.

Each partition file is replaced as a whole, so a reader sees the old rows or the new ones. Rows of others, and their
order, stay as they are. A file without rows stays, because a reader may have listed it already.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from almanac.kept import Kept
from almanac.units import DAY_S
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.merge import arrow
from telemetry.store.partition_file import read_partition, write_partition
from telemetry.store.partitions import partition_start
from telemetry.store.schema import TABLES

OF_RUNS = ("steps", "job_metrics", "gpu_metrics", "step_metrics")
"""Tables whose rows belong to a run, by its job id and submission."""
_RUN = ("job_id", "submit_s")
_EARLY_S, _LATE_S = 3600, DAY_S
"""Job ids are used again after years: a record or label of an id counts from before the run's submission to after its
end, with room for clocks that differ and for an Epilog."""
_FOREVER_S = 2**40


def runs_of(store: ClusterStore, user: str) -> pa.Table:
    """job_id, submit_s, and until_s of the user's runs: until when a record with the job id belongs to the run."""
    rows = store.read("jobs", [*_RUN, "end_s"], among={"user": pa.array([user])})
    ends = [_FOREVER_S if end_s is None else end_s + _LATE_S for end_s in rows["end_s"].to_pylist()]
    return rows.select(_RUN).append_column("until_s", pa.array(ends, pa.int64()))


def own_accounts(store: ClusterStore, user: str) -> set[str]:
    """Accounts of the user's jobs that no other user's job has."""
    sql = 'SELECT account FROM jobs WHERE account IS NOT NULL GROUP BY account HAVING bool_and("user" = $user)'
    with store.connect() as db:
        store.view(db, "jobs", ("user", "account"))
        return {account for (account,) in db.execute(sql, {"user": user}).fetchall()}


def table_places(store: ClusterStore, user: str, runs: pa.Table) -> Iterator[Kept]:
    """Everything but the table jobs, which says which rows of the others are the user's, and so goes last."""
    yield Kept("telemetry", _labels(store, runs), "job label", functools.partial(_clear_labels, store, runs))
    for table in OF_RUNS:
        yield _of_owners(store, table, functools.partial(_rows_of_runs, store, table, runs))
    yield _of_owners(store, "bindings", functools.partial(_bindings, store, runs))
    yield _of_owners(store, "advice", functools.partial(_advice, store, user))


def jobs_place(store: ClusterStore, user: str) -> Kept:
    return _of_owners(store, "jobs", lambda: runs_of(store, user).select(_RUN))


def _of_owners(store: ClusterStore, table: str, find: Any) -> Kept:
    """find: gives the keys of the rows to remove."""
    nothing = TABLES[table].schema.empty_table()

    def remove() -> None:
        store.replace(table, nothing, find())

    return Kept(table, find().num_rows, "row", remove)


def _rows_of_runs(store: ClusterStore, table: str, runs: pa.Table) -> pa.Table:
    key = TABLES[table].key
    if not runs.num_rows:
        return pa.table({name: pa.array([], pa.int64()) for name in _RUN})
    with store.connect() as db:
        store.view(db, table, key, pc.min(runs["submit_s"]).as_py(), pc.max(runs["submit_s"]).as_py() + 1)
        db.register("runs", runs)
        columns = ", ".join(f'"{name}"' for name in key)
        return arrow(db, f"SELECT {columns} FROM {table} SEMI JOIN runs USING (job_id, submit_s)")


def _bindings(store: ClusterStore, runs: pa.Table) -> pa.Table:
    key = TABLES["bindings"].key
    columns = ", ".join(f'b."{name}"' for name in key)
    with store.connect() as db:
        store.view(db, "bindings", key)
        db.register("runs", runs)
        return arrow(
            db,
            f"SELECT DISTINCT {columns} FROM bindings b JOIN runs r USING (job_id)"
            f" WHERE b.seen_s BETWEEN r.submit_s - {_EARLY_S} AND r.until_s",
        )


def _advice(store: ClusterStore, user: str) -> pa.Table:
    key = TABLES["advice"].key
    rows = store.read("advice", key, among={"user": pa.array([user])})
    return rows.select(key)


def _label_files(store: ClusterStore, runs: pa.Table) -> list[Path]:
    """Files of telemetry of the time of the runs."""
    if not runs.num_rows:
        return []
    first_s, last_s = pc.min(runs["submit_s"]).as_py() - _EARLY_S, pc.max(runs["until_s"]).as_py()
    return store.files("telemetry", first_s, last_s)


def _labels(store: ClusterStore, runs: pa.Table) -> int:
    """The number of samples with a job label of one of the runs."""
    return sum(number for _, number in _labelled(store, runs))


def _labelled(store: ClusterStore, runs: pa.Table) -> list[tuple[Path, int]]:
    """Files with such a label, and how many samples have one."""
    files = [str(path) for path in _label_files(store, runs)]
    if not files:
        return []
    with store.connect() as db:
        db.register("runs", runs)
        found = db.execute(
            "SELECT filename, count(*) FROM read_parquet($files, union_by_name=true, hive_partitioning=false,"
            " filename=true) t WHERE job_label IS NOT NULL AND EXISTS (SELECT 1 FROM runs r"
            f" WHERE r.job_id = t.job_label AND t.time_ms // 1000 BETWEEN r.submit_s - {_EARLY_S} AND r.until_s)"
            " GROUP BY filename ORDER BY filename",
            {"files": files},
        ).fetchall()
    return [(Path(name), number) for name, number in found]


def _clear_labels(store: ClusterStore, runs: pa.Table) -> None:
    """Set these job labels to null: the samples stay, as those of a GPU that nobody is named for."""
    spec = TABLES["telemetry"]
    place = spec.schema.get_field_index("job_label")
    for path, _ in _labelled(store, runs):
        start_s = partition_start(path)
        is_near = (runs["submit_s"].to_numpy() - _EARLY_S < start_s + spec.part_s) & (
            runs["until_s"].to_numpy() >= start_s
        )
        ids = pa.array(np.unique(runs["job_id"].to_numpy()[is_near]), pa.int64())
        with store.lock():
            rows = read_partition(spec, path)
            labels = rows["job_label"]
            cleared = pc.if_else(pc.is_in(labels, value_set=ids), pa.scalar(None, pa.int64()), labels)
            write_partition(path, rows.set_column(place, spec.schema.field(place), cleared), spec)
