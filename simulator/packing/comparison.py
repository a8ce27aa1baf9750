"""Policies of packing on the same jobs, for several seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from advisor.decisions.packing_sets import PackingNodes
from simulator.packing.engine import PackingRecord, simulate_packing
from simulator.packing.pairs import PairTable, with_errors
from simulator.packing.policies import LEAST_EACH, POLICIES
from simulator.packing.workload import ArrivalOptions, draw_jobs

BASE = "none"


@dataclass(frozen=True)
class PackingScore:
    """One policy over all seeds. Mean JCTs and waits are means over jobs, then over seeds.

    ratios: mean JCT over that without packing, of each seed. slow: share of jobs below 0.6 of their own speed, the
    largest of the seeds. shared: share of jobs that ever shared a GPU.
    """

    policy: str
    mean_jct_s: float
    p95_jct_s: float
    mean_wait_s: float
    ratios: tuple[float, ...]
    slow: float
    least_speed: float
    shared: float

    @property
    def ratio(self) -> float:
        """Mean of the ratios."""
        return float(np.mean(self.ratios))

    @property
    def spread(self) -> float:
        """Standard deviation of the ratios; 0 for one seed."""
        return float(np.std(self.ratios, ddof=1)) if len(self.ratios) > 1 else 0.0


def compare_packing(
    table: PairTable,
    names: Sequence[str],
    options: ArrivalOptions,
    nodes: PackingNodes,
    seeds: Sequence[int],
    error: float = 0.0,
    advance: Callable[[float, str], None] = lambda share, policy: None,
) -> list[PackingScore]:
    """Scores of POLICIES in the order of the names; every policy runs the same jobs.

    error: sigma of ln(predicted / true speed) of the pairs; the policies know the predictions.
    """
    wanted = list(dict.fromkeys([BASE, *names]))
    records: dict[str, list[PackingRecord]] = {name: [] for name in wanted}
    for place, seed in enumerate(seeds):
        jobs, believed = draw_jobs(table, options, seed), with_errors(table, error, seed)
        for number, name in enumerate(wanted):
            advance((place + number / len(wanted)) / len(seeds), name)
            records[name].append(simulate_packing(jobs, table, POLICIES[name], nodes, believed=believed))
    base = [float(record.jct_s.mean()) for record in records[BASE]]
    return [_score(name, records[name], base) for name in dict.fromkeys(names)]


def _score(name: str, records: Sequence[PackingRecord], base_s: Sequence[float]) -> PackingScore:
    jct_s = [float(record.jct_s.mean()) for record in records]
    return PackingScore(
        policy=name,
        mean_jct_s=float(np.mean(jct_s)),
        p95_jct_s=float(np.mean([np.quantile(record.jct_s, 0.95) for record in records])),
        mean_wait_s=float(np.mean([(record.start_s - record.submit_s).mean() for record in records])),
        ratios=tuple(ours / theirs for ours, theirs in zip(jct_s, base_s, strict=True)),
        slow=max(float((record.speed < LEAST_EACH - 1e-9).mean()) for record in records),
        least_speed=min(float(record.speed.min()) for record in records),
        shared=float(np.mean([record.shared.mean() for record in records])),
    )
