"""Learn the speed table: a site's GPU types beyond their specifications, from its job families. Pure.

Log speeds on top of the specifications are site[r] + class[k, r] + user[u, r] + family[f, r], all normal with mean 0
(empirical Bayes). Families with runs on two types or more teach them. The families of one user are alike, so the
user's deviation has a place of its own: twenty variants of one program are not twenty independent witnesses. The
standard deviations of users and families have a lognormal prior and are averaged over their marginal likelihood on a
grid. Users far off the rest count less, as under Student's t (Lange, Little, and Taylor, 1989, Robust Statistical
Modeling Using the t Distribution).

The speed of one family on each type, from all evidence, is a Gaussian posterior of logarithms. Let x be the log speeds
of a family on the site's GPU types. Before its own runs, x has the mean of the specifications plus what the site's
other families showed on top of them (effect), and the covariance of both. A completed run on type r says a - x[r], an
achieved rate says c + x[r]; the levels a and c are free, so no unit matters. All is linear, so the posterior is exact:
a Bayesian linear model (Gelman et al., Bayesian Data Analysis, 3rd ed., chapter 14).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from advisor.types.runs import FamilyKey, FamilyRuns, GpuTypes, RunProfile, log_speeds

Floats = npt.NDArray[np.float64]
CLASSES = ("compute", "memory", "")
"""Roofline classes; "" for families whose class is unknown."""
SITE, OF_CLASS, UNKNOWN_HARDWARE = 0.3, 0.15, 1.0
"""Standard deviations of ln speed before any run: of a site's type against its specifications, of a class on top of it,
and of a type without known specifications. Own choice, by Gavel's table: V100 to P100 and K80 differ from their
specifications by a median of 0.27 and 0.42."""
OF_USER, OF_FAMILY, WIDTH = 0.3, 0.2, 0.5
"""Medians and log-width of what is assumed of the deviation of users and families, before any was seen (own choice)."""
_GRID = np.geomspace(0.06, 1.0, 7)
_TAILS, _ROUNDS = 4.0, 4
"""Degrees of freedom of users' deviations, and rounds of weighing them."""


@dataclass(frozen=True)
class Effect:
    """(types,) mean and (types, types) covariance of log speeds on top of the specifications."""

    mean: Floats
    covariance: Floats


@dataclass(frozen=True)
class Effects:
    """Effects by class of work (CLASSES); standard deviations of users about them, and of a user's families."""

    by_class: dict[str, Effect]
    of_user: float
    of_family: float


@dataclass(frozen=True)
class Information:
    """The information of rows (families, users) on log speeds: (rows, types, types) matrices, (rows, types) vectors.

    score: (rows,) log likelihood so far, up to a constant.
    """

    matrix: Floats
    vector: Floats
    score: Floats

    def without(self, variance: Floats) -> Information:
        """Each row's own deviation, of this (rows,) variance, is integrated out."""
        eye, each = np.eye(self.matrix.shape[1]), variance[:, None, None]
        inner = np.linalg.inv(self.matrix + eye / each)
        left = eye - self.matrix @ inner
        vector = (left @ self.vector[:, :, None])[:, :, 0]
        squares = np.sum(self.vector * (inner @ self.vector[:, :, None])[:, :, 0], axis=1)
        logs = np.linalg.slogdet(eye + each * self.matrix)[1]
        return Information(left @ self.matrix, vector, self.score + (squares - logs) / 2)

    def sums(self, groups: npt.NDArray[np.int64], number: int) -> Information:
        """Rows of one group added up."""
        size = self.matrix.shape[1]
        found = Information(np.zeros((number, size, size)), np.zeros((number, size)), np.zeros(number))
        for whole, part in ((found.matrix, self.matrix), (found.vector, self.vector), (found.score, self.score)):
            np.add.at(whole, groups, part)
        return found


