from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.errors import RequestError
from almanac.records import Request
from telemetry.slurm.options import ENVIRONMENT, WITH_VALUE, Option, parse_options
from telemetry.slurm.sbatch import merge, parse_submission, to_request
from telemetry.slurm.script_key import script_key

SCRIPT = """#!/bin/bash
#SBATCH -J train-BERT -A ml -p gpu -q normal
#SBATCH -C "gpu&hbm80g" --gres=gpu:a100:2,nvme:1 -N 2 -c 8 -t 1-00:00:00
#SBATCH --array=0-9%2
srun python train.py
"""


def submit(*argv: str, script: str = "#!/bin/sh\ntrue\n", **environ: str) -> Request:
    return parse_submission(argv, environ, lambda name: script).request("alice", 1_800_000_000)


def test_the_whole_of_a_script() -> None:
    assert submit("jobs/train.sh", script=SCRIPT) == Request(
        user="alice", job_name="train-BERT", account="ml", partition="gpu", qos="normal", constraints="gpu&hbm80g",
        gres="gpu:a100:2,nvme:1", gpu_count=4, gpu_type="a100", node_count=2, cpu_count=16, time_limit_s=86400,
        is_array=True, submit_s=1_800_000_000,
    )  # fmt: skip


def test_the_command_line_wins_over_the_environment_and_that_over_the_script() -> None:
    request = submit("-C", "cmd", "x.sh", script="#!/bin/sh\n#SBATCH -C script -p script -A script -t 1\n",
                     SBATCH_CONSTRAINT="env", SBATCH_PARTITION="env", SBATCH_TIMELIMIT="5")  # fmt: skip
    assert (request.constraints, request.partition, request.account) == ("cmd", "env", "script")
    assert request.time_limit_s == 300


def test_the_last_of_several_wins() -> None:
    assert submit("-G1", "--gpus=3", "x.sh").gpu_count == 3


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["jobs/train.sh"], "train.sh"),
        (["-"], "sbatch"),
        (["--wrap", "sleep 1"], "wrap"),
        (["--wrap=sleep 1"], "wrap"),
        (["-J", "mine", "train.sh"], "mine"),
        (["-G1"], ""),
        (["-J", 'a "b"', "train.sh"], "a `b`"),
    ],
)
def test_the_name_that_accounting_will_show(argv: list[str], name: str) -> None:
    assert submit(*argv).job_name == name


def test_a_script_is_read_only_where_there_is_one() -> None:
    asked: list[str] = []

    def read_script(name: str) -> str:
        asked.append(name)
        return ""

    for argv in (["--wrap", "x"], ["-G1"], ["-G1", "a.sh", "b.sh"], ["-"]):
        parse_submission(argv, {}, read_script)
    assert asked == ["a.sh", "-"]


def script_of(*argv: str, script: str = "#!/bin/sh\n", work_dir: str = "/home/alice") -> str:
    return parse_submission(argv, {}, lambda _: script).request("alice", 0, work_dir).script_key


def test_a_request_has_the_script_key_of_its_record() -> None:
    line = "sbatch -J try-2 --array=1-3 run.sh --lr=0.5"
    assert script_of("-J", "try-1", "run.sh", "--lr=0.1") == script_key("alice", line, "/home/alice") != ""


@pytest.mark.parametrize(
    ("argv", "script"), [(["-D", "sub"], ""), (["--chdir=/home/alice/sub"], ""), ([], "#SBATCH --chdir=sub\n")]
)
def test_the_record_has_the_work_directory_that_chdir_names(argv: list[str], script: str) -> None:
    found = script_of(*argv, "run.sh", script=script)
    assert found == script_key("alice", "sbatch run.sh", "/home/alice/sub") != ""


def test_no_script_is_known_without_a_work_directory_and_of_a_het_job() -> None:
    assert submit("run.sh").script_key == script_of("run.sh", work_dir="") == ""
    assert script_of("-G1", ":", "-G2", "run.sh") == ""
    assert script_of("run.sh", script="#SBATCH -G1\n#SBATCH hetjob\n#SBATCH -G2\n") == ""


