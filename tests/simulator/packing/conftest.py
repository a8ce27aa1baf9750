"""Generated tables of pairs."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest

from simulator.traces.packing import PairTable, read_pairs


@pytest.fixture
def make_table(tmp_path: Path) -> Callable[..., PairTable]:
    """A table of random pairs of jobs of 1, 2, 4, and 8 GPUs; one in twenty does not fit."""

    def make(seed: int = 0, kinds: int = 8) -> PairTable:
        rng = np.random.default_rng(seed)
        table: dict[str, dict[str, object]] = {}
        for gpus in (1, 2, 4, 8):
            names = [f"('kind {number}', {gpus})" for number in range(kinds)]
            rates, used = rng.uniform(1, 50, kinds), rng.uniform(0.2, 0.9, kinds)
            table.update({name: {"null": rate} for name, rate in zip(names, rates, strict=True)})
            for one, other in combinations_with_replacement(range(kinds), 2):
                speeds = np.minimum(1.0, rng.uniform(0.7, 1.1, 2) / (used[one] + used[other]))
                speeds *= rng.random() > 0.05
                table[names[one]][names[other]] = [float(rates[one] * speeds[0]), float(rates[other] * speeds[1])]
        path = tmp_path / "pairs.json"
        path.write_text(json.dumps({"gpu": table}))
        return read_pairs(path, "gpu")

    return make
