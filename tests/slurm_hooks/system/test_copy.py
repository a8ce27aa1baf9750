"""almanac-copy.sh with a real rsync, from one folder to another: what it copies, refuses, and leaves as it was."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_hooks.root_files import acl_for, acl_on

SCRIPT = Path(__file__).parents[3] / "slurm_hooks" / "system" / "copy" / "almanac-copy.sh"
IS_ROOT = os.getuid() == 0
ALICE = 2001 if IS_ROOT else os.getuid()
SLURM = 2064 if IS_ROOT else os.getgid()
pytestmark = pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync")


class Hosts:
    """The advice of almanac's host, the folder of another host, and that host's settings."""

    def __init__(self, root: Path) -> None:
        self.source, self.here, self.settings = root / "source", root / "here", root / "settings"
        for path, mode in ((self.source, 0o711), (self.source / "user", 0o711), (self.source / "sched", 0o750)):
            path.mkdir()
            path.chmod(mode)
        os.chown(self.source / "sched", -1, SLURM)
        self.launcher = root / "distribute"
        self.launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -m cli.distribute "$@"\n')
        self.launcher.chmod(0o755)
        self.give("user/2001/advice", b"advice of alice", 0o400, ALICE)
        self.give("user/_site/advice", b"advice for all", 0o444)
        self.give("user/2001/reports/7-1-ab", b"report", 0o400, ALICE)
        self.give("sched/2001", b"advice of alice", 0o640, group=SLURM)
        (self.source / "mail").mkdir()
        self.give("mail/2001", b"off", 0o640, ALICE)
        self.set()

    def give(self, name: str, content: bytes, mode: int, owner: int = -1, group: int = -1) -> None:
        path = self.source / name
        for folder in reversed([each for each in path.parents if not each.exists()]):
            folder.mkdir(mode=0o711)
            folder.chmod(0o711)
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        os.chown(path, owner, group)
        path.chmod(mode)

    def set(self, *lines: str, parts: str = "user sched") -> None:
        sources = [f"{part.upper()}_SOURCE={self.source}/{part}" for part in parts.split()]
        self.settings.write_text(
            "\n".join([*sources, f"ADVICE_DIR={self.here}", f"DISTRIBUTE={self.launcher}", *lines, ""])
        )

    def copy(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/bin/sh", SCRIPT, self.settings], capture_output=True, text=True, timeout=300, check=False
        )

    def copied(self) -> dict[str, tuple[str, int, int]]:
        """Mode, owner, and group of everything that is here now, but for what root alone can open."""
        paths = [path for path in self.here.rglob("*") if not str(path.relative_to(self.here)).startswith(".")]
        found = {path: path.lstat() for path in paths}
        return {
            str(path.relative_to(self.here)): (oct(stat.S_IMODE(at.st_mode)), at.st_uid, at.st_gid)
            for path, at in sorted(found.items())
        }


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


def test_each_file_is_roots_and_nobody_elses_eyes_get_to_it(hosts: Hosts) -> None:
    done = hosts.copy()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    me, mine = os.getuid(), os.getgid()
    mode = "0o440" if IS_ROOT else "0o400"
    assert hosts.copied() == {
        "sched": ("0o750", me, SLURM),
        "sched/2001": ("0o640", me, SLURM),
        "user": ("0o711", me, mine),
        "user/2001": ("0o711", me, mine),
        "user/2001/advice": (mode, me, mine),
        "user/2001/reports": ("0o711", me, mine),
        "user/2001/reports/7-1-ab": (mode, me, mine),
        "user/_site": ("0o711", me, mine),
        "user/_site/advice": ("0o444", me, mine),
    }
    assert stat.S_IMODE(hosts.here.stat().st_mode) == 0o711
    assert stat.S_IMODE((hosts.here / ".copy").stat().st_mode) == 0o700
    assert not IS_ROOT or acl_on(str(hosts.here / "user/2001/advice")) == acl_for(ALICE)
    assert hosts.copy().returncode == 0


@pytest.mark.parametrize("what", ["a link", "open to others", "a file"])
@pytest.mark.parametrize("name", ["", "sched", ".copy"])
def test_a_folder_that_others_could_write_to_is_refused(hosts: Hosts, what: str, name: str) -> None:
    hosts.here.mkdir(mode=0o711)
    path, aside = hosts.here / name, hosts.here.parent / "aside"
    if what == "open to others":
        path.mkdir(exist_ok=True)
        path.chmod(0o777)
    else:
        aside.mkdir()
        if path.exists():
            path.rmdir()
        path.symlink_to(aside) if what == "a link" else path.write_text("")
    done = hosts.copy()
    assert done.returncode == 3
    assert done.stderr.startswith("error: ") and str(path) in done.stderr and "\ntry: " in done.stderr
    assert not aside.exists() or list(aside.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("USER_SOURCE= SCHED_SOURCE=", "no source is set in"),
        ("USER_SOURCE='a b:/c'", "a blank in a setting"),
    ],
)
def test_wrong_settings_are_refused_with_what_to_do(hosts: Hosts, line: str, said: str) -> None:
    hosts.set(line)
    done = hosts.copy()
    assert done.returncode == 3
    assert said in done.stderr and "\ntry: " in done.stderr


@pytest.mark.parametrize("mode", [0o666, 0o620])
def test_settings_that_others_can_write_are_not_run(hosts: Hosts, mode: int) -> None:
    hosts.set(f"touch {hosts.here.parent}/run")
    hosts.settings.chmod(mode)
    done = hosts.copy()
    assert done.returncode == 3 and not (hosts.here.parent / "run").exists()
    assert f"mode {mode:o}, expected root" in done.stderr and f"chmod go-w {hosts.settings}" in done.stderr


def test_nothing_is_lost_while_the_source_is_away(hosts: Hosts) -> None:
    assert hosts.copy().returncode == 0
    before = hosts.copied()
    hosts.source.rename(hosts.source.with_name("away"))
    done = hosts.copy()
    assert done.returncode == 5
    assert (
        "error: not everything was copied: user sched; files of the last copy are still in place\ntry: " in done.stderr
    )
    assert hosts.copied() == before


def test_it_copies_from_an_rsync_daemon(hosts: Hosts, tmp_path: Path) -> None:
    config = tmp_path / "rsyncd.conf"
    identity = "uid = 0\ngid = 0\n" if IS_ROOT else ""
    config.write_text(f"use chroot = no\n{identity}[advice]\npath = {hosts.source}\nread only = yes\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["rsync", "--daemon", "--no-detach", f"--config={config}", f"--port={port}", "--address=127.0.0.1"]
    with subprocess.Popen(command) as server:
        try:
            for _ in range(200):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            hosts.set(f"USER_SOURCE=rsync://127.0.0.1:{port}/advice/user", parts="")
            done = hosts.copy()
        finally:
            server.terminate()
    assert (done.returncode, done.stderr) == (0, "")
    assert hosts.copied()["user/2001/advice"][:2] == ("0o440" if IS_ROOT else "0o400", os.getuid())
    assert not (hosts.here / "sched").exists()


@pytest.mark.skipif(shutil.which("rrsync") is None, reason="no rrsync here")
def test_over_ssh_it_gets_only_the_folder_that_the_key_allows(hosts: Hosts, tmp_path: Path) -> None:
    """With an ssh that does what sshd does with the line of authorized_keys in docs/admin.md."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    log = tmp_path / "options"
    ssh.write_text(
        f'#!/bin/sh\nwhile [ "${{1#-}}" != "$1" ]; do echo "$1" >>{log}; shift; done\necho "host $1" >>{log}\nshift\n'
        f'SSH_ORIGINAL_COMMAND="$*" exec rrsync -ro {hosts.source}/user\n'
    )
    ssh.chmod(0o755)
    path = f"PATH={ssh.parent}:$PATH"
    hosts.set(path, "USER_SOURCE=almanac1:", parts="")
    done = hosts.copy()
    assert (done.returncode, done.stderr) == (0, "")
    assert hosts.copied()["user/2001/advice"][:2] == ("0o440" if IS_ROOT else "0o400", os.getuid())
    assert {"-oBatchMode=yes", "-oStrictHostKeyChecking=yes", "host almanac1"} <= set(log.read_text().splitlines())
    hosts.set(path, "SCHED_SOURCE=almanac1:../sched", parts="")
    assert hosts.copy().returncode == 5
    assert list((hosts.here / "sched").iterdir()) == []
