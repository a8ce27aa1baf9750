"""Other distributions of the environment: no clash with our generic top-level names, and a lock that pins all."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS = PROJECT["project"]["name"]
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
# Folders of the checkout that a test or a script imports from, though they are not installed.
TOP_LEVEL = {*PACKAGES, "tests", "docker", "benchmarks", "docs"}
LOCK = (ROOT / "requirements.lock").read_text()


def normalized(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def top_level_names(files: Iterable[str]) -> set[str]:
    """The names that installed files (relative to site-packages) can be imported by.

    A folder counts with any Python or extension module in it, since it is a package or a namespace package.
    """
    names = set()
    for file in map(PurePosixPath, files):
        if file.suffix not in (".py", ".so", ".pyi", ".pth") or file.parts[0] == "..":
            continue
        names.add(file.parts[0] if len(file.parts) > 1 else file.name.split(".")[0])
    return names


def locked() -> dict[str, str]:
    """Each pinned distribution of the lock and the lines that belong to it."""
    blocks = re.split(r"\n(?=[A-Za-z0-9])", re.sub(r"(?m)^\s*#.*\n", "", LOCK))
    return {normalized(re.split(r"[=\[<>~! ]", block, maxsplit=1)[0]): block for block in blocks if block.strip()}


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("reports/__init__.py", {"reports"}),
        ("docs/conf.py", {"docs"}),
        ("cli.py", {"cli"}),
        ("telemetry.cpython-311-x86_64-linux-gnu.so", {"telemetry"}),
        ("numpy/tests/test_a.py", {"numpy"}),
        ("docs/index.rst", set()),
        ("../../../bin/almanac.py", set()),
    ],
)
def test_top_level_names_of_a_file(file: str, names: set[str]) -> None:
    assert top_level_names([file]) == names


def test_no_dependency_ships_one_of_our_top_level_names() -> None:
    clashes = {
        distribution.name: taken
        for distribution in metadata.distributions()
        if normalized(distribution.name) != normalized(OURS)
        and (taken := TOP_LEVEL & top_level_names(map(str, distribution.files or ())))
    }
    assert clashes == {}


def test_our_own_packages_are_the_ones_imported() -> None:
    for package in PACKAGES:
        assert Path(str(__import__(package).__file__)).parent == ROOT / package


def test_the_lock_pins_every_distribution_with_hashes() -> None:
    assert len(locked()) > 20
    for name, block in locked().items():
        first = block.splitlines()[0]
        assert re.match(r"[A-Za-z0-9_.\-]+(\[[a-z,]+\])?==\d", first), first
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", block), f"{name} has no hash"


def test_the_lock_names_no_index() -> None:
    assert "://" not in LOCK
    assert not re.search(r"(?m)^\s*(-i|-f|--index-url|--extra-index-url|--find-links)\b", LOCK)


def test_the_lock_has_every_dependency_of_the_project() -> None:
    project, extras = PROJECT["project"], PROJECT["project"]["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["cluster"], *PROJECT["build-system"]["requires"]]
    names = {normalized(re.split(r"[=\[<>~!; ]", requirement, maxsplit=1)[0]) for requirement in wanted}
    assert names - {OURS} <= locked().keys()  # dev names our own extra


def _lock_subset() -> Any:
    spec = importlib.util.spec_from_file_location("lock_subset", ROOT / "scripts" / "lock_subset.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_package_gets_what_the_program_needs_and_no_more() -> None:
    text = _lock_subset().subset(LOCK, PROJECT["project"]["dependencies"])
    names = set(re.findall(r"(?m)^([a-z0-9-]+)==", text))
    assert {normalized(re.split(r"[><=]", wanted)[0]) for wanted in PROJECT["project"]["dependencies"]} <= names
    assert {"urllib3", "python-dateutil", "kiwisolver"} <= names, "what they need in turn"
    assert names & {"dask", "pytest", "mypy", "hatchling", "click-man", "pluggy", "cryptography"} == set()
    assert text.count("--hash=sha256:") >= len(names)
    assert "numpy==" in text and "python_full_version >= '3.12'" in text, "every Python's entry"


def test_a_subset_follows_the_lock_and_knows_what_is_missing() -> None:
    lock = (
        "# made by hand\na==1 \\\n    --hash=sha256:0\n    # via\n    #   slurm-almanac (pyproject.toml)\n    #   c\n"
        "b==2 ; python_version < '3' \\\n    --hash=sha256:0\n    # via a\nc==3 \\\n    --hash=sha256:0\n"
    )
    subset = _lock_subset().subset
    assert re.findall(r"(?m)^(\w)==", subset(lock, ["A>=1"])) == ["a", "b"]
    assert re.findall(r"(?m)^(\w)==", subset(lock, ["c[extra]"])) == ["a", "b", "c"]
    with pytest.raises(KeyError, match="d"):
        subset(lock, ["d"])


def test_pyslurm_is_of_the_release_that_the_backend_is_made_for_and_not_locked() -> None:
    """25.11.0 has slurm_msg_t of Slurm 24.11. It is compiled against the site's Slurm, so the lock leaves it out."""
    (extra,) = PROJECT["project"]["optional-dependencies"]["pyslurm"]
    assert extra == "pyslurm>=25.11.2,<25.12"
    assert f"'{extra}'" in (ROOT / "docs/pyslurm.md").read_text()
    assert "pyslurm" not in locked()
