"""HadarE's forked copies, for comparison: a job runs on several nodes at once (papers/hadar-heterogeneity, section V).

Each job has a copy on each node. A round gives each node at most one copy of a job; the copies divide the steps that
are left by their speed, and their parameters are averaged afterwards. The simulation counts the steps of all copies as
progress, as the paper does. In training this does not hold: averaged copies learned less than the fastest node alone
(design: gpu-types). The lower bounds assume that a job is in one place at a time; HadarE's figures can be below them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from advisor.decisions.placement import Floats, Ints
from simulator.placement.hadar import HadarPrices, prices_of
from simulator.placement.rounds import RoundAllocation, RoundView


def step_shares(steps: int, rates: Floats) -> Ints:
    """(copies,) whole steps of each copy, summing to `steps`: in proportion to the rates, by largest remainder.

    Of equal remainders the first copy gets the step. Raises ValueError without a positive rate.
    """
    total = float(rates.sum())
    if not total > 0 or not (rates >= 0).all():
        raise ValueError("at least one copy needs a positive rate, and none a negative one")
    exact = steps * (rates / total)
    shares: Ints = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - shares), kind="stable")
    shares[order[: steps - int(shares.sum())]] += 1
    return shares


@dataclass(frozen=True)
class Node:
    """kind: the type's column."""

    kind: int
    gpus: int


def nodes_of(capacity: Ints, gpus_per_node: int) -> list[Node]:
    """Full nodes of each type, and one smaller node for the rest."""
    found = []
    for kind, gpus in enumerate(capacity.tolist()):
        found += [Node(kind, gpus_per_node)] * (gpus // gpus_per_node)
        found += [Node(kind, gpus % gpus_per_node)] if gpus % gpus_per_node else []
    return found


@dataclass(frozen=True)
class HadarForked:
    """The policy. A copy of a gang larger than a node takes the whole node, at the proportional part of its speed."""

    gpus_per_node: int = 4
    round_s: float = 360.0

    def place(self, view: RoundView) -> RoundAllocation:
        """Copies in the order of what they add to the payoff, until every node is full or has a copy of every job."""
        nodes = nodes_of(view.capacity, self.gpus_per_node)
        copies = place_copies(view, nodes, prices_of(view, self.round_s))
        kinds = np.array([node.kind for node in nodes])
        used = np.zeros(view.rates.shape, dtype=np.int64)
        np.add.at(used.T, kinds, copies.T)
        speeds = view.rates[:, kinds] * copies / view.gpus[:, None]
        return RoundAllocation(used, np.array([_rate(*each) for each in zip(view.left.tolist(), speeds, strict=True)]))


def _rate(left: float, speeds: Floats) -> float:
    """Steps/s until the last copy has done its share."""
    running = speeds[speeds > 0]
    if not len(running):
        return 0.0
    shares = step_shares(int(np.ceil(left)), running)
    return float(shares.sum() / (shares / running).max())


def place_copies(view: RoundView, nodes: list[Node], prices: HadarPrices) -> Ints:
    """(rows, nodes) GPUs of each copy; at most one copy of a job on a node."""
    kinds, free = np.array([node.kind for node in nodes]), np.array([node.gpus for node in nodes])
    needed = np.minimum(view.gpus[:, None], free[None, :])
    speed = view.rates[:, kinds] * needed / view.gpus[:, None]
    best_s = (view.done + view.left) / view.rates.max(axis=1)
    copies: Ints = np.zeros(needed.shape, dtype=np.int64)
    total = np.zeros(len(view.gpus))
    while True:
        fits = (needed <= free[None, :]) & (copies == 0) & (speed > 0)
        if not fits.any():
            return copies
        used = np.bincount(kinds, weights=copies.sum(axis=0), minlength=len(view.capacity)).astype(int)
        price = np.array(prices.of(tuple(used.tolist())))[kinds]
        gain = _utility(view, best_s, total[:, None] + speed) - _utility(view, best_s, total[:, None])
        row, node = divmod(int(np.where(fits, gain - needed * price[None, :], -np.inf).argmax()), len(nodes))
        copies[row, node] = needed[row, node]
        free[node] -= needed[row, node]
        total[row] += speed[row, node]


def _utility(view: RoundView, best_s: Floats, rate: Floats) -> Floats:
    """(rows, ...) best run time over completion time; 0 at a rate of 0."""
    with np.errstate(divide="ignore"):
        found: Floats = best_s[:, None] / np.maximum(view.since_s[:, None] + view.left[:, None] / rate, 1e-9)
    return found
