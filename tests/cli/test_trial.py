"""`almanac trial`: what it says on a short record, on records with holes, and on files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import command_line
import numpy as np
import pandas as pd
import pytest

from advisor.trial import DO_NOT, NO_DATA, SWITCH_ON, Gain, Losers, TrialResult, WeeklyGains, judge
from almanac.config import TrialRules
from cli.trial import verdict_lines
from simulator.trial import site_order
from slurm.commands import Settings

if TYPE_CHECKING:
    from command_line import CommandLine

START_S = 1_750_000_000
DAY_S = 86_400


def test_four_days_are_not_enough_for_any_subject(site: CommandLine) -> None:
    verdicts = site.json("trial", "--json")["verdicts"]
    assert [each["result"]["subject"].split()[0] for each in verdicts] == [
        "tiers", "priority", "power", "power", "mig", "types", "packing", "watch",
    ]  # fmt: skip
    assert {each["answer"] for each in verdicts} == {NO_DATA}
    by_subject = {each["result"]["subject"]: each for each in verdicts}
    assert by_subject["tiers"]["needed_days"] in (31, 32)
    assert by_subject["mig"]["needed_days"] is None, "more time brings no MIG slices"
    text = site("trial", "tiers", "priority")
    assert text.count("not enough data (needs 3") == 2
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tier",), "is no subject; "),
        (("\x1b[31m",), "is no subject"),
        (("--nodes", "0"), "not in the range"),
    ],
)
def test_wrong_words_are_refused(site: CommandLine, words: tuple[str, ...], said: str) -> None:
    done = site.raw("trial", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("settings", "policy", "backfill"),
    [
        (None, "fifo", "+easy"),
        ({"SchedulerType": "sched/builtin"}, "fifo", ""),
        ({"SchedulerParameters": "bf_interval=-1"}, "fifo", ""),
        ({}, "fifo", "+conservative:bf_window=1440:bf_resolution=60:bf_max_job_test=500:bf_interval=30"),
        ({"PriorityType": "priority/multifactor", "PriorityWeightAge": "10",
          "SchedulerParameters": "bf_window=99999,bf_resolution=300,bf_max_job_test=0,bf_max_job_user=7,bf_interval=9"},
         "multifactor:age=10:fair_share=0:size=0",
         "+conservative:bf_window=1440:bf_resolution=300:bf_max_job_test=500:bf_max_job_user=7:bf_interval=9"),
    ],
)  # fmt: skip
def test_the_sites_own_backfill_is_slurmctlds(settings: dict[str, str] | None, policy: str, backfill: str) -> None:
    """slurmctld takes its default in place of a value out of range."""
    order = site_order(None if settings is None else Settings(settings))
    assert (order.policy, order.backfill) == (policy, backfill)


def jobs_file(path: Path, **columns: Any) -> Path:
    """40 days of 15 jobs a day of two users."""
    rng, count = np.random.default_rng(1), 600
    submit_s = START_S + np.sort(rng.integers(0, 40 * DAY_S, count))
    run_s = rng.integers(60, 6 * 3600, count)
    table = {
        "job_id": np.arange(count), "user": rng.choice(["ann", "bob"], count), "gpu_num": rng.integers(1, 5, count),
        "cpu_num": 8, "node_num": 1, "submit_s": submit_s, "run_time_s": run_s, "state": "COMPLETED", **columns,
    }  # fmt: skip
    frame = pd.DataFrame(table)
    frame.to_parquet(path)
    return path


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """Without LightGBM and other processes."""
    monkeypatch.setattr("cli.trial.os.sched_getaffinity", lambda process: {0})
    (tmp_path / "almanac.toml").write_text("[training]\nmin_jobs = 100000\n")
    return command_line.CommandLine(tmp_path)


def of_trace(quick: CommandLine, path: Path) -> dict[str, Any]:
    (found,) = quick.json("trial", "--trace", str(path), "--nodes", "1", "--gpus-per-node", "4", "--json")["verdicts"]
    return dict(found)


@pytest.mark.parametrize("user", ["ann", ""])
def test_a_trace_of_one_user_or_none_without_limits_is_judged(quick: CommandLine, tmp_path: Path, user: str) -> None:
    found = of_trace(quick, jobs_file(tmp_path / "jobs.parquet", user=user))
    assert found["answer"] == DO_NOT, "run times that nothing tells are not predicted"
    assert len(found["result"]["gains"]["starts_s"]) == 3
    assert "no time limits in the record" in " ".join(found["result"]["notes"])


def test_weeks_without_jobs_are_not_zero(quick: CommandLine, tmp_path: Path) -> None:
    path = jobs_file(tmp_path / "jobs.parquet")
    jobs = pd.read_parquet(path)
    hole = jobs["submit_s"].between(START_S + 26 * DAY_S, START_S + 33 * DAY_S)
    jobs[~hole].to_parquet(path)
    found = of_trace(quick, path)
    assert (found["answer"], found["needed_days"]) == (NO_DATA, 7)
    assert "2 of the 3 weeks" in found["reason"]


def test_a_trace_without_gpus_counts_cpus(quick: CommandLine, tmp_path: Path) -> None:
    found = of_trace(quick, jobs_file(tmp_path / "jobs.parquet", gpu_num=0, cpu_num=2))
    assert "no GPUs in the file: CPUs count" in found["result"]["notes"]


def test_a_trace_has_data_for_one_subject_only(quick: CommandLine, tmp_path: Path) -> None:
    done = quick.raw("trial", "tiers", "--trace", str(jobs_file(tmp_path / "jobs.parquet")))
    assert (done.returncode, "tiers needs a store" in done.stderr) == (2, True)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not a file")
    done = quick.raw("trial", "--trace", str(tmp_path / "bad.parquet"))
    assert (done.returncode, "cannot be read" in done.stderr) == (5, True)


def test_a_verdict_shows_gains_losers_and_lines_to_paste_within_80_columns(tmp_path: Path) -> None:
    site, control = (Gain(2.0, 1.0, 3.0, over, 0.2, (1.5, 2.0, 2.5)) for over in ("as it is", "a very trivial control"))
    gains = WeeklyGains("nodes asleep", (0, 604_800, 1_209_600), 1, site, (control,))
    result = TrialResult(
        "power", gains, Losers(0.1, "5 min", "of the jobs start late"), settings=("[power]", 'mode = "apply"')
    )
    verdict = judge(result, TrialRules())
    lines = verdict_lines(verdict)
    assert verdict.answer == SWITCH_ON
    assert "power: switch on" in lines[0]
    text = "\n".join(lines)
    for part in ("2 (20.0%; 95%: 1 to 3) over as it is", "the best control", "3 weeks, 1 left out",
                 "10% of the jobs start late, by 5 min", 'mode = "apply"'):  # fmt: skip
        assert part in text
    assert max(map(len, lines)) <= 80


def test_a_store_that_is_not_there_is_an_error_and_no_verdict(tmp_path: Path) -> None:
    done = command_line.CommandLine(tmp_path).raw("--store", str(tmp_path / "none"), "trial")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.count("there is no store here") == 1


def test_a_column_of_a_file_needs_one(site: CommandLine) -> None:
    done = site.raw("trial", "--vc", "a")
    assert (done.returncode, "add --trace FILE" in done.stderr) == (2, True)


def test_one_bar_is_shown_at_a_time(site: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """rich before 14.1 refuses a bar within another one."""
    monkeypatch.setattr("cli.backtest_power.progress", None)
    assert "power" in site("trial", "power")
