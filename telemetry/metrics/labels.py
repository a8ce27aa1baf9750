"""What samples say before any metric: when those of a job begin, and which GPUs carry its label."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain

import duckdb
import numpy as np
import pyarrow as pa

from telemetry.attribution.allocations import ALLOCATIONS, Attribution, JobRun
from telemetry.attribution.seen_units import Inventory
from telemetry.metrics.allocation_arrays import Allocations
from telemetry.metrics.chunks import each_chunk
from telemetry.metrics.frames import allocation_frame
from telemetry.metrics.hours import Files, each_hour
from telemetry.metrics.inventory import Survey
from telemetry.metrics.runs import Array
from telemetry.metrics.samples import GpuSamples
from telemetry.store.schema import table_of


def labelled_units(
    db: duckdb.DuckDBPyConnection,
    jobs: Sequence[JobRun],
    numbers: Sequence[int],
    seen: Survey,
    inventory: Inventory,
) -> dict[int, set[tuple[str, int, str]]]:
    """Units (host, gpu, mig) that carry a job's label on its own hosts and in its own time, by place of the job."""
    rows = [
        (number, host, gpu, mig, jobs[number].start_s * 1000, jobs[number].end_s * 1000)
        for number in numbers
        for host in jobs[number].hosts
        for gpu, mig in sorted(inventory.of(host, jobs[number].start_s, jobs[number].end_s))
    ]
    job_id = np.array([jobs[row[0]].job_id for row in rows])

    def look(samples: GpuSamples) -> Array:
        label = samples.label()
        if label is None:
            return np.zeros(0, np.int64)
        number = samples.allocations.number[samples.allocation]
        return number[samples.runs.sum(label == samples.runs.spread(job_id[number])) > 0]

    candidates = allocation_frame(jobs, Attribution(table_of(ALLOCATIONS, rows)), seen)
    found: dict[int, set[tuple[str, int, str]]] = defaultdict(set)
    for place in chain.from_iterable(_each(db, seen.chunks, candidates, look)):
        number, host, gpu, mig = rows[place][:4]
        found[number].add((host, gpu, mig))
    return found


def _each(
    db: duckdb.DuckDBPyConnection, chunks: Sequence[Files], allocations: pa.Table, look: Callable[[GpuSamples], Array]
) -> list[Array]:
    """What `look` gives for the samples within allocations, hour by hour."""

    def one(db: duckdb.DuckDBPyConnection, files: Files) -> list[Array]:
        held = Allocations.of(allocations, files.from_ms, files.until_ms)
        return each_hour(db, files, lambda hour: look(GpuSamples.of(hour, held)), held.touch)

    return list(chain.from_iterable(each_chunk(db, chunks, one)))
