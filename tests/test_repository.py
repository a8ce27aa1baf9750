"""Rules about the tree itself: what no tracked file may hold, sizes, and the layer table."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Written so that this file does not hold what it forbids.
FORBIDDEN = {
    "the host of a package registry": re.compile(
        r"py[p]i\.org|python[h]osted\.org|(deb|security|snapshot)\.debia[n]\.org|registry\.np[m]js\.org"
    ),
    "a path of the machine it was written on": re.compile(r"(^|[^A-Za-z0-9_.])/(work|farm)/", re.MULTILINE),
}
MAX_LINES = 600


def tracked_files() -> list[Path]:
    """Files that git tracks, or would (not ignored)."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout  # fmt: skip
    paths = (ROOT / name for name in listed.decode().split("\0") if name)
    return [path for path in paths if path.is_file()]


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


def test_no_module_is_too_long_to_know() -> None:
    lengths = {
        str(file.relative_to(ROOT)): len(file.read_bytes().splitlines())
        for file in tracked_files()
        if file.suffix == ".py"
    }
    assert {file: lines for file, lines in lengths.items() if lines > MAX_LINES} == {}


def test_the_layer_table_has_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    linter = project["tool"]["importlinter"]
    packages = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert set(linter["root_packages"]) == packages
    layers = " | ".join(linter["contracts"][0]["layers"])
    assert set(re.findall(r"\w+", layers)) == packages
