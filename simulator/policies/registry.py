"""Policies by name, as `almanac simulate --policy` takes them; sites add theirs by an entry point."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, get_args

import numpy as np

from almanac.config import Config
from almanac.errors import RequestError
from almanac.trusted_file import load_trusted
from simulator.cluster import Cluster
from simulator.policies.base import Backfill, Policy, Ranking
from simulator.policies.multifactor import Multifactor, Weights
from simulator.policies.ordered import FewestGpus, Fifo, ShortestService, Sjf, Srtf
from simulator.policies.predicted import AgedQssf, DebugLaneQssf, Predicted, Qssf, RelievedQssf, ShuffledQssf
from simulator.workload import Workload

GROUP = "almanac.policies"
"""Entry points of this group are callables (Config, **options) -> Policy; options are numbers."""
ESTIMATES = ("requested", "true", "predicted")

_DIVISORS = ("factor", "max_age_s", "tau_hours")
"""Options that cannot be 0. No option can be negative."""
_Maker = Callable[..., Policy]


def _multifactor(
    config: Config, age: float = 1000.0, fair_share: float = 1000.0, size: float = 0.0, max_age_s: float = 7 * 86_400.0
) -> Policy:
    return Multifactor(Weights(age=age, fair_share=fair_share, size=size, max_age_s=max_age_s))


def _aged(config: Config, tau_hours: float | None = None, exponent: float | None = None) -> Policy:
    hours = config.priority.tau_hours if tau_hours is None else tau_hours
    aged = dataclasses.replace(config, priority=dataclasses.replace(config.priority, tau_hours=hours))
    return AgedQssf(aged, exponent)


_MAKERS: Mapping[str, _Maker] = {
    "fifo": lambda config: Fifo(),
    "sjf": lambda config: Sjf(),
    "srtf": lambda config, restart_s=0: Srtf(int(restart_s)),
    "ssf": lambda config: ShortestService(),
    "gpu-count": lambda config: FewestGpus(),
    "qssf": Qssf,
    "qssf-aged": _aged,
    "qssf-relief": lambda config, share=0.05, factor=math.e: RelievedQssf(config, share, factor),
    "qssf-debug": DebugLaneQssf,
    "qssf-shuffled": lambda config, seed=0, exponent=1.0: ShuffledQssf(config, int(seed), exponent),
    "multifactor": _multifactor,
}


def policy_names() -> list[str]:
    """Names without options and backfill, a site's own last."""
    return [*_MAKERS, *sorted(_own())]


def _own() -> dict[str, Any]:
    return {each.name: each for each in entry_points(group=GROUP) if each.name not in _MAKERS}


def make_policy(text: str, config: Config) -> Policy:
    """A policy of NAME[:option=number ...][+BACKFILL[:ESTIMATE]], such as sjf, qssf:exponent=1, or fifo+easy:true.

    BACKFILL: none, skip, easy, or conservative. ESTIMATE: the run times that it plans with: requested, true, or
    predicted. Raises RequestError for anything else.
    """
    order, plus, backfill = text.partition("+")
    name, *options = order.strip().split(":")
    policy = _made(name, _numbers(text, options), config)
    if plus:
        kind, _, estimate = backfill.partition(":")
        policy = _with_backfill(text, policy, kind, estimate or "requested", config)
    policy.label = text
    return policy


def _made(name: str, options: dict[str, float], config: Config) -> Policy:
    maker = _MAKERS.get(name)
    if maker is None and name in (own := _own()):
        maker = load_trusted(own[name])
    if maker is None:
        raise RequestError(f"there is no policy {name!r}", f"use one of {', '.join(policy_names())}")
    try:
        made: Policy = maker(config, **options)
    except TypeError as error:
        raise RequestError(f"policy {name}: {error}", "see docs/simulator.md for its options") from error
    return made


def _numbers(text: str, options: list[str]) -> dict[str, float]:
    numbers = {}
    for option in options:
        key, _, value = option.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise RequestError(f"policy {text}: {option!r} is no option", "write options as name=number") from None
        least = 1e-6 if key.strip() in _DIVISORS else 0.0
        if not least <= number <= 1e12:
            raise RequestError(f"policy {text}: {option!r} is out of range", f"use {least:g} to 1e12")
        numbers[key.strip()] = number
    return numbers


def _with_backfill(text: str, policy: Policy, kind: str, estimate: str, config: Config) -> Policy:
    if kind not in get_args(Backfill):
        raise RequestError(f"policy {text}: there is no backfill {kind!r}", f"use {', '.join(get_args(Backfill))}")
    if estimate not in ESTIMATES:
        raise RequestError(f"policy {text}: there is no estimate {estimate!r}", f"use {', '.join(ESTIMATES)}")
    if estimate == "predicted" and not isinstance(policy, Predicted):
        policy = PredictedRunTimes(config, policy)
    policy.backfill = kind  # type: ignore[assignment]
    policy.estimate = estimate  # type: ignore[assignment]
    return policy


class PredictedRunTimes(Predicted):
    """Another policy's fixed order, with predicted run times for the backfill."""

    def __init__(self, config: Config, order: Policy) -> None:
        super().__init__(config)
        self._order = order

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking | None:
        ranking = self._order.rank(workload, cluster)
        if ranking is None:
            raise RequestError(
                "this policy's order changes with time", "plan its backfill with requested or true run times"
            )
        self._keys = np.asarray(ranking.keys).tolist()
        return super().rank(workload, cluster)

    def key(self, job: int, prediction: object, now_s: int) -> float:
        return float(self._keys[job])
