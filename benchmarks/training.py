"""What a training on a large site costs: 400,000 jobs, as a process of its own, and the history of its heaviest user.

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
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from figures import Figure, report

from advisor.models.rolling import SiteMeans
from advisor.replay import remember
from advisor.service import train
from almanac.config import Config, Rolling
from telemetry.history import load_history
from telemetry.store import Store

JOBS, EVERY_S, HEAVY = 400_000, 10 * 86_400, 16_000
MAX_CPU_S, MAX_MIB, MAX_READ_MS = 60, 1024, 50


def cost(trace: pa.Table, folder: Path) -> list[Figure]:
    """trace: rows of the table `jobs`."""
    store = Store.create(folder / "large")
    store.write("jobs", "large", tiled(trace, JOBS))
    argv = [sys.executable, __file__, str(folder / "large")]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    name, cpu_s, peak_mib = f"training on {found['jobs']:,} jobs", found["cpu_s"], found["peak_mib"]
    return [
        Figure(f"{name}, CPU s, reading included", cpu_s, f"<= {MAX_CPU_S}", cpu_s <= MAX_CPU_S),
        Figure(f"{name}, peak memory, MiB", peak_mib, f"<= {MAX_MIB}", peak_mib <= MAX_MIB),
        reading(trace, folder),
    ]


def tiled(trace: pa.Table, number: int) -> pa.Table:
    """So many jobs."""
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


def reading(trace: pa.Table, folder: Path) -> Figure:
    """How long it takes to know one user's HEAVY jobs, once they are in memory: the least of five times."""
    store = Store.create(folder / "heavy")
    rows = tiled(trace, HEAVY)
    store.write("jobs", "heavy", _with(rows, "user", pa.chunked_array([["ann"] * len(rows)])))
    own = load_history(store, "heavy", running=True)
    now_s, times_ms = int(own["end_s"].max()) + 1, []
    for _ in range(5):
        started = time.perf_counter()
        remember(["ann"], own, now_s, Rolling(), SiteMeans())
        times_ms.append((time.perf_counter() - started) * 1000)
    least_ms = min(times_ms)
    return Figure(f"reading the {HEAVY:,} jobs of one user, ms", least_ms, f"<= {MAX_READ_MS}", least_ms <= MAX_READ_MS)


def measure(root: Path) -> dict[str, float]:
    """Of this process, from its start: CPU seconds and the peak of its resident memory."""
    history = load_history(Store.open(root), "large", running=True)
    train(history, Config(), int(history["end_s"].max()) + 1)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"jobs": len(history), "cpu_s": time.process_time(), "peak_mib": peak_mib}


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(Path(sys.argv[1]))))
        return
    from predictors import DATA, TRACES, read_trace

    with tempfile.TemporaryDirectory() as name:
        report("training", cost(read_trace(DATA / TRACES["mason"][0]), Path(name)), "Training on a large site")


if __name__ == "__main__":
    main()
