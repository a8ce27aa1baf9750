"""A site of families whose memory is hard to foresee, and its history frame, with or without advice that is followed.

The memory bound is proven on it. The frame is drawn from the needs themselves, without telemetry. The product's rule
decides what counts as reserved, from what telemetry shows, and never from the truth.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from advisor.memory.backtest import DOWN, replay_tiers
from almanac.config import Config
from demo.shape import GPUS_PER_NODE, Arrays, Bools, Floats, Ints, SiteShape, fill, load_profile, rank_within
from demo.site import COMPLETED, FAILED, SitePlan, jobs_table, plan_site, shown_peak_mib
from demo.users import MIB_40, MIB_80, REGULAR, TIER_80
from telemetry.metrics.data_quality import NO_TELEMETRY, OK, SHORT, is_reserved_share

KINDS = (
    "plain", "bimodal", "growing", "renamed", "shared", "rare", "regime", "sweep", "burst", "heavy", "near", "leak",
    "gpus", "gaps", "reserved", "unnamed", "levels", "grid", "fraction",
    "cut",
)  # fmt: skip
"""hostile_site.toml explains each."""
(
    PLAIN, BIMODAL, GROWING, RENAMED, SHARED, RARE, REGIME, SWEEP, BURST, HEAVY, NEAR, LEAK, GPUS, GAPS, RESERVED,
    UNNAMED, LEVELS, GRID, FRACTION, CUT,
) = range(len(KINDS))  # fmt: skip
RESERVING = (RESERVED, FRACTION)
BATCHES = ("sweep", "burst", "levels", "grid")
"""Kinds that are submitted many at a time."""
GRID_VALUES = 4
"""Values of a grid's parameter."""
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
    """Return the number of each job's batch within its family; -1 for kinds without batches."""
    is_batched = np.isin(hostile.kind[jobs.family], [KINDS.index(name) for name in BATCHES])
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
    size = np.maximum(hostile.size[family], 1)
    swept = place / np.maximum(size - 1, 1)
    # The parameter's values come in turn, or one after another; some batches begin one value later.
    value = np.where(family % 2 == 0, place % GRID_VALUES, place * GRID_VALUES // size)
    value = value + (of_batch < chance)
    since = (jobs.submit_s - shape.start_s) / (shape.end_s - shape.start_s)
    usual_s = np.exp(_mean_by(np.log(jobs.run_s), family))
    times = np.select(
        [kind == number for number in (BIMODAL, RARE, GROWING, REGIME, SWEEP, BURST, HEAVY, LEAK, GPUS, LEVELS, GRID)],
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
            np.abs(factor) ** (2 * of_batch - 1),
            np.abs(factor) ** (value / GRID_VALUES),
        ],
        1.0,
    )
    capacity_mib = np.where(families.tier[family] == TIER_80, MIB_80, MIB_40)
    near_mib = capacity_mib * factor * (1 + 0.02 * np.clip(noise, -3, 3))
    need_mib = np.where(kind == NEAR, near_mib, jobs.need_mib * times)
    # A framework uses no more than it reserves: a job that needs more would die on every tier.
    return np.where(np.isin(kind, RESERVING), np.minimum(need_mib, factor * capacity_mib), need_mib)


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


TRUTH = ("need_mib", "kind", "family", "batch", "is_death")
MIN_RUN_S = 180
"""Shorter runs have no verdict (Cankur et al., II-C)."""


