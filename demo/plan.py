"""The whole site before its telemetry: everything that is decided once, and the job table made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from almanac.names import name_key
from demo.families import NO_TIER, DemoFamilies, make_families
from demo.host_use import host_columns
from demo.hostile import Hostile, hostile_jobs, hostile_names, make_hostile
from demo.job_names import family_stems, job_names
from demo.jobs import STATES, Jobs, make_jobs
from demo.population import Population, make_population, make_submissions
from demo.profile import Bools, Floats, Ints, Profile, load_profile
from demo.schedule import ScheduledRuns, schedule
from demo.scripts import job_scripts
from demo.shape import SiteShape
from telemetry.store.schema import JOBS

TIERS = (None, "hbm40g", "hbm80g")
_CONSTRAINTS = ("gpu", "gpu&hbm40g", "gpu&hbm80g")
_FIRST_40, _FIRST_80, _CPUS_PER_NODE = 1001, 8193, 128


@dataclass(frozen=True)
class SitePlan:
    """All that is decided of a site. `names` are the jobs', `scripts` the keys of what they run, `hosts` the nodes'
    names, in the order of Runs.node.
    """

    shape: SiteShape
    profile: Profile
    people: Population
    families: DemoFamilies
    jobs: Jobs
    runs: ScheduledRuns
    names: list[str]
    hosts: list[str]
    scripts: list[str | None]
    hostile: Hostile | None = None


def plan_site(shape: SiteShape) -> SitePlan:
    """Users, families, jobs and their places; equal shapes give equal plans."""
    profile = load_profile()
    seeds = np.random.SeedSequence(shape.seed).spawn(6)
    rng = [np.random.default_rng(seed) for seed in seeds]
    people = make_population(shape, profile, rng[0])
    submissions = make_submissions(shape, profile, people, rng[1])
    counts = np.bincount(submissions.family, minlength=len(people.family_user))
    families = make_families(shape, profile, people, counts, rng[2])
    jobs = make_jobs(shape, profile, people, families, submissions, rng[3])
    hostile = None
    if shape.is_hostile:
        own_rng = np.random.default_rng([shape.seed, 11])
        hostile = make_hostile(people, families, counts, own_rng)
        jobs = hostile_jobs(hostile, shape, profile, families, jobs, own_rng)
    runs = schedule(shape, jobs, families, rng[4])
    stems = family_stems(people.family_user, rng[5])
    names = job_names(stems, jobs.family, jobs.submit_s, jobs.rank, jobs.is_debug, jobs.suffix, rng[5])
    if hostile:
        names = hostile_names(hostile, jobs, names)
    scripts = job_scripts(shape.seed, people, jobs)
    return SitePlan(shape, profile, people, families, jobs, runs, names, host_names(shape), scripts, hostile)


def host_names(shape: SiteShape) -> list[str]:
    """Hosts of the 40 GB, 80 GB and shared nodes; in alphabetical order."""
    first_80 = max(_FIRST_80, _FIRST_40 + shape.nodes_40)
    numbers = [*range(_FIRST_40, _FIRST_40 + shape.nodes_40)]
    numbers += range(first_80, first_80 + shape.nodes_80 + shape.shared_nodes)
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

    What has not started by then is PENDING, what has not ended RUNNING, both without an end.
    """
    now_s = plan.shape.end_s if now_s is None else now_s
    runs, jobs = plan.runs, plan.jobs
    seen = np.flatnonzero(runs.submit_s < now_s)
    job = runs.job[seen]
    start_s, end_s = runs.start_s[seen], runs.end_s[seen]
    is_started = (start_s >= 0) & (start_s < now_s)
    is_ended = end_s <= now_s
    state = np.array(STATES, dtype=object)[runs.state[seen]]
    state = np.where(is_ended, state, np.where(is_started, "RUNNING", "PENDING"))
    elapsed_s = np.where(is_started, np.minimum(end_s, now_s) - start_s, 0)
    columns = _requests(plan, job) | {
        "submit_s": pa.array(runs.submit_s[seen]),
        "state": pa.array(state.tolist(), pa.string()),
        "start_s": _known(start_s, is_started),
        "end_s": _known(end_s, is_ended),
        "elapsed_s": pa.array(elapsed_s),
        "node_list": pa.array(_node_lists(plan, seen, is_started), pa.string()),
        "exit_code": _known(np.where(runs.state[seen] == 1, 1, 0), is_ended),
        "exit_signal": _known(np.zeros(len(seen), dtype=np.int64), is_ended),
        "restarts": pa.array(runs.restarts[seen]),
    }
    columns |= host_columns(plan.shape, jobs, runs, seen, columns["cpu_count"].to_numpy(), elapsed_s, is_ended)
    arrays = [columns.get(f.name, None) for f in JOBS]
    filled = [pa.nulls(len(seen), f.type) if a is None else a for f, a in zip(JOBS, arrays, strict=True)]
    table = pa.Table.from_arrays(filled, schema=JOBS).append_column("_order", pa.array(jobs.job_id[job]))
    return table.sort_by([("submit_s", "ascending"), ("_order", "ascending")]).drop_columns(["_order"])