def test_of_a_het_job_the_first_component_counts() -> None:
    request = submit("-G1", "-C", "hbm40g", ":", "-G4", ":", "-C", "hbm80g", "x.sh")
    assert (request.gpu_count, request.constraints, request.job_name) == (1, "hbm40g", "x.sh")


@pytest.mark.parametrize(
    ("options", "gpus", "kind", "nodes", "cpus"),
    [
        ("", 0, "", 1, 1),
        ("--gres=gpu", 1, "", 1, 1),
        ("--gres=gpu:2", 2, "", 1, 1),
        ("--gres=gpu:2 -N 3", 6, "", 3, 3),
        ("--gres=gpu:a100:2 -N 2-4", 4, "a100", 2, 2),
        ("--gres=gres/gpu:a100:2", 2, "a100", 1, 1),
        ("--gres=nvme:1,gpu:1", 1, "", 1, 1),
        ("--gres=none", 0, "", 1, 1),
        ("--gres=gpu:0", 0, "", 1, 1),
        ("--gpus=8", 8, "", 1, 1),
        ("--gpus=a100:8 -N 2", 8, "a100", 2, 2),
        ("--gpus=a100:2,v100:1", 3, "", 1, 1),
        ("--gpus=8 --gpus-per-node=4", 8, "", 2, 2),
        ("--gpus=9 --gpus-per-node=4", 9, "", 3, 3),
        ("--gpus-per-node=4 -N 2", 8, "", 2, 2),
        ("--gpus-per-node=a100:4", 4, "a100", 1, 1),
        ("--gpus-per-task=1 -n 6", 6, "", 1, 6),
        ("--gpus-per-task=a100:2 -N 2 --ntasks-per-node=2 -c 3", 8, "a100", 2, 12),
        ("--gpus=8 --gpus-per-task=2 -c 4", 8, "", 1, 16),
        ("--gpus=4 --ntasks-per-gpu=2", 4, "", 1, 8),
        ("--tres-per-task=cpu=4,gres/gpu:a100:1 -n 2", 2, "a100", 1, 2),
        ("--gpus-per-socket=2 --sockets-per-node=2 -N 2", 8, "", 2, 2),
        ("--gpus-per-socket=2", 2, "", 1, 1),
        ("-n 64 --ntasks-per-node=16 --gpus-per-node=4", 16, "", 4, 64),
        ("-w n[1-4] --gpus-per-node=1", 4, "", 4, 4),
        ("-w ./hosts --gpus-per-node=1", 1, "", 1, 1),
        ("--cpus-per-gpu=8 --gpus=4", 4, "", 1, 32),
        ("--mincpus=64 -N 2", 0, "", 2, 2),
        ("-N 1k --gres=gpu:1", 1024, "", 1024, 1024),
        ("--gres=gpu:2080ti:2", 2, "2080ti", 1, 1),
    ],
)
def test_counts_of_the_whole_job(options: str, gpus: int, kind: str, nodes: int, cpus: int) -> None:
    request = submit(*options.split())
    assert (request.gpu_count, request.gpu_type) == (gpus, kind)
    assert (request.node_count, request.cpu_count) == (nodes, cpus)


