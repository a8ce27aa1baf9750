"""The best partner of each of a user's families: itself, or another one. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from advisor.decisions.packing import MOST_TASKS, FamilyKey, PackingAdvice, PackingFamily, PackingRules, decide_packing

PackedRuns = Mapping[tuple[FamilyKey, ...], Sequence[Sequence[float]]]
"""Speeds that families achieved together, by their keys in that order: once per task."""
NONE_PACKED: Final[PackedRuns] = MappingProxyType({})
TINY_SPEED = 0.6
"""Three or four runs share a GPU only where each keeps this speed at the low end."""
MOST_FAMILIES = 200
"""Of each user the newest families count: pairs of older ones are history."""


def packing_alone(family: PackingFamily, rules: PackingRules, packed: PackedRuns = NONE_PACKED) -> PackingAdvice:
    """Advice for runs of one family, such as an array: as many on a GPU as promise the most work, two or more."""
    two, *more = (_decide((family,) * tasks, rules, packed) for tasks in range(2, MOST_TASKS + 1))
    tiny = [advice for advice in more if advice.is_advised and advice.speeds[0].low >= TINY_SPEED]
    return max((two, *tiny), key=_low) if two.is_advised else two


def packing_pairs(
    families: Iterable[PackingFamily], rules: PackingRules, packed: PackedRuns = NONE_PACKED
) -> list[PackingAdvice]:
    """One advice for each family that can share a GPU: with its best partner, itself first among equals.

    families: of any users; only families of one user are paired, of each the MOST_FAMILIES newest. Of two families that
    are each other's best partner, there is one advice. The most gain first.
    """
    by_user: defaultdict[str, list[PackingFamily]] = defaultdict(list)
    for family in families:
        by_user[family.user].append(family)
    found: dict[frozenset[FamilyKey], PackingAdvice] = {}
    for own in by_user.values():
        newest = sorted(own, key=lambda each: (-each.newest_s, each.key))[:MOST_FAMILIES]
        for advice in best_partners(newest, rules, packed).values():
            found.setdefault(frozenset(_keys(advice)), advice)
    return sorted(found.values(), key=lambda each: (-_low(each), _keys(each)))


def best_partners(
    families: Sequence[PackingFamily], rules: PackingRules, packed: PackedRuns = NONE_PACKED
) -> dict[FamilyKey, PackingAdvice]:
    """By family of one user the advice with its best partner; families without one are not there.

    The family itself stands first among the members.
    """
    best: dict[FamilyKey, PackingAdvice] = {}
    for place, family in enumerate(families):
        _keep(best, packing_alone(family, rules, packed))
        for other in families[place + 1 :]:
            if other.gpu_model == family.gpu_model and other.gpu_count == family.gpu_count:
                advice = _decide((family, other), rules, packed)
                _keep(best, advice)
                _keep(best, advice.swapped)
    return best


def _decide(members: tuple[PackingFamily, ...], rules: PackingRules, packed: PackedRuns) -> PackingAdvice:
    keys = tuple(member.key for member in members)
    runs = [*packed.get(keys, ())]
    if len(set(keys)) > 1:
        runs += [run[::-1] for run in packed.get(keys[::-1], ())]
    return decide_packing(members, rules, runs)


def _keep(best: dict[FamilyKey, PackingAdvice], advice: PackingAdvice) -> None:
    if not advice.is_advised:
        return
    key = advice.members[0].key
    known = best.get(key)
    if known is None or _low(advice) > _low(known) + 1e-9:
        best[key] = advice


def _low(advice: PackingAdvice) -> float:
    return advice.gain.low if advice.gain else 0.0


def _keys(advice: PackingAdvice) -> list[FamilyKey]:
    return [member.key for member in advice.members]
