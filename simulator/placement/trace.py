"""Jobs to place, from a trace of Gavel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from almanac.errors import FileFormatError, RequestError
from almanac.units import DAY_S
from simulator.placement.problem import PlacementProblem
from simulator.traces.gavel import read_gavel_rates

NOT_GAVEL = "not a line of Gavel's fields"
LONGEST_S = 366 * DAY_S
"""Run time on the fastest type. A longer job is a fault of the trace, and its rounds would take hours."""
SHORTEST_S = 1e-3
LAST_S = 100 * LONGEST_S
"""Latest submission."""


def read_problem(
    path: Path, throughputs: Path, capacity: Mapping[str, int]
) -> tuple[PlacementProblem, Mapping[str, int]]:
    """The jobs of a trace on GPUs of these types, and reason to number of lines that are left out.

    capacity: type to GPUs; a gang runs on one type. Raises FileFormatError for files that cannot be used, and
    RequestError where no job is left.
    """
    table, lines = read_gavel_rates(path, throughputs, tuple(capacity))
    left_out: Counter[str] = Counter(lines)
    if not len(table) and set(left_out) <= {NOT_GAVEL}:
        raise FileFormatError(f"{path}: has no line of a trace of Gavel", "give a file of 7 or 10 fields with tabs")
    sizes = np.array(list(capacity.values()), dtype=np.int64)
    rates = np.array(table["rates"].to_list(), dtype=float).reshape(len(table), len(capacity))
    gpus = table["gpu_count"].to_numpy(float)
    work, submit_s = table["steps"].to_numpy(float), table["submit_s"].to_numpy(float)
    rates = np.where(gpus[:, None] <= sizes[None, :], rates, 0.0)
    fits = (rates > 0).any(axis=1)
    with np.errstate(all="ignore"):
        best_s = np.where(fits, work / rates.max(axis=1, initial=0.0), 1.0)
    is_sound = np.isfinite(work) & (work > 0) & (submit_s >= 0) & (submit_s <= LAST_S) & (gpus == np.floor(gpus))
    is_sound &= (best_s >= SHORTEST_S) & (best_s <= LONGEST_S)
    left_out["with an impossible number of steps or GPUs, or time"] += int((~is_sound).sum())
    left_out["whose GPUs no type has"] += int((is_sound & ~fits).sum())
    kept = np.flatnonzero(is_sound & fits)
    left_out = +left_out
    if not len(kept):
        said = "; ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise RequestError(f"{path}: no job can run on these GPU types ({said})", "check the GPU types and throughputs")
    problem = PlacementProblem(
        types=tuple(capacity),
        capacity=sizes,
        submit_s=submit_s[kept],
        gpus=gpus[kept].astype(np.int64),
        work=work[kept],
        rates=rates[kept],
        kinds=tuple(table["kind"].iloc[kept]),
    )
    return problem, dict(left_out)
