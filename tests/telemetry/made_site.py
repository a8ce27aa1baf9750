"""A store of hand-made jobs and samples, filled through `ingest` as a site's is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from almanac.config import Config, Filters
from almanac.records import Counts
from telemetry.ingest import IngestResult, ingest
from telemetry.metrics.summary import SummaryCounts, summarize
from telemetry.sources.source import RowBatch
from telemetry.store.schema import BINDINGS, JOBS, STEPS, TABLES, TELEMETRY
from telemetry.store.store import Store

DAY = 20_156
"""2025-03-09 as days since 1970: the day on which clocks in the USA go forward."""
T0_S = DAY * 86_400
HOUR_S = 3600
STEP_S = 600
MODEL = "NVIDIA A100-SXM4-40GB"

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Given:
    """A source that gives one batch."""

    batch: RowBatch
    name: str = "given"

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        yield self.batch


def samples(
    host: str, gpu: int, first_h: float, last_h: float, *, util: float | None = 50.0, hbm: float = 1000.0,
    label: int | None = None, mig: str = "",
) -> Rows:  # fmt: skip
    """A sample every ten minutes of [first_h, last_h), hours after T0_S."""
    times = range(round(T0_S + first_h * HOUR_S), round(T0_S + last_h * HOUR_S), STEP_S)
    return [
        {
            "host": host, "gpu": gpu, "mig": mig, "time_ms": time_s * 1000, "model": MODEL, "job_label": label,
            "gpu_util_pct": None if mig else util, "gr_engine_active_frac": None if util is None else util / 100,
            "hbm_used_mib": hbm,
        }
        for time_s in times
    ]  # fmt: skip


def job(job_id: int, first_h: float, last_h: float | None, hosts: str, gpus: int, **given: Any) -> dict[str, Any]:
    """A job record; hours after T0_S. It is submitted at its start. last_h None: it still runs."""
    start_s = round(T0_S + first_h * HOUR_S)
    end_s = None if last_h is None else round(T0_S + last_h * HOUR_S)
    return {
        "job_id": job_id, "submit_s": start_s, "start_s": start_s, "end_s": end_s, "gpu_count": gpus,
        "node_list": hosts, "state": "RUNNING" if last_h is None else "COMPLETED", **given,
    }  # fmt: skip


def prolog(job_id: int, host: str, gpu: int, at_h: float) -> dict[str, Any]:
    return {"job_id": job_id, "host": host, "gpu": gpu, "origin": "prolog", "seen_s": round(T0_S + at_h * HOUR_S)}


class Site:
    """A store of the cluster "c". Nothing is set aside, so that small examples are measured."""

    config = Config(filters=Filters(min_elapsed_s=0, min_gpu_util_pct=-1.0, min_coverage=0.0))

    def __init__(self, root: Path) -> None:
        self.store = Store.create(root)

    def _ingest(self, table: str, rows: Sequence[dict[str, Any]], schema: pa.Schema) -> list[int]:
        """Store rows; days, counted from DAY, that this opened."""
        before = self.store.of("c").peek_open_days()
        batch = RowBatch(table, pa.Table.from_pylist(list(rows), schema=schema), Counts(len(rows), len(rows)))
        ingest(Given(batch), self.store.of("c"), 0, 1, IngestResult("given", 0, 1), lambda *_: None)
        after = self.store.of("c").peek_open_days()
        return [day - DAY for day, number in sorted(after.items()) if before.get(day) != number]

    def telemetry(self, *rows: Rows) -> list[int]:
        return self._ingest("telemetry", [row for part in rows for row in part], TELEMETRY)

    def jobs(self, *rows: dict[str, Any]) -> list[int]:
        return self._ingest("jobs", rows, JOBS)

    def steps(self, *rows: dict[str, Any]) -> list[int]:
        return self._ingest("steps", rows, STEPS)

    def bindings(self, *rows: dict[str, Any]) -> list[int]:
        return self._ingest("bindings", rows, BINDINGS)

    def summarize(self, *span: int | None, **given: Any) -> SummaryCounts:
        return summarize(self.store.of("c"), self.config, *span, **given)

    @property
    def open_days(self) -> list[int]:
        """Counted from DAY."""
        return [day - DAY for day in sorted(self.store.of("c").peek_open_days())]

    def found(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Rows of job_metrics by job id and hour of submission."""
        rows = self.store.of("c").read("job_metrics").to_pylist()
        return {(row["job_id"], (row["submit_s"] - T0_S) // HOUR_S): row for row in rows}

    def verdicts(self) -> dict[int, str]:
        return {job_id: row["verdict"] for (job_id, _), row in self.found().items()}

    def gpus(self, job_id: int) -> list[tuple[str, int, str]]:
        """Units with metrics of a job."""
        rows = self.store.of("c").read("gpu_metrics", ["job_id", "host", "gpu", "mig"]).to_pylist()
        return [(row["host"], row["gpu"], row["mig"]) for row in rows if row["job_id"] == job_id]

    def tables(self) -> tuple[pa.Table, pa.Table]:
        """job_metrics and gpu_metrics, whole."""
        return self.store.of("c").read("job_metrics"), self.store.of("c").read("gpu_metrics")


def rows_of(table: str, columns: str, rows: Iterable[tuple[Any, ...]]) -> pa.Table:
    """Rows of a table of the store, of these of its columns."""
    names = columns.split()
    schema = pa.schema([TABLES[table].schema.field(name) for name in names])
    return pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows], schema)


def is_same(some: tuple[pa.Table, ...], others: tuple[pa.Table, ...]) -> bool:
    """Return True if tables hold the same, floating-point numbers to 1e-12: windows are added up in no given order."""
    return all(
        table.num_rows == other.num_rows
        and all(
            _is_near(row[name], its[name])
            for row, its in zip(table.to_pylist(), other.to_pylist(), strict=True)
            for name in row
        )
        for table, other in zip(some, others, strict=True)
    )


def _is_near(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-12, abs_tol=1e-12)
    return bool(value == other)
