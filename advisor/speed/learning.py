"""What a site's families showed of its GPU types beyond the specifications: the speed table. Pure.

Families with runs on two types or more teach how fast the types are (advisor.speed.effects), how far runs of one family
differ, and how far achieved rates differ from speeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from advisor.speed.effects import OF_FAMILY, OF_USER, Effect, learn_effects
from advisor.speed.gpu_types import GpuTypes
from advisor.speed.posterior import OWN_BIAS, Level
from advisor.speed.runs import FamilyKey, FamilyRuns
from advisor.speed.specifications import RunProfile, log_speeds

Floats = npt.NDArray[np.float64]
SPREAD, RATE_BIAS = 0.4, 0.2
"""Assumed standard deviations of ln run time within a family, and of a ratio of rates (own choice)."""
_WORTH = 4.0
"""An assumption counts as so many observations."""
MAX_FAMILIES = 1000
"""The newest families that count: enough, and bounds the time of a training."""


@dataclass(frozen=True)
class SpeedTable:
    """What a site knows of its GPU types.

    names: of the types, the order of all arrays. effects: by roofline class. families: by type, how many families with
    runs on another type, too. Standard deviations of log speeds: of_user, of a user about the class; of_family, of a
    family about its user; spread, of one run about its family; rate_bias, of achieved rates about speeds.
    """

    types: GpuTypes = field(default_factory=GpuTypes)
    names: tuple[str, ...] = ()
    effects: Mapping[str, Effect] = field(default_factory=dict)
    families: Mapping[str, int] = field(default_factory=dict)
    of_user: float = OF_USER
    of_family: float = OF_FAMILY
    spread: float = SPREAD
    rate_bias: float = RATE_BIAS

    def to_json(self) -> dict[str, Any]:
        return {
            "types": self.types.to_json(),
            "names": list(self.names),
            "effects": {name: [each.mean.tolist(), each.covariance.tolist()] for name, each in self.effects.items()},
            "families": dict(self.families),
            "of_user": self.of_user,
            "of_family": self.of_family,
            "spread": self.spread,
            "rate_bias": self.rate_bias,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SpeedTable:
        """Raises KeyError, TypeError, or ValueError for other data."""
        names = tuple(map(str, data["names"]))
        effects = {
            str(name): Effect(
                np.array(mean, float).reshape(len(names)), np.array(cov, float).reshape(2 * (len(names),))
            )
            for name, (mean, cov) in data["effects"].items()
        }
        spreads = {name: float(data[name]) for name in ("of_user", "of_family", "spread", "rate_bias")}
        families = {str(name): int(number) for name, number in data["families"].items()}
        return cls(GpuTypes.from_json(data["types"]), names, effects, families, **spreads)


def learn_speeds(families: Mapping[FamilyKey, FamilyRuns], types: GpuTypes, more: Iterable[str] = ()) -> SpeedTable:
    """The table of a site with these families. more: types of the site without any run."""
    names = tuple(sorted({*more, *types.models, *(name for runs in families.values() for name in runs.types)}))
    if not names:
        return SpeedTable(types)
    chosen = sorted(
        (key for key, runs in families.items() if len(runs.types) > 1),
        key=lambda key: families[key].newest_s,
    )[-MAX_FAMILIES:]
    spread = _site_spread([families[key] for key in chosen])
    bias = _rate_bias([families[key] for key in chosen], spread)
    known = np.array([types.hardware(name) is not None for name in names])
    seen = [contrasts(families[key], names, types, spread, bias) for key in chosen]
    effects = learn_effects(seen, [key.user for key in chosen], [families[key].roofline for key in chosen], known)
    counts = Counter(
        name for key, (matrix, _) in zip(chosen, seen, strict=True) if matrix.any() for name in families[key].types
    )
    deviations = effects.of_user, effects.of_family, spread, bias
    return SpeedTable(types, names, effects.by_class, dict(counts), *deviations)


def specified(runs: FamilyRuns, names: Sequence[str], types: GpuTypes) -> Floats:
    """(types,) log speeds by the specifications, a mean over what each type's runs say; 0 for unknown hardware."""
    hardware = [types.hardware(name) for name in names]
    profiles = runs.profiles() or [RunProfile("")]
    told = [each for each in profiles if each.busy == each.busy or each.pipe]
    logs = np.array([log_speeds(profile, names, hardware) for profile in told or profiles])
    found: Floats = np.nan_to_num(logs.mean(axis=0), nan=0.0)
    return found


