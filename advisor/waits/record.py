"""Waits of recent jobs by tier or GPU type and number of GPUs: the one prediction that is told. Pure.

A cell is a memory tier, or a GPU type, and a number of GPUs. A job's wait is predicted to be in the middle half of the
NEWEST waits, known at its submission, of jobs of its cell that were submitted in the same state: while an earlier job
of the cell still waited, or while none did. Such a prediction is given only if those of the last weeks held.

On all records that we have, this is better than no state, and a simulation of the queue with predicted run times was
worse (docs/predictors.md). That one chooses GPU types (advisor.types.queue_forward): by these waits, all would herd.
Jobs that gave up waiting, and those that still wait, are not in the record: very long waits are missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pandas as pd

from advisor.duration.features import known_at, without_parts
from almanac.records import WAIT_DIFFERENCE_FRAC, WAIT_DIFFERENCE_S, WaitGain
from almanac.units import DAY_S, HOUR_S, size_class

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
RECENT_DAYS = 28
"""Predictions that are older are not judged: sites change."""
HISTORY_DAYS = 2 * RECENT_DAYS
"""Waits that are older are not used: before the oldest judged prediction lie NEWEST waits."""
NEWEST = 50
"""Waits whose quartiles count. Of 20, 50, and 100, on the first two thirds of each, 100 was best on Mason and 20 on
Helios."""
QUARTILES = (0.25, 0.5, 0.75)
MIN_SCORED = 40
"""Judged predictions needed before one is given: then a coverage of a half has a standard error of 8 points."""
MOST_SCORED = 1000
"""Newest predictions that are judged."""
LEAST_COVERAGE = 0.4
"""Share of these within the middle half: at least a half less 10 points, about one standard error. More is no fault: a
cell whose jobs start at once has the interval 0 to 0."""
SECOND_S = 1.0
"""Waits that differ by less are equal: Slurm's times are whole seconds."""
PAIR_S = 6 * HOUR_S
"""Jobs of two cells are compared if they were submitted within this time: queues change from morning to evening."""
MIN_PAIRS = 20
MIN_WEEKS = 2
"""Weeks; in each, half of the jobs gained as much. Queues change from week to week by more than a sample of one
week can tell: bounds from the newest pairs alone held for 37% to 54% of the jobs of the next week."""
ALL_SIZES = "any"


