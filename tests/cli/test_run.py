"""`almanac run` as a timer calls it: the tasks that it starts, their limits, and its output."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.errors import ConfigError, NotAllowedError
from cli.app import App
from cli.doctor.site import check_tasks
from cli.run import RunningTask, TaskRunner, command, command_line
from cli.tasks import TASKS, LastRun, Task, read_last_run, read_tasks, state_folder

NOON_S = 1_795_262_400  # 2026-11-21 12:00 UTC
ONCE = Task("ingest", "true", 10, 2, 60)
POWER = TASKS["power"]


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


# --- when


@pytest.mark.parametrize(
    ("task", "expected"),
    [("ingest", "11:52"), ("train", "04:30"), ("publish", "11:45"), ("report", "12:00"), ("power", "11:56"),
     ("mig", "11:54"), ("distribute", "11:59"), ("waits", "12:00"), ("metrics", "11:58")],
)  # fmt: skip
def test_the_newest_scheduled_time(task: str, expected: str) -> None:
    assert time.strftime("%H:%M", time.gmtime(TASKS[task].newest(NOON_S + 30))) == expected


@given(st.sampled_from(list(TASKS.values())), st.integers(0, 2**31), st.floats(0, 1, exclude_max=True))
def test_a_task_that_was_started_is_due_at_its_next_time_and_not_before(task: Task, now_s: int, part: float) -> None:
    next_s = task.newest(now_s) + task.every_min * 60
    assert task.is_due(now_s, next_s)
    assert not task.is_due(now_s, now_s + int(part * (next_s - now_s)))


@pytest.mark.parametrize(("task", "is_made_up"), [(ONCE, True), (POWER, False)])
def test_a_missed_run_is_made_up_once_but_not_one_that_acts_on_the_present(task: Task, is_made_up: bool) -> None:
    late_s = task.newest(NOON_S) + 300
    assert task.is_due(NOON_S - 86_400, late_s) is is_made_up
    assert not task.is_due(late_s, late_s + 60)
    assert task.is_due(NOON_S - 86_400, task.newest(NOON_S) + 119), "a busy host skips a minute"


def test_a_task_that_never_ran_waits_for_its_time() -> None:
    assert not TASKS["train"].is_due(None, NOON_S)
    assert TASKS["train"].is_due(None, NOON_S - 27_000)


def test_a_clock_that_was_ahead_stops_no_task() -> None:
    assert POWER.is_due(NOON_S + 10**8, POWER.newest(NOON_S))
    assert not POWER.is_due(NOON_S + 10**8, POWER.newest(NOON_S) + 200)


# --- tasks.toml


def test_tasks_by_user_and_what_a_site_changes(tmp_path: Path) -> None:
    text = 'almanac = ["report"]\nroot = ["mig"]\n[report]\nevery_min = 5\n[mig]\ncommand = "true"\n'
    (tmp_path / "tasks.toml").write_text(text)
    users = read_tasks(tmp_path / "tasks.toml")
    assert [(task.name, task.command) for task in users["root"]] == [("mig", "true")]
    assert (users["almanac"][0].every_min, users["almanac"][0].limit_min) == (5, 60)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('almanac = ["ingset"]', "there is no task 'ingset'"),
        ('almanac = ["power\\u001b"]', "there is no task 'power?'"),
        ('almanac = "ingest"', "almanac: Expected `array`, got `str`"),
        ("almanac = [1]", "almanac: Expected `str`, got `int` - at `$[0]`"),
        ('almanac = ["mig"]\nroot = ["mig"]', "mig is listed twice"),
        ("[report]\nevery = 5", "report: Object contains unknown field `every`"),
        ("[report]\nevery_min = 0", "report: Expected `int` >= 1 - at `$.every_min`"),
        ("[report]\nevery_min = true", "report: Expected `int`, got `bool` - at `$.every_min`"),
        (f"[report]\nlimit_min = {10**300}", "report: Expected `int` <= 10080 - at `$.limit_min`"),
        ("[nonsense]\n", "there is no task 'nonsense'"),
        ("almanac = [", "not valid TOML"),
        ("a = " + "[" * 5000, "not valid TOML"),
        ("\x00", "not valid TOML"),
    ],
)
def test_a_fault_of_tasks_toml_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "tasks.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_tasks(tmp_path / "tasks.toml")
    assert str(error.value).startswith(f"{tmp_path}/tasks.toml: ") and said in str(error.value)
    assert error.value.hint


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_root_takes_no_tasks_from_a_file_of_another_user(tmp_path: Path) -> None:
    path = tmp_path / "tasks.toml"
    path.write_text('root = ["distribute"]')
    os.chown(path, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to nobody"):
        read_tasks(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"started_s": "1", "ended_s": null, "code": 0}',
        '{"started_s": 1e9, "ended_s": 1, "code": 0}',
        '{"started_s": 1, "ended_s": 2, "code": ""}',
        f'{{"started_s": {10**400}, "ended_s": 1, "code": 0}}',
    ],
)
def test_a_damaged_note_of_the_last_run_is_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "ingest.json").write_text(text)
    assert read_last_run(tmp_path, "ingest") is None


# --- the runner


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TaskRunner]:
    """Makes runners of tasks that are shell scripts, with a clock that stands still."""
    monkeypatch.setattr("cli.run.POLL_S", 0.01)

    def made(*tasks: Task, **options: object) -> TaskRunner:
        clock = {"now": lambda: NOON_S} | options
        return TaskRunner(tmp_path, lambda: tasks, lambda task: ["sh", "-c", task.command], **clock)  # type: ignore[arg-type]

    return made


def minutely(name: str, script: str, **limits: int) -> Task:
    return Task(name, script, 1, 0, limits.get("limit_min", 1))


def test_what_is_due_starts_once_and_what_is_not_does_not(runner: Callable[..., TaskRunner], tmp_path: Path) -> None:
    tasks = minutely("a", f"echo a >>{tmp_path}/said"), Task("b", f"echo b >>{tmp_path}/said", 10, 2, 1)
    runner(*tasks).run()
    runner(*tasks).run()
    assert (tmp_path / "said").read_text() == "a\n"
    assert read_last_run(tmp_path, "a") == LastRun(NOON_S, NOON_S, 0)
    assert read_last_run(tmp_path, "b") is None


def test_a_slow_task_delays_no_other_and_does_not_run_twice(runner: Callable[..., TaskRunner], tmp_path: Path) -> None:
    """The clock goes a minute ahead each time that the quick task ends; the slow one waits for three of its runs."""
    slow = minutely("slow", f"echo slow >>{tmp_path}/said; until [ $(grep -c quick {tmp_path}/said) = 3 ]; do :; done")
    quick = minutely("quick", f"echo quick >>{tmp_path}/said")

    def now() -> float:
        last = read_last_run(tmp_path, "quick") or LastRun(NOON_S)
        return last.started_s if last.ended_s is None else min(last.started_s + 60, NOON_S + 120)

    runner(slow, quick, now=now).run()
    assert sorted((tmp_path / "said").read_text().split()) == ["quick"] * 3 + ["slow"]


def test_a_failure_is_told_and_the_task_starts_again_at_its_next_time(
    runner: Callable[..., TaskRunner], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = minutely("a", f"echo a >>{tmp_path}/said; exit 3")
    first = runner(task)
    first.run()
    assert (first.failed, read_last_run(tmp_path, "a")) == (1, LastRun(NOON_S, NOON_S, 3))
    assert "a: exit code 3" in capsys.readouterr().err
    runner(task, now=lambda: NOON_S + 60).run()
    assert (tmp_path / "said").read_text() == "a\na\n"


def test_a_task_and_its_children_end_at_the_time_limit(
    runner: Callable[..., TaskRunner],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cli.run.GRACE_S", 0.05)
    pid, has_ended = tmp_path / "child", TaskRunner._has_ended

    def has_ended_once_it_runs(self: TaskRunner, one: RunningTask) -> bool:
        while not (pid.exists() and pid.read_text().strip()):
            time.sleep(0.01)
        return has_ended(self, one)

    monkeypatch.setattr(TaskRunner, "_has_ended", has_ended_once_it_runs)
    script = f"trap '' TERM; sleep 300 & echo $! >{pid}; while :; do sleep 0.01; done"
    runner(minutely("a", script, limit_min=0)).run()
    assert read_last_run(tmp_path, "a") == LastRun(NOON_S, NOON_S, -signal.SIGKILL)
    assert "a: exit code -9: ran into its limit" in capsys.readouterr().err
    stat = Path(f"/proc/{pid.read_text().strip()}/stat")
    with contextlib.suppress(OSError):  # it is gone
        while stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
            time.sleep(0.01)


def test_a_task_that_holds_too_much_memory_is_ended_and_no_other(
    runner: Callable[..., TaskRunner],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cli.run.MEMORY_S", 0.01)
    monkeypatch.setattr("cli.run.memory_limit", lambda task: 100 << 20)
    # In a child of the task's, which counts for it.
    hungry = minutely("hungry", f"{sys.executable} -c 'x = bytearray(150 << 20); import time; time.sleep(60)'; exit 0")
    modest = minutely("modest", f"until [ -e {tmp_path}/go ]; do sleep 0.01; done")
    runs, end = runner(hungry, modest), TaskRunner._end

    def ended(self: TaskRunner, task: Task, run: LastRun, why: str) -> None:
        end(self, task, run, why)
        (tmp_path / "go").touch()

    monkeypatch.setattr(TaskRunner, "_end", ended)
    runs.run()
    assert read_last_run(tmp_path, "hungry") == LastRun(NOON_S, NOON_S, -signal.SIGKILL)
    assert read_last_run(tmp_path, "modest") == LastRun(NOON_S, NOON_S, 0)
    assert "hungry: exit code -9: held 1" in capsys.readouterr().err


def test_a_full_disk_stops_no_task_and_starts_none_twice(
    runner: Callable[..., TaskRunner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cli.run.write_atomically", full)
    task = Task("a", f"echo a >>{tmp_path}/said", 10, 0, 1)
    for minute in range(9):
        runner(task, now=lambda minute=minute: NOON_S + 60 * minute).run()
    assert (tmp_path / "said").read_text() == "a\n"


def test_a_program_that_is_not_there_is_told(
    runner: Callable[..., TaskRunner], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = runner(minutely("a", "true"))
    made.argv = lambda task: [f"{tmp_path}/none"]
    made.run()
    assert "a: exit code 127: cannot be started: [Errno 2]" in capsys.readouterr().err
    assert read_last_run(tmp_path, "a") == LastRun(NOON_S, NOON_S, 127)


def test_a_killed_runner_leaves_a_task_that_does_not_start_twice(
    runner: Callable[..., TaskRunner], tmp_path: Path
) -> None:
    """The task holds its lock by itself."""
    task = minutely("a", f"echo $$ >>{tmp_path}/said; exec sleep 60")
    child = os.fork()
    if child == 0:
        runner(task).run()
    while not (tmp_path / "said").exists() or not (tmp_path / "said").read_text():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        runner(task, now=lambda: NOON_S + 60).run()
        assert len((tmp_path / "said").read_text().split()) == 1
        assert read_last_run(tmp_path, "a") == LastRun(NOON_S)
    finally:
        os.kill(int((tmp_path / "said").read_text().split()[0]), signal.SIGKILL)


# --- the command


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A store of the caller's, and an almanac that tells its words and fails for `power`."""
    (tmp_path / "store").mkdir()
    (tmp_path / "almanac.toml").write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/almanac").write_text('#!/bin/sh\necho "$(umask) $*"\ncase "$*" in *power*) exit 3 ;; esac\n')
    (tmp_path / "bin/almanac").chmod(0o755)
    user = App().caller
    (tmp_path / "tasks.toml").write_text(f'{user} = ["report", "power"]\nothers = ["train"]\n[power]\nevery_min = 1\n')
    return tmp_path


