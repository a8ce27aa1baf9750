"""One GPU of the job: the tasks on it, its MPS daemon, and what failed on it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from slurm_hooks.pack import faults
from slurm_hooks.pack.items import Item
from slurm_hooks.pack.mps import Mps
from slurm_hooks.pack.task import Running, Slot


@dataclass(frozen=True)
class Failed:
    """A client of MPS that ended with a code other than 0."""

    item: Item
    failure: faults.Failure
    ended_s: float


@dataclass
class Gpu:
    """mps: None: tasks share by time-slicing. alone: tasks to run again with nothing beside them."""

    name: str
    slots: Sequence[Slot]
    mps: Mps | None = None
    running: dict[int, Running] = field(default_factory=dict)
    alone: deque[Item] = field(default_factory=deque)
    is_alone: bool = False
    failed: list[Failed] = field(default_factory=list)
    has_lost_mps: bool = False
    _log_offsets: dict[str, int] = field(default_factory=dict)

    def free_slots(self) -> list[Slot]:
        """Where the next tasks of the list can start."""
        if self.is_alone or self.alone or any(faults.names_fault(each.failure.text) for each in self.failed):
            return []
        return [slot for slot in self.slots if slot.number not in self.running]

    def next_alone(self) -> Item | None:
        return self.alone.popleft() if self.alone and not self.running else None

    def note_failure(self, run: Running, text: str) -> None:
        self.failed.append(Failed(run.item, faults.Failure(text, frozenset(run.pids)), time.monotonic()))

    def innocent(self) -> tuple[list[Item], str]:
        """Tasks that a common fault ended without their doing, and why; [] while that cannot be known yet."""
        if not self.failed:
            return [], ""
        first_s = self.failed[0].ended_s
        if self.running and time.monotonic() - first_s < faults.TOGETHER_S:
            return [], ""
        group = [each for each in self.failed if each.ended_s - first_s <= faults.TOGETHER_S]
        self.failed = self.failed[len(group) :]
        log = self.mps.new_log(self._log_offsets) if self.mps else ""
        is_lost = self.has_lost_mps or (self.mps is not None and not self.mps.is_alive())
        found, why = faults.innocent([each.failure for each in group], log, is_lost)
        return [group[number].item for number in found], why
