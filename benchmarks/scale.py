"""Commands on about a million jobs over 200 days: wall time, CPU time, and peak memory of each process.

Run: python benchmarks/scale.py [--jobs N] [--only TEXT]. The store is made once, from copies of a small generated site.
It has jobs and their metrics, but no samples.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from figures import FOLDER, Figure, at_most, main
from job_reports import CLUSTER, fill

from almanac.config import Config
from almanac.units import DAY_S
from telemetry.attribution.runs import opens
from telemetry.metrics.summary import summarize
from telemetry.store.schema import TABLES
from telemetry.store.store import ClusterStore, Store

DAYS, SITE_DAYS = 200, 4
NUMBERS_A_COPY, USERS_COPIED = 1_000_000, 16
TABLES_COPIED = ("jobs", "job_metrics", "gpu_metrics")
TIMES = {"submit_s": 1, "eligible_s": 1, "start_s": 1, "end_s": 1, "hbm_peak_ms": 1000}
"""Columns that move with a copy, in ticks a second."""
LIMIT_MIB = 2048
CONFIG = """
[[tiers]]
name = "hbm40g"
capacity_mib = 40960
constraint = "hbm40g"
[[tiers]]
name = "hbm80g"
capacity_mib = 81920
constraint = "hbm80g"
"""


@dataclasses.dataclass(frozen=True)
class ScaleTask:
    """A command and its goals. None: no goal. limit_mib: the store.memory_limit_mib that it runs with."""

    name: str
    command: tuple[str, ...]
    most_s: float | None = None
    most_mb: float | None = None
    limit_mib: int = LIMIT_MIB


def within_limit(name: str, command: tuple[str, ...], limit_mib: int) -> ScaleTask:
    """A command whose whole process has to hold the memory limit, within 25%."""
    return ScaleTask(name, command, most_mb=1.25 * limit_mib * 1.048576, limit_mib=limit_mib)


def copied(rows: pa.Table, number: int, turn: int) -> pa.Table:
    """A copy of the rows with its own ids and users, `turn` site lengths earlier. Hosts stay the same."""
    for index, name in enumerate(rows.column_names):
        column = rows[name]
        if name in TIMES:
            column = pc.subtract(column, turn * SITE_DAYS * DAY_S * TIMES[name])
        elif name in ("job_id", "array_job_id"):
            column = pc.add(column, number * NUMBERS_A_COPY)
        elif name == "user":
            column = pc.binary_join_element_wise(column, str(number % USERS_COPIED), "-")
        rows = rows.set_column(index, rows.field(name), column)
    return rows


def generate(jobs: int) -> Path:
    """A folder with a store of about this many jobs."""
    root = FOLDER / f"scale-{jobs}"
    if not (root / "generated").exists():
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        turns = DAYS // SITE_DAYS
        with tempfile.TemporaryDirectory() as folder:
            source = fill(Path(folder))[0].of(CLUSTER)
            tables = {name: source.read(name) for name in TABLES_COPIED}
        copies = max(1, round(jobs / turns / tables["jobs"].num_rows))
        store = Store.create(root / "store").of(CLUSTER)
        for turn in range(turns):
            for name, rows in tables.items():
                numbers = range(turn * copies, (turn + 1) * copies)
                store.write(name, pa.concat_tables(copied(rows, number, turn) for number in numbers))
        (root / "generated").touch()
    return root


def tasks_of(store: ClusterStore) -> list[ScaleTask]:
    newest = store.read("jobs", ["job_id", "submit_s", "user"], since_s=_newest_s(store)).sort_by("submit_s")
    last_s = newest["submit_s"][-1].as_py()
    job_id, user = (str(newest[name][newest.num_rows // 2].as_py()) for name in ("job_id", "user"))
    month = ("-S", _date(last_s - 30 * DAY_S), "-E", _date(last_s + DAY_S))
    whole = ("-S", _date(last_s - (DAYS + 2) * DAY_S), "-E", _date(last_s + DAY_S))
    typed = {"most_s": 2.0, "most_mb": 500.0}
    across = {"most_s": 30.0, "most_mb": 2000.0}
    return [
        ScaleTask("jobs -u USER, 30 days", ("jobs", "-u", user, *month), **typed),
        ScaleTask("jobs -a, 30 days", ("jobs", "-a", *month), **typed),
        ScaleTask("jobs -a, 200 days", ("jobs", "-a", *whole), **typed),
        ScaleTask(
            "jobs -a --sort, 200 days",
            ("jobs", "-a", *whole, "--min", "gpu_count=8", "--sort", "-spatial_imbalance", "-n", "10"),
            **typed,
        ),
        ScaleTask("jobs -a --state, 200 days", ("jobs", "-a", *whole, "--state", "FAILED"), **typed),
        ScaleTask("jobs -u USER, 200 days", ("jobs", "-u", user, *whole), **typed),
        ScaleTask("jobs -j ID, 200 days", ("jobs", "-a", *whole, "-j", job_id), **typed),
        ScaleTask("report ID", ("report", job_id), **typed),
        ScaleTask("advise", ("advise", "--user", user, "--gpus=4", "--time=60", "--wrap=true"), **typed),
        ScaleTask("site-report, 30 days", ("site-report", *month), **typed),
        ScaleTask("site-report, 200 days", ("site-report", *whole), **across),
        ScaleTask("site-report --study, 200 days", ("site-report", "--study", *whole), **across),
        ScaleTask("characterize, 200 days", ("characterize", *whole), most_s=11.0, most_mb=1300.0),
        within_limit("site-report within 512 MiB, 200 days", ("site-report", *whole), 512),
        within_limit("site-report --study within 1300 MiB, 200 days", ("site-report", "--study", *whole), 1300),
        within_limit("train", ("train",), LIMIT_MIB),
    ]


def _newest_s(store: ClusterStore) -> int:
    from telemetry.store.partitions import partition_start

    return partition_start(store.files("jobs")[-1]) - TABLES["jobs"].part_s


def _date(time_s: int) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(time_s))


def run(task: ScaleTask, root: Path) -> list[Figure]:
    """Figures of the command in its own process. Raises CalledProcessError if it fails."""
    program = [sys.executable, "-c", "from cli.main import main; main()"]
    config = root / "almanac.toml"
    config.write_text(f"[store]\nmemory_limit_mib = {task.limit_mib}\n{CONFIG}", encoding="utf-8")
    command = [*program, "--config", str(config), "--store", str(root / "store"), *task.command]
    started = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 10):  # 10: no advice on memory yet
            output.seek(0)
            raise subprocess.CalledProcessError(process.returncode, command, output.read()[-2000:])
    return [
        at_most(f"{task.name}: wall, s", wall_s, task.most_s),
        Figure(f"{task.name}: CPU, s", used.ru_utime + used.ru_stime),
        at_most(f"{task.name}: peak memory, MB", used.ru_maxrss * 1024 / 1e6, task.most_mb),
    ]


def changed_job(root: Path) -> list[Figure]:
    """Return the cost of one changed job of a past day: the share of its day's jobs that a summary computes again."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        shutil.copytree(root / "store", Path(folder) / "store")
        store = Store.open(Path(folder) / "store").of(CLUSTER)
        day_s = _newest_s(store) - DAYS // 2 * DAY_S
        jobs = store.read("jobs", ["job_id", "submit_s", "end_s"], day_s, day_s + DAY_S)
        changed = jobs.slice(jobs.num_rows // 2, 1)
        changed = changed.set_column(2, "end_s", pc.add(changed["end_s"], 60))
        store.write("jobs", changed, opens(store, "jobs", changed))
        started = time.perf_counter(), time.process_time()
        counts = summarize(store, Config())
        wall_s, cpu_s = time.perf_counter() - started[0], time.process_time() - started[1]
    share = counts.jobs / jobs.num_rows
    return [
        at_most("one changed job: share of its day's jobs computed again", share, 0.1),
        Figure("one changed job: wall, s", wall_s),
        Figure("one changed job: CPU, s", cpu_s),
    ]


def measure() -> list[Figure]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_030_000)
    parser.add_argument("--only", default="", help="only tasks whose names contain this text")
    given = parser.parse_args()
    root = generate(given.jobs)
    store = Store.open(root / "store").of(CLUSTER)
    found = [figure for task in tasks_of(store) if given.only in task.name for figure in run(task, root)]
    if given.only in "one changed job":
        found += changed_job(root)
    return found


if __name__ == "__main__":
    main(measure)
