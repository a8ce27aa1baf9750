"""Waits of users who follow the memory advice, compared with the recorded jobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from advisor.memory.backtest import DOWN, NAMED, UP
from almanac.config import Config
from simulator.cluster import Cluster, NodeGroup
from simulator.comparison import make_policy
from simulator.engine import simulate
from simulator.outcomes import job_outcomes
from simulator.scores import Distribution, distribution
from simulator.workload import Workload, make_workload

DIES_AFTER_S = 600
POLICY = "fifo+easy"
_AGAIN = "+"
_MOVES = (DOWN, UP, NAMED)


@dataclass(frozen=True)
class FollowedAdvice:
    """The workload in which some users follow the advice.

    last: number of the run that counts, by number of the recorded job: a job that runs out of memory has two.
    moved: DOWN, UP, or NAMED by recorded job, "" for jobs that stay. is_out_of_memory, is_need_unknown: of moved jobs.
    """

    workload: Workload
    last: npt.NDArray[np.int64]
    moved: npt.NDArray[np.object_]
    is_out_of_memory: npt.NDArray[np.bool_]
    is_need_unknown: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TierWaits:
    """Seconds from submission to the last end without the run itself, of jobs that end in both simulations."""

    group: str
    jobs: int
    recorded_s: Distribution
    followed_s: Distribution


def tier_cluster(nodes: Mapping[str, int], gpus: int) -> Cluster:
    """A cluster with so many nodes of each tier. The tier's name is the feature that jobs ask for."""
    return Cluster(tuple(NodeGroup(count, gpus, features=frozenset({name})) for name, count in nodes.items()))


def ask_for_tiers(workload: Workload, cluster: Cluster) -> Workload:
    """The workload whose constraints are the jobs' tiers; a job without a known tier may run anywhere."""
    known = frozenset[str]().union(*(each.features for each in cluster.node_sets))
    tiers = [name if name in known else "" for name in workload.array("tier")]
    return dataclasses.replace(workload, jobs=workload.jobs.assign(constraint=tiers, partition=""))


def advice_of_jobs(workload: Workload, history: pd.DataFrame, outcomes: pd.DataFrame) -> pd.DataFrame:
    """Return move, advised, need_mib, and usable_mib of each job of the workload.

    outcomes: of replay_tiers on this history.
    """
    advice = outcomes.set_index("row")[["move", "advised", "need_mib", "usable_mib"]]
    started = [(str(job), int(start_s)) for job, start_s in zip(history["job_id"], history["start_s"], strict=True)]
    rows = {key: row for row, key in enumerate(started)}
    keys = zip(workload.array("job_id"), workload.array("start_s").tolist(), strict=True)
    found = advice.reindex([rows.get(key, -1) for key in keys]).reset_index(drop=True)
    return found.assign(move=found["move"].fillna(""), advised=found["advised"].fillna(""))


def follow_advice(workload: Workload, advice: pd.DataFrame, share: float, seed: int) -> FollowedAdvice:
    """Let a random share of the users ask for the advised tier whenever the advice names another one.

    A job that needs more than that tier holds dies after DIES_AFTER_S. It is then submitted again as it was, and keeps
    its place in the queue. A job whose need is unknown runs to its end.
    """
    users = sorted(set(workload.array("user").tolist()))
    number = round(share * len(users))
    followers = set(np.random.default_rng(seed).permutation(np.array(users, dtype=object))[:number].tolist())
    is_moved = (advice["move"].isin(_MOVES) & workload.jobs["user"].isin(followers)).to_numpy()
    is_dead = is_moved & (advice["need_mib"] > advice["usable_mib"]).to_numpy()
    jobs = workload.jobs.assign(job_id=[str(row) for row in range(len(workload))], depends_on="")
    again = jobs[is_dead].assign(job_id=jobs["job_id"] + _AGAIN, depends_on=jobs["job_id"])
    first = jobs.assign(
        constraint=jobs["constraint"].where(~is_moved, advice["advised"]),
        run_s=jobs["run_s"].where(~is_dead, np.minimum(jobs["run_s"], DIES_AFTER_S)),
    )
    followed = make_workload(pd.concat([first, again], ignore_index=True))
    row_of = {job_id: row for row, job_id in enumerate(followed.array("job_id"))}
    return FollowedAdvice(
        workload=followed,
        last=np.array([row_of.get(job_id + _AGAIN, row_of[job_id]) for job_id in jobs["job_id"]]),
        moved=np.where(is_moved, advice["move"], ""),
        is_out_of_memory=is_dead,
        is_need_unknown=is_moved & advice["need_mib"].isna().to_numpy(),
    )


def compare_waits(recorded: Workload, followed: FollowedAdvice, cluster: Cluster, config: Config) -> list[TierWaits]:
    """Simulate both workloads: the waits of all jobs, of each tier that they asked for, and of the moved jobs.

    The wait of a job that runs out of memory counts from its first submission, and includes the lost run.
    """
    policy = make_policy(POLICY, config)
    before = job_outcomes(recorded, simulate(recorded, cluster, policy)).delay_s
    after = job_outcomes(followed.workload, simulate(followed.workload, cluster, policy)).delay_s[followed.last]
    is_known = np.isfinite(before) & np.isfinite(after)
    asked = recorded.array("constraint")
    tiers = {name: asked == name for name in sorted(set(asked.tolist()) - {""})}
    groups = {"all": np.full(len(recorded), True), **tiers, "no tier": asked == "", "moved jobs": followed.moved != ""}
    return [
        TierWaits(name, int(rows.sum()), distribution(before[rows]), distribution(after[rows]))
        for name, rows in ((name, rows & is_known) for name, rows in groups.items())
        if rows.any()
    ]
