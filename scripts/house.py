"""Fail if the tree breaks a rule of docs/developing.md that no other linter knows. Run it in the root, by `make lint`.

- Only slurm/ reads Slurm's output. Fields are those of the recorded outputs (tests/slurm/fixtures) and of sacct's
  columns, but for names that are ours, too: columns of the store's tables, and single words in small letters.
- A module imports of another folder only the modules that the folder's `__init__.__all__` names.
- A docstring opens with a verb or a noun phrase.
- No class name stands for two classes, and no file has more than 400 lines.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slurm import accounting, sacct
from telemetry.store import schema

PACKAGES = ("almanac", "slurm", "telemetry", "advisor", "demo", "simulator", "slurm_hooks", "reports", "cli")
OTHERS = ("benchmarks", "docs", "examples", "scripts")
PRINTING = ("squeue", "sacct", "sinfo", "sprio", "sacctmgr")
"""Commands that only print, as `scontrol show` does."""
MAY_READ_SLURM = {
    "slurm_hooks/restart/job.py": "a user's own job, within that job",
    "slurm_hooks/restart/wrapper.py": "a user's own job, within that job",
    "slurm_hooks/submit/dialogue.py": "sinfo's listing at the prompt, which offer.py reads as its Lua twin does",
}
"""Modules that may still do so, and why. It only shrinks."""

FIRST_WORDS = re.compile(r"\W*(what|whether|which|how|who|whose|where|why|when|that)\b", re.IGNORECASE)
PHRASES = re.compile(
    r"\b(where\s+(it|no|none)|beside|(says|say|said|told|tells|known)\s+of|passed\s+over)\b", re.IGNORECASE
)
MOST_LINES = 400
LONG = {
    "slurm_hooks/lua/almanac.lua",
    "tests/slurm_hooks/advice/test_publish.py",
    "tests/slurm_hooks/job_slurm.py",
    "tests/slurm_hooks/jobs/test_job_engine.py",
    "tests/slurm_hooks/packing/test_pack.py",
    "tests/slurm_hooks/submit/test_sbatch_almanac.py",
    "tests/slurm_hooks/test_distribute.py",
    "tests/telemetry/sources/test_files_jobs.py",
    "tests/telemetry/store/test_store.py",
    "tests/test_package.py",
}
"""Files that may have more. It only shrinks."""


def recorded_fields(folder: Path) -> set[str]:
    found = {*sacct.COLUMNS, *accounting.STEP_COLUMNS}
    for path in folder.glob("*/*.json"):
        found.update(_keys(json.loads(path.read_bytes().decode("utf-8", "replace"))))
    tables = (table for table in vars(schema).values() if hasattr(table, "names"))
    ours = {name for table in tables for name in table.names}
    return {name for name in found - ours if re.search("[_A-Z]", name)}


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _keys(each)


def reads_of_slurm(tree: ast.AST, fields: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the kind of each reader of Slurm's output."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(slice=ast.Constant(value=str(name))) if name in fields:
                yield node.lineno, f"reads Slurm's field {name}"
            case ast.Call(func=ast.Attribute(attr="get" | "pop"), args=[ast.Constant(value=str(name)), *_]):
                if name in fields:
                    yield node.lineno, f"reads Slurm's field {name}"
            case (
                ast.List(elts=[ast.Constant(value=str(name)), ast.Constant(), *_] as words)
                | ast.Call(args=[ast.Constant(value=str(name)), ast.Constant(), *_] as words)
            ):
                said = [getattr(each, "value", "") for each in words]
                if (name in PRINTING and str(said[1]).startswith("-")) or (said[0] == "scontrol" and "show" in said):
                    yield node.lineno, f"runs {name}"


def slurm_faults(trees: dict[str, ast.Module]) -> Iterator[str]:
    fields = recorded_fields(Path("tests/slurm/fixtures"))
    readers = {path: list(reads_of_slurm(tree, fields)) for path, tree in trees.items() if _top(path) in PACKAGES}
    for path, reads in readers.items():
        if path not in MAY_READ_SLURM and _top(path) != "slurm":
            yield from (
                f"{path}:{n}: {said}: only slurm/ knows Slurm's formats; add a function there" for n, said in reads
            )
    for path in sorted(path for path in MAY_READ_SLURM if not readers.get(path)):
        yield f"scripts/house.py: {path} needs no exception any more; remove it from MAY_READ_SLURM"


def public_names(tree: ast.Module) -> list[str] | None:
    """Return a folder's `__all__`, or None without one."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def face_faults(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yield each import of another folder's private module, and each name of a face without a module."""
    modules = {path: tree for path, tree in trees.items() if _top(path) in PACKAGES}
    faces = {path[: -len("/__init__.py")]: public_names(tree) for path, tree in modules.items() if "__init__" in path}
    for path, tree in modules.items():
        room = path.rpartition("/")[0]
        if path.endswith("__init__.py"):
            yield from _false_names(room, faces[room], tree, modules)
        for line, module in _imports(tree):
            folder, _, name = module.replace(".", "/").rpartition("/")
            if f"{folder}/{name}.py" not in modules or folder == room:
                continue
            if name not in (faces[folder] or []):
                yield f"{path}:{line}: imports {module}, which {folder}/__init__.py does not name in __all__"


def _false_names(
    room: str, public: list[str] | None, tree: ast.Module, modules: dict[str, ast.Module]
) -> Iterator[str]:
    if public is None:
        yield f"{room}/__init__.py: needs __all__, the names of the modules that other folders may import"
        return
    imported = {alias.asname or alias.name for node in tree.body for alias in getattr(node, "names", ())}
    defined = imported | {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name in public:
        if name not in defined and f"{room}/{name}.py" not in modules and f"{room}/{name}/__init__.py" not in modules:
            yield f"{room}/__init__.py: __all__ names {name}, which is no module of it"


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and each name that may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def docstring_faults(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the fault of each docstring, those of attributes included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = node.value.value
            if first := FIRST_WORDS.match(text):
                yield node.lineno, f"a docstring opens with {first[1]!r}: say what is returned or done"
            if phrase := PHRASES.search(text):
                yield node.lineno, f"a docstring has {' '.join(phrase[0].split())!r}: use plain words"


def class_faults(trees: dict[str, ast.Module]) -> Iterator[str]:
    places = defaultdict(list)
    for path, tree in trees.items():
        if _top(path) != "tests":
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path}:{node.lineno}")
    for name, found in sorted(places.items()):
        if len(found) > 1:
            yield f"{found[0]}: a class {name} is in {', '.join(found[1:])}, too: give one a name of its field"


def length_faults(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        lines = len(path.read_bytes().splitlines())
        if (lines > MOST_LINES) != (str(path) in LONG):
            todo = f"split it by subject; {MOST_LINES} are the most" if lines > MOST_LINES else "remove it from LONG"
            yield f"{path}: {lines} lines: {todo}"


def _top(path: str) -> str:
    return path.partition("/")[0]


def main() -> int:
    folders = (*PACKAGES, *OTHERS, "tests")
    paths = sorted(path for folder in folders for path in Path(folder).rglob("*") if path.suffix in (".py", ".lua"))
    trees = {str(path): ast.parse(path.read_text(encoding="utf-8")) for path in paths if path.suffix == ".py"}
    faults = [f"{path}:{line}: {said}" for path, tree in trees.items() for line, said in docstring_faults(tree)]
    faults += [*slurm_faults(trees), *face_faults(trees), *class_faults(trees), *length_faults(paths)]
    print(*faults, sep="\n", end="\n" if faults else "")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