def learn_effects(
    seen: Sequence[tuple[Floats, Floats]], users: Sequence[str], classes: Sequence[str], known: npt.NDArray[np.bool_]
) -> Effects:
    """Learn how log speeds of GPU types differ from the specified ones; without families, return the assumptions alone.

    seen: of each family, information (matrix, vector) of its log speeds minus the specified ones. known: (types,)
    whether a type has specifications.
    """
    size = len(known)
    prior = np.concatenate([np.where(known, SITE, UNKNOWN_HARDWARE), np.full(size * len(CLASSES), OF_CLASS)]) ** 2
    rows = Information(
        np.array([matrix for matrix, _ in seen]).reshape(-1, size, size),
        np.array([vector for _, vector in seen]).reshape(-1, size),
        np.zeros(len(seen)),
    )
    # A user's families of one class are one group: the user's deviation is of the class, too.
    names = sorted({*zip(users, classes, strict=True)})
    groups = np.array([names.index(each) for each in zip(users, classes, strict=True)], dtype=np.int64)
    places = np.array([CLASSES.index(name) if name in CLASSES else 2 for _, name in names], dtype=np.int64)
    of_family, of_user = _usual_deviations(rows, groups, places, prior)
    told = rows.without(np.full(len(seen), of_family**2)).sums(groups, len(names))
    weights, picks = np.ones(len(names)), _picks(size)
    for _ in range(_ROUNDS):
        mean, covariance, _ = _solved(told.without(of_user**2 / weights), places, prior)
        weights = _weights(told, np.array([pick @ mean for pick in picks])[places], of_user)
    by_class = {
        name: Effect(pick @ mean, pick @ covariance @ pick.T) for name, pick in zip(CLASSES, picks, strict=True)
    }
    return Effects(by_class, of_user, of_family)


def of_one_user(effect: Effect, of_user: float, seen: Sequence[tuple[Floats, Floats]], variances: Floats) -> Effect:
    """The effect for one user whose families say this, with their deviation; of_user: the usual one.

    seen: as in learn_effects. variances: (families,) of each family about the user.
    """
    size = len(effect.mean)
    covariance = effect.covariance + of_user**2 * np.eye(size)
    if not len(seen):
        return Effect(effect.mean, covariance)
    matrix, vector = np.array([each for each, _ in seen]), np.array([each for _, each in seen])
    told = Information(matrix, vector, np.zeros(len(seen))).without(variances)
    precise = told.matrix.sum(axis=0)
    gain = np.linalg.solve(np.eye(size) + precise @ covariance, np.eye(size))
    mean = effect.mean + covariance @ gain @ (told.vector.sum(axis=0) - precise @ effect.mean)
    narrowed = covariance @ gain
    return Effect(mean, (narrowed + narrowed.T) / 2)


def _usual_deviations(
    rows: Information, groups: npt.NDArray[np.int64], places: npt.NDArray[np.int64], prior: Floats
) -> tuple[float, float]:
    """Standard deviations of (families, users), averaged over the grid."""
    squares, scores = [], []
    for of_family, of_user in product(_GRID, _GRID):
        score = -(math.log(of_family / OF_FAMILY) ** 2 + math.log(of_user / OF_USER) ** 2) / (2 * WIDTH**2)
        if len(rows.score):
            if of_user == _GRID[0]:
                told = rows.without(np.full(len(rows.score), of_family**2)).sums(groups, len(places))
            score += _solved(told.without(np.full(len(places), of_user**2)), places, prior)[2]
        scores.append(score)
        squares.append((of_family**2, of_user**2))
    shares = np.exp(np.array(scores) - max(scores))
    families, users = np.sqrt(shares / shares.sum() @ np.array(squares))
    return float(families), float(users)


def _solved(told: Information, places: npt.NDArray[np.int64], prior: Floats) -> tuple[Floats, Floats, float]:
    """(mean, covariance, log likelihood) of the effects of the site and of each class, one after the other."""
    total, right = np.diag(1 / prior), np.zeros(len(prior))
    for place, pick in enumerate(_picks(told.matrix.shape[1])):
        mine = places == place
        total += pick.T @ told.matrix[mine].sum(axis=0) @ pick
        right += pick.T @ told.vector[mine].sum(axis=0)
    covariance: Floats = np.asarray(np.linalg.inv(total), dtype=np.float64)
    mean: Floats = covariance @ right
    score = float(told.score.sum() + (right @ mean - np.linalg.slogdet(total)[1]) / 2)
    return mean, covariance, score


def _weights(told: Information, means: Floats, of_user: float) -> Floats:
    """(groups,) less than 1 for those whose deviation from the mean is far beyond the usual."""
    size = means.shape[1]
    away = told.vector - (told.matrix @ means[:, :, None])[:, :, 0]
    inner = np.linalg.inv(told.matrix + np.eye(size) / of_user**2)
    deviation = (inner @ away[:, :, None])[:, :, 0]
    freedom = np.maximum(np.linalg.matrix_rank(told.matrix, hermitian=True), 1) if len(away) else np.zeros(0)
    found: Floats = (_TAILS + freedom) / (_TAILS + np.sum(deviation**2, axis=1) / of_user**2)
    return np.minimum(found, 1.0)


