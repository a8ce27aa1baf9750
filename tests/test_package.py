"""The Debian package, built here by its one command. The cluster's tests install it."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from almanac import __version__
from cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
HOME = "opt/slurm-almanac"


@dataclass(frozen=True)
class Package:
    """The file, what it holds unpacked, and the names of all of it as dpkg-deb lists them."""

    file: Path
    root: Path
    listing: list[str]

    def python(self, *argv: str) -> str:
        """Run with the package's interpreter, which finds its libraries where it lies."""
        program = self.root / HOME / "bin" / "python"
        return subprocess.run([program, "-I", *argv], capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    missing = shutil.which("dpkg-deb") is None or subprocess.call(["/usr/bin/python3", "-c", "import ensurepip"]) != 0
    if missing and os.environ.get("ALMANAC_REQUIRE_CLUSTER") != "1":
        pytest.skip("needs dpkg-deb, and /usr/bin/python3 with python3-venv")
    folder = tmp_path_factory.mktemp("package")
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    built = subprocess.run(
        [ROOT / "scripts" / "build-deb.sh", folder / "out"],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = (folder / "out").iterdir()
    subprocess.run(["dpkg-deb", "-R", file, folder / "root"], check=True)
    listed = subprocess.run(["dpkg-deb", "-c", file], capture_output=True, text=True, check=True).stdout
    yield Package(file, folder / "root", listed.splitlines())
    shutil.rmtree(folder)  # pytest would keep three of these large folders


def test_it_depends_on_exactly_the_python_it_was_built_with(package: Package) -> None:
    control = (package.root / "DEBIAN" / "control").read_text()
    minor = package.python("-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    after = f"3.{int(minor.split('.')[1]) + 1}"
    assert f"python3 (>= {minor}), python3 (<< {after}~)" in control
    assert f"Version: {__version__}+py{minor}\n" in control
    assert "@" not in control.replace("@localhost", "")
    assert "slurm" not in control.split("Depends:")[1].split("\n")[0]


def test_everything_is_roots_and_nobody_elses_to_write(package: Package) -> None:
    for line in package.listing:
        mode, owner, *_ = line.split()
        assert owner == "root/root", line
        assert mode[0] == "l" or mode[5] == mode[8] == "-", line
        assert "s" not in mode, line


def test_it_brings_what_the_hooks_need_where_they_look_for_it(package: Package) -> None:
    share = package.root / "usr" / "share"
    for folder, place in (("lua", "almanac/lua"), ("standalone", "almanac/slurm")):
        ours = {path.name: path.read_bytes() for path in (ROOT / "slurm_hooks" / folder).glob("*.lua")}
        assert ours
        assert {path.name: path.read_bytes() for path in (share / place).iterdir()} == ours
    for name in ("almanac", "sbatch-almanac"):
        assert (package.root / "usr" / "bin" / name).readlink() == Path(f"/{HOME}/bin/{name}")
        program = package.root / HOME / "bin" / name
        assert program.read_text().startswith(f"#!/{HOME}/bin/python -I\n")
        assert stat.S_IMODE(program.stat().st_mode) == 0o755
    for wanted in ("on", "off"):
        name = f"almanac-power-{wanted}"
        assert (package.root / "usr" / "sbin" / name).readlink() == Path(f"/{HOME}/bin/{name}")
        program = package.root / HOME / "bin" / name
        assert program.read_text().startswith(f"#!/{HOME}/bin/python -I\n")
        assert stat.S_IMODE(program.stat().st_mode) == 0o755
        assert package.python(str(program), "--help").startswith(f"usage: {name} HOSTLIST")
    for wanted in ("on", "off"):
        name = f"almanac-power-{wanted}"
        assert (package.root / "usr" / "sbin" / name).readlink() == Path(f"/{HOME}/bin/{name}")
        program = package.root / HOME / "bin" / name
        assert program.read_text().startswith(f"#!/{HOME}/bin/python -I\n")
        assert stat.S_IMODE(program.stat().st_mode) == 0o755
        assert package.python(str(program), "--help").startswith(f"usage: {name} HOSTLIST")
    assert (package.root / HOME / "bin" / "python3").readlink() == Path("/usr/bin/python3")


def test_it_runs_from_where_it_lies(package: Package) -> None:
    program = str(package.root / HOME / "bin" / "almanac")
    assert package.python(program, "--version") == f"almanac, version {__version__}\n"
    for name in COMMANDS:
        assert "Usage:" in package.python(program, name, "--help")
    heavy = ("duckdb", "lightgbm", "matplotlib.pyplot", "numpy", "pandas", "prometheus_api_client",
             "pyarrow.parquet", "rapidfuzz", "rich", "scipy.stats")  # fmt: skip
    code = "".join(f"import {name}\n" for name in heavy) + "import cli.main; print(cli.main.__file__)"
    assert package.python("-c", code).startswith(str(package.root))


def test_no_file_knows_where_it_was_built(package: Package) -> None:
    found = subprocess.run(
        ["grep", "-rlaE", r"/slurm-almanac\.[A-Za-z0-9]{6}/", str(package.root)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout == ""


def test_libraries_come_compiled_for_users_who_cannot_write_there(package: Package) -> None:
    sources = [path for path in (package.root / HOME / "lib").rglob("*.py") if path.stat().st_size]
    compiled = {path.name.split(".")[0] for path in (package.root / HOME / "lib").rglob("*.pyc")}
    assert {path.stem.split(".")[0] for path in sources} <= compiled


def test_no_test_tool_or_extra_is_in_it(package: Package) -> None:
    names = {path.name.split("-")[0].lower() for path in (package.root / HOME / "lib").rglob("*.dist-info")}
    assert {"click", "duckdb", "lightgbm", "pandas", "pyarrow", "slurm_almanac"} <= names
    assert (
        names & {"pip", "setuptools", "pytest", "mypy", "ruff", "dask", "distributed", "click_man", "hatchling"}
        == set()
    )


def test_configuration_files_are_marked_as_such(package: Package) -> None:
    marked = (package.root / "DEBIAN" / "conffiles").read_text().split()
    assert marked == ["/etc/almanac/almanac.toml", "/etc/logrotate.d/slurm-almanac"]


def test_manual_units_and_completions_are_in_it(package: Package) -> None:
    names = {line.split()[5] for line in package.listing}
    pages = {f"./usr/share/man/man1/almanac-{name}.1.gz" for name in COMMANDS}
    assert pages | {"./usr/share/man/man1/almanac.1.gz", "./usr/share/man/man1/sbatch-almanac.1.gz"} <= names
    assert {f"./usr/share/man/man8/almanac-power-{wanted}.8.gz" for wanted in ("on", "off")} <= names
    units = {f"./usr/lib/systemd/system/{path.name}" for path in (ROOT / "slurm_hooks/system/systemd").iterdir()}
    assert units <= names
    assert {"./usr/share/bash-completion/completions/almanac", "./usr/share/zsh/vendor-completions/_almanac"} <= names


@pytest.mark.parametrize("name", ["postinst", "prerm", "postrm"])
def test_maintainer_scripts_are_valid_and_do_nothing_when_asked_for_nothing(package: Package, name: str) -> None:
    script = package.root / "DEBIAN" / name
    subprocess.run(["/bin/sh", "-n", script], check=True)
    assert stat.S_IMODE(script.stat().st_mode) == 0o755
    assert script.read_text().splitlines()[2:] and re.search(r"(?m)^set -e$", script.read_text())


def test_the_store_outlives_a_purge_unless_asked(package: Package) -> None:
    script = (package.root / "DEBIAN" / "postrm").read_text()
    assert script.index('ALMANAC_PURGE_STORE:-}" = 1') < script.index("rm -rf /var/lib/almanac\n")
