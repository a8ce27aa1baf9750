"""`almanac backtest`: what it prints, and what it draws."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import CommandLine


def test_the_back_test_of_the_tier_is_for_operators_and_names_its_groups(site: CommandLine) -> None:
    outcome = site.json("backtest", "tier", "--json")
    groups = {group["group"]: group for group in outcome["groups"]}
    everything = groups["all"]
    assert outcome["risk"] == 0.05
    assert 0 < everything["advised"] <= everything["jobs"]
    assert everything["exceeded_tier"]["share"] <= 0.2
    assert everything["exceeded_bound"]["share"] is None, "the site has too few families to state a bound"
    assert {"evidence: family", "users with 20-199 jobs"} < set(groups)
    assert "above tier" in site("backtest", "tier")


def test_the_back_test_is_drawn_beside_its_table(site: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "scores.PNG").write_text("an older one, which is replaced")
    assert "above tier" in site("backtest", "tier", "--plot", str(tmp_path / "scores.PNG"))
    assert (tmp_path / "scores.PNG").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["scores.PNG"]


@pytest.mark.parametrize(("name", "said"), [("scores.gif", ".png, .svg, or .pdf"), ("missing/scores.png", "no folder")])
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_replay(
    site: CommandLine, tmp_path: Path, name: str, said: str
) -> None:
    done = site.raw("--store", "/nonexistent", "backtest", "tier", "--plot", str(tmp_path / name))
    assert done.returncode == 2
    assert said in done.stderr


def test_the_back_test_of_the_priority_compares_policies_on_the_jobs_of_the_store(site: CommandLine) -> None:
    options = ("backtest", "priority", "--nodes", "2", "--jobs", "1")
    outcome = site.json(*options, "--json")
    policies = {each["policy"]: each for each in outcome["policies"]}
    assert list(policies)[:4] == ["fifo+easy", "multifactor+easy", "qssf-aged+easy", "gpu-count+easy"]
    assert sum("shuffled" in name for name in policies) == 5
    assert {each["all_jobs"]["ended"] for each in policies.values()} == {outcome["scored_jobs"]}
    assert 0 < outcome["scored_jobs"] < 600, "the oldest jobs are history"
    lines = site(*options).splitlines()
    title = next(line for line in lines if line.startswith("policy"))
    assert title.split()[:6] == ["policy", "wait", "median", "p95", "longest", "JCT"]
    by_length = lines[lines.index("mean JCT by run time") + 2 :]
    assert [line.split("  ")[0] for line in by_length] == [
        "fifo", "multifactor", "qssf-aged", "gpu-count", "5 x qssf-shuffled",
    ]  # fmt: skip


def test_users_who_follow_the_advice_are_simulated_beside_the_record(site: CommandLine) -> None:
    options = ("backtest", "tier", "--tier-nodes", "hbm40g=1", "--tier-nodes", "hbm80g=1", "--gpus-per-node", "4")
    outcome = site.json(*options, "--follow", "1", "--json")
    waits = {each["group"]: each for each in outcome["waits"]}
    assert set(waits) <= {"all", "hbm40g", "hbm80g", "no tier", "moved jobs"}
    moved = outcome["down"] + outcome["up"] + outcome["named"]
    assert waits["moved jobs"]["jobs"] <= moved
    assert 0 < moved <= outcome["jobs"]
    assert outcome["out_of_memory"] + outcome["unknown_need"] <= moved
    nobody = {each["group"]: each for each in site.json(*options, "--follow", "0", "--json")["waits"]}
    assert all(each["recorded_s"] == each["followed_s"] for each in nobody.values())
    assert "with advice" in site(*options, "--follow", "0.5")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--follow", "0.5"), "need each other"),
        (("--tier-nodes", "hbm40g=4"), "need each other"),
        (("--follow", "0.5", "--tier-nodes", "\x1b[31m=4"), "names no tier; use hbm40g, hbm80g"),
        (("--follow", "0.5", "--tier-nodes", "hbm40g=0"), "no number of nodes from 1"),
        (("--follow", "0.5", "--tier-nodes", "hbm40g"), "no number of nodes from 1"),
        (("--follow", "0.5", "--tier-nodes", "hbm40g=4", "--plot", "x.png"), "does not compute them"),
    ],
)
def test_wrong_options_of_the_simulated_advice_are_refused(
    site: CommandLine, options: tuple[str, ...], said: str
) -> None:
    done = site.raw(
        "--config", str(site.folder / "almanac.toml"), "--store", "/nonexistent", "backtest", "tier", *options
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "\x1b" not in done.stderr


def test_the_back_test_of_types_scores_run_times_and_the_choice(site: CommandLine) -> None:
    outcome = site.json("backtest", "type", "--json")
    groups = {group["group"]: group for group in outcome["groups"]}
    assert {"all", "on hbm40g", "on hbm80g"} < set(groups)
    everything, advice = groups["all"], outcome["advice"]
    assert 0 < everything["predicted"] <= everything["completed"] <= everything["jobs"]
    assert 0 < everything["error"] < 1
    assert 0.6 < everything["coverage"] <= 1
    assert advice["other"] + advice["kept"] + advice["silent"] == advice["jobs"] == everything["jobs"]
    lines = site("backtest", "type", "--last", "50").splitlines()
    assert "50 jobs" in lines[0]
    assert max(map(len, lines)) <= 80
