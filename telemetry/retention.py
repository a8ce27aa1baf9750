"""Days of each table that are older than the configuration keeps, and their removal: `almanac summarize` calls it.

Only whole days are removed, and of the published advice only rows that later ones had replaced by then. A day stays as
long as something still needs it, whatever its age:

- days of telemetry and bindings on which a running job runs, and stale days: metrics will be computed from them;
- days of run tables on which a job was submitted that has not ended, or has ended within the limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from almanac.atomic import writing
from almanac.config import Retention
from almanac.units import DAY_S, counted, span_text
from telemetry.attribution.runs import load_runs
from telemetry.attribution.seen_units import days_of
from telemetry.store.database import arrow
from telemetry.store.partitions import partition_start
from telemetry.store.progress import COMPLETE_FROM, day_text
from telemetry.store.schema import TABLES
from telemetry.store.store import JOBS_FROM, ClusterStore

INPUTS = ("telemetry", "bindings", "steps", "jobs")
"""Job metrics are computed from these tables."""
_OF_DAYS = ("telemetry", "bindings")
_OF_RUNS = ("steps", "job_metrics", "gpu_metrics", "step_metrics", "jobs")
"""Jobs come last: they say which days of the others are still needed."""
_CLOCK_DAYS = 31


@dataclass(frozen=True)
class Expired:
    """Days of a table that are too old. before_s: the start of the oldest day that the limit keeps.

    paths: files to remove. kept: days since 1970 that are too old, but still needed. rows: of advice, to remove.
    """

    table: str
    before_s: int
    paths: tuple[Path, ...]
    kept: tuple[int, ...] = ()
    rows: int = 0
    size_bytes: int = 0

    @property
    def days(self) -> list[int]:
        """Days since 1970 to remove."""
        return sorted({partition_start(path) // DAY_S for path in self.paths})

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "table": self.table,
            "before": day_text(self.before_s // DAY_S),
            "days": [day_text(day) for day in self.days],
            "files": len(self.paths),
            "bytes": self.size_bytes,
            "kept": [day_text(day) for day in self.kept],
            "rows": self.rows,
        }

    def line(self, done: str) -> str:
        """Return the result in words. done: such as "removed"."""
        parts = []
        if self.paths:
            days = span_text(day_text(self.days[0]), day_text(self.days[-1]))
            parts.append(f"{counted(len(self.days), 'day')} {done} ({days}, {self.size_bytes / 1e6:,.1f} MB)")
        if self.rows:
            parts.append(f"{counted(self.rows, 'replaced row')} {done}")
        if self.kept:
            oldest = day_text(self.kept[0])
            parts.append(f"{counted(len(self.kept), 'older day')} kept, from {oldest} on: jobs of it are not finished")
        return f"{self.table}: {'; '.join(parts)}"

    @property
    def complete_from_s(self) -> int:
        """The time from which jobs can be computed again: earlier ones, or a neighbor, lack rows of this table then."""
        return (self.days[-1] + 1) * DAY_S if self.table in _OF_DAYS else self.before_s


def expired(store: ClusterStore, limits: Retention, now_s: int) -> list[Expired]:
    """The days and rows that the limits let go now, of each table with a limit. Raises StoreError.

    A clock that is ahead by years removes nothing that the newest rows and a month do not let go.
    """
    now_s = min(now_s, _newest_s(store) + _CLOCK_DAYS * DAY_S)
    found = []
    for table in (*_OF_DAYS, *_OF_RUNS, "node_counts"):
        if before_s := _before_s(limits, table, now_s):
            found.append(_expired(store, table, before_s))
    if before_s := _before_s(limits, "advice", now_s):
        found.append(Expired("advice", before_s, (), (), _replaced_advice(store, before_s).num_rows))
    return [each for each in found if each.paths or each.kept or each.rows]


def remove(store: ClusterStore, limits: Retention, now_s: int) -> list[Expired]:
    """Remove it, and return what was removed. To be called while nobody else summarizes. Raises StoreError."""
    found = expired(store, limits, now_s)
    if incomplete := [each.complete_from_s for each in found if each.table in INPUTS and each.paths]:
        store.set_watermark(COMPLETE_FROM, max(incomplete))  # before the rows go
    for each in found:
        if each.table == "jobs" and each.paths:
            store.set_watermark(JOBS_FROM, each.before_s)
        if each.table == "advice":
            store.replace("advice", TABLES["advice"].schema.empty_table(), _replaced_advice(store, each.before_s))
        else:
            _remove_files(store, each.paths)
    return found


def _newest_s(store: ClusterStore) -> int:
    """The start of the newest file of jobs, telemetry, and node counts; 0 without any."""
    files = (store.all_files(table) for table in ("jobs", "telemetry", "node_counts"))
    return max((partition_start(paths[-1]) for paths in files if paths), default=0)


def _before_s(limits: Retention, table: str, now_s: int) -> int:
    """The start of the oldest day to keep; 0 without a limit."""
    days = int(getattr(limits, f"{table}_days"))
    return (now_s // DAY_S - days) * DAY_S if days else 0


def _expired(store: ClusterStore, table: str, before_s: int) -> Expired:
    old = store.all_files(table, until_s=before_s)
    needed = _needed_days(store, table, before_s) if old else frozenset()
    days = {path: partition_start(path) // DAY_S for path in old}
    kept = sorted({day for day in days.values() if day in needed})
    paths = tuple(path for path in old if days[path] not in needed)
    return Expired(table, before_s, paths, tuple(kept), size_bytes=sum(path.stat().st_size for path in paths))


def _needed_days(store: ClusterStore, table: str, before_s: int) -> frozenset[int]:
    if table == "node_counts":
        return frozenset()
    stale = frozenset(store.peek_open_days())
    spans = list(_open_spans(store, stale))
    if table in _OF_DAYS:
        return stale.union(*(days_of(start_s, until_s) for _, start_s, until_s in spans))
    return _needed_by_jobs(store, before_s) | {submit_s // DAY_S for submit_s, _, _ in spans}


def _open_spans(store: ClusterStore, stale: Collection[int]) -> Iterator[tuple[int, int, int]]:
    """Submission, start, and end of runs whose metrics will be computed: running ones, and those on stale days."""
    runs = load_runs(store)
    latest_s = pc.max(runs["until_s"]).as_py() or 0
    columns: Iterator[list[Any]] = (runs[name].to_pylist() for name in ("submit_s", "start_s", "end_s", "until_s"))
    for submit_s, start_s, end_s, until_s in zip(*columns, strict=True):
        # A run without an end whose time limit is long over is taken for a runaway record.
        is_running = end_s is None and until_s >= latest_s
        if is_running or any(day in stale for day in days_of(start_s, until_s)):
            yield submit_s, start_s, until_s


def _needed_by_jobs(store: ClusterStore, before_s: int) -> frozenset[int]:
    """Days on which a job was submitted that has not ended, or has ended since then."""
    rows = store.read("jobs", ["submit_s", "end_s"], until_s=before_s)
    columns: Iterator[list[Any]] = (rows[name].to_pylist() for name in ("submit_s", "end_s"))
    ends = zip(*columns, strict=True)
    return frozenset(submit_s // DAY_S for submit_s, end_s in ends if end_s is None or end_s >= before_s)


def _replaced_advice(store: ClusterStore, before_s: int) -> pa.Table:
    """Keys of rows that a later row of the same place had replaced before then."""
    key = TABLES["advice"].key
    columns = ", ".join(f'"{name}"' for name in key)
    place = ", ".join(f'"{name}"' for name in key if name != "published_s")
    with store.connect() as db:
        store.view(db, "advice", key, until_s=before_s)
        newest = f"row_number() OVER (PARTITION BY {place} ORDER BY published_s DESC) > 1"
        return arrow(db, f"SELECT {columns} FROM advice QUALIFY {newest}")


def _remove_files(store: ClusterStore, paths: Sequence[Path]) -> None:
    with store.lock():
        for path in paths:
            with writing(path):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other files of the day are there
                path.parent.rmdir()
