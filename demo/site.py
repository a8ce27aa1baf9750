"""The whole site before its telemetry: everything that is decided once, and the job table made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from almanac.names import name_key
from demo.families import with_traits
from demo.jobs import STATES, make_jobs, schedule
from demo.shape import Arrays, Bools, Floats, Ints, SiteShape, load_profile
from demo.users import job_names, job_scripts, make_submissions, make_users
from telemetry.store.schema import JOBS

TIERS = (None, "hbm40g", "hbm80g")
_CONSTRAINTS = ("gpu", "gpu&hbm40g", "gpu&hbm80g")
_FIRST_40, _FIRST_80, _CPUS_PER_NODE, _NODE_MIB = 1001, 8193, 128, 256_000


@dataclass(frozen=True)
class SitePlan:
    """All that is decided of a site. nodes: of each run, indices of hosts. names, scripts: of the jobs."""

    shape: SiteShape
    profile: Any
    users: Arrays
    families: Arrays
    jobs: Arrays
    runs: Arrays
    nodes: list[Ints]
    names: list[str]
    scripts: list[str | None]

    @property
    def hosts(self) -> list[str]:
        return host_names(self.shape)


def plan_site(
    shape: SiteShape,
    changed: Callable[[Arrays, Arrays], Arrays] = lambda families, jobs: jobs,
    renamed: Callable[[Arrays, list[str]], list[str]] = lambda jobs, names: names,
) -> SitePlan:
    """Users, families, jobs and their places; equal shapes give equal plans.

    changed: takes the families and their jobs, and gives the jobs that are then placed; renamed: likewise for names.
    """
    profile = load_profile()
    rng = [np.random.default_rng(seed) for seed in np.random.SeedSequence(shape.seed).spawn(6)]
    users, families = make_users(shape, profile, rng[0])
    submissions = make_submissions(shape, profile, users, families, rng[1])
    counts = np.bincount(submissions.family, minlength=len(families.user))
    families = with_traits(shape, profile, users, families, counts, rng[2])
    jobs = changed(families, make_jobs(shape, profile, families, submissions, rng[3]))
    runs, nodes = schedule(shape, jobs, families, rng[4])
    names = renamed(jobs, job_names(families, jobs, rng[5]))
    scripts = job_scripts(shape, profile, users, families, jobs.family)
    return SitePlan(shape, profile, users, families, jobs, runs, nodes, names, scripts)


def host_names(shape: SiteShape) -> list[str]:
    """Hosts of the 40 GB and the 80 GB nodes; in alphabetical order."""
    first_80 = max(_FIRST_80, _FIRST_40 + shape.nodes_40)
    numbers = [*range(_FIRST_40, _FIRST_40 + shape.nodes_40), *range(first_80, first_80 + shape.nodes_80)]
    return [f"nid{number:06d}" for number in numbers]


def fold_hosts(hosts: list[str]) -> str:
    """Slurm hostlist of sorted hosts that end in six digits: "nid[001001-001004,001010]"."""
    if len(hosts) == 1:
        return hosts[0]
    runs: list[list[int]] = []
    for number in (int(host[-6:]) for host in hosts):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [f"{low:06d}" if low == high else f"{low:06d}-{high:06d}" for low, high in runs]
    return f"{hosts[0][:-6]}[{','.join(parts)}]"


def jobs_table(plan: SitePlan, now_s: int | None = None) -> pa.Table:
    """Accounting as of now_s (the end of the span where None), columns of schema JOBS, in order of submission.

    A job that has not started by then is PENDING, one that has not ended RUNNING, both without an end.
    """
    now_s = plan.shape.end_s if now_s is None else now_s
    seen = np.flatnonzero(plan.runs.submit_s < now_s)
    seen = seen[np.lexsort((plan.jobs.job_id[plan.runs.job[seen]], plan.runs.submit_s[seen]))]
    runs, hosts = plan.runs.take(seen), plan.hosts
    jobs, of = plan.jobs.take(runs.job), plan.families.take(plan.jobs.family[runs.job])
    is_started, is_ended = (runs.start_s >= 0) & (runs.start_s < now_s), runs.end_s <= now_s
    state = np.where(is_ended, np.array(STATES, dtype=object)[runs.state], np.where(is_started, "RUNNING", "PENDING"))
    elapsed_s = np.where(is_started, np.minimum(runs.end_s, now_s) - runs.start_s, 0)
    node_lists = [
        fold_hosts([hosts[node] for node in plan.nodes[run].tolist()]) if started else None
        for run, started in zip(seen.tolist(), is_started.tolist(), strict=True)
    ]
    is_task, zeros = jobs.array_job_id >= 0, np.zeros(len(seen), dtype=np.int64)
    names = [plan.names[job] for job in runs.job.tolist()]
    columns = {
        "job_id": pa.array(jobs.job_id),
        "array_job_id": pa.array(jobs.array_job_id, mask=~is_task),
        "array_task_id": pa.array(jobs.task, pa.int64(), mask=~is_task),
        "user": _chosen(plan.users.name, of.user),
        "account": _chosen(plan.users.account, of.user),
        "partition": _chosen(["gpu"], zeros),
        "qos": _chosen(["regular", "debug"], jobs.is_debug.astype(np.int64)),
        "name": pa.array(names),
        "name_key": pa.array([name_key(name) for name in names]),
        "script_key": pa.array([plan.scripts[job] for job in runs.job.tolist()], pa.string()),
        "submit_s": pa.array(runs.submit_s),
        "time_limit_s": pa.array(jobs.limit_s),
        "node_count": pa.array(jobs.nodes),
        "cpu_count": pa.array(_CPUS_PER_NODE * jobs.nodes),
        "gpu_count": pa.array(jobs.gpus),
        "gpu_count_req": pa.array(jobs.gpus),
        "gpu_type": _chosen(["a100"], zeros),
        "constraints": _chosen(_CONSTRAINTS, of.tier),
        "tier": _chosen(TIERS, of.tier),
        "state": pa.array(state.tolist(), pa.string()),
        "start_s": pa.array(runs.start_s, mask=~is_started),
        "end_s": pa.array(runs.end_s, mask=~is_ended),
        "elapsed_s": pa.array(elapsed_s),
        "node_list": pa.array(node_lists, pa.string()),
        "exit_code": pa.array(np.where(runs.state == 1, 1, 0), mask=~is_ended),
        "exit_signal": pa.array(zeros, mask=~is_ended),
        "restarts": pa.array(runs.restarts),
        **_host_columns(plan, seen, jobs, elapsed_s, is_ended),
    }
    arrays = [columns[f.name] if f.name in columns else pa.nulls(len(seen), f.type) for f in JOBS]
    return pa.Table.from_arrays(arrays, schema=JOBS)


def _chosen(values: Sequence[str | None], index: Ints) -> pa.Array[Any]:
    return pa.array([values[n] for n in index.tolist()], pa.string())


def _host_columns(plan: SitePlan, seen: Ints, jobs: Arrays, elapsed_s: Ints, is_ended: Bools) -> dict[str, Any]:
    """CPU time and host memory of the runs `seen`, as sacct has them; unknown before the end, and for one run in 50.

    Mostly low, a few high. Drawn, not fitted: the studies behind the site's other figures say nothing of CPUs.
    """
    rng = np.random.default_rng([plan.shape.seed, 29])
    families, number = int(plan.jobs.family.max(initial=-1)) + 1, len(plan.runs.job)
    cpu_share: Floats = rng.beta(1.2, 6.0, families)
    memory_share: Floats = rng.beta(1.5, 6.0, families)
    noise = np.exp(rng.normal(0, 0.05, (2, number)))
    is_lost = rng.random(number) < 0.02
    alloc_mib = _NODE_MIB * jobs.nodes * 1.0
    peak_mib = np.minimum(memory_share[jobs.family] * noise[0][seen], 1.0) * alloc_mib
    cpus = _CPUS_PER_NODE * jobs.nodes
    cpu_s = np.minimum(cpu_share[jobs.family] * noise[1][seen], 1.0) * cpus * elapsed_s
    unknown = ~is_ended | is_lost[seen] | (elapsed_s <= 0)
    return {
        "cpu_time_s": pa.array(np.round(cpu_s, 3), mask=unknown),
        "host_mem_alloc_mib": pa.array(alloc_mib, mask=elapsed_s <= 0),
        "host_mem_peak_mib": pa.array(np.round(peak_mib), mask=unknown),
        "host_mem_task_peak_mib": pa.array(np.round(peak_mib / jobs.nodes), mask=unknown),
    }


def truth_table(plan: SitePlan) -> pa.Table:
    """Facts that accounting does not have: one row per run, joined to the job table by job_id and submit_s.

    need_mib is the peak that the job needs; hbm_peak_mib what its busiest GPU shows (a preallocating job shows its
    share of the GPU). role: 0 regular, 1 without GPU work, 2 staff. run_s is the run time without the span's end.
    """
    runs = plan.runs
    jobs, of = plan.jobs.take(runs.job), plan.families.take(plan.jobs.family[runs.job])
    is_started = runs.start_s >= 0
    return pa.table(
        {
            **{name: pa.array(getattr(jobs, name)) for name in ("job_id", "family", "role", "gpus", "need_mib")},
            "submit_s": pa.array(runs.submit_s),
            "is_started": pa.array(is_started),
            "run_s": pa.array(np.where(is_started, runs.end_s - runs.start_s, 0)),
            "tier": _chosen(TIERS, of.tier),
            "capacity_mib": pa.array(runs.capacity_mib),
            "hbm_peak_mib": pa.array(shown_peak_mib(plan)),
            **{name: pa.array(getattr(of, name)) for name in ("framework", "is_growing")},
        }
    )


def shown_peak_mib(plan: SitePlan) -> Floats:
    """HBM peak of the busiest GPU of each run that its telemetry holds, MiB, if the run is long enough for it."""
    runs, memory = plan.runs, plan.profile.memory
    framework = plan.families.framework[plan.jobs.family[runs.job]]
    share = np.array([kind.frac for kind in memory.preallocate] + [0.0])[framework]
    peak = np.minimum(plan.jobs.need_mib[runs.job], memory.most_frac * runs.capacity_mib)
    shown: Floats = np.where(framework >= 0, share * runs.capacity_mib, peak)
    return shown
