"""The list and the picture of rooms. A room is a folder of Python files whose `__init__` states duty and face."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("cli", "reports", "slurm_hooks", "simulator", "demo", "advisor", "telemetry", "slurm", "almanac")
"""Packages from the top floor down: each imports only those below it, and none of its own floor."""
SUBJECTS = ("memory", "duration", "waits", "priority", "power", "mig", "types", "packing")
"""Subjects that stand on several floors, under one name on each."""


@dataclass(frozen=True)
class Room:
    """A folder of Python files. `name` is its path below the package, or "" for the package's own files."""

    package: str
    name: str
    duty: str
    face: tuple[str, ...]
    files: tuple[str, ...]
    """Names without the ending."""

    @property
    def path(self) -> str:
        return f"{self.package}/{self.name}/" if self.name else f"{self.package}/"


def rooms() -> list[Room]:
    """Return all rooms in the order of PACKAGES, read from git's list of files."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout
    paths = [Path(line) for line in listed.splitlines() if line.split("/")[0] in PACKAGES and (ROOT / line).exists()]
    folders = sorted({path.parent for path in paths}, key=lambda each: (PACKAGES.index(each.parts[0]), each))
    return [_room(folder, [path for path in paths if path.parent == folder]) for folder in folders]


def _room(folder: Path, paths: Sequence[Path]) -> Room:
    init = ast.parse((ROOT / folder / "__init__.py").read_text(encoding="utf-8"))
    face: tuple[str, ...] = ()
    for node in init.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            face = tuple(ast.literal_eval(node.value))
    files = tuple(path.stem for path in paths)
    duty = " ".join((ast.get_docstring(init) or "").split("\n\n")[0].split())
    name = "/".join(folder.parts[1:])
    return Room(folder.parts[0], name, duty, face, files)


def page(note: str) -> str:
    """Return the page docs/rooms.md."""
    lines = [
        "# Rooms\n",
        note,
        "Each folder is a room. Other rooms import only its public modules. [Architecture](architecture.md) says how "
        "data and requests go through them.\n",
        "![Floors and subjects](images/rooms.svg)\n",
        "Rows are packages: each imports only those below it. Columns are subjects: a room of that name, or, "
        "paler, single files.\n",
        "| room | duty | public modules |",
        "|---|---|---|",
    ]
    for room in rooms():
        face = ", ".join(f"`{name}`" for name in room.face)
        lines.append(f"| `{room.path}` | {room.duty} | {face} |")
    return "\n".join([*lines, ""])


WIDTH, LEFT, COLUMN, ROW, GAP = 1180, 110, 84, 58, 6
COLORS = ("#4c78a8", "#72b7b2", "#54a24b", "#eeca3b", "#f58518", "#e45756", "#b279a2", "#9d755d")


def picture() -> str:
    """Return an SVG: floors as rows, subjects as columns, and the other rooms of each floor at the left."""
    found = rooms()
    shared = WIDTH - COLUMN * len(SUBJECTS)
    parts = [_text(shared + COLUMN * (n + 0.5), 16, subject, "middle", COLORS[n]) for n, subject in enumerate(SUBJECTS)]
    top = 26.0
    for package in PACKAGES:
        own = [room for room in found if room.package == package]
        others = [room for room in own if not set(room.name.split("/")) & set(SUBJECTS)]
        places = list(_flow(others, LEFT, shared - 2 * GAP))
        height = max([ROW, *(y + 24 for _, _, y, _ in places)])
        parts.append(f'<rect x="0" y="{top:g}" width="{WIDTH}" height="{height:g}" rx="6" fill="#f4f4f2"/>')
        parts.append(_text(10, top + 24, package + "/", "start", "#222", 14))
        for room, x, y, width in places:
            name = room.name or "(top)"
            parts.append(_box(x, top + y, width, 20, "#d9d9d3", name, f"{room.path}: {room.duty}", "#222"))
        for n, subject in enumerate(SUBJECTS):
            here = [room for room in own if subject in room.name.split("/")]
            named = [name for room in others for name in room.files if subject in name.split("_")]
            files = [f"{name}.py" for name in sorted(named, key=len)]
            if here or files:
                about = " ".join(f"{room.path}: {room.duty}" for room in here) or ", ".join(files)
                color, label = (COLORS[n], f"{subject}/") if here else (f"{COLORS[n]}99", files[0][:14])
                x = shared + COLUMN * n + 2
                parts.append(_box(x, top + 9, COLUMN - 4, 40, color, label, about, "#fff"))
        top += height + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:g}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{top:g}" fill="#fff"/>', *parts, "</svg>", ""])


def _flow(others: Sequence[Room], left: float, right: float) -> Iterator[tuple[Room, float, float, float]]:
    """Yield each room with its x, y, and width, in lines from left to right."""
    x, y = left, 8.0
    for room in others:
        width = 7 * len(room.name or "(top)") + 14
        if x + width > right:
            x, y = left, y + 25
        yield room, x, y, width
        x += width + GAP


def _text(x: float, y: float, text: str, anchor: str, color: str, size: int = 12) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}" font-size="{size}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str, text: str, about: str, color: str) -> str:
    middle = _text(x + width / 2, y + height / 2 + 4, text, "middle", color, 11)
    rect = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}"/>'
    return f"<g><title>{escape(about)}</title>{rect}{middle}</g>"
