"""The commands that `almanac run` starts: when, for how long, with how much memory, and as which user."""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from almanac.config_file import SYSTEM_FILE, find_config
from almanac.errors import ConfigError
from almanac.files import read_plain, read_trusted
from almanac.units import did_you_mean, printable
from cli.app import App

FILE = "tasks.toml"
ROOT_STATE = Path("/run/almanac-root")
"""Last runs of root's tasks, unless the store is root's: no file of its owner decides what root does."""
ON_TIME_S = 120
"""A run that is at most this late is on time: a busy host may skip a minute."""
_MOST_BYTES = 1 << 16
_MOST_RUN_BYTES = 4096
Second = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command and its schedule. at_min: first minute of the day, local. is_made_up: one missed run is made up."""

    name: str
    command: str
    every_min: Annotated[int, msgspec.Meta(ge=1, le=1440)]
    at_min: Annotated[int, msgspec.Meta(ge=0, le=1439)]
    limit_min: Annotated[int, msgspec.Meta(ge=1, le=10_080)]
    is_made_up: bool = True
    memory_percent: Annotated[int, msgspec.Meta(ge=1, le=100)] = 50

    def newest(self, now_s: int) -> int:
        """Return the newest scheduled time that is not after now_s."""
        local = time.localtime(now_s)
        late_min = (local.tm_hour * 60 + local.tm_min - self.at_min) % self.every_min
        return now_s - now_s % 60 - late_min * 60

    def is_due(self, started_s: int | None, now_s: int) -> bool:
        """Return True if the task must start now. A last start in the future is a wrong clock's, and is ignored."""
        newest = self.newest(now_s)
        is_on_time = now_s - newest < ON_TIME_S
        if started_s is None or started_s > now_s:
            return is_on_time
        return started_s < newest and (is_on_time or self.is_made_up)

    def is_late(self, started_s: int, now_s: int) -> bool:
        """Return True if two runs did not start, apart from those that a long run keeps from starting."""
        return now_s - started_s > (2 * self.every_min + self.limit_min) * 60

    @property
    def when(self) -> str:
        """The schedule for people."""
        if self.every_min == 1440:
            return f"daily at {self.at_min // 60:02}:{self.at_min % 60:02}"
        return "every minute" if self.every_min == 1 else f"every {self.every_min} min"


TASKS = {
    task.name: task
    for task in (
        Task("ingest", "almanac ingest --no-summary", 10, 2, 360),
        Task("summarize", "almanac summarize", 30, 7, 360),
        Task("train", "almanac train", 1440, 270, 360),
        Task("publish", "almanac publish", 30, 15, 60),
        # Waits are used for MAX_WAIT_AGE_S: 10 minutes.
        Task("waits", "almanac waits --publish", 2, 0, 5),
        # In the minute after publish and waits.
        Task("distribute", "almanac-distribute", 2, 1, 15),
        Task("report", "almanac mail run", 1, 0, 60),
        Task("metrics", "almanac metrics --textfile /var/lib/almanac-metrics/almanac.prom", 5, 3, 10),
        Task("reprioritize", "almanac reprioritize", 5, 4, 10),
        # What follows acts on the present: a run that was missed is not made up.
        Task("power", "almanac power plan --apply", 10, 6, 10, is_made_up=False),
        Task("mig", "almanac mig plan --apply", 15, 9, 60, is_made_up=False),
        Task("mig-raise", "almanac mig raise", 2, 1, 10, is_made_up=False),
        Task("place", "almanac place --apply", 5, 1, 60, is_made_up=False),
        Task("watch", "almanac watch --apply", 2, 0, 10, is_made_up=False),
    )
}


class LastRun(msgspec.Struct, frozen=True):
    """ended_s and code: None while the task runs, or if the runner was killed meanwhile. code < 0: a signal."""

    started_s: Second
    ended_s: Second | None = None
    code: int | None = None


def read_last_run(folder: Path, name: str) -> LastRun | None:
    """Return a task's last run; None if there is none, or if its file cannot be used."""
    try:
        return msgspec.json.decode(read_plain(folder / f"{name}.json", _MOST_RUN_BYTES), type=LastRun)
    except (OSError, msgspec.MsgspecError):
        return None


def state_folder(store: Path, user: str) -> Path:
    """Return the folder with the last runs of this user's tasks."""
    is_roots = store.exists() and store.stat().st_uid == 0
    return ROOT_STATE if user == "root" and not is_roots else store / ".run"


def tasks_file(app: App) -> Path:
    """Return the path of tasks.toml, which lies next to the configuration."""
    return (find_config(app.config_path) or SYSTEM_FILE).with_name(FILE)


def read_tasks(path: Path) -> dict[str, list[Task]]:
    """Return the tasks that tasks.toml lists, by user. Raises ConfigError; for root also if others can write it."""
    try:
        data = tomllib.loads(read_trusted(path, (), _MOST_BYTES, is_strict=False))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file", 'name the tasks, such as almanac = ["ingest"]') from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", "make the file readable, in UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {printable(str(error))}", "correct that line") from error
    known, users = dict(TASKS), dict[str, list[str]]()
    for key, value in data.items():
        try:
            if isinstance(value, dict):
                shipped = msgspec.structs.asdict(_task(key, TASKS, path))
                known[key] = msgspec.convert(shipped | value | {"name": key}, Task)
            else:
                users[key] = msgspec.convert(value, list[str])
        except msgspec.ValidationError as error:
            said = f"{path}: {printable(key, 80)}: {printable(str(error))}"
            raise ConfigError(said, "write a user's tasks as a list, and a task's changes as a table") from error
    every = [name for names in users.values() for name in names]
    if twice := next((name for name in every if every.count(name) > 1), None):
        raise ConfigError(f"{path}: {printable(twice, 80)} is listed twice", "list each task once, for one user")
    return {user: [_task(name, known, path) for name in names] for user, names in users.items()}


def _task(name: str, known: Mapping[str, Task], path: Path) -> Task:
    if name not in known:
        said = f"{path}: there is no task {printable(name, 80)!r}"
        raise ConfigError(said, f"{did_you_mean(name, known)}tasks: {', '.join(known)}")
    return known[name]


def list_tasks(app: App) -> list[tuple[Task, str | None, LastRun | None]]:
    """Return each task with its user, None if nobody runs it, and its last run. Raises ConfigError."""
    path = tasks_file(app)
    users = read_tasks(path) if path.exists() else {}
    chosen = {task.name: (task, user) for user, tasks in users.items() for task in tasks}
    found: list[tuple[Task, str | None, LastRun | None]] = []
    for name, shipped in TASKS.items():
        task, user = chosen.get(name, (shipped, None))
        found.append((task, user, read_last_run(state_folder(app.store_root, user), name) if user else None))
    return found


def memory_limit(task: Task) -> int:
    """Return the bytes that a task's processes may hold together."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * task.memory_percent // 100
