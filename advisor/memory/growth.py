"""Whether a running job's GPU memory will outgrow its GPU, from samples of used memory alone.

The samples of DCGM or nvidia-smi say what a framework holds, not what it needs: a caching allocator climbs in stairs, a
preallocating one is flat, evaluation phases come and go. The rule therefore extrapolates the highest use so far, takes
the least growth that explains it, and restarts a job only after five predictions in a row and above 80% of the
capacity. Memory that rises in one step is never predicted: nothing announces it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from advisor.memory.growth_laws import LAWS, Point, fit, plausible

NO_CAPACITY = "the capacity is unknown"
NO_END = "neither a run time nor a time limit is known"
TOO_FEW = "too few samples"
EARLY = "too early in the run"
FLAT = "no growth"
ONE_STEP = "the growth is one step"
FITS = "the growth ends below the capacity"
ENDS_BEFORE = "the job probably ends before"
LOW_USE = "the use is too low"
FELL = "the use has fallen"
NOT_ENOUGH = "too few predictions in a row"
FAMILY = "earlier runs of the same family held as much"
OUTGROWS = "the job outgrows its memory"


@dataclass(frozen=True)
class GrowthRules:
    """The guards of an early restart. The first four are the issue's; benchmarks/mig_restart.py measures them all.

    use_share: of the capacity, that the highest use must have reached.
    newer_share: of the run so far, that the fit is on: what a program loads at its start is no growth.
    law_share: of the run so far, on which the law of growth is chosen as well: a curve shows better on more of it.
    in_a_row: predictions that must all say that the job does not fit.
    least_runs: completed runs that make a family's peak count.
    step_share: two predictions are at least this share of the run so far apart, so that five are not one.
    least_elapsed_share: of the expected run time; before it, the first tooth of a sawtooth looks like growth.
    blocks: of equal length, whose highest uses are fitted; least_samples: below that, nothing is predicted.
    most_jump_share: of the growth in the fitted part, that one block may have; above it the growth is a step.
    fallen_share: of the capacity, by which the newest use may be below the highest.
    z: standard errors taken off the fitted growth (2.33: one-sided 99%).
    doubt: a slower law of growth is believed while its squared error is at most this many times the best one's.
    least_chance: that the job still runs when the memory would be full.
    """

    use_share: float = 0.8
    newer_share: float = 0.5
    law_share: float = 0.75
    in_a_row: int = 5
    least_runs: int = 5
    step_share: float = 0.005
    least_elapsed_share: float = 0.15
    blocks: int = 10
    least_samples: int = 12
    most_jump_share: float = 0.6
    fallen_share: float = 0.1
    z: float = 2.33
    doubt: float = 1.0
    least_chance: float = 0.95


RULES = GrowthRules()
ALIKE = 1e-6
"""Squared error, as a share of the squared capacity, below which all laws fit."""
LEAST_POINTS = 3
"""A law is fitted to so many at least."""
MOST_POINTS = 256
"""Samples kept; with more, neighbors become one, the higher of them."""


@dataclass(frozen=True)
class RunTime:
    """What is known of the time at which a job ends, in s since its start.

    predicted_s: its median; spread: the standard deviation of its logarithm (0: it is exact). limit_s: the time limit;
    alone, every end up to it is equally likely.
    """

    predicted_s: float | None = None
    spread: float = 0.0
    limit_s: float | None = None

    @property
    def end_s(self) -> float | None:
        """The predicted end, at most the limit; None where neither is known."""
        known = [end for end in (self.predicted_s, self.limit_s) if end is not None and 0 < end < math.inf]
        return min(known, default=None)

    def chance_of_reaching(self, time_s: float, now_s: float) -> float:
        """The probability that the job still runs at time_s, given that it runs now. 0 where nothing is known."""
        limit = self.limit_s if self.limit_s is not None and self.limit_s > 0 else math.inf
        if not time_s < limit or self.end_s is None:
            return 0.0
        predicted = self.predicted_s
        if predicted is None or not 0 < predicted < math.inf or (self.spread <= 0 and now_s >= predicted):
            return 0.0 if limit == math.inf else max(0.0, (limit - time_s) / (limit - now_s))
        if self.spread <= 0:
            return 1.0 if time_s <= predicted else 0.0
        past = [_tail(math.log(max(at, 1e-9) / predicted) / self.spread) for at in (time_s, now_s)]
        return past[0] / past[1] if past[1] > 0 else 0.0


def _tail(z: float) -> float:
    return math.erfc(z / math.sqrt(2)) / 2


@dataclass(frozen=True)
class FamilyPeaks:
    """Memory of the family's completed runs. peak_mib: their highest, or the bound published for them.

    so_far: (share of the expected run time, highest use of a completed run up to there), increasing; may be empty.
    """

    runs: int
    peak_mib: float
    so_far: tuple[tuple[float, float], ...] = ()

    def explains(self, used_mib: float, share: float, capacity_mib: float, least_runs: int) -> bool:
        """Whether runs that fitted had used as much by this point: growth like theirs is no reason to restart."""
        if self.runs < least_runs or not self.peak_mib <= capacity_mib:
            return False
        reached = [mib for at, mib in self.so_far if at <= share]
        return used_mib <= (reached[-1] if reached else self.peak_mib)


@dataclass(frozen=True)
class Outlook:
    """A prediction: whether the job outgrows its memory, when (s since its start, None: not), and why."""

    outgrows: bool
    reason: str
    full_s: float | None = None


def _means(blocks: Sequence[Point], now_s: float) -> list[tuple[float, float]]:
    return [(block.time_s / now_s, block.mean_mib) for block in blocks]


class GrowthWatch:
    """The samples of one run: observe() each of them, in order, as it comes.

    capacity_mib: of the GPU or slice; None, NaN, or not positive: unknown, and nothing is ever predicted.
    """

    def __init__(
        self,
        capacity_mib: float | None,
        run_time: RunTime,
        family: FamilyPeaks | None = None,
        rules: GrowthRules = RULES,
    ) -> None:
        self._capacity_mib = capacity_mib if capacity_mib is not None and 0 < capacity_mib < math.inf else None
        self._run_time, self._family, self._rules = run_time, family, rules
        self._points: list[Point] = []
        self._stride = 1
        self._newest_s, self._predicted_s = -1.0, -math.inf
        self._row = 0
        self._outlook = Outlook(False, TOO_FEW)

    def observe(self, time_s: float, used_mib: float | None) -> Outlook:
        """Note the use at a time, s since the start, and say whether to restart now.

        A sample that is missing, not finite, negative, or not later than the one before changes nothing.
        """
        is_finite = used_mib is not None and math.isfinite(used_mib) and math.isfinite(time_s)
        if not is_finite or used_mib is None or used_mib < 0 or time_s <= self._newest_s:
            return self._outlook
        self._newest_s = time_s
        self._note(time_s, used_mib)
        if time_s - self._predicted_s >= self._rules.step_share * time_s:
            self._predicted_s = time_s
            prediction = self._predict(time_s)
            self._row = self._row + 1 if prediction.outgrows else 0
            self._outlook = self._guarded(prediction, time_s, used_mib)
        return self._outlook

    def _note(self, time_s: float, used_mib: float) -> None:
        """Join every _stride samples to one point; past MOST_POINTS, each two points to one."""
        sample = Point(time_s, used_mib, used_mib, 1)
        if self._points and self._points[-1].samples < self._stride:
            self._points[-1] = self._points[-1].joined(sample)
        else:
            self._points.append(sample)
        if len(self._points) > MOST_POINTS:
            rest = self._points[len(self._points) // 2 * 2 :]
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [before.joined(after) for before, after in pairs] + rest
            self._stride *= 2

    def _predict(self, now_s: float) -> Outlook:
        """Without the guards that look at the present use."""
        capacity, rules = self._capacity_mib, self._rules
        if capacity is None:
            return Outlook(False, NO_CAPACITY)
        if self._run_time.end_s is None:
            return Outlook(False, NO_END)
        if len(self._points) < rules.least_samples:
            return Outlook(False, TOO_FEW)
        blocks = self._blocks(now_s, rules.newer_share)
        if len(blocks) < max(LEAST_POINTS, rules.blocks // 2):
            return Outlook(False, TOO_FEW)
        peaks = self._peaks(blocks)
        rises = [after - before for before, after in pairwise(peaks)]
        if sum(rises) <= 0:
            return Outlook(False, FLAT)
        if max(rises) > rules.most_jump_share * sum(rises):
            return Outlook(False, ONE_STEP)
        full_s = now_s * self._full_share(now_s, capacity - peaks[-1])
        if full_s == math.inf:
            return Outlook(False, FITS)
        if self._run_time.chance_of_reaching(full_s, now_s) < rules.least_chance:
            return Outlook(False, ENDS_BEFORE, full_s)
        return Outlook(True, OUTGROWS, full_s)

    def _full_share(self, now_s: float, room_mib: float) -> float:
        """When the memory is full, as a share of the run so far: by the slowest law that may hold."""
        rules, floor = self._rules, ALIKE * (self._capacity_mib or 0.0) ** 2
        newer, longer = (_means(self._blocks(now_s, share), now_s) for share in (rules.newer_share, rules.law_share))
        if len(longer) < LEAST_POINTS:  # after a long gap in the samples
            longer = newer
        laws = {*plausible(newer, rules.doubt, floor), *plausible(longer, rules.doubt, floor)}
        return max(fit(LAWS[law], newer, rules.z).full_share(room_mib) for law in laws)

    def _blocks(self, now_s: float, share: float) -> list[Point]:
        """This newest share of the samples in blocks of equal length; a block without samples is left out."""
        newer = self._points[round(len(self._points) * (1 - share)) :]
        start_s, length_s = newer[0].time_s, now_s - newer[0].time_s
        blocks: dict[int, Point] = {}
        for point in newer:
            index = min(int((point.time_s - start_s) / length_s * self._rules.blocks), self._rules.blocks - 1)
            blocks[index] = blocks[index].joined(point) if index in blocks else point
        return list(blocks.values())

    def _peaks(self, blocks: Sequence[Point]) -> list[float]:
        """The highest use so far at the end of each block."""
        before = self._points[: round(len(self._points) * (1 - self._rules.newer_share))]
        peak = max((point.highest_mib for point in before), default=0.0)
        return list(accumulate((block.highest_mib for block in blocks), max, initial=peak))[1:]

    def _guarded(self, prediction: Outlook, now_s: float, used_mib: float) -> Outlook:
        capacity, end_s, rules = self._capacity_mib, self._run_time.end_s, self._rules
        if not prediction.outgrows or capacity is None or end_s is None:
            return prediction
        highest = max(point.highest_mib for point in self._points)
        reason: str | None = None
        if now_s < rules.least_elapsed_share * end_s:
            reason = EARLY
        elif highest < rules.use_share * capacity:
            reason = LOW_USE
        elif highest - used_mib > rules.fallen_share * capacity:
            reason = FELL
        elif self._row < rules.in_a_row:
            reason = NOT_ENOUGH
        elif self._family and self._family.explains(highest, now_s / end_s, capacity, rules.least_runs):
            reason = FAMILY
        return Outlook(False, reason, prediction.full_s) if reason else prediction
