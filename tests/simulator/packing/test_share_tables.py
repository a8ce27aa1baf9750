"""The random tables of throughput that measure the search for GPU shares have the shapes that they claim."""

import numpy as np
import pytest
from packing_search import JOINTLY_CONCAVE, concave_tables, peaked_table


def bends(table: np.ndarray) -> list[np.ndarray]:
    """Second differences along both axes and both diagonals: none is above zero where a table is concave."""
    ahead, middle, behind = table[2:], table[1:-1], table[:-2]
    across = [behind[:, 1:-1], behind[:, 2:], behind[:, :-2]]
    beyond = [ahead[:, 1:-1], ahead[:, :-2], ahead[:, 2:]]
    found = [one + other - 2 * middle[:, 1:-1] for one, other in zip(across, beyond, strict=True)]
    return [*found, table[:, 2:] + table[:, :-2] - 2 * table[:, 1:-1]]


@pytest.mark.parametrize("kind", JOINTLY_CONCAVE)
def test_throughput_is_concave_in_both_shares_together(kind):
    rng = np.random.default_rng(7)
    tables = [table for _ in range(50) for table in concave_tables(kind, rng)]
    assert min(table.min() for table in tables) > 0
    without_floor = [table for table in tables if (table == table.min()).sum() == 1]
    assert len(without_floor) > 50
    assert all(bend.max() <= 1e-9 * table.max() for table in without_floor for bend in bends(table))


def test_a_ridge_is_concave_and_above_zero():
    rng = np.random.default_rng(7)
    for _ in range(50):
        table = peaked_table("ridge", rng)
        assert table.min() > 0
        assert max(bend.max() for bend in bends(table)) <= 1e-9 * table.max()
