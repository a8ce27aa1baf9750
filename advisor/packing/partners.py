"""The best partner of each of a user's families: itself, or another one. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from advisor.decisions.packing import (
    LITTLE_GAIN,
    MEMORY,
    MOST_TASKS,
    SHARE,
    FamilyKey,
    PackingAdvice,
    PackingFamily,
    PackingRules,
    decide_packing,
)
from advisor.packing.speeds import low_end

TINY_SPEED = 0.6
"""Three or four runs share a GPU only where each keeps this speed at the low end."""
MOST_PARTNERS = 8
"""Of each family so many best partners are looked at."""
_EQUAL = 1e-9
MOST_FAMILIES = 200
"""Of each user the newest families count: pairs of older ones are history."""


def packing_alone(family: PackingFamily, rules: PackingRules) -> PackingAdvice:
    """Advice for runs of one family, such as an array: as many on a GPU as promise the most work, two or more."""
    best = decide_packing((family, family), rules)
    for tasks in range(3, MOST_TASKS + 1) if best.is_advised else ():
        advice = decide_packing((family,) * tasks, rules)
        if not advice.is_advised or advice.speeds[0].low < TINY_SPEED:
            break
        best = max(best, advice, key=_low)
    return best


def packing_pairs(families: Iterable[PackingFamily], rules: PackingRules) -> list[PackingAdvice]:
    """One advice for each family that can share a GPU: with its best partner, itself first among equals.

    families: of any users; only families of one user are paired, of each the MOST_FAMILIES newest. Of two families that
    are each other's best partner, there is one advice. The most gain first.
    """
    found: dict[frozenset[FamilyKey], PackingAdvice] = {}
    for own in _by_user(families).values():
        for advice in best_partners(own, rules).values():
            found.setdefault(frozenset(_keys(advice)), advice)
    return sorted(found.values(), key=lambda each: (-_low(each), _keys(each)))


def best_partners(families: Sequence[PackingFamily], rules: PackingRules) -> dict[FamilyKey, PackingAdvice]:
    """By family of one user the advice with its best partner; families without one are not there.

    The family itself stands first among the members.
    """
    alone = [packing_alone(family, rules) for family in families]
    best = {advice.members[0].key: advice for advice in alone if advice.is_advised}
    for pair in _promising(alone):
        for members in (pair.members, pair.members[::-1]):
            known = best.get(members[0].key)
            if known is None or pair.low > _low(known) + _EQUAL:
                advice = decide_packing(members, rules)
                if advice.is_advised:
                    best[members[0].key] = advice
    return best


class _Candidate(NamedTuple):
    """Members on one GPU, and the low end of their gain."""

    low: float
    members: tuple[PackingFamily, ...]


def _promising(alone: Sequence[PackingAdvice]) -> list[_Candidate]:
    """The best pairs of one user's families, the most gain first; arrays find them, since there can be many.

    alone: packing_alone of each family.
    """
    groups: defaultdict[tuple[int, str], list[PackingFamily]] = defaultdict(list)
    for advice in alone:
        family, rules = advice.members[0], advice.rules
        # What keeps a family from any partner, such as MIG, keeps it from itself.
        if advice.reason in (SHARE, MEMORY, LITTLE_GAIN):
            groups[family.gpu_count, family.gpu_model].append(family)
    found = [pair for group in groups.values() for pair in _of_group(group, rules)]
    return sorted(found, key=lambda pair: (-pair.low, [member.key for member in pair.members]))


def _of_group(group: Sequence[PackingFamily], rules: PackingRules) -> list[_Candidate]:
    """Pairs of families that nothing but memory and gain can keep apart: of each family with its MOST_PARTNERS best."""
    if len(group) < 2:
        return []
    demands = np.array([family.demand for family in group], dtype="float64")
    bounds = np.array([family.bounds_mib[2] for family in group])
    capacities = np.array([family.capacity_mib for family in group], dtype="float64")
    usable = np.minimum.outer(capacities, capacities) - rules.headroom_mib - 2 * rules.context_mib
    scarce = np.maximum((demands[:, None] + demands[None, :]).max(axis=2), 1.0)
    lows = low_end(np.broadcast_to(demands.max(axis=1), scarce.shape), scarce)
    gains = np.where(np.add.outer(bounds, bounds) <= usable + _EQUAL, lows + lows.T, -np.inf)
    np.fill_diagonal(gains, -np.inf)
    best = np.argsort(-gains, axis=1, kind="stable")[:, :MOST_PARTNERS]
    pairs = {(min(one, other), max(one, other)) for one, row in enumerate(best.tolist()) for other in row}
    found = [_Candidate(float(gains[pair]), (group[pair[0]], group[pair[1]])) for pair in sorted(pairs)]
    return [each for each in found if each.low >= rules.min_gain - _EQUAL]


def _by_user(families: Iterable[PackingFamily]) -> dict[str, list[PackingFamily]]:
    """Of each user the newest MOST_FAMILIES."""
    found: defaultdict[str, list[PackingFamily]] = defaultdict(list)
    for family in families:
        found[family.user].append(family)
    return {
        user: sorted(own, key=lambda each: (-each.newest_s, each.key))[:MOST_FAMILIES] for user, own in found.items()
    }


def _low(advice: PackingAdvice) -> float:
    return advice.gain.low if advice.gain else 0.0


def _keys(advice: PackingAdvice) -> list[FamilyKey]:
    return [member.key for member in advice.members]
