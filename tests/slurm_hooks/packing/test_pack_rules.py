"""The rules of almanac-pack without a process: options, items, GPUs, CPUs, output names, and common faults."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from slurm_hooks.packing import ending
from slurm_hooks.packing.ending import DAEMON_MARK, TASK_MARK, end_run, marked
from slurm_hooks.packing.job import (
    MOST_PATH,
    abandoned_folders,
    cpu_parts,
    folder_path,
    folder_places,
    gpus_of,
    is_safe_place,
    new_token,
    threads_for,
    why_not,
)
from slurm_hooks.packing.launcher import make_gpus
from slurm_hooks.packing.mps import Failure, Mps, MpsTimeoutError, innocent
from slurm_hooks.packing.options import Item, PackOptions, indices_of, items_of, parse_indices, parse_options
from slurm_hooks.packing.task import output_path


def _array(task: int, first: int, last: int, step: int, count: int) -> dict[str, str]:
    """As Slurm 22.05 sets it: the largest index is the largest that was scheduled."""
    values = {"ID": task, "MIN": first, "MAX": last, "STEP": step, "COUNT": count}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


def test_options() -> None:
    assert parse_options(["a.sh", "b.sh"]) == PackOptions(scripts=("a.sh", "b.sh"))
    options = parse_options(
        ["-n", "3", "--shares=50,30,20", "--memory", "2G", "--items=0-9", "--grace", "5", "--no-mps", "--", "x", "{}"]
    )
    assert options == PackOptions((), ("x", "{}"), "0-9", 3, (50, 30, 20), (2048,) * 3, "", 5.0, False)
    assert parse_options(["-n4", "--memory=none", "a"]).tasks_per_gpu == 4
    assert parse_options(["--memory=1024M,2GiB", "a"]).memory_mib == (1024, 2048)


@pytest.mark.parametrize(
    "argv",
    [
        [], ["--"], ["-n", "5", "a"], ["-n", "0", "a"], ["-n"], ["-n", "x", "a"], ["--shares", "60", "a"],
        ["--shares", "60,0", "a"], ["--shares", "60,101", "a"], ["--memory", "0G", "a"], ["--memory", "1G,2G,3G", "a"],
        ["--memory", "20", "a"], ["--grace", "nan", "a"], ["--grace", "-1", "a"], ["--other", "a"],
        ["--items", "0-3", "a.sh"], ["--no-mps=yes", "a"],
    ],
)  # fmt: skip
def test_wrong_options(argv: list[str]) -> None:
    with pytest.raises(ValueError, match=r"expected|needs|must not|not recognized|requires|no "):
        parse_options(argv)


def test_help_is_shown_wherever_it_stands_among_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["-n", "1", "--help"], ["--no-mps", "-h", "a"]):
        with pytest.raises(SystemExit) as ended:
            parse_options(argv)
        assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage: almanac-pack")
    assert parse_options(["--", "train", "--help"]).command == ("train", "--help")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3", [0, 1, 2, 3]), ("0-9:4", [0, 4, 8]), ("1,4,7-9,8", [1, 4, 7, 8, 9]), ("5", [5]), ("007", [7])],
)
def test_indices(text: str, expected: list[int]) -> None:
    assert parse_indices(text) == expected


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "0-9:0", "-1", "1;2", "$(id)", "0-9%2", "1\n2", "0-99999999", "\u0663"]
)
def test_wrong_indices(text: str) -> None:
    with pytest.raises(ValueError, match="--items is"):
        parse_indices(text)


def test_every_item_of_an_array_runs_once() -> None:
    """--array=0-99:2 and its four indices that Slurm schedules."""
    for step in (1, 2, 3, 4):
        starts = range(0, 100, step)
        found = [index for task in starts for index in indices_of("", _array(task, 0, starts[-1], step, len(starts)))]
        assert found[:100] == list(range(100)) and len(found) == len(starts) * step
        ended = [
            index for task in starts for index in indices_of("0-99", _array(task, 0, starts[-1], step, len(starts)))
        ]
        assert ended == list(range(100))


def test_items_outside_arrays_and_wrong_arrays() -> None:
    assert indices_of("0-9", {}) == list(range(10))
    assert indices_of("", _array(5, 1, 8, 1, 4)) == [5]
    with pytest.raises(ValueError, match="give --items"):
        indices_of("", {})
    with pytest.raises(ValueError, match="several ranges"):
        indices_of("", _array(20, 0, 23, 4, 5))
    with pytest.raises(ValueError, match="goes to 99, but the array's tasks run the items up to 9"):
        indices_of("0-99", _array(0, 0, 9, 1, 10))


def test_the_item_is_replaced_in_arguments_and_never_read_as_more() -> None:
    options = PackOptions(command=("train", "--seed={}", "{}", "$(id); x\n", "{ }"), items="3")
    assert items_of(options, {}) == [Item(3, ("train", "--seed=3", "3", "$(id); x\n", "{ }"), True)]
    assert items_of(PackOptions(scripts=("a;b", "{}")), _array(4, 0, 9, 1, 10))[1] == Item(1, ("{}",), False)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0", ["0"]), ("2,3", ["2", "3"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"]), ("", []), ("NoDevFiles", []),
        ("MIG-1", ["MIG-1"]), ("0,0", ["0"]), ("-1", []),
    ],
)  # fmt: skip
def test_gpus(visible: str, expected: list[str]) -> None:
    assert gpus_of({"CUDA_VISIBLE_DEVICES": visible}) == expected
    assert ("names no GPU" in why_not({"CUDA_VISIBLE_DEVICES": visible})) == (not expected)


def test_where_nothing_is_packed() -> None:
    gpu = {"CUDA_VISIBLE_DEVICES": "0"}
    assert why_not(gpu) == why_not({**gpu, "SLURM_JOB_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}) == ""
    assert "has 2 nodes" in why_not({**gpu, "SLURM_JOB_NUM_NODES": "2"})
    assert why_not({**gpu, "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NUM_NODES": "1"}) == ""
    assert "several copies" in why_not({**gpu, "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"})
    assert why_not({**gpu, "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "1"}) == ""  # inherited by a new job


def test_cpus_are_split_into_disjoint_parts_and_only_the_jobs_own() -> None:
    parts = cpu_parts(range(1000, 1007), 7, 3)
    assert sorted(cpu for part in parts for cpu in part) == list(range(1000, 1007))
    assert sorted(map(len, parts)) == [2, 2, 3]
    assert threads_for(7, range(7), parts, 3) == 2
    assert cpu_parts(range(1000, 1064), 8, 2) == [] and threads_for(8, range(64), [], 2) == 4
    assert cpu_parts([1000], 1, 2) == [] and threads_for(1, [1000], [], 2) == 1
    assert cpu_parts([], 0, 2) == [] and threads_for(0, [], [], 2) == 1


def test_a_mig_slice_takes_one_task_and_a_gpu_n() -> None:
    assert [len(gpu.slots) for gpu in make_gpus(["MIG-1", "MIG-2"], 2, {})] == [1, 1]
    slots = [slot for gpu in make_gpus(["0", "1"], 3, {}) for slot in gpu.slots]
    assert [(slot.number, slot.gpu, slot.position) for slot in slots] == [
        (0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 1, 0), (4, 1, 1), (5, 1, 2)
    ]  # fmt: skip


def test_output_names_stay_in_their_folder() -> None:
    environ = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "10", "SLURM_JOB_NAME": "../../etc/x\n"}
    sweep, script = Item(3, ("x",), True), Item(0, ("x",), False)
    assert output_path("", sweep, 1, environ) == "slurm-10_3.out"
    assert output_path("", script, 1, environ) == "slurm-12_0.out"
    assert output_path("", sweep, 1, {}) == "pack-3.out"
    assert output_path("logs/%x_%A-%j_%a_%s_%%a_%q", sweep, 1, environ) == "logs/__.._etc_x\n_10-12_3_1_%a_%q"
    assert output_path("%x/%a", sweep, 1, {"SLURM_JOB_NAME": ".."}) == "_/3"


def test_clients_of_mps_know_their_gpu_and_their_limits() -> None:
    """A daemon that sees GPU 3 alone shows it to clients as 0; a UUID stays."""
    assert Mps("3", "/f", "t", {}).client_variables(60, 2048) == {
        b"CUDA_MPS_PIPE_DIRECTORY": b"/f/pipe", b"CUDA_MPS_LOG_DIRECTORY": b"/f/log", b"CUDA_VISIBLE_DEVICES": b"0",
        b"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": b"60", b"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": b"0=2048M",
    }  # fmt: skip
    free = Mps("GPU-a", "/f", "t", {}).client_variables(None, None)
    assert free[b"CUDA_VISIBLE_DEVICES"] == b"GPU-a" and len(free) == 3


def test_paths_fit_a_unix_socket_and_cannot_be_guessed() -> None:
    assert folder_places(None) == folder_places("relative") == folder_places("/" + "x" * MOST_PATH) == ["/tmp"]
    assert folder_places("/tmp") == ["/tmp"] and folder_places("/scratch") == ["/scratch", "/tmp"]
    longest = folder_path("/" + "x" * (MOST_PATH - 1), new_token("4294967295"))
    assert len(f"{longest}/gpu15/pipe") + len("/control_privileged") <= 107
    assert new_token("1") != new_token("1") and new_token("x; y").startswith("0-")


def test_only_folders_of_this_host_can_be_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts can share $TMPDIR, but not their locks."""
    own, young = new_token("1"), new_token("1")
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="other"))
    other = new_token("1")
    monkeypatch.undo()
    for token in (own, young, other):
        Path(folder_path(str(tmp_path), token)).mkdir()
    for token in (own, other):
        os.utime(folder_path(str(tmp_path), token), (0, 0))
    assert list(abandoned_folders(str(tmp_path))) == [folder_path(str(tmp_path), own)]


