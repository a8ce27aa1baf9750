"""One view of a running Slurm for the scenario tests: native processes or docker containers, of any release.

A test takes the fixture `site`; conftest.py says on which of the sites that ALMANAC_SITES names it runs. Hosts are
"ctl" (slurmctld), "login" (where users submit) and "n1" to "n4"; users are "root", "slurm", "alice" and "bob".
"""

from __future__ import annotations

import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lab import ENDED
from processes import PATIENCE_S, LabError, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
PLAIN_SCRIPTS = REPOSITORY / "docker/etc"
HOSTS = ("ctl", "login", "n1", "n2", "n3", "n4")
Hook = Literal["job_submit", "cli_filter"]
# put FILE moves FILE.new to FILE. Slurm loads job_submit.lua again when its time, in whole seconds, is later than that
# of the one it has and than that of the last load.
PUT = """
put() {
    last=$(stat -c %Y "$1" 2>/dev/null || date +%s)
    now=$(date +%s)
    [ "$last" -gt "$now" ] || last=$now
    touch -d "@$((last + 1))" "$1.new" && mv -T "$1.new" "$1"
}
"""
WRITE = PUT + 'cat >"$1.new" && chown "$2:" "$1.new" && chmod "$3" "$1.new" && put "$1"'
# Jobs end, advice goes, scripts and modules are again as kept in $4. Only what differs is replaced.
RESET = f"""{PUT}
etc=$1 lua=$2 advice=$3 kept=$4
jobs=$(squeue -h -o %A | sort -u)
[ -z "$jobs" ] || scancel $jobs
find "$advice" -mindepth 1 -delete
for name in job_submit.lua cli_filter.lua; do
    cmp -s "$kept/$name" "$etc/$name" && continue
    [ ! -d "$etc/$name" ] || rm -r "$etc/$name"
    cp "$kept/$name" "$etc/$name.new" && put "$etc/$name"
done
diff -rq "$kept/lua" "$lua" >/dev/null 2>&1 || {{ rm -rf "$lua" && cp -r "$kept/lua" "$lua"; }}
"""


@dataclass(frozen=True)
class Result:
    """Exit code and output of a command. Bytes that are not UTF-8 are kept as surrogates."""

    rc: int
    stdout: str
    stderr: str


