"""Score the predicted waits and controls over a record: each job with the waits known at its submission."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from advisor.backtest import MethodComparison, compare_methods
from advisor.duration.features import without_parts
from advisor.waits.record import (
    ALL_SIZES,
    RECENT_DAYS,
    Floats,
    WaitCell,
    WaitCells,
    cells_of,
    coverage,
    pinball_s,
    sooner_s,
    weekly_gain,
)
from almanac.units import DAY_S, counted

OURS, NEWEST_OF_CELL, OF_ALL, NO_WAIT, SHUFFLED = (
    "almanac", "newest 50 waits", "newest 50 of any size", "no wait", "shuffled"
)  # fmt: skip
EVERY = "all"


@dataclass(frozen=True)
class WaitScore:
    """Scores of a group of jobs. spoken: with a prediction. Of these: coverage, width_s (median), and pinball_s (mean)
    of the middle half; NaN without any.
    """

    group: str
    jobs: int
    spoken: int
    coverage: float
    width_s: float
    pinball_s: float


@dataclass(frozen=True)
class GainScore:
    """Gains said at the start of each week. jobs: pairs of that week; did: the share that started as much sooner."""

    said: int
    jobs: int
    did: float


@dataclass(frozen=True)
class WaitReplay:
    """The result of a back-test of expected waits.

    groups: scores, all jobs together first. comparison: pinball losses of the predictions that were stated, by method.
    """

    groups: tuple[WaitScore, ...]
    gains: GainScore
    comparison: MethodComparison


@dataclass(frozen=True)
class _Outcomes:
    """quartiles_s: predicted, NaN where there is none. newest_s, of_all_s: of the newest waits, in any state."""

    submit_s: Floats
    wait_s: Floats
    quartiles_s: Floats
    newest_s: Floats
    of_all_s: Floats

    @property
    def is_spoken(self) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = np.isfinite(self.quartiles_s[:, 0])
        return found

    def score(self, group: str) -> WaitScore:
        wait_s, quartiles_s = self.wait_s[self.is_spoken], self.quartiles_s[self.is_spoken]
        if not len(wait_s):
            return WaitScore(group, len(self.wait_s), 0, math.nan, math.nan, math.nan)
        width_s = float(np.median(quartiles_s[:, 2] - quartiles_s[:, 0]))
        loss_s = float(pinball_s(wait_s, quartiles_s).mean())
        return WaitScore(group, len(self.wait_s), len(wait_s), coverage(wait_s, quartiles_s), width_s, loss_s)


def replay_waits(history: pd.DataFrame, names: pd.Series[str], since: float = 0.0) -> WaitReplay:
    """Score the jobs submitted after a share `since` of the record. history: also running jobs. names: of the cells."""
    known = without_parts(history)
    cells = cells_of(known, names.loc[known.index])
    since_s = float(np.quantile(known["submit_s"], since)) if len(known) else 0.0
    found = {
        ", ".join(filter(None, (name, counted(int(size), "GPU")))): _replay(cells, name, size, since_s)
        for name, size in cells
        if size != ALL_SIZES
    }
    every = _joined(list(found.values()))
    spoken = _Outcomes(*(each[every.is_spoken] for each in vars(every).values()))
    shuffled = np.random.default_rng(1).permutation(spoken.quartiles_s)
    losses = {
        OURS: spoken.quartiles_s, NEWEST_OF_CELL: spoken.newest_s, OF_ALL: spoken.of_all_s,
        NO_WAIT: np.zeros_like(spoken.quartiles_s), SHUFFLED: shuffled,
    }  # fmt: skip
    comparison = compare_methods(
        "pinball loss, s", OURS, {name: pinball_s(spoken.wait_s, each) for name, each in losses.items()},
        spoken.submit_s, (NO_WAIT, SHUFFLED), is_cost=True,
    )  # fmt: skip
    groups = (every.score(EVERY), *(outcome.score(name) for name, outcome in found.items()))
    return WaitReplay(groups, _gains(cells, since_s), comparison)


def _replay(cells: WaitCells, name: str, size: str, since_s: float) -> _Outcomes:
    cell = cells[name, size]
    order = np.argsort(cell.submit_s, kind="stable")
    order = order[cell.submit_s[order] >= since_s]
    submit_s = cell.submit_s[order]
    return _Outcomes(
        submit_s, cell.wait_s[order], cell.predicted(submit_s), cell.quartiles_at(submit_s),
        cells[name, ALL_SIZES].quartiles_at(submit_s),
    )  # fmt: skip


def _joined(parts: Sequence[_Outcomes]) -> _Outcomes:
    empty = _Outcomes(np.empty(0), np.empty(0), *(np.empty((0, 3)) for _ in range(3)))
    return _Outcomes(*map(np.concatenate, zip(*(vars(each).values() for each in (empty, *parts)), strict=True)))


def _gains(cells: WaitCells, since_s: float) -> GainScore:
    """Between all cells, also those of one name: a record without tiers has sizes to compare."""
    last_s = max((float(cell.submit_s.max()) for cell in cells.values()), default=since_s)
    said, found = 0, [np.empty(0, dtype=bool)]
    for week_s in np.arange(since_s, last_s, 7 * DAY_S).tolist():
        past = {key: cell.between(week_s - RECENT_DAYS * DAY_S, week_s) for key, cell in cells.items()}
        known = {key: cell.between(0.0, week_s) for key, cell in cells.items() if key[1] != ALL_SIZES}
        speaking = [key for key, cell in known.items() if cell.speaks(week_s)]
        for asked, advised in itertools.permutations(speaking, 2):
            if gain := weekly_gain(past[asked], past[advised], week_s):
                said += 1
                coming = [_submitted(cells[key], week_s, week_s + 7 * DAY_S) for key in (asked, advised)]
                found.append(sooner_s(*coming)[1] >= gain[1])
    did = np.concatenate(found)
    return GainScore(said, len(did), float(did.mean()) if len(did) else math.nan)


def _submitted(cell: WaitCell, since_s: float, until_s: float) -> WaitCell:
    is_in = (cell.submit_s >= since_s) & (cell.submit_s < until_s)
    return WaitCell(cell.submit_s[is_in], cell.start_s[is_in])