@dataclass(frozen=True)
class WaitCell:
    """Submissions and starts of a cell's jobs, s since 1970, in the order of the starts."""

    submit_s: Floats
    start_s: Floats

    @property
    def wait_s(self) -> Floats:
        waits_s: Floats = np.maximum(self.start_s - self.submit_s, 0.0)
        return waits_s

    def quartiles_at(self, times_s: Floats) -> Floats:
        """(times, 3) quartiles of the newest waits that were known at each time; NaN where fewer are."""
        known = np.searchsorted(self.start_s, times_s, side="right")
        found = np.full((len(times_s), len(QUARTILES)), np.nan)
        is_known = known >= NEWEST
        if is_known.any():
            newest = self.wait_s[known[is_known][:, None] - NEWEST + np.arange(NEWEST)]
            found[is_known] = np.quantile(newest, QUARTILES, axis=1).T
        return found

    def some_wait_at(self, times_s: Floats) -> Bools:
        """Return True for times at which a job of the record, submitted before, had not started yet."""
        if not len(self.start_s):
            return np.zeros(len(times_s), dtype=bool)
        order = np.argsort(self.submit_s, kind="stable")
        latest_s = np.maximum.accumulate(self.start_s[order])
        before = np.searchsorted(self.submit_s[order], times_s)
        found: Bools = (before > 0) & (latest_s[np.maximum(before, 1) - 1] > times_s)
        return found

    def predicted(self, times_s: Floats, some_wait: Bools | None = None, step_s: float = DAY_S) -> Floats:
        """(times, 3) quartiles for submissions; NaN where too few waits are known, or predictions did not hold lately.

        some_wait: whether earlier jobs wait at each time; None: as the record has it. step_s: predictions are judged
        at multiples of it.
        """
        found = np.full((len(times_s), len(QUARTILES)), np.nan)
        states, asked = self.some_wait_at(self.submit_s), some_wait
        asked = self.some_wait_at(times_s) if asked is None else asked
        for state in (False, True):
            rows, own = np.flatnonzero(asked == state), states == state
            part = WaitCell(self.submit_s[own], self.start_s[own])
            said, judged = part.quartiles_at(times_s[rows]), part.quartiles_at(part.submit_s)
            judged_s = times_s[rows] // step_s * step_s
            for at_s in np.unique(judged_s):
                first, last = np.searchsorted(part.start_s, (at_s - RECENT_DAYS * DAY_S, at_s))
                newest = slice(max(first, last - MOST_SCORED), last)
                if not held_well(part.wait_s[newest], judged[newest]):
                    said[judged_s == at_s] = np.nan
            found[rows] = said
        return found

    def predicted_now(self, now_s: float, some_wait: bool) -> tuple[float, float, float] | None:
        """The quartiles of a submission now; None without a prediction."""
        [[low_s, median_s, high_s]] = self.predicted(np.array([now_s]), np.array([some_wait]), SECOND_S).tolist()
        return None if math.isnan(median_s) else (low_s, median_s, high_s)

    def speaks(self, now_s: float) -> bool:
        """Return True if a wait is predicted in one of the two states."""
        return any(self.predicted_now(now_s, some_wait) for some_wait in (False, True))

    def between(self, since_s: float, until_s: float) -> WaitCell:
        """The jobs that started in [since_s, until_s)."""
        first, last = np.searchsorted(self.start_s, (since_s, until_s))
        return WaitCell(self.submit_s[first:last], self.start_s[first:last])


def coverage(wait_s: Floats, quartiles_s: Floats) -> float:
    """Share of the waits within the middle half; NaN without any."""
    if not len(wait_s):
        return math.nan
    is_above, is_below = wait_s >= quartiles_s[:, 0] - SECOND_S, wait_s <= quartiles_s[:, 2] + SECOND_S
    return float(np.mean(is_above & is_below))


def pinball_s(wait_s: Floats, quartiles_s: Floats) -> Floats:
    """Return (jobs,) mean pinball loss over the quartiles, seconds."""
    over = wait_s[:, None] - quartiles_s
    loss: Floats = np.maximum(np.array(QUARTILES) * over, (np.array(QUARTILES) - 1) * over).mean(axis=1)
    return loss


def held_well(wait_s: Floats, quartiles_s: Floats) -> bool:
    """Return True if there are enough predictions, and enough of them held. NaN is no prediction."""
    is_known = ~np.isnan(quartiles_s[:, 0])
    return bool(is_known.sum() >= MIN_SCORED and coverage(wait_s[is_known], quartiles_s[is_known]) >= LEAST_COVERAGE)


def sooner_s(asked: WaitCell, advised: WaitCell) -> tuple[Floats, Floats]:
    """(submissions, s) by which jobs of one cell would have started sooner in the other, negative if later.

    Each job is compared with the other cell's job that was submitted nearest in time, if that is near enough.
    """
    order = np.argsort(advised.submit_s, kind="stable")
    times_s, waits_s = advised.submit_s[order], advised.wait_s[order]
    if not len(times_s):
        return np.empty(0), np.empty(0)
    after = np.minimum(np.searchsorted(times_s, asked.submit_s), len(times_s) - 1)
    before = np.maximum(after - 1, 0)
    is_after = np.abs(times_s[after] - asked.submit_s) < np.abs(times_s[before] - asked.submit_s)
    near = np.where(is_after, after, before)
    is_near = np.abs(times_s[near] - asked.submit_s) <= PAIR_S
    return asked.submit_s[is_near], asked.wait_s[is_near] - waits_s[near[is_near]]


