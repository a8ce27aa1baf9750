"""almanac-pack as a process, with and without a fake MPS: order, environments, codes, signals, and faults."""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from pathlib import Path

import pytest
from advice_lines import shown as shown_advice
from pack_job import PackJob

from slurm_hooks.packing.job import folder_path, new_token

# --- what runs, and how it ends


def test_the_worst_code_is_the_jobs_and_a_plain_failure_stops_nobody(job: PackJob) -> None:
    code, said = job.run("--items", "0-3", "--", "sh", "-c", "echo item {}; exit $(({} * 3))")
    assert code == 9
    assert [job.output(item) for item in range(4)] == [f"item {item}\n" for item in range(4)]
    for item in range(4):
        assert re.search(f"almanac-pack: item {item} ended with code {item * 3} after .*, output in slurm-", said)
    assert "4 tasks on 1 GPU, 2 at a time: time-slicing (nvidia-cuda-mps-control is not in PATH)" in said


def test_a_task_ended_by_a_signal_counts_as_128_and_the_signal(job: PackJob) -> None:
    assert job.run("--items=0-1", "--", "sh", "-c", "[ {} = 0 ] || kill -KILL $$")[0] == 128 + 9


def test_codes_count_also_where_the_parent_ignores_the_end_of_children(job: PackJob) -> None:
    job.before = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    code, said = job.run("--items=0-1", "--", "sh", "-c", "exit 7")
    assert code == 7 and "no watchdog" not in said


@pytest.mark.parametrize("mps", [False, True])
def test_when_one_ends_the_next_of_the_list_starts(job: PackJob, mps: bool) -> None:
    """The first script runs until the last has started, so the second place takes all others, one by one."""
    if mps:
        job.install_mps()
    log, note = job.root / "log", 'echo "$ALMANAC_PACK_ITEM $ALMANAC_PACK_SLOT" >>log'
    first = job.script("a.sh", f"{note}; until grep -q ^3 log; do sleep 0.05; done")
    others = [job.script(f"{name}.sh", note) for name in "bcd"]
    code, said = job.run(first, *others)
    assert code == 0
    lines = log.read_text().splitlines()
    assert [line for line in lines if line[0] != "0"] == ["1 1", "2 1", "3 1"] and "0 0" in lines
    assert f"{first} (item 0) ended with code 0" in said
    job.wait_until_nothing_is_left()


def test_at_most_n_run_on_each_gpu_and_each_sees_its_own(job: PackJob) -> None:
    job.environ["CUDA_VISIBLE_DEVICES"] = "GPU-a,GPU-b"
    shown = "echo $ALMANAC_PACK_SLOT $CUDA_VISIBLE_DEVICES"
    count = f"{shown}; mkdir -p here; : >here/$$; ls here | wc -l; sleep 0.2; rm here/$$"
    assert job.run("-n3", "--items=0-11", "--", "sh", "-c", count)[0] == 0
    seen = [job.output(item).split() for item in range(12)]
    assert {(slot, gpu) for slot, gpu, _ in seen} == {
        *((str(slot), "GPU-a") for slot in range(3)), *((str(slot), "GPU-b") for slot in range(3, 6))
    }  # fmt: skip
    assert max(int(number) for _, _, number in seen) <= 6


