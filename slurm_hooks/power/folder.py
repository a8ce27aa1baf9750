"""The folder `power/` of a store: what runs remember, what they did, who holds them, and the lock between them."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from almanac.errors import StoreError
from almanac.plain_file import read_json
from almanac.units import printable
from slurm_hooks.json_lines import JsonLines
from slurm_hooks.power import memory
from slurm_hooks.power.memory import PowerState
from telemetry.store.atomic import locked, make_inner_folder, write_atomically, writing

MAX_HOLD_BYTES = 4096


@dataclass(frozen=True)
class PowerFolder:
    """`root` need not be there yet."""

    root: Path

    @property
    def log(self) -> JsonLines:
        return JsonLines(self.root, "actions-")

    @property
    def _hold(self) -> Path:
        return self.root / "hold"

    def load(self, cluster: str) -> PowerState:
        """Raises StoreError where what is there cannot be believed or understood."""
        return memory.load(self.root / "state.json", cluster)

    def load_or_fault(self, cluster: str) -> tuple[PowerState, str]:
        """The state and "", or an empty state and what is wrong with the file."""
        try:
            return self.load(cluster), ""
        except StoreError as error:
            return PowerState(cluster=cluster), f"{error}; {error.hint}"

    def save(self, content: PowerState) -> None:
        """Raises StoreError."""
        memory.save(self.root / "state.json", content)

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Raises BusyError where another run is under way, StoreError where the folder cannot be written."""
        self._make()
        return locked(self.root / "lock", "is powering nodes")

    def hold_reason(self) -> str:
        """Why an operator holds the nodes; "" where nobody does. Whatever lies there holds, readable or not."""
        if not os.path.lexists(self._hold):
            return ""
        try:
            content = read_json(self._hold, MAX_HOLD_BYTES, os.O_NOFOLLOW)
            return printable(f"hold by {content['by']}: {content['why']}", 200)
        except (OSError, ValueError, KeyError, TypeError):
            return "hold"

    def hold(self, by: str, why: str, now_s: int) -> None:
        """Power nothing down until `release`. Raises StoreError."""
        self._make()
        row = {"by": by[:200], "why": why[:500], "since_s": now_s}
        with writing(self._hold):
            write_atomically(self._hold, json.dumps(row).encode(), is_handed_over=True)

    def release(self) -> bool:
        """Whether there was a hold. Raises StoreError."""
        is_held = os.path.lexists(self._hold)
        with writing(self._hold):
            self._hold.unlink(missing_ok=True)
        return is_held

    def _make(self) -> None:
        try:
            make_inner_folder(self.root)
        except OSError as error:
            raise StoreError(
                f"{self.root}: cannot be created: {error.strerror}", "run this as the store's owner"
            ) from error