# --- faults


def _failure(text: str, *pids: int) -> Failure:
    return Failure(text, frozenset(pids))


ILLEGAL = "RuntimeError: CUDA error: an illegal memory access was encountered"
ENDED = "CUDA error: the MPS client has been terminated by the server"
LOG = "[2026-11-25 10:00:00.000 Server 77] Fatal GPU exception, clients: {}\n"


@pytest.mark.parametrize(
    ("failures", "log", "is_dead", "expected"),
    [
        ([_failure("x"), _failure("y")], "", False, []),  # two plain failures
        ([_failure(ILLEGAL)], "", False, []),  # nobody else
        ([_failure(ENDED)], "", False, [0]),  # long after the fault of another one
        ([_failure(ILLEGAL), _failure(ENDED), _failure("y")], "", False, [1]),
        ([_failure("killed"), _failure(ENDED)], "", False, [0, 1]),
        ([_failure(ILLEGAL), _failure("y")], "", False, []),  # a fault that stayed with its origin
        ([_failure(ILLEGAL), _failure(ILLEGAL)], "", False, [0, 1]),
        ([_failure(ILLEGAL), _failure(ENDED)], "", False, [1]),
        ([_failure(ENDED), _failure(ENDED)], "", False, [0, 1]),
        ([_failure("x", 10, 11), _failure("y", 20)], LOG.format("11"), False, [1]),
        ([_failure("x", 10), _failure("y", 20)], LOG.format("10 20"), False, [0, 1]),
        ([_failure("x", 10), _failure("y", 20)], LOG.format("unknown"), False, [0, 1]),
        ([_failure("x", 2026), _failure("y", 77)], LOG.format("unknown"), False, [0, 1]),  # of the line's stamp
        ([_failure("x", 10), _failure("y", 20)], "[x] New client 10 connected\n", False, []),
        ([_failure("x"), _failure("y")], "", True, [0, 1]),
        ([_failure("x", 10), _failure("y", 20)], "[x] Default active thread percentage set to 100.0\n", False, []),
        ([_failure("x", 10), _failure("y", 20)], "[x] Accepting on socket: /tmp/my-fault/control\n", False, []),
        ([_failure("x", 100), _failure("y", 20)], LOG.format("20, 100.0%"), False, [0]),
        ([_failure("x", 11), _failure("y", 20)], LOG.format("{0, 11}."), False, [1]),
        ([_failure("x")], "", True, [0]),
        ([_failure(ILLEGAL), _failure(ENDED), _failure(ENDED)], "", False, [1, 2]),
    ],
)
def test_who_is_innocent(failures: list[Failure], log: str, is_dead: bool, expected: list[int]) -> None:
    found, why = innocent(failures, log, is_dead)
    assert found == expected and bool(why) == bool(expected)


