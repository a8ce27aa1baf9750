"""Places and contents of the lab's files: ports, users, fake GPUs, Slurm's configuration."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pwd
import random
import re
import secrets
import shutil
import socket
import stat
import string
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from processes import LabError

HERE = Path(__file__).resolve().parent
PROLOG = HERE.parents[1] / "slurm_hooks/prolog/almanac-gpus.sh"
ENDED = HERE.parents[1] / "slurm_hooks/spool/almanac-ended.sh"
NODES = ("n1", "n2", "n3", "n4")
GPUS_PER_NODE = 4
PORTS_PER_LAB = 20
# Offsets from a lab's first port, which only claims the block; 1 to 4 are the slurmds.
CTLD_PORT, DBD_PORT, DB_PORT, BMC_PORT, FIRST_SPARE_PORT = 5, 6, 7, 8, 9
COMMANDS = (
    "munged", "mariadbd", "mariadb-install-db", "slurmdbd", "slurmctld", "slurmd", "sbatch", "sacct",
    "setpriv", "useradd", "ipmi_sim", "ipmitool", "openssl",
)  # fmt: skip
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FOLDERS = (
    "etc", "log", "state", "spool", "munge", "db", "dev", "hooks", "out", "home", "prolog", "hpc_job", "profiles",
    "ended", "bmc",
)  # fmt: skip
PACKAGES = ("almanac", "slurm", "telemetry", "advisor", "slurm_hooks")
"""Those of ours that the programs of users and nodes need."""
POWER_MODULES = (
    "sushy", "sushy-*", "requests", "urllib3", "idna", "charset_normalizer", "certifi", "dateutil", "stevedore", "pbr",
    "ClusterShell", "msgspec",
)  # fmt: skip
"""Modules that almanac-power-off and -on import."""
SOCKET_PATH_MAX = 107


def packed_code() -> bytes:
    """Our packages without the heavy rest, as a user could copy them."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name in PACKAGES:
            tar.add(HERE.parents[1] / name, name, filter=lambda each: None if "__pycache__" in each.name else each)
    return buffer.getvalue()


def missing_commands(extra: Iterable[str] = ()) -> list[str]:
    """The programs that the lab needs and that are not installed."""
    return [name for name in (*COMMANDS, *extra) if shutil.which(name, path=PATH) is None]


def slurm_release() -> tuple[int, int]:
    """(22, 5) of "slurm-wlm 22.05.8"."""
    text = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=True, env={"PATH": PATH}).stdout
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None:
        raise LabError(f"slurmd -V says {text!r}, expected a release such as 22.05.8")
    return int(match[1]), int(match[2])


def free_ports(base: int | None = None) -> tuple[int, socket.socket]:
    """The first port of a block that nobody uses, and the socket that claims the block while it is held.

    The block lies below the range from which Linux hands out ports of outgoing connections. Raises LabError
    where the block at `base` is taken.
    """
    bases = [base] if base else random.SystemRandom().sample(range(20000, 32000, PORTS_PER_LAB), 50)
    for first in bases:
        claim = socket.socket()
        try:
            claim.bind(("127.0.0.1", first))
            claim.listen()
            for port in range(first + 1, first + PORTS_PER_LAB):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            claim.close()
            continue
        return first, claim
    raise LabError(f"no free block of {PORTS_PER_LAB} ports (tried {bases[0]} and {len(bases) - 1} more)")


def python_for_others() -> str:
    """This Python, or the host's of the same version: SlurmUser cannot reach one in root's home. Raises LabError."""
    version = str(sys.version_info[:2])
    for program in (getattr(sys, "_base_executable", sys.executable), "/usr/bin/python3"):
        argv = [program, "-I", "-c", "import sys; print(sys.version_info[:2])"]
        with contextlib.suppress(OSError):
            done = subprocess.run(argv, user="slurm", extra_groups=[], capture_output=True, text=True, check=False)
            if done.stdout.strip() == version:
                return program
    raise LabError(f"no Python {version} that the user slurm can run: the power programs need one (/usr/bin/python3)")


