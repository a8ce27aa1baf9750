"""The sizes that a GPU of one model can be cut into, and how long a job runs on each. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from advisor.mig.states import DEFAULT_SHAPES, partition_states
from almanac.mig import MigModel

WHOLE = "gpu"
"""The shape of a GPU with MIG off."""
Counts = tuple[int, ...]
"""Instances of each size, from the smallest size up."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of one model, from the smallest up: each holds every job of a smaller one. The last one is WHOLE.

    compute: compute slices of each size. layouts: instances of each GPU layout that nothing can be added to.
    """

    shapes: tuple[str, ...]
    compute: tuple[int, ...]
    layouts: tuple[Counts, ...]

    def index(self, shape: str) -> int | None:
        """The place of a shape; None where it is none of these sizes."""
        return self.shapes.index(shape) if shape in self.shapes else None

    def counts(self, gpus: Iterable[Sequence[str]]) -> Counts | None:
        """Instances of each size on several GPUs; None where one has a shape that is none of these sizes."""
        found = [0] * len(self.shapes)
        for layout in gpus:
            for shape in layout:
                if shape not in self.shapes:
                    return None
                found[self.shapes.index(shape)] += 1
        return tuple(found)

    def gpu_layout(self, counts: Counts) -> tuple[str, ...]:
        """The sorted shapes of one GPU."""
        return tuple(sorted(shape for shape, count in zip(self.shapes, counts, strict=True) for _ in range(count)))

    def run_times(self, full_s: float, compute: float) -> tuple[float, ...]:
        """Seconds on each size, of a job that takes full_s on a full GPU and keeps `compute` slices busy.

        full_s x max(1, compute / slices), as in the paper's mixes (design/mig.md, Ml2).
        """
        return tuple(full_s * max(1.0, compute / slices) for slices in self.compute)


@cache
def sizes_of(model: MigModel) -> Sizes:
    """The default sizes of a model, with the whole GPU without MIG in place of its largest profile."""
    states = partition_states(model, DEFAULT_SHAPES)
    compute = {each.shape: each.compute for each in model.profiles}
    shapes = [shape for shape in states.shapes if shape != model.whole.shape]
    keep = [states.shapes.index(shape) for shape in shapes]
    whole = states.shapes.index(model.whole.shape)
    layouts = [(*(counts[place] for place in keep), counts[whole]) for counts in states.final_layouts]
    return Sizes((*shapes, WHOLE), (*(compute[shape] for shape in shapes), model.whole.compute), tuple(sorted(layouts)))
