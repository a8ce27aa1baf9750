"""Requests of submissions, and the key of the script that they run."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.errors import RequestError
from almanac.names import FRAMEWORKS
from almanac.records import JobRequest
from slurm.options import ENVIRONMENT, WITH_VALUE, Option, parse_options
from slurm.sbatch import LONGEST_LINE, command_framework, command_key, merge, parse_submission, script_key, to_request

SCRIPT = """#!/bin/bash
#SBATCH -J train-BERT -A ml -p gpu -q normal
#SBATCH -C "gpu&hbm80g" --gres=gpu:a100:2,nvme:1 -N 2 -c 8 -t 1-00:00:00
#SBATCH --array=0-9%2
srun python train.py
"""


def submit(*argv: str, script: str = "#!/bin/sh\ntrue\n", **environ: str) -> JobRequest:
    return parse_submission(argv, environ, lambda name: script).request("alice", 1_800_000_000)


def test_the_whole_of_a_script() -> None:
    assert submit("jobs/train.sh", script=SCRIPT) == JobRequest(
        user="alice", job_name="train-BERT", account="ml", partition="gpu", qos="normal", constraints="gpu&hbm80g",
        gres="gpu:a100:2,nvme:1", gpu_count=4, gpu_type="a100", node_count=2, cpu_count=16, time_limit_s=86400,
        is_array=True, submit_s=1_800_000_000,
    )  # fmt: skip


def test_the_command_line_wins_over_the_environment_and_that_over_the_script() -> None:
    request = submit("-C", "cmd", "x.sh", script="#!/bin/sh\n#SBATCH -C script -p script -A script -t 1\n",
                     SBATCH_CONSTRAINT="env", SBATCH_PARTITION="env", SBATCH_TIMELIMIT="5")  # fmt: skip
    assert (request.constraints, request.partition, request.account) == ("cmd", "env", "script")
    assert request.time_limit_s == 300


@pytest.mark.parametrize(
    ("argv", "name"),
    [(["jobs/train.sh"], "train.sh"), (["-"], "sbatch"), (["--wrap", "sleep 1"], "wrap"),
     (["--wrap=sleep 1"], "wrap"), (["-J", "mine", "train.sh"], "mine"), (["-G1"], ""),
     (["-J", 'a "b"', "train.sh"], "a `b`")],
)  # fmt: skip
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


def test_counts_of_the_whole_job() -> None:
    for options, gpus, kind, nodes, cpus in [
        ("", 0, "", 1, 1), ("--gres=gpu", 1, "", 1, 1), ("--gres=gpu:2", 2, "", 1, 1),
        ("--gres=gpu:2 -N 3", 6, "", 3, 3), ("--gres=gpu:a100:2 -N 2-4", 4, "a100", 2, 2),
        ("--gres=gres/gpu:a100:2", 2, "a100", 1, 1), ("--gres=nvme:1,gpu:1", 1, "", 1, 1),
        ("--gres=none", 0, "", 1, 1), ("--gres=gpu:0", 0, "", 1, 1), ("--gpus=8", 8, "", 1, 1),
        ("--gpus=a100:8 -N 2", 8, "a100", 2, 2), ("--gpus=a100:2,v100:1", 3, "", 1, 1),
        ("--gpus=8 --gpus-per-node=4", 8, "", 2, 2), ("--gpus=9 --gpus-per-node=4", 9, "", 3, 3),
        ("--gpus-per-node=4 -N 2", 8, "", 2, 2), ("--gpus-per-node=a100:4", 4, "a100", 1, 1),
        ("--gpus-per-task=1 -n 6", 6, "", 1, 6),
        ("--gpus-per-task=a100:2 -N 2 --ntasks-per-node=2 -c 3", 8, "a100", 2, 12),
        ("--gpus=8 --gpus-per-task=2 -c 4", 8, "", 1, 16), ("--gpus=4 --ntasks-per-gpu=2", 4, "", 1, 8),
        ("--tres-per-task=cpu=4,gres/gpu:a100:1 -n 2", 2, "a100", 1, 2),
        ("--gpus-per-socket=2 --sockets-per-node=2 -N 2", 8, "", 2, 2), ("--gpus-per-socket=2", 2, "", 1, 1),
        ("-n 64 --ntasks-per-node=16 --gpus-per-node=4", 16, "", 4, 64), ("-w n[1-4] --gpus-per-node=1", 4, "", 4, 4),
        ("-w ./hosts --gpus-per-node=1", 1, "", 1, 1), ("--cpus-per-gpu=8 --gpus=4", 4, "", 1, 32),
        ("--mincpus=64 -N 2", 0, "", 2, 2), ("-N 1k --gres=gpu:1", 1024, "", 1024, 1024),
        ("--gres=gpu:2080ti:2", 2, "2080ti", 1, 1),
    ]:  # fmt: skip
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
    [(["--gpus=:two:"], "--gpus (command line) is ':two:', expected a number of GPUs"),
     (["--gpus=x:y:z"], "--gpus (command line) is 'x:y:z'"),
     (["--gres=gpu:a100:many"], "--gres (command line) is 'gpu:a100:many'"),
     (["-N", "many"], "--nodes (command line) is 'many', expected a number of nodes"),
     (["-n", "1k"], "--ntasks (command line) is '1k', expected a whole number"),
     (["-t", "5x"], "--time (command line) is '5x', expected minutes"),
     (["-w", "n[1-"], "--nodelist (command line) is 'n[1-', expected a host list")],
)  # fmt: skip
def test_a_known_option_that_cannot_be_read_is_named(options: list[str], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        submit(*options)
    assert str(caught.value).startswith(said) and caught.value.hint


def test_where_the_bad_option_stands_is_said() -> None:
    with pytest.raises(RequestError, match=r"--ntasks \(script line 2\)"):
        submit("x.sh", script="#!/bin/sh\n#SBATCH -n x\n")
    with pytest.raises(RequestError, match=r"--time \(SBATCH_TIMELIMIT\)"):
        submit(SBATCH_TIMELIMIT="soon")


@given(st.dictionaries(st.sampled_from(sorted(WITH_VALUE)), st.text(max_size=12)))
def test_no_value_raises_anything_else(values: dict[str, str]) -> None:
    with contextlib.suppress(RequestError):
        request = to_request({name: Option(name, value) for name, value in values.items()}, "alice", 0)
        assert request.node_count >= 1 and request.gpu_count >= 0


@given(st.sampled_from(sorted(ENVIRONMENT)))
def test_an_input_variable_means_its_option(variable: str) -> None:
    value = {"time": "5", "array": "0-3"}.get(ENVIRONMENT[variable], "2")
    options, _ = parse_options([f"--{ENVIRONMENT[variable]}={value}"])
    assert submit(**{variable: value}) == to_request(merge(options), "alice", 1_800_000_000)


@pytest.mark.parametrize(
    ("argv", "options"),
    [(["--gpus=1"], (("--gpus", "1"),)), (["-G", "a100:1"], (("--gpus", "a100:1"),)),
     (["--gpus-per-task=gpu:a100:1", "-n1"], (("--gpus-per-task", "gpu:a100:1"),)), (["--gres=gpu:1"], ()),
     (["--gres=gpu:1", "--gpus-per-node=1"], (("--gpus-per-node", "1"),)),
     (["--tres-per-task=gres/gpu:1", "-n1"], (("--tres-per-task", "gres/gpu:1"),)),
     (["--tres-per-task=cpu:1", "-G1"], (("--gpus", "1"),))],
)  # fmt: skip
def test_the_options_that_name_gpus(argv: list[str], options: tuple[tuple[str, str], ...]) -> None:
    request = submit(*argv, "x.sh")
    assert request.gpu_options == options
    assert (request.gpu_count, request.is_one_gpu) == (1, True)


def test_jobs_that_may_use_more_than_one_gpu() -> None:
    for argv in [
        ["--gres=gpu:2"], ["--gres=gpu:1", "-N2"], ["--gres=gpu:1", "-N1-2"], ["--gres=gpu:1", "-n2"],
        ["--gpus-per-node=1", "-n4"], ["--gpus=1", "-N1-4"], ["--gpus=1", "-N2"], ["--gpus-per-task=1", "-n2"],
        ["--gres=gpu:1", "--exclusive"], ["--gpus=1", "--exclusive=exclusive"], ["--gres=gpu:1", ":", "--gres=gpu:1"],
        ["--gres=gpu:1", "-N1,2"],
    ]:  # fmt: skip
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


HOME = "/home/alice/project"


def key(line: str, work_dir: str = HOME, user: str = "alice") -> str:
    return script_key(user, line, work_dir)


KNOWN = key("sbatch run.sh --lr=0.1")


def test_a_key_tells_nothing_of_the_path() -> None:
    assert len(KNOWN) == 16 and set(KNOWN) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    "line",
    ["sbatch run.sh --lr=0.2", "sbatch run.sh --lr 7", "sbatch run.sh --lr $(reboot)",
     "sbatch --array=0-9 -J trial-8 --time=2:00:00 --dependency=afterok:77 --export=ALL,SEED=3 run.sh --lr=1",
     "/usr/bin/sbatch ./run.sh --lr=1", f"sbatch {HOME}/sub/../run.sh --lr=1", "sbatch\n-G\n4\nrun.sh\n--lr=1\n"],
)  # fmt: skip
def test_values_and_options_of_sbatch_do_not_count(line: str) -> None:
    assert key(line) == KNOWN


@pytest.mark.parametrize(
    "line", ["sbatch run.sh", "sbatch run.sh --rate=0.1", "sbatch run.sh train.py --lr=0.1", "sbatch other.sh --lr=0.1"]
)
def test_other_scripts_and_arguments_have_keys_of_their_own(line: str) -> None:
    assert key(line) not in ("", KNOWN)


def test_the_work_directory_and_the_user_count() -> None:
    assert len({KNOWN, key("sbatch run.sh --lr=1", "/home/alice/other"), key("sbatch run.sh --lr=1", user="bob")}) == 3


def test_paths_and_arguments_are_masked_as_names_are() -> None:
    assert key("sbatch run_07.sh 0.1", "/scratch/try-3") == key("sbatch run_12.sh 0.25", "/scratch/try-44")
    assert key("sbatch run.sh --lr 1", "/w/123e4567-e89b-12d3-a456-426614174000") == key("sbatch run.sh --lr 2", "/w/7")


def test_the_order_of_arguments_does_not_count() -> None:
    assert key("sbatch run.sh --a=1 --b=2") == key("sbatch run.sh --b=3 --a=4")


def test_nothing_is_known_of_what_is_no_script() -> None:
    for line in [
        "", "sbatch", "sbatch -G 1", "sbatch -", "sbatch --wrap python train.py", "sbatch -G1 --wrap=true run.sh",
        "sbatch -J my job --wrap python train.py", "srun python train.py", "salloc -G 1", "sbatch -G1 : -G2 run.sh",
        "sbatch -J", "sbatch /var/spool/slurmd/job00077/slurm_script", "sbatch /dev/fd/63", "sbatch /proc/self/fd/11",
        "bash -c sbatch run.sh",
    ]:  # fmt: skip
        assert key(line) == ""


@pytest.mark.parametrize("work_dir", ["", "relative", "\x1b[31m", "C:\\"])
def test_nothing_is_known_without_a_work_directory(work_dir: str) -> None:
    assert key("sbatch run.sh", work_dir) == ""


def test_what_slurmdbd_stores_has_the_key_of_what_was_typed() -> None:
    """It writes a backtick for a double quote, and a question mark for each byte that is no UTF-8."""
    typed, stored = 'sbatch my"run.sh caf\udce9\udcff 🚀', "sbatch my`run.sh caf?? ?"
    assert key(typed, "/home/\udce9/x") == key(stored, "/home/?/x") != ""


@pytest.mark.parametrize(
    "line", ["sbatch \ud800.sh", "sbatch \x00.sh\x1b]0;x\x07", "sbatch %s" % ("a/" * 4_000), "sbatch x " + "-" * 8_000]
)
def test_hostile_words_have_a_key_as_any(line: str) -> None:
    assert len(key(line)) == 16


def test_a_line_beyond_the_limit_has_no_key() -> None:
    line = "sbatch run.sh --list="
    longest = line + "7" * (LONGEST_LINE - len(line))
    assert key(longest) == key(line)
    assert key(longest + "7") == ""


def wrapped(line: str, work_dir: str = HOME, user: str = "alice") -> str:
    return command_key(user, line, work_dir)


def test_a_wrapped_command_stands_for_a_script() -> None:
    known = wrapped("sbatch -G1 --wrap python train.py --lr 0.1")
    assert len(known) == 16 and known != KNOWN
    assert wrapped("sbatch -J my job -G4 --wrap=python train.py --lr 0.25") == known
    others = ["sbatch --wrap python eval.py --lr 0.1", "sbatch --wrap python train.py --data cifar"]
    assert len({known, *map(wrapped, others), wrapped("sbatch --wrap python train.py --lr 0.1", "/home/bob")}) == 4
    assert wrapped("sbatch run.sh --lr=0.1") == KNOWN, "other lines have the key of their script"


@pytest.mark.parametrize(
    "line",
    [
        "sbatch --wrap", "sbatch --wrap=bash", "sbatch --wrap bash -l", "sbatch -G1 : --wrap=train",
        "srun --wrap=train", "sbatch --wrap=" + "a" * LONGEST_LINE, "", "--wrap=train",
    ],
)  # fmt: skip
def test_a_wrapped_command_that_may_be_anything_has_no_key(line: str) -> None:
    assert wrapped(line) == ""
    assert wrapped(line, "relative") == ""


@pytest.mark.parametrize(
    ("line", "framework"),
    [
        ("sbatch -p gpu train_torch.sh", "pytorch"),
        ("/usr/bin/sbatch --gpus=1 /jax/run.sh --lr=1", ""),
        ("sbatch run.sh --backend=jax", "jax"),
        ("sbatch --gpus=2 --wrap=torchrun --nproc-per-node=2 /home/keras/a.py", "pytorch"),
        ("sbatch --wrap python -m vllm.entrypoints.api_server --token=SECRET", "vllm"),
        ("srun -G1 gmx mdrun -deffnm md", "gromacs"),
        ("sbatch -A torch -J jax --comment=keras run.sh", ""),
        ("sbatch torch.sh jax.py", ""),
        ("sbatch a.sh : torch.sh", ""),
        ("sbatch --gpus", ""),
        ("", ""), ("sbatch", ""), ("sbatch --wrap", ""), ("sbatch \x1b]0;torch\x07 \udcff", "pytorch"),
        ("sbatch " + "x" * 70_000 + " torch", ""),
    ],
)  # fmt: skip
def test_a_command_shows_its_framework(line: str, framework: str) -> None:
    assert command_framework(line) == framework


@given(st.text(max_size=300))
def test_any_line_gives_a_known_name_or_none(text: str) -> None:
    assert command_framework(f"sbatch {text}") in ("", *FRAMEWORKS)
