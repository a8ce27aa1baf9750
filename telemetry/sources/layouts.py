"""Layouts of files to import: read from layouts.toml, found by a file's columns."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from almanac.errors import FileFormatError
from almanac.units import printable
from telemetry.sources.exporters import presets
from telemetry.store.schema import TABLES

Kind = Literal["jobs", "telemetry"]
_MOST_COLUMNS_SAID = 40


@dataclass(frozen=True)
class Origin:
    """Where one of our columns comes from: the first of `columns` that is not missing, or `value` for every row."""

    columns: tuple[str, ...] = ()
    value: Any = None
    scale: float = 1.0
    parse: str = ""
    missing: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Layout:
    """One kind of file; see layouts.toml. is_own: its columns are the table's. is_typed: a text of it is never missing,
    even if it is empty or "None", as in Parquet files of the store's own columns.
    """

    name: str
    kind: Kind
    about: str
    requires: tuple[str, ...]
    columns: Mapping[str, Origin]
    states: Mapping[str, str] = field(default_factory=dict)
    form: str = "wide"
    is_own: bool = False
    is_typed: bool = False

    def needed(self, present: Sequence[str]) -> list[str]:
        """The columns of a file that this layout names, in the file's order."""
        named = {column for origin in self.columns.values() for column in origin.columns} | set(self.requires)
        return [column for column in present if column in named]

    def unknown(self, present: Sequence[str]) -> list[str]:
        """The columns of a telemetry file that look like an exporter's metrics, and that nothing reads."""
        if self.kind != "telemetry":
            return []
        known = presets().values()
        return sorted(name for one in known for name in one.unknown(present) if name.startswith(one.prefix))


@cache
def layouts() -> tuple[Layout, ...]:
    """Every layout that almanac knows, in the order of preference."""
    text = (files("telemetry.sources") / "layouts.toml").read_text(encoding="utf-8")
    return tuple(_layout(entry) for entry in tomllib.loads(text)["layout"])


def _layout(entry: dict[str, Any]) -> Layout:
    columns = {name: _origin(given) for name, given in entry.get("columns", {}).items()}
    if entry.get("is_own"):
        columns = {name: Origin((name,)) for name in TABLES[entry["kind"]].schema.names}
    return Layout(
        name=entry["name"],
        kind=entry["kind"],
        about=entry["about"],
        requires=tuple(entry["requires"]),
        columns=columns,
        states=entry.get("states", {}),
        form=entry.get("form", "wide"),
        is_own=entry.get("is_own", False),
    )


def _origin(given: Any) -> Origin:
    table = given if isinstance(given, dict) else {"from": given}
    source = table.get("from", [])
    return Origin(
        columns=(source,) if isinstance(source, str) else tuple(source),
        value=table.get("value"),
        scale=table.get("scale", 1.0),
        parse=table.get("parse", ""),
        missing=frozenset(table.get("missing", [])),
    )


def choose_layout(where: str, columns: Sequence[str], kind: Kind, named: str | None = None) -> Layout:
    """The layout of a file with these columns, or the one named. Raises FileFormatError, which names all that fit."""
    known = [layout for layout in layouts() if layout.kind == kind]
    if named is not None:
        return _named(where, columns, kind, named, known)
    fitting = [layout for layout in known if set(layout.requires) <= set(columns)]
    if not fitting:
        expected = "; ".join(f"{layout.name} ({', '.join(layout.requires)})" for layout in known)
        raise FileFormatError(
            f"{where}: its columns ({_said(columns)}) fit no known {kind} file: {expected}",
            f"rename the columns to fit one of these, or check that it is a {kind} file",
        )
    return max(fitting, key=lambda layout: len(layout.requires))


def _named(where: str, columns: Sequence[str], kind: Kind, named: str, known: Sequence[Layout]) -> Layout:
    layout = next((layout for layout in known if layout.name == named), None)
    if layout is None:
        raise FileFormatError(
            f"{where}: there is no layout {printable(named, 60)} for {kind}",
            f"choose one of: {', '.join(layout.name for layout in known)}",
        )
    absent = [column for column in layout.requires if column not in columns]
    if absent:
        raise FileFormatError(
            f"{where}: layout {named} needs the columns {', '.join(absent)}; the file has: {_said(columns)}",
            "leave out --layout to detect it from the columns, or rename them",
        )
    return layout


def _said(columns: Sequence[str]) -> str:
    said = ", ".join(printable(column, 40) for column in columns[:_MOST_COLUMNS_SAID])
    return said + (f" and {len(columns) - _MOST_COLUMNS_SAID} more" if len(columns) > _MOST_COLUMNS_SAID else "")
