"""#SBATCH lines and argument lists. What real sbatch makes of the same is compared in tests/cluster."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.errors import RequestError
from slurm.options import (
    ALL,
    SHORT,
    WITH_VALUE,
    Option,
    environment_options,
    option_length,
    parse_options,
    parse_script,
)


def script(*lines: str) -> list[tuple[str, str | None]]:
    options = parse_script("\n".join(["#!/bin/bash", *lines, "true", ""]))
    return [(option.name, option.value) for option in options]


def test_a_line_of_a_script() -> None:
    for line, expected in [
        ("#SBATCH --gpus=2", [("gpus", "2")]), ("#SBATCH --gpus 2", [("gpus", "2")]), ("#SBATCH -G2", [("gpus", "2")]),
        ("#SBATCH -G 2", [("gpus", "2")]),
        ("#SBATCH -Cgpu -C hbm80g", [("constraint", "gpu"), ("constraint", "hbm80g")]),
        ("#SBATCH -C=gpu", [("constraint", "=gpu")]),
        ("#SBATCH -HOn4", [("hold", None), ("overcommit", None), ("ntasks", "4")]),
        ("#SBATCH\t--hold\t-J\tx", [("hold", None), ("job-name", "x")]), ("#SBATCH--hold", [("hold", None)]),
        ("#SLURM --hold", [("hold", None)]), ('#SBATCH -J "my job" # a comment', [("job-name", "my job")]),
        ("#SBATCH -J 'it is \"it\"'", [("job-name", 'it is "it"')]), (r'#SBATCH -J "a \" b"', [("job-name", 'a " b')]),
        (r"#SBATCH -J a\ b -C gpu\&hbm80g", [("job-name", "a b"), ("constraint", "gpu&hbm80g")]),
        ('#SBATCH --job-name=x"y z"w', [("job-name", "xy zw")]),
        ("#SBATCH -C 'gpu&hbm80g'", [("constraint", "gpu&hbm80g")]), ("#SBATCH -J a#b -G 1", [("job-name", "a")]),
        ("#SBATCH -J x \r", [("job-name", "x")]),
        ("#SBATCH --exclusive -J x", [("exclusive", None), ("job-name", "x")]),
        ("#SBATCH --exclusive=user --nice=5 -k", [("exclusive", "user"), ("nice", "5"), ("no-kill", None)]),
        ("#SBATCH --part=gpu --constr gpu", [("partition", "gpu"), ("constraint", "gpu")]),
        ("#SBATCH --gpus-per=1", []), ("#SBATCH --my-spank-plugin=on --hold", [("hold", None)]),
        ("#SBATCH --my-spank-plugin on --hold", [("hold", None)]), ("#SBATCH stray --hold", [("hold", None)]),
        ("#SBATCH -y --hold", [("hold", None)]), ("#SBATCH", []), ("#SBATCH # nothing", []), ("#SBATCH -", []),
        ("##SBATCH --hold", []), (" #SBATCH --hold", []), ("# SBATCH --hold", []), ("#sbatch --hold", []),
    ]:  # fmt: skip
        assert script(line) == expected


def test_an_option_and_its_value_may_stand_on_two_lines() -> None:
    assert script("#SBATCH --gpus", "", "# between", "#SBATCH 2") == [("gpus", "2")]


@pytest.mark.parametrize("command", ["true", ":", "  srun x", "module load cuda # x", "\techo"])
def test_the_first_command_ends_the_options(command: str) -> None:
    assert script("#SBATCH -G 1", "", "   ", "  # comment", command, "#SBATCH -G 2") == [("gpus", "1")]


@pytest.mark.parametrize("word", ["hetjob", "packjob"])
def test_of_a_het_job_the_first_component_is_read(word: str) -> None:
    assert script("#SBATCH -G 1", f"#SBATCH {word}", "#SBATCH -G 2") == [("gpus", "1")]


@pytest.mark.parametrize("line", ['#SBATCH -J "open', "#SBATCH -J 'it is"])
def test_a_quote_that_is_not_closed_is_refused_by_its_line(line: str) -> None:
    with pytest.raises(RequestError, match="script line 3: a quote"):
        script("#SBATCH -G 1", line)


@pytest.mark.parametrize("line", ["#SBATCH --gpus", "#SBATCH -HG"])
def test_an_option_without_its_value_is_refused_by_its_line(line: str) -> None:
    with pytest.raises(RequestError, match=r"--gpus \(script line 2\) has no value"):
        script(line)


def test_options_say_where_they_stood() -> None:
    [option] = parse_script("#!/bin/sh\n#\n#SBATCH -G 2\n")
    assert option == Option("gpus", "2", "script line 3")
    assert option.spelling == "--gpus (script line 3)"


def test_a_command_line_ends_at_the_script() -> None:
    argv = ["-C", "gpu&hbm80g", "--gpus=2", "--hold", "train.sh", "--epochs", "3", "-G", "8"]
    options, rest = parse_options(argv)
    assert [(option.name, option.value) for option in options] == [
        ("constraint", "gpu&hbm80g"),
        ("gpus", "2"),
        ("hold", None),
    ]
    assert rest == ["train.sh", "--epochs", "3", "-G", "8"]


@pytest.mark.parametrize(("argv", "rest"), [([], []), (["-"], ["-"]), (["--", "-x"], ["-x"]), (["-H", ":"], [":"])])
def test_where_the_options_end(argv: list[str], rest: list[str]) -> None:
    assert parse_options(argv)[1] == rest


def test_values_of_the_command_line_are_taken_as_they_are() -> None:
    [option], _ = parse_options(["--job-name=a #b \"c'\n"])
    assert option.value == "a #b \"c'\n"


@pytest.mark.parametrize("argv", [["--tasks-per-node=4"], ["--tasks-per-node", "4"], ["--ntasks-per-node", "4"]])
def test_another_name_of_an_option_is_that_option(argv: list[str]) -> None:
    assert parse_options([*argv, "job.sh"]) == ([Option("ntasks-per-node", "4")], ["job.sh"])


@pytest.mark.parametrize("argv", [["--context", "s0:c1"], ["--resources", "power:3"], ["--external"]])
def test_options_of_later_releases_do_not_hide_the_script(argv: list[str]) -> None:
    assert parse_options([*argv, "-J", "train", "job.sh", "--json"])[1] == ["job.sh", "--json"]


def test_how_many_words_an_option_is() -> None:
    for argv, length in [
        (["-J", "--json"], 2), (["-Jx", "a"], 1), (["--gpus=4", "a"], 1), (["--gpus", "4"], 2), (["-HJ", "a"], 2),
        (["--nice", "a"], 1), (["--plugins-own", "a"], 1), (["job.sh"], 0), (["--", "a"], 0), (["-"], 0), ([], 0),
    ]:  # fmt: skip
        assert option_length(argv) == length


def test_input_variables() -> None:
    environ = {"SBATCH_PARTITION": "gpu", "SBATCH_TIMELIMIT": "10", "SLURM_NTASKS": "4", "HOME": "/"}
    assert {(option.name, option.value, option.origin) for option in environment_options(environ)} == {
        ("partition", "gpu", "SBATCH_PARTITION"),
        ("time", "10", "SBATCH_TIMELIMIT"),
    }


def test_the_table_is_consistent() -> None:
    assert set(SHORT.values()) <= ALL
    assert {"gpus", "constraint", "gres", "time", "wrap", "tres-per-task"} <= WITH_VALUE


@given(st.text(alphabet=st.sampled_from("#SBATCH -=\"'\\\n\tabGJ:2"), max_size=80) | st.text(max_size=80))
def test_no_script_raises_anything_else(text: str) -> None:
    with contextlib.suppress(RequestError):
        parse_script("#SBATCH " + text)


@given(st.lists(st.text(max_size=10) | st.sampled_from(["-G", "--gpus", "--", "-", ":", "-HOG"]), max_size=8))
def test_no_command_line_raises_anything_else(argv: list[str]) -> None:
    with contextlib.suppress(RequestError):
        options, rest = parse_options(argv)
        assert rest == argv[len(argv) - len(rest) :]
        assert all(option.name in ALL for option in options)