def _variables(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def test_the_environment_of_each_task(job: PackJob) -> None:
    job.install_mps()
    hostile = "x\n; $(touch hacked) `id`"
    argv = ("--shares=60,40", "--memory=2G,1G", "--items=7,9", "--", "sh", "-c", "env; sleep 0.3")
    assert job.run(*argv, HOSTILE=hostile)[0] == 0
    first, second = (_variables(job.output(item)) for item in (7, 9))
    for name, values in {
        "SLURM_ARRAY_TASK_ID": ("7", "9"), "ALMANAC_PACK_ITEM": ("7", "9"), "ALMANAC_PACK_SLOT": ("0", "1"),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": ("60", "40"), "CUDA_VISIBLE_DEVICES": ("0", "0"),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": ("0=2048M", "0=1024M"),
    }.items():  # fmt: skip
        assert (first[name], second[name]) == values
    assert first["CUDA_MPS_PIPE_DIRECTORY"] == second["CUDA_MPS_PIPE_DIRECTORY"]
    assert "HOSTILE=x\n; $(touch hacked) `id`\n" in job.output(7)
    assert not (job.root / "hacked").exists()


def test_scripts_keep_the_jobs_array_index_and_need_not_be_executable(job: PackJob) -> None:
    name = job.script(
        "a b;$(touch hacked)\n.sh", 'echo "$SLURM_ARRAY_TASK_ID $ALMANAC_PACK_ITEM $CUDA_VISIBLE_DEVICES"'
    )
    (job.root / name).chmod(0o644)
    code, said = job.run(name, "./missing.sh", SLURM_ARRAY_TASK_ID="5", SLURM_ARRAY_JOB_ID="1")
    assert code == 127 and job.output(0) == "5 0 3\n"
    assert "./missing.sh (item 1): ./missing.sh cannot be run: No such file or directory; it counts as code 127" in said
    assert all(line.startswith("almanac-pack: ") for line in said.splitlines())
    assert not (job.root / "hacked").exists()


def test_cpus_are_split_where_the_job_is_confined_to_them(job: PackJob) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    shown = ("--items=0-1", "--", "sh", "-c", "taskset -pc $$; echo $OMP_NUM_THREADS; sleep 0.3")
    assert job.run(*shown, SLURM_CPUS_ON_NODE=str(len(cpus)))[0] == 0
    found = [job.output(item).split(": ")[1].split("\n") for item in (0, 1)]
    if len(cpus) >= 2:
        assert not _cpus(found[0][0]) & _cpus(found[1][0])
        assert _cpus(found[0][0]) | _cpus(found[1][0]) == set(cpus)
    assert {each[1] for each in found} == {str(max(1, len(cpus) // 2))}
    assert job.run(*shown, SLURM_CPUS_ON_NODE="1", OMP_NUM_THREADS="7")[0] == 0  # one CPU given, all usable
    found = [job.output(item).split(": ")[1].split("\n") for item in (0, 1)]
    assert [_cpus(each[0]) for each in found] == [set(cpus)] * 2 or len(cpus) == 1
    assert {each[1] for each in found} == {"7"}


def _cpus(text: str) -> set[int]:
    ranges = [term.split("-") for term in text.split(",")]
    return {cpu for each in ranges for cpu in range(int(each[0]), int(each[-1]) + 1)}


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (("--items=0-1", "--", "true"), {"CUDA_VISIBLE_DEVICES": ""}, "names no GPU"),
        (("--items=0-1", "--", "true"), {"SLURM_JOB_NUM_NODES": "2"}, "has 2 nodes"),
        (("--", "true"), {}, "no items"),
        (("--items=$(id)", "--", "true"), {}, "--items is"),
        (("-n", "9", "a.sh"), {}, "-n is '9'"),
    ],
)
def test_wrong_uses_start_nothing(job: PackJob, argv: tuple[str, ...], environ: dict[str, str], words: str) -> None:
    code, said = job.run(*argv, **environ)
    assert code == 2 and words in said
    assert not list(job.root.glob("*.out"))


def test_a_mig_slice_runs_one_task_at_a_time(job: PackJob) -> None:
    job.install_mps()
    job.environ["CUDA_VISIBLE_DEVICES"] = "MIG-1"
    code, said = job.run("--items=0-2", "--", "sh", "-c", "mkdir here && sleep 0.1 && rmdir here")
    assert code == 0 and "1 at a time: MIG slices run one task each" in said and job.calls() == []


def test_a_cpu_that_is_gone_stops_no_task(job: PackJob) -> None:
    job.before = "import os; os.sched_getaffinity = lambda pid: {5000, 5001}; "
    code, said = job.run("--items=0-1", "--", "sh", "-c", "exit 3", SLURM_CPUS_ON_NODE="2")
    assert code == 3 and "Traceback" not in said


def test_a_fork_that_fails_is_tried_again_but_not_for_ever(job: PackJob) -> None:
    fails = (
        "import slurm_hooks.packing.run as run; run.LOOK_S = 0.005; begin = run.start_process; left = [{}]; "
        "run.start_process = lambda *words: begin(*words) if not left or not left.pop() else run.fail(); "
        "run.fail = lambda: (_ for _ in ()).throw(BlockingIOError(11, 'Resource temporarily unavailable')); "
    )
    job.before = fails.format("1, 1, 1")
    assert job.run("--items=0-1", "--", "true")[0] == 0
    job.before = fails.format("1, " * 70)
    code, said = job.run("--items=0-1", "--", "true")
    assert code == 126 and "true cannot be run: Resource temporarily unavailable" in said


def test_a_task_of_a_run_cannot_start_another_run(job: PackJob) -> None:
    job.program("pack")
    assert job.run("--items=0-1", "--", "pack", "--items=0-1", "--", "touch", "ran")[0] == 2
    assert "it is in a task of almanac-pack" in job.output(0) and not (job.root / "ran").exists()
    submitted = ("env", "SLURM_JOB_ID=1", "pack", "--items=0-1", "--", "touch", "ran")  # by a task, as another job
    assert job.run("--items=0-1", "--", *submitted)[0] == 0 and (job.root / "ran").exists()


# --- output


def test_a_file_system_that_counts_no_blocks_is_not_full(job: PackJob) -> None:
    space = "types.SimpleNamespace(f_bavail=0, f_blocks=os.environ['B'] == '9')"
    job.before = f"import os, types; os.fstatvfs = lambda fd: {space}; "
    assert job.run("--items=0-1", "--", "true", B="0")[0] == 0
    assert job.run("--items=0-1", "--", "true", B="9")[0] == 1


@pytest.mark.parametrize("mps", [False, True])
def test_where_the_output_cannot_be_written_the_task_fails_and_it_is_said(job: PackJob, mps: bool) -> None:
    if mps:
        job.install_mps()
    code, said = job.run("--output=/dev/full", "--items=0-1", "--", "sh", "-c", "echo {}")
    assert code != 0 and re.search("item 0 ended with code [1-9]", said)
    code, said = job.run("--output=no/such/%a", "--items=0-1", "--", "true")
    assert code == 1 and "its output no/such/0 cannot be written: No such file or directory" in said
    job.wait_until_nothing_is_left()


def test_output_replaces_that_of_an_earlier_run_unless_sbatch_appends(job: PackJob) -> None:
    for mode, expected in (("t", "0\n"), ("a", "0\n0\n")):
        job.run("--items=0", "--", "echo", "{}", SLURM_OPEN_MODE=mode)
        assert job.output(0) == expected


def test_an_array_tasks_own_output_file_is_shared_and_nothing_in_it_is_lost(job: PackJob) -> None:
    """Slurm gives array task 4 the file slurm-9_4.out, which item 4 has, too."""
    path = job.root / "slurm-9_4.out"
    script = f"echo before; {job.bin}/pack -n 2 --items 4-5 -- sh -c 'sleep 0.2; echo item {{}}'; echo after"
    job.program("pack")
    array = {"ID": "4", "MIN": "0", "MAX": "4", "STEP": "2", "COUNT": "3"}
    with path.open("wb") as file:
        done = job.shell(script, file, SLURM_ARRAY_JOB_ID="9", **{f"SLURM_ARRAY_TASK_{k}": v for k, v in array.items()})
    assert done == 0
    text = path.read_text()
    assert text.startswith("before\nalmanac-pack: 2 tasks") and text.endswith("after\n") and "\nitem 4\n" in text
    assert (job.root / "slurm-9_5.out").read_text() == "item 5\n"


# --- the end


WAITING = "trap 'sleep 0.2; echo ended; exit 5' TERM; echo ready; while :; do sleep 0.05; done"


def _ended_otherwise(job: PackJob) -> list[str]:
    """Return the outputs of tasks that did not end in order. A shell also says how the command ended under it."""
    outputs = [job.output(item) for item in (0, 1)]
    return [text for text in outputs if not (text.startswith("ready\n") and text.endswith("ended\n"))]


def _ready(job: PackJob, items: int = 2) -> bool:
    return all(path.read_text() == "ready\n" for path in job.root.glob("*.out")) and (
        len(list(job.root.glob("*.out"))) == items
    )


@pytest.mark.parametrize("mps", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_tasks_and_nothing_is_left(job: PackJob, number: signal.Signals, mps: bool) -> None:
    if mps:
        job.install_mps()
    launcher = job.start("--items=0-5", "--", "sh", "-c", WAITING.replace("TERM", number.name.removeprefix("SIG")))
    job.wait_for("the tasks", lambda: _ready(job))
    launcher.send_signal(number)
    said = launcher.communicate(timeout=300)[1]
    assert launcher.returncode == 128 + number
    assert f"signal {number}: tasks get it too, and 15 s to end; 4 tasks not started" in said
    assert _ended_otherwise(job) == []
    assert len(list(job.root.glob("*.out"))) == 2
    job.wait_until_nothing_is_left()


def test_a_signal_that_nohup_ignores_stays_ignored(job: PackJob) -> None:
    job.before = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    launcher = job.start("--items=0-3", "--", "sh", "-c", "echo ready; until [ -e go ]; do sleep 0.05; done")
    job.wait_for("the tasks", lambda: _ready(job))
    launcher.send_signal(signal.SIGHUP)
    (job.root / "go").touch()
    said = launcher.communicate(timeout=300)[1]
    assert launcher.returncode == 0 and "signal" not in said
    assert len(list(job.root.glob("*.out"))) == 4


def test_a_full_pipe_that_nobody_reads_holds_up_no_signal(job: PackJob) -> None:
    """It is standard error's. What is said meanwhile is lost."""
    fill = "os.set_blocking(2, False)\nwhile True:\n try: os.write(2, b'x' * 4096)\n except BlockingIOError: break\n"
    job.before = f"import os; exec({fill!r}); os.set_blocking(2, True); "
    job.before += "import slurm_hooks.packing.options as message; message.WAIT_S = 0.05; "
    launcher = job.start("--items=0-3", "--", "sh", "-c", WAITING)
    job.wait_for("the tasks", lambda: _ready(job))
    launcher.send_signal(signal.SIGTERM)
    launcher.wait(timeout=300)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert set(launcher.communicate()[1]) == {"x"}


def test_a_signal_for_checkpoints_ends_nothing(job: PackJob) -> None:
    waiting = "trap 'echo saved; exit 0' USR1; echo ready; while :; do sleep 0.05; done"
    launcher = job.start("--items=0-1", "--", "sh", "-c", waiting)
    job.wait_for("the tasks", lambda: _ready(job))
    launcher.send_signal(signal.SIGUSR1)
    launcher.communicate(timeout=300)
    assert launcher.returncode == 0 and job.output(0).endswith("saved\n")


DEAF = "trap '' TERM; echo ready; while :; do sleep 0.05; done"


def test_a_client_that_does_not_end_is_killed_only_after_mps_has_ended_its_work(job: PackJob) -> None:
    job.install_mps()
    launcher = job.start("--grace=0.5", "--items=0-1", "--", "sh", "-c", DEAF)
    job.wait_for("the tasks", lambda: _ready(job))
    clients = {pid for pid, line in job.processes().items() if line.startswith("sh -c trap")}
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=300)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert {int(path.stem) for path in job.bin.glob("*.terminated")} >= clients and len(clients) == 2
    calls = [call.split()[0] for call in job.calls()]
    assert calls[-1] == "quit" and "terminate_client" in calls
    job.wait_until_nothing_is_left()


def test_where_mps_ends_no_client_its_daemon_is_ended_first(job: PackJob) -> None:
    job.install_mps("stubborn")
    launcher = job.start("--grace=0.2", "--items=0-1", "--", "sh", "-c", DEAF)
    job.wait_for("the tasks", lambda: _ready(job))
    launcher.send_signal(signal.SIGTERM)
    said = launcher.communicate(timeout=300)[1]
    assert "did not answer within" in said and launcher.returncode == 128 + signal.SIGTERM
    job.wait_until_nothing_is_left()


# --- kill -9


def _has_started(job: PackJob) -> bool:
    return bool(job.calls())


def _has_daemon(job: PackJob) -> bool:
    return any(path.is_file() for path in job.tmp.glob("*/gpu0/pipe/*.pid"))


def _has_folder(job: PackJob) -> bool:
    return any(job.tmp.iterdir())


@pytest.mark.parametrize("when", [_has_folder, _has_started, _has_daemon, _ready])
def test_after_kill_9_nothing_is_left(job: PackJob, when: object) -> None:
    assert callable(when)
    job.install_mps()
    launcher = job.start("--grace=30", "--items=0-1", "--", "sh", "-c", WAITING)
    job.wait_for("the point to kill it", lambda: when(job))
    launcher.kill()
    launcher.communicate(timeout=300)
    job.wait_until_nothing_is_left()
    if when is _ready:
        assert _ended_otherwise(job) == []


def test_what_launcher_and_watchdog_leave_the_next_run_ends(job: PackJob) -> None:
    """Both are killed at once, as Slurm does if it keeps a job in a cgroup; the daemon is left."""
    job.install_mps()
    launcher = job.start("--items=0-1", "--", "sh", "-c", WAITING)
    job.wait_for("the tasks", lambda: _ready(job))
    watchdogs = [pid for pid, line in job.processes().items() if "slurm_hooks.packing.launcher" in line]
    assert len(watchdogs) == 1
    os.kill(watchdogs[0], signal.SIGKILL)
    launcher.kill()
    launcher.communicate(timeout=300)
    (folder,) = job.tmp.iterdir()
    assert job.run("--items=0", "--", "true")[0] == 0  # one task: no MPS, nothing is looked for
    assert folder.exists()
    os.utime(folder, (0, 0))
    code, said = job.run("--items=0-1", "--", "true")
    assert code == 0 and "which an earlier run had left" in said
    job.wait_until_nothing_is_left()


def test_the_next_run_leaves_the_tasks_of_a_killed_one_their_time(job: PackJob) -> None:
    job.install_mps()
    launcher = job.start("--items=0-1", "--", "sh", "-c", WAITING.replace("sleep 0.2", "sleep 3"))
    job.wait_for("the tasks", lambda: _ready(job))
    (folder,) = job.tmp.iterdir()
    os.utime(folder, (0, 0))
    launcher.kill()
    launcher.communicate(timeout=300)
    code, said = job.run("--output=second-%a", "--items=0-1", "--", "true")
    assert code == 0 and "earlier run" not in said
    job.wait_until_nothing_is_left()
    assert _ended_otherwise(job) == []


def test_a_run_that_lives_and_folders_of_others_are_left_alone(job: PackJob) -> None:
    job.install_mps()
    launcher = job.start("--items=0-1", "--", "sh", "-c", WAITING)
    job.wait_for("the tasks", lambda: _ready(job))
    (folder,) = job.tmp.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "lock").unlink(missing_ok=True)  # as what cleans /tmp removes old files
    os.utime(folder, (0, 0))
    target = job.root / "target"
    target.mkdir()
    link, other = (Path(folder_path(str(job.tmp), new_token("1"))) for _ in range(2))
    link.symlink_to(target)
    other.mkdir(mode=0o755)
    if os.getuid() == 0:
        os.chown(other, 65534, 65534)
        os.utime(other, (0, 0))
    code, said = job.run("--output=second-%a", "--items=0-1", "--", "true")
    assert code == 0 and "earlier run" not in said
    assert folder.exists() and target.exists() and other.exists()
    launcher.terminate()
    launcher.communicate(timeout=300)
    other.rmdir()
    link.unlink()
    job.wait_until_nothing_is_left()


def test_a_job_that_a_task_submits_is_no_part_of_the_run(job: PackJob) -> None:
    """sbatch hands the task's environment on: the new job's processes have its marks, but another job id."""
    job.install_mps()
    submit = "SLURM_JOB_ID=1 setsid sleep 5 </dev/null >/dev/null 2>&1 &"
    assert job.run("--items=0-1", "--", "sh", "-c", submit)[0] == 0
    left = job.processes()
    assert [line.split() for line in left.values()] == [["sleep", "5"]] * 2
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def test_where_the_site_has_mps_no_daemon_is_started(job: PackJob) -> None:
    job.install_mps()
    code, said = job.run("--shares=60,40", "--items=0-1", "--", "true", CUDA_MPS_PIPE_DIRECTORY="/site")
    assert code == 0 and "no MPS of its own (CUDA_MPS_PIPE_DIRECTORY is set already)" in said
    assert "--shares and --memory have no effect" in said and job.calls() == []


def test_a_folder_that_others_can_change_is_not_used(job: PackJob) -> None:
    job.install_mps()
    job.tmp.chmod(0o777)
    assert job.run("--items=0-1", "--", "sh", "-c", "echo $CUDA_MPS_PIPE_DIRECTORY")[0] == 0
    assert job.output(0).startswith("/tmp/almanac-pack-")
    job.tmp.chmod(0o1777)
    assert job.run("--items=0-1", "--", "sh", "-c", "echo $CUDA_MPS_PIPE_DIRECTORY")[0] == 0
    assert job.output(0).startswith(f"{job.tmp}/almanac-pack-")


def test_a_program_that_clears_its_environment_is_ended_too(job: PackJob) -> None:
    job.install_mps()
    launcher = job.start("--grace=0.2", "--items=0-1", "--", "env", "-i", "sh", "-c", f"{DEAF} # {job.root}")
    job.wait_for("the tasks", lambda: _ready(job))
    launcher.send_signal(signal.SIGTERM)
    said = launcher.communicate(timeout=300)[1]
    assert said.count("ended with code 137") == 2
    job.wait_until_nothing_is_left()


def test_one_output_file_for_all_tasks_keeps_what_each_wrote(job: PackJob) -> None:
    job.run("--output=all", "--items=0-9", "--", "echo", "{}")
    assert sorted((job.root / "all").read_text().split()) == [str(item) for item in range(10)]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_files_change_nothing(job: PackJob, closed: str) -> None:
    job.install_mps()
    job.program("pack")
    with (job.root / "log").open("wb") as file:
        code = job.shell(f"pack --items 0-1 -- sh -c 'echo {{}}; exit 3' {closed}", file)
    assert (code, job.output(0), job.output(1)) == (3, "0\n", "1\n")
    job.wait_until_nothing_is_left()


def test_a_pipe_as_output_without_a_reader_holds_nobody_up(job: PackJob) -> None:
    os.mkfifo(job.root / "pipe-0")
    code, said = job.run("--output=pipe-%a", "--items=0-1", "--", "true")
    assert code == 1 and "its output pipe-0 cannot be written: No such device or address" in said
    assert "item 1 ended with code 0" in said


def test_a_signal_that_comes_while_mps_hangs_is_not_lost(job: PackJob) -> None:
    job.install_mps("hang")
    job.before = "import slurm_hooks.packing.mps; slurm_hooks.packing.mps.START_S = 1.5; "
    launcher = job.start("--items=0-3", "--", "sh", "-c", "sleep 60")
    job.wait_for("MPS", job.calls)
    launcher.send_signal(signal.SIGTERM)
    said = launcher.communicate(timeout=300)[1]
    assert launcher.returncode == 128 + signal.SIGTERM and "4 tasks not started" in said
    job.wait_until_nothing_is_left()


@pytest.mark.parametrize(
    ("argv", "is_named", "expected"),
    [((), True, "0=2345M"), ((), False, ""), (("--memory=none",), True, ""), (("--memory=1G",), True, "0=1024M")],
)
def test_the_published_bound_of_the_jobs_name_is_the_default_limit(
    job: PackJob, argv: tuple[str, ...], is_named: bool, expected: str
) -> None:
    """Slurm calls all jobs of sbatch --wrap "wrap" that have no name."""
    job.install_mps()
    folder = job.root / f"advice/user/{os.getuid()}"
    folder.mkdir(parents=True)
    now_s = int(time.time())
    row = "\n".join(f"F\t{name}\t1\t3600\t0\t2345\t-\t-\t-" for name in ("sweep-#", "wrap"))
    lines = (
        f"almanac-advice\t1\nversion\tv\nwritten\t{now_s}\nexpires\t{now_s + 3600}\nmode\toff\ntell\tno\nprompt\task\n"
        f"priority\t1000\t60\t8640000\n{row}\nend\t2\n"
    )
    (folder / "advice.json").write_bytes(shown_advice(lines))
    (job.root / "almanac.toml").write_text(f'[hooks]\nadvice_dir = "{job.root}/advice"\n')
    environ = {"ALMANAC_CONFIG": str(job.root / "almanac.toml"), "SLURM_JOB_NAME": "sweep-7" if is_named else "wrap"}
    shown = ("--items=0-1", "--", "sh", "-c", "echo $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
    code, said = job.run(*argv, *shown, **environ)
    assert code == 0 and job.output(0) == f"{expected}\n"
    assert ("2345 MiB" in said and "--memory none lifts it" in said) == (is_named and not argv)
