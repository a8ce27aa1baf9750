"""Rules about the tree: scripts/house.py finds what it is for, no imports go in a circle, no forbidden text."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import house

FIELDS = house.recorded_fields(Path(__file__).parent / "slurm/fixtures")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("job['job_state']", ["reads Slurm's field job_state"]),
        ("job.get('tres_req_str', '')", ["reads Slurm's field tres_req_str"]),
        ("row['AllocTRES']", ["reads Slurm's field AllocTRES"]),
        ("run(['squeue', '--json'])", ["runs squeue"]),
        ("run(['scontrol', '-o', 'show', 'node'])", ["runs scontrol"]),
        ("text('sinfo', '-h', '-o', '%G')", ["runs sinfo"]),
        ("run(['scontrol', 'update', 'x']), ('sacct', 'squeue')", []),
        ("row['gpu_count'], row['job_id'], row.get('name'), row.get(job_state), f('job_state')", []),
    ],
)
def test_readers_of_slurms_output(code: str, said: list[str]) -> None:
    assert [what for _, what in house.reads_of_slurm(ast.parse(code), FIELDS)] == said


def test_a_face_hides_the_modules_that_it_does_not_name() -> None:
    rooms = {
        "cli/__init__.py": "__all__ = ()",
        "slurm/__init__.py": "",
        "cli/waits.py": "from advisor.waits import bound, decide\ndef f():\n    import advisor.waits.bound",
        "advisor/waits/__init__.py": '__all__ = ("decide", "gone")',
        "advisor/waits/bound.py": "",
        "advisor/waits/decide.py": "from advisor.waits.bound import most",
    }
    assert list(house.face_faults({path: ast.parse(code) for path, code in rooms.items()})) == [
        "slurm/__init__.py: needs __all__, the names of the modules that other folders may import",
        "cli/waits.py:1: imports advisor.waits.bound, which advisor/waits/__init__.py does not name in __all__",
        "cli/waits.py:3: imports advisor.waits.bound, which advisor/waits/__init__.py does not name in __all__",
        "advisor/waits/__init__.py: __all__ names gone, which is no module of it",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Whether it runs.", "opens with 'Whether'"),
        ("`What` runs.", "opens with 'What'"),
        ("Return the bound where\n    none is known.", "has 'where none'"),
        ("Return True if it runs, whatever the state.", ""),
    ],
)
def test_a_docstring_that_breaks_the_rule(text: str, fault: str) -> None:
    for code in (f'def f():\n    """{text}"""', f'x = 1\n"""{text}"""'):
        found = [said for _, said in house.docstring_faults(ast.parse(code))]
        assert len(found) == bool(fault)
        assert fault in "".join(found)


def test_a_class_name_stands_for_one_class() -> None:
    code = {"cli/a.py": "class Job: ...", "slurm/b.py": "if 1:\n    class Job: ...", "tests/c.py": "class Job: ..."}
    (found,) = house.class_faults({path: ast.parse(text) for path, text in code.items()})
    assert found == "cli/a.py:1: a class Job is in slurm/b.py:2, too: give one a name of its field"


ROOT = Path(__file__).parents[1]
PACKAGES = (
    "almanac",
    "slurm",
    "telemetry",
    "advisor",
    "demo",
    "simulator",
    "slurm_hooks",
    "reports",
    "cli",
    "benchmarks",
)


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
    """Return names that a script imports from our packages in vain."""
    missing = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            module = importlib.import_module(node.module)
            names = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            inner = [name for name in names if hasattr(module, "__path__") and find_spec(f"{node.module}.{name}")]
            missing += [f"{node.module}.{name}" for name in names if name not in inner]
    return missing


def test_what_mypy_does_not_read_imports_what_there_is() -> None:
    programs = [path for path in (ROOT / "docker/bin").iterdir() if path.is_file() and not path.suffix]
    texts = [text for text in map(Path.read_text, programs) if re.match(r"#!.*python", text)]
    assert len(texts) == 2
    scripts = [path for folder in ("benchmarks", "docs", "scripts") for path in (ROOT / folder).rglob("*.py")]
    assert len(scripts) > 30
    texts += map(Path.read_text, scripts)
    assert [name for text in texts for name in missing_names(text)] == []
    assert missing_names("from cli.ingest import Job, run") == ["cli.ingest.Job"]


# Written so that this file does not hold what it forbids.
FORBIDDEN = {
    "the host of a package registry": re.compile(
        r"py[p]i\.org|python[h]osted\.org|(deb|security|snapshot)\.debia[n]\.org|registry\.np[m]js\.org"
    ),
    "a path of the machine it was written on": re.compile(r"(^|[^A-Za-z0-9_.])/(work|farm)/", re.MULTILINE),
}


def tracked_files() -> list[Path]:
    """Files that git tracks, or would (not ignored)."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout  # fmt: skip
    paths = (ROOT / name for name in listed.decode().split("\0") if name)
    return [path for path in paths if path.is_file()]


_IMPORT_WITHOUT_LIBRARIES = """
import sys
from importlib import import_module
from importlib.metadata import packages_distributions

kept = {name.replace("_", "-").lower() for name in sys.argv[1].split()}
owners = packages_distributions()

class Absent:
    def find_spec(self, name, path=None, target=None):
        owned = {each.replace("_", "-").lower() for each in owners.get(name.partition(".")[0], ())}
        if owned and not owned & kept:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for name in sys.argv[2].split():
    import_module(name)
"""


def test_the_client_s_modules_need_only_its_own_libraries() -> None:
    """Find in a second what scripts/stage-packages.sh finds after minutes."""
    script = (ROOT / "scripts/stage-packages.sh").read_text(encoding="utf-8")
    modules, libraries = re.search(r"LIGHT='([^']*)'", script), re.search(r"lock_subset\.py only (.*) >", script)
    assert modules and libraries
    command = [sys.executable, "-c", _IMPORT_WITHOUT_LIBRARIES, libraries[1] + " slurm-almanac", modules[1]]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_this_file_would_find_what_it_forbids() -> None:
    registry, path = FORBIDDEN.values()
    assert registry.search("https://py" + "pi.org/simple") and not registry.search("a copy.org")
    assert path.search("see /" + "work/main") and path.search("/" + "farm/x") and not path.search("~/home/work/x")


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_tracked_file_names(what: str) -> None:
    found = []
    for file in tracked_files():
        for number, line in enumerate(file.read_bytes().decode(errors="replace").splitlines(), 1):
            if FORBIDDEN[what].search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert found == []


def test_the_layer_table_has_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    linter = project["tool"]["importlinter"]
    packages = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert set(linter["root_packages"]) == packages
    layers = " | ".join(linter["contracts"][0]["layers"])
    assert set(re.findall(r"\w+", layers)) == packages
