"""The command line: what it prints, how it ends, and what it keeps from whom."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from advisor.duration.rank import DEFAULT_RANK, NO_RANK, RankChoice, RankRule
from telemetry.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    CommandLine = Any


@pytest.fixture(scope="session")
def rows(site: CommandLine) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = site.json("jobs", "-a", "-n", "0", "--json")
    return found


def often(rows: list[dict[str, Any]], wanted: Callable[[float], bool]) -> tuple[str, str]:
    """User and name of the family of 80 GB requests with most measured runs, whose every peak is as wanted."""
    peaks: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["tier"] == "hbm80g" and row["gpu_count"] == 4 and row["hbm_peak_mib"] is not None:
            peaks.setdefault((row["user"], row["name_key"]), []).append(row["hbm_peak_mib"])
    fitting = {family: values for family, values in peaks.items() if all(map(wanted, values))}
    family = max(fitting, key=lambda key: len(fitting[key]))
    assert len(fitting[family]) >= 5
    return family


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys; from cli.main import cli; cli.main(['--help'], standalone_mode=False);"
        "heavy = ('pandas', 'pyarrow', 'duckdb', 'lightgbm', 'rich', 'numpy', 'matplotlib');"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("cli.jobs, cli.job_table, reports.published.caller", ["pandas", "lightgbm", "matplotlib", "jinja2"]),
        ("cli.report, reports.job.build, reports.job.render", ["lightgbm", "matplotlib", "css_inline"]),
    ],
)
def test_a_typed_command_loads_only_what_it_needs(modules: str, heavy: list[str]) -> None:
    program = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_script_is_read_and_the_command_line_wins(site: CommandLine, rows: list[dict[str, Any]]) -> None:
    user, name = often(rows, lambda peak: peak < 28000)
    script = f"#!/bin/bash\n#SBATCH -J {name.replace('#', '7')} --gpus=2\n#SBATCH -C gpu&hbm80g\nsrun x\n"
    path = site.folder / "job.sh"
    path.write_text(script)
    advice = site.json("advise", "--json", "--user", user, "--gpus=4", str(path))
    assert advice["request"]["gpu_count"] == 4
    assert advice["request"]["constraints"] == "gpu&hbm80g"
    assert advice["tier"]["tier"] == "hbm40g"
    assert "hbm40g" in site("advise", "--user", user, "--gpus=4", "-", stdin=script)


def test_a_hostile_name_is_shown_inert(site: CommandLine, rows: list[dict[str, Any]]) -> None:
    user, _ = often(rows, lambda peak: peak < 28000)
    said = site("advise", "--user", user, "-J", "\x1b[31mred\nFAILED\u202e", "--gpus=4", ok=(0, 10))
    assert "\x1b" not in said
    assert "\u202e" not in said


@pytest.mark.parametrize(
    "command",
    [["train"], ["evaluate"], ["models"], ["models", "--use", "previous"], ["backtest", "tier"], ["jobs", "-a"],
     ["jobs", "-u", "alice"], ["site-report", "--study"], ["summarize"]],
)  # fmt: skip
def test_what_looks_at_everybodys_jobs_is_for_operators(
    site: CommandLine, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 65533)
    done = site.raw("--store", str(site.folder / "store"), *command)
    assert (done.returncode, done.stdout) == (6, "")
    assert "operator" in done.stderr


def test_training_keeps_the_order_that_a_replay_chose(site: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(choice: RankChoice, keep_s: int) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr("cli.train.choose_rank", lambda jobs, **_: choice)
            patch.setattr("advisor.duration.service.RANK_S", keep_s)
            return site.json("train", "--json")["rank"]

    first = trained(RankChoice(RankRule("limit", 1.0), 0, 300), 0)
    assert (first["rule"], first["jobs"]) == ({"by": "limit", "exponent": 1.0, "stretch": 1.0}, 300)
    assert trained(RankChoice(NO_RANK, 0, 1), 7 * 86_400) == first, "an order is kept for a week"
    assert trained(RankChoice(DEFAULT_RANK, 0, 1), 0)["rule"]["by"] == "mean"


def test_one_can_go_back_to_the_version_before(site: CommandLine) -> None:
    first, second = (site.json("train", "--json")["version"] for _ in range(2))
    shown = site.json("models", "--use", "previous", "--json")
    assert [each["name"] for each in shown if each["is_current"]] == [first]
    assert {"ranking", "almanac"} <= set(shown[-1]["scores"])
    assert second in site("models", "--use", second)
    site("models", "--use", "../x", ok=(4,))


def test_an_evaluation_shows_baselines_beside_ours(site: CommandLine) -> None:
    result = site.json("evaluate", "--json")
    assert result["trainings"] >= 1
    assert {"almanac", "ranking", "GPU count", "time limit", "family last 5 median"} <= set(result["all"])
    assert result["all"]["GPU count"]["median_abs_log_error"] is None
    assert result["cold"]["almanac"]["jobs"] + result["warm"]["almanac"]["jobs"] == result["jobs"]


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (("--config", "/nonexistent.toml", "jobs"), 3, "--config names /nonexistent.toml"),
        (("--store", "/nonexistent", "-M", "c", "jobs"), 4, "there is no store here"),
        (("--store", "/nonexistent", "-M", "c", "advise", "--gpus=1"), 4, "try:"),
        (("job",), 2, "did you mean jobs"),
        (("advise", "/nonexistent.sh"), 2, "cannot be read"),
        (("jobs", "-S", "whenever"), 2, "not a time"),
    ],
)
def test_errors_end_in_words_and_their_code(site: CommandLine, argv: tuple[str, ...], code: int, said: str) -> None:
    done = site.raw(*argv)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_an_empty_store_is_named_and_slurm_is_not_asked(site: CommandLine, tmp_path: Path) -> None:
    Store.create(tmp_path / "s")
    done = site.raw("--store", str(tmp_path / "s"), "jobs")
    assert (done.returncode, "sacct" in done.stderr) == (4, False)
    assert "holds no jobs yet" in done.stderr


def test_ingest_without_servers_says_what_was_tried(
    site: CommandLine, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "almanac.toml"
    config.write_text('[slurm]\nbin_dir = "/nonexistent"\n[prometheus]\nurl = "http://127.0.0.1:9"\n')
    monkeypatch.setattr("telemetry.sources.prometheus_server._FIRST_WAIT_S", 0)
    done = site.raw("--config", str(config), "--store", str(tmp_path / "s"), "-M", "c", "ingest")
    assert done.returncode == 5
    assert "sacct was not found in /nonexistent" in done.stderr
    assert "127.0.0.1:9" in done.stderr
    assert "install the Slurm client" in done.stderr


def test_a_broken_configuration_is_a_finding(site: CommandLine, tmp_path: Any) -> None:
    config = tmp_path / "almanac.toml"
    config.write_text("[adivce]\nrisk = 0.1\n")
    done = site.raw("--config", str(config), "doctor")
    assert done.returncode == 1
    assert "did you mean 'advice'?" in done.stdout


def test_metrics_that_a_killed_run_left_out_are_computed_by_the_next(site: CommandLine, tmp_path: Any) -> None:
    """--no-summary stands for a run that was killed between storing and summarizing."""
    jobs = tmp_path / "jobs.csv"
    columns = "job_id,user,submit_s,start_s,end_s,gpu_count,node_count,node_list,state,constraints\n"
    jobs.write_text(columns + "1,ann,1750000000,1750000000,1750001000,1,1,n1,COMPLETED,gpu&hbm80g\n")
    store = ["--config", str(site.folder / "almanac.toml"), "--store", str(tmp_path / "s"), "-M", "c"]
    assert site.raw(*store, "ingest", "--no-summary", "--jobs", str(jobs)).returncode == 0
    shown = site.raw(*store, "jobs", "-a", "-S", "2025-01-01", "--json").stdout
    assert "not summarised" in shown
    assert '"tier": "hbm80g"' in shown
    done = site.raw(*store, "ingest", "--jobs", str(jobs))
    assert done.returncode == 0, done.stderr
    assert "no telemetry" in site.raw(*store, "jobs", "-a", "-S", "2025-01-01", "--json").stdout


def test_faults_of_rights_end_in_words(site: CommandLine) -> None:
    done = site.raw("--store", "/proc/self/nothing", "-M", "c", "ingest")
    assert done.returncode in (1, 4)
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")


def test_a_command_leaves_out_a_damaged_day_names_it_and_exits_with_4(site: CommandLine, tmp_path: Any) -> None:
    shutil.copytree(site.folder / "store", tmp_path / "store")
    options = [
        "--config",
        str(site.folder / "almanac.toml"),
        "--store",
        str(tmp_path / "store"),
        "jobs",
        "-an0",
        "--csv",
    ]
    before = site.raw(*options).stdout
    damaged = sorted((tmp_path / "store" / "jobs").glob("*/*/*.parquet"))[0]
    content = bytearray(damaged.read_bytes())
    content[-40] ^= 1
    damaged.write_bytes(content)
    done = site.raw(*options)
    assert done.returncode == 4
    assert 0 < len(done.stdout) < len(before)
    assert f"warning: left out: {damaged}: damaged: the checksum of its footer differs" in done.stderr
    assert "error: 1 damaged file of the store left out" in done.stderr


def test_a_store_file_of_brackets_or_a_fifo_is_one_line_of_error(site: CommandLine, tmp_path: Any) -> None:
    mark = tmp_path / "store.json"
    mark.write_text("[" * 100_000)
    done = site.raw("--store", str(tmp_path), "jobs")
    assert (done.returncode, done.stdout) == (4, "")
    assert "store.json: cannot be read" in done.stderr
    mark.unlink()
    os.mkfifo(mark)
    assert "not a regular file" in site.raw("--store", str(tmp_path), "jobs").stderr


def test_doctor_says_when_prometheus_is_not_reached(site: CommandLine, tmp_path: Any) -> None:
    config = tmp_path / "almanac.toml"
    config.write_text('[prometheus]\nurl = "http://127.0.0.1:9"\n')
    done = site.raw("--config", str(config), "--store", str(site.folder / "store"), "doctor")
    assert done.returncode == 1
    assert "FAIL  Prometheus: Prometheus at http://127.0.0.1:9: the query for" in done.stdout
    assert "GPU counters" not in done.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's home")
def test_root_leaves_the_home_of_another_user_alone(tmp_path: Path) -> None:
    """Some sudo keep HOME: the user's configuration would name the programs that root runs as Slurm's."""
    config = tmp_path / "home/.config/almanac/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("[nonsense]\n")
    environment = {**os.environ, "HOME": str(tmp_path / "home")}
    argv = [sys.executable, "-m", "cli.main", "doctor", "--json"]
    own = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert "nonsense" in own.stdout
    os.chown(tmp_path / "home", 60001, 60001)
    another = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert "nonsense" not in another.stdout and another.stdout


def test_a_name_that_the_terminal_cannot_show_ends_no_command() -> None:
    """One user's job name would keep an operator with another encoding from every list."""
    code = "import click, cli.main as m; m.cli = click.Command('x', callback=lambda: print('caf\\u00e9')); m.main([])"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "caf?\n", "")
