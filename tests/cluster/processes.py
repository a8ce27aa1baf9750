"""Servers that a test starts: each in the foreground of its own session, marked, and found again to be ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

MARK = "ALMANAC_LAB"
LOG_LINES = 25


class LabError(RuntimeError):
    """A server or a command of the lab failed; the message ends with the log that says why."""


def tail(path: Path, lines: int = LOG_LINES) -> str:
    """The end of a log under its name; "" where it is not there."""
    if not path.exists():
        return ""
    text = path.read_text(errors="replace").splitlines()[-lines:]
    return f"\n--- {path} ---\n" + "\n".join(text)


def wait_until(what: str, check: Callable[[], bool], timeout_s: float, logs: Iterable[Path] = ()) -> None:
    """Polls until `check` holds. Raises LabError, with the ends of `logs`, after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() > deadline:
            raise LabError(f"waited {timeout_s:g} s for {what}" + "".join(tail(log) for log in logs))
        time.sleep(0.05)


class Daemon:
    """One server in the foreground of its own session; its output goes to `log`."""

    def __init__(self, name: str, argv: Sequence[str | Path], root: Path, *, log: Path, env: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(part) for part in argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=root / "log",
                env={**env, MARK: str(root)},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """Raises LabError, with the log, where the server has ended by itself."""
        if not self.is_running():
            raise LabError(f"{self.name} ended with status {self._process.returncode}{tail(self.log)}")

    def stop(self, timeout_s: float = 10.0) -> None:
        """SIGTERM, then SIGKILL. Does nothing where it has ended."""
        if not self.is_running():
            return
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout_s)


def _environment(pid: int) -> dict[str, str]:
    """What a process was started with; {} where it has gone or is not ours to read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    entries = (entry.partition("=") for entry in raw.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in entries}


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _ancestors() -> set[int]:
    """This process and those above it, which no sweep may end."""
    found, pid = set(), os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found


def lab_processes(root: Path) -> Iterator[int]:
    """Living processes of the lab below `root`: its servers and what they started, and the jobs of its users.

    A server carries the mark; a job's environment is its user's, so it is known by the lab's SLURM_CONF beside
    a job id (a person's shell with only SLURM_CONF is left alone).
    """
    spared = _ancestors()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in spared:
            continue
        env = _environment(int(entry.name))
        is_job = env.get("SLURM_CONF") == str(root / "etc/slurm.conf") and "SLURM_JOB_ID" in env
        if (env.get(MARK) == str(root) or is_job) and not _is_zombie(int(entry.name)):
            yield int(entry.name)


def describe(pids: Iterable[int]) -> str:
    lines = []
    for pid in pids:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        lines.append(f"{pid} {command.strip()}")
    return "\n".join(lines)


def sweep(root: Path, timeout_s: float = 10.0) -> None:
    """Ends every process of the lab below `root`. Raises LabError, naming them, where some will not end."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + timeout_s
        for pid in list(lab_processes(root)):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        while list(lab_processes(root)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        else:
            return
    if left := list(lab_processes(root)):
        raise LabError(f"processes of {root} will not end:\n{describe(left)}")
