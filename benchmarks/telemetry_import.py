"""Import of a day of GPU counters, in order of time and of host, against a plain DuckDB job; and its summary.

Run: .venv/bin/python benchmarks/telemetry_import.py [--nodes N] [--repeats N]. Data is generated once, in build/bench.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from figures import FOLDER, Figure, Measured, at_most, main, measure
from telemetry_engine import best

from almanac.config import Config
from telemetry.counters import COUNTERS
from telemetry.ingest import SourceSpan, ingest_all
from telemetry.metrics.summary import summarize
from telemetry.sources.files import FileSource
from telemetry.store import database
from telemetry.store.schema import TELEMETRY
from telemetry.store.store import ClusterStore, Store

GPUS_A_NODE, STEP_S, START_S = 4, 10, 1_780_012_800
STEPS = 86_400 // STEP_S
JOB_S = 7200
EVER = (-(2**40), 2**40)
ORDERS = ("time", "host")


def rows(series: np.ndarray, step: np.ndarray, rng: np.random.Generator) -> pa.Table:
    """Rows of GPU `series` at these steps: fractions with six decimals, whole numbers elsewhere."""
    node, gpu = np.divmod(series, GPUS_A_NODE)
    columns = {
        "host": np.char.add("nid", np.char.zfill(node.astype(str), 6)),
        "gpu": gpu,
        "mig": np.full(len(series), ""),
        "time_ms": (START_S + step * STEP_S) * 1000 + 123,
        "uuid": np.char.add("GPU-00000000-0000-4000-8000-", np.char.zfill(series.astype(str), 12)),
        "model": np.full(len(series), "NVIDIA A100-SXM4-40GB"),
        "job_label": np.zeros(len(series), dtype=np.int64),
        "mig_profile": np.full(len(series), None),
    }
    for counter in COUNTERS:
        value = rng.random(len(series))
        if counter.is_cumulative:
            value = np.round((1e6 + step * STEP_S * 300 + value) * 1000)
        elif counter.unit == "bytes/s":
            value = np.round(value * 1e9)
        else:
            value = np.round(value, 6) if counter.unit == "fraction" else np.round(value * 90 + 1)
        columns[counter.column] = value
    return pa.table([pa.array(columns[field.name], field.type) for field in TELEMETRY], schema=TELEMETRY)


def generate(nodes: int) -> Path:
    """A folder with the same day in both orders and the jobs of its nodes, made once."""
    folder = FOLDER / f"import-{nodes}"
    if not (folder / "generated").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for order in ORDERS:
            rng = np.random.default_rng(1)
            with pq.ParquetWriter(folder / f"{order}.parquet", TELEMETRY, compression="zstd") as out:
                for numbers in blocks(nodes * GPUS_A_NODE * STEPS):
                    first, second = np.divmod(numbers, STEPS if order == "host" else nodes * GPUS_A_NODE)
                    series, step = (first, second) if order == "host" else (second, first)
                    out.write_table(rows(series, step, rng), row_group_size=122_880)
        pq.write_table(jobs(nodes), folder / "jobs.parquet")
        (folder / "generated").touch()
    return folder


def blocks(number: int) -> Iterator[np.ndarray]:
    for start in range(0, number, 491_520):
        yield np.arange(start, min(number, start + 491_520))


def jobs(nodes: int) -> pa.Table:
    """Jobs of a whole node that follow each other all day."""
    numbers = np.arange(nodes * (86_400 // JOB_S))
    node, turn = np.divmod(numbers, 86_400 // JOB_S)
    start_s = START_S + turn * JOB_S
    return pa.table(
        {
            "job_id": numbers + 1,
            "submit_s": start_s - 60,
            "start_s": start_s,
            "end_s": start_s + JOB_S - 10,
            "node_list": [f"nid{one:06d}" for one in node],
            "node_count": np.ones(len(numbers), dtype=np.int64),
            "gpu_count": np.full(len(numbers), GPUS_A_NODE),
            "user": [f"user{one % 20}" for one in numbers],
            "state": ["COMPLETED"] * len(numbers),
        }
    )


def plain_duckdb(path: Path) -> int:
    """The minimum for an import: write the same sorted hour files without checks."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        # With 1 GiB it would spill, and rows in order of host would take three times as long.
        with database.connect([path.parent], memory_limit_mib=4096) as db:
            db.execute("SET preserve_insertion_order = false")
            db.execute(
                "CREATE TEMP TABLE day AS SELECT *, time_ms // 3600000 AS hour FROM read_parquet(?)", [str(path)]
            )
            hours = db.execute("SELECT hour, count(*) FROM day GROUP BY hour ORDER BY hour").fetchall()
            for hour, _ in hours:
                db.execute(
                    f"COPY (SELECT * EXCLUDE hour FROM day WHERE hour = {hour} ORDER BY host, gpu, mig, time_ms)"
                    f" TO '{folder}/{hour}.parquet' (FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 122880)"
                )
    return sum(number for _, number in hours)