@dataclass(frozen=True)
class Layout:
    """The files of one lab below `root`. write() may be repeated: keys and data of an earlier start stay."""

    root: Path
    base_port: int
    users: Sequence[str]
    cluster: str
    extra_slurm_conf: str = ""

    def write(self) -> None:
        """Makes folders, users, fake GPUs and configuration. Raises LabError where the root is too deep."""
        if len(str(self.root / "munge/sock")) > SOCKET_PATH_MAX:
            raise LabError(f"{self.root} is too long: a Unix socket's path has at most {SOCKET_PATH_MAX} bytes")
        for name in FOLDERS:
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755)
        for name in ("out", "profiles"):
            (self.root / name).chmod(0o1777)
        for node in NODES:
            (self.root / "hpc_job" / node).mkdir(exist_ok=True)
        for user in self.users:
            self._make_user(user)
        self._make_gpus()
        self._make_munge_key()
        shutil.chown(self.root / "ended", "slurm")
        (self.root / "ended").chmod(0o770)
        for name in ("state", "log", "spool"):
            shutil.chown(self.root / name, "slurm", "slurm")
        shutil.chown(self.root / "db", "mysql", "mysql")
        self._write_conf()
        self._write_hooks()
        self._copy_programs()

    def _make_user(self, user: str) -> None:
        """An account of the host (left there), with a home of this lab's own."""
        with Path(__file__).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two labs may start at once
            try:
                account = pwd.getpwnam(user)
            except KeyError:
                argv = ["useradd", "--no-create-home", "--shell", "/bin/bash", user]
                subprocess.run(argv, check=True, env={"PATH": PATH})
                account = pwd.getpwnam(user)
        home = self.root / "home" / user
        home.mkdir(mode=0o700, exist_ok=True)
        os.chown(home, account.pw_uid, account.pw_gid)

    def _make_gpus(self) -> None:
        # slurmd wants device nodes behind File= of gres.conf: these are /dev/null's.
        for index in range(GPUS_PER_NODE):
            device = self.root / f"dev/nvidia{index}"
            if not device.exists():
                os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))

    def _make_munge_key(self) -> None:
        key = self.root / "munge/key"
        if not key.exists():
            key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        key.parent.chmod(0o755)
        for path in (key.parent, key):
            shutil.chown(path, "munge", "munge")

    def _fill(self, template: str, target: str, mode: int, **more: str) -> None:
        """Writes conf/<template> with its $names replaced. Raises KeyError where one is not known."""
        values = {
            "root": str(self.root),
            "cluster": self.cluster,
            "host": socket.gethostname().split(".")[0],
            **{f"node_port_{number}": str(self.base_port + number) for number in range(1, 5)},
            "first_job": f"{self.base_port}000",
            "ctld_port": str(self.base_port + CTLD_PORT),
            "dbd_port": str(self.base_port + DBD_PORT),
            "db_port": str(self.base_port + DB_PORT),
            "bmc_port": str(self.base_port + BMC_PORT),
        }
        text = string.Template((HERE / "conf" / template).read_text()).substitute(values, **more)
        (self.root / target).write_text(text)
        (self.root / target).chmod(mode)

    def _write_conf(self) -> None:
        self._fill("slurm.conf.in", "etc/slurm.conf", 0o644)
        with (self.root / "etc/slurm.conf").open("a") as conf:
            conf.write(self.extra_slurm_conf)
        self._fill("gres.conf.in", "etc/gres.conf", 0o644)
        for name in ("job_submit.lua", "cli_filter.lua"):
            shutil.copy(HERE.parents[1] / "docker/etc" / name, self.root / "etc" / name)
        self._fill("slurmdbd.conf.in", "etc/slurmdbd.conf", 0o600)
        shutil.chown(self.root / "etc/slurmdbd.conf", "slurm", "slurm")
        # Nothing here uses cgroups, and in many containers they cannot be written or are not mounted. 22.05 dies on
        # "disabled", which later releases want, and asks for a mounted hierarchy only where it has to find the version.
        plugin = "disabled" if slurm_release() >= (23, 11) else "cgroup/v1"
        (self.root / "etc/cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")

    def _write_hooks(self) -> None:
        for shipped in (PROLOG, ENDED):
            (self.root / "hooks" / shipped.name).write_bytes(shipped.read_bytes())
            (self.root / "hooks" / shipped.name).chmod(0o755)
        for when in ("prolog", "epilog"):
            self._fill("node-hook.in", f"hooks/{when}", 0o755, script=f"{self.root}/hooks/{PROLOG.name}", when=when)
        self._fill("ended-hook.in", "hooks/ended", 0o755, script=f"{self.root}/hooks/{ENDED.name}")
        self._fill("node-switch.in", "hooks/node-switch", 0o755)
        python = python_for_others()
        for wanted in ("on", "off"):
            self._fill("node-power.in", f"hooks/node-power-{wanted}", 0o755, wanted=wanted, python=python)
        self._fill("almanac-power.toml.in", "etc/almanac-power.toml", 0o644)
        self._fill("bmc.toml.in", "etc/bmc.toml", 0o600)
        shutil.chown(self.root / "etc/bmc.toml", "slurm")

    def _copy_programs(self) -> None:
        """The power programs, where SlurmUser can read them: the checkout may be closed to others."""
        installed = Path(sysconfig.get_paths()["purelib"])
        found = [HERE.parents[1] / name for name in (*PACKAGES, "cli")]
        found += [path for name in POWER_MODULES for path in installed.glob(name)]
        for path in found:
            ignored = shutil.ignore_patterns("__pycache__", "tests")
            shutil.copytree(path, self.root / "lib" / path.name, ignore=ignored, dirs_exist_ok=True)
