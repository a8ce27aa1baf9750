"""The telemetry engine on seeded data: against a plain decode, pandas and loops; memory, scaling, partials.

Run: make bench-telemetry, or this file with --rows 20000000 --big 100000000. Data is generated once, into build/bench.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from figures import FOLDER, Figure, report
from telemetry_baselines import COLUMNS, decode, loops, pandas_core
from telemetry_measured import Measured, measure
from telemetry_partials import compare

from almanac.config import Config
from telemetry.metrics.options import Options
from telemetry.runs import load_jobs
from telemetry.sources.generated import GeneratedSource, SiteShape
from telemetry.sources.generated.shape import BENCH_COUNTERS
from telemetry.store import Store
from telemetry.summary import compute

ROWS_PER_DAY = 2_800_000
"""What 100 nodes of four GPUs give that are busy four fifths of the time, a sample every 10 s."""
LOOPED_JOBS = 100


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
            store.write(batch.table, "bench", batch.rows)
        done.touch()
    return root


def engine(root: Path, *, is_full: bool, memory_limit_mib: int = 2048) -> int:
    """The summary of a store, core or full; returns samples."""
    store = Store.open(root, memory_limit_mib=memory_limit_mib)
    jobs = load_jobs(store, "bench", 0, 2**40)
    with store.connect() as db:
        _, counts = compute(db, store.files("telemetry", "bench"), jobs, [], Config(), options=Options(is_full=is_full))
    return counts.samples


TASKS: dict[str, Callable[[Path], object]] = {
    "decode": decode,
    "core": lambda root: engine(root, is_full=False),
    "full": lambda root: engine(root, is_full=True),
    "unlimited": lambda root: engine(root, is_full=True, memory_limit_mib=16_384),
    "pandas": pandas_core,
    "loops": lambda root: loops(root, LOOPED_JOBS),
    "partials": compare,
}


def best(root: Path, *tasks: str, repeats: int = 3) -> dict[str, Measured]:
    """The least wall and CPU time, and the largest memory, of several processes; tasks take turns."""
    runs: dict[str, list[Measured]] = {task: [] for task in tasks}
    for _ in range(repeats):
        for task in tasks:
            runs[task].append(_in_a_process(task, root))
    return {
        task: replace(
            held[0],
            wall_s=min(run.wall_s for run in held),
            cpu_s=min(run.cpu_s for run in held),
            rss_mib=max(run.rss_mib for run in held),
        )
        for task, held in runs.items()
    }


def _in_a_process(task: str, root: Path) -> Measured:
    command = [sys.executable, __file__, "--task", task, "--root", str(root)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Measured(**json.loads(done.stdout))


def limit(name: str, value: float, most: float, unit: str = "") -> Figure:
    return Figure(name, value, f"<= {most:g} {unit}".rstrip(), value <= most)


def at_least(name: str, value: float, least: float) -> Figure:
    return Figure(name, value, f">= {least:g}", value >= least)


def speed(root: Path, repeats: int) -> tuple[list[Figure], dict[str, Measured]]:
    held = best(root, "decode", "core", "full", "unlimited", repeats=repeats)
    base, core, full = held["decode"], held["core"], held["full"]
    return [
        Figure("rows", float(core.result)),
        *(Figure(f"{task}: wall s", run.wall_s) for task, run in held.items()),
        *(Figure(f"{task}: CPU s", run.cpu_s) for task, run in held.items()),
        *(Figure(f"{task}: peak memory MiB", run.rss_mib) for task, run in held.items()),
        limit("core wall / decode wall", core.wall_s / base.wall_s, 2.2),
        limit("core CPU / decode CPU", core.cpu_s / base.cpu_s, 3.2),
        limit("full wall / decode wall", full.wall_s / base.wall_s, 4.0),
        limit("full: peak memory under a 2 GB limit", full.rss_mib, 2.3 * 1024, "MiB"),
        limit("full: CPU under a 2 GB limit / without", full.cpu_s / held["unlimited"].cpu_s, 1.25),
    ], held


def against_others(root: Path, core: Measured) -> list[Figure]:
    held = best(root, "pandas", "loops", repeats=1)
    pandas, looped = held["pandas"], held["loops"].result
    assert isinstance(looped, dict)
    drawn = f"extrapolated from {looped['jobs']} jobs, without loading"
    return [
        Figure("pandas: wall s", pandas.wall_s),
        Figure("pandas: peak memory MiB", pandas.rss_mib),
        Figure(f"loops: wall s, {drawn}", looped["wall_s"]),
        at_least("pandas wall / core wall", pandas.wall_s / core.wall_s, 4.0),
        at_least("pandas peak memory / core peak memory", pandas.rss_mib / core.rss_mib, 12.0),
        at_least(f"loops wall ({drawn}) / core wall", looped["wall_s"] / core.wall_s, 40.0),
    ]


def of_partials(root: Path) -> list[Figure]:
    sizes = best(root, "partials", repeats=1)["partials"].result
    assert isinstance(sizes, dict)
    return [
        Figure("day partials: GPUs of jobs by the day / input rows", sizes["rows"]),
        limit("day partials: bytes in memory / bytes of the decoded columns in memory", sizes["bytes"], 0.005),
        limit("merged day partials against one run: largest relative difference", sizes["difference"], 1e-12),
    ]


def of_larger(root: Path, core: Measured, repeats: int) -> list[Figure]:
    held = best(root, "decode", "core", "full", repeats=repeats)
    more = float(held["core"].result) / float(core.result)
    return [
        *(Figure(f"{more:.2f} times the rows: {task}: wall s", run.wall_s) for task, run in held.items()),
        *(Figure(f"{more:.2f} times the rows: {task}: CPU s", run.cpu_s) for task, run in held.items()),
        limit(f"core CPU of {more:.2f} times the rows, as of 5 times", held["core"].cpu_s / core.cpu_s * 5 / more, 5.3),
        *(
            limit(f"{more:.2f} times the rows: {task}: peak memory", held[task].rss_mib, 2.3 * 1024, "MiB")
            for task in ("core", "full")
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--big", type=int, default=100_000_000, help="0: without the larger run")
    parser.add_argument("--repeats", type=int, default=3, help="of each, the best counts")
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.task:
        print(measure(TASKS[given.task], given.root).as_json())
        return 0
    root = generate(given.rows)
    figures, held = speed(root, given.repeats)
    figures += against_others(root, held["core"])
    figures += of_partials(root)
    if given.big:
        figures += of_larger(generate(given.big), held["core"], given.repeats)
    met = report("telemetry", figures, f"telemetry engine, {len(COLUMNS)} columns decoded")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
