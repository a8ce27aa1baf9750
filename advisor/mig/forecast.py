"""Days that may come, drawn from the recent past, as lists of jobs that a replay can run. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from advisor.mig.replay import PoolJob
from almanac.units import DAY_S, HOUR_S

MIX_S = HOUR_S
"""Submit times are moved by up to this much, so that a layout is not fitted to one coincidence of arrivals."""
FIRST_S = 4 * HOUR_S
"""Before a day is known, so much of the past stands for the whole day to come."""


def futures(
    past: Sequence[PoolJob], now_s: float, window_s: float, days: int, number: int, rng: random.Random
) -> list[list[PoolJob]]:
    """Jobs of so many days from now_s on, each by submit time. The same arguments and state of rng give the same jobs.

    past: by submit time. The number of arrivals is a Poisson one; each is a job of the window near its own hour of the
    day. The window is whole days once a day is known, so that each hour counts alike; before, it is the last FIRST_S at
    any hour. Jobs are dealt like cards: none is drawn a second time before all have been drawn.
    """
    if not past:
        return [[] for _ in range(number)]
    known_s = max(now_s - past[0].submit_s, HOUR_S)
    whole = math.floor((min(known_s, window_s) + HOUR_S) / DAY_S)
    span_s = whole * DAY_S if whole else min(known_s, FIRST_S)
    recent = [job for job in past if job.submit_s >= now_s - span_s]
    mean = len(recent) * days * DAY_S / span_s
    deck: list[PoolJob] = []
    found = []
    for _ in range(number):
        jobs = []
        for _ in range(max(0, round(rng.gauss(mean, math.sqrt(mean))))):
            if not deck:
                deck = recent[:]
                rng.shuffle(deck)
            job = deck.pop()
            moved_s = job.submit_s - now_s + rng.uniform(-MIX_S, MIX_S) if whole else rng.uniform(0, DAY_S)
            jobs.append(job._replace(submit_s=now_s + moved_s % DAY_S + rng.randrange(days) * DAY_S))
        found.append(sorted(jobs))
    return found