def _known(values: Ints, is_known: Bools) -> pa.Array[Any]:
    return pa.array(values, pa.int64(), mask=~is_known)


def _requests(plan: SitePlan, job: Ints) -> dict[str, pa.Array[Any]]:
    """The columns that are known at submission, one entry per element of job."""
    jobs, people = plan.jobs, plan.people
    user = people.family_user[jobs.family[job]]
    shared, tier = jobs.is_shared[job], plan.families.tier[jobs.family[job]]
    tier = np.where(shared, NO_TIER, tier)
    is_task = jobs.array_job_id[job] >= 0
    names = [plan.names[n] for n in job.tolist()]
    share = jobs.gpus[job] / (jobs.nodes[job] * plan.shape.gpus_per_node)
    return {
        "job_id": pa.array(jobs.job_id[job]),
        "array_job_id": _known(jobs.array_job_id[job], is_task),
        "array_task_id": _known(jobs.task[job], is_task),
        "user": _chosen(people.user_name, user),
        "account": _chosen(people.user_account, user),
        "partition": _chosen(["gpu", "shared"], shared.astype(np.int64)),
        "qos": _chosen(["regular", "debug"], jobs.is_debug[job].astype(np.int64)),
        "name": pa.array(names),
        "name_key": pa.array([name_key(name) for name in names]),
        "script_key": pa.array([plan.scripts[n] for n in job.tolist()], pa.string()),
        "time_limit_s": pa.array(jobs.limit_s[job]),
        "node_count": pa.array(jobs.nodes[job]),
        "cpu_count": pa.array((_CPUS_PER_NODE * jobs.nodes[job] * share).astype(np.int64)),
        "gpu_count": pa.array(jobs.gpus[job]),
        "gpu_count_req": pa.array(jobs.gpus[job]),
        "gpu_type": _chosen(["a100"], np.zeros(len(job), dtype=np.int64)),
        "constraints": _chosen(_CONSTRAINTS, tier),
        "tier": _chosen(TIERS, tier),
    }


def _chosen(values: Sequence[str | None], index: Ints) -> pa.Array[Any]:
    return pa.array([values[n] for n in index.tolist()], pa.string())


def _node_lists(plan: SitePlan, seen: Ints, is_started: Bools) -> list[str | None]:
    """A hostlist per run; None where it has not started."""
    edges, node = plan.runs.first_node, plan.runs.node
    lists: list[str | None] = []
    for run, started in zip(seen.tolist(), is_started.tolist(), strict=True):
        hosts = [plan.hosts[n] for n in node[edges[run] : edges[run + 1]].tolist()]
        lists.append(fold_hosts(hosts) if started else None)
    return lists


def truth_table(plan: SitePlan) -> pa.Table:
    """What accounting does not say: one row per run of the plan, joined to the job table by job_id and submit_s.

    need_mib is the peak that the job needs; hbm_peak_mib what its busiest GPU shows (a preallocating job shows its
    share of the GPU). role: 0 regular, 1 without GPU work, 2 staff. run_s is the run time without the span's end.
    """
    runs, jobs, families = plan.runs, plan.jobs, plan.families
    job = runs.job
    family = jobs.family[job]
    columns: dict[str, pa.Array[Any]] = {
        "job_id": pa.array(jobs.job_id[job]),
        "submit_s": pa.array(runs.submit_s),
        "is_started": pa.array(runs.start_s >= 0),
        "run_s": pa.array(np.where(runs.start_s >= 0, runs.end_s - runs.start_s, 0)),
        "family": pa.array(family),
        "role": pa.array(jobs.role[job]),
        "gpus": pa.array(jobs.gpus[job]),
        "tier": _chosen(TIERS, families.tier[family]),
        "capacity_mib": pa.array(runs.capacity_mib),
        "need_mib": pa.array(jobs.need_mib[job]),
        "hbm_peak_mib": pa.array(shown_peak_mib(plan)),
        "framework": pa.array(families.framework[family]),
        "is_growing": pa.array(families.is_growing[family]),
        "util_frac": pa.array(jobs.util_frac[job]),
        "combo": pa.array(families.combo[family]),
        "is_compute_bound": pa.array(families.is_compute_bound[family]),
        "is_one_gpu": pa.array(families.is_one_gpu[family]),
    }
    return pa.table(columns)


def shown_peak_mib(plan: SitePlan) -> Floats:
    """HBM peak of the busiest GPU of each run that its telemetry holds, MiB, if the run is long enough for it."""
    runs, jobs, memory = plan.runs, plan.jobs, plan.profile.memory
    framework = plan.families.framework[jobs.family[runs.job]]
    share = np.array([kind.frac for kind in memory.preallocate] + [0.0])[framework]
    peak = np.minimum(jobs.need_mib[runs.job], memory.most_frac * runs.capacity_mib)
    return np.where(framework >= 0, share * runs.capacity_mib, peak)
