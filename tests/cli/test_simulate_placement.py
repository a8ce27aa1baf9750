"""`almanac simulate --gpu-types`: what it prints and refuses."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from almanac.errors import AlmanacError
from cli.app import App
from cli.simulate import command


def line(kind: str = "small", steps: object = 3600, gpus: object = 1, at: object = 0) -> str:
    return "\t".join([kind, "python3 train.py", "rl", "--steps", "1", str(steps), str(gpus), "1", "-1", str(at)])


@pytest.fixture
def throughputs(tmp_path: Path) -> Path:
    def of(small: float, large: float) -> dict[str, dict[str, float]]:
        return {"('small', 1)": {"null": small}, "('small', 2)": {"null": 2 * small}, "('large', 4)": {"null": large}}

    path = tmp_path / "throughputs.json"
    path.write_text(json.dumps({"h100": of(2.0, 8.0), "a100": of(1.0, 1.0), "k80": of(0.0, 0.0)}))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.trace"
    path.write_text("\n".join([line(), line(), line("large", 7200, 4), line(gpus=2, at=600)]) + "\n")
    return path


def simulate(*argv: object) -> Result:
    return CliRunner().invoke(command, [*map(str, argv), "--jobs", "1"], obj=App())


def shown(*argv: object) -> str:
    done = simulate(*argv)
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done.stdout


def data_of(*argv: object) -> Any:
    return json.loads(shown(*argv, "--json"))


def test_one_job_on_two_types_by_hand(tmp_path: Path, throughputs: Path) -> None:
    """3,600 steps at 2 or 1 steps/s: half an hour, or an hour. max-min does not know of speeds."""
    path = tmp_path / "one.trace"
    path.write_text(line() + "\n")
    data = data_of(path, "--throughputs", throughputs, "--gpu-types", "h100=1,a100=1", "--placement", "all")
    assert data["bounds"]["makespan_s"] == pytest.approx(1800)
    assert 1700 < data["bounds"]["mean_jct_s"] <= 1800
    times = {policy["policy"]: policy["makespan_s"] for policy in data["policies"]}
    forked = times.pop("hadare")
    assert forked == pytest.approx(1200)  # both at once, 3 steps/s
    assert times.pop("max-min") >= 1800 * (1 - 1e-9)
    assert times == dict.fromkeys(times, pytest.approx(1800))


def test_the_table_shows_each_policy_beside_the_bounds_in_80_columns(trace: Path, throughputs: Path) -> None:
    lines = shown(
        trace, "--throughputs", throughputs, "--gpu-types", "h100=4,a100=4", "--placement", "all"
    ).splitlines()
    assert lines[0] == "jobs.trace: 4 jobs on 4 h100, 4 a100"
    assert " ".join(lines[1].split()) == "policy makespan h /bound mean JCT h /bound first wait h moves"
    assert [row.split()[0] for row in lines[2:5]] == ["fifo", "fastest-type", "greedy-pairs"]
    assert lines[-3].split()[:2] == ["lower", "bound"]
    assert lines[-1] == "hadare runs a job in several places at once: the bounds do not apply to it"
    assert max(map(len, lines)) <= 80


def test_lines_that_cannot_be_simulated_are_counted(tmp_path: Path, throughputs: Path) -> None:
    path = tmp_path / "odd.trace"
    odd = [line(), line("unheard"), line("large", gpus=4), line(steps="nan"), line(steps=-5), line(at=-1), "no job"]
    path.write_text(
        "\n".join([*odd, line(steps="1e400"), line(gpus="1.5"), line(steps="1e30"), line(at="1e300")]) + "\n"
    )
    data = data_of(path, "--throughputs", throughputs, "--gpu-types", "h100=2,a100=2", "--placement", "fifo")
    assert data["jobs"] == 1
    assert data["left_out"] == {
        "not a line of Gavel's fields": 1,
        "of an unknown type": 1,
        "with an impossible number of steps or GPUs, or time": 7,
        "whose GPUs no type has": 1,
    }


def test_csv_has_a_row_for_each_policy(trace: Path, throughputs: Path) -> None:
    text = shown(trace, "--throughputs", throughputs, "--gpu-types", "h100=4", "--placement", "fifo,advice", "--csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["policy"] for row in rows] == ["fifo", "advice"]
    assert float(rows[0]["makespan_s"]) > 0


def test_arrivals_are_drawn_from_the_trace(trace: Path, throughputs: Path) -> None:
    given = (trace, "--throughputs", throughputs, "--gpu-types", "h100=4", "--placement", "fifo", "--arrivals", 0.5)
    first, again, other = (data_of(*given, "--arrival-jobs", 30, "--seed", seed) for seed in (1, 1, 2))
    assert first["jobs"] == 30
    assert first["bounds"] == again["bounds"] != other["bounds"]


@pytest.mark.parametrize(
    ("types", "said"),
    [
        ("h100", "is not TYPE=N"),
        ("h100=0", "is not TYPE=N"),
        ("h100=-1", "is not TYPE=N"),
        ("h100=999999999", "is not TYPE=N"),
        ("=3", "is not TYPE=N"),
        ("h100=1,h100=2", "names h100 twice"),
        (",", "names no type"),
        ("\x1b[31m=x", "?[31m=x is not"),
    ],
)
def test_wrong_types_are_refused(trace: Path, throughputs: Path, types: str, said: str) -> None:
    done = simulate(trace, "--throughputs", throughputs, "--gpu-types", types)
    assert done.exit_code == 2
    assert said in done.output


def test_a_wrong_policy_lists_the_known_ones(trace: Path, throughputs: Path) -> None:
    done = simulate(trace, "--throughputs", throughputs, "--gpu-types", "h100=1", "--placement", "hadarr")
    assert done.exit_code == 2
    assert "hadarr is no placement policy" in done.output
    assert "priced-srpt" in done.output


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--gpu-types", "h100=1"), "needs TRACE, a trace of Gavel, and --throughputs FILE"),
        (("--gpu-types", "h100=1", "--nodes", "3"), "--nodes does not go with --gpu-types"),
        (("--gpu-types", "h100=1", "--json", "--csv"), "--json and --csv exclude each other"),
        (("--gpu-types", "h100=1", "--move-s", "360"), "--move-s must be less than --round-s"),
        (("--placement", "fifo"), "--placement needs --gpu-types"),
        (("--csv",), "--csv needs --gpu-types"),
        (("--arrivals", "0.7"), "--arrivals needs --gpu-types"),
    ],
)
def test_options_of_the_two_modes_do_not_mix(trace: Path, argv: tuple[str, ...], said: str) -> None:
    done = simulate(trace, *argv)
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize(
    ("content", "types", "said"),
    [
        (line() + "\n", "b200=4", "has no GPU type b200"),
        (line("unheard") + "\n", "h100=4", "no job can run on these GPU types (1 of an unknown type)"),
        (line("large", 7200, 4) + "\n", "h100=3", "no job can run on these GPU types (1 whose GPUs no type has)"),
        ("hello\n", "h100=4", "has no line of a trace of Gavel"),
        ("", "h100=4", "has no line of a trace of Gavel"),
        ("\x00\xff\n", "h100=4", "has no line of a trace of Gavel"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    tmp_path: Path, throughputs: Path, content: str, types: str, said: str
) -> None:
    path = tmp_path / "odd.trace"
    path.write_text(content)
    done = simulate(path, "--throughputs", throughputs, "--gpu-types", types)
    assert isinstance(done.exception, AlmanacError)
    assert said in str(done.exception)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"h100": 3}', '{"h100": {"small": {"null": 1}}}', "\x00"])
def test_throughputs_that_cannot_be_used_are_refused(tmp_path: Path, trace: Path, content: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(content)
    done = simulate(trace, "--throughputs", path, "--gpu-types", "h100=4")
    assert isinstance(done.exception, AlmanacError)


def test_a_folder_or_a_missing_file_is_refused(tmp_path: Path, throughputs: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        done = simulate(path, "--throughputs", throughputs, "--gpu-types", "h100=4")
        assert isinstance(done.exception, AlmanacError)
        assert "cannot be read" in str(done.exception)
