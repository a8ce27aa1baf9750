"""Orders nodes to change: the record first, then the state on disk, then a last look at Slurm, then the order.

Which nodes to change, and how, is decided by planners (slurm_hooks/power/planning.py, slurm_hooks/mig/steps.py). A run
that is killed leaves nothing half done that the next one would not see in Slurm or in the state.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from msgspec import Meta, ValidationError, convert

from almanac import __version__
from almanac.atomic import locked, make_inner_folder, write_atomically, writing
from almanac.errors import StoreError
from almanac.files import parse_json, read_json, with_checksum
from almanac.units import DAY_S, printable
from slurm.backend import NodeState, SlurmBackend
from slurm.hostlist import fold
from slurm.nodes import SlurmNode
from slurm_hooks.orders import Facts, JsonLines, must_still_hold, node_facts
from telemetry.sources.prolog_record import BadRecordError, read_record

VERSION = 1
MAX_BYTES = 32 << 20
MAX_HOLD_BYTES = 4096
_OLD_NAMES = {"node": "nodes", "why": "reason"}
"""Fields of older records of layout changes, by today's names."""
Count = Annotated[int, Meta(ge=0, lt=2**53)]
"""A count, or a time in unix seconds."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class NodesState:
    """Everything that runs of one kind remember. DOING: the holder of the lock. HINT: about an unreadable file."""

    DOING: ClassVar[str] = ""
    HINT: ClassVar[str] = ""
    cluster: str = ""


S = TypeVar("S", bound=NodesState)


@dataclass(frozen=True)
class NodeFolder(Generic[S]):
    """A folder of the store, which need not be there yet: the record, the state, the hold, and the lock of one kind."""

    root: Path
    kind: type[S]

    @property
    def log(self) -> JsonLines:
        return JsonLines(self.root, "actions-")

    def rows(self, days: int, now_s: int) -> list[dict[str, Any]]:
        """Return the record of the last days, oldest first. Raises StoreError."""
        found = self.log.read(now_s - days * DAY_S, now_s)
        return [{_OLD_NAMES.get(name, name): value for name, value in row.items()} for row in found]

    def load(self, cluster: str) -> S:
        """Return the state; an empty one without a file.

        Raises StoreError for a file that others could have written, that is broken, or of another cluster.
        """
        path = self.root / "state.json"
        if not os.path.lexists(path):
            return self.kind(cluster=cluster)
        try:
            owners = frozenset({0, os.geteuid(), self.root.stat().st_uid})
            content = parse_json(read_record(path, owners, MAX_BYTES))
            if content["version"] != VERSION or not content.keys() >= {each.name for each in fields(self.kind)}:
                raise ValueError("of another version")
            found = convert(content, self.kind)
        except (BadRecordError, OSError, ValueError, TypeError, KeyError, AttributeError, ValidationError) as error:
            why = error if isinstance(error, BadRecordError) else "cannot be parsed"
            raise StoreError(f"{path}: {why}", self.kind.HINT) from error
        if found.cluster != cluster:
            raise StoreError(f"{path} is of cluster {found.cluster!r}, not {cluster!r}", "use one store per cluster")
        return found

    def load_or_fault(self, cluster: str) -> tuple[S, str]:
        """Return the state and "", or an empty state and what is wrong with the file."""
        try:
            return self.load(cluster), ""
        except StoreError as error:
            return self.kind(cluster=cluster), f"{error}; {error.hint}"

    def save(self, state: S) -> None:
        """Replace the state; it is on disk when this returns. Raises StoreError."""
        path, content = self.root / "state.json", {"version": VERSION, **asdict(state)}
        with writing(path):
            make_inner_folder(self.root)
            write_atomically(path, with_checksum(json.dumps(content, allow_nan=False)), is_handed_over=True)

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Lock the folder. Raises BusyError if another run is active, StoreError if the folder is not writable."""
        self._make()
        return locked(self.root / "lock", self.kind.DOING)

    def hold_reason(self) -> str:
        """Return why an operator holds the nodes, or "". Anything in the file's place holds, readable or not."""
        path = self.root / "hold"
        if not os.path.lexists(path):
            return ""
        try:
            content = read_json(path, MAX_HOLD_BYTES, os.O_NOFOLLOW)
            return printable(f"hold by {content['by']}: {content['why']}", 200)
        except (OSError, ValueError, KeyError, TypeError):
            return "hold"

    def hold(self, by: str, why: str, now_s: int) -> None:
        """Hold the nodes until `release`. Raises StoreError."""
        self._make()
        row = {"by": by[:200], "why": why[:500], "since_s": now_s}
        with writing(self.root / "hold"):
            write_atomically(self.root / "hold", json.dumps(row).encode(), is_handed_over=True)

    def release(self) -> bool:
        """End the hold. Returns False if there was none. Raises StoreError."""
        is_held = os.path.lexists(self.root / "hold")
        with writing(self.root / "hold"):
            (self.root / "hold").unlink(missing_ok=True)
        return is_held

    def _make(self) -> None:
        try:
            make_inner_folder(self.root)
        except OSError as error:
            raise StoreError(
                f"{self.root}: cannot be created: {error.strerror}", "run this as the store's owner"
            ) from error


@dataclass(frozen=True)
class NodeEngine(Generic[S]):
    """Records orders and sends them. clock: unix seconds. Raises CommandError where slurmctld does not answer."""

    folder: NodeFolder[S]
    backend: SlurmBackend
    cluster: str
    clock: Callable[[], float]

    def now_s(self) -> int:
        return int(self.clock())

    def row(self, what: str, nodes: Collection[str], reason: str, mode: str = "apply", **more: object) -> Row:
        """Return a line of the record. nodes: by name; () for an order about something else, which `more` names."""
        return {
            "time_s": self.now_s(), "cluster": self.cluster, "what": what, "nodes": fold(nodes), "number": len(nodes),
            "mode": mode, "reason": reason, **more, "almanac": __version__,
        }  # fmt: skip

    def record(self, rows: Sequence[Row], state: S | None = None) -> None:
        """Write lines, then the state, to disk. Raises StoreError: order nothing then."""
        self.folder.log.append(rows, self.now_s())
        if state is not None:
            self.folder.save(state)

    def look(
        self, facts_of: Callable[[SlurmNode], Facts] = node_facts
    ) -> Callable[[Collection[str]], dict[str, Facts]]:
        """Return what reads the facts of some nodes in Slurm now."""
        return lambda names: {node.name: facts_of(node) for node in self.backend.nodes(names)}

    def is_unchanged(self, relied_on: Mapping[str, Facts | None]) -> bool:
        """Look once more. Records why if a node is not as the decision saw it; None: Slurm did not list it."""
        changed = must_still_hold(relied_on, self.look())
        self._record_dropped(changed)
        return not changed

    def order(
        self,
        state: NodeState,
        relied_on: Mapping[str, Facts],
        read: Callable[[Collection[str]], Mapping[str, Facts]],
        reason: str = "",
        **more: Any,
    ) -> tuple[tuple[str, ...], list[str]]:
        """Look once more, tell Slurm of the nodes that are as the decision saw them, and record the others as dropped.

        more: of that record. Returns the nodes of the order, and Slurm's objections.
        """
        changed = must_still_hold(relied_on, read)
        kept = tuple(name for name in relied_on if name not in changed)
        said = self.backend.set_node_state(kept, state, reason) if kept else []
        self._record_dropped(changed, **more)
        return kept, said

    def _record_dropped(self, changed: Mapping[str, str], **more: Any) -> None:
        self.record([self.row("dropped", [name], why, **more) for name, why in changed.items()])