def record_of(shape: SiteShape, *, is_hostile: bool = True) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The history frame of the jobs that ran and ended, and, row by row, what no site knows of them (TRUTH).

    batch: number of the batch within the family, -1 for none. is_death: the run died for want of memory. is_hostile:
    some families need memory as hostile_site.toml has it.
    """
    plan, hostile = plan_hostile(shape) if is_hostile else (plan_site(shape), None)
    runs, jobs = plan.runs, plan.jobs
    family = jobs.family[runs.job]
    drawn = pd.DataFrame(
        {
            "job_id": jobs.job_id[runs.job],
            "submit_s": runs.submit_s,
            "hbm_max_mib": _measured_mib(plan, hostile),
            "hbm_capacity_mib": runs.capacity_mib,
            "is_flat": _is_flat(plan, hostile),
            "role": jobs.role[runs.job],
            "need_mib": jobs.need_mib[runs.job],
            "kind": _kinds(plan, hostile),
            "family": family,
            "batch": batch_of(hostile, jobs)[runs.job] if hostile else -1,
            "is_death": _is_death(plan),
            "is_cut": _is_cut(plan, hostile),
        }
    )
    accounting = jobs_table(plan).to_pandas()
    frame = accounting.merge(drawn, on=["job_id", "submit_s"], validate="one_to_one")
    frame = frame[frame["start_s"].notna() & frame["end_s"].notna() & (frame["role"] == REGULAR)]
    frame = frame.sort_values(["end_s", "job_id", "submit_s"], ignore_index=True)
    frame["is_array"] = frame["array_job_id"].notna()
    frame["time_limit_s"] = frame["time_limit_s"].astype("float64")
    frame["elapsed_s"] = frame["elapsed_s"].astype("float64")
    if is_hostile:
        frame = _cut_short(frame, hostile_profile()["cut"]["ends"])
    frame = frame.assign(**evidence_columns(frame))
    whole = {"job_id": "int64", "submit_s": "int64", "start_s": "int64", "end_s": "int64"}
    return frame.drop(columns=["role", "is_cut", *TRUTH]).astype(whole), frame[list(TRUTH)]


def _cut_short(frame: pd.DataFrame, share: float) -> pd.DataFrame:
    """The runs where those that are cut end after this share of their time, as their user cancels them."""
    cut = frame["is_cut"]
    elapsed_s = frame["elapsed_s"].where(~cut, np.floor(share * frame["elapsed_s"]))
    ends = frame.assign(
        state=frame["state"].where(~cut, "CANCELLED by 1000"),
        elapsed_s=elapsed_s,
        end_s=frame["end_s"].where(~cut, frame["start_s"] + elapsed_s),
    )
    return ends.sort_values(["end_s", "job_id", "submit_s"], ignore_index=True)


def evidence_columns(frame: pd.DataFrame) -> dict[str, Any]:
    """Return hbm_peak_mib, hbm_evidence, and verdict, as the store has them of hbm_max_mib, is_flat, and elapsed_s."""
    is_short, is_seen = frame["elapsed_s"] < MIN_RUN_S, frame["hbm_max_mib"].notna()
    share = (frame["hbm_max_mib"] / frame["hbm_capacity_mib"]).tolist()
    is_reserved = frame["is_flat"] & np.array([is_reserved_share(each) for each in share], dtype=bool) & ~is_short
    is_known = ~is_short & is_seen & ~is_reserved
    return {
        "hbm_peak_mib": frame["hbm_max_mib"].where(is_known),
        "hbm_evidence": np.select([is_reserved, is_known], ["preallocated", "telemetry"], "none"),
        "verdict": np.select([is_short, ~is_seen], [SHORT, NO_TELEMETRY], OK),
    }


def _is_death(plan: SitePlan) -> Bools:
    runs, jobs = plan.runs, plan.jobs
    starved: Bools = (jobs.need_mib[runs.job] > runs.capacity_mib) & (runs.state == FAILED)
    return starved & (plan.families.framework[jobs.family[runs.job]] < 0)


def _measured_mib(plan: SitePlan, hostile: Arrays | None) -> Floats:
    """The highest sample: a little less than the peak, of some deaths of memory much less; NaN without telemetry."""
    rng = np.random.default_rng([plan.shape.seed, 13])
    tables, runs = hostile_profile(), plan.runs
    number, family = len(runs.job), plan.jobs.family[runs.job]
    least, most = tables["measured"]["missed"]
    shown: Floats = shown_peak_mib(plan) * (1 - rng.uniform(least, most, number))
    is_silent = _is_death(plan) & (rng.random(number) < tables["measured"]["silent_death_share"])
    least, most = tables["measured"]["silent_death_peak"]
    shown = np.where(is_silent, runs.capacity_mib * rng.uniform(least, most, number), shown)
    if hostile is None:
        return shown
    kind, chance, factor = hostile.kind[family], hostile.chance[family], hostile.factor[family]
    reserved = factor * runs.capacity_mib + np.where(kind == FRACTION, tables["fraction"]["context_mib"], 0.0)
    shown = np.where(np.isin(kind, RESERVING) & ~_is_death(plan), reserved, shown)
    least, most = tables["cut"]["shown"]
    shown = np.where(_is_cut(plan, hostile), shown * rng.uniform(least, most, number), shown)
    is_missed = rng.random(number) < tables["gaps"]["missed_share"]
    least, most = tables["gaps"]["missed_peak"]
    partly = np.where(is_missed, shown * rng.uniform(least, most, number), shown)
    seen = np.where(rng.random(number) < chance, np.nan, partly)
    return np.where(kind == GAPS, seen, shown)


def _is_cut(plan: SitePlan, hostile: Arrays | None) -> Bools:
    """Return True for completed runs of the kind `cut` that their user cancels before they show their need."""
    runs = plan.runs
    if hostile is None:
        return np.zeros(len(runs.job), dtype=bool)
    family = plan.jobs.family[runs.job]
    drawn = np.random.default_rng([plan.shape.seed, 29]).random(len(family))
    cut: Bools = (hostile.kind[family] == CUT) & (runs.state == COMPLETED) & (drawn < hostile.chance[family])
    return cut


def _is_flat(plan: SitePlan, hostile: Arrays | None) -> Bools:
    """Return True if use stays within 1% of the capacity below its peak for most of the run."""
    rng = np.random.default_rng([plan.shape.seed, 19])
    measured, family = hostile_profile()["measured"], plan.jobs.family[plan.runs.job]
    of_family = rng.random(len(plan.families.framework)) < measured["flat_share"]
    of_death = rng.random(len(family)) < measured["flat_death_share"]
    flat: Bools = np.where(_is_death(plan), of_death, of_family[family])
    is_reserving = plan.families.framework[family] >= 0
    if hostile is not None:
        is_reserving |= np.isin(hostile.kind[family], RESERVING)
    return flat | is_reserving


def _kinds(plan: SitePlan, hostile: Arrays | None) -> list[str]:
    """Per run: what its family is, else what its user is."""
    family: Ints = plan.jobs.family[plan.runs.job]
    kind = hostile.kind[family] if hostile else np.full(len(family), PLAIN)
    user = plan.families.user[family]
    named = np.array(KINDS, dtype=object)[kind]
    named = np.where((kind == PLAIN) & plan.families.is_growing[family], "growing", named)
    is_new = plan.users.first_s[user] > plan.shape.start_s
    named = np.where((named == KINDS[PLAIN]) & is_new, NEW_USER, named)
    return [str(name) for name in np.where(plan.families.framework[family] >= 0, PREALLOCATING, named)]


ROUND_DAYS = 20
DIES_AFTER_S = 600
SMALLER, CONSTRAINT, CAPACITY_MIB, MOST_FRAC = "hbm40g", "gpu&hbm40g", 40960.0, 0.985
_SECOND_ID = 10**8


def followed(
    history: pd.DataFrame, truth: pd.DataFrame, config: Config, since_s: int, seed: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """history and truth, where followers asked for the smaller tier from since_s on whenever they were advised to.

    A job that needs more than the smaller tier holds dies there, and is submitted again as it was. Each ROUND_DAYS are
    advised by the record that the rounds before have made. Resubmissions are not advised: their user knows better.
    """
    rng = np.random.default_rng([seed, 23])
    users = sorted(history["user"].unique())
    followers = {user for user in users if rng.random() < hostile_profile()["followers"]["share"]}
    end_s = int(history["submit_s"].max()) + 1
    for begin_s in range(since_s, end_s, ROUND_DAYS * 86_400):
        rows = replay_tiers(history[history["submit_s"] < begin_s + ROUND_DAYS * 86_400].reset_index(drop=True), config)
        is_moved = rows["move"].eq(DOWN) & rows["user"].isin(followers) & rows["submit_s"].ge(begin_s)
        moved = np.flatnonzero(history["submit_s"] < begin_s + ROUND_DAYS * 86_400)[rows["row"][is_moved]]
        moved = moved[history["job_id"].to_numpy()[moved] < _SECOND_ID]
        history, truth = _move(history, truth, moved)
    return history, truth


def _move(history: pd.DataFrame, truth: pd.DataFrame, moved: np.ndarray) -> tuple[pd.DataFrame, pd.DataFrame]:
    is_moved = np.zeros(len(history), dtype=bool)
    is_moved[moved] = True
    # What asked for 80 GB and ran there keeps its record as it was, for those that die on 40 GB and come again.
    is_death = is_moved & (truth["need_mib"] > CAPACITY_MIB).to_numpy()
    again, again_truth = history[is_death].copy(), truth[is_death]
    shown = np.minimum(history["hbm_max_mib"], MOST_FRAC * CAPACITY_MIB)
    reserved = history["hbm_max_mib"] * CAPACITY_MIB / history["hbm_capacity_mib"]
    is_reserving = truth["kind"].isin([KINDS[kind] for kind in RESERVING]).to_numpy()
    elapsed_s = history["elapsed_s"].where(~is_death, np.minimum(history["elapsed_s"], DIES_AFTER_S))
    changed = history.assign(
        tier=history["tier"].where(~is_moved, SMALLER),
        constraints=history["constraints"].where(~is_moved, CONSTRAINT),
        hbm_max_mib=history["hbm_max_mib"].where(~is_moved, np.where(is_reserving, reserved, shown)),
        hbm_capacity_mib=history["hbm_capacity_mib"].where(~is_moved, CAPACITY_MIB),
        state=history["state"].where(~is_death, "FAILED"),
        elapsed_s=elapsed_s,
        end_s=history["end_s"].where(~is_death, history["start_s"] + elapsed_s).astype("int64"),
    )
    shift_s = changed["end_s"][is_death] + 60 - again["submit_s"]
    again = again.assign(**{name: again[name] + shift_s for name in ("submit_s", "start_s", "end_s")})
    again = again.assign(job_id=again["job_id"] + _SECOND_ID, is_array=False)
    truth = truth.assign(is_death=truth["is_death"] | is_death)
    whole = pd.concat([changed, again.astype(changed.dtypes.to_dict())], ignore_index=True)
    whole = whole.assign(**evidence_columns(whole))
    order = np.lexsort((whole["submit_s"], whole["job_id"], whole["end_s"]))
    facts = pd.concat([truth, again_truth], ignore_index=True)
    return whole.iloc[order].reset_index(drop=True), facts.iloc[order].reset_index(drop=True)
