"""`almanac run`: start the tasks that are due, each as a process of its own with limits on its time and memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import click
import msgspec

from almanac.atomic import make_folders, write_atomically
from almanac.errors import AlmanacError, StoreError
from almanac.files import require_trusted
from almanac.units import counted, format_duration, format_moment, printable
from cli.app import App
from cli.output import json_text, show_table
from cli.tasks import (
    ROOT_STATE,
    LastRun,
    Task,
    list_tasks,
    memory_limit,
    read_last_run,
    read_tasks,
    state_folder,
    tasks_file,
)

POLL_S = 0.5
MEMORY_S = 5
"""Seconds between two looks at the tasks' memory."""
GRACE_S = 90
"""Time that a task has to end after SIGTERM, as under systemd."""
NOT_STARTED = 127
READABLE = 0o644
"""Mode of the notes of last runs; the folder decides who reads them."""


@dataclass
class RunningTask:
    """A task at work. lock: its process holds it, too, so that the task cannot start twice if this runner is killed."""

    task: Task
    process: subprocess.Popen[bytes]
    lock: IO[bytes]
    started_s: int
    end_s: float
    why: str = ""


@dataclass
class TaskRunner:
    """Starts what is due each minute, and ends when no task runs any more.

    tasks: read again each minute. argv: the command line of a task. logs: folder for a file of each task's output.
    """

    folder: Path
    tasks: Callable[[], Iterable[Task]]
    argv: Callable[[Task], list[str]]
    logs: Path | None = None
    now: Callable[[], float] = time.time
    running: list[RunningTask] = field(default_factory=list)
    failed: int = 0
    looked_s: float = 0.0

    def run(self) -> None:
        """Start due tasks each minute until none runs. Raises AlmanacError if no task can be chosen while none runs."""
        minute = -1
        try:
            while True:
                if minute != (minute := int(self.now()) // 60):
                    self._look()
                self._bound_memory()
                self.running = [one for one in self.running if not self._has_ended(one)]
                if not self.running:
                    return
                time.sleep(POLL_S)
        finally:
            for one in self.running:
                os.killpg(one.process.pid, signal.SIGTERM)

    def _look(self) -> None:
        try:
            for task in self.tasks():
                self._start(task)
        except AlmanacError as error:
            if not self.running:
                raise
            _say(f"no task is started: {error}; {error.hint}")

    def _start(self, task: Task) -> None:
        lock = _locked(self.folder / f"{task.name}.lock")
        if lock is None:  # it runs
            return
        last, now_s = read_last_run(self.folder, task.name), int(self.now())
        is_due = task.is_due(last.started_s if last else None, now_s)
        # Without a note of its start, as on a full disk, a task starts in its own minute only, and so once.
        if is_due and (self._note(task, LastRun(now_s)) or now_s - task.newest(now_s) < 60):
            self._launch(task, lock, now_s)
        else:
            lock.close()

    def _launch(self, task: Task, lock: IO[bytes], now_s: int) -> None:
        try:
            with contextlib.ExitStack() as stack:
                output = stack.enter_context((self.logs / f"{task.name}.log").open("ab")) if self.logs else None
                process = subprocess.Popen(
                    self.argv(task), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                    pass_fds=(lock.fileno(),),
                )  # fmt: skip
        except (OSError, ValueError, AlmanacError) as error:  # ValueError: quotes that do not match
            lock.close()
            self._end(task, LastRun(now_s, now_s, NOT_STARTED), f"cannot be started: {error}")
            return
        self.running.append(RunningTask(task, process, lock, now_s, time.monotonic() + task.limit_min * 60))

    def _has_ended(self, one: RunningTask) -> bool:
        """Return True once the task and what it left in its process group have ended. End it if its time is over."""
        # It stays a zombie, so that its number is nobody else's yet.
        if os.waitid(os.P_PID, one.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() >= one.end_s:
                os.killpg(one.process.pid, signal.SIGKILL if one.why else signal.SIGTERM)
                one.why = f"ran into its limit of {format_duration(one.task.limit_min * 60)}"
                one.end_s = time.monotonic() + GRACE_S
            return False
        os.killpg(one.process.pid, signal.SIGKILL)
        ended = LastRun(one.started_s, int(self.now()), one.process.wait())
        one.lock.close()
        self._end(one.task, ended, one.why)
        return True

    def _bound_memory(self) -> None:
        """Kill tasks that hold more than they may; the kernel would do the same, but to a process of its choice."""
        if time.monotonic() - self.looked_s < MEMORY_S:
            return
        self.looked_s = time.monotonic()
        held = _held_bytes({one.process.pid for one in self.running})
        for one in self.running:
            if held[one.process.pid] > memory_limit(one.task):
                one.why = f"held {held[one.process.pid] >> 20} MiB, more than its {memory_limit(one.task) >> 20} MiB"
                os.killpg(one.process.pid, signal.SIGKILL)

    def _end(self, task: Task, run: LastRun, why: str) -> None:
        self._note(task, run)
        self.failed += run.code != 0
        if run.code or why:
            _say(f"{task.name}: exit code {run.code}{f': {why}' if why else ''}")

    def _note(self, task: Task, run: LastRun) -> bool:
        path = self.folder / f"{task.name}.json"
        try:
            write_atomically(path, msgspec.json.encode(run), READABLE)
        except OSError as error:
            _say(f"{path}: cannot be written: {error.strerror}")
            return False
        return True


def _say(text: str) -> None:
    click.echo(f"almanac run: {printable(text, 1000)}", err=True)


def _locked(path: Path) -> IO[bytes] | None:
    """Return the locked file, or None if another process holds the lock. Raises StoreError."""
    try:
        handle = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640), "r+b", 0)
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened: {error.strerror}", "run this as the store's owner") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle


