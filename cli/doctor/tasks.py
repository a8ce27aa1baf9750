"""`almanac doctor`: whether `almanac run` starts the tasks of tasks.toml, and how they end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from almanac.units import format_duration
from cli.app import App
from cli.doctor.findings import Check

if TYPE_CHECKING:
    from cli.tasks import LastRun, Task


def check_tasks(app: App) -> Iterator[Check]:
    """Yields nothing if tasks.toml lists no task."""
    from cli.tasks import list_tasks

    found = [(task, user, last) for task, user, last in list_tasks(app) if user]
    checks = [check for task, user, last in found if (check := _check(task, user, last, app.now_s()))]
    yield from checks
    if found and not checks:
        yield Check("tasks", "ok", f"{', '.join(task.name for task, _, _ in found)} ran as planned")


def _check(task: Task, user: str, last: LastRun | None, now_s: int) -> Check | None:
    name, timer = f"task {task.name}", "almanac-root.timer" if user == "root" else "almanac.timer"
    todo = f"run `systemctl enable --now {timer}`, or add the line of {user} from the cron example"
    if last is None:
        return Check(name, "warn", "never ran", todo)
    ago = f"{format_duration(max(0, now_s - last.started_s))} ago"
    if task.is_late(last.started_s, now_s):
        return Check(name, "warn", f"started last {ago}, and runs {task.when}", todo)
    if last.code:
        todo = f"read why: `journalctl -t almanac-{task.name}`, or /var/log/almanac/{task.name}.log"
        return Check(name, "warn", f"started {ago}, and ended with exit code {last.code}", todo)
    return None
