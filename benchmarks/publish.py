"""Time and memory of publishing for a large site: 5,000 users with 50 job families each, six runs of each.

Then what a single user costs whose jobs all have new names that resemble each other: the most that names can cost.
Run: python benchmarks/publish.py (in `make bench-hooks`). ALMANAC_BENCH_USERS=500 for a tenth of the users,
ALMANAC_BENCH_NAMES=10000 for a tenth of the names.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import resource
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
from figures import Figure, at_most, main

from advisor.artefacts import load, save
from advisor.service import train
from almanac.config_file import parse_config
from almanac.published.outgoing import Outgoing
from reports.published.publish import OWN_PER_RUN, OwnFolder, OwnJob, publish_own
from slurm_hooks.advice.publish import Published, PublishRun, publish
from telemetry.history import load_history
from telemetry.site import Site
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

USERS = int(os.environ.get("ALMANAC_BENCH_USERS", "5000"))
RUNS, DAYS = 6, 100
WORDS = [f"{w}-{v}" for w in ("train", "eval", "prep", "tune", "sim", "md", "dft", "cfd", "qa", "gen")
         for v in ("bert", "gpt", "water", "vit", "llama")]  # fmt: skip
FAMILIES, TRAINED_JOBS = len(WORDS), 20_000
NAMES = int(os.environ.get("ALMANAC_BENCH_NAMES", "100000"))
MOST_GROWTH = 1.5
"""Most growth of the time per job from a tenth of the names to all of them."""
NOW_S = 1_795_256_200
CLUSTER = "bench"
TIERS = [
    {"name": "hbm40g", "capacity_mib": 40960, "constraint": "hbm40g"},
    {"name": "hbm80g", "capacity_mib": 81920, "constraint": "hbm80g"},
]


def fill(store: Store, users: int, words: Sequence[str], runs: int) -> None:
    """Every family has a GPU count, a duration and a peak of its own; its runs lie on random days.

    words: names of each user's families.
    """
    rng = np.random.default_rng(1)
    families = users * len(words)
    jobs = families * runs
    family = np.repeat(np.arange(families), runs)
    submit_s = NOW_S - 86_400 - rng.integers(0, DAYS * 86_400, jobs)
    order = np.argsort(submit_s, kind="stable")
    family, submit_s = family[order], submit_s[order]
    elapsed_s = np.maximum(200, rng.lognormal(7.5, 1.2, families)[family] * rng.lognormal(0, 0.4, jobs))
    peak_mib = rng.uniform(4000, 70_000, families)[family] * rng.lognormal(0, 0.03, jobs)
    name = np.array(words)[family % len(words)]
    start_s = submit_s + rng.exponential(600, jobs).astype("int64")
    columns = {
        "job_id": np.arange(1, jobs + 1),
        "submit_s": submit_s,
        "user": np.char.add("user", (family // len(words)).astype(str)),
        "account": np.char.add("acc", (family // len(words) % 50).astype(str)),
        "partition": np.full(jobs, "gpu"),
        "qos": np.full(jobs, "normal"),
        "name": name,
        "name_key": name,
        "state": np.where(rng.random(jobs) < 0.08, "FAILED", "COMPLETED"),
        "start_s": start_s,
        "end_s": start_s + elapsed_s.astype("int64"),
        "elapsed_s": elapsed_s.astype("int64"),
        "time_limit_s": np.full(jobs, 86_400),
        "node_count": np.ones(jobs, "int64"),
        "cpu_count": np.full(jobs, 32),
        "gpu_count": 1 + family % 4,
        "gpu_count_req": 1 + family % 4,
        "constraints": np.where(family % 3 > 0, "gpu&hbm80g", "gpu&hbm40g"),
        "tier": np.where(family % 3 > 0, "hbm80g", "hbm40g"),
    }
    metrics = {
        "job_id": columns["job_id"],
        "submit_s": submit_s,
        "hbm_peak_mib": np.minimum(peak_mib, 80_000.0),
        "hbm_capacity_mib": np.full(jobs, 81_920.0),
        "is_preallocated": np.zeros(jobs, bool),
        "coverage_frac": np.ones(jobs),
        "verdict": np.full(jobs, "ok"),
    }
    for table, values in (("jobs", columns), ("job_metrics", metrics)):
        schema = TABLES[table].schema
        arrays = {key: pa.array(value.tolist(), schema.field(key).type) for key, value in values.items()}
        store.of(CLUSTER).write(table, pa.table(arrays))


def prepare(folder: Path) -> None:
    """The store, and models learned from a part of it: how long training takes is another benchmark's to say."""
    store = Store.create(folder / "store")
    fill(store, USERS, WORDS, RUNS)
    history = load_history(store.of(CLUSTER), running=True)
    users = history["user"].drop_duplicates().head(max(TRAINED_JOBS // (FAMILIES * RUNS), 1))
    chosen = history[history["user"].isin(users)].reset_index(drop=True)
    save(train(chosen, parse_config({"tiers": TIERS}), NOW_S), store.of(CLUSTER).models_dir)


class ResidentMemory:
    """Highest resident memory of this process and its children together, MiB, looked at every 50 ms."""

    def __enter__(self) -> ResidentMemory:
        self.peak_mib, self._is_over = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(0.05):
            own = os.getpid()
            pages = sum(_resident_pages(pid) for pid in (own, *_children(own)))
            self.peak_mib = max(self.peak_mib, pages * resource.getpagesize() / 2**20)


def _children(pid: int) -> list[int]:
    found = []
    for folder in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in folder.read_text().split()]
        except OSError:
            continue
    return found


def _resident_pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0


def processor_s() -> float:
    """Return the CPU seconds of this process and of its ended children, which a busy machine inflates least."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def timed(job: PublishRun) -> tuple[float, float, Published]:
    """Seconds, MiB, and what was done."""
    uids = {f"user{number}": 100_000 + number for number in range(USERS)}
    with ResidentMemory() as memory:
        started = time.perf_counter()
        done = publish(job, uids.get)
        seconds = time.perf_counter() - started
    return seconds, memory.peak_mib, done


def measure(folder: Path) -> list[Figure]:
    config = parse_config({"tiers": TIERS})
    # In a process of its own: the memory that filling the store takes is not publishing's.
    filling = multiprocessing.get_context("spawn").Process(target=prepare, args=(folder,))
    filling.start()
    filling.join()
    store = Store.open(folder / "store")
    trained = load(store.of(CLUSTER).models_dir)
    advice = Outgoing(folder / "advice")
    site = Site.of(store.of(CLUSTER), config, NOW_S)
    job = PublishRun(site, advice, trained, "observe", processes=len(os.sched_getaffinity(0)))
    before_s = processor_s()
    first_s, first_mib, first = timed(job)
    busy_s = processor_s() - before_s
    again_s, again_mib, again = timed(dataclasses.replace(job, site=site.at(NOW_S + 600)))
    renewed_s, renewed_mib, _ = timed(dataclasses.replace(job, site=site.at(NOW_S + 30 * 3600)))
    own = measure_own(OwnJob(site, OwnFolder(advice)))
    peak_mib = max(first_mib, again_mib, renewed_mib)
    slowest_s = max(first_s, renewed_s)
    size = [path.stat().st_size for path in (folder / "advice" / "user").glob("*/advice")]
    return [
        at_most(f"publishing for {USERS} users x {FAMILIES} families, s", slowest_s, 60),
        Figure("  for the first time, s", first_s),
        Figure("  processor time of that, all processes, s", busy_s),
        Figure("  all of it again, half a lifetime later, s", renewed_s),
        Figure("  ten minutes later, nothing changed, s", again_s),
        Figure("  files left alone then", again.unchanged),
        at_most("memory of all processes, MiB", peak_mib, 2048),
        Figure("families published", first.families),
        Figure("size of a file, median, KiB", float(np.median(size)) / 1024),
        Figure("processes", job.processes),
        *own,
    ]


def measure_names(folder: Path) -> list[Figure]:
    """Processor time of a training and a publishing, with a tenth of the names and with all of them."""
    figures: list[Figure] = []
    few_s: dict[str, float] = {}
    for number in (NAMES // 10, NAMES):
        # In a process of its own: memory that is given back does not lower the resident memory at once.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            took_s, peak_mib = pool.apply(one_user, (folder / f"names-{number}", number))
        for what, seconds in took_s.items():
            each_s = seconds / number * 10_000
            growth = each_s / few_s.setdefault(what, each_s)
            figures.append(Figure(f"{what}, {number} names of one user, s per 10,000 jobs", each_s))
            if number == NAMES:
                figures.append(at_most("  per job, times that with a tenth", growth, MOST_GROWTH))
        figures.append(Figure(f"memory of both, {number} names of one user, MiB", peak_mib))
    return figures


def one_user(folder: Path, number: int) -> tuple[dict[str, float], float]:
    """Seconds by step, and MiB, of a site whose only user has so many jobs, all of new names of 64 bytes."""
    config, store = parse_config({"tiers": TIERS}), Store.create(folder / "store")
    ends = itertools.islice(itertools.product("ghijklmnopqrstuvwxyz", repeat=4), number)
    fill(store, 1, ["x" * 60 + "".join(end) for end in ends], 1)
    advice = Outgoing(folder / "advice")
    with ResidentMemory() as memory:
        started_s = time.process_time()
        trained = train(load_history(store.of(CLUSTER), running=True), config, NOW_S)
        trained_s = time.process_time()
        publish(
            PublishRun(Site.of(store.of(CLUSTER), config, NOW_S), advice, trained, "observe"), {"user0": 100_000}.get
        )
        published_s = time.process_time()
    return {"training": trained_s - started_s, "publishing": published_s - trained_s}, memory.peak_mib


def measure_own(job: OwnJob) -> list[Figure]:
    """The step after the advice: lists of all users' jobs, and reports (without samples: those are bench-reports')."""
    uids = {f"user{number}": 100_000 + number for number in range(USERS)}
    figures = []
    for what, per_run in (
        ("users' own reports, the first run", OWN_PER_RUN),
        ("  the next run, of as many reports", OWN_PER_RUN),
        ("  a run with one report", 1),
    ):
        with ResidentMemory() as memory, mock.patch("reports.published.publish.OWN_PER_RUN", per_run):
            started = time.perf_counter()
            done = publish_own(job, uids.get)
            seconds = time.perf_counter() - started
        figures += [
            Figure(f"{what}, s", seconds),
            Figure("  its reports", done.reports),
            Figure("  its lists", done.lists),
            at_most("  its memory, MiB", memory.peak_mib, 2048),
        ]
    return figures


def measure_all() -> list[Figure]:
    with tempfile.TemporaryDirectory() as name:
        return measure(Path(name)) + measure_names(Path(name))


if __name__ == "__main__":
    main(measure_all)