def _picks(size: int) -> list[Floats]:
    """By class the matrix that adds the site's effect and that of the class."""
    return [np.kron([1.0, *of_class], np.eye(size)) for of_class in np.eye(len(CLASSES))]


_SPREADS = ("of_user", "of_family", "spread", "rate_bias")
SPREAD, RATE_BIAS = 0.4, 0.2
"""Assumed standard deviations of ln run time within a family, and of a ratio of rates (own choice)."""
_WORTH = 4.0
"""An assumption counts as so many observations."""
MAX_FAMILIES = 1000
"""The newest families that count: enough, and bounds the time of a training."""


@dataclass(frozen=True)
class SpeedTable:
    """The learned speeds of a site's GPU types.

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
            **{name: getattr(self, name) for name in _SPREADS},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SpeedTable:
        """Rebuild a table from to_json's data. Raises KeyError, TypeError, or ValueError for other data."""
        names = tuple(map(str, data["names"]))
        effects = {
            str(name): Effect(
                np.array(mean, float).reshape(len(names)), np.array(cov, float).reshape(2 * (len(names),))
            )
            for name, (mean, cov) in data["effects"].items()
        }
        spreads = {name: float(data[name]) for name in _SPREADS}
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
    """The median over families with enough runs, shrunk to the assumed one."""
    found = [_deviations(runs.log_times()) for runs in families]
    own = [squares / freedom for squares, freedom in found if freedom >= 2]
    if not own:
        return SPREAD
    return math.sqrt(max((_WORTH * SPREAD**2 + len(own) * float(np.median(own))) / (_WORTH + len(own)), 1e-4))


def _rate_bias(families: Sequence[FamilyRuns], spread: float) -> float:
    """Return how far ratios of rates are from ratios of run times, for families with both on two types."""
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


OWN_BIAS = 0.05
"""Standard deviation of ln time by which runs on two types may differ in their work, however many there are."""
MEDIAN_FACTOR = math.pi / 2
"""Variance of a median over that of a mean, for many values; a median of one or two is a mean."""
_FREE = 1e3
"""Standard deviation of a level, which is unknown. Levels are taken from the middle of the values."""


@dataclass(frozen=True)
class Level:
    """Values of one measure with its own free level, by type.

    sign: -1 for times, 1 for rates. spread: of one run about its type's usual value. bias: of a type's value, however
    many runs it has. Standard deviations of logarithms.
    """

    values: Mapping[str, Sequence[float]]
    sign: int
    spread: float
    bias: float

    def observed(self, types: Sequence[str]) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
        """Return (places in types, medians, variances) of the types with values."""
        held = [(place, self.values[name]) for place, name in enumerate(types) if self.values.get(name)]
        places = np.array([place for place, _ in held], dtype=np.int64)
        medians = np.array([float(np.median(values)) for _, values in held])
        numbers = np.array([len(values) for _, values in held])
        return places, medians, self.bias**2 + np.where(numbers > 2, MEDIAN_FACTOR, 1.0) * self.spread**2 / numbers


def posterior(
    types: Sequence[str], prior: Floats, covariance: Floats, levels: Sequence[Level]
) -> tuple[Floats, Floats] | None:
    """(types,) means and standard deviations of the logarithm of the run time; its level is that of the first measure.

    None unless the first of the levels, the family's own run times, has a value.
    """
    observed = [level.observed(types) for level in levels]
    if not observed or not len(observed[0][0]):
        return None
    used = [(level, each) for level, each in zip(levels, observed, strict=True) if len(each[0])]
    number, size = len(types), len(types) + len(used)
    middles = [float(np.median(medians - level.sign * prior[places])) for level, (places, medians, _) in used]
    mean = np.concatenate([prior, middles])
    matrix = np.zeros((size, size))
    matrix[:number, :number] = covariance
    matrix[range(number, size), range(number, size)] = _FREE**2
    rows, values, variances = [], [], []
    for place, (level, (places, medians, own)) in enumerate(used):
        design = np.zeros((len(places), size))
        design[range(len(places)), places] = level.sign
        design[:, number + place] = 1.0
        rows.append(design)
        values.append(medians)
        variances.append(own)
    design, seen = np.concatenate(rows), np.concatenate(values)
    gain = np.linalg.solve(design @ matrix @ design.T + np.diag(np.concatenate(variances)), design @ matrix)
    mean = mean + gain.T @ (seen - design @ mean)
    left = matrix - gain.T @ design @ matrix
    times = np.hstack([-np.eye(number), np.zeros((number, len(used)))])
    times[:, number] = 1.0
    return times @ mean, np.sqrt(np.maximum(np.diag(times @ left @ times.T), 0.0))
