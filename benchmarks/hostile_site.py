"""Families whose memory is hard to foresee, and what they need: the site that the memory bound is proven on."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from demo.families import MIB_40, MIB_80, TIER_80
from demo.quotas import fill, rank_within
from demo.shape import GPUS_PER_NODE, Arrays, Floats, Ints, SiteShape, load_profile
from demo.site import SitePlan, plan_site
from demo.users import REGULAR

KINDS = (
    "plain", "bimodal", "growing", "renamed", "shared", "rare", "regime", "sweep", "burst", "heavy", "near", "leak",
    "gpus", "gaps", "reserved", "unnamed",
)  # fmt: skip
"""hostile_site.toml explains each."""
(
    PLAIN, BIMODAL, GROWING, RENAMED, SHARED, RARE, REGIME, SWEEP, BURST, HEAVY, NEAR, LEAK, GPUS, GAPS, RESERVED,
    UNNAMED,
) = range(len(KINDS))  # fmt: skip
BATCHES = ("sweep", "burst")
"""Kinds that are submitted many at a time."""
PREALLOCATING, NEW_USER = "preallocating", "new user"
_WORDS = (
    ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "juniper", "kelp", "larch"],
    ["quiet", "rapid", "sunny", "vivid", "wooden", "young", "zesty", "bold", "crisp", "deep", "early", "fancy"],
    ["owl", "panda", "quail", "raven", "salmon", "tiger", "urchin", "viper", "wolf", "yak", "zebra", "otter"],
)


@cache
def hostile_profile() -> Mapping[str, Any]:
    """The tables of hostile_site.toml."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def proof_shape(seed: int) -> SiteShape:
    """The site of the proof; equal seeds give equal sites."""
    site = hostile_profile()["site"]
    wanted = ("days", "nodes_40", "nodes_80", "users", "jobs_per_day", "tier80_request_share", "max_nodes")
    return SiteShape(seed=seed, **{name: site[name] for name in wanted})


def plan_hostile(shape: SiteShape) -> tuple[SitePlan, Arrays]:
    """The site where some families need memory as hostile_site.toml has it, and, per family, how.

    kind, and the parameters that the kind uses (of others they mean nothing). size: runs under one name, or jobs of a
    batch. moment: of the change, as a share of the span.
    """
    drawn: list[Arrays] = []

    def changed(families: Arrays, jobs: Arrays) -> Arrays:
        rng = np.random.default_rng([shape.seed, 11])
        drawn.append(_draw_kinds(families, np.bincount(jobs.family, minlength=len(families.user)), rng))
        return _hostile_jobs(drawn[0], shape, families, jobs, rng)

    return plan_site(shape, changed, lambda jobs, names: _hostile_names(drawn[0], jobs, names)), drawn[0]


def _draw_kinds(families: Arrays, counts: Ints, rng: np.random.Generator) -> Arrays:
    """Kinds dealt by jobs to the families that neither preallocate nor grow by themselves."""
    tables = hostile_profile()
    free = (families.role == REGULAR) & (families.framework < 0) & ~families.is_growing
    kind = np.full(len(counts), PLAIN)
    for number, name in enumerate(KINDS[1:], start=1):
        left = np.where(free & (kind == PLAIN), counts, 0)
        kind[fill(left, rng.permutation(len(counts)), tables[name]["share"] * counts[free].sum())] = number
    drawn = {}
    for column, usual in (("chance", 0.0), ("factor", 1.0), ("size", 1.0), ("moment", 1.0)):
        at, values = rng.random(len(counts)), np.full(len(counts), usual)
        for number, name in enumerate(KINDS[1:], start=1):
            low, high = tables[name].get(column, (usual, usual))
            values = np.where(kind == number, low + (high - low) * at, values)
        drawn[column] = values
    return Arrays(**{**drawn, "kind": kind, "size": np.rint(drawn["size"]).astype(np.int64)})


def _hostile_jobs(
    hostile: Arrays, shape: SiteShape, families: Arrays, jobs: Arrays, rng: np.random.Generator
) -> Arrays:
    """The jobs with the times, sizes and needs (MiB) of their kinds; no need is above what the largest GPU holds."""
    jobs = _sized(hostile, shape, _in_batches(hostile, shape, jobs, rng), rng)
    need_mib = _needs(hostile, shape, families, jobs, rng)
    return jobs.replaced(need_mib=np.minimum(need_mib, load_profile().memory.most_frac * MIB_80))


