"""scripts/: what root runs leaves other people's files and folders as they were, also after it was killed."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
SITES_POLICY = "#!/bin/sh\nexit 104\n"
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="what root's scripts do")


@pytest.fixture
def programs(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """An environment that finds the given shell lines under their names before any other program."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def make(**lines: str) -> dict[str, str]:
        for name, line in lines.items():
            (folder / name.replace("_", "-")).write_text(f"#!/bin/sh\n{line}\n")
            (folder / name.replace("_", "-")).chmod(0o755)
        left_out = ("DOCKER_HOST", "ALMANAC_REQUIRE_CLUSTER")
        kept = {name: value for name, value in os.environ.items() if name not in left_out}
        return {**kept, "PATH": f"{folder}:{os.environ['PATH']}", "T": str(tmp_path)}

    return make


# --- packages.sh


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "sbin").mkdir()
    return tmp_path / "sbin" / "policy-rc.d"


Install = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def install(programs: Callable[..., dict[str, str]], policy: Path) -> Install:
    """packages.sh, to which packages are missing, with an apt-get that does the given line instead of installing."""

    def start(line: str) -> subprocess.Popen[bytes]:
        apt = f'case " $* " in *" install "*) {line} ;; esac'
        env = programs(apt_get=apt, apt_cache="exit 0", no_python="exit 1")
        env |= {"POLICY": str(policy), "PYTHON": "no-python"}
        return subprocess.Popen(
            [SCRIPTS / "packages.sh", "python"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    return start


@pytest.mark.parametrize("sites", [None, SITES_POLICY])
@pytest.mark.parametrize("killed", [0, 1, 2])
def test_the_policy_of_services_is_afterwards_as_before(
    install: Install, policy: Path, sites: str | None, killed: int
) -> None:
    """Also after runs that nothing could stop from leaving theirs."""
    if sites:
        policy.write_text(sites)
        policy.chmod(0o750)
    for _ in range(killed):
        assert install("kill -9 $PPID").wait(300) == -9
        assert "exit 101" in policy.read_text()
    install('cp -p "$POLICY" "$T/seen"').wait(300)
    seen = policy.parents[1] / "seen"
    assert subprocess.run([seen], check=False).returncode == 101
    assert [path.name for path in policy.parent.iterdir()] == ([policy.name] if sites else [])
    if sites:
        assert policy.read_text() == sites
        assert stat.S_IMODE(policy.stat().st_mode) == 0o750


def test_a_policy_that_the_site_made_after_a_killed_run_is_kept(install: Install, policy: Path) -> None:
    policy.write_text("old")
    install("kill -9 $PPID").wait(300)
    policy.write_text(SITES_POLICY)
    install("true").wait(300)
    assert policy.read_text() == SITES_POLICY
    assert [path.name for path in policy.parent.iterdir()] == [policy.name]


def test_two_installations_follow_each_other(install: Install, policy: Path) -> None:
    log = policy.parents[1] / "log"
    wait = 'until [ -e "$T/go" ]; do sleep 0.05; done'
    line = f'echo begin >>"$T/log"; {wait}; [ ! -e "$POLICY" ] || echo end >>"$T/log"'
    first = install(line)
    while not log.exists():
        time.sleep(0.02)
    second = install(line)
    time.sleep(0.5)  # it gets as far as it gets
    (log.parent / "go").touch()
    first.wait(300)
    second.wait(300)
    assert log.read_text().split() == ["begin", "end", "begin", "end"]
    assert not policy.exists()


# --- with-docker.sh


def engine(programs: Callable[..., dict[str, str]], root: Path) -> str:
    """Return with-docker.sh's output; its dockerd writes to the folder's `started` and ends."""
    line = 'touch "$ALMANAC_DOCKER_ROOT/started"; exit 1'
    env = programs(docker="exit 1", docker_compose="exit 0", dockerd=line, debootstrap="", iptables="", ip="exit 1")
    env |= {"ALMANAC_DOCKER_ROOT": str(root), "ALMANAC_SITES": "24.11"}
    done = subprocess.run(
        [SCRIPTS / "with-docker.sh", "true"], env=env, capture_output=True, text=True, check=True, timeout=300
    )
    return done.stderr


@pytest.mark.parametrize("fault", ["link", "another user's", "open to others", "file"])
def test_no_engine_writes_where_somebody_else_can(
    programs: Callable[..., dict[str, str]], tmp_path: Path, fault: str
) -> None:
    root = tmp_path / "almanac-docker"
    if fault == "link":
        (tmp_path / "elsewhere").mkdir()
        root.symlink_to("elsewhere")
    elif fault == "file":
        root.touch()
    else:
        root.mkdir()
        os.chown(root, 65534 if fault == "another user's" else 0, 0)
        root.chmod(0o777 if fault == "open to others" else 0o755)
    assert f"{root} is a link, not root's, or others may write to it" in engine(programs, root)
    assert not (root / "started").exists()


@pytest.mark.parametrize("is_there", [False, True])
def test_the_engines_folder_is_roots_alone(
    programs: Callable[..., dict[str, str]], tmp_path: Path, is_there: bool
) -> None:
    root = tmp_path / "almanac-docker"
    if is_there:
        root.mkdir(mode=0o755)
    assert "dockerd did not start" in engine(programs, root)
    assert (root / "started").exists()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


# --- venv.sh


def test_an_environment_that_is_a_link_stays_as_it_was(tmp_path: Path) -> None:
    """pip would install this checkout into another one's environment."""
    (tmp_path / "other").mkdir()
    (tmp_path / ".venv").symlink_to("other")
    done = subprocess.run(
        ["bash", SCRIPTS / "venv.sh", tmp_path / ".venv"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert f"{tmp_path}/.venv is a symbolic link to other; a folder of this checkout is expected" in done.stderr
    assert f"try: rm {tmp_path}/.venv" in done.stderr
    assert (tmp_path / ".venv").is_symlink()
    assert list((tmp_path / "other").iterdir()) == []


# --- debian/*.postrm


@pytest.mark.parametrize("package", ["slurm-almanac", "slurm-almanac-client"])
@pytest.mark.parametrize("mounted", ["", "/var/lib/almanac-advice", "/var/lib/almanac-advice/sched"])
def test_a_purge_leaves_a_mounted_advice_folder(tmp_path: Path, mounted: str, package: str) -> None:
    """It may be the controller's; the names of what is mounted come from a file of ours."""
    advice, logs = (tmp_path / name for name in ("var/lib/almanac-advice", "var/log/almanac"))
    ended = tmp_path / "var/spool/almanac/ended"
    for folder in (advice / "sched", logs, ended, tmp_path / "var/lib/almanac"):
        folder.mkdir(parents=True)
    mounts = ["/", "/var/lib/almanac-advice-of-others", *filter(None, [mounted])]
    lines = (f"36 35 98:0 / {tmp_path}{path} rw,noatime shared:1 - ext4 /dev/sda1 rw\n" for path in mounts)
    (tmp_path / "mountinfo").write_text("".join(lines))
    script = (SCRIPTS / "debian" / f"{package}.postrm").read_text()
    for path in ("/var/lib/", "/var/log/", "/var/spool/", "/etc/", "/run/"):
        script = script.replace(path, f"{tmp_path}{path}")
    script = script.replace("/proc/self/mountinfo", f"{tmp_path}/mountinfo")
    subprocess.run(["sh", "-c", script, "postrm", "purge"], check=True, timeout=300)
    assert (advice / "sched").exists() == bool(mounted)
    assert logs.exists() == ended.exists() == (package == "slurm-almanac-client")
    assert ended.parent.exists()
    assert (tmp_path / "var/lib/almanac").exists()


@pytest.mark.parametrize("package", ["slurm-almanac", "slurm-almanac-client"])
def test_a_purge_ends_well_where_the_advice_cannot_be_removed(tmp_path: Path, package: str) -> None:
    script = (SCRIPTS / "debian" / f"{package}.postrm").read_text().replace("rm -rf --one-file-system", "false")
    for path in ("/var/lib/", "/var/log/", "/var/spool/", "/etc/", "/run/"):
        script = script.replace(path, f"{tmp_path}{path}")
    subprocess.run(["sh", "-c", script, "postrm", "purge"], check=True, timeout=300)


def test_what_remains_after_a_purge_is_what_the_page_says(tmp_path: Path) -> None:
    """Every folder that the package makes has its row in docs/questions.md, and is there or gone as that says."""
    page = (SCRIPTS.parent / "docs" / "questions.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(/var/[^`]+)`[^|]*\| ([^|]+) \|", page, re.MULTILINE))
    made = [line.split()[1] for line in (SCRIPTS.parent / "slurm_hooks/system/tmpfiles.conf").read_text().splitlines()
            if line.startswith("d ")]  # fmt: skip
    assert {path for path in made if str(Path(path).parent) not in made} == set(rows)
    for path in made:
        (tmp_path / path[1:]).mkdir(parents=True, exist_ok=True)
    for package in ("slurm-almanac", "slurm-almanac-client"):
        script = (SCRIPTS / "debian" / f"{package}.postrm").read_text()
        for path in ("/var/lib/", "/var/log/", "/var/spool/", "/etc/", "/run/"):
            script = script.replace(path, f"{tmp_path}{path}")
        subprocess.run(["sh", "-c", script, "postrm", "purge"], check=True, timeout=300)
    for path, said in rows.items():
        stays = (tmp_path / path[1:]).exists()
        assert said.startswith("stays" if stays and "/spool/" not in path else ("removed", "`ended` removed")), path
    assert not (tmp_path / "var/spool/almanac/ended").exists()
