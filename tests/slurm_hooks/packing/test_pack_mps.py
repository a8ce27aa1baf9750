"""almanac-pack with a fake MPS: daemons, time-slicing where MPS fails, and faults of tasks."""

from __future__ import annotations

import os
import re

import pytest
from pack_job import PackJob

from slurm_hooks.packing.job import job_name, marked_comment


def test_mps_starts_serves_and_quits(job: PackJob) -> None:
    job.install_mps()
    code, said = job.run(
        "--items=0-1",
        "--",
        "sh",
        "-c",
        'pipes=$CUDA_MPS_PIPE_DIRECTORY; stat -c "%a %u" "${pipes%/*/*}" "${pipes%/*}" "$pipes"; sleep 0.2',
    )
    assert code == 0 and "2 at a time: MPS" in said
    calls = job.calls()
    assert calls[:2] == ["-d", f"start_server -uid {os.getuid()}"] and calls[-1] == "quit -t 2"
    assert job.output(0) == f"700 {os.getuid()}\n" * 3
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
    job.before = "import slurm_hooks.packing.mps as mps; "
    job.before += {"hang": "mps.START_S = 2.0; ", "no-server": "mps.START_S = 3.0; "}.get(mode, "")
    job.before += "mps.QUIT_S = -0.5; mps.Mps.ask.__defaults__ = (0.5,); " if mode == "mute" else ""
    code, said = job.run("--items=0-2", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY")
    assert code == 0 and words in said and "time-slicing" in said
    assert [job.output(item) for item in range(3)] == ["3\n"] * 3
    job.wait_until_nothing_is_left()


def test_a_daemon_that_dies_gives_way_to_time_slicing_and_its_victims_run_again(job: PackJob) -> None:
    """Whoever fails with it runs once more, alone; what follows runs without MPS."""
    job.install_mps()
    dying = (
        'if [ -n "$CUDA_MPS_PIPE_DIRECTORY" ]; then sleep 0.7; echo dies >$BIN/mode; '
        "while kill -0 $(cat $CUDA_MPS_PIPE_DIRECTORY/*.pid) 2>/dev/null; do sleep 0.05; done; exit 6; fi; echo alone"
    )
    code, said = job.run("--items=0-3", "--", "sh", "-c", dying)
    assert code == 0
    assert said.count("the MPS daemon ended; it runs again, alone on the GPU and without MPS") == 2
    assert [job.output(item) for item in range(4)] == ["alone\n"] * 4
    job.wait_until_nothing_is_left()


def test_a_fault_of_one_reruns_the_other_alone(job: PackJob) -> None:
    job.install_mps()
    logged = "until grep -q Fatal $CUDA_MPS_LOG_DIRECTORY/server.log 2>/dev/null; do sleep 0.05; done"
    faulty = (
        f"if [ {{}} = 0 ]; then echo $$ >$BIN/faulty; echo fault >$BIN/mode; {logged}; exit 3; fi; "
        f'if [ -n "$CUDA_MPS_PIPE_DIRECTORY" ]; then {logged}; sleep 0.3; exit 4; fi; '
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
    job.before = "import slurm_hooks.packing.mps; slurm_hooks.packing.mps.START_S = 1.0; "
    code, said = job.run("--items=0-5", "--", "true")
    assert code == 0 and said.count("no MPS: ") == 1 and job.calls().count("-d") == 1


SHOW = '#!/bin/sh\nprintf "%s\\0" "$@" >"$BIN/shown"\n'
UPDATE = '#!/bin/sh\nprintf "%s\\0" "$@" >"$BIN/updating"; mv "$BIN/updating" "$BIN/updated"\n'
HANG = '#!/bin/sh\n: >"$BIN/shown"\nsleep 1000\n'


def until(name: str) -> list[str]:
    """Two tasks that run until the file is there."""
    return ["--items", "0-1", "--", "sh", "-c", f'until [ -e "$BIN/{name}" ]; do sleep 0.02; done']


def install(job: PackJob, show: str, update: str = UPDATE) -> None:
    for name, text in (("squeue", show), ("scontrol", update)):
        (job.bin / name).write_text(text)
        (job.bin / name).chmod(0o755)


def comment_of(job: PackJob, comment: str) -> str:
    """A squeue that shows it, byte by byte."""
    (job.bin / "comment").write_text(f"{job.environ['SLURM_JOB_ID']} {comment}\n")
    return f'{SHOW}cat "$BIN/comment"\n'


def arguments(job: PackJob, name: str) -> list[str]:
    return (job.bin / name).read_text().split("\0")[:-1]


@pytest.mark.parametrize(
    "comment",
    ["seed 3", "almanac:nomail", "almanac:packed-2", "a \"b\" 'c' = \\ %s\n  née; $(touch hacked) `x` ", "y" * 900],
)
def test_the_word_is_added_and_the_comment_is_kept(job: PackJob, comment: str) -> None:
    install(job, comment_of(job, comment))
    code, said = job.run(*until("updated"))
    job_id = job.environ["SLURM_JOB_ID"]
    assert arguments(job, "shown") == ["-h", "-j", job_id, "-o", "%A %k"]
    assert arguments(job, "updated") == ["update", f"jobid={job_id}", f"comment={comment} almanac:packed"]
    assert code == 0
    assert "comment" not in said
    assert not (job.root / "hacked").exists()


def test_of_an_array_its_own_task_is_marked(job: PackJob) -> None:
    """Of the last task, the job's id is the array's."""
    job.environ |= {"SLURM_ARRAY_JOB_ID": job.environ["SLURM_JOB_ID"], "SLURM_ARRAY_TASK_ID": "8"}
    install(job, comment_of(job, "(null)") + 'echo "$SQUEUE_FORMAT$SLURM_CLUSTERS" >"$BIN/changing"\n')
    array = {f"SLURM_ARRAY_TASK_{name}": value for name, value in (("MIN", "0"), ("MAX", "8"), ("STEP", "2"))}
    command = until("updated")[2:]
    assert job.run(*command, SQUEUE_FORMAT="%i", SLURM_CLUSTERS="other", SLURM_ARRAY_TASK_COUNT="5", **array)[0] == 0
    name = f"{job.environ['SLURM_JOB_ID']}_8"
    assert arguments(job, "shown")[2] == name
    assert arguments(job, "updated") == ["update", f"jobid={name}", "comment=almanac:packed"]
    assert (job.bin / "changing").read_text() == "\n"


@pytest.mark.parametrize(
    "options", [["-n1", "--items", "0-1"], ["--items", "0"]], ids=["one after another", "one task"]
)
def test_tasks_that_share_no_gpu_leave_no_mark(job: PackJob, options: list[str]) -> None:
    install(job, comment_of(job, "x"))
    assert job.run(*options, "--", "sleep", "0.3")[0] == 0
    assert not (job.bin / "shown").exists()


@pytest.mark.parametrize(
    "show",
    [
        f'{SHOW}echo "$SLURM_JOB_ID almanac:packed"\n',
        f'{SHOW}echo "17 x"\n',
        f'{SHOW}echo "$SLURM_JOB_ID x"; exit 1\n',
        SHOW,
    ],
    ids=["marked already", "another job", "refused", "empty"],
)
def test_nothing_is_changed_where_there_is_nothing_to_change(job: PackJob, show: str) -> None:
    install(job, show)
    tasks = until("shown")
    tasks[-1] += "; sleep 0.5"
    code, said = job.run(*tasks)
    assert code == 0
    assert len(said.splitlines()) == 3
    assert not (job.bin / "updated").exists()


@pytest.mark.parametrize("hangs", ["squeue", "scontrol"])
def test_a_command_that_hangs_delays_nothing_and_is_ended(job: PackJob, hangs: str) -> None:
    install(job, HANG if hangs == "squeue" else comment_of(job, "x"), HANG)
    assert job.run(*until("shown"))[0] == 0
    assert job.left() == []


def test_a_job_without_slurms_commands_runs(job: PackJob) -> None:
    job.environ["PATH"] = str(job.bin)
    (job.bin / "sh").symlink_to("/bin/sh")
    code, said = job.run("--items", "0-1", "--", "sh", "-c", "exit {}")
    assert code == 1
    assert len(said.splitlines()) == 3


ARRAY = {b"SLURM_JOB_ID": b"9", b"SLURM_ARRAY_JOB_ID": b"7"}


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({b"SLURM_JOB_ID": b"7"}, b"7"),
        ({**ARRAY, b"SLURM_ARRAY_TASK_ID": b"4"}, b"7_4"),
        (ARRAY, b""),
        ({**ARRAY, b"SLURM_ARRAY_TASK_ID": b"0-4"}, b""),
        ({b"SLURM_JOB_ID": b"7", b"SLURM_HET_SIZE": b"2"}, b""),
        ({b"SLURM_JOB_ID": b"7,8"}, b""),
        ({}, b""),
    ],
)
def test_a_name_names_this_job_alone(environ: dict[bytes, bytes], name: bytes) -> None:
    assert job_name(environ) == name


@pytest.mark.parametrize(
    ("shown", "comment"),
    [
        (b"7 \n", b"almanac:packed"),
        (b"7 (null)\n", b"almanac:packed"),
        (b"7 a\nb\n\n", b"a\nb\n almanac:packed"),
        (b"7 x\xff\n", b"x\xff almanac:packed"),
        (b"7 a\nalmanac:packed\n", b""),
        (b"77 a\n", b""),
        (b"", b""),
    ],
)
def test_what_becomes_of_a_comment(shown: bytes, comment: bytes) -> None:
    assert marked_comment(shown, b"7") == comment
