"""almanac-pack with a fake MPS: daemons, time-slicing where MPS fails, and faults of tasks."""

from __future__ import annotations

import os
import re

import pytest
from pack_job import PackJob


def test_mps_starts_serves_and_quits(job: PackJob) -> None:
    job.install_mps()
    code, said = job.run(
        "--items=0-1", "--", "sh", "-c", 'stat -c "%a %u" "${CUDA_MPS_PIPE_DIRECTORY%/*/*}"; sleep 0.2'
    )
    assert code == 0 and "2 at a time: MPS" in said
    calls = job.calls()
    assert calls[:2] == ["-d", f"start_server -uid {os.getuid()}"] and calls[-1] == "quit -t 2"
    assert job.output(0) == f"700 {os.getuid()}\n"
    assert job.left() == []


def test_each_gpu_has_its_own_daemon(job: PackJob) -> None:
    job.install_mps()
    job.environ["CUDA_VISIBLE_DEVICES"] = "2,3"
    assert (
        job.run("--items=0-3", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY; sleep 0.2")[0]
        == 0
    )
    assert len({job.output(item) for item in range(4)}) == 2
    assert all(job.output(item).startswith("0 ") for item in range(4))
    started = [line.split("\t") for line in (job.bin / "calls").read_text().splitlines() if line.startswith("-d")]
    assert sorted(gpu for _, _, gpu in started) == ["2", "3"] and len({pipes for _, pipes, _ in started}) == 2
    assert job.left() == []


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("refuse", "no MPS: nvidia-cuda-mps-control (-d) failed with code 1: An instance"),
        ("hang", "no MPS: nvidia-cuda-mps-control (-d) did not answer within"),
        ("no-server", "no MPS: its server did not start within"),
        ("mute", "no MPS: nvidia-cuda-mps-control (get_server_list) did not answer within"),
    ],
)
def test_where_mps_does_not_start_tasks_share_by_time_slicing(job: PackJob, mode: str, words: str) -> None:
    job.install_mps(mode)
    job.before = "import slurm_hooks.pack.mps; slurm_hooks.pack.mps.START_S = 2.0; "
    code, said = job.run("--items=0-2", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY")
    assert code == 0 and words in said and "time-slicing" in said
    assert [job.output(item) for item in range(3)] == ["3\n"] * 3
    job.wait_until_nothing_is_left()


def test_a_daemon_that_dies_gives_way_to_time_slicing_and_its_victims_run_again(job: PackJob) -> None:
    """Whoever fails with it runs once more, alone; what follows runs without MPS."""
    job.install_mps()
    dying = (
        'if [ -n "$CUDA_MPS_PIPE_DIRECTORY" ]; then sleep 0.7; echo dies >$BIN/mode; sleep 1; exit 6; fi; echo alone'
    )
    code, said = job.run("--items=0-3", "--", "sh", "-c", dying)
    assert code == 0
    assert said.count("the MPS daemon ended; it runs again, alone on the GPU and without MPS") == 2
    assert [job.output(item) for item in range(4)] == ["alone\n"] * 4
    job.wait_until_nothing_is_left()


def test_a_fault_of_one_reruns_the_other_alone(job: PackJob) -> None:
    job.install_mps()
    faulty = (
        "if [ {} = 0 ]; then echo $$ >$BIN/faulty; echo fault >$BIN/mode; sleep 0.5; exit 3; fi; "
        'if [ -n "$CUDA_MPS_PIPE_DIRECTORY" ]; then sleep 0.8; exit 4; fi; '
        "ls $BIN/run 2>/dev/null; echo alone; sleep 0.3"
    )
    code, said = job.run("--items=0-1", "--", "sh", "-c", faulty)
    assert code == 3
    assert "item 1: a fatal GPU fault of another task ended it (MPS's log names that one); it runs again" in said
    assert job.output(1) == "alone\n"
    assert said.count("runs again") == 1
    job.wait_until_nothing_is_left()


def test_a_fault_of_unknown_origin_reruns_each_once(job: PackJob) -> None:
    """Both fail again, or for ever: the second code counts."""
    job.install_mps()
    fault = "echo CUDA error: an illegal memory access was encountered"
    lost = f"{fault}; mkdir ran-{{}} 2>/dev/null || exit 5; sleep 0.3; exit 4"
    code, said = job.run("--items=0-2", "--", "sh", "-c", lost)
    assert code == 5
    assert said.count("nothing says whose fault it was; it runs again") >= 2
    assert len(re.findall("item 0 ended", said)) == len(re.findall("item 1 ended", said)) == 2
    job.wait_until_nothing_is_left()


def test_two_plain_failures_are_no_fault(job: PackJob) -> None:
    job.install_mps()
    code, said = job.run("--items=0-1", "--", "sh", "-c", "sleep 0.2; exit {}1")
    assert code == 11 and "runs again" not in said


def test_after_one_gpus_mps_did_not_answer_the_others_are_not_waited_for(job: PackJob) -> None:
    job.install_mps("hang")
    job.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2"
    job.before = "import slurm_hooks.pack.mps; slurm_hooks.pack.mps.START_S = 1.0; "
    code, said = job.run("--items=0-5", "--", "true")
    assert code == 0 and said.count("no MPS: ") == 1 and job.calls().count("-d") == 1