@pytest.mark.parametrize(
    ("limit", "seconds"), [("30", 1800), ("90:30", 5430), ("1-2", 93600), ("0", None), ("UNLIMITED", None)]
)
def test_time_limits(limit: str, seconds: int | None) -> None:
    assert submit("-t", limit).time_limit_s == seconds


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus=:two:"], "--gpus (command line) is ':two:', expected a number of GPUs"),
        (["--gpus=x:y:z"], "--gpus (command line) is 'x:y:z'"),
        (["--gres=gpu:a100:many"], "--gres (command line) is 'gpu:a100:many'"),
        (["-N", "many"], "--nodes (command line) is 'many', expected a number of nodes"),
        (["-n", "1k"], "--ntasks (command line) is '1k', expected a whole number"),
        (["-t", "5x"], "--time (command line) is '5x', expected minutes"),
        (["-w", "n[1-"], "--nodelist (command line) is 'n[1-', expected a host list"),
    ],
)
def test_a_known_option_that_cannot_be_read_is_named(options: list[str], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        submit(*options)
    assert str(caught.value).startswith(said) and caught.value.hint


def test_where_the_bad_option_stands_is_said() -> None:
    with pytest.raises(RequestError, match=r"--ntasks \(script line 2\)"):
        submit("x.sh", script="#!/bin/sh\n#SBATCH -n x\n")
    with pytest.raises(RequestError, match=r"--time \(SBATCH_TIMELIMIT\)"):
        submit(SBATCH_TIMELIMIT="soon")


def test_merging_is_by_name() -> None:
    merged = merge([Option("gpus", "1", "script line 2")], [Option("gpus", "2")], [])
    assert to_request(merged, "alice", 0).gpu_count == 2


@given(st.dictionaries(st.sampled_from(sorted(WITH_VALUE)), st.text(max_size=12)))
def test_no_value_raises_anything_else(values: dict[str, str]) -> None:
    with contextlib.suppress(RequestError):
        request = to_request({name: Option(name, value) for name, value in values.items()}, "alice", 0)
        assert request.node_count >= 1 and request.gpu_count >= 0


@given(st.permutations(["--gpus=4", "-N2", "-Cgpu", "--time=5", "-Jx"]))
def test_the_order_of_different_options_does_not_matter(argv: list[str]) -> None:
    assert submit(*argv) == submit("--gpus=4", "-N2", "-Cgpu", "--time=5", "-Jx")


@given(st.sampled_from(sorted(ENVIRONMENT)))
def test_an_input_variable_means_its_option(variable: str) -> None:
    value = {"time": "5", "array": "0-3"}.get(ENVIRONMENT[variable], "2")
    options, _ = parse_options([f"--{ENVIRONMENT[variable]}={value}"])
    assert submit(**{variable: value}) == to_request(merge(options), "alice", 1_800_000_000)


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        (["--gpus=1"], (("--gpus", "1"),)),
        (["-G", "a100:1"], (("--gpus", "a100:1"),)),
        (["--gpus-per-task=gpu:a100:1", "-n1"], (("--gpus-per-task", "gpu:a100:1"),)),
        (["--gres=gpu:1"], ()),
        (["--gres=gpu:1", "--gpus-per-node=1"], (("--gpus-per-node", "1"),)),
        (["--tres-per-task=gres/gpu:1", "-n1"], (("--tres-per-task", "gres/gpu:1"),)),
        (["--tres-per-task=cpu:1", "-G1"], (("--gpus", "1"),)),
    ],
)
def test_the_options_that_name_gpus(argv: list[str], options: tuple[tuple[str, str], ...]) -> None:
    request = submit(*argv, "x.sh")
    assert request.gpu_options == options
    assert (request.gpu_count, request.is_one_gpu) == (1, True)


@pytest.mark.parametrize(
    "argv",
    [
        ["--gres=gpu:2"], ["--gres=gpu:1", "-N2"], ["--gres=gpu:1", "-N1-2"], ["--gres=gpu:1", "-n2"],
        ["--gpus-per-node=1", "-n4"], ["--gpus=1", "-N1-4"], ["--gpus=1", "-N2"], ["--gpus-per-task=1", "-n2"],
        ["--gres=gpu:1", "--exclusive"], ["--gpus=1", "--exclusive=exclusive"], ["--gres=gpu:1", ":", "--gres=gpu:1"],
        ["--gres=gpu:1", "-N1,2"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_jobs_that_may_use_more_than_one_gpu(argv: list[str]) -> None:
    assert not submit(*argv, "x.sh").is_one_gpu


@pytest.mark.parametrize(
    "argv",
    [
        ["--gres=gpu:1", "-N1"], ["--gres=gpu:1", "-N1-1", "-n4"], ["--gpus=1", "-n4"],
        ["--gres=gpu:1", "--exclusive=user"], ["--gpus-per-task=1", "-n1"], ["--gres=gpu:1", "-c8"],
        ["--gpus=1", "--array=0-9"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_jobs_of_one_gpu(argv: list[str]) -> None:
    assert submit(*argv, "x.sh").is_one_gpu
