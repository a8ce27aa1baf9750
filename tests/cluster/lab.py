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
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from bmc_emulators import BMC, bmc_env, ipmi_argv, redfish_argv
from layout import (
    BMC_PORT,
    DB_PORT,
    FIRST_SPARE_PORT,
    NODES,
    PATH,
    PORTS_PER_LAB,
    Layout,
    free_ports,
    missing_commands,
)
from processes import PATIENCE_S, Daemon, LabError, describe, lab_processes, sweep, tail, wait_until

ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
}  # fmt: skip


class SlurmLab:
    """`with SlurmLab(root) as lab:` is a running cluster; leaving ends every process of it, whatever happened.

    root: a folder that other users can reach (parents 0755), with a path short enough for Unix sockets.
    base_port: the first of a block of PORTS_PER_LAB free ports; without it, some free block is found.
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

    @property
    def slurm_conf(self) -> Path:
        return self.root / "etc/slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """The whole environment of a command that talks to this cluster."""
        return {"PATH": PATH, "LC_ALL": "C.UTF-8", "SLURM_CONF": str(self.slurm_conf)}

    def run(
        self,
        *argv: str | Path,
        user: str = "root",
        stdin: str | None = None,
        check: bool = True,
        timeout_s: float = PATIENCE_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as `user`. Raises LabError, with its output, if it fails and `check` is set."""
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
        """The rows of `sacct -anPX OPTIONS`: every user's, one per allocation. Ask for no field that a user writes."""
        rows = self.run("sacct", "-a", "-n", "-P", "-X", *options).stdout.splitlines()
        return [row.split("|") for row in rows]

    def job_states(self, job_ids: Iterable[int]) -> dict[int, str]:
        """Return each job's state in accounting, of the newest record: its first word. Unknown jobs are absent."""
        wanted = ",".join(map(str, job_ids))
        rows = self.sacct("-D", "-j", wanted, "-S", "now-2days", "-o", "JobIDRaw,State")
        return {int(job): state.split()[0] for job, state in rows}

    def wait_for_jobs(self, *job_ids: int) -> dict[int, str]:
        """Waits until accounting has the end of each job, and returns their states."""
        states: dict[int, str] = {}

        def all_ended() -> bool:
            states.update(self.job_states(job_ids))
            return all(states.get(job) in ENDED for job in job_ids)

        wait_until(f"the end of jobs {job_ids} in sacct", all_ended, self._logs("slurmctld"), lambda: states)
        return states

    def wait_for_state(self, job_id: int, state: str) -> None:
        """Waits until squeue says that the job is in `state`, such as RUNNING."""

        def is_there() -> bool:
            shown = self.run("squeue", "-h", "-j", str(job_id), "-o", "%T", check=False).stdout
            return shown.strip() == state

        wait_until(f"job {job_id} to be {state}", is_there, self._logs("slurmctld"))

    def node_states(self) -> dict[str, str]:
        rows = self.run("sinfo", "-h", "-N", "-o", "%N %T").stdout.split("\n")
        return dict(row.split() for row in rows if row)

    def ports(self) -> Iterator[int]:
        """Ports of this lab's block that its Slurm leaves to the caller."""
        yield from range(self.base_port + FIRST_SPARE_PORT, self.base_port + PORTS_PER_LAB)

    def start(self) -> None:
        """Starts every server and waits for idle nodes. Raises LabError, with a log's end."""
        if os.geteuid() != 0:
            raise LabError("the lab needs root: Slurm's daemons and its users' jobs run as several users")
        if absent := missing_commands():
            raise LabError(f"not installed: {', '.join(absent)}")
        self.base_port, claim = free_ports(self.base_port or None)
        with contextlib.closing(claim):
            Layout(self.root, self.base_port, self.users, self.cluster, self._extra_slurm_conf).write()
            self._start_munge()
            self._start_database()
            self._start_slurmdbd()
            self._start_slurmctld()
            self._start_bmcs()
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
            sweep(self.root, grace_s=3.0)

    def restart_controller(self) -> None:
        """Stops slurmctld, which saves its state, and starts it again; returns when it answers."""
        self.stop_server("slurmctld")
        self.start_server("slurmctld")

    def stop_server(self, name: str) -> None:
        """Stops slurmctld, which saves its state, or slurmdbd."""
        self._daemons.pop(name).stop(timeout_s=30)

    def start_server(self, name: str) -> None:
        """Starts slurmctld or slurmdbd; returns when it answers."""
        {"slurmctld": self._start_slurmctld, "slurmdbd": self._start_slurmdbd}[name]()

    def bmc(self, wanted: str, *nodes: str) -> str:
        """Switches nodes as their BMCs do: status, on, off, broken (the node never boots), mended."""
        settings = [f"{name}={value}" for name, value in self._bmc_env.items()]
        return "".join(self.run("env", *settings, BMC, node, wanted).stdout for node in nodes)

    @property
    def _bmc_env(self) -> dict[str, str]:
        return bmc_env(self.root / "bmc", self.root / "hooks/node-switch")

    def _start_bmcs(self) -> None:
        """n1 has a BMC that speaks IPMI, the others one that speaks Redfish."""
        folder, port = self.root / "bmc", self.base_port + BMC_PORT
        self.start_daemon("bmc.ipmi", *ipmi_argv(folder, NODES[0], port), env=self._bmc_env)
        self.start_daemon("bmc.redfish", *redfish_argv(folder, ",".join(NODES[1:]), port), env=self._bmc_env)

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

    def _wait(self, name: str, check: Sequence[str | Path]) -> None:
        """Waits until a command succeeds, and gives up at once where the server has ended."""

        def answers() -> bool:
            self._daemons[name].check()
            try:
                return self.run(*check, check=False, timeout_s=30).returncode == 0
            except subprocess.TimeoutExpired:
                return False

        wait_until(f"{name} to answer {check[0]}", answers, self._logs(name))

    def _start_munge(self) -> None:
        folder = self.root / "munge"
        files = [f"--{name}-file={folder / name}" for name in ("key", "pid", "log", "seed")]
        self.start_daemon(
            "munged", "setpriv", "--reuid=munge", "--regid=munge", "--clear-groups",
            "munged", "--foreground", "--force", "--num-threads=4", f"--socket={folder / 'sock'}", *files,
        )  # fmt: skip
        self._wait("munged", ["munge", "-n", "-S", folder / "sock"])

    def _start_database(self) -> None:
        folder = self.root / "db"
        # A server that starts removes the temporary tables of all others that share its tmpdir.
        own = ("--no-defaults", "--user=mysql", f"--datadir={folder / 'data'}", f"--tmpdir={folder}")
        if not (folder / "data").is_dir():
            self.run(
                "mariadb-install-db", *own,
                "--auth-root-authentication-method=normal", "--skip-test-db",
            )  # fmt: skip
        self.start_daemon(
            "mariadbd", "mariadbd", *own,
            f"--socket={folder / 'sock'}", f"--pid-file={folder / 'pid'}", "--bind-address=127.0.0.1",
            f"--port={self.base_port + DB_PORT}", "--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=64M",
            "--innodb-log-file-size=32M", "--innodb-lock-wait-timeout=900", "--max-allowed-packet=16M",
        )  # fmt: skip
        client = ("--no-defaults", f"--socket={folder / 'sock'}")
        self._wait("mariadbd", ["mariadb-admin", *client, "ping"])
        grants = "".join(
            f"create user if not exists slurm@'{host}' identified by 'lab';"
            f"grant all on slurm_acct_db.* to slurm@'{host}';"
            for host in ("localhost", "127.0.0.1")
        )
        self.run("mariadb", *client, "-e", f"create database if not exists slurm_acct_db; {grants}")

    def _start_slurmdbd(self) -> None:
        self.start_daemon("slurmdbd", "slurmdbd", "-D")
        self._wait("slurmdbd", ["sacctmgr", "-n", "list", "cluster"])
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
            lambda: (
                self.run("sacctmgr", "-n", "-P", "show", "user", "format=User").stdout.count("\n") > len(self.users)
            ),
            self._logs("slurmdbd"),
        )

    def _wait_for_idle(self) -> None:
        logs = [self.root / f"log/slurmd.{node}.out" for node in NODES] + self._logs("slurmctld")

        def all_idle() -> bool:
            for node in NODES:
                self._daemons[f"slurmd.{node}"].check()
            return all(self.node_states().get(node) == "idle" for node in NODES)

        wait_until("idle nodes", all_idle, logs, self.node_states)


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
