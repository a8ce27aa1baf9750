"""The Debian and RPM packages, built here from one tree. The cluster's tests install the Debian ones."""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from almanac import __version__
from cli.main import CLIENT_COMMANDS, COMMANDS

ROOT = Path(__file__).parents[1]
HOME = "opt/slurm-almanac"


CODE = "usr/share/almanac/python"
MAX_CLIENT_BYTES = 2_150_000
"""Goal for the package on login and compute nodes, with 170 kB of msgspec, and rich. 250 kB are prometheus_client and
nvidia-ml-py, which only almanac-collect needs; with them it had 2,125,712 bytes, and 1.86 million before."""


@dataclass(frozen=True)
class Package:
    """The files of slurm-almanac and slurm-almanac-client. root: where both are unpacked, without their control files;
    listing: all files in both, as dpkg-deb lists them; control: folders with the control files of each."""

    files: dict[str, Path]
    rpms: dict[str, Path]
    root: Path
    control: dict[str, Path]
    listing: dict[str, list[str]]

    def python(self, *argv: str) -> str:
        """Run with the package's interpreter, which finds its libraries next to itself."""
        program = self.root / HOME / "bin" / "python"
        return subprocess.run([program, "-I", *argv], capture_output=True, text=True, check=True, timeout=300).stdout

    def names(self, name: str) -> set[str]:
        """Files and links of one package."""
        return {line.split()[5].removeprefix(".") for line in self.listing[name] if not line.startswith("d")}


NAMES = ("slurm-almanac", "slurm-almanac-client")


