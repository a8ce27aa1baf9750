"""Families whose memory is hard to foresee, and what they need: the site that the memory bound is proven on."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from telemetry.sources.generated.families import MIB_80, Families
from telemetry.sources.generated.jobs import Jobs
from telemetry.sources.generated.population import REGULAR, Population
from telemetry.sources.generated.profile import Floats, Ints, Profile
from telemetry.sources.generated.quotas import fill, rank_within
from telemetry.sources.generated.shape import SiteShape

PLAIN, BIMODAL, GROWING, RENAMED, SHARED, RARE = range(6)
KINDS = ("plain", "bimodal", "growing", "renamed", "shared", "rare")
PREALLOCATING, NEW_USER = "preallocating", "new user"
_EPOCHS = "amber birch cedar delta ember fjord grove heath inlet juniper kelp larch".split()  # noqa: SIM905


@dataclass(frozen=True)
class Hostile:
    """Per family: its kind, and the parameters that the kind uses (of others they mean nothing)."""

    kind: Ints
    chance: Floats
    factor: Floats
    runs_per_name: Ints


@cache
def hostile_profile() -> Mapping[str, Any]:
    """The tables of `hostile.toml`."""
    return tomllib.loads((resources.files(__package__) / "hostile.toml").read_text(encoding="utf-8"))


def proof_shape(seed: int) -> SiteShape:
    """The site of the proof; equal seeds give equal sites."""
    site = hostile_profile()["site"]
    return SiteShape(
        seed=seed, days=site["days"], nodes_40=site["nodes_40"], nodes_80=site["nodes_80"], users=site["users"],
        jobs_per_day=site["jobs_per_day"], tier80_request_share=site["tier80_request_share"],
        max_nodes=site["max_nodes"], is_hostile=True,
    )  # fmt: skip


def make_hostile(people: Population, families: Families, counts: Ints, rng: np.random.Generator) -> Hostile:
    """Kinds dealt by jobs to the families that neither preallocate nor grow by themselves."""
    tables = hostile_profile()
    shares = [tables[name]["share"] for name in KINDS[1:]]
    free = (people.family_role == REGULAR) & (families.framework < 0) & ~families.is_growing
    kind = np.full(len(counts), PLAIN)
    for number, share in enumerate(shares, start=1):
        left = np.where(free & (kind == PLAIN), counts, 0)
        kind[fill(left, rng.permutation(len(counts)), share * counts[free].sum())] = number
    at = rng.random((3, len(counts)))
    chance, factor = np.zeros(len(counts)), np.ones(len(counts))
    for number, column in ((BIMODAL, "high_share"), (RARE, "huge_share")):
        chance = np.where(kind == number, _between(tables[KINDS[number]][column], at[0]), chance)
    for number in (BIMODAL, GROWING, RARE):
        factor = np.where(kind == number, _between(tables[KINDS[number]]["factor"], at[1]), factor)
    runs = np.rint(_between(tables["renamed"]["runs"], at[2])).astype(np.int64)
    return Hostile(kind, chance, factor, runs)


def _between(limits: list[float], share: Floats) -> Floats:
    return limits[0] + (limits[1] - limits[0]) * share


def hostile_needs(hostile: Hostile, profile: Profile, jobs: Jobs, rng: np.random.Generator) -> Jobs:
    """The jobs with the needs of their kinds, MiB; no need is above what the largest GPU can hold."""
    kind, factor = hostile.kind[jobs.family], hostile.factor[jobs.family]
    is_high = rng.random(len(jobs)) < hostile.chance[jobs.family]
    rank, of = rank_within(jobs.family)
    # the geometric middle of the growth is the family's usual need
    grown = factor ** ((rank + 0.5) / of - 0.5)
    times = np.where(kind == GROWING, grown, np.where(is_high, factor, 1.0))
    return replace(jobs, need_mib=np.minimum(jobs.need_mib * times, profile.memory.most_frac * MIB_80))


def hostile_names(hostile: Hostile, jobs: Jobs, names: list[str]) -> list[str]:
    """Renamed families change a word of their name now and then; shared ones have a name that everybody uses."""
    common = hostile_profile()["shared"]["names"]
    changed = []
    for job, (family, rank) in enumerate(zip(jobs.family.tolist(), jobs.rank.tolist(), strict=True)):
        name = names[job]
        if hostile.kind[family] == RENAMED:
            name = f"{_EPOCHS[rank // int(hostile.runs_per_name[family]) % len(_EPOCHS)]}-{name}"
        elif hostile.kind[family] == SHARED:
            name = common[family % len(common)]
        changed.append(name)
    return changed