class Site(ABC):
    """Abilities of every kind of site. Paths are those of the named host."""

    release: str
    """Slurm's, such as "22.05"."""
    etc_dir: str
    """Folder of slurm.conf, job_submit.lua (on ctl), and cli_filter.lua (on login)."""
    lua_dir: str
    """Folder of almanac's Lua modules, on ctl and on login."""
    advice_dir: str
    """The root of the advice files, on ctl and on login (what `hooks.advice_dir` is elsewhere)."""
    kept_dir: str
    """Folder in which keep() keeps what reset() restores, on the same hosts."""
    different_hosts: tuple[str, ...] = ("ctl", "login")
    """Hosts with hooks, modules, and advice; only one if both names are the same host."""
    power_off: str = "almanac-power-off"
    """Slurm's SuspendProgram, on ctl."""
    power_log: str = "/var/log/slurm/power.jsonl"
    """The log_file of bmc.toml, on ctl."""
    _touches: int = 0

    @abstractmethod
    def command(
        self, host: str, user: str, argv: Sequence[str], env: Mapping[str, str] | None = None, tty: bool = False
    ) -> list[str]:
        """The argument list that, started here, runs argv there, in the user's home, in a login's small environment.

        tty: it will be started on a terminal (by pexpect) and is to have one there.
        """

    @abstractmethod
    def restart_controller(self) -> None:
        """Stop slurmctld and start it again; return when it answers. Raises LabError if it does not."""

    @abstractmethod
    def stop_server(self, name: str) -> None:
        """Stops slurmctld or slurmdbd."""

    @abstractmethod
    def start_server(self, name: str) -> None:
        """Starts it again; returns when it answers."""

    @abstractmethod
    def bmc(self, wanted: str, *nodes: str) -> str:
        """Asks the nodes' BMCs: status, on, off, broken (the node never boots), mended."""

    @abstractmethod
    def controller_log(self) -> str:
        """slurmctld's whole log."""

    def run_bytes(
        self,
        host: str,
        user: str,
        *argv: str,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = PATIENCE_S,
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs a command without a terminal, whatever its status; without `stdin` it reads an empty file."""
        return subprocess.run(
            self.command(host, user, argv, env),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )

    def run(
        self,
        host: str,
        user: str,
        *argv: str,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout_s: float = PATIENCE_S,
    ) -> Result:
        """Run a command. Raises LabError, with its output, if it fails and `check` is set."""
        text = None if stdin is None else stdin.encode(errors="surrogateescape")
        done = self.run_bytes(host, user, *argv, stdin=text, env=env, timeout_s=timeout_s)
        stdout, stderr = (part.decode(errors="surrogateescape") for part in (done.stdout, done.stderr))
        if check and done.returncode:
            raise LabError(f"{argv[0]} as {user} on {host}: status {done.returncode}\n{stdout}{stderr}")
        return Result(done.returncode, stdout, stderr)

    def write(self, host: str, path: str, data: bytes, owner: str = "root", mode: int = 0o644) -> None:
        """Puts a file in place by a rename; its group is the owner's own."""
        done = self.run_bytes(host, "root", "sh", "-c", WRITE, "sh", path, owner, f"{mode:o}", stdin=data)
        if done.returncode:
            raise LabError(f"{path} on {host}: {done.stderr.decode(errors='replace')}")

    def read(self, host: str, path: str) -> bytes:
        """Raises LabError where there is no such file."""
        done = self.run_bytes(host, "root", "cat", path)
        if done.returncode:
            raise LabError(f"{path} on {host}: {done.stderr.decode(errors='replace')}")
        return done.stdout

    def remove(self, host: str, path: str) -> None:
        """Removes a file or a whole folder, if it is there."""
        self.run(host, "root", "rm", "-rf", "--", path)

    def hook(self, kind: Hook, text: str | None) -> None:
        """Makes `text` the site's job_submit.lua or cli_filter.lua; None: the script that does nothing.

        The next submission is judged by it. (slurmctld keeps its last good copy where the file is missing or broken,
        and does not start without one: tests of that use remove() and write() on etc_dir.)
        """
        name = f"{kind}.lua"
        data = (PLAIN_SCRIPTS / name).read_bytes() if text is None else text.encode(errors="surrogateescape")
        self.write("ctl" if kind == "job_submit" else "login", f"{self.etc_dir}/{name}", data)

    def touch_job_submit(self) -> None:
        """Makes slurmctld load a job_submit.lua that something else than hook() has changed; none is no fault."""
        script = f"{self.etc_dir}/job_submit.lua"
        # Later than any time that the one before was given: by hook(), or here within the same second.
        self._touches += 1
        later = '[ ! -e "$1" ] || touch -d "@$(($(date +%s) + $2))" "$1"'
        self.run("ctl", "root", "sh", "-c", later, "sh", script, str(5 + self._touches))

    def keep(self, lua: str) -> None:
        """Notes what reset() goes back to: the scripts that do nothing, and the modules in the folder `lua`."""
        for host in self.different_hosts:
            self.run(host, "root", "rm", "-rf", self.kept_dir)
            self.run(host, "root", "mkdir", self.kept_dir)
            self.run(host, "root", "cp", "-r", lua, f"{self.kept_dir}/lua")
            for name in ("job_submit.lua", "cli_filter.lua"):
                self.write(host, f"{self.kept_dir}/{name}", (PLAIN_SCRIPTS / name).read_bytes())

    def reset(self) -> None:
        """Remove what a test may have left: jobs, advice files, scripts and modules go back to the beginning."""
        folders = (self.etc_dir, self.lua_dir, self.advice_dir, self.kept_dir)
        for host in self.different_hosts:
            self.run(host, "root", "sh", "-c", RESET, "sh", *folders)

    def wait_for_nodes(self) -> None:
        """Waits until slurmctld knows every node to be there: some seconds after its start, a second after a resume.

        Until then it refuses changes of nodes, and jobs for whom too few nodes are left. Sleeping nodes do not answer.
        """

        def are_known() -> bool:
            shown = self.run("ctl", "root", "scontrol", "-o", "show", "nodes", check=False)
            states = re.findall(r" State=(\S+)", shown.stdout)
            return shown.rc == 0 and not any(
                re.search("UNKNOWN|NOT_RESPONDING", state) and "POWER" not in state for state in states
            )

        wait_until("the nodes to register", are_known)

    def sbatch(self, user: str, *options: str, script: str = "#!/bin/sh\nsleep 1\n", check: bool = True) -> int:
        """Submits `script` on the login node and returns the job id; the job's output is thrown away."""
        done = self.run("login", user, "sbatch", "--parsable", "-o", "/dev/null", *options, stdin=script, check=check)
        return int(done.stdout.strip().split(";")[0])

    def job(self, job_id: int | str) -> dict[str, str]:
        """Return the fields of `scontrol show job`; {} if the controller does not know it (any more).

        Only for jobs whose names hold no spaces and no "=".
        """
        shown = self.run("ctl", "root", "scontrol", "-o", "show", "job", str(job_id), check=False).stdout
        return dict(part.split("=", 1) for part in shown.split() if "=" in part)

    def wait_until_accounted(self, *job_ids: int) -> None:
        """Wait until slurmdbd has the jobs. 22.05 that restarts before refuses their changes for over 20 s."""
        listed = ["sacct", "-anPX", "-j", ",".join(map(str, job_ids)), "-o", "JobIDRaw"]
        wait_until("slurmdbd", lambda: len(self.run("ctl", "root", *listed).stdout.split()) == len(job_ids))

    def wait_for(self, job_id: int, state: str) -> None:
        """Waits until a job is in a state, such as RUNNING, or COMPLETED. Raises LabError, with the state it is in."""
        seen = ""

        def is_there() -> bool:
            nonlocal seen
            seen = self.job(job_id).get("JobState", "unknown to slurmctld")
            if seen != state and seen in ENDED:
                raise LabError(f"job {job_id} is {seen}, and will never be {state}")
            return seen == state

        try:
            wait_until(f"job {job_id} to be {state}", is_there)
        except LabError as error:
            raise LabError(f"{error}; it is {seen}\n{self.controller_log()[-3000:]}") from None

    def wait_for_accounting(self, *job_ids: int) -> dict[int, str]:
        """Waits until sacct has the end of each job, and returns their states."""
        states: dict[int, str] = {}

        def all_ended() -> bool:
            wanted = ",".join(map(str, job_ids))
            shown = self.run("ctl", "root", "sacct", "-anPX", "-j", wanted, "-S", "now-2days", "-o", "JobIDRaw,State")
            for row in shown.stdout.splitlines():
                job, state = row.split("|")
                states[int(job)] = state.split()[0]
            return all(states.get(job) in ENDED for job in job_ids)

        wait_until(f"the end of jobs {job_ids} in sacct", all_ended, seen=lambda: states)
        return states
