"""A smaller tier for a few jobs only: the prompt counts those since the advice was written."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from almanac.config import Tier
from almanac.records import JobRequest
from almanac.submit_config import Priority
from almanac.tiers import Rewrite
from slurm_hooks.advice.file import ADVICE, FAMILY, AdviceFile, AdviceRow
from slurm_hooks.submit.choices import Choice, write
from slurm_hooks.submit.dialogue import PromptSubmission, Terminal, consult
from slurm_hooks.submit.pilot import PilotCount

NOW_S = int(time.time())
TIERS = tuple(Tier(name=f"hbm{gib}g", capacity_mib=gib * 1024, constraint=f"hbm{gib}g") for gib in (24, 40, 80))
ROW = AdviceRow(FAMILY, 60, 5, "train-#", 1, 20_000, "hbm40g", text="your runs fit.", pilot=3)
CHANGE = Rewrite("--constraint", "hbm40g")
NODES = "almanac-nodes\t1\t{}\t{}:\np*|4|64|512000|hbm24g,hbm40g,hbm80g|gpu:a100:4|infinite|up|all"
Broken = Callable[[Path], object]


class Site:
    """A user's submissions at a clock that stands at now_s until a test moves it."""

    def __init__(self, root: Path) -> None:
        self.root, self.now_s, self.said = root, NOW_S, list[str]()
        self.state = root / "home/.local/state/almanac"
        self.publish()

    def publish(self, row: AdviceRow = ROW) -> None:
        own = self.root / "advice/user" / str(os.getuid())
        own.mkdir(parents=True, exist_ok=True)
        file = AdviceFile("v", self.now_s, self.now_s + 90_000, "off", False, "ask", Priority(), TIERS, (row,))
        (own / ADVICE.name).unlink(missing_ok=True)
        (own / ADVICE.name).write_bytes(ADVICE.render(file))

    def submit(self, mode: str = "apply", array: str = "", asked: str = "hbm80g", **environ: str) -> Rewrite | None:
        self.state.mkdir(parents=True, exist_ok=True)
        (self.state / "nodes").write_text(NODES.format(self.now_s, os.uname().nodename))
        request = JobRequest("ann", "train-7", gpu_count=1, constraints=asked, is_array=bool(array))
        options = {"constraint": asked, "gpus": "1", **({"array": array} if array else {})}
        terminal = None if mode == "apply" else Terminal(self.said.append, lambda: "y\n")
        whole = {"HOME": str(self.root / "home"), "ALMANAC_ADVICE": mode, "PATH": "/nowhere", **environ}
        return consult(PromptSubmission(request, options, str), whole, terminal, str(self.root / "advice"))[0]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    site = Site(tmp_path)
    monkeypatch.setattr("slurm_hooks.submit.dialogue.time.time", lambda: site.now_s)
    return site


def test_some_jobs_follow_until_the_next_publication(site: Site) -> None:
    assert [site.submit() for _ in range(5)] == [CHANGE] * 3 + [None] * 2
    site.now_s += 1800
    assert site.submit() is None
    site.publish(dataclasses.replace(ROW, pilot=1))
    assert [site.submit(), site.submit()] == [CHANGE, None]
    assert len((site.state / "pilot").read_text().splitlines()) == 1, "those before the publication are forgotten"
    assert (site.state / "pilot").stat().st_mode & 0o777 == 0o600


def test_any_number_follows_without_a_limit_and_to_a_larger_tier(site: Site) -> None:
    assert [site.submit(asked="hbm24g") for _ in range(5)] == [CHANGE] * 5
    site.publish(dataclasses.replace(ROW, pilot=None))
    assert [site.submit() for _ in range(5)] == [CHANGE] * 5


def test_families_are_counted_apart(site: Site) -> None:
    site.state.mkdir(parents=True)
    (site.state / "pilot").write_text(f"train-#\t2\t3\t{NOW_S}\nother\t1\t3\t{NOW_S}\n")
    assert site.submit() == CHANGE


@pytest.mark.parametrize(("array", "more"), [("1-2", 1), ("0-8:4%1", 0), ("1", 2), ("a,b", 2), ("0-99999999999", 0)])
def test_an_array_counts_as_its_tasks(site: Site, array: str, more: int) -> None:
    assert [site.submit(array=array), *[site.submit() for _ in range(3)]] == [CHANGE] * (1 + more) + [None] * (3 - more)


def test_after_always_a_line_says_that_it_waits(site: Site) -> None:
    write(str(site.state / "choices"), [Choice("train-#", 1, "always", "hbm40g", NOW_S)])
    assert [site.submit("ask") for _ in range(4)] == [CHANGE] * 3 + [None]
    assert site.said[-1] == (
        "almanac: wait: 3 jobs of train-# already try hbm40g. This job keeps the tier\n"
        "         that it asks for, until one of them has shown its memory.\n"
    )


def test_nothing_is_asked_or_told_where_enough_jobs_follow(site: Site) -> None:
    assert [site.submit() for _ in range(3)] == [CHANGE] * 3
    assert (site.submit("ask"), site.submit("show"), site.said) == (None, None, [])


def a_link(path: Path) -> None:
    path.with_name("x").write_text(f"train-#\t1\t1\t{NOW_S}\n")
    path.symlink_to("x")


BROKEN: dict[str, Broken] = {
    "garbage": lambda path: path.write_bytes(b"\xff\x00"),
    "empty": lambda path: path.touch(),
    "one line": lambda path: path.write_text(f"train-#\t1\t1\t{NOW_S}\ntrain-#\t1\t-9\t{NOW_S}\n"),
    "huge": lambda path: path.write_text(f"train-#\t1\t1\t{NOW_S}\n" * 4000),
    "link": a_link,
    "fifo": os.mkfifo,
    "folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=BROKEN)
def test_a_count_that_cannot_be_read_changes_nothing_until_the_next_publication(site: Site, spoil: Broken) -> None:
    site.state.mkdir(parents=True)
    path = site.state / "pilot"
    spoil(path)
    os.utime(path, (NOW_S, NOW_S), follow_symlinks=False)
    assert [site.submit(), site.submit("ask")] == [None, None]
    assert "No change: almanac could not count" in " ".join("".join(site.said).split())
    site.now_s += 1800
    site.publish()
    assert [site.submit() for _ in range(4)] == ([None] * 4 if path.is_dir() else [CHANGE] * 3 + [None])
    assert (site.state / "x").exists() == (spoil is a_link), "a link is replaced and not followed"


def test_a_foreign_file_or_no_place_for_one_changes_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert site.submit() == CHANGE
    assert site.submit(HOME="") is None
    assert site.submit(XDG_STATE_HOME="/proc") is None
    count, uid = PilotCount(str(site.state / "choices"), "train-#", 1, NOW_S - 5, NOW_S), os.getuid()
    assert count.taken() == 1
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert (count.taken(), count.add(1)) == (None, False)


def test_a_change_that_cannot_be_counted_is_not_made(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("slurm_hooks.submit.choices.write_own", full)
    assert [site.submit(), site.submit("ask")] == [None, None]
    assert site.said[-1] == "almanac: No change: almanac could not count the jobs that try it.\n"
