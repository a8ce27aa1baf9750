"""The wheel's scripts, installed by a real pip: nothing that a caller sets may break them or bring foreign code in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from almanac import __version__

ROOT = Path(__file__).parents[1]
PACKAGES = ("almanac", "cli", "click", "encodings", "reports", "slurm_hooks", "telemetry")
MODULES = ("json", "os", "re", "site", "sitecustomize", "usercustomize", "tomllib")
FOREIGN = "foreign code"
SBATCH = """#!{python} -IS
import json, sys
environ = open("/proc/self/environ", "rb").read().hex()
json.dump({{"argv": sys.argv, "environ": environ}}, open({out!r}, "w"))
sys.exit(7)
"""
GPU = {"CUDA_VISIBLE_DEVICES": "0"}
JOB = ["-J", "train", "--gpus=2", "--wrap", "sleep 1"]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the scripts in a new environment, which borrows the libraries of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder / "wheel"), str(ROOT)]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = (folder / "wheel").iterdir()
    home = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=300)
    install = ["--python", str(home / "bin/python"), "install", "--no-deps", str(wheel)]
    subprocess.run([*pip, *install], check=True, timeout=300)
    (site,) = (home / "lib").glob("python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    yield home / "bin"
    shutil.rmtree(folder)


class Caller:
    """A user's folder with modules that are named like ours and Python's, and a stand-in for sbatch."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.out = root / "got.json"
        self.planted = root / "planted"
        for name in PACKAGES:
            self._plant(self.planted / name / "__init__.py")
        for name in MODULES:
            self._plant(self.planted / f"{name}.py")
        user_site = root / f"base/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        self._plant(user_site / "usercustomize.py")
        (user_site / "evil.pth").write_text(f"import sys; print({FOREIGN!r})\n")
        self.program("bin/sbatch", SBATCH.format(python=sys.executable, out=str(self.out)))
        self.environ = {"PATH": f"{root}/bin:/usr/bin:/bin", "HOME": str(root)}

    def _plant(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"print({FOREIGN!r})\n")

    def program(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(
        self, *argv: str | Path, environ: Mapping[str, str] | Mapping[bytes, bytes]
    ) -> subprocess.CompletedProcess[str]:
        self.out.unlink(missing_ok=True)
        return subprocess.run(
            argv, cwd=self.planted, env=environ, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip

    @property
    def argv(self) -> list[str]:
        words: list[str] = json.loads(self.out.read_text())["argv"]
        return words[1:]

    @property
    def environment(self) -> dict[bytes, bytes]:
        """Return the words that sbatch, and so the job, got."""
        block = bytes.fromhex(json.loads(self.out.read_text())["environ"])
        pairs = (entry.partition(b"=") for entry in block.split(b"\0") if entry)
        return {name: value for name, _, value in pairs}


@pytest.fixture
def caller(tmp_path: Path) -> Caller:
    return Caller(tmp_path)


HOSTILE = {
    "path": {"PYTHONPATH": "{root}/planted"},
    "current folder": {"PYTHONPATH": ":."},
    "home": {"PYTHONHOME": "/nonexistent"},
    "user's packages": {"PYTHONUSERBASE": "{root}/base"},
    "library folder": {"PYTHONPLATLIBDIR": "nonexistent"},
    "start-up file": {"PYTHONSTARTUP": "{root}/planted/json.py", "PYTHONINSPECT": "1"},
    "noise": {"PYTHONWARNINGS": "error", "PYTHONVERBOSE": "1", "PYTHONDEVMODE": "1", "PYTHONPROFILEIMPORTTIME": "1"},
    "the scripts' own variables": {"line": "#!/bin/false/python", "self": "/x", "ALMANAC_ENVIRON_0": "eA=="},
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_a_caller_sets_neither_breaks_them_nor_runs(scripts: Path, caller: Caller, kind: str) -> None:
    hostile = {name: value.format(root=caller.root) for name, value in HOSTILE[kind].items()}
    environ = {**caller.environ, **hostile}
    done = caller.run(scripts / "almanac", "--version", environ=environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"almanac, version {__version__}\n", "")
    for name in ("almanac-power-off", "almanac-power-on"):
        done = caller.run(scripts / name, "--help", environ=environ)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(f"usage: {name} HOSTLIST")
        assert caller.run(scripts / name, "n1;reboot", environ=environ).returncode in (2, 3)
    done = caller.run(scripts / "almanac-distribute", "--help", environ=environ)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: almanac-distribute ")
    done = caller.run(scripts / "almanac-collect", "--help", environ=environ)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: almanac-collect ")
    pack = caller.run(scripts / "almanac-pack", "--items=3", "--", "echo", "{}", environ={**environ, **GPU})
    assert (pack.returncode, pack.stdout) == (0, "") and FOREIGN not in pack.stderr
    assert (caller.planted / "pack-3.out").read_text() == "3\n"
    done = caller.run(scripts / "sbatch-almanac", *JOB, environ={**environ, "ALMANAC_ADVICE": "apply"})
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    assert caller.argv == JOB


@pytest.mark.parametrize("shell", [[], ["dash"], ["bash", "--posix"]])
@pytest.mark.parametrize("length", [10, 96_000 - 400, 300_000])
def test_sbatch_and_its_job_get_the_callers_very_environment(
    scripts: Path, caller: Caller, shell: list[str], length: int
) -> None:
    """Whatever /bin/sh is: each changes PWD, SHLVL or _, and dash drops the functions of bash (`module`)."""
    environ = {os.fsencode(name): os.fsencode(value) for name, value in caller.environ.items()}
    environ |= {
        b"BASH_FUNC_module%%": b"() {  eval $(modulecmd bash $*)\n}", b"SHLVL": b"3", b"_": b"/usr/bin/x",
        b"PYTHONPATH": b"/home/alice/python", b"PYTHONHOME": b"/nonexistent", b"line": b"\xff\n", b"LC_ALL": b"C",
        b"PWD": b"/elsewhere", b"1": b"one", b"folder": b"",
    }  # fmt: skip
    environ |= {b"LONG_%d" % number: b"x" * min(100_000, length) for number in range(max(1, length // 100_000))}
    assert caller.run(*shell, scripts / "sbatch-almanac", *JOB, environ=environ).returncode == 7
    assert caller.environment == environ


@pytest.mark.parametrize(("variables", "words"), [(9, 0), (17, 0), (3, 6), (0, 17)])
def test_as_much_as_sbatch_itself_takes_is_submitted(scripts: Path, caller: Caller, variables: int, words: int) -> None:
    """Of 100 kB each: a copy of the environment must not be what makes it too long for Linux."""
    large = {f"LONG_{number}": "x" * 100_000 for number in range(variables)}
    argv = [*JOB, *["y" * 100_000] * words]
    assert caller.run(scripts / "sbatch-almanac", *argv, environ={**caller.environ, **large}).returncode == 7
    assert caller.argv == argv
    assert {name: value for name, value in caller.environment.items() if name.startswith(b"LONG_")} == {
        name.encode(): value.encode() for name, value in large.items()
    }
    assert not [name for name in caller.environment if name.startswith(b"ALMANAC_ENVIRON")]


def test_links_to_the_scripts_work(scripts: Path, caller: Caller) -> None:
    """`sbatch` earlier in PATH, as docs/hooks.md says; a link to a link; with a PATH that lacks readlink."""
    early = caller.root / "early"
    early.mkdir()
    (early / "wrapper").symlink_to(scripts / "sbatch-almanac")
    (early / "sbatch").symlink_to("wrapper")
    (early / "almanac").symlink_to(scripts / "almanac")
    environ = {**caller.environ, "PATH": f"{early}:{caller.root}/bin", "PYTHONPATH": str(caller.planted)}
    assert caller.run(early / "sbatch", *JOB, environ=environ).returncode == 7
    assert caller.argv == JOB
    assert caller.run(early / "almanac", "--version", environ=environ).stdout == f"almanac, version {__version__}\n"


def test_a_copy_of_almanac_pack_as_sbatch_makes_it_works(scripts: Path, caller: Caller) -> None:
    copy = caller.root / "slurm_script"
    shutil.copy(scripts / "almanac-pack", copy)
    environ = {**caller.environ, **GPU, "PATH": f"{scripts}:/usr/bin:/bin"}
    done = caller.run(copy, "--items=5", "--", "sh", "-c", "exit {}", environ=environ)
    assert done.returncode == 5 and "item 5 ended with code 5" in done.stderr


def test_a_link_named_sbatch_does_not_call_itself_for_ever(scripts: Path, caller: Caller) -> None:
    """With so few files the mark that sbatch-almanac leaves for itself cannot be set."""
    early = caller.program("early/sbatch", "")
    early.unlink()
    early.symlink_to(scripts / "sbatch-almanac")
    environ = {**caller.environ, "PATH": f"{early.parent}:{caller.environ['PATH']}"}
    assert caller.run("sh", "-c", 'ulimit -n 64; exec "$0" "$@"', early, *JOB, environ=environ).returncode == 7
    assert caller.argv == JOB


def test_errors_and_the_demo_name_the_command_as_it_was_typed(scripts: Path, caller: Caller) -> None:
    done = caller.run(scripts / "almanac", "no-such", environ=caller.environ)
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: almanac ")


@pytest.mark.parametrize("kind", ["gone", "removed", "copied"])
def test_without_its_python_sbatch_gets_what_was_typed(scripts: Path, caller: Caller, kind: str) -> None:
    """The environment's Python was upgraded away, or the package is half removed. No script calls itself for ever."""
    broken = caller.root / "broken"
    broken.mkdir()
    shutil.copy(scripts / "sbatch-almanac", broken)
    if kind == "gone":
        (broken / "sbatch-almanac-python").write_text("#!/nonexistent/python3\n")
    if kind == "copied":  # beside another Python
        (broken / "python3").symlink_to(sys.executable)
    (broken / "sbatch").symlink_to("sbatch-almanac")
    environ = {**caller.environ, "PATH": f"{broken}:{caller.environ['PATH']}"}
    assert caller.run(broken / "sbatch", *JOB, environ=environ).returncode == 7
    assert caller.argv == JOB
    looping = caller.program("site/sbatch", f'#!/bin/sh\nexec {broken}/sbatch-almanac "$@"\n')
    done = caller.run(looping, *JOB, environ={**caller.environ, "PATH": str(looping.parent)})
    assert done.returncode != 0


def test_the_scripts_know_their_interpreter_by_pip_alone(scripts: Path) -> None:
    """pip drops what stands behind #!python, so that -I cannot stand there; what it writes is what the scripts read."""
    first = (scripts / "sbatch-almanac-python").read_text().splitlines()[0]
    assert first == f"#!{scripts}/python" or first.startswith(f"#!{scripts}/python3")