def batch_of(hostile: Arrays, jobs: Arrays) -> Ints:
    """Per job the number of its batch within its family; -1 for kinds that have none."""
    is_batched = np.isin(hostile.kind[jobs.family], (SWEEP, BURST))
    return np.where(is_batched, jobs.rank // np.maximum(hostile.size[jobs.family], 1), -1)


def _in_batches(hostile: Arrays, shape: SiteShape, jobs: Arrays, rng: np.random.Generator) -> Arrays:
    """The jobs of a batch follow its first one by seconds, as single jobs; all are in order of submission again."""
    batch, batched = batch_of(hostile, jobs), batch_of(hostile, jobs) >= 0
    group = np.where(batched, jobs.family * (len(jobs.family) + 1) + batch, -1 - np.arange(len(jobs.family)))
    _, first, member = np.unique(group, return_index=True, return_inverse=True)
    place, _ = rank_within(member)
    gap_s = rng.uniform(0.5, 2.0, len(jobs.family)) * hostile_profile()["burst"]["gap_s"]
    together_s = jobs.submit_s[first][member] + (place * gap_s).astype(np.int64)
    submit_s = np.where(batched, np.minimum(together_s, shape.end_s - 1), jobs.submit_s)
    order = np.lexsort((np.arange(len(jobs.family)), submit_s))
    array, task = np.where(batched, -1, jobs.array_job_id), np.where(batched, -1, jobs.task)
    moved = jobs.replaced(submit_s=submit_s, array_job_id=array, task=task).take(order)
    number = np.empty(len(order), dtype=np.int64)
    number[order] = jobs.job_id
    array = moved.array_job_id
    array = np.where(array >= 0, number[np.maximum(array - jobs.job_id[0], 0)], -1)
    return moved.replaced(job_id=jobs.job_id, array_job_id=array, rank=rank_within(moved.family)[0])


def _sized(hostile: Arrays, shape: SiteShape, jobs: Arrays, rng: np.random.Generator) -> Arrays:
    """Jobs of the kind `gpus` take one, two or four nodes, as far as the site allows."""
    most = max(shape.max_nodes or shape.nodes_40, 1)
    nodes = np.minimum(rng.choice([1, 2, 4], len(jobs.family), p=[0.6, 0.25, 0.15]), most)
    nodes = np.where(hostile.kind[jobs.family] == GPUS, nodes, jobs.nodes)
    return jobs.replaced(nodes=nodes, gpus=nodes * GPUS_PER_NODE)


def _needs(hostile: Arrays, shape: SiteShape, families: Arrays, jobs: Arrays, rng: np.random.Generator) -> Floats:
    family, kind = jobs.family, hostile.kind[jobs.family]
    chance, factor = hostile.chance[family], hostile.factor[family]
    is_high, noise = rng.random(len(jobs.family)) < chance, rng.standard_normal(len(jobs.family))
    rank, of = jobs.rank, np.bincount(family)[family]
    batch, place = batch_of(hostile, jobs), rank % np.maximum(hostile.size[family], 1)
    # one draw for all jobs of a batch
    drawn = np.random.default_rng([shape.seed, 17]).random((len(hostile.kind), int(batch.max(initial=0)) + 1))
    of_batch = drawn[family, np.maximum(batch, 0)]
    swept = place / np.maximum(hostile.size[family] - 1, 1)
    since = (jobs.submit_s - shape.start_s) / (shape.end_s - shape.start_s)
    usual_s = np.exp(_mean_by(np.log(jobs.run_s), family))
    times = np.select(
        [kind == number for number in (BIMODAL, RARE, GROWING, REGIME, SWEEP, BURST, HEAVY, LEAK, GPUS)],
        [
            np.where(is_high, factor, 1.0),
            np.where(is_high, factor, 1.0),
            np.abs(factor)
            ** ((rank + 0.5) / of - 0.5),  # the geometric middle of the growth is the family's usual need
            np.where(since > hostile.moment[family], factor, 1.0),
            np.abs(factor) ** swept * (0.7 + 0.6 * of_batch),
            np.where(of_batch < chance, factor, 1.0),
            np.exp(factor * np.abs(rng.standard_t(3, len(jobs.family)))),
            np.clip(jobs.run_s / usual_s, 0.2, 5.0) ** factor,
            jobs.nodes.astype(np.float64) ** factor,
        ],
        1.0,
    )
    capacity_mib = np.where(families.tier[family] == TIER_80, MIB_80, MIB_40)
    near_mib = capacity_mib * factor * (1 + 0.02 * np.clip(noise, -3, 3))
    need_mib = np.where(kind == NEAR, near_mib, jobs.need_mib * times)
    # A framework uses no more than it reserves: a job that needs more would die on every tier.
    return np.where(kind == RESERVED, np.minimum(need_mib, factor * capacity_mib), need_mib)


def _mean_by(values: Floats, group: Ints) -> Floats:
    """Of each element the mean of its group."""
    sums: Floats = np.bincount(group, values) / np.maximum(np.bincount(group), 1)
    return sums[group]


def _hostile_names(hostile: Arrays, jobs: Arrays, names: list[str]) -> list[str]:
    """Renamed families change a word of their name now and then, unnamed ones all of it; shared names are common."""
    common = hostile_profile()["shared"]["names"]
    words = np.random.default_rng(len(names)).integers(0, len(_WORDS[0]), (len(names), len(_WORDS))).tolist()
    changed = []
    for job, (family, rank) in enumerate(zip(jobs.family.tolist(), jobs.rank.tolist(), strict=True)):
        name, kind = names[job], hostile.kind[family]
        if kind == RENAMED:
            name = f"{_WORDS[0][rank // int(hostile.size[family]) % len(_WORDS[0])]}-{name}"
        elif kind == SHARED:
            name = common[family % len(common)]
        elif kind == UNNAMED:
            name = "-".join(those[place] for those, place in zip(_WORDS, words[job], strict=True))
        changed.append(name)
    return changed
