"""Time of `almanac reprioritize` for 10,000 pending jobs of 300 users, as squeue of 22.05 and 26.05 shows them.

Run: python benchmarks/reprioritize.py (in `make bench-hooks`). Slurm is a stand-in that answers at once: what slurmctld
itself takes is 1 to 2 ms for each change. The past is that of benchmarks/publish.py; ALMANAC_BENCH_USERS sets its size.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("ALMANAC_BENCH_USERS", "1000")

from figures import Figure, at_most, main
from publish import CLUSTER, FAMILIES, NOW_S, RUNS, TIERS, USERS, prepare

from advisor.artefacts import load
from advisor.duration.service import priorities_of
from almanac.config_file import parse_config
from almanac.records import JobRequest, PriorityAdvice
from slurm.backend import CommandBackend
from slurm.commands import Done
from slurm_hooks.jobs.log import JobLog
from slurm_hooks.priority.reprioritize import SiteFactorEngine, plan_site_factors
from telemetry.history import load_history
from telemetry.store.store import Store

FIXTURES = Path(__file__).parents[1] / "tests/slurm/fixtures"
JOBS, PENDING_USERS = 10_000, 300
GOAL_S = 10.0


@dataclass
class StandIn:
    """squeue and sprio of 10,000 pending jobs, and a scontrol that believes everything. jobs: records by number."""

    queue: bytes
    jobs: dict[str, bytes]
    factors: dict[int, int] = field(default_factory=dict)

    def __call__(self, argv: Sequence[str]) -> bytes:
        if argv[0] == "squeue" and "-j" in argv:
            return b'{"jobs": [' + b",".join(self.jobs[number] for number in argv[-1].split(",")) + b"]}"
        if argv[0] == "squeue":
            return self.queue
        if argv[0] == "sprio":
            rows = (f"{job}|{site_factor}|{site_factor}|0|0|0|0|0|0|0|\n" for job, site_factor in self.factors.items())
            return "".join(rows).encode()
        return f"ClusterName = {CLUSTER}\n".encode()

    def feed(self, argv: Sequence[str], stdin: bytes) -> Done:
        for line in stdin.decode().splitlines():
            _, job, site_factor = line.split()
            self.factors[int(job.removeprefix("jobid="))] = int(site_factor.removeprefix("sitefactor="))
        return Done(0, b"", b"")


def queue_of(release: str) -> StandIn:
    """The release's record of a pending job, with users and names of the past."""
    content = json.loads((FIXTURES / release / "squeue.json").read_bytes())
    (shape,) = (job for job in content["jobs"] if job["name"] == "too-big")
    words = [f"{w}-{v}" for w in ("train", "eval", "prep", "tune", "sim") for v in ("bert", "gpt", "water", "vit")]
    jobs = []
    for number in range(JOBS):
        job: dict[str, Any] = copy.copy(shape)
        submit_s = NOW_S - 86_400 + number
        job |= {
            "job_id": 2_000_000 + number,
            "user_name": f"user{number * 7 % PENDING_USERS}", "name": words[number % len(words)],
            "submit_time": submit_s if release < "23" else {"set": True, "infinite": False, "number": submit_s},
            "tres_req_str": f"cpu=32,mem=1000M,node=1,billing=1,gres/gpu={1 + number % 4}", "cluster": CLUSTER,
        }  # fmt: skip
        jobs.append(job)
    of = {str(job["job_id"]): json.dumps(job).encode() for job in jobs}
    return StandIn(json.dumps({"jobs": jobs}).encode(), of, dict.fromkeys(range(2_000_000, 2_000_000 + JOBS), 0))


def timed_run(store: Store, slurm: StandIn, folder: Path) -> tuple[float, dict[str, float], int]:
    """Seconds of one run from the first question to the last line, those of its parts, and how many were changed."""
    began = time.perf_counter()
    parts: dict[str, float] = {}
    config, log = parse_config({"tiers": TIERS}), JobLog(folder, "reprioritize")

    def predict(requests: Sequence[JobRequest]) -> list[PriorityAdvice | None]:
        parts["read the queue"] = time.perf_counter() - began
        trained = load(store.of(CLUSTER).models_dir)
        history = load_history(store.of(CLUSTER), user={request.user for request in requests}, running=True)
        loaded = time.perf_counter()
        parts["load the past"] = loaded - began - parts["read the queue"]
        told = priorities_of(requests, history, trained, config, NOW_S)
        parts["predict"] = time.perf_counter() - loaded
        return told

    backend = CommandBackend(slurm)
    plan = plan_site_factors(backend, log.history(CLUSTER, NOW_S), predict, lambda job, site_factor: False, NOW_S)
    planned = time.perf_counter()
    engine = SiteFactorEngine(
        commands=slurm, log=log, cluster=CLUSTER, clock=lambda: float(NOW_S), sleep=time.sleep, backend=backend
    )
    assert engine.apply(plan).waiting == len(plan.changes)
    parts["write down and tell"] = time.perf_counter() - planned
    return time.perf_counter() - began, parts, len(plan.changes)


def measure() -> list[Figure]:
    figures = [Figure("past jobs", float(USERS * FAMILIES * RUNS)), Figure("pending jobs", float(JOBS))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        store = Store.open(folder / "store")
        for release in ("22.05.8", "26.05.5"):
            slurm = queue_of(release)
            figures.append(Figure(f"{release}: squeue's answer, MB", len(slurm.queue) / 1e6))
            for what in ("first run", "second run"):
                began_s = time.process_time()
                took_s, parts, changed = timed_run(store, slurm, folder / f"actions-{release}")
                parts["processor time"] = time.process_time() - began_s
                figures.append(at_most(f"{release}: {what}, s", took_s, GOAL_S))
                figures += [Figure(f"  {part}, s", part_s) for part, part_s in parts.items()]
                figures.append(Figure("  changed", float(changed)))
        memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [*figures, Figure("highest memory with the making of the past, MiB", memory_mib)]


if __name__ == "__main__":
    main(measure)
