"""Figures of a benchmark: a table for the reader, and build/bench/NAME.json for whoever compares them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parents[1] / "build" / "bench"


@dataclass(frozen=True)
class Figure:
    """One measured figure. `goal` is in words, or empty without one; `ok` is None without a goal."""

    figure: str
    value: float | str
    goal: str = ""
    ok: bool | None = None


def report(name: str, figures: Sequence[Figure], about: str = "") -> bool:
    """Write and print the figures; whether every goal is met."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = [asdict(figure) for figure in figures]
    (FOLDER / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    table = Table("figure", "value", "goal", "met", title=about or name)
    for figure in figures:
        value = figure.value if isinstance(figure.value, str) else f"{figure.value:,.4g}"
        table.add_row(figure.figure, value, figure.goal, {True: "yes", False: "NO", None: ""}[figure.ok])
    Console().print(table)
    return all(figure.ok is not False for figure in figures)
