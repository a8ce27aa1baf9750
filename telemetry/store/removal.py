"""Count and remove the rows of one user in the tables of a cluster, for `almanac forget`.

Each partition file is replaced as a whole, so a reader sees the old rows or the new ones. Rows of others, and their
order, stay as they are. A file without rows stays, because a reader may have listed it already.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from almanac.units import DAY_S
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.merge import arrow
from telemetry.store.partition_file import read_partition, write_partition
from telemetry.store.partitions import partition_start
from telemetry.store.schema import TABLES

_EARLY_S, _LATE_S = 3600, DAY_S
"""Job ids are used again after years: a record or label of an id counts from before the run's submission to after its
end, with room for clocks that differ and for an Epilog."""
_FOREVER_S = 2**40
_THEIRS = {
    ("user",): 'rows."user" = $user',
    ("job_id", "submit_s"): "EXISTS (SELECT 1 FROM runs r WHERE r.job_id = rows.job_id AND r.submit_s = rows.submit_s)",
    ("job_id", "seen_s"): (
        "EXISTS (SELECT 1 FROM runs r WHERE r.job_id = rows.job_id"
        f" AND rows.seen_s BETWEEN r.submit_s - {_EARLY_S} AND r.until_s)"
    ),
}
"""By the columns that say whose a row is, its test in SQL."""


def runs_of(store: ClusterStore, user: str) -> pa.Table:
    """job_id, submit_s, and until_s of the user's runs: until when a record with the job id belongs to the run."""
    rows = store.read("jobs", ["job_id", "submit_s", "end_s"], among={"user": pa.array([user])})
    ends = [_FOREVER_S if end_s is None else end_s + _LATE_S for end_s in rows["end_s"].to_pylist()]
    return rows.select(["job_id", "submit_s"]).append_column("until_s", pa.array(ends, pa.int64()))


def own_accounts(store: ClusterStore, user: str) -> set[str]:
    """Accounts of the user's jobs that no other user's job has."""
    sql = 'SELECT account FROM jobs WHERE account IS NOT NULL GROUP BY account HAVING bool_and("user" = $user)'
    with store.connect() as db:
        store.view(db, "jobs", ("user", "account"))
        return {account for (account,) in db.execute(sql, {"user": user}).fetchall()}


def user_rows(store: ClusterStore, table: str, by: tuple[str, ...], user: str, runs: pa.Table, remove: bool) -> int:
    """Count the user's rows of a table, and remove them if told. by: a key of _THEIRS. runs: of `runs_of`."""
    spec = TABLES[table]
    since_s, until_s = None, None
    if by == ("job_id", "submit_s"):
        if not runs.num_rows:
            return 0
        since_s, until_s = pc.min(runs["submit_s"]).as_py(), pc.max(runs["submit_s"]).as_py() + 1
    columns = ", ".join(f'rows."{name}"' for name in spec.key)
    with store.connect() as db:
        store.view(db, table, sorted({*spec.key, *by}), since_s, until_s)
        db.register("runs", runs)
        found = arrow(
            db, f"SELECT {columns} FROM {table} rows WHERE {_THEIRS[by]}", {"user": user} if by == ("user",) else {}
        )
    if remove:
        store.replace(table, spec.schema.empty_table(), found)
    return found.num_rows


def _label_files(store: ClusterStore, runs: pa.Table) -> list[Path]:
    """Files of telemetry of the time of the runs."""
    if not runs.num_rows:
        return []
    first_s, last_s = pc.min(runs["submit_s"]).as_py() - _EARLY_S, pc.max(runs["until_s"]).as_py()
    return store.files("telemetry", first_s, last_s)


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


def job_labels(store: ClusterStore, runs: pa.Table, remove: bool) -> int:
    """Count the samples with a job label of one of the runs, and set these labels to null if told: the samples stay."""
    spec = TABLES["telemetry"]
    place = spec.schema.get_field_index("job_label")
    found = _labelled(store, runs)
    for path, _ in found if remove else ():
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
    return sum(number for _, number in found)