def called(site: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.argv[0] = sys.argv.pop(1); from cli.main import main; main()"
    options = ["--config", str(site / "almanac.toml"), "--store", str(site / "store")]
    return subprocess.run(
        [sys.executable, "-c", code, str(site / "bin/almanac"), *options, "run", *argv],
        capture_output=True, text=True, check=False, timeout=300, cwd=Path(__file__).parents[2],
        env={key: value for key, value in os.environ.items() if key != "JOURNAL_STREAM"},
    )  # fmt: skip


def test_a_run_gives_tasks_its_options_and_keeps_what_each_says(site: Path) -> None:
    (site / "logs").mkdir()
    done = called(site, "--logs", str(site / "logs"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "almanac run: power: exit code 3\n" in done.stderr
    options = f"--config {site}/almanac.toml --store {site}/store"
    assert (site / "logs/report.log").read_text().endswith(f" {options} mail run\n")
    assert sorted(path.name for path in (site / "logs").iterdir()) == ["power.log", "report.log"]
    rows = {row["task"]: row for row in json.loads(called(site, "--json").stdout)}
    assert (rows["power"]["code"], rows["report"]["code"], rows["train"]["user"]) == (3, 0, "others")
    assert rows["report"]["started_s"] <= rows["report"]["ended_s"] <= time.time()
    assert (rows["ingest"]["user"], rows["ingest"]["code"]) == (None, None)


def test_without_a_list_of_tasks_nothing_starts(site: Path) -> None:
    (site / "tasks.toml").unlink()
    done = called(site)
    assert done.returncode == 3
    assert f"error: {site}/tasks.toml: there is no such file\ntry: name the tasks" in done.stderr


def test_each_task_is_in_the_journal_under_its_own_name(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "bin/systemd-cat").write_text("#!/bin/sh\n")
    (site / "bin/systemd-cat").chmod(0o755)
    monkeypatch.setenv("PATH", f"{site}/bin")
    monkeypatch.setattr("sys.argv", [f"{site}/bin/almanac"])
    words = command_line(App(), TASKS["power"], to_journal=True)
    assert words == [
        f"{site}/bin/systemd-cat",
        "--identifier=almanac-power",
        f"{site}/bin/almanac",
        "power",
        "plan",
        "--apply",
    ]


def test_a_user_who_is_no_operator_starts_nothing(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(App, "is_operator", False)
    with pytest.raises(NotAllowedError):
        command.main(args=[], standalone_mode=False, obj=App(str(site / "almanac.toml")))


def test_what_root_does_is_not_decided_by_a_file_of_the_stores_owner(tmp_path: Path) -> None:
    assert state_folder(tmp_path, "almanac") == tmp_path / ".run"
    if os.getuid() == 0:
        assert state_folder(tmp_path, "root") == tmp_path / ".run"
        os.chown(tmp_path, 65534, 65534)
    assert state_folder(tmp_path, "root") == Path("/run/almanac-root")


# --- doctor


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (None, "never ran"),
        (LastRun(NOON_S - 600, NOON_S - 590, 0), ""),
        (LastRun(NOON_S - 600, None, None), ""),
        (LastRun(NOON_S - 600, NOON_S - 590, 3), "started 10 min ago, and ended with exit code 3"),
        (LastRun(NOON_S - 86_400, NOON_S - 86_300, 0), "started last 1 d ago, and runs every 10 min"),
    ],
)
def test_doctor_names_tasks_that_do_not_start_or_fail(
    site: Path, monkeypatch: pytest.MonkeyPatch, last: LastRun | None, said: str
) -> None:
    (site / "tasks.toml").write_text('almanac = ["power"]')
    (site / "store/.run").mkdir()
    if last:
        (site / "store/.run/power.json").write_text(msgspec.json.encode(last).decode())
    monkeypatch.setattr(App, "now_s", lambda self: NOON_S)
    app = App(str(site / "almanac.toml"), str(site / "store"))
    (check,) = check_tasks(app)
    assert (check.status, check.said) == (("warn", said) if said else ("ok", "power ran as planned"))
    assert bool(check.todo) == bool(said)
    (site / "tasks.toml").unlink()
    assert list(check_tasks(app)) == []


def test_doctor_says_once_that_a_timer_does_not_run(site: Path) -> None:
    (site / "tasks.toml").write_text('almanac = ["ingest", "train"]\nroot = ["distribute"]')
    found = [(check.name, check.said) for check in check_tasks(App(str(site / "almanac.toml"), str(site / "store")))]
    assert found == [("tasks of almanac", "ingest, train never ran"), ("task distribute", "never ran")]
