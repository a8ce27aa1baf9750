"""Servers that a test starts: each in the foreground of its own session, marked, and found again to be ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

MARK = "ALMANAC_LAB"
LOG_LINES = 25
PATIENCE_S = 300.0
"""Limit of a wait for something that must happen, on a busy machine too. It costs nothing if it happens."""


class LabError(RuntimeError):
    """A server or a command of the lab failed; the message ends with the log that says why."""


def tail(path: Path, lines: int = LOG_LINES) -> str:
    """Return the end of a log under its name; "" without the file."""
    if not path.exists():
        return ""
    text = path.read_text(errors="replace").splitlines()[-lines:]
    return f"\n--- {path} ---\n" + "\n".join(text)


def wait_until(
    what: str, check: Callable[[], object], logs: Iterable[Path] = (), seen: Callable[[], object] | None = None
) -> None:
    """Poll until `check` holds, at growing intervals.

    Raises LabError after PATIENCE_S, with what `seen` returns then and the ends of `logs`.
    """
    began = time.monotonic()
    while not check():
        waited_s = time.monotonic() - began
        if waited_s > PATIENCE_S:
            found = f"; seen: {seen()}" if seen else ""
            raise LabError(f"waited {PATIENCE_S:g} s for {what}{found}" + "".join(tail(log) for log in logs))
        time.sleep(min(0.05 + waited_s / 20, 0.4))  # a question takes 20 to 100 ms of CPU time


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
        """Send SIGTERM, then SIGKILL. Does nothing if it has ended."""
        if not self.is_running():
            return
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout_s)


def _environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; {} if it has gone or is not ours to read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    entries = (entry.partition("=") for entry in raw.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in entries}


def _stat(pid: int) -> tuple[str, int]:
    """Return state letter and parent of a process; ("X", 0) if it has gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[1])


def _ancestors() -> set[int]:
    """This process and those above it, which no sweep may end."""
    found, pid = set(), os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        pid = _stat(pid)[1]
    return found


def _is_of(root: Path, pid: int) -> bool:
    """Return True if a process is one of the lab's own, apart from those whose parent is."""
    env = _environment(pid)
    if env.get(MARK) == str(root):
        return True
    if "SLURM_JOB_ID" in env:
        return env.get("SLURM_CONF") == str(root / "etc/slurm.conf")
    # slurmstepd outlives its slurmd and writes its title over its environment (24.11): its folder is slurmd's.
    try:
        is_step = Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd")
        return is_step and str(Path(f"/proc/{pid}/cwd").readlink()).removesuffix(" (deleted)") == str(root / "log")
    except OSError:
        return False


def lab_processes(root: Path) -> list[int]:
    """Living processes of the lab below `root`: its servers, the jobs of its users, and all that these started.

    A server carries the mark; a job's environment is its user's, so it is known by the lab's SLURM_CONF and a job id (a
    person's shell with only SLURM_CONF is left alone) or by the slurmstepd above it.
    """
    stats = {int(entry.name): _stat(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    children: dict[int, list[int]] = {}
    for pid, (_, parent) in stats.items():
        children.setdefault(parent, []).append(pid)
    todo, found = [pid for pid in stats if _is_of(root, pid)], set()
    while todo:
        if (pid := todo.pop()) not in found:
            found.add(pid)
            todo += children.get(pid, [])
    return sorted(pid for pid in found - _ancestors() if stats[pid][0] not in "ZX")


def describe(pids: Iterable[int]) -> str:
    lines = []
    for pid in pids:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        lines.append(f"{pid} {command.strip()}")
    return "\n".join(lines)


def sweep(root: Path, grace_s: float = 10.0) -> None:
    """Ends every process of the lab below `root`: SIGTERM, after grace_s SIGKILL. Raises LabError, naming them,
    where some are still there another ten seconds later.
    """
    kill_from = time.monotonic() + grace_s
    asked: set[int] = set()
    while left := lab_processes(root):
        now = time.monotonic()
        if now > kill_from + 10:
            raise LabError(f"processes of {root} will not end:\n{describe(left)}")
        for pid in left:
            if now > kill_from or pid not in asked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if now > kill_from else signal.SIGTERM)
        asked.update(left)
        time.sleep(0.05)
