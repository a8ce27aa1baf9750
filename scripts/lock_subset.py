"""Prints the part of requirements.lock that some distributions need: themselves and what they need in turn.

    lock_subset.py runtime                the dependencies of pyproject.toml, without any extra
    lock_subset.py build-system NAME...   what builds the wheel, and these
    lock_subset.py only NAME...           these

Who needs what is told by the lock's own "# via" lines.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def normalized(name: str) -> str:
    """The name of a requirement as PEP 503 compares it, without version and extras."""
    return re.sub(r"[-_.]+", "-", re.split(r"[=\[<>~!; ]", name, maxsplit=1)[0]).lower()


def entries(lock: str) -> list[tuple[str, set[str], str]]:
    """Each entry of a lock: its name, who needs it, and its lines. One name can have entries for several Pythons."""
    blocks = re.split(r"(?m)^(?=[A-Za-z0-9])", lock)[1:]
    parents = [re.findall(r"(?m)^    #(?: via|  ) +([A-Za-z0-9][\w.\-]*)", block) for block in blocks]
    return [
        (normalized(block), {normalized(name) for name in needed_by}, block)
        for block, needed_by in zip(blocks, parents, strict=True)
    ]


def subset(lock: str, roots: list[str]) -> str:
    """The entries of the roots and of all that they need, directly or not. Raises KeyError for a root not locked."""
    locked = entries(lock)
    wanted = {normalized(root) for root in roots}
    if missing := wanted - {name for name, _, _ in locked}:
        raise KeyError(f"not in the lock: {', '.join(sorted(missing))}; run `make lock`")
    while more := {name for name, parents, _ in locked if parents & wanted} - wanted:
        wanted |= more
    return "".join(block for name, _, block in locked if name in wanted)


def main(kind: str, *names: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    build_system: list[str] = project["build-system"]["requires"]
    roots = {"runtime": project["project"]["dependencies"], "build-system": build_system, "only": []}[kind]
    print(subset((ROOT / "requirements.lock").read_text(encoding="utf-8"), [*roots, *names]), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
