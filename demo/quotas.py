"""Sharing out traits so that job-weighted shares come out as published although whole families carry them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from demo.shape import Bools, Floats, Ints


def fill(counts: Ints, order: Ints, wanted: float) -> Bools:
    """Families taken in `order` until they hold about `wanted` jobs; one that would pass it by far is skipped.

    counts: jobs per family. Returns a mask over families.
    """
    taken = np.zeros(len(counts), dtype=bool)
    missing = float(wanted)
    for family in order:
        size = counts[family]
        if size and size <= missing * 1.02 + 0.5:
            taken[family] = True
            missing -= size
    return taken


def deal(counts: Ints, shares: Sequence[float], already: Floats | None = None, allowed: Bools | None = None) -> Ints:
    """A category for each family, largest families first, each to the category that lacks most jobs.

    shares: of the jobs, per category. already: jobs per category that are dealt before. allowed: (families,
    categories). A family without any allowed category gets category 0.
    """
    held = np.zeros(len(shares)) if already is None else already.astype(float)
    weights = np.asarray(shares, dtype=float)
    lacking = weights / weights.sum() * (counts.sum() + held.sum()) - held
    category = np.zeros(len(counts), dtype=np.int64)
    for family in np.argsort(-counts, kind="stable"):
        choice = lacking if allowed is None else np.where(allowed[family], lacking, -np.inf)
        category[family] = int(np.argmax(choice))
        lacking[category[family]] -= counts[family]
    return category


def pack(counts: Ints, score: Floats) -> tuple[Floats, Floats]:
    """Families side by side on [0, 1] in order of `score`, each as wide as its share of the jobs: (low, width)."""
    order = np.argsort(score, kind="stable")
    width = counts / max(1, counts.sum())
    low = np.empty(len(counts))
    low[order] = np.cumsum(width[order]) - width[order]
    return low, width


def rank_within(group: Ints) -> tuple[Ints, Ints]:
    """Each element's position among those of its group, in order, and the size of its group."""
    order = np.argsort(group, kind="stable")
    sizes = np.bincount(group)
    starts = np.cumsum(sizes) - sizes
    rank = np.empty(len(group), dtype=np.int64)
    rank[order] = np.arange(len(group)) - starts[group[order]]
    return rank, sizes[group]


def reflect(share: Floats) -> Floats:
    """Shares that left [0, 1] by less than 1, folded back: a uniform sample stays uniform."""
    folded = np.abs(share)
    return np.where(folded > 1, 2 - folded, folded)
