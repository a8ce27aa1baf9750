"""Tell memory that a framework is told to reserve from a program's own use, by the shares that its runs held."""

from __future__ import annotations

from dataclasses import dataclass, field

from telemetry.metrics.data_quality import FLAT_SHARE

LEAST_SHARE = 0.5
"""Peaks below this share are own use, unless GPUs of two sizes show the same: a silent family loses a smaller tier."""
EQUAL_SHARE = 0.001
"""Share of the capacity by which peaks of one reservation vary on GPUs of one size: less than own use mostly does."""
OTHER_SIZE = 1.2
"""GPUs of two sizes differ by this factor at least."""
CERTAIN_RUNS, AGAIN_RUNS = 3, 5
"""Equal peaks in a row that are a reservation; that many where the family has shown own use."""
OWN, UNCLEAR, RESERVED, EARLY = "own", "unclear", "reserved", "early"


@dataclass
class HeldShares:
    """The shares of the capacity that a family's runs held, which ended well and may have been flat from their start.

    newest: the newest share by capacity in GiB. equal_runs: newest runs in a row at one share. shows_use: completed
    runs differ, so that the program reserves nothing. is_reserving: the newest flat run held a share that may be
    reserved.
    """

    newest: dict[int, float] = field(default_factory=dict)
    equal_runs: int = 0
    shows_use: bool = False
    is_reserving: bool = False

    def holds(self, peak_mib: float, capacity_mib: float) -> bool:
        """Return True if a peak is what the family reserves."""
        held = self.newest.get(round(capacity_mib / 1024))
        return self.is_reserving and held is not None and abs(peak_mib / capacity_mib - held) <= EQUAL_SHARE

    def observe(self, peak_mib: float, capacity_mib: float, is_flat: bool | None, is_completed: bool) -> str:
        """Take a run that ended well, and return what its peak is: OWN, UNCLEAR, RESERVED, or EARLY.

        is_flat: None if it is not known. EARLY: it may have ended before the family's reservation.
        """
        share, size = peak_mib / capacity_mib, round(capacity_mib / 1024)
        before, others = self.newest.get(size), [
            held for other, held in self.newest.items() if max(size, other) >= OTHER_SIZE * max(min(size, other), 1)
        ]  # fmt: skip
        is_on_two = any(abs(share - held) <= FLAT_SHARE for held in others)
        is_equal = before is not None and abs(share - before) <= EQUAL_SHARE
        if is_flat is False or not (is_equal or is_on_two or not self.newest):
            if not is_completed:
                return EARLY if self.is_reserving else OWN
            self.shows_use, self.is_reserving, self.equal_runs = True, False, 0
        if is_flat is False:
            return OWN
        self.newest[size] = share
        self.equal_runs += 1
        is_reserving = is_on_two or share >= LEAST_SHARE
        if not is_reserving or (self.shows_use and self.equal_runs < AGAIN_RUNS):
            return OWN
        self.shows_use, self.is_reserving = False, True
        return RESERVED if is_on_two or self.equal_runs >= CERTAIN_RUNS else UNCLEAR
