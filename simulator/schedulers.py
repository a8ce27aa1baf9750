"""The scheduler of a policy."""

from __future__ import annotations

from almanac.errors import RequestError
from simulator.backfill import Conservative, Easy
from simulator.scheduling import OneQueue, Skip, Strict
from simulator.simulation import Scheduler, Simulation


def make_scheduler(simulation: Simulation) -> Scheduler:
    kind = simulation.policy.backfill
    if simulation.policy.slices and kind not in ("none", "skip"):
        raise RequestError(f"{kind} backfill does not know slices of GPUs", "use backfill none or skip")
    if simulation.policy.is_preemptive and kind != "none":
        raise RequestError(f"{kind} backfill does not preempt jobs", "use backfill none")
    if kind == "none" and simulation.is_plain and len(simulation.requests.queues) == 1:
        return OneQueue(simulation)
    kinds: dict[str, type[Strict] | type[Skip] | type[Easy]] = {
        "none": Strict,
        "skip": Skip,
        "easy": Easy,
        "conservative": Conservative,
    }
    return kinds[kind](simulation)
