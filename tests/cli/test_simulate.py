"""`almanac simulate`: what it prints, writes, and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
from click.testing import CliRunner, Result

from almanac.errors import AlmanacError
from cli.app import App
from cli.output import short_time
from cli.simulate import command

if TYPE_CHECKING:
    from command_line import CommandLine

ESCAPE = "\x1b[31mred\nline"


def write(path: Path, **columns: Any) -> Path:
    jobs = pd.DataFrame({"gpu_count": 1, **columns})
    jobs["job_id"] = range(1, len(jobs) + 1)
    jobs["start_s"] = jobs["submit_s"]
    jobs["end_s"] = jobs["submit_s"] + jobs.pop("run_s")
    jobs.to_csv(path, index=False)
    return path


@pytest.fixture
def busy(tmp_path: Path) -> Path:
    """On one GPU, FIFO lets jobs 2 and 3 wait 990 s and 1080 s, SJF 992 s and 980 s."""
    return write(tmp_path / "jobs.csv", submit_s=[0, 10, 20], run_s=[1000, 100, 2], user=["a", "b", "b"])


def simulate(*argv: object) -> Result:
    default = () if "--policy" in argv else ("--policy", "fifo,sjf")
    return CliRunner().invoke(command, [*map(str, argv), *default, "--jobs", "1"], obj=App())


def shown(*argv: object) -> str:
    done = simulate(*argv)
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done.output


ONE = ("--nodes", 1, "--gpus-per-node", 1)


def test_the_table_shows_waits_and_use_of_each_policy(busy: Path) -> None:
    lines = shown(busy, *ONE, "--policy", "fifo,sjf", "--policy", "sjf+easy", "--watts", 100, 500).splitlines()
    assert lines[0] == "jobs.csv: 3 jobs on 1 nodes with 1 GPUs; 3 jobs scored"
    assert lines[1] == "policy        JCT  median    wait     p95  longest  makespan  busy   energy  worse"
    assert " ".join(lines[2].split()) == "fifo+easy 18 min 18 min 12 min 18 min 18 min 18 min 100% 0.2 kWh -"
    assert " ".join(lines[3].split()) == "fifo 18 min 18 min 12 min 18 min 18 min 18 min 100% 0.2 kWh 0%"
    # Job 2 ends 2 s later, and job 3 earlier: 1 of 3 jobs is worse off.
    assert " ".join(lines[4].split()) == "sjf 17 min 17 min 11 min 17 min 17 min 18 min 100% 0.2 kWh 33%"
    assert [line.split()[0] for line in lines[5:]] == ["sjf+easy"]


def test_a_policy_that_predicts_stands_beside_its_controls(busy: Path) -> None:
    names = ["fifo+easy", "fifo", "qssf", "fifo+skip", "gpu-count", "5 x qssf-shuffled", "sjf", "sjf+easy"]
    output = shown(busy, *ONE, "--policy", "fifo,qssf")
    assert [line.split("  ")[0] for line in output.splitlines()[2:]] == names
    assert all(len(line) <= 100 for line in output.splitlines())
    data = json.loads(shown(busy, *ONE, "--policy", "sjf,qssf,fifo", "--set", "controls=0", "--json"))
    assert [each["policy"] for each in data["policies"]] == ["fifo+easy", "sjf", "qssf", "fifo"]


def test_json_has_every_figure(busy: Path) -> None:
    data = json.loads(shown(busy, *ONE, "--json"))
    assert (data["trace"], data["jobs"], data["scored_jobs"], data["nodes"], data["gpus"]) == ("jobs.csv", 3, 3, 1, 1)
    _, fifo, sjf = data["policies"]
    assert fifo["policy"] == "fifo"
    assert fifo["all_jobs"]["delay_s"] == {"mean": 690, "median": 990, "p95": 1071, "p99": 1078.2, "maximum": 1080}
    assert fifo["by"]["user"]["b"]["queued"] == 2
    assert fifo["by"]["length"]["over 6 h"]["jct_s"]["mean"] is None
    assert sjf["against_first"]["delay_difference_s"]["mean"] == pytest.approx(-98 / 3)
    assert sjf["against_first"]["worse_jobs"] == pytest.approx(1 / 3)
    assert (fifo["makespan_s"], fifo["deadlines"], fifo["deadlines_met"]) == (1102, 0, None)
    assert fifo["energy_kwh"] == pytest.approx(1102 * 437.5 / 3.6e6)
    assert len(fifo["timeline"]["busy_gpus"]) == len(fifo["timeline"]["start_s"]) == 240


def test_the_oldest_jobs_can_be_left_out_or_only_warm_up(busy: Path) -> None:
    later = json.loads(shown(busy, *ONE, "--from", 0.4, "--json"))
    assert (later["jobs"], later["policies"][0]["all_jobs"]["delay_s"]["maximum"]) == (2, 90)
    warm = json.loads(shown(busy, *ONE, "--set", "warmup=0.4", "--json"))
    assert (warm["jobs"], warm["scored_jobs"]) == (3, 2)
    assert warm["policies"][0]["all_jobs"]["delay_s"]["maximum"] == 1080


def test_excluded_unfinished_and_unknown_constraints_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", submit_s=[0, 1, 2], run_s=[5, 5, 5], gpu_count=[1, 0, 9], constraints=["big"] * 3)
    output = shown(path, *ONE, "--policy", "fifo")
    assert "  excluded: 1 without a GPU" in output
    assert "  ignored: constraint big of 2 jobs; no such nodes" in output
    assert "  1 jobs never ended: they ask for more than the cluster has" in output.splitlines()


def test_the_nodes_of_the_trace_are_the_default(busy: Path, tmp_path: Path) -> None:
    done = simulate(busy)
    assert isinstance(done.exception, AlmanacError)
    assert "jobs.csv does not name the nodes" in str(done.exception)
    assert "--nodes N" in done.exception.hint
    path = write(tmp_path / "x.csv", submit_s=[0, 1], run_s=[5, 5], node_list=["n1", "n[1-2]"], gpu_count=[1, 8])
    assert "2 jobs on 2 nodes with 8 GPUs" in shown(path)


def test_a_file_describes_the_cluster(busy: Path, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("[[node_sets]]\nnodes = 2\ngpus = 3\n")
    assert "on 2 nodes with 6 GPUs" in shown(busy, "--cluster-file", tmp_path / "cluster.toml")
    assert "exclude each other" in simulate(busy, "--nodes", 1, "--cluster-file", tmp_path / "cluster.toml").output


def test_the_simulated_jobs_are_written_as_swf(busy: Path, tmp_path: Path) -> None:
    (tmp_path / "out.swf").write_text("an older one, which is replaced")
    first = shown(busy, *ONE, "--swf", tmp_path / "out.swf")
    again = shown(tmp_path / "out.swf")
    assert again == first.replace("jobs.csv", "out.swf"), "with the cluster"


def test_the_policies_are_drawn_beside_their_table(busy: Path, tmp_path: Path) -> None:
    assert "worse" in shown(busy, *ONE, "--set", "warmup=0.4", "--plot", tmp_path / "x.PNG")
    assert (tmp_path / "x.PNG").read_bytes().startswith(b"\x89PNG")
    for name in ("x.gif", "absent/x.png"):
        assert simulate("absent.csv", *ONE, "--plot", tmp_path / name).exit_code == 2, "before the simulation"


def test_a_seed_gives_the_same_output_again(busy: Path) -> None:
    assert shown("generated", "--seed", 3, "--policy", "fifo") == shown("generated", "--seed", 3, "--policy", "fifo")
    assert shown("generated", "--seed", 3, "--policy", "fifo") != shown("generated", "--seed", 4, "--policy", "fifo")


def test_hostile_names_are_harmless(tmp_path: Path) -> None:
    names = [ESCAPE, "\u202eevil", "a|b"]
    path = write(
        tmp_path / "\x1b[31mx.csv", submit_s=[0, 0, 0], run_s=[9, 9, 9], user=names, partition=names, constraints=names
    )
    for output in (shown(path, *ONE), shown(path, *ONE, "--json")):
        assert all(char.isprintable() or char == "\n" for char in output)
    assert ESCAPE in json.loads(output)["policies"][0]["by"]["user"]
    shown(path, *ONE, "--swf", tmp_path / "x.swf")
    assert (tmp_path / "x.swf").read_text().isascii()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--policy", "fifo,fastest"), "fastest"),
        (("--policy", ","), "names no policy"),
        (("--from", 1), "0<=x<1"),
        (("--set", "warmup=-1"), "warmup=-1 is not a number from 0 to 0.999"),
        (("--set", "warmup"), "warmup= is not a number"),
        (("--set", "warmpu=0.1"), "warmpu is no setting; did you mean warmup?"),
        (("--set", "controls=1.5"), "controls=1.5 is not a whole number from 0 to 1"),
        (("--set", "\x1b[31m=1"), "?[31m is no setting"),
        (("--nodes", 0), "1<=x"),
    ],
)
def test_wrong_options_are_named(busy: Path, argv: tuple[object, ...], said: str) -> None:
    done = simulate(busy, *ONE, *argv)
    assert said in done.output + str(done.exception)
    assert done.exit_code != 0


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (3569, "59 min"), (3571, "1.0 h"), (172_799, "48.0 h"),
        (172_800, "2.0 d"), (86_400 * 99.9, "99.9 d"), (86_400 * 100.2, "100 d"), (-7200, "-2.0 h"),
        (float("nan"), "-"),
    ],
)  # fmt: skip
def test_times_have_at_most_three_digits(seconds: float, said: str) -> None:
    assert short_time(seconds) == said


def test_the_store_is_the_default_trace_and_policies_run_in_processes(site: CommandLine) -> None:
    output = site("simulate", "--policy", "fifo,sjf", "--jobs", "2")
    assert output.startswith("demo: ")
    assert " nodes with " in output
    assert output == site("simulate", "--policy", "fifo,sjf", "--jobs", "1")


def test_errors_are_printed_with_their_exit_codes(site: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("nothing\n")
    for argv, code, said in (
        ((str(tmp_path / "x"),), 5, "try: "),
        ((str(tmp_path / "absent"),), 5, "No such file"),
        (("generated", "--policy", "fastest"), 2, "fastest"),
    ):
        done = site.raw("simulate", *argv)
        assert done.returncode == code
        assert said in done.stderr


def test_a_trace_needs_no_store(site: CommandLine, busy: Path) -> None:
    done = site.raw("--store", "/nonexistent", "simulate", str(busy), "--nodes", "1")
    assert done.returncode == 0, done.stderr
