"""Cost of a training on a large site: 400,000 jobs, as a process of its own, and the history of its heaviest user.

The site is the Mason trace again and again, ten days later each time, each time with other users. Part of
`make bench-predictors`; run alone: python benchmarks/training.py.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from figures import Figure, at_most, main
from traces import DATA, TRACES, read_trace

from advisor.duration.features import submitted_by
from advisor.duration.replay import observed_history
from advisor.duration.rolling import SiteMeans
from advisor.memory.peak_store import remember_peaks
from advisor.service import train
from almanac.config import Config
from telemetry.history import load_history
from telemetry.store.store import Store

JOBS, EVERY_S, HEAVY, SHARE = 400_000, 10 * 86_400, 16_000, 12
MAX_CPU_S, MAX_MIB, MAX_READ_MS = 60, 1024, 50
Result = TypeVar("Result")


def cost(trace: pa.Table, folder: Path) -> list[Figure]:
    """Measure the CPU time and memory of a training on a large store. trace: rows of the table `jobs`."""
    store = Store.create(folder / "large")
    store.of("large").write("jobs", tiled(trace, JOBS))
    argv = [sys.executable, __file__, str(folder / "large")]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    name, cpu_s, peak_mib = f"training on {found['jobs']:,} jobs", found["cpu_s"], found["peak_mib"]
    return [
        at_most(f"{name}, CPU s, reading included", cpu_s, MAX_CPU_S),
        at_most(f"{name}, peak memory, MiB", peak_mib, MAX_MIB),
        *reading(trace, folder),
    ]


def tiled(trace: pa.Table, number: int) -> pa.Table:
    """Return this number of jobs: copies of the trace, each with later times, other job ids, and other users."""
    parts = []
    for tile in range(-(-number // len(trace))):
        part = trace
        for name in ("submit_s", "eligible_s", "start_s", "end_s"):
            part = _with(part, name, pc.add(part[name], tile * EVERY_S))
        part = _with(part, "job_id", pc.add(part["job_id"], tile * 10_000_000))
        parts.append(_with(part, "user", pa.chunked_array([[f"{user}-{tile}" for user in part["user"].to_pylist()]])))
    return pa.concat_tables(parts).slice(0, number)


def _with(rows: pa.Table, name: str, values: pa.ChunkedArray[Any]) -> pa.Table:
    place = rows.schema.get_field_index(name)
    return rows.set_column(place, rows.schema.field(name), values.cast(rows.schema.field(name).type))


def reading(trace: pa.Table, folder: Path) -> list[Figure]:
    """Return the cost of an answer to the user of HEAVY jobs on a site of SHARE times as many: the least of ten times.

    CPU time: other work on the machine is none of it. The site has no telemetry, as the trace has none.
    """
    store = Store.create(folder / "heavy")
    rows = tiled(trace, HEAVY * SHARE)
    users = ["ann" if number % SHARE == 0 else user for number, user in enumerate(rows["user"].to_pylist())]
    store.of("heavy").write("jobs", _with(rows, "user", pa.chunked_array([users])))
    own, store_ms = timed(lambda: load_history(store.of("heavy"), user="ann", running=True))
    now_s, config = int(own["end_s"].max()) + 1, Config()
    _, past_ms = timed(lambda: observed_history(["ann"], own, now_s, SiteMeans()))
    known = submitted_by(own, now_s, config.advice.history_days)
    _, peaks_ms = timed(lambda: remember_peaks(["ann"], known, now_s, config.advice, config.tiers))
    what = f"the {len(own):,} jobs of one user"
    return [
        at_most(f"reading {what}, CPU ms", past_ms, MAX_READ_MS),
        Figure(f"reading {what} as evidence of memory, CPU ms", peaks_ms),
        Figure(f"finding {what} among {len(rows):,} in the store, CPU ms", store_ms),
    ]


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    """The result, and the CPU milliseconds of the fastest of ten calls."""
    times_ms = []
    for _ in range(10):
        started = time.process_time()
        result = call()
        times_ms.append((time.process_time() - started) * 1000)
    return result, min(times_ms)


def measure(root: Path) -> dict[str, float]:
    """Train in this process, and return its CPU seconds and peak resident memory, from its start."""
    history = load_history(Store.open(root).of("large"), running=True)
    train(history, Config(), int(history["end_s"].max()) + 1)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"jobs": len(history), "cpu_s": time.process_time(), "peak_mib": peak_mib}


def of_mason() -> list[Figure]:
    with tempfile.TemporaryDirectory() as name:
        return cost(read_trace(DATA / TRACES["mason"][0]), Path(name))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(Path(sys.argv[1]))))
    else:
        main(of_mason)