def _ran(folder: Path, *argv: object, **variables: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        list(map(str, argv)), cwd=folder, env=environment | variables, capture_output=True, text=True, check=False,
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    missing = shutil.which("dpkg-deb") is None or shutil.which("rpmbuild") is None
    missing = missing or subprocess.call(["/usr/bin/python3", "-c", "import ensurepip"]) != 0
    if missing and os.environ.get("ALMANAC_REQUIRE_CLUSTER") != "1":
        pytest.skip("needs dpkg-deb, rpmbuild, and /usr/bin/python3 with python3-venv")
    folder = tmp_path_factory.mktemp("package")
    scripts, out, root = ROOT / "scripts", folder / "out", folder / "root"
    _ran(folder, scripts / "stage-packages.sh", folder / "stage", PYTHON="/usr/bin/python3")
    for kind in ("deb", "rpm"):
        _ran(folder, scripts / f"build-{kind}.sh", out, ALMANAC_STAGE=str(folder / "stage"))
    shutil.rmtree(folder / "stage")
    files = {name: _only(out, f"{name}_*.deb") for name in NAMES}
    for name, file in files.items():
        _ran(folder, "dpkg-deb", "-x", file, root)
        _ran(folder, "dpkg-deb", "-e", file, folder / name)
    yield Package(
        files=files,
        rpms={name: _only(out, f"{name}-0*.rpm") for name in NAMES},
        root=root,
        control={name: folder / name for name in NAMES},
        listing={name: _ran(folder, "dpkg-deb", "-c", file).splitlines() for name, file in files.items()},
    )
    shutil.rmtree(folder)  # pytest would keep three of these large folders


def test_it_depends_on_exactly_the_python_it_was_built_with(package: Package) -> None:
    control = (package.control["slurm-almanac"] / "control").read_text()
    minor = package.python("-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    after = f"3.{int(minor.split('.')[1]) + 1}"
    assert f"python3 (>= {minor}), python3 (<< {after}~)" in control
    assert f"Version: {__version__}+py{minor}\n" in control
    assert "@" not in control.replace("@localhost", "")
    assert f"Depends: slurm-almanac-client (= {__version__}+py{minor}), python3" in control
    client = (package.control["slurm-almanac-client"] / "control").read_text()
    assert f"Depends: python3 (>= {minor}), python3 (<< {after}~)\n" in client, "nor on Slurm"
    assert "Architecture: all\n" not in client
    assert f"Version: {__version__}+py{minor}\n" in client


def test_everything_is_roots_and_nobody_elses_to_write(package: Package) -> None:
    for line in [*package.listing["slurm-almanac"], *package.listing["slurm-almanac-client"]]:
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
    each = "import contextlib, sys\nfrom cli.main import main\nfor name in sys.argv[1:]:\n" \
        "    with contextlib.suppress(SystemExit):\n        main([name, '--help'])\n"  # fmt: skip
    assert package.python("-c", each, *COMMANDS).count("Usage:") == len(COMMANDS)
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


def test_modules_come_compiled_for_users_who_cannot_write_there(package: Package) -> None:
    folders = (package.root / HOME / "lib", package.root / CODE)
    sources = [path for folder in folders for path in folder.rglob("*.py") if path.stat().st_size]
    compiled = {path.name.split(".")[0] for folder in folders for path in folder.rglob("*.pyc")}
    assert {path.stem.split(".")[0] for path in sources} <= compiled
    unpacked = {name for name in package.names("slurm-almanac-client") if name.endswith(".pyc")}
    assert any(name.endswith("/advise.cpython-311.pyc") for name in unpacked) or sys.version_info[:2] != (3, 11)


def test_no_test_tool_or_extra_is_in_it(package: Package) -> None:
    folders = (package.root / HOME / "lib", package.root / CODE)
    names = {path.name.split("-")[0].lower() for folder in folders for path in folder.rglob("*.dist-info")}
    assert {"click", "duckdb", "lightgbm", "pandas", "pyarrow", "slurm_almanac", "sushy"} <= names
    assert (
        names & {"pip", "setuptools", "pytest", "mypy", "ruff", "dask", "distributed", "click_man", "hatchling"}
        == set()
    )


def test_configuration_files_are_marked_as_such(package: Package) -> None:
    marked = {name: (folder / "conffiles").read_text().split() for name, folder in package.control.items()}
    assert marked == {
        "slurm-almanac": ["/etc/logrotate.d/slurm-almanac"],
        "slurm-almanac-client": [
            "/etc/almanac/almanac.toml",
            "/etc/default/almanac-collect",
            "/etc/default/almanac-copy",
        ],
    }


def test_manual_units_and_completions_are_in_it(package: Package) -> None:
    full, client = package.names("slurm-almanac"), package.names("slurm-almanac-client")
    assert not full & client
    of_client = {f"/usr/share/man/man1/almanac-{name}.1.gz" for name in CLIENT_COMMANDS}
    names = ("almanac", "almanac-pack", "almanac-restart", "sbatch-almanac")
    programs = {f"/usr/share/man/man1/{name}.1.gz" for name in names}
    assert of_client | programs <= client
    assert {f"/usr/share/man/man1/almanac-{name}.1.gz" for name in COMMANDS} - of_client <= full
    assert {f"/usr/share/man/man8/almanac-power-{wanted}.8.gz" for wanted in ("on", "off")} <= full
    system = ROOT / "slurm_hooks/system"
    assert {f"/usr/lib/systemd/system/{path.name}" for path in (system / "systemd").iterdir()} <= full
    assert {"/usr/lib/systemd/system/almanac-collect.service", "/usr/share/man/man8/almanac-collect.8.gz"} <= client
    assert {f"/usr/lib/systemd/system/almanac-copy.{kind}" for kind in ("service", "timer")} <= client
    assert {"/usr/share/bash-completion/completions/almanac", "/usr/share/zsh/vendor-completions/_almanac"} <= client


# --- the client alone


@pytest.fixture
def client(package: Package, tmp_path: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs `almanac` of the client, as a user who can read no store. Its folder is moved: nothing else is found."""
    root = tmp_path / "root"
    subprocess.run(["dpkg-deb", "-x", package.files["slurm-almanac-client"], root], check=True)
    text = (root / "usr/libexec/almanac/almanac-client").read_text()
    assert text.startswith("#!/usr/bin/python3 -BIS\n") and text.count(f'"/{CODE}"') == 1
    program = text.replace(f'"/{CODE}"', f'"{root / CODE}"')
    config = tmp_path / "almanac.toml"
    config.write_text(f'[store]\npath = "{tmp_path}/store"\n[hooks]\nadvice_dir = "{tmp_path}/advice"\n')
    nobody = {} if os.getuid() else {"user": 65534, "group": 65534, "extra_groups": []}
    for folder in (root, *root.rglob("*")):
        assert folder.stat().st_mode & 0o004
    made = [folder for folder in tmp_path.parents if folder.name.startswith(("pytest-", "popen-"))]
    for folder in (tmp_path, *made):
        folder.chmod(0o755)

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/usr/bin/python3", "-BIS", "-c", program, "--config", str(config), *argv], cwd="/", text=True,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}, timeout=300, check=False, capture_output=True, **nobody,
        )  # fmt: skip

    yield run
    shutil.rmtree(root)


def test_the_client_is_small_and_needs_no_library_but_the_configurations_reader(package: Package) -> None:
    assert package.files["slurm-almanac-client"].stat().st_size < MAX_CLIENT_BYTES
    names = package.names("slurm-almanac-client")
    compiled = [name for name in names if name.endswith(".so") or "/opt/" in name]
    assert [name.split("/python/")[1].split(".")[0] for name in compiled] == ["msgspec/_core"]


def test_the_client_gives_a_user_the_published_advice(
    client: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    now_s = int(time.time())
    priority = {"mode": "observe", "points_per_e": 1000, "min_gpu_time_s": 60, "max_gpu_time_s": 8640000}
    text = {"almanac": "advice.json", "format": 1, "version": "v", "written_s": now_s, "expires_s": now_s + 3600,
            "mode": "off", "tell": False, "prompt": "ask", "priority": priority, "tiers": [], "rows": []}  # fmt: skip
    folder = tmp_path / "advice/user/_site"
    folder.mkdir(parents=True)
    (folder / "advice.json").write_text(json.dumps(text))
    for path in (folder.parents[1], folder.parent, folder):
        path.chmod(0o755)
    given = client("advise", "-J", "train", "--gpus=2", "--wrap", "true")
    assert (given.returncode, given.stderr) == (10, "")
    assert 'almanac: no advice yet for "train"' in given.stdout


def test_the_client_shows_a_user_their_published_jobs_and_reports(
    client: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    golden = ROOT / "tests/golden/files/published"
    listed, report = (json.loads((golden / name).read_text()) for name in ("jobs-of-a-user.json", "report.json"))
    shown, name = report["shown_id"], f"{report['job_id']}-{report['job']['submit_s']}-0123456789ab"
    listed["runs"][0] |= {"job_id": report["job_id"], "report": name}
    folder = tmp_path / f"advice/user/{os.getuid() or 65534}"
    (folder / "reports").mkdir(parents=True)
    for path, document in ((folder / "jobs", listed), (folder / "reports" / name, report)):
        path.write_bytes(gzip.compress(json.dumps(document).encode()))
        path.chmod(0o644)
    for path in (folder.parents[1], folder.parent, folder, folder / "reports"):
        path.chmod(0o755)
    said = client("report", shown)
    assert (said.returncode, said.stderr) == (0, "")
    assert shown in said.stdout and "Figures" in said.stdout
    assert [each["job_id"] for each in json.loads(client("report", shown, "--json").stdout)] == [report["job_id"]]
    said = client("jobs", "--ended-since", "@1")
    assert said.returncode == 0 and "the list last changed" in said.stderr
    assert len(said.stdout.splitlines()) > len(listed["history"])


def test_the_client_answers_for_jobs_that_only_slurm_knows(
    client: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    now_s, uid = int(time.time()), os.getuid() or 65534
    own = {"user_id": uid, "user_name": "nobody", "submit_time": now_s - 90, "name": "x", "cpus": 1, "time_limit": 60}
    waiting = {**own, "job_id": 5, "job_state": ["PENDING"], "state_reason": "Priority"}
    gpus = {"tres_alloc_str": "cpu=1,gres/gpu=2,node=1", "nodes": "n1"}
    running = {**own, **gpus, "job_id": 6, "job_state": ["RUNNING"], "start_time": now_s - 60}
    (tmp_path / "bin").mkdir()
    for name, text in (("squeue", json.dumps({"jobs": [waiting, running]})), ("sacct", ""), ("scontrol", "")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "bin").chmod(0o755)
    with (tmp_path / "almanac.toml").open("a") as config:
        config.write(f'[slurm]\nbin_dir = "{tmp_path}/bin"\n')
    said = client("report", "5", "6")
    assert (said.returncode, said.stderr) == (0, "")
    assert "Job 5 waits to start: jobs with a higher priority come first" in said.stdout
    assert "Still running" in said.stdout and "come after it ends" in said.stdout
    said = client("report", "7")
    assert said.returncode == 4 and "job 7 is in no record" in said.stderr


def test_the_client_says_what_it_cannot_do_and_where_that_works(
    client: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    shown = client("--help").stdout.split("show this message", 1)[-1]
    assert set(re.findall(r"^  ([a-z][a-z-]+)  +[a-z]", shown, re.M)) == set(CLIENT_COMMANDS)
    for command in CLIENT_COMMANDS:
        assert client(command, "--help").returncode == 0
    for words in (("summarize",), ("trial",), ("power", "status"), ("site-report",), ("demo",)):
        refused = client(*words)
        assert (refused.returncode, refused.stdout) == (1, ""), words
        assert refused.stderr.splitlines()[0] == (
            "error: this command runs on almanac's host: this one has the package slurm-almanac-client alone"
        ), refused.stderr
        assert len(refused.stderr.splitlines()) == 2
    assert "--host login" in client("doctor").stderr
    findings = client("doctor", "--host", "login")
    assert findings.returncode == 1
    assert findings.stdout.splitlines()[-1].startswith("This host is not ready: ")


def test_the_clients_restart_wrapper_runs_without_a_library(package: Package) -> None:
    text = (package.root / "usr/bin/almanac-restart").read_text()
    assert text.startswith("#!/usr/bin/python3 -BIS\n")
    program = text.replace(f'"/{CODE}"', f'"{package.root / CODE}"')
    ran = ["/usr/bin/python3", "-BIS", "-c", program, "--", "sh", "-c", "echo kept; exit 5"]
    done = subprocess.run(ran, capture_output=True, text=True, timeout=300, check=False, env={"PATH": "/usr/bin:/bin"})
    assert (done.returncode, done.stdout) == (5, "kept\n")
    assert "/usr/share/almanac/restart/torch_memory.py" in package.names("slurm-almanac-client")
    assert "/usr/share/almanac/unequal-gpus/unequal_sampler.py" in package.names("slurm-almanac-client")


def test_the_clients_collector_runs_with_the_clients_libraries_only(package: Package, tmp_path: Path) -> None:
    """Without a driver: it serves its own state, and says why there is no GPU."""
    text = (package.root / "usr/sbin/almanac-collect").read_text()
    assert text.startswith("#!/usr/bin/python3 -BIS\n")
    subprocess.run(["dpkg-deb", "-x", package.files["slurm-almanac-client"], tmp_path / "root"], check=True)
    program = text.replace(f'"/{CODE}"', f'"{tmp_path / "root" / CODE}"')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ran = ["/usr/bin/python3", "-BIS", "-c", program, f"--listen={address}"]
    with subprocess.Popen(ran, stderr=subprocess.PIPE, text=True, env={"PATH": "/usr/bin:/bin"}) as collector:
        assert collector.stderr is not None
        assert collector.stderr.readline() == "almanac-collect: no sample: NVML: NVML Shared Library Not Found\n"
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=300) as answer:
            assert "\nalmanac_collect_up 0.0\n" in answer.read().decode()
        collector.terminate()
    assert collector.returncode == 0


def test_the_clients_pack_launcher_runs_without_a_library(package: Package, tmp_path: Path) -> None:
    text = (package.root / "usr/bin/almanac-pack").read_text()
    assert text.startswith("#!/usr/bin/python3 -BIS\n")
    program = text.replace(f'"/{CODE}"', f'"{package.root / CODE}"')
    ran = ["/usr/bin/python3", "-BIS", "-c", program, "--items=5", "--", "sh", "-c", "echo {}; exit {}"]
    environ = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run(ran, capture_output=True, text=True, timeout=300, check=False, env=environ, cwd=tmp_path)
    assert (done.returncode, (tmp_path / "pack-5.out").read_text()) == (5, "5\n")


# --- the same as RPM


@pytest.mark.parametrize("name", NAMES)
def test_the_rpm_has_the_same_files(package: Package, name: str) -> None:
    listed = _ran(
        package.root, "rpm", "-qp", "--qf", "[%{FILEMODES:perms} %{FILEUSERNAME} %{FILENAMES}\\n]", package.rpms[name]
    )
    entries = [line.split(" ", 2) for line in listed.splitlines()]
    files = {path for mode, _, path in entries if mode[0] != "d"}
    assert files == {path.replace("/zsh/vendor-completions/", "/zsh/site-functions/") for path in package.names(name)}
    assert {owner for _, owner, _ in entries} == {"root"}
    assert not [mode for mode, *_ in entries if mode[0] != "l" and (mode[5] == "w" or mode[8] == "w" or "s" in mode)]
    marked = _ran(package.root, "rpm", "-qpc", package.rpms[name]).split()
    assert marked == (package.control[name] / "conffiles").read_text().split()


def test_the_rpms_need_the_python_they_were_built_with_and_each_other(package: Package) -> None:
    minor = package.python("-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    query = {name: _ran(package.root, "rpm", "-qpR", file).splitlines() for name, file in package.rpms.items()}
    client = [line.strip() for line in query["slurm-almanac-client"] if not line.startswith("rpmlib")]
    assert set(client) == {f"/usr/bin/python{minor}", "/bin/sh"}
    assert f"slurm-almanac-client = {__version__}-1.py{minor}" in query["slurm-almanac"]
    assert (
        _ran(package.root, "rpm", "-qp", "--qf", "%{ARCH}", package.rpms["slurm-almanac-client"]) == platform.machine()
    )


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_the_rpm_is_installed_and_removed_without_a_trace(package: Package, tmp_path: Path) -> None:
    """Into a folder, without the scripts, which a folder cannot run."""
    rpm = ["rpm", "--root", tmp_path, "--nodeps", "--noscripts"]
    _ran(tmp_path, *rpm, "-i", package.rpms["slurm-almanac-client"])
    program = (tmp_path / "usr/bin/sbatch-almanac").read_text()
    assert re.match(r"#!/usr/bin/python3\.\d+ -BIS\n", program)
    compile(program, "sbatch-almanac", "exec")
    with (tmp_path / "etc/almanac/almanac.toml").open("a") as config:
        config.write("# ours\n")
    _ran(tmp_path, *rpm, "-e", "slurm-almanac-client")
    left = {path.name for path in tmp_path.rglob("*almanac*") if not path.is_dir()}
    assert left == {"almanac.toml.rpmsave"}


@pytest.mark.parametrize("name", NAMES)
def test_the_rpms_scripts_are_those_of_the_debian_package(package: Package, name: str) -> None:
    text = _ran(package.root, "rpm", "-qp", "--scripts", package.rpms[name])
    parts = re.split(r"(?m)^(\w+) scriptlet \(using /bin/sh\):\n", text)[1:]
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    assert set(found) == {"postinstall", "preuninstall", "postuninstall"}
    for kind, script in (("postinstall", "postinst"), ("preuninstall", "prerm"), ("postuninstall", "postrm")):
        subprocess.run(["/bin/sh", "-n"], input=found[kind], text=True, check=True)
        body = (package.control[name] / script).read_text().split("\n", 1)[1]
        assert body.strip() in found[kind]
    # On an upgrade, RPM calls the old package's scripts with 1: nothing ends.
    for kind in ("preuninstall", "postuninstall"):
        assert subprocess.run(["/bin/sh", "-c", found[kind], "sh", "1"], check=True, capture_output=True).stdout == b""
        assert found[kind].startswith('[ "$1" = 0 ] || exit 0\nset -- remove\n')


# --- the Ansible role


IN_A_COPY = """
set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
cp -r "$2" "$1/upper/in"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
mount --rbind /dev "$1/root/dev"
mount -t proc proc "$1/root/proc"
exec chroot "$1/root" sh -c "$3"
"""
"""Runs a command on a copy of this machine's files, which is gone afterwards."""
VARIABLES = {
    "almanac_kinds": ["login"],
    "almanac_package_dir": "/in",
    "almanac_config": '[hooks]\nadvice_dir = "/var/lib/almanac-advice"\n',
    "almanac_hooks": ["cli-filter"],
    "almanac_slurm_dir": "/in/slurm",
    "almanac_copy_user_source": "/in/advice/user",
    "almanac_copy_key": "a key",
}


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
@pytest.mark.skipif(shutil.which("ansible-playbook") is None, reason="needs ansible-playbook")
def test_the_ansible_role_sets_up_a_login_node_and_a_second_run_changes_nothing(
    package: Package, tmp_path: Path
) -> None:
    given, box = tmp_path / "in", tmp_path / "box"
    shutil.copytree(ROOT / "scripts/ansible/roles", given / "roles")
    for folder in (given / "slurm", given / "advice/user/_site", box):
        folder.mkdir(parents=True)
    (given / "advice/user/_site/advice").write_text("for all")
    shutil.copy(package.files["slurm-almanac-client"], given)
    plays = [{"hosts": "localhost", "connection": "local", "roles": ["almanac"], "vars": VARIABLES}]
    (given / "play.yml").write_text(json.dumps(plays))
    play = "ansible-playbook -i localhost, /in/play.yml"
    command = f"{play}; {play}; /usr/libexec/almanac/almanac-copy.sh; cat /var/lib/almanac-advice/user/_site/advice; " \
        "ls /in/slurm /etc/systemd/system/timers.target.wants; stat -c '%a %n' /etc/almanac/*"  # fmt: skip
    alone = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", IN_A_COPY, "sh", box, given, command]
    shown = _ran(tmp_path, *alone, ANSIBLE_NOCOLOR="1", LC_ALL="C.UTF-8", HOME="/root", SYSTEMD_OFFLINE="1")
    first, second = re.findall(r"(?m)^localhost +: ok=\d+ +changed=(\d+) +unreachable=0 +failed=(\d+)", shown)
    assert int(first[0]) >= 6 and first[1] == "0", shown
    assert second == ("0", "0"), shown
    after = shown.split("PLAY RECAP")[2]
    assert "for all" in after and "cli_filter.lua\n" in after and "almanac-copy.timer\n" in after
    assert "600 /etc/almanac/copy.key" in after


@pytest.mark.parametrize("which", NAMES)
@pytest.mark.parametrize("name", ["postinst", "prerm", "postrm"])
def test_maintainer_scripts_are_valid_and_do_nothing_when_asked_for_nothing(
    package: Package, name: str, which: str
) -> None:
    script = package.control[which] / name
    subprocess.run(["/bin/sh", "-n", script], check=True)
    assert stat.S_IMODE(script.stat().st_mode) == 0o755
    assert script.read_text().splitlines()[2:] and re.search(r"(?m)^set -e$", script.read_text())


def test_the_store_outlives_a_purge_unless_asked(package: Package) -> None:
    script = (package.control["slurm-almanac"] / "postrm").read_text()
    assert script.index('ALMANAC_PURGE_STORE:-}" = 1') < script.index("rm -rf /var/lib/almanac\n")
