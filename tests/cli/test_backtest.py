"""`almanac backtest`: what it prints, and what it draws."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from command_line import CommandLine


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


def test_where_nobody_follows_the_advice_waits_are_those_of_the_record(site: CommandLine) -> None:
    nodes = ("--tier-nodes", "hbm40g=1", "--tier-nodes", "hbm80g=1", "--gpus-per-node", "4")
    waits = site.json("backtest", "tier", *nodes, "--follow", "0", "--json")["waits"]
    assert waits and all(each["recorded_s"] == each["followed_s"] for each in waits)


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


def test_the_back_test_of_types_can_look_at_the_newest_jobs_only(site: CommandLine) -> None:
    assert "50 jobs" in site("backtest", "type", "--last", "50").splitlines()[0]