def _held_bytes(sessions: set[int]) -> dict[int, int]:
    """Return the memory that the processes of each session hold; pages that they share count once (PSS)."""
    held = dict.fromkeys(sessions, 0)
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):  # others' processes, and those that have just ended
            session = os.getsid(int(folder.name))
            if session in held and (found := re.search(r"(?m)^Pss:\s+(\d+)", (folder / "smaps_rollup").read_text())):
                held[session] += int(found[1]) << 10
    return held


def command_line(app: App, task: Task, *, to_journal: bool) -> list[str]:
    """Return the words of a task's command. to_journal: under a name of its own.

    Raises OSError if the program is not there, and for root ConfigError if others can change it.
    """
    name, *words = shlex.split(task.command)
    # Its own folder first: almanac may not be in PATH.
    program = shutil.which(name, path=f"{Path(sys.argv[0]).parent}:{os.environ.get('PATH', os.defpath)}")
    if program is None:
        raise FileNotFoundError(f"there is no program {name} in PATH")
    require_trusted(program)
    given = [("--config", app.config_path), ("--store", app.store_path), ("--cluster", app.cluster_name)]
    taken = given[: {"almanac": 3, "almanac-distribute": 1}.get(name, 0)]
    options = [part for key, value in taken if value for part in (key, value)]
    cat = shutil.which("systemd-cat") if to_journal else None
    return [*((cat, f"--identifier=almanac-{task.name}") if cat else ()), program, *options, *words]


@click.command("run")
@click.option("--logs", metavar="DIR", type=click.Path(path_type=Path, file_okay=False, exists=True),
              help="Append each task's output to DIR/TASK.log. [the journal, or this output]")  # fmt: skip
@click.option("--list", "is_list", is_flag=True, help="List the tasks, when they run, and how their last run ended.")
@click.option("--json", "as_json", is_flag=True, help="Print this list as JSON.")
@click.pass_obj
def command(app: App, logs: Path | None, is_list: bool, as_json: bool) -> int:
    """Start the tasks that are due. For operators, and a timer that runs every minute.

    The file tasks.toml next to the configuration names the tasks of each user. While a task runs, the others still
    start in time. docs/admin.md has the schedule and the limits.
    """
    app.require_operator("tasks work on all users' jobs")
    if is_list or as_json:
        _show(app, as_json)
        return 0
    path = tasks_file(app)
    folder = state_folder(app.store_root, app.caller)
    try:
        make_folders(folder, 0o755 if folder == ROOT_STATE else 0o750)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be made: {error.strerror}", "run this as the store's owner") from error
    # Its tasks end with it.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    to_journal = logs is None and "JOURNAL_STREAM" in os.environ
    runner = TaskRunner(
        folder,
        tasks=lambda: read_tasks(path).get(app.caller, ()),
        argv=lambda task: command_line(app, task, to_journal=to_journal),
        logs=logs,
    )
    runner.run()
    if runner.failed:
        _say(f"{counted(runner.failed, 'run')} of tasks failed")
    return 1 if runner.failed else 0


def _show(app: App, as_json: bool) -> None:
    found = list_tasks(app)
    if as_json:
        never = dict.fromkeys(LastRun.__struct_fields__)
        rows = [
            {"task": task.name, "user": user, "command": task.command, "when": task.when}
            | (msgspec.structs.asdict(last) if last else never)
            for task, user, last in found
        ]
        click.echo(json_text(rows))
        return
    cells = [(task.name, user or "-", task.when, *_told(last)) for task, user, last in found]
    show_table(("task", "user", "when", "last run", "took", "exit"), cells)


def _told(last: LastRun | None) -> tuple[str, str, str]:
    if last is None:
        return "-", "-", "-"
    took = "-" if last.ended_s is None else format_duration(max(0, last.ended_s - last.started_s))
    return format_moment(last.started_s), took, "-" if last.code is None else str(last.code)
