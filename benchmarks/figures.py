"""Figures of a benchmark: a table for the reader, and build/bench/NAME.json for whoever compares them.

Run alone, this names every figure of the files there that missed its goal, and exits 1 if there is one.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parents[1] / "build" / "bench"
MET = {True: "yes", False: "NO", None: ""}


@dataclass(frozen=True)
class Figure:
    """One measured figure. `goal` is in words, or empty without one; `ok` is None without a goal."""

    figure: str
    value: float | str
    goal: str = ""
    ok: bool | None = None


def at_most(figure: str, value: float, most: float | None) -> Figure:
    """Return a figure with an upper goal; most=None sets no goal."""
    return Figure(figure, value) if most is None else Figure(figure, value, f"<= {most:,g}", bool(value <= most))


def at_least(figure: str, value: float, least: float | None) -> Figure:
    """Return a figure with a lower goal; least=None sets no goal."""
    return Figure(figure, value) if least is None else Figure(figure, value, f">= {least:,g}", bool(value >= least))


def between(figure: str, value: float, least: float, most: float) -> Figure:
    return Figure(figure, value, f"{least:g} to {most:g}", bool(least <= value <= most))


def exactly(figure: str, value: float, wanted: float) -> Figure:
    return Figure(figure, value, f"{wanted:,}", bool(value == wanted))


def main(measure: Callable[[], Iterable[Figure]]) -> NoReturn:
    """The program of every benchmark: print and write its figures, and exit 1 if one misses its goal.

    NAME is the script's, the title its first line. A benchmark that fails has missed "ran to its end".
    """
    script, title = Path(sys.argv[0]).stem, (sys.modules["__main__"].__doc__ or "").partition("\n")[0]
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        figures = list(measure())
    except Exception as error:
        _write(script, [Figure("ran to its end", repr(error), "yes", False)])
        raise
    _write(script, figures)
    table = Table("figure", "value", "goal", "met", title=title)
    for each in figures:
        value = each.value if isinstance(each.value, str) else f"{each.value:,.4g}"
        table.add_row(each.figure, value, each.goal, MET[each.ok])
    Console().print(table)
    sys.exit(any(each.ok is False for each in figures))


def _write(name: str, figures: Iterable[Figure]) -> None:
    rows = [asdict(each) for each in figures]
    (FOLDER / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def missed() -> list[str]:
    """A line for each missed figure in FOLDER."""
    return [
        f"{path.stem}: {each['figure']}: {each['value']} (goal: {each['goal']})"
        for path in sorted(FOLDER.glob("*.json"))
        for each in json.loads(path.read_text())
        if each.get("ok") is False
    ]


if __name__ == "__main__":
    print(*(missed() or ["every figure meets its goal"]), sep="\n")
    sys.exit(bool(missed()))


@dataclass(frozen=True)
class Measured:
    """The result of a task, its time, and its memory. rss_mib: highest memory of the process, imports included."""

    wall_s: float
    cpu_s: float
    rss_mib: float
    result: Any

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def measure(task: Callable[[Path], Any], root: Path) -> Measured:
    """Run a task once. Imports and file caches are warm: it is run on the caller's word only."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = task(root)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Measured(wall, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, result)
