"""Whether the jobs of a site report asked for the memory tiers that almanac had advised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from almanac.config import Config
from reports.advice_outcomes import ANOTHER_TIER, FOLLOWED, load_told
from telemetry.store.cluster_store import ClusterStore

MORE_MEMORY, LESS_MEMORY = "asked for more memory", "asked for less memory"
_SUMS = """
SELECT outcome, asked_tier, told_tier, count(*), coalesce(sum(gpus * ran_s / 3600.0), 0)
FROM told WHERE outcome IS NOT NULL GROUP BY ALL
"""


@dataclass(frozen=True)
class AdviceOutcome:
    """Jobs that were advised a tier. hours: their GPU-hours, of ended jobs."""

    name: str
    jobs: int
    hours: float


@dataclass(frozen=True)
class AdviceUse:
    """outcomes: most jobs first; none if no job was advised a tier.

    smaller_hours: GPU-hours of jobs that followed advice to use a tier below the largest.
    """

    outcomes: tuple[AdviceOutcome, ...] = ()
    smaller_hours: float = 0.0

    @property
    def jobs(self) -> int:
        return sum(each.jobs for each in self.outcomes)

    def of(self, name: str) -> AdviceOutcome:
        return next((each for each in self.outcomes if each.name == name), AdviceOutcome(name, 0, 0.0))


def load_advice_use(store: ClusterStore, config: Config, since_s: int, until_s: int) -> AdviceUse:
    """Of the GPU jobs submitted in [since_s, until_s), as the metric almanac_advice_jobs counts. Raises StoreError."""
    if not store.files("advice", until_s=until_s):
        return AdviceUse()
    with store.connect() as db:
        load_told(db, store, since_s, until_s)
        rows = db.execute(_SUMS).fetchall()
    capacity = {tier.name: tier.capacity_mib for tier in config.tiers}
    largest_mib = max(capacity.values(), default=0)
    jobs: dict[str, int] = {}
    hours: dict[str, float] = {}
    smaller_hours = 0.0
    for outcome, asked, told, number, amount in rows:
        name = _named(outcome, asked, told, capacity)
        jobs[name] = jobs.get(name, 0) + number
        hours[name] = hours.get(name, 0.0) + amount
        if name == FOLLOWED and capacity.get(told, largest_mib) < largest_mib:
            smaller_hours += amount
    found = sorted(jobs, key=lambda name: (-jobs[name], name))
    return AdviceUse(tuple(AdviceOutcome(name, jobs[name], hours[name]) for name in found), smaller_hours)


def _named(outcome: str, asked: str | None, told: str, capacity: Mapping[str, int]) -> str:
    """The outcome, and for another tier whether it has more or less memory; tiers can leave the configuration."""
    asked_mib, told_mib = capacity.get(asked or ""), capacity.get(told)
    if outcome != ANOTHER_TIER or asked_mib is None or told_mib is None or asked_mib == told_mib:
        return outcome
    return MORE_MEMORY if asked_mib > told_mib else LESS_MEMORY
