"""Jobs to expect from the recent ones, as a list that a replay can run. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from advisor.mig.replay import PoolJob
from almanac.units import DAY_S, HOUR_S

MIX_S = HOUR_S
"""Submit times are moved by up to this much, so that a layout is not fitted to one coincidence of arrivals."""


ENOUGH = 6000
FIRST_S = 4 * HOUR_S


def expected_jobs(past: Sequence[PoolJob], now_s: float, window_s: float, most_copies: int = 6) -> list[PoolJob]:
    """Jobs like those of the last window_s, by submit time. Deterministic.

    past: by submit time. The window is whole days once a day is known, so that each hour counts alike; before, it is
    the last FIRST_S, repeated for a day. Up to most_copies of it make a sample of about ENOUGH jobs: the first one is
    the past itself; each further one, a fortnight later, has the submit times moved by up to an hour and run times
    drawn from the jobs of the same size.
    """
    if not past:
        return []
    known_s = max(now_s - past[0].submit_s, HOUR_S)
    days = math.floor((min(known_s, window_s) + HOUR_S) / DAY_S)
    span_s = days * DAY_S if days else min(known_s, FIRST_S)
    recent = [job for job in past if job.submit_s >= now_s - span_s]
    if not days:
        recent = _repeated(recent, span_s, math.ceil(DAY_S / span_s))
    copies = max(1, min(most_copies, ENOUGH // max(1, len(recent))))
    rng = random.Random(len(recent))
    runs: dict[int, list[tuple[float, ...]]] = {}
    for job in recent:
        runs.setdefault(job.size, []).append(job.runs_s)
    found = list(recent)
    for copy in range(1, copies):
        later = [
            PoolJob(job.submit_s + copy * 14 * DAY_S + rng.uniform(-MIX_S, MIX_S), job.size, rng.choice(runs[job.size]))
            for job in recent
        ]
        found += sorted(later)
    return found


def _repeated(jobs: Sequence[PoolJob], period_s: float, times: int) -> list[PoolJob]:
    return [job._replace(submit_s=job.submit_s + time * period_s) for time in range(times) for job in jobs]
