"""The mixes of the MIG paper under schemes A and B: what the paper reports, a trial gave, and we get.

Run: python benchmarks/mig_paper.py. The goals are the trial's figures; the paper's are shown beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from figures import Figure, exactly, main

from simulator.mig.paper_mixes import MixRow, mixes_table

TOLERANCE = 0.0051


def figures_of(row: MixRow) -> list[Figure]:
    mix = row.mix
    figures = [
        _figure(f"{mix.name} A", row.ours_a, mix.paper_a, mix.trial_a, "up to " if mix.is_at_most else ""),
        _figure(f"{mix.name} B", row.ours_b, mix.paper_b, mix.trial_b),
    ]
    if mix.is_split:
        figures.append(Figure(f"{mix.name} A, one queue (A above has two)", row.ours_a_one_queue))
    if mix.trial_b_range:
        low, high = mix.trial_b_range
        is_met = abs(row.low_b - low) <= 2 * TOLERANCE and abs(row.high_b - high) <= 2 * TOLERANCE
        figures.append(
            Figure(f"{mix.name} B, 5% to 95%", f"{row.low_b:.3f} to {row.high_b:.3f}", f"{low} to {high}", is_met)
        )
        figures.append(Figure(f"{mix.name} B, least and greatest", f"{row.least_b:.3f} and {row.greatest_b:.3f}"))
    return figures


def _figure(name: str, ours: float, paper: float | None, trial: float | None, bound: str = "") -> Figure:
    about = name if paper is None else f"{name} (paper {bound}{paper:g})"
    if trial is None:
        return Figure(about, ours)
    return Figure(about, ours, f"{trial:g}", abs(ours - trial) <= TOLERANCE)


def measure() -> Iterator[Figure]:
    rows = mixes_table()
    for row in rows:
        yield from figures_of(row)
    yield exactly(
        "Ht1 A, cut off after three decimals",
        math.floor(next(row.ours_a for row in rows if row.mix.name == "Ht1") * 1000) / 1000,
        1.783,
    )


if __name__ == "__main__":
    main(measure)
