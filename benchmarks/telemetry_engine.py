"""The telemetry engine on seeded data: against a plain decode and DuckDB; memory, scaling, partials.

Run: make bench-telemetry, or this file with --rows 20000000 --big 100000000. Data is generated once, into build/bench.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from figures import FOLDER, Figure, Measured, at_most, main, measure

from almanac.config import Config
from demo import BENCH_COUNTERS, GeneratedSource, SiteShape
from telemetry.attribution.runs import ended_jobs, load_runs
from telemetry.metrics.arrays import Files
from telemetry.metrics.engine import Prepared, complete, compute, prepare
from telemetry.metrics.partials import MetricOptions, Partials, map_partials, merge_partials, silent
from telemetry.store.store import Store

COLUMNS = ["host", "gpu", "mig", "time_ms", *BENCH_COUNTERS]
MEANS = [name for name in BENCH_COUNTERS if name != "energy_mj"]
PIPES = ("fp64", "fp32", "fp16", "tensor")


def decode(root: Path) -> int:
    """Read every file's columns into Arrow memory, one after the other, as the engine does: text as dictionaries."""
    rows = 0
    for path in Store.open(root).of("bench").files("telemetry"):
        rows += pq.read_table(path, columns=COLUMNS, partitioning=None, read_dictionary=["host", "mig"]).num_rows
    return rows


def allocations(root: Path) -> pa.Table:
    """One row per job and host."""
    rows = [
        (number, host, job.start_s * 1000, job.end_s * 1000)
        for number, job in enumerate(ended_jobs(load_runs(Store.open(root).of("bench")), 0, 2**40))
        for host in job.hosts
    ]
    return pa.table(dict(zip(("job", "host", "start_ms", "end_ms"), zip(*rows, strict=True), strict=True)))


def duckdb_core(root: Path) -> pa.Table:
    """The core summary as two plain queries; one row per job. The store must hold jobs on whole nodes only.

    They only add up the steps of the energy counter. The engine also checks each, and adds the energy of a job's ends.
    """
    store = Store.open(root)
    paths = [str(path) for path in store.of("bench").files("telemetry")]
    with store.connect() as db:
        db.register("allocations", allocations(root))
        db.execute(f"CREATE TEMP VIEW samples AS {_SAMPLES}".replace("$paths", str(paths)))
        per_job = db.sql(_PER_JOB).to_arrow_table()
        spatial = db.sql(_SPATIAL).to_arrow_table()
        return per_job.join(spatial, "job", join_type="left outer").sort_by("job")


_PLACED = f"greatest({', '.join(f'{pipe}_active_frac' for pipe in PIPES)}) > 0"
_SAMPLES = """
SELECT a.job, t.* FROM read_parquet($paths, hive_partitioning=false) t
ASOF JOIN allocations a ON t.host = a.host AND t.time_ms >= a.start_ms WHERE t.time_ms < a.end_ms
"""
_ABOVE = ", ".join(
    f"count(*) FILTER ({_PLACED} AND ({pipe}_active_frac > dram_active_frac OR dram_active_frac = 0)) AS above_{pipe}"
    for pipe in PIPES
)
_SHARES = ", ".join(f"sum(above_{pipe}) / nullif(sum(placed), 0) AS {pipe}" for pipe in PIPES)
_AVERAGES = ", ".join(f"avg({name}) AS {name}" for name in MEANS)
_PER_JOB = f"""
WITH stepped AS (
  SELECT *, lag(energy_mj) OVER (PARTITION BY job, host, gpu, mig ORDER BY time_ms) AS before_mj FROM samples),
per_gpu AS (
  SELECT job, {_AVERAGES}, max(hbm_used_mib) AS peak,
         CASE WHEN max(gpu_util_pct) > 0 THEN 1 - avg(gpu_util_pct) / max(gpu_util_pct) ELSE 0 END AS temporal,
         sum(CASE WHEN energy_mj >= before_mj THEN energy_mj - before_mj
                  WHEN before_mj IS NOT NULL THEN energy_mj END) / 1000 AS energy,
         count(*) FILTER ({_PLACED}) AS placed, {_ABOVE}
  FROM stepped GROUP BY job, host, gpu, mig)
SELECT job, {_AVERAGES}, max(peak) AS peak, max(temporal) AS temporal, sum(energy) AS energy, {_SHARES}
FROM per_gpu GROUP BY job
"""
_SPATIAL = """
WITH means AS (
  SELECT job, time_ms // 60000 AS minute, avg(gpu_util_pct) AS util FROM samples GROUP BY job, minute, host, gpu, mig),
windows AS (
  SELECT job, CASE WHEN max(util) > 0 THEN 1 - sum(util) / (count(*) * max(util)) ELSE 0 END AS spatial,
         count(*) AS gpus, max(count(*)) OVER (PARTITION BY job) AS most_gpus
  FROM means GROUP BY job, minute)
SELECT job, avg(spatial) FILTER (2 * gpus > most_gpus) AS spatial FROM windows GROUP BY job
"""


