"""No two modules import each other, directly or through others."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("almanac", "telemetry", "advisor", "demo", "simulator", "slurm_hooks", "reports", "cli", "benchmarks")


def modules_of(root: Path) -> dict[str, Path]:
    """By dotted name. The benchmarks are scripts: they import each other by their bare names."""
    found = {}
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            name = parts[-1] if package == "benchmarks" else ".".join(parts).removesuffix(".__init__")
            found[name] = path
    return found


def imports_of(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules that a module imports anywhere: at its top, in functions, and for type checks."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in inner]
        else:
            continue
        yield from (name for name in names if name in known and known[name] != path)


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle, or an empty list."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_through_others() -> None:
    known = modules_of(ROOT)
    assert len(known) > 200
    graph = {name: set(imports_of(path, known)) for name, path in known.items()}
    circle = circle_in(graph)
    assert not circle, f"an import circle: {' -> '.join(reversed(circle))}"


@pytest.mark.parametrize("line", ["from cli import b", "import cli.b", "def f():\n    from cli.b import y"])
def test_a_circle_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "__init__.py").touch()
    (tmp_path / "cli" / "a.py").write_text(line)
    (tmp_path / "cli" / "b.py").write_text("from cli.a import x")
    known = modules_of(tmp_path)
    graph = {name: set(imports_of(path, known)) for name, path in known.items()}
    assert set(circle_in(graph)) == {"cli.a", "cli.b"}


def missing_names(source: str) -> list[str]:
    """What a script imports from our packages in vain. mypy does not read scripts without the suffix .py."""
    missing = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            module = importlib.import_module(node.module)
            missing += [f"{node.module}.{alias.name}" for alias in node.names if not hasattr(module, alias.name)]
    return missing


def test_the_programs_of_docker_import_what_there_is() -> None:
    programs = [path for path in (ROOT / "docker/bin").iterdir() if path.is_file() and not path.suffix]
    texts = [text for text in map(Path.read_text, programs) if re.match(r"#!.*python", text)]
    assert len(texts) == 2
    assert [name for text in texts for name in missing_names(text)] == []
    assert missing_names("from cli.ingest import Job, run") == ["cli.ingest.Job"]
