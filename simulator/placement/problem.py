"""Jobs whose speed depends on the GPU type, and the GPUs of each type."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.decisions.placement import Floats, Ints


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
