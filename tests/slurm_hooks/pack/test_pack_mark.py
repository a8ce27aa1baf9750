"""The mark that almanac-pack leaves in its job's comment, with fake Slurm commands."""

from __future__ import annotations

import pytest
from pack_job import PackJob

from slurm_hooks.pack.mark import job_name, marked_comment

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


def test_each_of_two_gpus_with_one_task_leaves_no_mark(job: PackJob) -> None:
    job.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    install(job, comment_of(job, "x"))
    assert job.run("--items", "0-1", "--", "sleep", "0.3")[0] == 0
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
