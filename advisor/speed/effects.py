"""How fast a site's types are on top of their specifications, from all families: an empirical-Bayes estimate. Pure.

Log speeds on top of the specifications are site[r] + class[k, r] + user[u, r] + family[f, r], all normal with mean 0.
The families of one user are alike, so the user's deviation has a place of its own: twenty variants of one program are
not twenty independent witnesses. The standard deviations of users and families have a lognormal prior and are averaged
over their marginal likelihood on a grid. Users far off the rest count less, as under Student's t (Lange, Little, and
Taylor, 1989, Robust Statistical Modeling Using the t Distribution).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

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
    """by_class: of CLASSES. of_user, of_family: standard deviations of users about it, and of a user's families."""

    by_class: dict[str, Effect]
    of_user: float
    of_family: float


@dataclass(frozen=True)
class Information:
    """What rows (families, users) say of their log speeds: (rows, types, types) matrices, (rows, types) vectors.

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
    """seen: of each family, information (matrix, vector) of its log speeds minus the specified ones.

    known: (types,) whether a type has specifications. Without families, the assumptions alone.
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
    of_family, of_user = _deviations(rows, groups, places, prior)
    told = rows.without(np.full(len(seen), of_family**2)).sums(groups, len(names))
    weights = np.ones(len(names))
    for _ in range(_ROUNDS):
        mean, covariance, _ = _solved(told.without(of_user**2 / weights), places, prior)
        weights = _weights(told, _by_place(mean, size)[places], of_user)
    picks = _picks(size)
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


def _deviations(
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


def _by_place(mean: Floats, size: int) -> Floats:
    return np.array([pick @ mean for pick in _picks(size)]).reshape(len(CLASSES), size)


def _picks(size: int) -> list[Floats]:
    """By class the matrix that adds the site's effect and that of the class."""
    found = []
    for place in range(len(CLASSES)):
        pick = np.zeros((size, size * (1 + len(CLASSES))))
        pick[:, :size] = np.eye(size)
        pick[:, size * (1 + place) : size * (2 + place)] = np.eye(size)
        found.append(pick)
    return found
