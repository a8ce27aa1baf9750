"""`almanac simulate --packing`: what it prints and refuses."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from almanac.errors import AlmanacError
from cli.app import App
from cli.simulate import command
from simulator.packing.policies import POLICIES

A, B = "('a', 1)", "('b', 1)"


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.json"
    table = {A: {"null": 10.0, A: [9.0, 9.0], B: [8.0, 1.0]}, B: {"null": 2.0, B: [1.8, 1.8]}}
    path.write_text(json.dumps({"h100": table}))
    return path


def simulate(pairs: Path, *argv: object) -> Result:
    fixed = ["--throughputs", pairs, "--gpu-types", "h100=4", "--arrival-jobs", 60, "--seeds", 2]
    return CliRunner().invoke(command, list(map(str, [*fixed, *argv])), obj=App())


def test_every_policy_has_a_row_beside_no_packing(pairs: Path) -> None:
    done = simulate(pairs, "--packing", "all")
    assert done.exit_code == 0, done.output
    assert "60 jobs of 30 users on 4 h100, load 1.1, 2 seeds" in done.stdout
    for name in POLICIES:
        assert f"\n{name} " in done.stdout


def test_json_and_csv_have_the_same_figures(pairs: Path) -> None:
    data = json.loads(simulate(pairs, "--packing", "speed,none", "--json").stdout)
    rows = list(csv.DictReader(io.StringIO(simulate(pairs, "--packing", "speed,none", "--csv").stdout)))
    assert [row["policy"] for row in rows] == [row["policy"] for row in data["policies"]] == ["speed", "none"]
    assert float(rows[0]["mean_jct_s"]) == pytest.approx(data["policies"][0]["mean_jct_s"])
    assert data["policies"][0]["ratio"] < 1 == data["policies"][1]["ratio"]
    assert data["settings"]["seeds"] == [1, 2]


def test_the_seed_decides_alone(pairs: Path) -> None:
    first, again, other = (simulate(pairs, "--packing", "blind", "--json", "--seed", seed).stdout for seed in (1, 1, 2))
    assert first == again != other


def test_gangs_of_a_table_without_gangs_are_one_gpu_jobs(pairs: Path) -> None:
    done = simulate(pairs, "--packing", "stars-all", "--gangs", "--json")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--packing", "spede"], "spede is no packing policy"),
        (["--packing", ","], "names no policy"),
        (["--packing", "speed", "trace"], "TRACE does not go with --packing"),
        (["--packing", "speed", "--placement", "all"], "--placement does not go with --packing"),
        (["--packing", "speed", "--nodes", "3"], "--nodes does not go with --packing"),
        (["--packing", "speed", "--gpu-types", "h100=4,a100=4"], "one type"),
        (["--packing", "speed", "--json", "--csv"], "exclude each other"),
    ],
)
def test_wrong_options_are_named(pairs: Path, argv: list[str], said: str) -> None:
    done = simulate(pairs, *argv)
    assert done.exit_code == 2
    assert said in done.output


def test_options_of_packing_need_it(pairs: Path) -> None:
    done = CliRunner().invoke(command, ["--gangs"], obj=App())
    assert done.exit_code == 2 and "--gangs needs --packing" in done.output
    done = CliRunner().invoke(command, ["--packing", "speed", "--gpu-types", "h100=4"], obj=App())
    assert done.exit_code == 2 and "needs --throughputs" in done.output


def test_a_type_that_the_file_lacks_is_an_error(pairs: Path) -> None:
    done = simulate(pairs, "--packing", "speed", "--gpu-types", "v100=4")
    assert isinstance(done.exception, AlmanacError) and "has no GPU type v100" in str(done.exception)
