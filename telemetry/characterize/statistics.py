"""Bands, quantiles and histograms that the tables share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

QUANTILES = {"p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}


@dataclass(frozen=True)
class Bands:
    """Half-open bands [edge, next edge) of a value; what lies below the first edge counts to the first band.

    `first` and `last` name the columns of a band's edges. top: upper edge of the last band, which is then closed;
    None: it is open, and its upper edge null.
    """

    first: str
    last: str
    edges: tuple[float, ...]
    top: float | None = None

    def place(self, values: pd.Series) -> pd.Series:
        """Number of each value's band, 0 the lowest. Values must be known."""
        codes = np.searchsorted(self.edges, values.to_numpy("float64"), side="right") - 1
        return pd.Series(np.maximum(codes, 0), index=values.index)

    def frame(self, codes: Sequence[int] | pd.Series | None = None) -> pd.DataFrame:
        """The edges of these bands, of all where none are given."""
        numbers = range(len(self.edges)) if codes is None else codes
        upper = [*self.edges[1:], math.nan if self.top is None else self.top]
        return pd.DataFrame({self.first: [self.edges[n] for n in numbers], self.last: [upper[n] for n in numbers]})


def steps(count: int) -> tuple[float, ...]:
    """Lower edges of `count` equal bands of 0..1."""
    return tuple(number / count for number in range(count))


def quantile_names(value: str) -> list[str]:
    """The columns that `spread` makes of a value."""
    return [f"mean_{value}", *(f"{name}_{value}" for name in QUANTILES)]


def spread(jobs: pd.DataFrame, keys: list[str], value: str) -> pd.DataFrame:
    """Per group of keys: jobs, mean and quantiles (linear between order statistics). Only groups that have jobs."""
    groups = jobs.groupby(keys, dropna=False)[value]
    found = pd.DataFrame({"jobs": groups.size(), f"mean_{value}": groups.mean()})
    for name, share in QUANTILES.items():
        found[f"{name}_{value}"] = groups.quantile(share)
    return found.reset_index()


def histogram(jobs: pd.DataFrame, keys: list[str], value: str, bands: Bands) -> pd.DataFrame:
    """Per group of keys every band, those without jobs too: jobs, share of the group, cumulative share."""
    frames = []
    for _, group in jobs.groupby(keys, dropna=False):
        counts = np.bincount(bands.place(group[value]), minlength=len(bands.edges))
        shares = pd.DataFrame({"jobs": counts, "share": counts / len(group)})
        shares["cumulative_share"] = np.cumsum(counts) / len(group)
        same = group[keys].iloc[[0] * len(bands.edges)].reset_index(drop=True)
        frames.append(pd.concat([same, bands.frame(), shares], axis=1))
    return pd.concat(frames, ignore_index=True)


def share_of(jobs: pd.DataFrame, keys: list[str], **conditions: pd.Series) -> pd.DataFrame:
    """Per group of keys: jobs, and for each condition (a flag per job) the share of jobs that meet it."""
    flags = jobs[keys].assign(**conditions)
    groups = flags.groupby(keys, dropna=False)
    return groups.agg(
        jobs=(next(iter(conditions)), "size"), **{name: (name, "mean") for name in conditions}
    ).reset_index()
