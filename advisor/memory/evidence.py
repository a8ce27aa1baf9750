"""Describe a family's runs as numbers to compute a bound from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

from advisor.memory.trend import straight_line
from almanac.records import MemoryScope

if TYPE_CHECKING:
    from advisor.mig.compute_need import Activity


FAMILY: Final = "family"
SIMILAR: Final = "similar"
"""Scopes: enough runs of this name itself, or only of names like it or of its script. All of one user, with as many
GPUs.

A user's other jobs were tried as a third: the bounds that they led to were exceeded 26 times as often as stated.
"""
SCRIPT: Final = "script"
"""Scope that people read where SIMILAR evidence comes from runs of the same script."""
OPEN_EDGES = (5, 20)
"""Evidence is calibrated apart by how many submissions of the family are open: no outcome of these is known."""
SPREAD_RUNS = 20
MIN_SPREAD = 0.02
"""Smallest relative spread of needs: equal peaks of a few runs do not show that the next one is equal."""
PAUSE_S = 30 * 86_400
"""Time without advice for a family that ran out of memory on a smaller tier: until then its users have adapted."""
BOUND_RUNS = 5
"""Runs that a bound needs, and a slow-down on a MIG slice. A tier needs fewer: few needs come near one's edge."""
RUNS_BY_RISK = 0.5
"""A tier goes by the newest RUNS_BY_RISK / risk runs. After n runs that fit, 1 / (n + 2) of the next ones do not."""
TREND_SHARE = 0.6
"""Share of the variance of log needs that a rising line over time must explain to count as growth."""
MAX_GROWTH = math.log(2)


@dataclass(frozen=True)
class Oom:
    """The newest suspected death of memory. is_after_move: on a smaller tier than the family had asked for before."""

    capacity_mib: float
    end_s: int
    is_after_move: bool


@dataclass(frozen=True)
class Evidence:
    """The newest runs of one scope that had ended at now_s (s since 1970).

    runs: number of runs with a known need. newest: logarithms of the newest needs, MiB, oldest first; newest_s: their
    submit times. highest_mib: highest measured peak of all. least_mib: highest known need, failed runs included.
    censored_mib: the largest capacity at which a run was cut off; None without such a run, or if a run on more memory
    needed more. seen_mib: the highest known need, older runs included; infinite if one was cut off above it, 0 without
    any. since_s, until_s: range of the ends. oom: of the family, for every scope. excluded: number of excluded runs by
    reason. open_jobs: submissions of these names that had not ended; an array counts once.
    is_of_script: the runs are of the job's script, under names as generic as the job's.
    activities: of the newest runs whose use of the GPU is known, oldest first.
    """

    scope: MemoryScope
    now_s: int
    runs: int = 0
    newest: tuple[float, ...] = ()
    newest_s: tuple[int, ...] = ()
    highest_mib: float = math.nan
    least_mib: float = math.nan
    censored_mib: float | None = None
    seen_mib: float = 0.0
    since_s: int | None = None
    until_s: int | None = None
    oom: Oom | None = None
    excluded: Mapping[str, int] = field(default_factory=dict)
    open_jobs: int = 0
    is_of_script: bool = False
    activities: tuple[Activity, ...] = ()

    @property
    def told_scope(self) -> MemoryScope:
        return SCRIPT if self.is_of_script else self.scope

    def supports_tier(self, min_runs: int) -> bool:
        """Return True if there are enough runs for advice of a tier, and none of unknown height."""
        return self.runs >= min_runs and self.censored_mib is None

    @property
    def supports_bound(self) -> bool:
        """Return True if there are enough runs for a bound, too, and all of them show their need."""
        return self.runs >= BOUND_RUNS and self.seen_mib < math.inf

    def is_paused(self) -> bool:
        """Return True if the family ran out of memory on a smaller tier than before, not long ago."""
        oom = self.oom
        return oom is not None and oom.is_after_move and self.now_s < oom.end_s + PAUSE_S

    @cached_property
    def growth(self) -> float:
        """By how much, as a logarithm, need has grown since the newest of these runs was submitted; 0 without a trend.

        The straight line through the logarithms over the submissions, if it explains TREND_SHARE of their variance
        and rises. Runs submitted since then have not ended and are not seen.
        """
        line = straight_line(self.newest_s, self.newest)
        if line is None or line.slope <= 0 or line.correlation**2 < TREND_SHARE:
            return 0.0
        return min(line.slope * max(self.now_s - max(self.newest_s), 0), MAX_GROWTH)

    @cached_property
    def trend(self) -> float:
        """t value of the straight line through the logarithms in their order: above 2 to 3 they surely grow."""
        line = straight_line(range(len(self.newest)), self.newest)
        if line is None:
            return 0.0
        return line.correlation * math.sqrt((len(self.newest) - 2) / max(1 - line.correlation**2, 1e-9))

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the logarithms of the newest SPREAD_RUNS needs; 0 for fewer than two."""
        newest = self.newest[-SPREAD_RUNS:]
        number = len(newest)
        if number < 2:
            return 0.0
        mean = math.fsum(newest) / number
        return math.sqrt(math.fsum([(value - mean) ** 2 for value in newest]) / (number - 1))

    def centre_and_scale(self) -> tuple[float, float]:
        """Logarithm of the highest need, grown since, and the spread of a next one around it: sd sqrt(1 + 1/n)."""
        number = max(min(self.runs, SPREAD_RUNS), 1)
        scale = max(self.spread, MIN_SPREAD) * math.sqrt(1 + 1 / number)
        return math.log(self.least_mib) + self.growth, scale