def family_spread(times: Mapping[str, Sequence[float]], assumed: float) -> float:
    """Standard deviation of ln run time within a type: the family's own, shrunk to the assumed one."""
    squares, freedom = _deviations(times)
    return math.sqrt((_WORTH * assumed**2 + squares) / (_WORTH + freedom))


def levels_of(runs: FamilyRuns, spread: float, rate_bias: float, bias: float = 0.0) -> list[Level]:
    """Run times, then rates. bias: that the runs of another GPU count have on top."""
    times, rates = runs.log_times(), runs.log_rates()
    return [
        Level(times, -1, family_spread(times, spread), math.hypot(OWN_BIAS, bias)),
        Level(rates, 1, family_spread(rates, rate_bias), math.hypot(rate_bias, bias)),
    ]


def _deviations(times: Mapping[str, Sequence[float]]) -> tuple[float, int]:
    """(sum of squares about each type's median, degrees of freedom); an outlier counts as three usual deviations."""
    squares, freedom = 0.0, 0
    for values in times.values():
        away = np.abs(np.array(values) - np.median(values))
        if len(away) > 4:
            away = np.minimum(away, 3 * max(1.4826 * float(np.median(away)), 0.02))
        squares += float(away @ away)
        freedom += len(away) - 1
    return squares, freedom


def _site_spread(families: Sequence[FamilyRuns]) -> float:
    """The median over families that have enough runs to tell, shrunk to the assumed one."""
    found = [_deviations(runs.log_times()) for runs in families]
    own = [squares / freedom for squares, freedom in found if freedom >= 2]
    if not own:
        return SPREAD
    return math.sqrt(max((_WORTH * SPREAD**2 + len(own) * float(np.median(own))) / (_WORTH + len(own)), 1e-4))


def _rate_bias(families: Sequence[FamilyRuns], spread: float) -> float:
    """How far ratios of rates are from ratios of run times, where a family has both on two types."""
    squares = []
    for runs in families:
        times, rates = levels_of(runs, spread, RATE_BIAS)
        both = sorted(set(times.values) & set(rates.values), key=lambda name: -len(times.values[name]))
        if len(both) > 1:
            (_, time, time_var), (_, rate, _) = times.observed(both), rates.observed(both)
            away = (time[1:] - time[0]) + (rate[1:] - rate[0])
            squares += np.maximum((away**2 - time_var[1:] - time_var[0]) / 2, 0.0).tolist()
    return math.sqrt((_WORTH * RATE_BIAS**2 + sum(squares)) / (_WORTH + len(squares)))


def contrasts(
    runs: FamilyRuns, names: Sequence[str], types: GpuTypes, spread: float, rate_bias: float
) -> tuple[Floats, Floats]:
    """Information (matrix, vector) that a family has of its log speeds minus the specified ones; levels are free."""
    size = len(names)
    matrix, vector = np.zeros((size, size)), np.zeros(size)
    spec = specified(runs, names, types)
    for level in levels_of(runs, spread, rate_bias):
        places, medians, variances = level.observed(names)
        if len(places) > 1:
            precise = 1 / variances
            centered = np.diag(precise) - np.outer(precise, precise) / precise.sum()
            matrix[np.ix_(places, places)] += centered
            vector[places] += centered @ (level.sign * medians - spec[places])
    return matrix, vector
