"""The cluster of docker/ as a site: a compose project of its own, from an image that docker/build.sh has made."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from layout import NODES, PATH
from processes import LabError, wait_until
from sites import HOSTS, REPOSITORY, Site

SUITES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "forky"}
"""Debian's suite of a Slurm release."""

PREFIX = "almanac-test-"
COMPOSE_FILE = REPOSITORY / "docker/docker-compose.yml"
_HOST_OF = {"slurmctld": "ctl", "slurmdbd": "dbd"}
SPACES = ("-m", "-u", "-i", "-n", "-p", "-C")
"""nsenter's options for all namespaces of a container."""
CAPABILITIES = (
    "chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap", "net_bind_service", "net_raw",
    "sys_chroot", "mknod", "audit_write", "setfcap",
)  # fmt: skip
"""Docker's usual ones."""


class DockerSite(Site):
    """`with DockerSite("24.11") as site:` is a running cluster; leaving removes its containers and volumes."""

    etc_dir = "/etc/slurm"
    lua_dir = "/usr/share/almanac/lua"
    advice_dir = "/var/lib/almanac-advice"
    kept_dir = "/root/kept"

    def __init__(self, release: str) -> None:
        self.release = release
        self._suite = SUITES[release]
        self.project = f"{PREFIX}{self._suite}-{os.getpid()}"
        self._containers: dict[str, str] = {}
        self._pids: dict[str, str] = {}

    def __enter__(self) -> DockerSite:
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

    def start(self) -> None:
        """Returns when every node is idle. Raises LabError, with the controller's log, where that does not come."""
        self._remove_abandoned()
        self.compose("up", "-d", "--no-build")
        self._containers = {host: self._container(host) for host in (*HOSTS, "dbd", "prometheus", "mail")}
        shown = self._docker("inspect", "-f", "{{.State.Pid}}", *self._containers.values())
        self._pids = dict(zip(self._containers, shown.split(), strict=True))
        # Its timer reads the store every half minute: tests that want that start it.
        self.run("ctl", "root", "sh", "-c", "until sv -w 20 down almanac; do sleep 0.2; done")
        self.wait_for_idle()
        self.keep(self.lua_dir)
        shown = self.run("ctl", "root", "scontrol", "--version").stdout
        if self.release not in shown:
            raise LabError(f"{self.project} runs {shown.strip()}, expected Slurm {self.release}")

    def stop(self) -> None:
        self.compose("down", "-v", "--timeout", "20")

    def _remove_abandoned(self) -> None:
        """Removes this release's clusters of test runs that were killed outright."""
        shown = '{{.Label "com.docker.compose.project"}}'
        own = f"{PREFIX}{self._suite}-"  # a process with another release removes its own
        with COMPOSE_FILE.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = {line for line in self._docker("ps", "-a", "--format", shown).split() if line.startswith(own)}
            for project in found:
                if not Path(f"/proc/{project.rpartition('-')[2]}").exists():
                    self.compose("-p", project, "down", "-v", "--timeout", "2")

    def compose(self, *argv: str) -> str:
        """Run docker compose (v2 if installed) on this project. Raises LabError if it fails."""
        has_v2 = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0
        program = ["docker", "compose"] if has_v2 else ["docker-compose"]
        done = subprocess.run(
            [*program, "-f", str(COMPOSE_FILE), *argv],
            env={**os.environ, "SUITE": self._suite, "COMPOSE_PROJECT_NAME": self.project, "BMC_BOOT_S": "2"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode:
            raise LabError(f"{program} {argv}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def command(
        self, host: str, user: str, argv: Sequence[str], env: Mapping[str, str] | None = None, tty: bool = False
    ) -> list[str]:
        home = {"root": "/root", "slurm": "/"}.get(user, f"/home/{user}")
        whole = {
            "PATH": PATH,
            "LC_ALL": "C.UTF-8",
            "HOME": home,
            "USER": user,
            "LOGNAME": user,
            **({"TERM": "xterm"} if tty else {}),
            **(env or {}),
        }
        settings = (f"{name}={value}" for name, value in whole.items())
        if tty:
            entering = ["docker", "exec", "-it", "-u", user, "-w", home, self._containers[host]]
        else:  # as docker exec does, which takes seven times as long
            kept = ",".join(("-all", *(f"+{name}" for name in CAPABILITIES)))
            entering = ["nsenter", "-t", self._pids[host], *SPACES, f"--wdns={home}", "setpriv", f"--reuid={user}"]
            entering += [f"--regid={user}", "--init-groups", f"--bounding-set={kept}", "setsid"]
        return [*entering, "env", "-i", *settings, *argv]

    def restart_controller(self) -> None:
        self.run("ctl", "root", "sv", "-w", "30", "restart", "slurmctld")
        wait_until("slurmctld to answer", lambda: self.run("ctl", "root", "scontrol", "ping", check=False).rc == 0)
        self.wait_for_nodes()

    def stop_server(self, name: str) -> None:
        self.run(_HOST_OF[name], "root", "sv", "-w", "30", "down", name)

    def start_server(self, name: str) -> None:
        self.run(_HOST_OF[name], "root", "sv", "up", name)
        answers = {"slurmctld": ["scontrol", "ping"], "slurmdbd": ["sacctmgr", "-n", "list", "cluster"]}[name]
        wait_until(f"{name} to answer", lambda: self.run("ctl", "root", *answers, check=False).rc == 0)

    def bmc(self, wanted: str, *nodes: str) -> str:
        return "".join(self.run(node, "root", "bmc", node, wanted).stdout for node in nodes)

    def controller_log(self) -> str:
        return self.read("ctl", "/var/log/slurm/slurmctld.log").decode(errors="replace")

    def wait_for_idle(self) -> None:
        def all_idle() -> bool:
            shown = self.run("ctl", "root", "sinfo", "-h", "-N", "-p", "all", "-o", "%N %T", check=False).stdout
            return shown.split("\n")[:-1] == [f"{node} idle" for node in NODES]

        try:
            wait_until(f"idle nodes of {self.project}", all_idle)
        except LabError as error:
            raise LabError(f"{error}\n{self.compose('logs', '--tail', '15')}") from None

    def _container(self, service: str) -> str:
        labels = {"project": self.project, "service": service}
        filters = [f"--filter=label=com.docker.compose.{key}={value}" for key, value in labels.items()]
        return self._docker("ps", "-q", *filters).strip()

    def _docker(self, *argv: str) -> str:
        return subprocess.run(["docker", *argv], capture_output=True, text=True, check=True).stdout


def why_not() -> str:
    """Return the reason why no docker site can be started here; "" if none is known."""
    if shutil.which("docker") is None:
        return "clusters in docker need docker (scripts/with-docker.sh installs it)"
    done = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"no Docker engine answers (scripts/with-docker.sh starts one): {done.stderr.strip()}"
    return ""
