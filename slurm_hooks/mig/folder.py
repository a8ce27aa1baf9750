"""The folder `mig/` of a store: the changes under way, what was done, and the lock between runs."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from almanac.errors import StoreError
from almanac.plain_file import parse_json, with_checksum
from slurm_hooks.json_lines import JsonLines
from slurm_hooks.mig.layouts import Layout
from slurm_hooks.mig.steps import NodeChange, Stage
from telemetry.sources.bindings import BadRecordError, read_record
from telemetry.store.atomic import locked, make_inner_folder, write_atomically, writing

VERSION = 1
MAX_BYTES = 32 << 20


@dataclass(frozen=True)
class MigState:
    """changes: by node, those under way and those that failed. changed_s: when each node's layout was last ordered to
    change. released_s: when each job that waited for a vanished type was last released.
    """

    cluster: str = ""
    changes: Mapping[str, NodeChange] = field(default_factory=dict)
    changed_s: Mapping[str, int] = field(default_factory=dict)
    released_s: Mapping[str, int] = field(default_factory=dict)

    def with_change(self, change: NodeChange) -> MigState:
        return replace(self, changes={**self.changes, change.node: change})

    def without(self, node: str) -> MigState:
        return replace(self, changes={name: each for name, each in self.changes.items() if name != node})


@dataclass(frozen=True)
class MigFolder:
    """`root` need not be there yet."""

    root: Path

    @property
    def log(self) -> JsonLines:
        return JsonLines(self.root, "actions-")

    def load(self, cluster: str) -> MigState:
        """No change where there is no file. Raises StoreError for one that others could have written, that is broken,
        or of another cluster.
        """
        path = self.root / "state.json"
        if not os.path.lexists(path):
            return MigState(cluster=cluster)
        try:
            owners = frozenset({0, os.geteuid(), path.parent.stat().st_uid})
            state = _state(parse_json(read_record(path, owners, MAX_BYTES)))
        except (BadRecordError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise StoreError(
                f"{path}: {error if isinstance(error, BadRecordError) else 'cannot be parsed'}",
                f'check who wrote it, and nodes whose reason begins with "almanac mig"; then remove {path}',
            ) from error
        if state.cluster != cluster:
            raise StoreError(f"{path} is of cluster {state.cluster!r}, not {cluster!r}", "use one store per cluster")
        return state

    def save(self, state: MigState) -> None:
        """Raises StoreError. The file is on disk when this returns."""
        path = self.root / "state.json"
        content = {"version": VERSION, **asdict(state)}
        with writing(path):
            make_inner_folder(self.root)
            write_atomically(path, with_checksum(json.dumps(content, allow_nan=False)), is_handed_over=True)

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Raises BusyError where another run is under way, StoreError where the folder cannot be written."""
        try:
            make_inner_folder(self.root)
        except OSError as error:
            raise StoreError(
                f"{self.root}: cannot be created: {error.strerror}", "run this as the store's owner"
            ) from error
        return locked(self.root / "lock", "is changing MIG layouts")


def _state(content: Any) -> MigState:
    """Raises ValueError, TypeError, KeyError or AttributeError."""
    if content["version"] != VERSION:
        raise ValueError("of another version")
    changes = [_change(each) for each in content["changes"].values()]
    return MigState(
        cluster=_text(content["cluster"]),
        changes={each.node: each for each in changes},
        changed_s=_counts(content["changed_s"]),
        released_s=_counts(content["released_s"]),
    )


def _change(content: Mapping[str, Any]) -> NodeChange:
    if content["stage"] not in get_args(Stage) or not isinstance(content["is_undone"], bool):
        raise ValueError("no stage")
    return NodeChange(
        node=_text(content["node"]),
        model=_text(content["model"]),
        old=_layout(content["old"]),
        new=_layout(content["new"]),
        old_gpus=_counts(content["old_gpus"]),
        new_gpus=_counts(content["new_gpus"]),
        begun_s=_number(content["begun_s"]),
        stage=content["stage"],
        stage_s=_number(content["stage_s"]),
        is_undone=content["is_undone"],
        fault=_text(content["fault"]),
        is_patient=content.get("is_patient", False) is True,
        dynamic_gres=_text(content.get("dynamic_gres", "")),
    )


def _layout(content: Any) -> Layout:
    return tuple(tuple(map(_text, gpu)) for gpu in content)


def _counts(content: Any) -> dict[str, int]:
    return {_text(name): _number(number) for name, number in content.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise TypeError("no count and no time")
    return value