def test_no_module_of_the_launcher_needs_a_library() -> None:
    folder = Path(__file__).parents[3] / "slurm_hooks/packing"
    imports = {line.split()[1] for path in folder.glob("*.py") for line in path.read_text().splitlines()
               if line.startswith(("import ", "from "))}  # fmt: skip
    assert {name for name in imports if "." in name} <= {
        "almanac.files", "almanac.units", "almanac.names", "advisor.packing.shares", "collections.abc",
        "slurm_hooks.submit.sbatch_almanac", "slurm_hooks.packing", "telemetry.health.errors",
        *(f"slurm_hooks.packing.{path.stem}" for path in folder.glob("*.py")),
    }  # fmt: skip


def test_a_place_is_safe_only_below_folders_that_no_other_user_can_change(tmp_path: Path) -> None:
    place = tmp_path / "a" / "b"
    place.mkdir(parents=True)
    assert is_safe_place(str(place))
    for mode, is_closed in ((0o777, False), (0o770, False), (0o1777, True), (0o755, True)):
        place.parent.chmod(mode)
        assert is_safe_place(str(place)) is is_closed, oct(mode)
    (tmp_path / "link").symlink_to(place)
    assert is_safe_place(str(tmp_path / "link"))
    place.parent.chmod(0o777)
    assert not is_safe_place(str(tmp_path / "link"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read other users' environments")
def test_a_run_of_root_counts_no_process_of_another_user() -> None:
    token = new_token("0")
    environment = {TASK_MARK: token, "PATH": os.defpath}
    for user, number in ((60_001, 0), (0, 1)):
        with subprocess.Popen(["sleep", "60"], env=environment, user=user) as process:
            assert len(marked(TASK_MARK, token)) == number
            process.kill()


MEETING_S = 20.0


class _Hanging:
    """Answers only once the other daemon is asked, too, and then says that it took too long."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier

    def terminate_clients(self) -> None:
        self._barrier.wait(MEETING_S)
        raise MpsTimeoutError("terminate")

    def quit(self) -> None:
        self._barrier.wait(MEETING_S)
        raise MpsTimeoutError("quit")


def test_no_daemon_waits_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With four GPUs that hang, one after the other would take longer than Slurm waits before it kills all."""
    for name in ("AFTER_TERMINATE_S", "AFTER_QUIT_S"):
        monkeypatch.setattr(ending, name, 0.0)
    token, barrier = new_token(""), threading.Barrier(2)
    environ = {**os.environ, TASK_MARK: token, DAEMON_MARK: token}
    environ.pop("SLURM_JOB_ID", None)
    with subprocess.Popen(["sleep", "60"], env=environ) as process:
        daemons = cast("list[Mps]", [_Hanging(barrier), _Hanging(barrier)])
        faults = end_run(token, "", daemons, 0.0, must_signal=False)
        assert faults == ["terminate", "terminate", "quit", "quit"]
    assert process.returncode