def weekly_gain(asked: WaitCell, advised: WaitCell, now_s: float) -> tuple[int, float] | None:
    """(pairs, s): how much sooner at least half of the jobs of one cell would have started in another, in each week.

    None if there are fewer than MIN_WEEKS weeks with MIN_PAIRS pairs, the newest one included, or if it is too little.
    """
    submit_s, differences_s = sooner_s(asked, advised)
    weeks = (now_s - submit_s) // (7 * DAY_S)
    parts = [differences_s[weeks == week] for week in range(RECENT_DAYS // 7)]
    known = [part for part in parts if len(part) >= MIN_PAIRS]
    if len(known) < MIN_WEEKS or len(parts[0]) < MIN_PAIRS:
        return None
    gain_s = min(float(np.median(part)) for part in known)
    usual_s = float(np.median(asked.wait_s))
    is_said = gain_s > max(WAIT_DIFFERENCE_S, WAIT_DIFFERENCE_FRAC * usual_s)
    return (sum(map(len, known)), gain_s) if is_said else None


@dataclass(frozen=True)
class WaitGains:
    """Gains of cells in which waits can be predicted. gains: per "asked>advised/size", pairs and seconds."""

    gains: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    def of(self, names: Iterable[str], advised: str | None, gpus: int) -> tuple[WaitGain, ...]:
        """Return the gains of jobs of this size, else of any size, from the advised tier over each other."""
        sizes = (str(size_class(gpus)), ALL_SIZES)
        keys = {name: tuple(f"{name}>{advised}/{size}" for size in sizes) for name in names}
        found = {name: next((self.gains[key] for key in own if key in self.gains), None) for name, own in keys.items()}
        return tuple(WaitGain(name, *known) for name, known in found.items() if known)


WaitCells = Mapping[tuple[str, str], WaitCell]
"""Cells by name and size: a power of two of GPUs, or ALL_SIZES."""


def cells_of(history: pd.DataFrame, names: pd.Series[str]) -> dict[tuple[str, str], WaitCell]:
    """Cells of the jobs that have started. names: of each row; missing ones are left out.

    An array counts once: its later tasks often wait for its own earlier ones.
    """
    is_task = history["is_array"].fillna(False).astype(bool)
    is_later = is_task & history.duplicated(["user", "name_key", "submit_s"])
    known = history.assign(cell=names)[~is_later & names.notna() & history["start_s"].notna()]
    known = known.sort_values("start_s", kind="stable")
    times_s = known[["submit_s", "start_s"]].to_numpy("float64")
    sizes = known["gpu_count"].fillna(1).astype("int64").map(size_class).to_numpy()
    own_names, cells = known["cell"].to_numpy(), dict[tuple[str, str], WaitCell]()
    for name in sorted(set(own_names)):
        is_own = own_names == name
        for size in (*sorted(set(sizes[is_own])), None):
            own = times_s[is_own & ((sizes == size) | (size is None))]
            cells[name, ALL_SIZES if size is None else str(size)] = WaitCell(own[:, 0], own[:, 1])
    return cells


def recent_cells(history: pd.DataFrame, now_s: int, names: pd.Series[str]) -> dict[tuple[str, str], WaitCell]:
    """Cells of what is known at now_s of the jobs that started within HISTORY_DAYS before. names: of the rows."""
    known = without_parts(known_at(history.assign(cell=names), now_s))
    known = known[known["start_s"] >= now_s - HISTORY_DAYS * DAY_S]
    return cells_of(known, known["cell"])


def learn_gains(history: pd.DataFrame, now_s: int) -> WaitGains:
    """Learn the gains between tiers from the jobs that started within RECENT_DAYS before now_s."""
    every = recent_cells(history, now_s, history["tier"])
    cells = {
        key: cell.between(now_s - RECENT_DAYS * DAY_S, now_s + 1) for key, cell in every.items() if cell.speaks(now_s)
    }
    return WaitGains({
        f"{name}>{other}/{size}": found
        for (name, size), cell in cells.items()
        for (other, other_size), advised in cells.items()
        if other != name and other_size == size and (found := weekly_gain(cell, advised, now_s))
    })  # fmt: skip
