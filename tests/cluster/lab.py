"""A private Slurm on one host: munge, MariaDB, slurmdbd, slurmctld and four slurmds with fake GPUs.

Everything lives below one root folder and on loopback ports of its own; no service of the host is touched.
n1 and n2 have the features gpu,hbm40g; n3 and n4 gpu,hbm80g; each has 4 GPUs of type a100. Needs root.

As a command: lab.py up ROOT | down ROOT | env ROOT
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import random
import re
import secrets
import shutil
import socket
import string
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

sys.path.insert(0, str(Path(__file__).parent))

from processes import MARK, Daemon, LabError, describe, lab_processes, sweep, tail, wait_until

HERE = Path(__file__).resolve().parent
PROLOG = HERE.parents[1] / "slurm_hooks/prolog/almanac-gpus.sh"
NODES = ("n1", "n2", "n3", "n4")
GPUS_PER_NODE = 4
PORTS_PER_LAB = 20
COMMANDS = ("munged", "mariadbd", "mariadb-install-db", "slurmdbd", "slurmctld", "slurmd", "sbatch", "sacct", "sacctmgr")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENDED = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT".split()
)


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


class SlurmLab:
    """`with SlurmLab(root) as lab:` is a running cluster; leaving ends every process of it, whatever happened.

    root: a folder that other users can reach (parents 0755), with a path short enough for Unix sockets.
    Ports: base (claim), +1..+4 slurmd, +5 slurmctld, +6 slurmdbd, +7 MariaDB; +8.. are for the caller.
    """

    def __init__(
        self,
        root: Path,
        base_port: int | None = None,
        users: Sequence[str] = ("alice", "bob", "carol"),
        extra_slurm_conf: str = "",
        cluster: str = "lab",
    ) -> None:
        self.root = root.resolve()
        self.users = tuple(users)
        self.cluster = cluster
        self.base_port = base_port or 0
        self._extra_slurm_conf = extra_slurm_conf
        self._daemons: dict[str, Daemon] = {}

    def __enter__(self) -> SlurmLab:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # what a caller asks of a running lab

    @property
    def slurm_conf(self) -> Path:
        return self.root / "etc/slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """The whole environment of a command that talks to this cluster."""
        return {"PATH": PATH, "LC_ALL": "C.UTF-8", "SLURM_CONF": str(self.slurm_conf)}

    def run(
        self, *argv: str | Path, user: str = "root", stdin: str | None = None, check: bool = True, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command as `user`. Raises LabError, with what it said, where it fails and `check` is set."""
        account = pwd.getpwnam(user)
        done = subprocess.run(
            [str(part) for part in argv],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=self.root / "out",
            env={**self.env, "USER": user, "LOGNAME": user, "HOME": str(self.root / "home" / user)},
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=[],
        )
        if check and done.returncode:
            raise LabError(f"{argv[0]} as {user}: status {done.returncode}\n{done.stdout}{done.stderr}{self._log()}")
        return done

    def sbatch(self, user: str, *options: str, script: str = "#!/bin/sh\nsleep 1\n") -> int:
        """Submits `script` as `user` and returns the job id. Output goes to out/<job id>.out."""
        done = self.run("sbatch", "--parsable", "--output=%j.out", *options, user=user, stdin=script)
        return int(done.stdout.strip().split(";")[0])

    def sacct(self, *options: str) -> list[list[str]]:
        """The rows of `sacct -nPX --delimiter=| OPTIONS`, as root."""
        rows = self.run("sacct", "-n", "-P", "-X", *options).stdout.splitlines()
        return [row.split("|") for row in rows]

    def job_states(self, job_ids: Iterable[int]) -> dict[int, str]:
        """What accounting says of each job, the newest record: its state's first word. Unknown jobs are absent."""
        wanted = ",".join(map(str, job_ids))
        rows = self.sacct("-D", "-j", wanted, "-S", "now-2days", "-o", "JobIDRaw,State")
        return {int(job): state.split()[0] for job, state in rows}

    def wait_for_jobs(self, *job_ids: int, timeout_s: float = 60) -> dict[int, str]:
        """Waits until accounting has the end of each job, and returns their states."""
        states: dict[int, str] = {}

        def all_ended() -> bool:
            states.update(self.job_states(job_ids))
            return all(states.get(job) in ENDED for job in job_ids)

        wait_until(f"the end of jobs {job_ids} in sacct", all_ended, timeout_s, self._logs("slurmctld"))
        return states

    def wait_for_state(self, job_id: int, state: str, timeout_s: float = 30) -> None:
        """Waits until squeue says that the job is in `state`, such as RUNNING."""

        def is_there() -> bool:
            shown = self.run("squeue", "-h", "-j", str(job_id), "-o", "%T", check=False).stdout
            return shown.strip() == state

        wait_until(f"job {job_id} to be {state}", is_there, timeout_s, self._logs("slurmctld"))

    def node_states(self) -> dict[str, str]:
        rows = self.run("sinfo", "-h", "-N", "-o", "%N %T").stdout.split("\n")
        return dict(row.split() for row in rows if row)

    def ports(self) -> Iterator[int]:
        """Ports of this lab's block that its Slurm leaves to the caller."""
        yield from range(self.base_port + 8, self.base_port + PORTS_PER_LAB)

    # life and death

    def start(self) -> None:
        """Starts every server and waits for idle nodes. Raises LabError, with a log's end."""
        if os.geteuid() != 0:
            raise LabError("the lab needs root: Slurm's daemons and its users' jobs run as several users")
        if absent := missing_commands():
            raise LabError(f"not installed: {', '.join(absent)}")
        self.base_port, claim = free_ports(self.base_port or None)
        with contextlib.closing(claim):
            self._write_files()
            self._start_munge()
            self._start_database()
            self._start_slurmdbd()
            self._start_slurmctld()
            for node in NODES:
                self.start_node(node)
            self._add_accounts()
            self._wait_for_idle()
            (self.root / "port").write_text(f"{self.base_port}\n")

    def stop(self) -> None:
        """Ends every process of the lab. Raises LabError where one will not end."""
        for daemon in reversed(self._daemons.values()):
            daemon.stop()
        self._daemons.clear()
        if self.root.is_dir():
            sweep(self.root)

    def start_node(self, node: str) -> None:
        (self.root / "spool" / node).mkdir(exist_ok=True)
        self.start_daemon(f"slurmd.{node}", "slurmd", "-D", "-N", node)

    def stop_node(self, node: str) -> None:
        self._daemons.pop(f"slurmd.{node}").stop()

    def start_daemon(self, name: str, *argv: str | Path, env: Mapping[str, str] | None = None) -> Daemon:
        """Starts one more server, which stop() ends; its output goes to log/<name>.out."""
        log = self.root / "log" / f"{name}.out"
        self._daemons[name] = Daemon(name, argv, self.root, log=log, env={**self.env, **(env or {})})
        return self._daemons[name]

    def _logs(self, name: str) -> list[Path]:
        return [self.root / "log" / f"{name}.out", self.root / "log" / f"{name}.log"]

    def _log(self) -> str:
        return tail(self.root / "log/slurmctld.log", 10)

    def _wait(self, name: str, check: Sequence[str | Path], timeout_s: float = 30) -> None:
        """Waits until a command succeeds, and gives up at once where the server has ended."""

        def answers() -> bool:
            self._daemons[name].check()
            try:
                return self.run(*check, check=False, timeout_s=5).returncode == 0
            except subprocess.TimeoutExpired:
                return False

        wait_until(f"{name} to answer {check[0]}", answers, timeout_s, self._logs(name))

    def _write_files(self) -> None:
        for name in ("etc", "log", "state", "spool", "munge", "db", "dev", "hooks", "out", "home", "prolog", "hpc_job"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755)
        (self.root / "out").chmod(0o1777)
        for node in NODES:
            (self.root / "hpc_job" / node).mkdir(exist_ok=True)
        self._make_users()
        self._make_gpus()
        for name in ("state", "log", "spool"):
            shutil.chown(self.root / name, "slurm", "slurm")
        self._write_conf()

    def _make_users(self) -> None:
        for user in self.users:
            try:
                account = pwd.getpwnam(user)
            except KeyError:
                subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/bash", user], check=True, env=self.env)
                account = pwd.getpwnam(user)
            home = self.root / "home" / user
            home.mkdir(mode=0o700, exist_ok=True)
            os.chown(home, account.pw_uid, account.pw_gid)

    def _make_gpus(self) -> None:
        # slurmd wants device nodes behind File= of gres.conf: these are /dev/null's.
        for index in range(GPUS_PER_NODE):
            device = self.root / f"dev/nvidia{index}"
            if not device.exists():
                os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))

    def _write_conf(self) -> None:
        port = self.base_port
        values = {
            "root": str(self.root),
            "cluster": self.cluster,
            "host": socket.gethostname().split(".")[0],
            "script": str(self.root / "hooks/almanac-gpus.sh"),
            **{f"node_port_{number}": str(port + number) for number in range(1, 5)},
            "ctld_port": str(port + 5),
            "dbd_port": str(port + 6),
            "db_port": str(port + 7),
        }

        def fill(template: str, target: str, mode: int, **more: str) -> None:
            text = string.Template((HERE / "conf" / template).read_text()).substitute(values, **more)
            (self.root / target).write_text(text)
            (self.root / target).chmod(mode)

        fill("slurm.conf.in", "etc/slurm.conf", 0o644)
        with self.slurm_conf.open("a") as conf:
            conf.write(self._extra_slurm_conf)
        fill("gres.conf.in", "etc/gres.conf", 0o644)
        fill("slurmdbd.conf.in", "etc/slurmdbd.conf", 0o600)
        shutil.chown(self.root / "etc/slurmdbd.conf", "slurm", "slurm")
        shutil.copy(PROLOG, self.root / "hooks/almanac-gpus.sh")
        (self.root / "hooks/almanac-gpus.sh").chmod(0o755)
        fill("node-hook.in", "hooks/prolog", 0o755, when="prolog")
        fill("node-hook.in", "hooks/epilog", 0o755, when="epilog")
        # Needed from 23.11 where cgroups are not writable; 22.05's slurmd dies on this line and needs no such file.
        if slurm_release() >= (23, 2):
            (self.root / "etc/cgroup.conf").write_text("CgroupPlugin=disabled\n")

    def _start_munge(self) -> None:
        folder = self.root / "munge"
        key = folder / "key"
        if not key.exists():
            key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        for path in (folder, key):
            shutil.chown(path, "munge", "munge")
        folder.chmod(0o755)
        files = [f"--{name}={folder / file}" for name, file in
                 (("key-file", "key"), ("socket", "sock"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))]
        self.start_daemon(
            "munged", "setpriv", "--reuid=munge", "--regid=munge", "--clear-groups",
            "munged", "--foreground", "--force", "--num-threads=4", *files,
        )  # fmt: skip
        self._wait("munged", ["munge", "-n", "-S", folder / "sock"])

    def _start_database(self) -> None:
        folder = self.root / "db"
        shutil.chown(folder, "mysql", "mysql")
        if not (folder / "data").is_dir():
            self.run(
                "mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={folder / 'data'}",
                "--auth-root-authentication-method=normal", "--skip-test-db", timeout_s=120,
            )  # fmt: skip
        self.start_daemon(
            "mariadbd", "mariadbd", "--no-defaults", "--user=mysql", f"--datadir={folder / 'data'}",
            f"--socket={folder / 'sock'}", f"--pid-file={folder / 'pid'}", "--bind-address=127.0.0.1",
            f"--port={self.base_port + 7}", "--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=64M",
            "--innodb-log-file-size=32M", "--innodb-lock-wait-timeout=900", "--max-allowed-packet=16M",
        )  # fmt: skip
        client = ("--no-defaults", f"--socket={folder / 'sock'}")
        self._wait("mariadbd", ["mariadb-admin", *client, "ping"], 60)
        grants = "".join(
            f"create user if not exists slurm@'{host}' identified by 'lab'; grant all on slurm_acct_db.* to slurm@'{host}';"
            for host in ("localhost", "127.0.0.1")
        )
        self.run("mariadb", *client, "-e", f"create database if not exists slurm_acct_db; {grants}")

    def _start_slurmdbd(self) -> None:
        self.start_daemon("slurmdbd", "slurmdbd", "-D")
        self._wait("slurmdbd", ["sacctmgr", "-n", "list", "cluster"], 60)
        # "Nothing new added" has status 1: the cluster is there from an earlier start.
        self.run("sacctmgr", "-i", "add", "cluster", self.cluster, check=False)

    def _start_slurmctld(self) -> None:
        self.start_daemon("slurmctld", "slurmctld", "-D")
        self._wait("slurmctld", ["scontrol", "ping"])

    def _add_accounts(self) -> None:
        self.run("sacctmgr", "-i", "add", "account", "ml", f"Cluster={self.cluster}", check=False)
        for user in self.users:
            self.run("sacctmgr", "-i", "add", "user", user, "Account=ml", check=False)
        wait_until(
            "the users' associations",
            lambda: self.run("sacctmgr", "-n", "-P", "show", "user", "format=User").stdout.count("\n") > len(self.users),
            20,
            self._logs("slurmdbd"),
        )

    def _wait_for_idle(self) -> None:
        logs = [self.root / f"log/slurmd.{node}.out" for node in NODES] + self._logs("slurmctld")

        def all_idle() -> bool:
            for node in NODES:
                self._daemons[f"slurmd.{node}"].check()
            return all(self.node_states().get(node) == "idle" for node in NODES)

        wait_until("idle nodes", all_idle, 60, logs)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("up", "down", "env", "ps"))
    parser.add_argument("root", type=Path)
    parser.add_argument("--base-port", type=int)
    options = parser.parse_args(argv)
    root = options.root.resolve()
    if options.action == "up":
        began = time.monotonic()
        lab = SlurmLab(root, options.base_port)
        try:
            lab.start()
        except BaseException:
            lab.stop()
            raise
        print(f"{lab.cluster}: nodes idle after {time.monotonic() - began:.1f} s, ports from {lab.base_port}")
    elif options.action == "down":
        sweep(root)
    elif options.action == "ps":
        print(describe(lab_processes(root)))
    else:
        print(f"export SLURM_CONF={root}/etc/slurm.conf")
    return 0


if __name__ == "__main__":
    sys.exit(main())
