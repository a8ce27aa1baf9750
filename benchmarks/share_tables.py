"""Random tables of throughput over two jobs' GPU shares, to measure the search of `advisor/decisions/pack_shares`.

Every table is (10, 10): rows are the first job's shares 10 to 100%, columns the second's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Table = np.ndarray
Curve = Callable[[Table, Table], Table]
"""Throughput of a job by its own share and the other's, both fractions."""
_SHARES = np.arange(1, 11) / 10
_OWN, _OTHER = np.meshgrid(_SHARES, _SHARES, indexing="ij")


def _saturating(rng: np.random.Generator) -> Curve:
    rate, loss = rng.uniform(0.8, 8), rng.uniform(0, 0.7)
    return lambda own, other: -np.expm1(-rate * own) * (1 - loss * other)


def _power(rng: np.random.Generator) -> Curve:
    exponent, loss, bend = rng.uniform(0.1, 1), rng.uniform(0, 0.8), rng.uniform(0.5, 2)
    return lambda own, other: own**exponent * (1 - loss * other**bend)


def _amdahl(rng: np.random.Generator) -> Curve:
    parallel, loss = rng.uniform(0.3, 0.99), rng.uniform(0, 2)
    return lambda own, other: 1 / ((1 - parallel) + parallel / own + loss * other)


def _bilinear(rng: np.random.Generator) -> Curve:
    base, loss = rng.uniform(0, 0.5), rng.uniform(0, 0.9)
    return lambda own, other: (base + (1 - base) * own) * (1 - loss * other)


def _knee(rng: np.random.Generator) -> Curve:
    knee, loss = rng.uniform(0.1, 1), rng.uniform(0, 0.8)
    return lambda own, other: np.minimum(own / knee, 1) * (1 - loss * other)


def _contended(rng: np.random.Generator) -> Curve:
    """Shares beyond 100% in sum are divided in proportion."""
    rate, loss = rng.uniform(1, 6), rng.uniform(0, 0.5)
    return lambda own, other: -np.expm1(-rate * own / np.maximum(1, own + other) * (1 - loss * other))


def _random_steps(rng: np.random.Generator) -> Curve:
    """Random gains, each less than the one before; random losses, in growing or in falling order."""
    gains = np.cumsum(np.sort(rng.uniform(0, 1, 10))[::-1])
    losses = np.sort(rng.uniform(0, 1, 10))[:: rng.choice([-1, 1])]
    losses = 1 - np.cumsum(losses) / losses.sum() * rng.uniform(0, 0.8)
    return lambda own, other: gains[_index(own)] * losses[_index(other)]


def _index(share: Table) -> Table:
    found: Table = np.rint(share * 10).astype(int) - 1
    return found


CONCAVE: dict[str, Callable[[np.random.Generator], Curve]] = {
    "saturating": _saturating,
    "power": _power,
    "Amdahl": _amdahl,
    "bilinear": _bilinear,
    "knee": _knee,
    "contended": _contended,
    "random steps": _random_steps,
}
"""Throughput grows in the own share, ever less, and falls in the other's."""


def _planes(rng: np.random.Generator) -> Curve:
    """The least of six planes: concave in both shares together, so each job's best share depends on the other's."""
    own_slopes, other_slopes = rng.uniform(-0.2, 0.2, 6) + rng.uniform(0, 0.6, 6), rng.uniform(-0.2, 0.2, 6)
    heights = rng.uniform(0.2, 1, 6)

    def curve(own: Table, other: Table) -> Table:
        planes = [h + a * own + b * other for h, a, b in zip(heights, own_slopes, other_slopes, strict=True)]
        found: Table = np.maximum(0.01, np.minimum.reduce(planes))
        return found

    return curve


JOINTLY_CONCAVE = {"planes": _planes}


