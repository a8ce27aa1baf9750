"""Common parts of the Slurms in memory of the node hooks: places for kills and changes, and a record to check."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from slurm.hostlist import expand
from slurm_hooks.orders import JsonLines


class KilledError(BaseException):
    """SIGKILL: nothing catches it."""


class BrokenPromiseError(AssertionError):
    """A thing that must never happen."""


@dataclass(kw_only=True)
class Watched:
    """kill_at: number of the point at which the run is killed. record: of the orders; None: they are not looked for.

    change_at: number of the look before which `change` is called. told: looks so far and node of each order.
    """

    kill_at: int | None = None
    points: int = 0
    record: JsonLines | None = None
    change_at: int = 0
    looks: int = 0
    change: Callable[[], object] = bool
    told: list[tuple[int, str]] = field(default_factory=list)

    def point(self) -> None:
        """A place where the process can be killed."""
        self.points += 1
        if self.kill_at is not None and self.points >= self.kill_at:
            raise KilledError

    def kill_after(self, points: int | None) -> None:
        """Kill the run after so many more points; None: never."""
        self.kill_at = None if points is None else self.points + points + 1

    def look(self) -> None:
        """A question to Slurm."""
        self.looks += 1
        if self.looks == self.change_at:
            self.change()

    def ordered(self, names: Collection[str], *words: str) -> None:
        """An order about nodes arrives; () is about all.

        Raises BrokenPromiseError unless the newest line of the record about each node is one of these words.
        """
        self.told += [(self.looks, name) for name in names or ("",)]
        if self.record is None:
            return
        rows = list(self.record.read(0, 2**33))
        for name in names or ("",):
            own = [row["what"] for row in rows if not name or (row["nodes"] and name in expand(row["nodes"]))]
            if not own or own[-1] not in words:
                raise BrokenPromiseError(f"{words} of {name or 'all'} is not recorded: {own[-1:]}")
