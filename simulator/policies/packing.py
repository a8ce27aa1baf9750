"""Two jobs on one GPU: packing policies by name, and the simulated FIFO queue with up to two workers a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain

import numpy as np
import pandas as pd

from advisor.events import JobLoop
from almanac.errors import RequestError
from simulator.outcomes import JobOutcomes, PolicyRun, uninterrupted
from simulator.scores import LEAST_SPEED
from simulator.traces.packing import (
    ArrivalOptions,
    Kind,
    PackingJob,
    PairTable,
    draw_jobs,
    squeeze_pair,
    stealing_speed,
    straggling_speed,
    with_errors,
)

Gpus = frozenset[int]
Placed = Mapping[int, Gpus]
"""A job's number to the numbers of its GPUs."""
Gain = Callable[[int], float | None]
"""Gain from sharing with this job, the more the better; None if the two must not share."""


@dataclass(frozen=True)
class PackingNodes:
    """The nodes of a simulated cluster. node_of: the node of each GPU, by the GPU's number."""

    node_of: tuple[int, ...]

    @staticmethod
    def uniform(gpus: int, gpus_per_node: int) -> PackingNodes:
        """Nodes of equal size; the last one is smaller if the numbers do not divide."""
        return PackingNodes(tuple(gpu // gpus_per_node for gpu in range(gpus)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """GPUs of each node, most first."""
        return tuple(sorted((self.node_of.count(node) for node in set(self.node_of)), reverse=True))

    def fewest(self, count: int) -> int | None:
        """The fewest nodes with this many GPUs; None if the cluster has fewer."""
        reached = 0
        for nodes, size in enumerate(self.sizes, 1):
            reached += size
            if reached >= count:
                return nodes
        return None


def choose_gpus(count: int, placed: Placed, nodes: PackingNodes, gain: Gain) -> Gpus | None:
    """GPUs for a new job: free ones where they suffice, else shared ones of the largest gain; None if none is allowed.

    The topology rule (Gimbal, section 5.1), for a whole placement:
    - a GPU holds at most two workers;
    - a job is on the fewest nodes that could hold it if the cluster were empty;
    - two jobs of one size share all of their GPUs or none;
    - a job shares GPUs with at most one larger job, and then with no other job.
    So the jobs that share GPUs form stars around their largest job: a change in one set never reaches another one.

    Finds a choice whenever the rule and `gain` allow one. A job that shares with several counts the least of its gains.
    """
    needed = nodes.fewest(count) if count > 0 else None
    if needed is None:
        return None
    view = _View(placed, nodes)
    pick = _Pick(count, needed, nodes.node_of)
    if free := pick.best(dict.fromkeys(view.free, 0.0)):
        return free
    best: tuple[float, Gpus] | None = None
    for value, choice in _shared_choices(pick, view, gain):
        if best is None or value > best[0]:
            best = value, choice
    return best[1] if best else None


def _shared_choices(pick: _Pick, view: _View, gain: Gain) -> Iterator[tuple[float, Gpus]]:
    """Choices with their gains: the GPUs of an equal job, of one larger job, and of smaller jobs."""
    free = dict.fromkeys(view.free, float("inf"))
    under: dict[int, float] = {}
    for job, gpus in view.placed.items():
        partners = view.partners[job]
        if (partners and len(gpus) <= pick.count) or not view.is_host(job):
            continue
        value = gain(job)
        if value is None:
            continue
        if len(gpus) == pick.count:
            yield value, gpus
        elif len(gpus) < pick.count:
            under.update(dict.fromkeys(gpus, value))
        else:
            own = {gpu: value for gpu in gpus if len(view.jobs_on[gpu]) == 1}
            if own and (found := pick.best(own) or pick.best({**free, **own})):
                yield value, found
    if under and (found := pick.best({**free, **under})):
        yield min(under.get(gpu, float("inf")) for gpu in found), found


@dataclass(frozen=True)
class _Pick:
    """A choice of `count` GPUs on exactly `nodes` nodes, the fewest possible."""

    count: int
    nodes: int
    node_of: Sequence[int]

    def best(self, values: Mapping[int, float]) -> Gpus | None:
        """GPUs whose least value is the largest, on nodes that have enough of them; None if there are too few.

        On one node: of equal ones, the fullest one, so that free nodes stay whole.
        """
        if len(values) < self.count:
            return None
        by_node: dict[int, list[int]] = {}
        for gpu in sorted(values, key=lambda gpu: (-values[gpu], gpu)):
            by_node.setdefault(self.node_of[gpu], []).append(gpu)
        if self.nodes > 1:
            return self._best_of_several(values, [by_node[node] for node in sorted(by_node)])
        fitting = [(node, gpus) for node, gpus in by_node.items() if len(gpus) >= self.count]
        if not fitting:
            return None
        _, found = min(fitting, key=lambda item: (-values[item[1][self.count - 1]], len(item[1]), item[0]))
        return frozenset(found[: self.count])

    def _best_of_several(self, values: Mapping[int, float], by_node: Sequence[Sequence[int]]) -> Gpus | None:
        """by_node: the GPUs of each node. Lowers the least value until the fullest nodes have enough of them."""
        for least in sorted(set(values.values()), reverse=True):
            good = [[gpu for gpu in gpus if values[gpu] >= least] for gpus in by_node]
            pool = list(chain(*sorted(good, key=len, reverse=True)[: self.nodes]))
            if len(pool) >= self.count:
                return frozenset(sorted(pool, key=lambda gpu: (-values[gpu], gpu))[: self.count])
        return None


class _View:
    """A placement by GPU: jobs_on each GPU, partners of each job, and free GPUs."""

    def __init__(self, placed: Placed, nodes: PackingNodes) -> None:
        self.placed = placed
        self.jobs_on: list[list[int]] = [[] for _ in nodes.node_of]
        for job, gpus in placed.items():
            for gpu in gpus:
                self.jobs_on[gpu].append(job)
        self.free = [gpu for gpu, jobs in enumerate(self.jobs_on) if not jobs]
        self.partners: dict[int, set[int]] = {job: set() for job in placed}
        for jobs in self.jobs_on:
            if len(jobs) == 2:
                self.partners[jobs[0]].add(jobs[1])
                self.partners[jobs[1]].add(jobs[0])

    def is_host(self, job: int) -> bool:
        """True if all jobs that share with this one are smaller, or if none shares."""
        size = len(self.placed[job])
        return all(len(self.placed[other]) < size for other in self.partners[job])


LEAST_SUM = 1.2


@dataclass(frozen=True)
class SharedPair:
    """Two jobs on one GPU. work: done on the shared GPUs, 1 is one job alone. least: the slower worker's speed.

    utilization: of both, summed.
    """

    work: float
    least: float
    utilization: float


Rule = Callable[[SharedPair], float | None]
"""Gain of a pair, the more the better; None if it must not share."""


def never(pair: SharedPair) -> float | None:
    """Never pack."""
    return None


def whatever_fits(pair: SharedPair) -> float | None:
    """Blind packing: the first pair that fits."""
    return 0.0


def by_utilization(most: float) -> Rule:
    """Lucid's idea: pairs whose utilizations sum to at most this, the lowest sum first."""
    return lambda pair: -pair.utilization if pair.utilization <= most else None


def by_speed(pair: SharedPair) -> float | None:
    """Pairs that do at least 1.2 times the work, each at 0.6 of its speed or more; the most work first."""
    return pair.work if pair.work >= LEAST_SUM and pair.least >= LEAST_SPEED else None


@dataclass(frozen=True)
class PackingPolicy:
    """A rule for sharing GPUs. same_user: only with the user's own jobs. unequal: also jobs of unequal size.

    steals, squeezes: speeds by stealing_speed and squeeze_pair.
    """

    about: str
    rule: Rule
    same_user: bool = False
    unequal: bool = True
    steals: bool = False
    squeezes: bool = False

    def worker_speeds(self, table: PairTable, one: Kind, other: Kind) -> tuple[float, float] | None:
        """Speeds of two workers on one GPU; None if they do not fit."""
        free = table.speeds(one, other)
        if free is None or not self.squeezes:
            return free
        if one > other:
            swapped = self.worker_speeds(table, other, one)
            return swapped and (swapped[1], swapped[0])
        used = table.utilization
        return squeeze_pair(free, (used[one[0]], used[other[0]]))

    def job_speed(self, workers: list[float]) -> float:
        """Speed of a job from the speeds of its workers."""
        return stealing_speed(workers) if self.steals else straggling_speed(workers)

    def gain(self, table: PairTable, job: PackingJob, other: PackingJob) -> float | None:
        """Gain of the two by sharing; None if they must not."""
        if (self.same_user and job.user != other.user) or not (self.unequal or job.gpus == other.gpus):
            return None
        speeds = self.worker_speeds(table, job.kind, other.kind)
        if speeds is None:
            return None
        small, large = sorted((job.gpus, other.gpus))
        by_size = sorted(zip((job.gpus, other.gpus), speeds, strict=True), reverse=True)
        spared = [1.0] * (large - small)
        of_large = self.job_speed([by_size[0][1]] * small + spared) * large - len(spared)
        used = table.utilization
        return self.rule(
            SharedPair(
                work=(of_large + by_size[1][1] * small) / small,
                least=min(speeds),
                utilization=used.get(job.kind[0], 1.0) + used.get(other.kind[0], 1.0),
            )
        )


POLICIES: Mapping[str, PackingPolicy] = {
    "none": PackingPolicy("one job a GPU", never),
    "blind": PackingPolicy("the first job that fits", whatever_fits),
    "utilization": PackingPolicy("utilizations sum to at most 100% (Lucid's rule)", by_utilization(1.0), unequal=False),
    "utilization-140": PackingPolicy("at most 140%, tuned to Gavel's V100 pairs", by_utilization(1.4), unequal=False),
    "speed": PackingPolicy("pairs of equal size, chosen by their speeds", by_speed, unequal=False),
    "same-user": PackingPolicy("the same, and only jobs of one user", by_speed, same_user=True, unequal=False),
    "stars": PackingPolicy("chosen by speed, jobs of unequal size too", by_speed),
    "stars-steal": PackingPolicy("the same, with sample stealing", by_speed, steals=True),
    "stars-all": PackingPolicy("the same, with sample stealing and squeezing", by_speed, steals=True, squeezes=True),
}  # fmt: skip


BASE = "none"


def run_packing(
    table: PairTable, names: Sequence[str], options: ArrivalOptions, nodes: PackingNodes, seed: int, error: float = 0.0
) -> tuple[pd.DataFrame, list[PolicyRun]]:
    """Return the jobs of a seed, and their run under each policy of `names`.

    error: sigma of ln(predicted / true speed) of the pairs; the policies know the predictions. The runs' details:
    shared, the share of jobs that ever shared a GPU, and least_speed.
    """
    jobs, believed = draw_jobs(table, options, seed), with_errors(table, error, seed)
    columns = {"submit_s": "submit_s", "run_s": "duration_s", "gpu_count": "gpus", "user": "user"}
    drawn = pd.DataFrame({name: [getattr(job, field) for job in jobs] for name, field in columns.items()})
    runs = []
    for name in names:
        run = PackedJobs(jobs, table, POLICIES[name], nodes, believed)
        found = run.outcomes()
        details = {"shared": float(run.shared.mean()), "least_speed": float(found.speed.min())}
        runs.append(PolicyRun(name, found, len(nodes.node_of), run.busy_gpu_s, details=details))
    return drawn.assign(user=drawn["user"].astype(str), kind=[job.kind[0] for job in jobs]), runs


class PackedJobs(JobLoop):
    """The first job of the queue waits until it can start, alone or packed, and blocks those behind it.

    believed: what the policy knows of the pairs; by default the table, by which they run. Raises RequestError for a job
    that is larger than the cluster. placed: GPUs of the running jobs. shared: jobs that ever shared a GPU.
    """

    def __init__(
        self,
        jobs: Sequence[PackingJob],
        table: PairTable,
        policy: PackingPolicy,
        nodes: PackingNodes,
        believed: PairTable | None = None,
    ) -> None:
        if too_large := next((job for job in jobs if nodes.fewest(job.gpus) is None), None):
            raise RequestError(
                f"a job of {too_large.gpus} GPUs does not fit {len(nodes.node_of)} GPUs", "simulate more GPUs"
            )
        super().__init__([job.submit_s for job in jobs])
        self.jobs, self.table, self.policy, self.nodes, self.believed = jobs, table, policy, nodes, believed or table
        self.queue: deque[int] = deque()
        self.placed: dict[int, Gpus] = {}
        self._is_blocked = False
        self._jobs_on: list[list[int]] = [[] for _ in nodes.node_of]
        self.shared, self.busy_gpu_s = np.zeros(len(jobs), dtype=bool), 0.0
        self._busy_since_s = [0.0] * len(nodes.node_of)

    def submitted(self, job: int) -> None:
        self.queue.append(job)

    def ended(self, job: int) -> None:
        """Its partners speed up."""
        self._is_blocked = False
        gpus = self.placed.pop(job)
        for gpu in gpus:
            self._jobs_on[gpu].remove(job)
            if not self._jobs_on[gpu]:
                self.busy_gpu_s += self.now_s - self._busy_since_s[gpu]
        for other in {other for gpu in gpus for other in self._jobs_on[gpu]}:
            self.change_speed(other, self._speed(other))

    def settle(self) -> None:
        """Start jobs from the head of the queue while they may."""
        while self.queue and not self._is_blocked:
            job = self.jobs[self.queue[0]]
            choice = choose_gpus(job.gpus, self.placed, self.nodes, partial(self._gain, job))
            if choice is None:
                self._is_blocked = True
            else:
                self._place(self.queue.popleft(), choice)

    def _gain(self, job: PackingJob, other: int) -> float | None:
        return self.policy.gain(self.believed, job, self.jobs[other])

    def _place(self, job: int, gpus: Gpus) -> None:
        self.placed[job] = gpus
        others = {other for gpu in gpus for other in self._jobs_on[gpu]}
        for gpu in gpus:
            if not self._jobs_on[gpu]:
                self._busy_since_s[gpu] = self.now_s
            self._jobs_on[gpu].append(job)
        if others:
            self.shared[[job, *others]] = True
        self.start(job, self.jobs[job].duration_s, self._speed(job))
        for other in others:
            self.change_speed(other, self._speed(other))

    def _speed(self, job: int) -> float:
        return self.policy.job_speed([self._worker_speed(job, gpu) for gpu in self.placed[job]])

    def _worker_speed(self, job: int, gpu: int) -> float:
        for other in self._jobs_on[gpu]:
            if other != job:
                speeds = self.policy.worker_speeds(self.table, self.jobs[job].kind, self.jobs[other].kind)
                assert speeds is not None, "a pair that does not fit was placed"
                return speeds[0]
        return 1.0

    def outcomes(self) -> JobOutcomes:
        """Run all jobs, and return their outcomes."""
        self.run()
        return uninterrupted(self.submit_s, self.start_s, self.end_s, [job.duration_s for job in self.jobs])