def concave_tables(kind: str, rng: np.random.Generator) -> tuple[Table, Table]:
    """Steps per second of two jobs of one kind of curve, each with its own parameters."""
    kinds = {**CONCAVE, **JOINTLY_CONCAVE}
    first, second = kinds[kind](rng), kinds[kind](rng)
    scale = rng.uniform(1, 100, 2)
    return first(_OWN, _OTHER) * scale[0], second(_OTHER, _OWN) * scale[1]


def _distances(rng: np.random.Generator) -> Table:
    """Linear in the distance from the peak, each axis with its own slope."""
    first, second = (abs(np.arange(10) - rng.integers(10)) * rng.uniform(0.1, 3) for _ in range(2))
    return -(first[:, None] + second[None, :])


def _bell(rng: np.random.Generator) -> Table:
    """The peak lies between the shares, so that no two of them tie: the search learns nothing from a tie."""
    peaks = rng.integers(10, size=2) + rng.uniform(-0.4, 0.4, 2)
    first, second = (((np.arange(10) - peak) / rng.uniform(1.5, 6)) ** 2 for peak in peaks)
    found: Table = np.exp(-first[:, None] - second[None, :])
    return found


def _uneven_sum(rng: np.random.Generator) -> Table:
    found: Table = _uneven(rng)[:, None] + _uneven(rng)[None, :]
    return found


def _uneven_product(rng: np.random.Generator) -> Table:
    first, second = (line - line.min() + rng.uniform(0.1, 3) for line in (_uneven(rng), _uneven(rng)))
    found: Table = first[:, None] * second[None, :]
    return found


def _uneven(rng: np.random.Generator) -> Table:
    """Ten values with one peak and random steps down from it."""
    peak, line = rng.integers(10), np.zeros(10)
    line[peak + 1 :] = -np.cumsum(rng.uniform(0.05, 1, 9 - peak))
    line[:peak] = -np.cumsum(rng.uniform(0.05, 1, peak))[::-1]
    return line


def _ordered(rng: np.random.Generator) -> Table:
    """Random values, sorted by the distance from the peak in steps along the axes; equal distances in random order."""
    rows, columns = (abs(np.arange(10) - rng.integers(10)) for _ in range(2))
    order = np.argsort((rows[:, None] + columns[None, :]).ravel() + rng.uniform(0, 0.9, 100))
    found = np.empty(100)
    found[order] = np.sort(rng.uniform(1, 100, 100))[::-1]
    return found.reshape(10, 10)


def _tilted(rng: np.random.Generator) -> Table:
    """A parabola with its axes at any angle: one peak, but the best share of one job depends on the other's."""
    angle, ratio = rng.uniform(0, np.pi), rng.uniform(1, 4)
    rows, columns = (np.arange(10)[:, None] - rng.integers(10)), (np.arange(10)[None, :] - rng.integers(10))
    along = np.cos(angle) * rows + np.sin(angle) * columns
    across = -np.sin(angle) * rows + np.cos(angle) * columns
    found: Table = -(along**2 + ratio * across**2)
    return found


def _ridge(rng: np.random.Generator) -> Table:
    """The same with a ridge of any steepness, and a peak that may lie between the shares."""
    matrix = rng.normal(size=(2, 2))
    curvature = matrix @ matrix.T + 0.05 * np.eye(2)
    away = 10 * (np.stack([_OWN, _OTHER], axis=-1) - rng.uniform(0.1, 1, 2))
    found: Table = -np.einsum("ijk,kl,ijl->ij", away, curvature, away)
    return found


SINGLE_PEAK: dict[str, Callable[[np.random.Generator], Table]] = {
    "distances": _distances,
    "bell": _bell,
    "uneven sum": _uneven_sum,
    "uneven product": _uneven_product,
    "ordered": _ordered,
}
"""Values fall strictly on every path along the axes away from the peak."""
TILTED = {"tilted": _tilted, "ridge": _ridge}


def peaked_table(kind: str, rng: np.random.Generator) -> Table:
    """Values above zero, the larger the better, with one best pair of shares."""
    found = ({**SINGLE_PEAK, **TILTED})[kind](rng)
    raised: Table = found - found.min() + rng.uniform(0.1, 10)
    return raised
