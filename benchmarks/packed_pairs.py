"""What bounds for two jobs on one GPU would have come to: a replay of a site's past."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pandas as pd

from advisor.memory.bound import BoundedCase, BoundReplay, shared_bounds_mib
from advisor.memory.peak_store import replay_peaks
from almanac.config import AdviceSection, Tier


class PackedPair(NamedTuple):
    """Two submissions of one user, one after the other, whose bounds together fit a GPU.

    rows: places in the history frame. bound_mib: both bounds. usable_mib: of the smallest GPU that holds them with
    their contexts, less the headroom and the contexts. is_one_family: both have one masked name.
    """

    user: str
    submit_s: int
    rows: tuple[int, int]
    is_one_family: bool
    bound_mib: float
    usable_mib: float


class _Bounded(NamedTuple):
    case: BoundedCase
    mib: float


def replay_pairs(
    history: pd.DataFrame, config: AdviceSection, tiers: Sequence[Tier], context_mib: float, since_s: int = 0
) -> Iterator[PackedPair]:
    """Pairs of single submissions with the bounds that they would have had, for capacities of these tiers.

    Each submission is paired with the one before it of its user with as many GPUs, and with the one before it of its
    family. An array counts with its first task.
    """
    replay = BoundReplay(replay_peaks(history, config, tiers), config, tiers, with_shared=True)
    usable = sorted({tier.capacity_mib - config.headroom_mib - 2 * context_mib for tier in tiers})
    before: dict[tuple[object, ...], _Bounded] = {}
    arrays: set[tuple[str, str, int]] = set()
    for case in replay:
        job = case.case.submission
        identity = (job.user, job.name_key, job.submit_s)
        if job.is_array and identity in arrays:
            continue
        arrays.add(identity)
        bounds = shared_bounds_mib(case.case.evidence, replay.calibration, config)
        if 2 not in bounds:
            continue
        now = _Bounded(case, bounds[2])
        keys = {(job.user, job.gpu_count), (job.user, job.gpu_count, job.name_key)}
        partners = {before[key].case.case.row: before[key] for key in keys if key in before}
        before.update(dict.fromkeys(keys, now))
        for partner in partners.values() if job.submit_s >= since_s else ():
            holds = next((mib for mib in usable if partner.mib + now.mib <= mib), math.nan)
            if holds == holds:
                yield _pair(partner, now, holds)


def _pair(first: _Bounded, second: _Bounded, usable_mib: float) -> PackedPair:
    earlier, later = first.case.case, second.case.case
    return PackedPair(
        later.submission.user,
        later.submission.submit_s,
        (earlier.row, later.row),
        earlier.submission.name_key == later.submission.name_key,
        first.mib + second.mib,
        usable_mib,
    )
