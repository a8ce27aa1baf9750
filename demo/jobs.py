"""What each job of the site is: its size, planned run time, limit, fate, need of memory and way of using its GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from demo.families import MIB_40, MIB_80, TIER_80, DemoFamilies, size_bins
from demo.population import IDLE, REGULAR, Population, Submissions
from demo.profile import Bools, DurationProfile, Floats, Ints, Profile
from demo.quotas import rank_within, reflect
from demo.shape import SiteShape

COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL = range(5)
STATES = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
DEBUG_FACTOR = 0.15


@dataclass(frozen=True)
class Jobs:
    """Parallel arrays over jobs in order of submission.

    run_s: run time unless memory ends it earlier. is_requeued: a node failure ends the first run, and a second one
    of again_s completes. util_frac, spatial, temporal: wanted job mean and imbalances. need_mib: HBM peak that the job
    would have on a GPU that is large enough. imbalances are clipped to what the mean allows.
    """

    family: Ints
    role: Ints
    submit_s: Ints
    job_id: Ints
    array_job_id: Ints
    task: Ints
    nodes: Ints
    gpus: Ints
    is_shared: Bools
    is_debug: Bools
    suffix: Ints
    rank: Ints
    run_s: Ints
    again_s: Ints
    limit_s: Ints
    state: Ints
    is_requeued: Bools
    waits_in_vain_s: Ints
    util_frac: Floats
    spatial: Floats
    temporal: Floats
    need_mib: Floats
    has_prof_fault: Bools

    def __len__(self) -> int:
        return len(self.family)


def make_jobs(
    shape: SiteShape,
    profile: Profile,
    people: Population,
    families: DemoFamilies,
    submissions: Submissions,
    rng: np.random.Generator,
) -> Jobs:
    """Every job of the site, before the nodes are known."""
    family, number = submissions.family, len(submissions.family)
    rank, of = rank_within(family)
    role = people.family_role[family]
    is_debug = (rng.random(number) < profile.people.debug_share) & (submissions.array < 0)
    suffixed = rng.random(number) < profile.people.suffix_share
    shared = families.is_shared[family]
    nodes = np.where((role != REGULAR) | shared, 1, families.nodes[family])
    state, run_s, again_s, limit_s = _times(shape, profile, families, family, is_debug, nodes > 1, rng)
    gives_up = rng.random(number) < profile.outcome.cancelled_waiting
    job_id, array_job_id = _ids(submissions)
    util, spatial, temporal = _use(shape, profile, families, family, role, rng)
    return Jobs(
        family=family, role=role, submit_s=submissions.submit_s, job_id=job_id, array_job_id=array_job_id,
        task=np.where(submissions.array >= 0, submissions.task, -1), nodes=nodes,
        gpus=np.where(shared, 1 + (families.nodes[family] + family) % 2, nodes * shape.gpus_per_node),
        is_shared=shared, is_debug=is_debug, suffix=np.where(suffixed, rng.integers(0, 5, number), -1), rank=rank,
        run_s=run_s, again_s=again_s, limit_s=limit_s, state=state, is_requeued=(state == NODE_FAIL),
        waits_in_vain_s=np.where(gives_up, rng.integers(5, 1800, number), -1), util_frac=util, spatial=spatial,
        temporal=temporal, need_mib=_needs(profile, families, family, rank, of, rng),
        has_prof_fault=rng.random(number) < shape.faults.prof_fault_share,
    )  # fmt: skip


def _ids(submissions: Submissions) -> tuple[Ints, Ints]:
    """Job ids in order of submission; array_job_id is the id of the array's first task, -1 for single jobs."""
    job_id = 1_000_001 + np.arange(len(submissions.family))
    first = np.full(int(submissions.array.max(initial=-1)) + 2, np.iinfo(np.int64).max)
    np.minimum.at(first, submissions.array, job_id)
    return job_id, np.where(submissions.array >= 0, first[submissions.array], -1)


