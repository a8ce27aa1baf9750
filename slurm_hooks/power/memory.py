"""What almanac remembers of the nodes between two runs: one JSON file, replaced whole.

Slurm is asked first: whose sleep it is stands in the node's reason. The file holds what Slurm does not keep: power
cycles of the last day, failed wake-ups, wake-ups of each node set, and what SuspendExcNodes was before almanac wrote
it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, ValidationError, convert

from almanac.errors import StoreError
from almanac.plain_file import parse_json, with_checksum
from almanac.units import DAY_S
from telemetry.sources.bindings import BadRecordError, read_record
from telemetry.store.atomic import make_inner_folder, write_atomically, writing

VERSION = 1
MAX_BYTES = 32 << 20
MAX_TIMES = 2000
Count = Annotated[int, Meta(ge=0, lt=2**53)]
"""A count, or a time in unix seconds."""
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]


@dataclass(frozen=True)
class NodeState:
    """downs_s: power-downs of the last day, unix seconds. changed_s: last order. is_ours: powered down by almanac, and
    not seen up since; is_told: and Slurm was seen to have heard it. retries: orders to wake it again. quarantined_s:
    when it was given up, else None.
    """

    downs_s: tuple[Count, ...] = ()
    changed_s: Count | None = None
    is_ours: bool = False
    retries: Count = 0
    quarantined_s: Count | None = None
    is_told: bool = False

    def cycles(self, now_s: int) -> int:
        return sum(now_s - DAY_S < time_s for time_s in self.downs_s)

    def told_down(self, now_s: int) -> NodeState:
        kept = tuple(time_s for time_s in self.downs_s if now_s - DAY_S < time_s)
        return NodeState((*kept, now_s), now_s, is_ours=True)


NO_MEMORY = NodeState()


@dataclass(frozen=True)
class NodeSetState:
    """Of a node set. wakes_s: each time that nodes were woken, by almanac or by Slurm for a job. short_s: runs that saw
    more nodes wanted than up. asleep: the nodes that slept when the last run ended. target: of the last run; None held.
    forecast: of the last run, (quantile, nodes) of the highest demand within the horizon; empty where there was none.
    """

    wakes_s: tuple[Count, ...] = ()
    short_s: tuple[Count, ...] = ()
    asleep: tuple[str, ...] = ()
    target: Count | None = None
    forecast: tuple[tuple[Finite, Finite], ...] = ()


@dataclass(frozen=True)
class PowerState:
    """The whole file. since_s: first run. exceptions: SuspendExcNodes without almanac's entries, None while almanac
    never wrote it; told: what almanac wrote there, the newest last.
    """

    cluster: str = ""
    since_s: Count = 0
    run_s: Count = 0
    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    sets: Mapping[str, NodeSetState] = field(default_factory=dict)
    exceptions: str | None = None
    told: tuple[str, ...] = ()

    def of(self, name: str) -> NodeState:
        return self.nodes.get(name, NO_MEMORY)

    def set_of(self, name: str) -> NodeSetState:
        return self.sets.get(name, NodeSetState())

    def with_nodes(self, changed: Mapping[str, NodeState]) -> PowerState:
        """A node with nothing to remember is forgotten."""
        whole = {**self.nodes, **changed}
        return replace(
            self, nodes={name: each for name, each in whole.items() if each is not NO_MEMORY and each != NO_MEMORY}
        )

    def with_set(self, name: str, memory: NodeSetState) -> PowerState:
        short = replace(memory, wakes_s=memory.wakes_s[-MAX_TIMES:], short_s=memory.short_s[-MAX_TIMES:])
        return replace(self, sets={**self.sets, name: short})


def load(path: Path, cluster: str) -> PowerState:
    """An empty memory where there is no file. Raises StoreError for one that others could have written, that is broken,
    or of another cluster.
    """
    if not os.path.lexists(path):
        return PowerState(cluster=cluster)
    try:
        owners = frozenset({0, os.geteuid(), path.parent.stat().st_uid})
        memory = _memory(parse_json(read_record(path, owners, MAX_BYTES)))
    except (BadRecordError, OSError, ValueError, TypeError, KeyError, AttributeError, ValidationError) as error:
        raise StoreError(
            f"{path}: {error if isinstance(error, BadRecordError) else 'cannot be parsed'}",
            "check who wrote it, then remove it; powered-down nodes stay known by their reason in Slurm",
        ) from error
    if memory.cluster != cluster:
        raise StoreError(f"{path} is of cluster {memory.cluster!r}, not {cluster!r}", "use one store per cluster")
    return memory


def save(path: Path, memory: PowerState) -> None:
    """Raises StoreError."""
    content = {"version": VERSION, **asdict(memory)}
    with writing(path):
        make_inner_folder(path.parent)
        write_atomically(path, with_checksum(json.dumps(content, allow_nan=False)), is_handed_over=True)


def _memory(content: Any) -> PowerState:
    """Raises ValueError, TypeError, KeyError, AttributeError, or ValidationError."""
    if content["version"] != VERSION or not content.keys() >= {each.name for each in fields(PowerState)}:
        raise ValueError("of another version")
    return convert(content, PowerState)
