"""Which submissions run the same script, whatever people type."""

from __future__ import annotations

import pytest

from telemetry.slurm.script_key import LONGEST_LINE, command_key, script_key

HOME = "/home/alice/project"


def key(line: str, work_dir: str = HOME, user: str = "alice") -> str:
    return script_key(user, line, work_dir)


KNOWN = key("sbatch run.sh --lr=0.1")


def test_a_key_tells_nothing_of_the_path() -> None:
    assert len(KNOWN) == 16 and set(KNOWN) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    "line",
    [
        "sbatch run.sh --lr=0.2",
        "sbatch run.sh --lr 7",
        "sbatch run.sh --lr $(reboot)",
        "sbatch --array=0-9 -J trial-8 --time=2:00:00 --dependency=afterok:77 --export=ALL,SEED=3 run.sh --lr=1",
        "/usr/bin/sbatch ./run.sh --lr=1",
        f"sbatch {HOME}/sub/../run.sh --lr=1",
        "sbatch\n-G\n4\nrun.sh\n--lr=1\n",
    ],
)
def test_values_and_options_of_sbatch_do_not_count(line: str) -> None:
    assert key(line) == KNOWN


@pytest.mark.parametrize(
    "line",
    ["sbatch run.sh", "sbatch run.sh --rate=0.1", "sbatch run.sh train.py --lr=0.1", "sbatch other.sh --lr=0.1"],
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


@pytest.mark.parametrize(
    "line",
    [
        "",
        "sbatch",
        "sbatch -G 1",
        "sbatch -",
        "sbatch --wrap python train.py",
        "sbatch -G1 --wrap=true run.sh",
        "sbatch -J my job --wrap python train.py",
        "srun python train.py",
        "salloc -G 1",
        "sbatch -G1 : -G2 run.sh",
        "sbatch -J",
        "sbatch /var/spool/slurmd/job00077/slurm_script",
        "sbatch /dev/fd/63",
        "sbatch /proc/self/fd/11",
        "bash -c sbatch run.sh",
    ],
)
def test_nothing_is_known_of_what_is_no_script(line: str) -> None:
    assert key(line) == ""


@pytest.mark.parametrize("work_dir", ["", "relative", "\x1b[31m", "C:\\"])
def test_nothing_is_known_without_a_work_directory(work_dir: str) -> None:
    assert key("sbatch run.sh", work_dir) == ""


def test_what_slurmdbd_stores_has_the_key_of_what_was_typed() -> None:
    """It writes a backtick for a double quote, and a question mark for each byte that is no UTF-8."""
    typed, stored = 'sbatch my"run.sh caf\udce9\udcff 🚀', "sbatch my`run.sh caf?? ?"
    assert key(typed, "/home/\udce9/x") == key(stored, "/home/?/x") != ""


@pytest.mark.parametrize(
    "line",
    ["sbatch \ud800.sh", "sbatch \x00.sh\x1b]0;x\x07", "sbatch %s" % ("a/" * 4_000), "sbatch x " + "-" * 8_000],
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
