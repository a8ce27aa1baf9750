"""Jobs whose speed depends on the GPU type, and the GPUs of each type."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from advisor.decisions.placement import Floats, Ints
from almanac.errors import RequestError
from simulator.traces.gavel import read_gavel_rates


@dataclass(frozen=True)
class PlacementProblem:
    """Rows are jobs in the order of submission, columns are GPU types.

    work: (jobs,) in units of the job's own, such as iterations. rates: (jobs, types) of the whole gang on GPUs of one
    type, units/s; 0 where it cannot run. capacity: (types,) GPUs. kinds: (jobs,) job type.
    """

    types: tuple[str, ...]
    capacity: Ints
    submit_s: Floats
    gpus: Ints
    work: Floats
    rates: Floats
    kinds: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.gpus)

    @property
    def best_s(self) -> Floats:
        """(jobs,) run time on the fastest type."""
        best: Floats = self.work / self.rates.max(axis=1)
        return best


def gavel_problem(path: Path, throughputs: Path, capacity: dict[str, int]) -> PlacementProblem:
    """A trace of Gavel on these GPUs. Jobs that no type can run are left out.

    Raises FileFormatError for files that cannot be used, and RequestError where no job is left.
    """
    table, _ = read_gavel_rates(path, throughputs, tuple(capacity))
    sizes = np.array(list(capacity.values()), dtype=np.int64)
    rates = np.array(table["rates"].to_list(), dtype=float).reshape(len(table), len(capacity))
    gpus = table["gpu_count"].to_numpy("int64")
    fits = ((rates > 0) & (gpus[:, None] <= sizes[None, :])).any(axis=1)
    if not fits.any():
        raise RequestError(f"{path}: no job can run on {capacity}", "check --gpu-types and the file of throughputs")
    kept = table[fits].reset_index(drop=True)
    return PlacementProblem(
        types=tuple(capacity),
        capacity=sizes,
        submit_s=kept["submit_s"].to_numpy(float),
        gpus=gpus[fits],
        work=kept["steps"].to_numpy(float),
        rates=np.where(gpus[fits, None] <= sizes[None, :], rates[fits], 0.0),
        kinds=tuple(kept["kind"]),
    )
