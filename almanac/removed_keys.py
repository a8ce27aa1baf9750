"""Keys of the configuration that are no longer settings. They are read for one release, and never stop a command.

The table serves the reader, which warns, `almanac doctor`, and docs/configuration.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

REMOVED: dict[str, dict[str, str]] = {
    "0.1.0": {
        "dask.host": "the address of dask.interface, or of the default route",
        "dask.local_directory": "temporary-directory in Dask's own configuration",
        "dask.qos": "dask.directives",
        "dask.tls": "always true",
        "dask.wait_s": "always 600",
    },
}
"""What stands in the place of each key, by the release that removed it and the key."""
_MOVED = {"dask.qos": ("directives", "--qos={}")}
"""Keys whose value still counts, as an entry of a list in the same section."""
INSTEAD = {key: text for removed in REMOVED.values() for key, text in removed.items()}


def without_removed(data: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return parsed TOML without its removed keys, and their names."""
    kept: dict[str, Any] = {}
    found: list[str] = []
    for section, content in data.items():
        if isinstance(content, dict):
            gone = [key for key in content if f"{section}.{key}" in INSTEAD]
            found += [f"{section}.{key}" for key in gone]
            content = {key: value for key, value in content.items() if key not in gone} | _moved(section, content)
        kept[section] = content
    return kept, tuple(found)


def _moved(section: str, content: dict[str, Any]) -> dict[str, Any]:
    """The keys of a section that take the values of removed ones. A value of a wrong type is left out."""
    changed: dict[str, Any] = {}
    for old, (key, form) in _MOVED.items():
        value, present = content.get(old.removeprefix(f"{section}.")), content.get(key, [])
        if isinstance(value, str) and value and isinstance(present, list):
            changed[key] = [form.format(value), *present]
    return changed


def said_of(removed: Iterable[str]) -> str:
    """Removed keys of a file, each with what stands in its place."""
    return "; ".join(f"{key} ({INSTEAD[key]})" for key in removed)