DAY_MS = 86_400_000
SMALLEST = {"hbm_growth_mib_h": 1.0, "temporal_imbalance": 1e-3, "spatial_imbalance": 1e-3}
"""Differences of larger numbers are measured by these where they are close to 0."""


def compare(root: Path) -> dict[str, float]:
    """Compare day partials of the full set with one run over everything.

    rows: GPUs of jobs by the day, by rows of the input. bytes: of all tables in memory, by those of the decoded input
    (COLUMNS, in Arrow memory). difference: largest relative one between the merged days and one run over everything.
    """
    store = Store.open(root)
    jobs = ended_jobs(load_runs(store.of("bench")), 0, 2**40)
    paths = store.of("bench").files("telemetry")
    with store.connect() as db:
        prepared = prepare(db, paths, jobs, [], Config())
        days = [
            _map(db, prepared, list(chunks))
            for _, chunks in groupby(prepared.work.chunks, key=lambda chunk: chunk.from_ms // DAY_MS)
        ]
        split = complete(db, prepared, merge_partials(db, days), Config())
        first, last = prepared.work.chunks[0], prepared.work.chunks[-1]
        together = Files(tuple(paths), first.from_ms, last.until_ms, is_sorted=True)
        whole = complete(db, prepared, _map(db, prepared, [together]), Config())
    decoded = [pq.read_table(path, columns=COLUMNS, partitioning=None) for path in paths[:: max(1, len(paths) // 50)]]
    rows = sum(pq.read_metadata(path).num_rows for path in paths)
    bytes_per_row = sum(table.nbytes for table in decoded) / sum(table.num_rows for table in decoded)
    return {
        "rows": sum(day.tables[0].num_rows for day in days) / rows,
        "bytes": sum(day.nbytes for day in days) / (bytes_per_row * rows),
        "difference": max(_difference(split.jobs, whole.jobs), _difference(split.gpus, whole.gpus)),
    }


def _map(db: Any, prepared: Prepared, chunks: list[Files]) -> Partials:
    return map_partials(db, replace(prepared.work, chunks=chunks), silent)


def _difference(one: pa.Table, other: pa.Table) -> float:
    worst = 0.0
    for name in one.column_names:
        for a, b in zip(one[name].to_pylist(), other[name].to_pylist(), strict=True):
            if isinstance(a, float) and isinstance(b, float):
                scale = max(abs(a), abs(b), SMALLEST.get(name, 0.0))
                worst = max(worst, abs(a - b) / scale if scale else 0.0)
            elif a != b:
                return math.inf
    return worst


ROWS_PER_DAY = 2_800_000
"""Samples of 100 nodes of four GPUs that are busy four fifths of the time, one every 10 s."""


def generate(rows: int) -> Path:
    """A store with about `rows` rows of thirteen counters, made once."""
    root = FOLDER / f"telemetry-{rows}"
    done = root / "generated"
    if not done.exists():
        store = Store.create(root)
        shape = SiteShape(
            seed=3,
            days=rows / ROWS_PER_DAY,
            nodes_40=86,
            nodes_80=14,
            jobs_per_day=900,
            users=120,
            counters=BENCH_COUNTERS,
        )
        for batch in GeneratedSource(shape).read(shape.start_s, shape.end_s):
            store.of("bench").write(batch.table, batch.rows)
        done.touch()
    return root


def engine(root: Path, *, is_full: bool, memory_limit_mib: int = 2048) -> int:
    """The summary of a store, core or full; returns samples."""
    store = Store.open(root, memory_limit_mib=memory_limit_mib)
    jobs = ended_jobs(load_runs(store.of("bench")), 0, 2**40)
    with store.connect() as db:
        paths, options = store.of("bench").files("telemetry"), MetricOptions(is_full=is_full)
        return compute(db, prepare(db, paths, jobs, [], Config(), options=options), Config()).samples


TASKS: dict[str, Callable[[Path], object]] = {
    "decode": decode,
    "core": lambda root: engine(root, is_full=False),
    "full": lambda root: engine(root, is_full=True),
    "unlimited": lambda root: engine(root, is_full=True, memory_limit_mib=16_384),
    "duckdb": lambda root: duckdb_core(root).num_rows,
    "partials": compare,
}


def best(tasks: Sequence[tuple[str, Path]], repeats: int, script: str = __file__) -> list[Measured]:
    """The least wall and CPU time, and the largest memory, of several processes each; tasks take turns."""
    turns = [[_in_a_process(script, task, root) for task, root in tasks] for _ in range(repeats)]
    return [
        replace(
            runs[0],
            wall_s=min(run.wall_s for run in runs),
            cpu_s=min(run.cpu_s for run in runs),
            rss_mib=max(run.rss_mib for run in runs),
        )
        for runs in zip(*turns, strict=True)
    ]


def _in_a_process(script: str, task: str, root: Path) -> Measured:
    command = [sys.executable, script, "--task", task, "--root", str(root)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Measured(**json.loads(done.stdout))


def speed(root: Path, repeats: int) -> list[Figure]:
    names = ("decode", "core", "full", "unlimited")
    base, core, full, unlimited = found = best([(name, root) for name in names], repeats)
    return [
        Figure("rows", float(core.result)),
        *_measured(names, found),
        at_most("core wall / decode wall", core.wall_s / base.wall_s, 2.2),
        at_most("core CPU / decode CPU", core.cpu_s / base.cpu_s, 3.2),
        at_most("full wall / decode wall", full.wall_s / base.wall_s, 4.0),
        at_most("full: peak memory under a 2 GB limit, MiB", full.rss_mib, 2.3 * 1024),
        at_most("full: CPU under a 2 GB limit / without", full.cpu_s / unlimited.cpu_s, 1.25),
    ]


def _measured(names: Sequence[str], found: Sequence[Measured]) -> list[Figure]:
    pairs = list(zip(names, found, strict=True))
    return [
        *(Figure(f"{name}: wall s", run.wall_s) for name, run in pairs),
        *(Figure(f"{name}: CPU s", run.cpu_s) for name, run in pairs),
        *(Figure(f"{name}: peak memory MiB", run.rss_mib) for name, run in pairs),
    ]


def against_duckdb(root: Path, repeats: int) -> list[Figure]:
    """The core summary, in turn with two DuckDB queries that compute it."""
    core, sql = best([(name, root) for name in ("core", "duckdb")], repeats)
    return [
        *_measured(["core again", "two DuckDB queries"], [core, sql]),
        at_most("core wall / DuckDB wall", core.wall_s / sql.wall_s, 0.8),
        at_most("core CPU / DuckDB CPU", core.cpu_s / sql.cpu_s, 0.8),
    ]


def of_partials(root: Path) -> list[Figure]:
    sizes = best([("partials", root)], repeats=1)[0].result
    assert isinstance(sizes, dict)
    return [
        Figure("day partials: GPUs of jobs by the day / input rows", sizes["rows"]),
        at_most("day partials: bytes in memory / bytes of the decoded columns in memory", sizes["bytes"], 0.005),
        at_most("merged day partials against one run: largest relative difference", sizes["difference"], 1e-12),
    ]


def of_larger(root: Path, larger: Path, repeats: int) -> list[Figure]:
    """The smaller one is measured once more, in turn with the larger: a machine may be faster at times."""
    tasks = [("core", root), *((name, larger) for name in ("decode", "core", "full"))]
    small, base, core, full = best(tasks, repeats)
    more = float(core.result) / float(small.result)
    names = [f"{more:.2f} times the rows: {name}" for name in ("decode", "core", "full")]
    return [
        *_measured(names, [base, core, full]),
        at_most(f"core: CPU of {more:.2f} times the rows, as of 5 times", core.cpu_s / small.cpu_s * 5 / more, 5.3),
        *(
            at_most(f"{name}: peak memory under a 2 GB limit, MiB", run.rss_mib, 2.3 * 1024)
            for name, run in zip(names[1:], (core, full), strict=True)
        ),
    ]


def measure_all() -> list[Figure]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--big", type=int, default=100_000_000, help="0: without the larger run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each task; the best one counts")
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.task:
        print(measure(TASKS[given.task], given.root).as_json())
        sys.exit()
    root = generate(given.rows)
    figures = speed(root, given.repeats)
    figures += against_duckdb(root, given.repeats)
    figures += of_partials(root)
    if given.big:
        figures += of_larger(root, generate(given.big), given.repeats)
    return figures


if __name__ == "__main__":
    main(measure_all)
