"""`almanac simulate --gpu-types`, `--packing`, and `--mig`: what they print and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from almanac.errors import AlmanacError
from cli.app import App
from cli.mig import command as mig
from cli.simulate import command
from simulator.policies.packing import POLICIES as RULES


def line(kind: str = "small", steps: object = 3600, gpus: object = 1, at: object = 0, slo: object = -1) -> str:
    return "\t".join([kind, "python3 train.py", "rl", "--steps", "1", str(steps), str(gpus), "1", str(slo), str(at)])


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
    return CliRunner().invoke(command, list(map(str, argv)), obj=App())


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
    data = data_of(path, "--throughputs", throughputs, "--gpu-types", "h100=1,a100=1")
    assert data["bounds"]["makespan_s"] == pytest.approx(1800)
    assert 1700 < data["bounds"]["mean_jct_s"] <= 1800
    assert data["policies"][0]["deadlines"] == 0
    times = {policy["policy"]: policy["makespan_s"] for policy in data["policies"]}
    forked = times.pop("hadare")
    assert forked == pytest.approx(1200)  # both at once, 3 steps/s
    assert times.pop("max-min") >= 1800 * (1 - 1e-9)
    assert times == dict.fromkeys(times, pytest.approx(1800))


def test_the_table_shows_each_policy_beside_the_bounds(trace: Path, throughputs: Path) -> None:
    lines = shown(trace, "--throughputs", throughputs, "--gpu-types", "h100=4,a100=4").splitlines()
    assert lines[0] == "jobs.trace: 4 jobs on 4 h100, 4 a100"
    assert " ".join(lines[1].split()) == "policy JCT median wait p95 longest makespan busy energy worse"
    assert [row.split()[0] for row in lines[2:5]] == ["fifo", "fastest-type", "greedy-pairs"]
    assert " ".join(lines[-2].split()) == "lower bound 25 min 30 min"
    assert lines[-1] == "hadare runs a job in several places at once: the bounds do not apply to it"
    assert max(map(len, lines)) <= 90


def test_lines_that_cannot_be_simulated_are_counted(tmp_path: Path, throughputs: Path) -> None:
    path = tmp_path / "odd.trace"
    odd = [line(), line("unheard"), line("large", gpus=4), line(steps="nan"), line(steps=-5), line(at=-1), "no job"]
    path.write_text(
        "\n".join([*odd, line(steps="1e400"), line(gpus="1.5"), line(steps="1e30"), line(at="1e300")]) + "\n"
    )
    data = data_of(path, "--throughputs", throughputs, "--gpu-types", "h100=2,a100=2", "--policy", "fifo")
    assert data["jobs"] == 1
    assert data["excluded"] == {
        "not a line of Gavel's fields": 1,
        "of an unknown type": 1,
        "with an impossible number of steps or GPUs, or time": 7,
        "whose GPUs no type has": 1,
    }


def test_arrivals_are_drawn_from_the_trace(trace: Path, throughputs: Path) -> None:
    given = (trace, "--throughputs", throughputs, "--gpu-types", "h100=4", "--policy", "fifo", "--set", "load=0.5")
    first, again, other = (data_of(*given, "--set", "jobs=30", "--seed", seed) for seed in (1, 1, 2))
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
    done = simulate(trace, "--throughputs", throughputs, "--gpu-types", "h100=1", "--policy", "hadarr")
    assert done.exit_code == 2
    assert "hadarr is no policy here" in done.output
    assert "priced-srpt" in done.output


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--gpu-types", "h100=1"), "needs TRACE, a trace of Gavel, and --throughputs FILE"),
        (("--gpu-types", "h100=1", "--nodes", "3"), "--nodes does not go with --gpu-types"),
        (("--gpu-types", "h100=1", "--set", "move_s=360"), "move_s must be less than round_s"),
        (("--set", "load=0.7"), "load is no setting"),
        (("--mig", "--gpu-types", "h100=1"), "--gpu-types does not go with --mig"),
        (("--packing", "--gpu-types", "h100=1"), "TRACE does not go with --packing"),
        (("--mig", "--plot", "x.png"), "--plot does not go with --mig"),
        (("--mig", "--nodes", "65"), "up to 64 nodes of 16 GPUs, not 65 of 1"),
    ],
)
def test_options_of_the_modes_do_not_mix(trace: Path, argv: tuple[str, ...], said: str) -> None:
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


def test_deadlines_that_were_met_are_counted(tmp_path: Path, throughputs: Path) -> None:
    """An SLO of 1.5 gives a job of half an hour 45 minutes: of two jobs on one GPU, the first ends in time."""
    path = tmp_path / "due.trace"
    path.write_text("\n".join([line(slo=1.5), line(slo=1.5), line(steps=1)]) + "\n")
    given = (path, "--throughputs", throughputs, "--gpu-types", "h100=1", "--policy", "fifo")
    fifo = data_of(*given)["policies"][0]
    assert (fifo["deadlines"], fifo["deadlines_met"]) == (2, 0.5)
    assert shown(*given).splitlines()[1].endswith("worse  met")


A, B = "('a', 1)", "('b', 1)"


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.json"
    table = {A: {"null": 10.0, A: [9.0, 9.0], B: [8.0, 1.0]}, B: {"null": 2.0, B: [1.8, 1.8]}}
    path.write_text(json.dumps({"h100": table}))
    return path


def pack(pairs: Path, *argv: object) -> Result:
    fixed = ["--packing", "--throughputs", pairs, "--set", "jobs=60", "--set", "seeds=2"]
    types = () if "--gpu-types" in argv else ("--gpu-types", "h100=4")
    return CliRunner().invoke(command, list(map(str, [*fixed, *types, *argv])), obj=App())


def test_every_rule_has_a_row_beside_no_packing(pairs: Path) -> None:
    lines = pack(pairs).stdout.splitlines()
    assert lines[0] == "60 jobs of 30 users on 4 h100, load 1.1; means over 2 seeds"
    assert [row.split()[0] for row in lines[2:]] == list(RULES)


def test_the_seed_decides_alone_and_figures_are_means_over_seeds(pairs: Path) -> None:
    given = ("--policy", "blind", "--json")
    first, again, other = (pack(pairs, *given, "--seed", seed).stdout for seed in (1, 1, 2))
    assert first == again != other
    single = [json.loads(pack(pairs, *given, "--set", "seeds=1", "--seed", seed).stdout) for seed in (1, 2)]
    both = json.loads(first)["policies"][1]
    assert both["policy"] == "blind" and both["slow"] > 0
    for of in (lambda each: each["slow"], lambda each: each["details"]["shared"]):
        assert of(both) == pytest.approx(sum(of(each["policies"][1]) for each in single) / 2)


def test_gangs_of_a_table_without_gangs_are_one_gpu_jobs(pairs: Path) -> None:
    assert pack(pairs, "--policy", "stars-all", "--set", "gangs=1").exit_code == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--policy", "spede"], "spede is no policy here; did you mean speed?"),
        (["--policy", ","], "names no policy"),
        (["--nodes", "3"], "--nodes does not go with --packing"),
        (["--gpu-types", "h100=4,a100=4"], "one type"),
        (["--gpu-types", "v100=4"], "has no GPU type v100"),
    ],
)
def test_wrong_options_of_packing_are_named(pairs: Path, argv: list[str], said: str) -> None:
    done = pack(pairs, *argv)
    assert done.exit_code != 0
    assert said in done.output + str(done.exception)


def test_a_trace_of_slices_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("submit_s,run_s,shape\n" + "".join(f"{number * 60},600,1g\n" for number in range(30)))
    found = data_of(path, "--mig", "--nodes", "2")
    assert (found["jobs"], found["gpus"]) == (30, 2)
    waits = {each["policy"]: each["all_jobs"]["delay_s"]["mean"] for each in found["policies"]}
    assert waits["static"] == 0 and waits["full"] > 0
    assert {each["details"]["layout"] for each in found["policies"] if each["policy"] == "full"} == {"2 x gpu"}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("layout=4g+4g", "layout: 4g+4g is no layout of A100-40"),
        ("model=V100", "model=V100 is none of"),
        ("demand=no such", "demand=no such is none of"),
        ("days=0", "is not a number from 0.01 to 60"),
    ],
)
def test_wrong_settings_of_slices_are_named(setting: str, said: str) -> None:
    done = CliRunner().invoke(command, ["--mig", "--nodes", "2", "--set", setting], obj=App())
    assert done.exit_code == 2
    assert said in done.output


def test_the_old_spelling_of_slices_works_with_a_warning() -> None:
    old = ("--nodes", "2", "--days", "0.5", "--layout=1:1g+2g+4g,gpu", "--history-days", "0.5")
    new = ("--mig", "--nodes", "2", "--set", "days=0.5", "--set", "layout=1:1g+2g+4g,gpu", "--set", "history_days=0.5")
    done = CliRunner().invoke(mig, ["simulate", *old], obj=App())
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith("warning: `almanac mig simulate` goes with the next release")
    assert done.stdout == CliRunner().invoke(command, new, obj=App()).stdout
    assert "planner-raises" in done.stdout and "refused without a queue" in done.stdout