def _times(
    shape: SiteShape,
    profile: Profile,
    families: DemoFamilies,
    family: Ints,
    is_debug: Bools,
    several: Bools,
    rng: np.random.Generator,
) -> tuple[Ints, Ints, Ints, Ints]:
    """State, run time, second run time and limit. Scaled so that the mean run times are the published ones."""
    durations, outcome, number = profile.duration, profile.outcome, len(family)
    log_s = families.log_median[family] + families.log_sigma[family] * rng.normal(0.0, 1.0, number)
    relative = np.exp(log_s) * np.where(is_debug, DEBUG_FACTOR, 1.0)
    fate = rng.random(number)
    edges = np.cumsum([outcome.failed, outcome.cancelled, outcome.node_fail])
    state = np.select(list(fate < edges[:, None]), [FAILED, CANCELLED, NODE_FAIL], COMPLETED)
    part = np.where(state == COMPLETED, 1.0, outcome.fails_at(rng.random(number)))
    usual = np.exp(families.log_median) * families.limit_factor
    run, again, limit = np.zeros(number), np.zeros(number), np.zeros(number)
    means = (durations.one_node_mean_s, durations.multi_node_mean_s)
    for members, mean_s in zip((~several, several), means, strict=True):
        if not members.any():
            continue
        scale = mean_s * shape.duration_scale / relative[members].mean()
        for _ in range(6):
            limit_s = _limits(durations, usual[family[members]] * scale, is_debug[members])
            run_s = np.minimum(relative[members] * part[members] * scale, limit_s)
            counted = run_s[run_s >= durations.mean_from_s]
            scale *= mean_s * shape.duration_scale / (counted.mean() if len(counted) else run_s.mean())
        run[members], limit[members] = run_s, limit_s
        again[members] = np.minimum(relative[members] * scale, limit_s)
    state = np.where((run >= limit) & (state != NODE_FAIL), TIMEOUT, state)
    late = np.where(state == TIMEOUT, rng.integers(0, 30, number), 0)
    run_s = np.minimum(np.maximum(run, 5) + late, durations.longest_s)
    return state, run_s.astype(np.int64), np.maximum(again, 5).astype(np.int64), limit.astype(np.int64)


def _limits(durations: DurationProfile, wanted_s: Floats, is_debug: Bools) -> Floats:
    """The habitual limit at or above wanted_s; half an hour for debug jobs."""
    habits = np.array(durations.limits_s, dtype=float)
    place = np.minimum(np.searchsorted(habits, wanted_s), len(habits) - 1)
    return np.where(is_debug, 1800.0, habits[place])


def _needs(
    profile: Profile, families: DemoFamilies, family: Ints, rank: Ints, of: Ints, rng: np.random.Generator
) -> Floats:
    """HBM peak of each job: around the family's usual one within its band, or growing from run to run."""
    noise = np.clip(rng.normal(0.0, 1.0, len(family)), -3, 3)
    around = families.need_mib[family] * (1 + families.need_spread[family] * noise)
    around = np.clip(around, families.need_low_mib[family] * 1.001, families.need_high_mib[family])
    first, last = families.grow_mib[family].T
    grown = (first + (last - first) * (rank + 0.5) / of) * (1 + 0.01 * noise)
    most = np.where(families.tier[family] == TIER_80, MIB_80, MIB_40) * profile.memory.most_frac
    return np.where(families.is_growing[family], np.minimum(grown, most), around)


def _use(
    shape: SiteShape,
    profile: Profile,
    families: DemoFamilies,
    family: Ints,
    role: Ints,
    rng: np.random.Generator,
) -> tuple[Floats, Floats, Floats]:
    """Mean utilization, spatial and temporal imbalance of each job (perlmutter-telemetry, IV-A, VI and VII)."""
    number = len(family)
    jitter = rng.uniform(-0.05, 0.05, number)
    share = families.util_low[family] + families.util_width[family] * rng.random(number) + jitter
    share = reflect(share)
    util = np.zeros(number)
    for bin_number, size_bin in enumerate(size_bins(shape, profile)):
        util = np.where(families.size_bin[family] == bin_number, size_bin.util(share) / 100, util)
    one_gpu = families.is_one_gpu[family]
    util = np.where(one_gpu, np.minimum(util, 0.98 / shape.gpus_per_node), util)
    util = np.where(role == IDLE, 0.0, util)
    band = np.digitize(util, [0.30, 0.70])
    place = reflect(families.imbalance_share[family] + rng.uniform(-0.25, 0.25, number))
    spatial = np.choose(band, [curve(place) for curve in profile.spatial])
    spatial = np.clip(spatial, 0.0, np.maximum(0.0, 1 - util / 0.98))
    spatial = np.where(one_gpu, 1 - 1 / shape.gpus_per_node, spatial)
    place = rng.random(number)
    temporal = np.choose(band, [curve(place) for curve in profile.temporal])
    return util, spatial, temporal