def import_file(store: ClusterStore, path: Path, kind: str = "telemetry") -> int:
    """Rows that were added or changed."""
    results = ingest_all(store, [SourceSpan(FileSource(path, kind), *EVER)])  # type: ignore[arg-type]
    [result] = results.values()
    if result.error:
        raise result.error
    return sum(written.added + written.replaced for written in result.written.values())


def first_import(path: Path) -> int:
    root = path.with_suffix(".store")
    shutil.rmtree(root, ignore_errors=True)
    return import_file(Store.create(root).of("bench"), path)


def again(path: Path) -> int:
    return import_file(Store.open(path.with_suffix(".store")).of("bench"), path)


def to_jobs(path: Path) -> int:
    """All steps up to `almanac jobs`: import of jobs and counters, and the summary."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        store = Store.create(Path(folder) / "store").of("bench")
        import_file(store, path.parent / "jobs.parquet", "jobs")
        import_file(store, path)
        summarize(store, Config())
        return store.read("job_metrics", ["job_id"]).num_rows


TASKS: dict[str, Callable[[Path], object]] = {
    "duckdb": plain_duckdb,
    "first": first_import,
    "again": again,
    "jobs": to_jobs,
}


def figures(folder: Path, repeats: int) -> list[Figure]:
    found: list[Figure] = []
    for order in ORDERS:
        path = folder / f"{order}.parquet"
        base, first, same, whole = best([(task, path) for task in TASKS], repeats, __file__)
        if not (base.result == first.result and same.result == 0 and whole.result == len(jobs_of(folder))):
            raise AssertionError(f"rows: {base.result}, {first.result}, {same.result}, jobs: {whole.result}")
        found += [
            Figure(f"order of {order}: rows", float(base.result)),
            *(
                each(f"order of {order}: {task}", run)
                for task, run in zip(TASKS, (base, first, same, whole), strict=True)
            ),
            at_most(f"order of {order}: import wall / DuckDB wall", first.wall_s / base.wall_s, 1.2),
            at_most(f"order of {order}: import CPU / DuckDB CPU", first.cpu_s / base.cpu_s, 1.2),
            at_most(f"order of {order}: import again CPU / first CPU", same.cpu_s / first.cpu_s, 1 / 3),
            at_most(f"order of {order}: peak memory of an import, MiB", max(first.rss_mib, same.rss_mib), 1024),
        ]
    return found


def each(name: str, run: Measured) -> Figure:
    return Figure(name, f"{run.wall_s:.1f} s wall, {run.cpu_s:.1f} s CPU, {run.rss_mib:.0f} MiB")


def jobs_of(folder: Path) -> pa.Table:
    return pq.read_table(folder / "jobs.parquet", columns=["job_id"])


def measure_all() -> list[Figure]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each task; the best one counts")
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.task:
        print(measure(TASKS[given.task], given.root).as_json())
        sys.exit()
    return figures(generate(given.nodes), given.repeats)


if __name__ == "__main__":
    main(measure_all)
